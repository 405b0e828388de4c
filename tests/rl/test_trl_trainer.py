"""RLTT in TRL's trainer: all weight on the last loop is TRL's own GRPO, other weights are our own objective."""

import copy
import importlib
import inspect
import sys

import pytest
import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from transformers import GPT2Config, GPT2LMHeadModel
from trl import GRPOConfig, GRPOTrainer

import looplm
from conftest import tiny_model
from looplm.data.tokenizer import CHAT_TOKENS, train_tokenizer
from looplm.models.exits import exit_log_pdf
from looplm.objectives import PolicyGradient
from looplm.objectives.loop_weights import (
    ExitWeights,
    LastLoopWeight,
    LearnedWeights,
    ProgressiveWeights,
    UniformWeights,
)
from looplm.rl.module import trajectories
from looplm.rl.trl_trainer import RLTTTrainer

PROMPTS = ["A loop thinks", "again", "before it", "answers. A loop"]
LOSSES = ["grpo", "dapo", "dr_grpo", "bnpo"]
HUGINN = {
    "prelude_layers": 1, "core_layers": 1, "coda_layers": 1, "norm_placement": "sandwich_dual", "norm_in_loop": False,
    "injection": "concat", "state_init": "normal", "exit_gate": True,
}  # fmt: skip
CLIP = {"clip_low": 0.2, "clip_high": 0.2}


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["A loop thinks again before it answers. "], 300, CHAT_TOKENS)


@pytest.fixture
def make(tokenizer, tmp_path):
    """Makes a trainer of a tiny model that lies in a folder, where TRL finds its reference."""

    def build(kind=RLTTTrainer, settings=None, model=None, reward=None, prompts=PROMPTS, **more):
        values = {
            "output_dir": str(tmp_path / "out"), "max_steps": 4, "per_device_train_batch_size": 4, "num_generations": 4,
            "max_completion_length": 6, "logging_steps": 1, "report_to": [], "use_cpu": True, "save_strategy": "no",
            "disable_tqdm": True, "bf16": False, "learning_rate": 1e-2, "optim": "sgd", "lr_scheduler_type": "constant",
        }  # fmt: skip
        if model is None:
            looplm.save(fresh(tokenizer), tmp_path / "base")
            model = looplm.load(tmp_path / "base")
        return kind(
            model.train(), reward or count_of_first, args=GRPOConfig(**(values | (settings or {}))), **more,
            train_dataset=Dataset.from_dict({"prompt": list(prompts) * 4}), processing_class=tokenizer,
        )  # fmt: skip

    return build


def fresh(tokenizer, **values):
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return tiny_model(vocab_size=len(tokenizer), **ids, **values)


def count_of_first(completion_ids, **columns):
    return [float(sum(token % 3 == 0 for token in ids)) for ids in completion_ids]


def rows(loops=3, early=False, left=0, right=0):
    """TRL's batch: prompts left-padded, completions right-padded, one of them masked as a whole, log-probs moved."""
    draw = torch.Generator().manual_seed(1)
    prompts, lengths = [5, 2, 3, 4], [6, 4, 1, 5]
    batch = {
        "prompt_ids": torch.randint(3, 200, (4, 5), generator=draw),
        "completion_ids": torch.randint(3, 200, (4, 6), generator=draw),
        "advantages": torch.tensor([1.0, -0.7, 0.4, -1.2]),
        "moved": 0.3 * torch.randn(4, 6, generator=draw),
        "prompt_mask": torch.tensor([[0] * (5 - n) + [1] * n for n in prompts]),
        "completion_mask": torch.tensor([[1] * n + [0] * (6 - n) for n in lengths]),
    }
    if early:
        batch["loops"] = torch.randint(1, loops + 1, (4, 6), generator=draw)
    pads = {"prompt": (left, 0), "completion": (0, right), "moved": (0, right), "loops": (0, right)}
    for name in batch:
        pad = pads.get(name.split("_")[0])
        if pad:
            batch[name] = torch.nn.functional.pad(batch[name], pad, value=loops if name == "loops" else 0)
    batch["num_items_in_batch"] = batch["completion_mask"].sum()
    return batch


