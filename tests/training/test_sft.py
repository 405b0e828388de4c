"""Supervised fine-tuning, full or by LoRA: answers end, only adapters move, folders open in looplm and in PEFT."""

import json
import shutil

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from typer.testing import CliRunner

import looplm
from conftest import tiny_config
from looplm.cli.main import app
from looplm.data.tokenizer import CHAT_TOKENS, train_tokenizer
from looplm.models.convert.duplicate import duplicate_core
from looplm.training import load_recipe, train
from looplm.training.adapters import Lora, add_adapter

TALKS = [("What is two plus two?", "It is four."), ("And three plus three?", "Six.")]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    tokenizer = train_tokenizer([text for talk in TALKS for text in talk], 300, CHAT_TOKENS)
    torch.manual_seed(0)
    config = tiny_config(vocab_size=len(tokenizer), initializer_range=0.1, eos_token_id=tokenizer.eos_token_id)
    looplm.save(looplm.LoopLMForCausalLM(config), folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def talks(tmp_path_factory):
    path = tmp_path_factory.mktemp("talks") / "chat.jsonl"
    records = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in TALKS
    ]  # fmt: skip
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def recipe(base, talks, out, *overrides):
    common = [
        f"out={out}", "data.length=128", "data.rows=2", "micro_rows=1", "data.sources.chat.held_out=0.0",
        "optimizer.lr=0.01", "epochs=null", "steps=60", *overrides,
    ]  # fmt: skip
    return load_recipe("sft", common, {"init_from": str(base), "data.sources.chat.path": str(talks)})


def answer(checkpoint, question):
    model, tokenizer = looplm.load(checkpoint), looplm.load_tokenizer(checkpoint)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    made = model.generate(**prompt, max_new_tokens=40, do_sample=False, eos_token_id=end)
    return tokenizer.decode(made[0, prompt["input_ids"].shape[1] :])


def test_an_overfitted_answer_ends_by_itself(base, talks, tmp_path):
    done = train(recipe(base, talks, tmp_path / "run"))
    for question, wanted in TALKS:
        assert answer(done.checkpoint, question) == f"{wanted}<|im_end|>"


def test_lora_moves_adapters_alone_and_opens_everywhere(base, talks, tmp_path):
    lora = "lora={rank: 4, alpha: 8.0}"
    done = train(recipe(base, talks, tmp_path / "run", lora, "steps=8", "save_every=4"))
    before, after = (load_file(folder / "model.safetensors") for folder in (base, done.checkpoint))
    changed = {name for name in before if not before[name].equal(after[name])}
    assert changed == {
        name for name in before if "core." in name and name.endswith("proj.weight")
    }  # merged: the targets and nothing else
    ids = torch.arange(1, 9)[None]
    merged = looplm.load(done.checkpoint)(ids, loops=4).logits
    assert not torch.allclose(merged, looplm.load(base)(ids, loops=4).logits)
    adapted = PeftModel.from_pretrained(looplm.load(base), done.checkpoint / "adapter")
    torch.testing.assert_close(adapted(input_ids=ids, loops=4).logits, merged, atol=1e-5, rtol=1e-5)


