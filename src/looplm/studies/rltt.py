"""Study: does the reward reach further through every loop than through the last? RLTT against GRPO at equal compute."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from matplotlib.figure import Figure
from scipy.stats import ttest_rel

from looplm.analysis.plots import curves
from looplm.rl.environments import TaskEnvironment
from looplm.rl.evaluate import Answer, answers
from looplm.rl.recipe import RLRecipe
from looplm.studies.reinforced import Policy, Reinforced
from looplm.studies.study import Job, Outcome, Points, Results, Scale, Study, Verdict
from looplm.studies.trained import Run, Stage, Trained
from looplm.tasks import RunningSum

WARM, GRPO, UNLOOPED, SFT = "warm start", "GRPO", "unlooped, GRPO", "SFT"
RLTT = {"RLTT, exit": "exit", "RLTT, uniform": "uniform", "RLTT, progressive": "progressive"}
_SHARES = (0.25, 0.34, 0.42, 0.5, 0.59, 0.75, 1.0)  # of the tokens that training allows
_SHORT = 0.42
_WHOLE = "reward over training"
_MORE = (
    "model=null", "steps=270", "optimizer.lr=3e-4", "data.sources.answers=null",
    "data.sources.alternating_answers=null",
)  # fmt: skip
_SMOKE = ("steps=2", "sampling.prompts=2", "sampling.group=2", "sampling.max_tokens=10", "evaluation.questions=4")
_SMOKE_SFT = ("steps=2", "data.rows=2", "log_every=1", "data.sources.sums.held_out_questions=8")


@dataclass(frozen=True, kw_only=True)
class RLTTStudy(Study):
    """Arms from one warm start a seed: more supervision, GRPO, RLTT under three weightings, and GRPO unlooped."""

    name: ClassVar[str] = "rltt"
    title: ClassVar[str] = "Reinforcement through every loop"
    claim: ClassVar[str] = (
        "RLTT, which credits every loop, beats GRPO, which credits the last, at equal data, budget and reward: by 5.8 "
        "and 10.9 points on four mathematics sets (Ouro-1.4B and 2.6B), with shorter answers, at every loop count and "
        "most of all under short token budgets; among its weightings differences are small (arXiv 2602.10520, Tables "
        "1, 3 and 4; one training seed)."
    )
    setting: ClassVar[str] = (
        "a model of width 96, one layer looped 4 times, supervised for 1,200 steps on sums and alternating sums of 2 "
        "to 6 digits (modulo 10), some with every total written out, most with the answer alone "
        "(`looplm.tasks.RunningSum`); then 100 steps of 16 sums x 8 completions at 4 loops, 1.0 for the right last "
        "total. SFT goes on instead, on written-out answers alone, for as many FLOPs (270 steps); unlooped is 4 layers "
        "once, of equal FLOPs. Greedy answers to 256 held-out sums at 1 to 4 loops, with 12 tokens and with fewer "
        "(short: 5), and to alternating sums, which no arm reinforced. `reward over training`: its mean over all steps."
    )
    chance: ClassVar[str] = "guessing a digit gets 0.1"

    def jobs(self, scale: Scale, seeds: int) -> dict[str, list[Job]]:
        """Every arm at every seed; at the paper's scale those that reinforce Ouro."""
        weights = {GRPO: "last", **RLTT}
        if scale == "paper":
            return {arm: [_of_ouro(kind, seed) for seed in range(seeds)] for arm, kind in weights.items()}
        of_rl = {arm: f"objective.loop_weights={{kind: {kind}}}" for arm, kind in weights.items()}
        arms = {WARM: None, SFT: None, **of_rl, UNLOOPED: of_rl[GRPO]}
        return {arm: [_job(scale, arm, of_rl, seed) for seed in range(seeds)] for arm, of_rl in arms.items()}

    def columns(self, results: Results) -> list[str]:
        """The trained depth, others, the short budget, the untrained task, and lengths."""
        names = ("accuracy", "at 1 loop", "at 2 loops", "short budget", "alternating sums", "length")
        return [*(name for name in names if name in results[GRPO][0].values), _WHOLE]

    def verdicts(self, results: Results) -> list[Verdict]:
        """RLTT against GRPO, item by item; then against supervision and against depth without loops."""
        kinds = {"items": "all loops", "items, 1 loop": "1 loop", "items, short": "a short budget"}
        found = [
            _paired(results, name, GRPO, items, f"{name} above GRPO at {what}")
            for name in RLTT
            for items, what in kinds.items()
        ]
        if UNLOOPED in results:
            found.append(_paired(results, "RLTT, exit", SFT, "items", "RLTT, exit above supervision of equal steps"))
            found.append(_paired(results, GRPO, UNLOOPED, "items", "GRPO looped above GRPO unlooped of equal FLOPs"))
        return [*found, _shorter(results)]

    def figures(self, results: Results) -> dict[str, tuple[Figure, str]]:
        """Reward over training, and accuracy by loops and by budget."""
        trained = {arm: found for arm, found in results.items() if "reward" in found[0].series}
        looped = {arm: found for arm, found in results.items() if "loops" in found[0].series}
        drawn = {
            "reward": (_lines(trained, "reward"), "step", "reward", "Mean reward of a step's completions"),
            "loops": (_lines(looped, "loops"), "loops used", "accuracy", "Accuracy by the loops used"),
            "budget": (_lines(results, "budget"), "tokens allowed", "accuracy", "Accuracy by token budget"),
        }
        bands = ": means over seeds, in bands from the lowest to the highest."
        return {name: (curves(lines, x, y), caption + bands) for name, (lines, x, y, caption) in drawn.items()}