def scored(trainer, beta, **more):
    """`rows` with old and reference log-probabilities near what the plain model says."""
    batch, trainer.current_gradient_accumulation_steps = rows(**more), 1
    ids, mask = (torch.cat([batch[f"prompt_{x}"], batch[f"completion_{x}"]], dim=1) for x in ("ids", "mask"))
    trainer._batch = {name: batch[name] for name in ("loops",) if name in batch}
    with torch.no_grad():
        now, _, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, mask, batch["completion_ids"].shape[1]
        )
    moved, batch["now"] = batch.pop("moved") * batch["completion_mask"], now
    batch["old_per_token_logps"] = now + moved
    if beta:
        batch["ref_per_token_logps"] = now - 2 * moved
    return batch


def gradients(model, loss):
    names, leaves = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, leaves, materialize_grads=True), strict=True))


def assert_same(ours, theirs, atol=1e-6):
    assert ours.keys() <= theirs.keys()
    assert any(value.abs().max() > 1e-3 for value in ours.values())
    for name, value in ours.items():
        torch.testing.assert_close(
            value, theirs[name], atol=atol, rtol=1e-5, msg=lambda text, name=name: f"{name} {text}"
        )


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("loss_type", LOSSES)
def test_all_weight_on_the_last_loop_is_trl(make, tokenizer, loss_type, beta):
    found = []
    for kind, more in ((GRPOTrainer, {}), (RLTTTrainer, {"loop_weights": LastLoopWeight()})):
        settings = {"loss_type": loss_type, "temperature": 0.7}
        trainer = make(kind, settings, fresh(tokenizer).double(), **more)
        trainer.beta = beta
        batch = scored(trainer, beta)
        loss = trainer.compute_loss(trainer.model, batch)
        found.append((loss, gradients(trainer.model, loss), dict(trainer._metrics["train"])))
    (theirs, their_grads, their_metrics), (ours, our_grads, our_metrics) = found
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6, check_dtype=False)
    assert_same(our_grads, their_grads)
    for name in ("entropy", "clip_ratio/region_mean", *(["kl"] if beta else [])):
        assert our_metrics[name] == pytest.approx(their_metrics[name], abs=1e-5)
    assert our_metrics["clip_ratio/region_mean"][0] > 0


def test_whole_runs_are_trls(make):
    """Four optimiser steps on generated text, two passes over each, old and reference log-probabilities by TRL."""
    found = []
    for kind, more in ((GRPOTrainer, {}), (RLTTTrainer, {"loop_weights": LastLoopWeight()})):
        settings = {
            "beta": 0.1, "num_iterations": 2, "steps_per_generation": 2, "per_device_train_batch_size": 2,
            "learning_rate": 1e-3,
        }  # fmt: skip
        trainer = make(kind, settings, **more)
        trainer.train()
        found.append((trainer.state.log_history, trainer.model.state_dict()))
    (their_log, theirs), (our_log, ours) = found
    assert [x.get("loss") for x in our_log] == pytest.approx([x.get("loss") for x in their_log], abs=1e-5)
    assert_same(ours, theirs, atol=1e-5)


def weights_of(loss_type, batch):
    mask = batch["completion_mask"].double()
    if loss_type == "grpo":
        return mask / mask.sum(1, keepdim=True) / len(mask)
    return mask / {"dr_grpo": 6 * len(mask), "bnpo": mask.sum(), "dapo": mask.sum()}[loss_type]


