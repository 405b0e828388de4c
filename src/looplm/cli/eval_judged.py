"""`looplm eval safety`, `mt-bench` and `faithful`: answers that a judge marks, or that change by loop."""

import json
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from looplm.cli import eval_options as options
from looplm.cli.errors import one_line_errors
from looplm.cli.progress import progress
from looplm.cli.tables import AsJson

if TYPE_CHECKING:
    from looplm.evals.faithfulness import Faithfulness
    from looplm.evals.probes import Curve

_STRONGREJECT = "strongreject"

Judge = Annotated[
    str | None, typer.Option(help="An OpenAI-compatible endpoint, http://localhost:8000/v1; none replays --record.")
]
JudgeModel = Annotated[str | None, typer.Option(help="The judge, as the endpoint calls it.")]
KeyVariable = Annotated[str | None, typer.Option(help="The environment variable that holds the endpoint's key.")]
Record = Annotated[
    Path | None, typer.Option(dir_okay=False, help="The file that the judge's replies are kept in.")
]  # fmt: skip
System = Annotated[str | None, typer.Option(help="A system turn before all others.")]
ReasoningEnd = Annotated[str | None, typer.Option(help="What ends a model's thinking, such as </think>; not judged.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")]


@one_line_errors
def safety(
    model: options.Model,
    prompts: Annotated[
        str, typer.Option(help="A .csv or .jsonl file or folder of harmful prompts, or 'strongreject'.")
    ] = _STRONGREJECT,
    loops: options.Loops = None, exits: options.Exits = None, kv: options.Kv = "full", judge: Judge = None,
    judge_model: JudgeModel = None, key_variable: KeyVariable = None, record: Record = None,
    max_tokens: MaxTokens = 512, system: System = None, reasoning_end: ReasoningEnd = None,
    limit: options.Limit = None, batch_size: options.BatchSize = 16, against: options.Against = None,
    dtype: options.Dtype = "float32", device: options.Device = "cpu", out: options.Out = None, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Judge the harm of answers to harmful prompts from 1 to 5, at every depth."""
    from looplm.evals.conversation import Speaking
    from looplm.evals.harmful_prompts import read_prompts, strongreject_prompts
    from looplm.evals.judged_run import JudgeChoice, run_safety

    chosen = options.model_settings(model, loops, exits, kv, dtype, device, against)
    judging = JudgeChoice(record=_kept(record), url=judge, model=judge_model, key_variable=key_variable)
    harmful = strongreject_prompts(limit) if prompts == _STRONGREJECT else read_prompts(prompts, limit=limit)
    speaking = Speaking(max_tokens=max_tokens, system=system, reasoning_end=reasoning_end, max_rows=batch_size)
    with progress() as advance:
        found = run_safety(chosen, harmful, judging, speaking, advance)
    options.finish(found, out, as_json)


@one_line_errors
def mt_bench(
    model: options.Model,
    questions: Annotated[Path, typer.Argument(help="MT-Bench's question.jsonl, or a file like it.")],
    references: Annotated[Path | None, typer.Option(help="A file of reference answers.")] = None,
    loops: options.Loops = None, exits: options.Exits = None, kv: options.Kv = "full", judge: Judge = None,
    judge_model: JudgeModel = None, key_variable: KeyVariable = None, record: Record = None,
    max_tokens: MaxTokens = 1024, system: System = None, reasoning_end: ReasoningEnd = None,
    limit: options.Limit = None, batch_size: options.BatchSize = 16, against: options.Against = None,
    dtype: options.Dtype = "float32", device: options.Device = "cpu", out: options.Out = None, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Rate every turn of dialogues from 1 to 10, at every depth."""
    from looplm.evals.conversation import Speaking
    from looplm.evals.judged_run import JudgeChoice, run_mt_bench
    from looplm.evals.mt_bench import read_dialogues

    chosen = options.model_settings(model, loops, exits, kv, dtype, device, against)
    judging = JudgeChoice(record=_kept(record), url=judge, model=judge_model, key_variable=key_variable)
    dialogues = read_dialogues(questions, references)[:limit]
    speaking = Speaking(max_tokens=max_tokens, system=system, reasoning_end=reasoning_end, max_rows=batch_size)
    with progress() as advance:
        found = run_mt_bench(chosen, dialogues, judging, speaking, advance)
    options.finish(found, out, as_json)


@one_line_errors
def faithful(
    model: options.Model,
    pairs: Annotated[Path | None, typer.Option(help="A file of Quora Question Pairs; MRPC's package without.")] = None,
    loops: Annotated[int | None, typer.Option(min=1, help="The most loops; the model's own by default.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Pairs to take, the first.")] = 1000,
    seeds: Annotated[int, typer.Option(min=2, help="Splits that probes are trained on.")] = 5,
    batch_size: options.BatchSize = 16, dtype: options.Dtype = "float32", device: options.Device = "cpu",
    plots: Annotated[Path | None, typer.Option(file_okay=False, help="Folder for both figures, as SVG.")] = None,
    out: options.Out = None, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Say how answers to paraphrases change by loop, and from which layer on probes foretell them."""
    from looplm.evals.faithfulness import run_faithfulness
    from looplm.evals.pairs import mrpc, read_pairs
    from looplm.evals.probes import Probing
    from looplm.evals.results import write_evaluation
    from looplm.evals.subject import ModelSettings

    chosen = ModelSettings(model=model, loops=() if loops is None else (loops,), dtype=dtype, device=device)
    read = mrpc(limit) if pairs is None else read_pairs(pairs, limit)
    with progress() as advance:
        found, result = run_faithfulness(
            chosen, read, batch_size=batch_size, probing=Probing(seeds=seeds), advance=advance
        )
    if out is not None:
        write_evaluation(out, result)
    if plots is not None:
        _draw(found, plots)
    if as_json:
        typer.echo(json.dumps(asdict(found)))
    else:
        _print_faithful(found)


def _kept(record: Path | None) -> Path:
    if record is None:
        raise ValueError(
            "give --record FILE: a judge's replies are kept there, and are read from there without --judge"
        )
    return record


def _draw(found: "Faithfulness", folder: Path) -> None:
    from looplm.evals.faithfulness import agreement_figure, probes_figure

    folder.mkdir(parents=True, exist_ok=True)
    agreement_figure(found.agreement).savefig(folder / "agreement.svg")
    if found.curves:
        probes_figure(found.curves).savefig(folder / "probes.svg")
    typer.echo(f"drew into {folder}", err=True)


def _probe_rows(curve: "Curve") -> list[dict[str, Any]]:
    loops = [list(probes) for _, probes in groupby(curve.probes, lambda probe: probe.loop)]
    return [
        {"probes for": curve.target, "loop": best.loop, "best layer": best.layer, "ROC AUC": f"{best.auc:.3f}",
         "95 %": f"{best.low:.3f} … {best.high:.3f}", "of the last layer": f"{probes[-1].auc:.3f}"}
        for probes in loops
        for best in [max(probes, key=lambda probe: probe.auc)]
    ]  # fmt: skip


def _print_faithful(found: "Faithfulness") -> None:
    agreement = found.agreement
    rows = [
        {"loops": loop, "accuracy": f"{accuracy:.3f}", "yes": f"{yes:.3f}"}
        | {f"as at {other}": f"{share:.3f}" for other, share in enumerate(shares, start=1)}
        for loop, (accuracy, yes, shares) in enumerate(
            zip(agreement.accuracy, agreement.yes, agreement.shares, strict=True), start=1
        )
    ]
    options.show(f"Answers to {agreement.items} pairs of {found.source} by loops, and the share that is equal:", rows)
    options.show(
        "How well states foretell them, by the best and the last layer of each loop (all layers: --out, --plots):",
        [row for curve in found.curves for row in _probe_rows(curve)],
    )
    for target, reason in found.unprobed.items():
        typer.echo(f"no probes for {target}: {reason}")