def _job(scale: Scale, arm: str, of_rl: str | None, seed: int) -> Reinforced:
    """One arm in miniature; `of_rl` is its reinforcement's override, None where it has none."""
    small = _SMOKE_SFT if scale == "smoke" else ()
    unlooped = ("model.core_layers=4", "loops=1", "objective={kind: last_loop}") if arm == UNLOOPED else ()
    first = Stage(recipe="rltt_cpu_sft", overrides=(*unlooped, *small))
    more = Stage(recipe="rltt_cpu_sft", overrides=(*_MORE, *small))
    warm = Trained(stages=(first, more) if arm == SFT else (first,), measure=_nothing, seed=seed)
    return Reinforced(
        warm_start=warm, shared=_shared(arm), recipe="rltt_cpu",
        overrides=(of_rl or "steps=1", *(_SMOKE if scale == "smoke" else ())),
        reinforces=of_rl is not None, measure=measure, seed=seed,
    )  # fmt: skip


def _shared(arm: str) -> str | None:
    """Where the arm's warm start lies; SFT's goes on."""
    return None if arm == SFT else "warm_start_unlooped" if arm == UNLOOPED else "warm_start_looped"


def _of_ouro(kind: str, seed: int) -> Reinforced:
    recipe, overrides = ("grpo_ouro", ()) if kind == "last" else ("rltt_ouro", (f"objective.loop_weights.kind={kind}",))
    return Reinforced(recipe=recipe, overrides=overrides, measure=measure, seed=seed)


def _nothing(run: Run) -> Outcome:
    return Outcome()


