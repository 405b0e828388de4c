"""Study: keys and values shared between loops, in decoding and in prefill: quality and bytes."""

import statistics
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional as F

from looplm.analysis.plots import dots
from looplm.data.tokenizer import encode
from looplm.engine.kv_policies import BY_NAME
from looplm.models.accounting import kv_bytes_per_token
from looplm.studies.kv_reading import Phase, read_shared
from looplm.studies.study import Job, Outcome, Results, Scale, Study, Verdict, above
from looplm.studies.trained import Run, Stage, Trained
from looplm.tasks import Chain
from looplm.training.data_recipe import TaskSource
from looplm.training.mixture import Mixture

SHARED = ("last", "averaged", "first")
PHASES: tuple[Phase, ...] = ("generated", "decoding", "prefill", "both")
SHAPES = {"1x4": 1, "2x4": 2}
_FULL = "full"
_QUESTIONS, _TEST_SEED = 1024, 2 * 10**9  # seeds past those of training and its held-out rows
_CLOSE, _MUCH = 0.02, 0.1  # accuracy
_PAPER = (
    "steps=30000", "loops=4", "data.length=4096", "data.rows=1024", "vocab_size=49152",
    "data.sources.text.path=hub:HuggingFaceFW/fineweb-edu", "data.sources.chain.task.entities=200",
    "data.sources.chain.task.relations=10", "model.hidden_size=2048", "model.intermediate_size=5632",
    "model.num_attention_heads=16", "micro_rows=1", "precision=bfloat16",
    "checkpointing=loop", "optimizer.lr=3.0e-4", "model.embedding_initializer_range=0.02",
    "model.max_position_embeddings=65536",
)  # fmt: skip
_PAPER_LAYERS = 24  # times the shapes' layers: 1.4B and 2.6B parameters
_OVERRIDES: dict[Scale, tuple[str, ...]] = {
    "paper": _PAPER,
    "cpu": (),
    "smoke": (
        "steps=4", "log_every=2", "data.rows=5", "data.length=64", "data.sources.text.held_out_rows=16",
        "data.sources.chain.held_out_questions=16",
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class KVStudy(Study):
    """One model a shape and seed, read under every strategy in every phase."""

    name: ClassVar[str] = "kv"
    title: ClassVar[str] = "Keys and values shared between loops"
    claim: ClassVar[str] = (
        "decoding may keep the last loop's keys and values alone, or their average over loops, at a quarter of the "
        "memory (GSM8K 78.92 full, 78.85 last, 78.73 averaged), but not the first loop's (18.73); sharing in prefill "
        "costs more than 10 points (Ouro, arXiv 2510.25741, Table 14; 1.4B, 4 loops)."
    )
    setting: ClassVar[str] = (
        "one core layer of width 96 looped 4 times, and two, trained in full on Python's manual and on chains of hops "
        "whose answers are written out (four entities, each two hops from the one before; 12 entities, 3 relations). "
        "`accuracy` is of whole answers to held-out chains, `text loss` of the second half of held-out windows, in "
        "nats a token, read one by one. decoding: the prompt is read with every loop's own keys, then the strategy's "
        "slots alone are left and used; generated: the same, but all of the prompt's are left; prefill: the prompt's "
        "tokens are read one after the other, every loop seeing of earlier tokens only the strategy's slot, while "
        "later tokens see each loop's own; both: the slots alone throughout. KiB are those kept for a generated token."
    )
    chance: ClassVar[str] = "guessing entities gets 12^-4 = 0.00005 of the answers"

    def jobs(self, scale: Scale, seeds: int) -> dict[str, list[Job]]:
        """One layer looped, and two."""
        return {shape: [_job(scale, layers, seed) for seed in range(seeds)] for shape, layers in SHAPES.items()}

    def rows(self, results: Results) -> Results:
        """A row for every shape, strategy and phase."""
        return {
            f"{shape}: {way}": [_of(way, outcome) for outcome in runs]
            for shape, runs in results.items()
            for way in dict.fromkeys(map(_way_of, runs[0].values))
        }

    def verdicts(self, results: Results) -> list[Verdict]:
        """The paper's table, phase by phase."""
        rows, found = self.rows(results), []
        for shape in results:
            found += [_close(rows, shape, f"{name}, decoding") for name in ("last", "averaged")]
            last, first = (f"{shape}: {name}, decoding" for name in ("last", "first"))
            found.append(above(rows, "accuracy", last, first, f"{shape}: 'last' above 'first' in decoding", "accuracy"))
            found += [_costs(rows, shape, f"{name}, prefill") for name in SHARED]
        return found

    def figures(self, results: Results) -> dict[str, tuple[Figure, str]]:
        """Accuracy by strategy and phase, a figure for each shape."""
        rows = self.rows(results)
        return {
            f"accuracy_{shape}": (
                dots(_points(rows, shape), "kept", "accuracy of whole answers"),
                f"{shape}: accuracy by what is kept of the loops' keys and values; a bar spans the seeds.",
            )
            for shape in results
        }


def measure(run: Run) -> Outcome:
    """Accuracy on held-out chains and loss on held-out text under every strategy in every phase, and bytes a token."""
    chains, prompt = _chains(run)
    text = _windows(run)
    config, dtype = run.model.config, run.model.lm_head.weight.dtype
    values = {}
    ways: list[tuple[str, Phase]] = [(_FULL, "decoding"), *((name, phase) for name in SHARED for phase in PHASES)]
    for name, phase in ways:
        way = name if name == _FULL else f"{name}, {phase}"
        policy = BY_NAME[name]
        answers = read_shared(run.model, chains, prompt, policy, phase).argmax(-1) == chains[:, prompt:]
        half = text.shape[1] // 2
        read = read_shared(run.model, text, half, policy, phase)
        slots = config.loops if phase == "prefill" else policy.slots(config.loops)
        values |= {
            f"{way}: accuracy": answers.all(-1).double().mean().item(),
            f"{way}: accuracy of tokens": answers.double().mean().item(),
            f"{way}: text loss": F.cross_entropy(read.flatten(0, 1), text[:, half:].flatten()).item(),
            f"{way}: KiB per token": kv_bytes_per_token(config, slots, dtype) / 1024,
        }
    return Outcome(values=values)


def _chains(run: Run) -> tuple[Tensor, int]:
    """Held-out questions with their answers [N, S], all of one length, and the prompt's length."""
    source = run.recipe.data.sources["chain"]
    assert isinstance(source, TaskSource)
    assert isinstance(source.task, Chain)
    task = replace(source.task, split="test")
    count = min(_QUESTIONS, 4 * source.held_out_questions)
    examples = [task.example(seed) for seed in range(_TEST_SEED, _TEST_SEED + count)]
    prompts = encode(run.tokenizer, [example.prompt for example in examples])
    answers = encode(run.tokenizer, [example.answer for example in examples])
    joined = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    return torch.tensor(joined), len(prompts[0])


def _windows(run: Run) -> Tensor:
    """The held-out windows of text [N, S] that lie within one document."""
    held_out = Mixture(run.recipe.data, run.tokenizer, run.recipe.seed).held_out()["text"]
    positions = held_out["position_ids"]
    whole = (positions.diff(dim=-1) == 1).all(-1)
    return held_out["input_ids"][whole]


def _way_of(name: str) -> str:
    return name.partition(": ")[0]


def _of(way: str, outcome: Outcome) -> Outcome:
    """What an outcome says of one strategy and phase."""
    return replace(
        outcome,
        values={name.partition(": ")[2]: value for name, value in outcome.values.items() if _way_of(name) == way},
    )


def _values(rows: Results, way: str, value: str) -> list[float]:
    return [outcome.values[value] for outcome in rows[way]]


def _points(rows: Results, shape: str) -> dict[str, dict[str, list[float]]]:
    """Accuracy by phase and by what is kept; keeping all is the same in every phase."""
    return {
        phase: {
            name: _values(rows, f"{shape}: {name if name == _FULL else f'{name}, {phase}'}", "accuracy")
            for name in (_FULL, *SHARED)
        }
        for phase in PHASES
    }


def _lost(rows: Results, shape: str, way: str) -> list[float]:
    """Accuracy lost against keeping every loop's, seed by seed."""
    full, shared = (_values(rows, f"{shape}: {name}", "accuracy") for name in (_FULL, way))
    return [before - after for before, after in zip(full, shared, strict=True)]


def _close(rows: Results, shape: str, way: str) -> Verdict:
    lost = _lost(rows, shape, way)
    claim = f"{shape}: '{way}' costs less than {100 * _CLOSE:.0f} points"
    return Verdict(
        claim=claim, holds=max(lost) < _CLOSE, effect=-statistics.mean(lost), unit="accuracy", seeds=len(lost)
    )


def _costs(rows: Results, shape: str, way: str) -> Verdict:
    lost = _lost(rows, shape, way)
    claim = f"{shape}: '{way}' costs more than {100 * _MUCH:.0f} points"
    return Verdict(
        claim=claim, holds=min(lost) > _MUCH, effect=-statistics.mean(lost), unit="accuracy", seeds=len(lost)
    )


def _job(scale: Scale, layers: int, seed: int) -> Job:
    overrides = (*_OVERRIDES[scale], f"model.core_layers={layers * (_PAPER_LAYERS if scale == 'paper' else 1)}")
    return Trained(stages=(Stage(recipe="kv", overrides=overrides),), measure=measure, seed=seed)
