"""Other people's trainers and adapters on our models, unmodified: Trainer, PEFT, TRL."""

import pytest
import torch
from datasets import Dataset
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from transformers import Trainer, TrainingArguments
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

import looplm
from conftest import GOLDEN, random_ids, tiny_model
from looplm.data.tokenizer import train_tokenizer
from looplm.objectives import ExpectedLoss

TEXT = "A loop thinks again before it answers. "
FAMILIES = {
    "ouro": {},
    "huginn": {
        "prelude_layers": 1, "coda_layers": 1, "norm_placement": "sandwich_dual", "norm_in_loop": False,
        "injection": "concat", "state_init": "normal", "rope": "adjacent", "qk_bias": True, "exit_gate": False,
        "tie_word_embeddings": True,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = train_tokenizer([TEXT], 300)
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    return tokenizer


@pytest.fixture(params=list(FAMILIES))
def model(request, tokenizer):
    values = FAMILIES[request.param] | {"vocab_size": len(tokenizer), "initializer_range": 0.05}
    return tiny_model(**values, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id).train()


def arguments(kind, folder, **changes):
    return kind(
        output_dir=str(folder), max_steps=12, per_device_train_batch_size=4, learning_rate=1e-2, logging_steps=1,
        report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True, **changes,
    )  # fmt: skip


def losses(trainer):
    return [record["loss"] for record in trainer.state.log_history if "loss" in record]


def test_trainer_trains_evaluates_and_predicts(model, tmp_path):
    rows = random_ids(16, 12, vocab=200)
    data = Dataset.from_dict({"input_ids": rows.tolist(), "labels": rows.tolist()})
    trainer = Trainer(model, arguments(TrainingArguments, tmp_path), train_dataset=data, eval_dataset=data)
    trainer.train()
    assert losses(trainer)[-1] < losses(trainer)[0]
    assert trainer.evaluate()["eval_loss"] > 0
    predicted = trainer.predict(data)
    assert predicted.predictions.shape == (16, 12, model.config.vocab_size)


def test_trainer_accumulation_equals_the_full_batch(model, tmp_path):
    """Samples of 3, 5, 9 and 20 targets (field report R28)."""
    rows = random_ids(4, 21, vocab=200)
    labels = rows.clone()
    for row, targets in enumerate((3, 5, 9, 20)):
        labels[row, targets + 1 :] = -100
    data = Dataset.from_dict({"input_ids": rows.tolist(), "labels": labels.tolist()})
    found = []
    for size, steps in ((4, 1), (1, 4)):
        fresh = looplm.LoopLMForCausalLM(model.config)
        fresh.load_state_dict(model.state_dict())
        settings = TrainingArguments(
            output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=size, gradient_accumulation_steps=steps,
            learning_rate=0.1, optim="sgd", max_grad_norm=0, report_to=[], use_cpu=True, save_strategy="no",
            disable_tqdm=True, lr_scheduler_type="constant",
        )  # fmt: skip
        Trainer(fresh, settings, train_dataset=data).train()
        found.append(fresh.state_dict())
    for name, whole in found[0].items():
        torch.testing.assert_close(found[1][name], whole, atol=1e-6, rtol=1e-5, msg=name)


def test_lora_trains_merges_saves_and_reloads(model, tmp_path):
    ids = random_ids(4, 10, vocab=200)
    looplm.save(model, tmp_path / "base")
    base = looplm.load(tmp_path / "base")
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    adapted = get_peft_model(base, lora)
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    history = []
    for _ in range(10):
        loss = adapted(ids, labels=ids, loops=4).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss.item())
    assert history[-1] < history[0]
    adapted.eval()
    with torch.no_grad():
        wanted = {loops: adapted(ids, loops=loops).logits for loops in (1, 3, 5)}
        assert not torch.allclose(wanted[3], looplm.load(tmp_path / "base")(ids, loops=3).logits, atol=1e-3)
        adapted.save_pretrained(tmp_path / "adapter")
        again = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
        merged = adapted.merge_and_unload()
        for loops, logits in wanted.items():
            assert (again(ids, loops=loops).logits - logits).abs().max() <= 1e-5
            assert (merged(ids, loops=loops).logits - logits).abs().max() <= 1e-5
        looplm.save(merged, tmp_path / "merged")
        reloaded = looplm.load(tmp_path / "merged")
        assert torch.equal(reloaded(ids).logits, merged(ids).logits)


@pytest.mark.parametrize(
    "layout", [{"max_length": 32}, {"max_length": 32, "packing": True}, {"max_length": None, "padding_free": True}]
)
@pytest.mark.filterwarnings("ignore")
def test_sft_trainer(model, tokenizer, tmp_path, layout):
    data = Dataset.from_dict({"text": [TEXT * 2] * 16})
    settings = arguments(SFTConfig, tmp_path, **layout)
    trainer = SFTTrainer(model, settings, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    assert losses(trainer)[-1] < losses(trainer)[0]


def test_the_fused_head_of_trl_gives_our_loss(model, tokenizer, tmp_path):
    """TRL reads `base_model(...).last_hidden_state`: it must be what our own head reads."""
    data = Dataset.from_dict({"text": [TEXT] * 4})
    trainer = SFTTrainer(
        model, arguments(SFTConfig, tmp_path, max_length=32), train_dataset=data, processing_class=tokenizer
    )
    batch = next(iter(trainer.get_train_dataloader()))
    wanted = looplm.LoopLMForCausalLM.forward(
        model, **{k: v for k, v in batch.items() if k in ("input_ids", "attention_mask", "labels")}
    ).loss
    torch.testing.assert_close(trainer.compute_loss(model, dict(batch)), wanted, atol=1e-5, rtol=1e-5)


def test_dpo_trainer(model, tokenizer, tmp_path):
    looplm.save(model, tmp_path / "base")
    data = Dataset.from_dict({
        "prompt": ["A loop "] * 8, "chosen": ["thinks again before it answers."] * 8, "rejected": ["again again."] * 8,
    })  # fmt: skip
    policy = looplm.load(tmp_path / "base").train()
    trainer = DPOTrainer(
        policy, args=arguments(DPOConfig, tmp_path, max_length=48), train_dataset=data, processing_class=tokenizer
    )  # the reference model is opened again by TRL, from the folder
    trainer.train()
    assert losses(trainer)[0] == pytest.approx(0.6931, abs=1e-3)  # log 2 before the first step
    assert losses(trainer)[-1] < 0.6


def test_lora_reaches_the_exit_gate(tmp_path):
    model, ids = tiny_model().train(), random_ids(2, 6)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["exit_gate"], init_lora_weights=False))
    ExpectedLoss()(adapted.base_model.model, adapted.base_model.model.model(ids, keep_loops="all"), {"labels": ids})[
        0
    ].backward()
    assert all(p.grad is not None for name, p in adapted.named_parameters() if "lora_" in name)
    adapted.eval()
    with torch.no_grad():
        before = adapted(ids).gate_logits
        merged = adapted.merge_and_unload()
        torch.testing.assert_close(merged(ids).gate_logits, before, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["ouro-tiny", "huginn-tiny"])
def test_trl_opens_released_folders_by_path(family, tokenizer, tmp_path):
    data = Dataset.from_dict({"text": [TEXT] * 8})
    settings = arguments(SFTConfig, tmp_path, max_length=16)
    trainer = SFTTrainer(str(GOLDEN / family), settings, train_dataset=data, processing_class=tokenizer)
    assert type(trainer.model) is looplm.LoopLMForCausalLM
    trainer.train()