def test_a_lora_run_resumes_bit_for_bit(base, talks, tmp_path):
    lora = ("lora={rank: 4, alpha: 8.0}", "steps=8", "save_every=4")
    whole = train(recipe(base, talks, tmp_path / "whole", *lora))
    first = train(recipe(base, talks, tmp_path / "parts", *lora))
    for path in sorted(first.checkpoint.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    first.checkpoint.rmdir()
    again = train(recipe(base, talks, tmp_path / "parts", *lora))
    for name in ("model.safetensors", "adapter/adapter_model.safetensors"):
        a, b = load_file(whole.checkpoint / name), load_file(again.checkpoint / name)
        assert all(a[key].equal(b[key]) for key in a)


@pytest.mark.parametrize("objective", ["{kind: expected_loss, beta: 0.05}", "{kind: gate_regression}"])
def test_any_objective_will_do(base, talks, tmp_path, objective):
    done = train(recipe(base, talks, tmp_path / "run", f"objective={objective}", "steps=3"))
    assert done.finished


def test_a_core_with_adapters_is_not_duplicated(base):
    model = looplm.load(base)
    add_adapter(model, Lora(rank=2), seed=0)
    with pytest.raises(ValueError, match=r"holds no 'model.core.0.*'; if it carries adapters, merge them"):
        duplicate_core(model)


def test_a_new_model_takes_no_adapter(talks, tmp_path):
    with pytest.raises(ValueError, match="lora changes a trained model; give init_from"):
        load_recipe("exit_prior", ["lora={rank: 4}"])


def test_changes_of_a_checkpoint_that_would_need_other_tensors_are_refused(base, talks, tmp_path):
    with pytest.raises(ValueError, match="would change the tensor"):
        train(recipe(base, talks, tmp_path / "run", "model={hidden_size: 64}"))
    done = train(recipe(base, talks, tmp_path / "run", "model={rope_theta: 5000.0}", "loops=5", "steps=1"))
    config = looplm.load(done.checkpoint).config
    assert (config.rope_theta, config.loops) == (5000.0, 5)


@pytest.mark.parametrize("target", ["q_porj", "core", "proj", "norm"])
def test_an_adapters_target_that_names_no_projection_is_refused(base, talks, tmp_path, target):
    known = "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj$"
    with pytest.raises(ValueError, match=f"lora.targets: this model has no projection '{target}', only {known}"):
        train(recipe(base, talks, tmp_path / "run", f"lora={{rank: 2, targets: [v_proj, {target}]}}"))
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_beyond_the_models_embedding_is_refused(base, talks, tmp_path):
    shutil.copytree(base, tmp_path / "wider")
    tokenizer = looplm.load_tokenizer(base)
    greatest = len(tokenizer)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(tmp_path / "wider")
    with pytest.raises(ValueError, match=f"ids reach {greatest}, but the model embeds {greatest} tokens only"):
        train(recipe(tmp_path / "wider", talks, tmp_path / "run"))
    assert not (tmp_path / "run").exists()
    model = looplm.load(base)
    model.resize_token_embeddings(greatest + 1)
    looplm.save(model, tmp_path / "wider")
    assert train(recipe(tmp_path / "wider", talks, tmp_path / "run", "steps=1")).finished


def test_the_command_line(base, talks, tmp_path):
    overrides = ["data.length=128", "data.rows=2", f"out={tmp_path / 'run'}", "epochs=1"]
    done = CliRunner().invoke(app, ["sft", str(base), str(talks), *overrides])
    assert done.exit_code == 0, done.output
    assert "checkpoint: " in done.output
    averaged = CliRunner().invoke(app, ["average", str(tmp_path / "run"), str(tmp_path / "mean")])
    assert "averaged 1 checkpoints" in averaged.output
    assert looplm.load(tmp_path / "mean").config.loops == 3
    (tmp_path / "t.txt").write_text("It is four. " * 30)
    written = CliRunner().invoke(app, ["tokenize", str(tmp_path / "t.txt"), str(base), str(tmp_path / "shards")])
    assert "tokens of 1 documents" in written.output, written.output


def test_left_out_conversations_are_counted_in_the_log(base, talks, tmp_path):
    longer = tmp_path / "chat.jsonl"
    record = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "far too long " * 30}]}
    longer.write_text(talks.read_text() + json.dumps(record) + "\n")
    train(recipe(base, longer, tmp_path / "run", "steps=2"))
    first = json.loads((tmp_path / "run" / "log.jsonl").read_text().splitlines()[0])
    assert first == {"step": 0, "dropped/chat": 1}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["lora={rank: 2}", "objective={kind: gate_regression}"], "lora adapts the core, which objective"),
        (["lora={rank: 2, targets: [q_proj, lm_head]}"], "'lm_head' is not read through its module"),
        (["stability={form: {kind: jacobian_vector}}", "parallel=fsdp"], "cannot go through FSDP's shards"),
        (["optimizer.betas=[0.9]"], "optimizer.betas"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything(base, talks, tmp_path, overrides, message):
    with pytest.raises(ValueError, match=message):
        recipe(base, talks, tmp_path / "run", *overrides)
