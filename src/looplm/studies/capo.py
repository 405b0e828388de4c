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
    """A model, and people enough to overfill it: at the CPU's scale 2.5 bits a parameter are there to be learnt.

    That is N [log2(N0 / N) + log2 S0] = 2.5 P; with log2 N0 in place of log2(N0 / N) it would be 2 bits, which a model
    can nearly hold.
    """

    name: str
    width: int
    layers: int
    inner: int
    heads: int
    people: int


SIZES = (
    Size(name="9K", width=12, layers=2, inner=32, heads=2, people=504),
    Size(name="19K", width=20, layers=2, inner=54, heads=2, people=1082),
    Size(name="32K", width=28, layers=2, inner=74, heads=2, people=1836),
)
PAPER_SIZES = (
    Size(name="0.6M", width=64, layers=8, inner=171, heads=1, people=20_000),
    Size(name="2.7M", width=128, layers=12, inner=341, heads=2, people=100_000),
    Size(name="13M", width=256, layers=16, inner=683, heads=4, people=500_000),
)
_SMALLEST = SIZES[0].name
_EXPOSURES = 1000  # of every size
_LENGTHS = (100, 300, 1000, 3000)  # exposures of the smallest
_OTHER_RATES, _RATE_EXPOSURES = (0.003, 0.03), 300  # beside the recipe's 0.01, of the smallest


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
        "attributes; two layers, 1,000 exposures of each person on average unless said, rate 0.01, the loss on every "
        "token at the last loop. R = N [log2(N0 / e^p1) + log2(S0 / e^p2)] / P with the mean nats p1 of a person's "
        "name and p2 of the attributes, each bracket at least 0; P counts the tied table once. log2(N!) is not "
        "subtracted for the order of people: they come in random order, so p1 cannot fall below ln N, nor R rise "
        "above `ceiling`; N is such that this is 2.5."
    )
    chance: ClassVar[str] = "guessing gets 0 bits"

    def jobs(self, scale: Scale, seeds: int) -> dict[str, list[Job]]:
        """Every size at both loops; the smallest for shorter and longer and at other rates, too."""
        if scale == "smoke":
            people = Size(name=_SMALLEST, width=8, layers=1, inner=16, heads=2, people=16)
            return {_cell(_SMALLEST, loops): [job("capo", people, loops, 12, 0)] for loops in LOOPS}
        recipe, sizes = ("capo_paper", PAPER_SIZES) if scale == "paper" else ("capo", SIZES)
        found: dict[str, list[Job]] = {}
        for size in sizes:
            own_seeds = seeds if scale == "paper" or size.name == _SMALLEST else 1
            for loops in LOOPS:
                runs: list[Job] = [job(recipe, size, loops, _EXPOSURES, seed) for seed in range(own_seeds)]
                found[_cell(size.name, loops)] = runs
        return found if scale == "paper" else found | _lengths_and_rates()

    def verdicts(self, results: Results) -> list[Verdict]:
        """Whether loops change the bits, whether these are above one, and whether training was long enough."""
        found = []
        for size in _sizes(results):
            found += _equal_bits(results, size, _EXPOSURES)
        longest = _LENGTHS[-1]
        if _cell(_SMALLEST, 1, longest) in results:
            found += _equal_bits(results, _SMALLEST, longest)
            found += [_long_enough(results, loops, longest) for loops in LOOPS]
        return found

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
        if _cell(_SMALLEST, 1, _LENGTHS[0]) in results:
            cells_by_length = {
                _named(loops): [_cell(_SMALLEST, loops, exposures) for exposures in _LENGTHS] for loops in LOOPS
            }
            figures["exposures"] = (
                curves(
                    {name: _points(results, cells, "exposures") for name, cells in cells_by_length.items()},
                    "exposures", _BITS, log_x=True,
                ),
                f"Bits per parameter of the {_SMALLEST} model after runs of different lengths.",
            )  # fmt: skip
        return figures


def job(recipe: str, size: Size, loops: int, exposures: int, seed: int, *others: str) -> Trained:
    """The run in which everyone of `size` is seen `exposures` times on average, in ten saved parts."""
    length, rows = (512, 192) if recipe == "capo_paper" else (96, 6)
    steps = max(1, round(exposures * size.people / (rows * (length // DOCUMENT))))
    overrides = (
        f"model.hidden_size={size.width}", f"model.intermediate_size={size.inner}", f"model.core_layers={size.layers}",
        f"model.num_attention_heads={size.heads}", f"data.sources.capo.task.people={size.people}",
        f"data.length={length}", f"data.rows={rows}", f"loops={loops}", f"steps={steps}",
        f"save_every={max(1, steps // 10)}", f"log_every={min(100, steps)}",
        *others,
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


def _lengths_and_rates() -> dict[str, list[Job]]:
    """The smallest size for shorter and longer, and at other rates; one seed."""
    smallest = SIZES[0]
    found: dict[str, list[Job]] = {}
    for loops in LOOPS:
        for exposures in _LENGTHS:
            if exposures != _EXPOSURES:
                found[_cell(_SMALLEST, loops, exposures)] = [job("capo", smallest, loops, exposures, 0)]
        for rate in _OTHER_RATES:
            cell = f"{_cell(_SMALLEST, loops, _RATE_EXPOSURES)}, rate {rate}"
            found[cell] = [job("capo", smallest, loops, _RATE_EXPOSURES, 0, f"optimizer.lr={rate}")]
    return found


def _cell(size: str, loops: int, exposures: int = _EXPOSURES) -> str:
    ending = "" if exposures == _EXPOSURES else f", {exposures:,} exposures"
    return f"{size}, {_named(loops)}{ending}"


def _named(loops: int) -> str:
    return "1 loop" if loops == 1 else f"{loops} loops"


def _sizes(results: Results) -> list[str]:
    return [size.name for size in (*SIZES, *PAPER_SIZES) if _cell(size.name, 1) in results]


def _bits(results: Results, cell: str) -> list[float]:
    return [outcome.values[_BITS] for outcome in results[cell]]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _equal_bits(results: Results, size: str, exposures: int) -> list[Verdict]:
    plain, looped = (_bits(results, _cell(size, loops, exposures)) for loops in LOOPS)
    effect = 100 * (_mean(looped) / _mean(plain) - 1) if _mean(plain) else 0.0
    what, seeds = f"{size} parameters, {exposures:,} exposures", min(len(plain), len(looped))
    return [
        Verdict(
            claim=f"{what}: equal bits with 1 and 4 loops, within 10 %", holds=_mean(plain) > 0 and abs(effect) <= 10,
            effect=effect, unit="% with 4 loops", seeds=seeds,
        ),
        Verdict(
            claim=f"{what}: more than one bit a parameter at both", holds=min(plain + looped) > 1,
            effect=min(plain + looped), unit="bits at the least", seeds=seeds,
        ),
    ]  # fmt: skip


def _long_enough(results: Results, loops: int, longest: int) -> Verdict:
    usual, longer = (_mean(_bits(results, _cell(_SMALLEST, loops, length))) for length in (_EXPOSURES, longest))
    effect = 100 * (longer / usual - 1)
    return Verdict(
        claim=f"{_SMALLEST} parameters, {_named(loops)}: {longest:,} exposures give less than 5 % more than "
        f"{_EXPOSURES:,} (ours)",
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