def measure(policy: Policy, recipe: RLRecipe) -> Outcome:
    """Held-out answers by loops and by token budget, and to another task; reward over training."""
    most, loops = recipe.sampling.max_tokens, policy.model.config.loops
    by_loop = {loop: _ask(policy, recipe, loop, most) for loop in range(1, loops + 1)}
    budgets = {share: _ask(policy, recipe, loops, max(1, round(share * most))) for share in _SHARES}
    last, second = by_loop[loops], by_loop[min(2, loops)]
    rewards = [(float(record["step"]), record["reward"]) for record in policy.log if "reward" in record]
    return Outcome(
        values={
            "accuracy": _mean(last), "at 1 loop": _mean(by_loop[1]), "at 2 loops": _mean(second),
            "short budget": _mean(budgets[_SHORT]), **_of_alternating_sums(policy, recipe),
            **({_WHOLE: float(np.mean([reward for _, reward in rewards]))} if rewards else {}),
            "length": float(np.mean([answer.length for answer in last])),
        },
        series={
            "items": _items(last), "items, 1 loop": _items(by_loop[1]), "items, short": _items(budgets[_SHORT]),
            "budget": [(float(round(share * most)), _mean(told)) for share, told in budgets.items()],
            **({"loops": [(float(loop), _mean(told)) for loop, told in by_loop.items()]} if loops > 1 else {}),
            **({"reward": rewards} if rewards else {}),
        },
    )  # fmt: skip


def _of_alternating_sums(policy: Policy, recipe: RLRecipe) -> dict[str, float]:
    """What no arm reinforced, where sums were the task."""
    environment = recipe.environment
    if not (isinstance(environment, TaskEnvironment) and isinstance(environment.task, RunningSum)):
        return {}
    other = TaskEnvironment(task=replace(environment.task, alternating=True))
    told = _ask(policy, replace(recipe, environment=other), policy.model.config.loops, recipe.sampling.max_tokens)
    return {"alternating sums": _mean(told)}


def _ask(policy: Policy, recipe: RLRecipe, loops: int, max_tokens: int) -> list[Answer]:
    return answers(
        policy.model, policy.tokenizer, recipe.environment, recipe.sampling, recipe.evaluation.questions, loops,
        max_tokens,
    )  # fmt: skip


def _mean(told: Sequence[Answer]) -> float:
    return float(np.mean([answer.mark or 0.0 for answer in told]))


def _items(told: Sequence[Answer]) -> Points:
    return [(float(number), float(answer.mark or 0.0)) for number, answer in enumerate(told)]


def _lines(results: Results, series: str) -> dict[str, list[Points]]:
    return {arm: [list(outcome.series[series]) for outcome in found] for arm, found in results.items()}


def _paired(results: Results, high: str, low: str, items: str, claim: str) -> Verdict:
    """Whether `high` lies above `low` on the same questions, by a paired t-test over all answers and in every seed.

    The test takes the answers for independent, which those of one trained model are not: hence the seeds as well.
    """
    pairs = [
        np.array(
            [(mark, other) for (_, mark), (_, other) in zip(ours.series[items], theirs.series[items], strict=True)]
        )
        for ours, theirs in zip(results[high], results[low], strict=True)
    ]
    ours, theirs = np.concatenate(pairs).T
    seeds = len(pairs)
    if (ours == theirs).all():
        return Verdict(claim=f"{claim} (no answer differs)", holds=False, effect=0.0, unit="accuracy", seeds=seeds)
    test = ttest_rel(ours, theirs)
    interval = test.confidence_interval()
    by_seed = [float(np.subtract(*pair.T).mean()) for pair in pairs]
    return Verdict(
        claim=f"{claim} (95 % interval {interval.low:+.3f} to {interval.high:+.3f}, p = {test.pvalue:.2g}, paired over "
        f"{len(ours)} answers; by seed {', '.join(f'{effect:+.3f}' for effect in by_seed)})",
        holds=bool(interval.low > 0 and min(by_seed) > 0), effect=float(np.mean(by_seed)), unit="accuracy", seeds=seeds,
    )  # fmt: skip


def _shorter(results: Results) -> Verdict:
    ours, theirs = ([outcome.values["length"] for outcome in results[arm]] for arm in ("RLTT, exit", GRPO))
    return Verdict(
        claim="RLTT's answers are shorter than GRPO's", holds=max(ours) < min(theirs),
        effect=float(np.mean(ours) - np.mean(theirs)), unit="tokens", seeds=len(ours),
    )  # fmt: skip