def ours_of(model, batch, loss_type, beta, objective):
    """The loss of our own objective on TRL's batch."""
    ids, mask = (torch.cat([batch[f"prompt_{x}"], batch[f"completion_{x}"]], dim=1) for x in ("ids", "mask"))
    keep, full = batch["completion_ids"].shape[1], torch.full_like(ids, 3)
    place = {"advantages": batch["advantages"][:, None].expand(-1, keep), "sampled": batch["old_per_token_logps"]}
    place |= {
        "weights": weights_of(loss_type, batch),
        "reference": batch.get("ref_per_token_logps", 0 * mask[:, -keep:]),
    }
    laid = {name: torch.zeros(ids.shape, dtype=torch.float64) for name in place}
    for name, values in place.items():
        laid[name][:, -keep:] = values
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :-keep] = -100
    laid |= {"input_ids": ids, "attention_mask": mask, "labels": labels}
    laid |= {"exits": full.clone(), "read": full.clone(), "key_loops": full.clone()}
    for row, loops in enumerate(batch.get("loops", [])):
        for token, loop in enumerate(loops):
            place = ids.shape[1] - keep + token
            laid["exits"][row, place] = laid["read"][row, place - 1] = loop
            if token:
                laid["key_loops"][row, place - 1] = loop
    if "exit_log_pdf" in batch:
        laid["exit_log_pdf"] = torch.zeros(*ids.shape, 3, dtype=torch.float64)
        laid["exit_log_pdf"][:, -keep:] = batch["exit_log_pdf"]
    return objective(model, trajectories(model, laid, 3, objective), laid)[0]


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(
    "rule",
    [UniformWeights(), ProgressiveWeights(gamma=2), ExitWeights(), ExitWeights(live=True), LastLoopWeight()],
    ids=str,
)
def test_other_weights_are_our_objective(make, tokenizer, rule, early):
    for loss_type, beta in zip(LOSSES, (0.0, 0.3, 0.0, 0.5), strict=True):
        settings = {"loss_type": loss_type, "temperature": 0.7, "use_bias_correction_kl": False}
        trainer = make(settings=settings, model=fresh(tokenizer).double(), loop_weights=rule)
        trainer.beta = beta
        batch = scored(trainer, beta, early=early)
        if isinstance(rule, ExitWeights) and beta:
            draw = torch.randn(4, 6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
            batch["exit_log_pdf"] = exit_log_pdf(draw)
        ours = trainer.compute_loss(trainer.model, batch)
        objective = PolicyGradient(loop_weights=rule, kl=beta, temperature=0.7, **CLIP)
        theirs = ours_of(trainer.model, batch, loss_type, beta, objective)
        torch.testing.assert_close(ours.double(), theirs, atol=1e-6, rtol=1e-6)
        assert_same(gradients(trainer.model, ours), gradients(trainer.model, theirs))
        assert any("exit_gate" in name and p.requires_grad for name, p in trainer.model.named_parameters()) == (
            isinstance(rule, ExitWeights) and rule.live
        )


@pytest.mark.parametrize("corrected", [False, True])
def test_the_kl_is_that_of_grpo_whatever_the_weights(make, tokenizer, corrected):
    """With a reference the gradient changes as much as that of GRPO does, bias correction or not."""
    added = []
    for rule in (LastLoopWeight(), UniformWeights(), ExitWeights(live=True)):
        settings, found = {"use_bias_correction_kl": corrected}, []
        trainer = make(settings=settings, model=fresh(tokenizer).double(), loop_weights=rule)
        batch = scored(trainer, 0.3, early=True)
        batch["ref_per_token_logps"][1] = batch["now"][1]  # where the KL is 0
        for trainer.beta in (0.0, 0.3):
            found.append(gradients(trainer.model, trainer.compute_loss(trainer.model, batch)))
        added.append({name: found[1][name] - value for name, value in found[0].items()})
    assert_same(added[1], added[0], atol=1e-6)
    gate = {name: 0 * value for name, value in added[2].items() if "exit_gate" in name}
    assert_same(added[2], added[0] | gate, atol=1e-6)


@pytest.mark.parametrize("early", [False, True])
def test_padding_on_either_side_changes_nothing(make, tokenizer, early):
    trainer = make(model=fresh(tokenizer).double(), loop_weights=UniformWeights())
    found = []
    for pads in ({}, {"left": 3, "right": 2}):
        loss = trainer.compute_loss(trainer.model, scored(trainer, 0.0, early=early, **pads))
        found.append((loss, gradients(trainer.model, loss)))
    torch.testing.assert_close(found[0][0], found[1][0], atol=1e-9, rtol=0)
    assert_same(found[0][1], found[1][1], atol=1e-9)


def test_without_gradient_it_is_the_emitting_loop_and_parts_are_the_whole(make, tokenizer):
    model = fresh(tokenizer).double()
    trainer = make(model=model, settings={"temperature": 0.7}, loop_weights=UniformWeights())
    batch = rows(early=True)
    trainer._batch = {"loops": batch["loops"]}
    ids, mask = (torch.cat([batch[f"prompt_{x}"], batch[f"completion_{x}"]], dim=1) for x in ("ids", "mask"))
    whole, entropy, aux = trainer._get_per_token_logps_and_entropies(model, ids, mask, 6, compute_entropy=True)
    with torch.no_grad():
        parts, none, _ = trainer._get_per_token_logps_and_entropies(model, ids, mask, 6, batch_size=3)
    assert aux is None
    assert none is None
    torch.testing.assert_close(whole.detach(), parts, atol=1e-12, rtol=0)
    trainer._batch = {"loops": torch.full((4, 6), 3)}
    with torch.no_grad():
        plain, entropy, _ = trainer._get_per_token_logps_and_entropies(model, ids, mask, 6, compute_entropy=True)
        logits = looplm.LoopLMForCausalLM.forward(model, ids, mask).logits[:, -7:-1] / 0.7
    log_p = logits.log_softmax(-1)
    kept = batch["completion_mask"].bool()
    torch.testing.assert_close(plain, log_p.gather(-1, batch["completion_ids"][..., None])[..., 0] * kept)
    torch.testing.assert_close(entropy, -(log_p.exp() * log_p).sum(-1) * kept)
    assert not torch.allclose(plain, parts)


def test_the_entropy_bonus_has_trls_gradient(make, tokenizer):
    found = []
    for kind, more in ((GRPOTrainer, {}), (RLTTTrainer, {"loop_weights": LastLoopWeight()})):
        trainer = make(kind, {"entropy_coef": 0.5}, fresh(tokenizer).double(), **more)
        found.append(gradients(trainer.model, trainer.compute_loss(trainer.model, scored(trainer, 0.0))))
    assert_same(found[1], found[0])


# Rollouts at any depth ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kv", "parts"), [("full", {}), ("recomputed", {}), ("full", HUGINN)], ids=["full", "recomputed", "coda"]
)
def test_rollouts_that_leave_early_are_replayed(make, tokenizer, kv, parts):
    """At rate 0 three passes over shuffled parts find each token's own log-probability, at its own loop."""
    seen = []

    def reward(completion_ids, loops, **columns):
        seen.extend(zip(completion_ids, loops, strict=True))
        return [float(sum(row)) for row in loops]

    settings = {
        "learning_rate": 0.0, "num_iterations": 3, "steps_per_generation": 2, "max_steps": 8, "temperature": 0.6,
        "pad_to_multiple_of": 8,
    }  # fmt: skip
    model = fresh(tokenizer, **parts)
    trainer = make(settings=settings, model=model, reward=reward, depth=looplm.ExitCDF(0.5), engine={"kv": kv})
    trainer.train()
    assert {loop for _, row in seen for loop in row} == {1, 2, 3}
    assert all(len(ids) == len(row) for ids, row in seen)
    log = [record for record in trainer.state.log_history if "sampling/drift" in record]
    assert len(log) == 8
    assert max(record["sampling/drift"] for record in log) < 1e-5
    assert max(record["clip_ratio/region_mean"] for record in log) == 0
    assert len(trainer._buffered_inputs) == 2


