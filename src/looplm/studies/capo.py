"""Study: Capo, biographies learnt by heart: how many bits a parameter holds, looped and not."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import ClassVar

import torch
from matplotlib.figure import Figure
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast

from looplm.analysis.plots import curves
from looplm.data.tokenizer import encode
from looplm.models import LoopLMForCausalLM
from looplm.studies.study import Job, Outcome, Results, Scale, Study, Verdict
from looplm.studies.trained import Run, Stage, Trained, checkpoints
from looplm.tasks import Capo
from looplm.tasks.capo import NAMES
from looplm.training.data_recipe import TaskSource

LOOPS = (1, 4)
DOCUMENT = 12  # tokens of a biography
_BITS = "bits per parameter"
_AT_ONCE = 1024  # biographies


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model, and people enough to overfill it: about 2.5 P / (bits of a person)."""

    name: str
    width: int
    layers: int
    inner: int
    heads: int
    people: int


SIZES = (
    Size(name="14K", width=16, layers=2, inner=44, heads=2, people=639),
    Size(name="25K", width=24, layers=2, inner=64, heads=2, people=1160),
    Size(name="57K", width=40, layers=2, inner=106, heads=4, people=2631),
)
PAPER_SIZES = (
    Size(name="0.6M", width=64, layers=8, inner=171, heads=1, people=20_000),
    Size(name="2.7M", width=128, layers=12, inner=341, heads=2, people=100_000),
    Size(name="13M", width=256, layers=16, inner=683, heads=4, people=500_000),
)
_SMALLEST = SIZES[0].name


@dataclass(frozen=True, kw_only=True)
class CapoStudy(Study):
    """Loops 1 and 4 at every size, and the smallest size for longer and shorter."""

    name: ClassVar[str] = "capo"
    title: ClassVar[str] = "Capo: bits per parameter"
    claim: ClassVar[str] = (
        "about 2 bits a parameter with 1 loop and with 4, so that loops add no capacity (Ouro, arXiv 2510.25741, "
        "Appendix B.1; bioS(N) of 20,000 to 500,000 people in English, 1,000 exposures, 1M to 40M parameters)."
    )
    setting: ClassVar[str] = (
        "biographies in symbols, one token a field, unique full names drawn from 250,000 (17.9 bits), 36.6 bits of "
        "attributes; two layers, N = 2.5 P / 54.5 people, 300 exposures of each on average, the loss on every token at "
        "the last loop. R = N [log2(N0 / e^p1) + log2(S0 / e^p2)] / P with the mean nats p1 of a person's name and p2 "
        "of the attributes, each bracket at least 0; P counts the tied table once. The order of people is not "
        "subtracted: they come in random order, so p1 cannot fall below ln N, and R not rise above `ceiling`."
    )
    chance: ClassVar[str] = "guessing gets 0 bits"

    def jobs(self, scale: Scale, seeds: int) -> dict[str, list[Job]]:
        """Every size at both loops; the smallest at 100 and 1,000 exposures, too."""
        if scale == "paper":
            return {
                _cell(size.name, loops): [job("capo_paper", size, loops, 1000, seed) for seed in range(seeds)]
                for size in PAPER_SIZES
                for loops in LOOPS
            }
        if scale == "smoke":
            people = Size(name=_SMALLEST, width=8, layers=1, inner=16, heads=2, people=16)
            return {_cell(_SMALLEST, loops): [job("capo", people, loops, 12, 0)] for loops in LOOPS}
        found: dict[str, list[Job]] = {}
        for size in SIZES:
            own_seeds = seeds if size.name == _SMALLEST else 1
            for loops in LOOPS:
                found[_cell(size.name, loops)] = [job("capo", size, loops, 300, seed) for seed in range(own_seeds)]
        for exposures in (100, 1000):
            for loops in LOOPS:
                found[_cell(_SMALLEST, loops, exposures)] = [job("capo", SIZES[0], loops, exposures, 0)]
        return found

    def verdicts(self, results: Results) -> list[Verdict]:
        """Whether loops change the bits, whether these are above one, and whether training was long enough."""
        found = []
        for size in _sizes(results):
            plain, looped = (_bits(results, _cell(size, loops)) for loops in LOOPS)
            effect = 100 * (_mean(looped) / _mean(plain) - 1) if _mean(plain) else 0.0
            seeds = min(len(plain), len(looped))
            found += [
                Verdict(
                    claim=f"{size} parameters: equal bits with 1 and 4 loops, within 10 %",
                    holds=_mean(plain) > 0 and abs(effect) <= 10, effect=effect, unit="% with 4 loops", seeds=seeds,
                ),
                Verdict(
                    claim=f"{size} parameters: more than one bit a parameter at both", holds=min(plain + looped) > 1,
                    effect=min(plain + looped), unit="bits at the least", seeds=seeds,
                ),
            ]  # fmt: skip
        return found + [_long_enough(results, loops) for loops in LOOPS if _cell(_SMALLEST, loops, 1000) in results]

    def figures(self, results: Results) -> dict[str, tuple[Figure, str]]:
        """Bits by parameters, by exposures, and during training."""
        cells = [_cell(size, loops) for size in _sizes(results) for loops in LOOPS]
        by_size = {_named(loops): _points(results, [_cell(size, loops) for size in _sizes(results)]) for loops in LOOPS}
        figures = {
            "size": (
                curves(by_size, "parameters", _BITS, log_x=True),
                "Bits per parameter by size; bands from the lowest to the highest seed, where there are several.",
            ),
            "training": (
                curves(
                    {cell: [list(outcome.series["training"]) for outcome in results[cell]] for cell in cells},
                    "exposures", _BITS,
                ),
                "Bits per parameter during training; the learning rate falls to a tenth by the end of each run.",
            ),
        }  # fmt: skip
        if _cell(_SMALLEST, 1, 1000) in results:
            lengths = {
                _named(loops): _points(
                    results, [_cell(_SMALLEST, loops, exposures) for exposures in (100, 300, 1000)], "exposures"
                )
                for loops in LOOPS
            }
            figures["exposures"] = (
                curves(lengths, "exposures", _BITS, log_x=True),
                f"Bits per parameter of the {_SMALLEST} model after runs of different lengths.",
            )
        return figures