def test_training_with_early_exit_moves_the_policy_and_evaluates(make):
    trainer = make(settings={"num_iterations": 2, "beta": 0.1}, depth=looplm.ExitCDF(0.5))
    before = copy.deepcopy(trainer.model.state_dict())
    trainer.train()
    after = trainer.model.state_dict()
    assert all(torch.equal(after[name], before[name]) == ("exit_gate" in name) for name in before)
    trainer.model.eval()
    assert trainer.evaluate(Dataset.from_dict({"prompt": PROMPTS}))["eval_sampling/drift"] < 1e-5


def test_rollouts_are_of_the_weights_as_they_are(make):
    """A long chat comes again after an update: what the engine keeps of its prompt would be of the weights before."""
    chat = [{"role": "user", "content": "A loop thinks again before it answers. " * 8}]
    trainer = make(settings={"learning_rate": 0.1, "max_steps": 3}, prompts=[chat], depth=looplm.ExitCDF(0.5))
    trainer.train()
    assert len(trainer._buffered_inputs[0]["prompt_ids"][0]) > 32
    assert max(record.get("sampling/drift", 0) for record in trainer.state.log_history) < 1e-5


@pytest.mark.parametrize("how", ["forgotten", "shuffled"])
def test_rollouts_replayed_wrongly_are_refused(make, monkeypatch, how):
    score = RLTTTrainer._generate_and_score_completions

    def spoilt(self, inputs):
        output = score(self, inputs)
        wrong = torch.full_like(output["loops"], 3) if how == "forgotten" else output["loops"].flip(0)
        return output | {"loops": wrong}

    monkeypatch.setattr(RLTTTrainer, "_generate_and_score_completions", spoilt)
    trainer = make(depth=looplm.ExitCDF(0.5), settings={"temperature": 0.6})
    with pytest.raises(ValueError, match=r"from the sampler's on average, more than max_drift=0\.001"):
        trainer.train()


def test_fixed_depth_of_another_count_is_the_depth_of_training(make):
    trainer = make(settings={"learning_rate": 0.0, "max_steps": 1}, depth=looplm.FixedLoops(2))
    trainer.train()
    assert trainer.state.log_history[0]["sampling/drift"] < 1e-5
    assert trainer.loops == 2


def test_later_updates_weigh_loops_by_the_gate_that_sampled(make):
    trainer = make(settings={"num_iterations": 2, "max_steps": 2, "learning_rate": 1.0}, depth=looplm.ExitCDF(0.5))
    before = copy.deepcopy(trainer.model)
    trainer.train()
    (batch,) = trainer._buffered_inputs
    trainer._batch = batch
    ids, mask = (torch.cat([batch[f"prompt_{x}"], batch[f"completion_{x}"]], dim=1) for x in ("ids", "mask"))
    laid = trainer._replayed(ids, mask, batch["completion_ids"].shape[1])
    kept = batch["completion_mask"].bool()
    with torch.no_grad():
        then, now = (
            exit_log_pdf(trajectories(model, laid, 3, trainer.policy_gradient).gate_logits)[:, -kept.shape[1] - 1 : -1]
            for model in (before, trainer.model)
        )
    torch.testing.assert_close(batch["exit_log_pdf"][kept], then[kept], atol=1e-5, rtol=0)
    assert (then - now)[kept].abs().max() > 1e-3


def test_a_rollout_function_may_tell_loops(make, tokenizer):
    def rollout(prompts, trainer):
        return inner._roll_out(prompts, trainer) | ({"loops": [[9]] * len(prompts)} if wrong else {})

    wrong, settings = False, {"learning_rate": 0.0, "max_steps": 1}
    inner = make(depth=looplm.ExitCDF(0.5), settings=settings)
    trainer = make(rollout_func=rollout, settings=settings)
    trainer.train()
    assert trainer.state.log_history[0]["sampling/drift"] < 1e-5
    wrong = True
    with pytest.raises(ValueError, match="rollouts must tell 1 to 3 loops for each token"):
        make(rollout_func=rollout, settings=settings).train()