def job(recipe: str, size: Size, loops: int, exposures: int, seed: int) -> Trained:
    """The run in which everyone of `size` is seen `exposures` times on average, in ten saved parts."""
    length, rows = (512, 192) if recipe == "capo_paper" else (96, 6)
    steps = max(1, round(exposures * size.people / (rows * (length // DOCUMENT))))
    overrides = (
        f"model.hidden_size={size.width}", f"model.intermediate_size={size.inner}", f"model.core_layers={size.layers}",
        f"model.num_attention_heads={size.heads}", f"data.sources.capo.task.people={size.people}",
        f"data.length={length}", f"data.rows={rows}", f"loops={loops}", f"steps={steps}",
        f"save_every={max(1, steps // 10)}", f"log_every={min(100, steps)}",
    )  # fmt: skip
    return Trained(stages=(Stage(recipe=recipe, overrides=overrides),), measure=measure, seed=seed)


def measure(run: Run) -> Outcome:
    """Bits at the end and at every checkpoint, over all people."""
    source = run.recipe.data.sources["capo"]
    assert isinstance(source, TaskSource)
    task = source.task
    assert isinstance(task, Capo)
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    a_step = run.recipe.data.rows * (run.recipe.data.length // DOCUMENT) / task.people
    training = []
    for step, model in checkpoints(run):
        training.append((step * a_step, capacity(task, *nats(model, run.tokenizer, task), parameters)))
    name, attributes = nats(run.model, run.tokenizer, task)
    return Outcome(
        values={
            _BITS: capacity(task, name, attributes, parameters),
            "ceiling": capacity(task, math.log(task.people), 0.0, parameters),
            "bits of a name": task.name_bits - name / math.log(2),
            "bits of attributes": task.attribute_bits - attributes / math.log(2),
        },
        series={"training": training},
        facts={"people": task.people, "exposures": (run.recipe.steps or 0) * a_step},
    )


@torch.no_grad()
def nats(model: LoopLMForCausalLM, tokenizer: PreTrainedTokenizerFast, task: Capo) -> tuple[float, float]:
    """p1 and p2: the summed cross-entropy of the name and of the attributes at the last loop, mean over all people."""
    people = [task.person(number) for number in range(task.people)]
    ids = torch.tensor(encode(tokenizer, [person.prompt + person.answer for person in people]))
    total = torch.zeros(ids.shape[1] - 1, dtype=torch.float64)
    for part in ids.split(_AT_ONCE):
        logits = model(part[:, :-1]).logits
        total += F.cross_entropy(logits.transpose(1, 2), part[:, 1:], reduction="none").double().sum(0)
    name, attributes = total[: len(NAMES)].sum(), total[len(NAMES) :].sum()
    return float(name) / task.people, float(attributes) / task.people


def capacity(task: Capo, name_nats: float, attribute_nats: float, parameters: int) -> float:
    """R = N [log2(N0 / e^p1) + log2(S0 / e^p2)] / P, each bracket at least 0."""
    name = max(0.0, task.name_bits - name_nats / math.log(2))
    attributes = max(0.0, task.attribute_bits - attribute_nats / math.log(2))
    return task.people * (name + attributes) / parameters


def _cell(size: str, loops: int, exposures: int = 300) -> str:
    ending = "" if exposures == 300 else f", {exposures} exposures"
    return f"{size}, {_named(loops)}{ending}"


def _named(loops: int) -> str:
    return "1 loop" if loops == 1 else f"{loops} loops"


def _sizes(results: Results) -> list[str]:
    return [size.name for size in (*SIZES, *PAPER_SIZES) if _cell(size.name, 1) in results]


def _bits(results: Results, cell: str) -> list[float]:
    return [outcome.values[_BITS] for outcome in results[cell]]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _long_enough(results: Results, loops: int) -> Verdict:
    usual, longer = (_mean(_bits(results, _cell(_SMALLEST, loops, exposures))) for exposures in (300, 1000))
    effect = 100 * (longer / usual - 1)
    return Verdict(
        claim=f"{_SMALLEST} parameters, {_named(loops)}: 1,000 exposures give less than 5 % more than 300 (ours)",
        holds=effect < 5, effect=effect, unit="%", seeds=1,
    )  # fmt: skip


def _points(results: Results, cells: Sequence[str], fact: str = "parameters") -> list[list[tuple[float, float]]]:
    """One line a seed; a cell with one seed stands in all of them."""
    most = max(len(results[cell]) for cell in cells)
    columns = [
        [(float(results[cell][0].facts[fact]), bits) for bits in islice(cycle(_bits(results, cell)), most)]
        for cell in cells
    ]
    return [list(line) for line in zip(*columns, strict=True)]