def test_adapters_alone_move_and_the_reference_is_the_model_without_them(make):
    lora = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match="adapters do not go with depth"):
        make(peft_config=lora, depth=looplm.ExitCDF(0.5))
    trainer = make(settings={"beta": 0.1, "num_iterations": 2}, peft_config=lora)
    before = copy.deepcopy(trainer.model.state_dict())
    trainer.train()
    after = trainer.model.state_dict()
    assert all(
        torch.equal(after[name], before[name]) == ("lora_" not in name) for name in before if "lora_A" not in name
    )
    log = [record for record in trainer.state.log_history if "kl" in record]
    assert log[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert log[-1]["kl"] > 0


# What is saved and refused ------------------------------------------------------------------------------------


def test_what_is_saved_is_a_looped_model(make, tmp_path):
    trainer = make(settings={"max_steps": 1}, loop_weights=ProgressiveWeights())
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    again, ids = looplm.load(tmp_path / "saved"), torch.arange(3, 9)[None]
    with torch.no_grad():
        assert torch.equal(again(ids).logits, trainer.model.eval()(ids).logits)
    assert trainer.model(ids, loops=2).logits.shape == (1, 6, again.config.vocab_size)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"loop_weights": LearnedWeights()}, "trained by `looplm rl`"),
        ({"loop_weights": "uniform"}, "takes no loop_weights=uniform"),
        ({"engine": {"stop": ["a"]}}, "may name kv, max_prompt, max_rows, kv_bytes"),
        ({"settings": {"importance_sampling_level": "sequence", "beta": 0.1}}, "set use_bias_correction_kl=False"),
        ({"settings": {"cast_lm_head_to_fp32": True}}, "does not support cast_lm_head_to_fp32"),
        ({"settings": {"max_completion_length": None}, "depth": looplm.FixedLoops(2)}, "does not go with depth"),
        ({"settings": {"top_k": 5}, "depth": looplm.FixedLoops(2)}, "top_k=5 does not go with depth"),
        ({"rollout_func": print, "depth": looplm.FixedLoops(2)}, "does not go with depth"),
        ({"depth": 2}, "depth"),
        ({"depth": looplm.FixedLoops(2), "engine": {"kv": "last"}}, "kv='last'"),
    ],
    ids=str,
)
def test_what_it_cannot_do_is_refused(make, more, message):
    with pytest.raises(ValueError, match=message) as caught:
        make(**more)
    assert "\n" not in str(caught.value)


def test_models_without_a_gate_and_of_others_are_refused(make, tokenizer):
    with pytest.raises(ValueError, match="read an exit gate, which this model has not"):
        make(model=fresh(tokenizer, exit_gate=False))
    other = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=300, n_positions=64))
    with pytest.raises(ValueError, match="trains looplm's models, not GPT2LMHeadModel"):
        make(model=other)


def test_another_trl_is_refused(make, monkeypatch):
    monkeypatch.setattr(trl, "__version__", "1.17.0")
    with pytest.raises(ValueError, match=r"works with trl 1\.16\.\*, not 1\.17\.0"):
        make()


def test_trl_is_optional(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    monkeypatch.setattr(looplm, "rl", looplm.rl)  # what is imported anew below goes again
    for name in [name for name in sys.modules if name.startswith("looplm.rl")]:
        monkeypatch.delitem(sys.modules, name)
    assert importlib.import_module("looplm.rl").Question
    with pytest.raises(ImportError, match=r"^RLTTTrainer needs trl 1\.16: pip install 'looplm\[rl\]'$"):
        importlib.import_module("looplm.rl.trl_trainer")


def test_trl_has_the_signatures_that_the_trainer_relies_on():
    """Where this fails, another TRL is installed: look at each override again."""
    wanted = {
        "_get_per_token_logps_and_entropies": [
            "self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy",
            "compute_aux_loss", "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask",
            "spatial_shapes", "num_tiles", "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids",
        ],
        "_compute_loss": ["self", "model", "inputs"],
        "_generate": ["self", "prompts"],
        "_generate_and_score_completions": ["self", "inputs"],
        "_tokenize_prompts": ["self", "prompts"],
        "_prepare_inputs": ["self", "generation_batch"],
    }  # fmt: skip
    found = {name: list(inspect.signature(getattr(GRPOTrainer, name)).parameters) for name in wanted}
    assert found == wanted
    assert list(inspect.signature(GRPOTrainer).parameters)[:4] == ["model", "reward_funcs", "args", "train_dataset"]
    assert {"use_vllm", "cast_lm_head_to_fp32", "use_bias_correction_kl", "top_p", "top_k", "min_p"} <= set(
        inspect.signature(GRPOConfig).parameters
    )
