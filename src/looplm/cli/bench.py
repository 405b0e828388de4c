"""`looplm bench <what>`: measurements of several ways to do one thing, side by side in one run."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from looplm.cli.errors import one_line_errors
from looplm.cli.tables import AsJson, print_measured

# Arguments of several verbs.
Checkpoint = Annotated[str, typer.Argument(help="A trained checkpoint or run folder.")]
Repeats = Annotated[int, typer.Option(min=1, help="Timed rounds; the median counts.")]
Against = Annotated[str | None, typer.Option(help="file.py:factory, factory(folder)(prompts, n) -> tokens.")]
Beginnings = Annotated[str | None, typer.Argument(help="Text whose beginnings are the prompts; Python's manual.")]
HeldOutText = Annotated[
    str | None, typer.Argument(help="Held-out text; what built-in recipes hold out of Python's manual by default.")
]

bench = typer.Typer(help="Measure, side by side in one run.", no_args_is_help=True)


@bench.command("head-loss")
@one_line_errors
def bench_head_loss(
    tokens: Annotated[int, typer.Option(min=1, help="Tokens N.")] = 1024,
    width: Annotated[int, typer.Option(min=1, help="Width D.")] = 512,
    vocab: Annotated[int, typer.Option(min=2, help="Vocabulary V.")] = 49152,
    loops: Annotated[int, typer.Option(min=1, help="Loops T.")] = 4,
    repeats: Repeats = 5,
    as_json: AsJson = False,
) -> None:
    """Stage I's head loss: chunked against holding T full logit tensors."""
    from looplm.studies.bench_head_loss import bench_head_loss as measure

    rows = [asdict(row) for row in measure(tokens, width, vocab, loops, repeats)]
    ours, plain = rows
    ratio = {"time": ours["seconds"] / plain["seconds"], "memory": ours["peak_bytes"] / plain["peak_bytes"]}
    print_measured(
        as_json, {"tokens": tokens, "width": width, "vocab": vocab, "loops": loops}, rows, further={"ratio": ratio},
        tables=[[row | {"seconds": f"{row['seconds']:.3f}"} for row in rows]],
        after=[f"chunked / plain: {ratio['time']:.2f} x time, {ratio['memory']:.2f} x memory"],
        how="float32, forward and backward",
    )  # fmt: skip


@bench.command("jsrr")
@one_line_errors
def bench_jsrr(
    width: Annotated[int, typer.Option(min=1, help="Width D, of heads of 64.")] = 256,
    layers: Annotated[int, typer.Option(min=1, help="Shared layers.")] = 2,
    loops: Annotated[int, typer.Option(min=1, help="Loops T.")] = 4,
    vocab: Annotated[int, typer.Option(min=2, help="Vocabulary V.")] = 2048,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a row.")] = 128,
    rows: Annotated[int, typer.Option(min=1, help="Rows of a step.")] = 8,
    repeats: Repeats = 9,
    as_json: AsJson = False,
) -> None:
    """The stability term: a training step under each of its forms, as a ratio to the plain step."""
    from looplm.studies.bench_jsrr import RECOMMENDED, JsrrProblem
    from looplm.studies.bench_jsrr import bench_jsrr as measure

    problem = JsrrProblem(width=width, layers=layers, loops=loops, vocab=vocab, length=length, rows=rows)
    found = [asdict(row) for row in measure(problem, repeats)]
    shown = [
        {"form": row["form"], "seconds": f"{row['seconds']:.3f}"}
        | {name: f"{row[name]:.2f} x" for name in ("time_ratio", "memory_ratio")}
        for row in found
    ]
    estimates = [f"{row['form']} estimates {row['estimates']}" for row in found[1:]]
    print_measured(
        as_json, asdict(problem), found, further={"recommended": RECOMMENDED}, tables=[shown],
        after=[*estimates, f"recommended: {RECOMMENDED}"], how="float32, forward, backward and AdamW",
    )  # fmt: skip


@bench.command("rl")
@one_line_errors
def bench_rl(
    width: Annotated[int, typer.Option(min=1, help="Width D, of heads of 64.")] = 512,
    layers: Annotated[int, typer.Option(min=1, help="Shared layers.")] = 8,
    loops: Annotated[int, typer.Option(min=1, help="Loops T.")] = 4,
    vocab: Annotated[int, typer.Option(min=2, help="Vocabulary V.")] = 4096,
    length: Annotated[int, typer.Option(min=4, help="Tokens of prompt and completion.")] = 128,
    rows: Annotated[int, typer.Option(min=1, help="Completions of a step.")] = 4,
    repeats: Repeats = 7,
    as_json: AsJson = False,
) -> None:
    """A training step that credits every loop (RLTT) as a ratio to one that credits the last (GRPO)."""
    from looplm.studies.bench_rl import RLProblem
    from looplm.studies.bench_rl import bench_rl as measure

    problem = RLProblem(width=width, layers=layers, loops=loops, vocab=vocab, length=length, rows=rows)
    found = [asdict(row) for row in measure(problem, repeats)]
    shown = [
        {"weights": row["weights"], "seconds": f"{row['seconds']:.3f}", "peak MB": f"{row['peak_bytes'] / 1e6:,.0f}"}
        | {name: f"{row[name]:.2f} x" for name in ("time_ratio", "memory_ratio")}
        for row in found
    ]
    print_measured(as_json, asdict(problem), found, tables=[shown], how="float32, forward, backward and AdamW")


@bench.command("sweep")
@one_line_errors
def bench_sweep(
    width: Annotated[int, typer.Option(min=1, help="Width D, of heads of 64.")] = 256,
    layers: Annotated[int, typer.Option(min=1, help="Shared layers.")] = 2,
    loops: Annotated[int, typer.Option(min=1, help="Loop counts 1..T.")] = 8,
    vocab: Annotated[int, typer.Option(min=2, help="Vocabulary V.")] = 4096,
    length: Annotated[int, typer.Option(min=2, help="Tokens of context and continuation.")] = 96,
    rows: Annotated[int, typer.Option(min=1, help="Pairs.")] = 64,
    continuation: Annotated[int, typer.Option(min=1, help="Tokens that are scored.")] = 4,
    repeats: Repeats = 7,
    as_json: AsJson = False,
) -> None:
    """Evaluation at loops 1..T: log-likelihoods from one forward, against a run for each loop count."""
    from looplm.studies.bench_sweep import SweepProblem
    from looplm.studies.bench_sweep import bench_sweep as measure

    problem = SweepProblem(
        width=width, layers=layers, loops=loops, vocab=vocab, length=length, rows=rows, continuation=continuation
    )
    print_measured(as_json, asdict(problem), [asdict(row) for row in measure(problem, repeats)], how="float32")


@bench.command("train")
@one_line_errors
def bench_train(
    width: Annotated[int, typer.Option(min=64, help="Width D, of heads of 64.")] = 512,
    layers: Annotated[int, typer.Option(min=1, help="Shared layers.")] = 2,
    loops: Annotated[int, typer.Option(min=1, help="Loops T.")] = 4,
    vocab: Annotated[int, typer.Option(min=2, help="Vocabulary V.")] = 8192,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a row.")] = 256,
    rows: Annotated[int, typer.Option(min=1, help="Rows of a step.")] = 4,
    repeats: Repeats = 7,
    as_json: AsJson = False,
) -> None:
    """Stage I training steps: ours, a hand-written looped model's, and an unlooped model's of equal FLOPs."""
    from looplm.studies.bench_train import TrainProblem
    from looplm.studies.bench_train import bench_train as measure

    problem = TrainProblem(width=width, layers=layers, loops=loops, vocab=vocab, length=length, rows=rows)
    found = [asdict(row) for row in measure(problem, repeats)]
    ours, plain, unlooped = found
    ratio = {
        "flops_per_second_over_unlooped": ours["gflops_per_second"] / unlooped["gflops_per_second"],
        "tokens_per_second_over_plain": ours["tokens_per_second"] / plain["tokens_per_second"],
        "memory_over_plain": ours["peak_bytes"] / plain["peak_bytes"],
    }
    shown = [
        {
            "model": f"{row['model']} {row['layers']}x{row['loops']}",
            "parameters": row["parameters"],
            "GFLOP": f"{row['step_gflops']:.0f}",
            "seconds": f"{row['seconds']:.3f}",
            "tokens/s": f"{row['tokens_per_second']:,.0f}",
            "GFLOP/s": f"{row['gflops_per_second']:.1f}",
            "peak MB": f"{row['peak_bytes'] / 1e6:,.0f}",
        }
        for row in found
    ]
    print_measured(
        as_json, asdict(problem), found, further={"ratio": ratio}, tables=[shown],
        after=[f"{name.replace('_', ' ')}: {value:.2f} x" for name, value in ratio.items()],
        how="float32, forward, backward and AdamW",
    )  # fmt: skip


@bench.command("engine")
@one_line_errors
def bench_engine(
    width: Annotated[int, typer.Option(min=64, help="Width D, of heads of 64.")] = 512,
    layers: Annotated[int, typer.Option(min=1, help="Shared layers.")] = 6,
    loops: Annotated[int, typer.Option(min=1, help="Loops T.")] = 4,
    vocab: Annotated[int, typer.Option(min=2, help="Vocabulary V.")] = 2048,
    rows: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 16,
    requests: Annotated[int, typer.Option(min=1, help="Requests in all.")] = 32,
    prompt: Annotated[int, typer.Option(min=2, help="Tokens of a prompt, about.")] = 16,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of a completion.")] = 48,
    mixed: Annotated[
        bool, typer.Option("--mixed/--same", help="Completions of a quarter to seven quarters of that, or all alike.")
    ] = False,
    min_readout: Annotated[int, typer.Option(min=1, help="Tokens that wait for the head together.")] = 1,
    against: Against = None,
    repeats: Repeats = 3,
    as_json: AsJson = False,
) -> None:
    """The engine at replayed depths, at fixed depth, transformers' generate, and any other callable."""
    from looplm.studies.bench_engine import EngineProblem, measure_engine

    problem = EngineProblem(
        width=width, layers=layers, loops=loops, vocab=vocab, rows=rows, requests=requests, prompt=prompt,
        tokens=tokens, mixed=mixed, min_readout=min_readout,
    )  # fmt: skip
    found = [asdict(row) for row in measure_engine(problem, repeats, against)]
    by_way = {row["way"]: row for row in found}
    full, replayed = by_way["fixed depth"], by_way["replayed depths"]
    ratio = {f"{name} / fixed depth": row["seconds"] / full["seconds"] for name, row in by_way.items()}
    print_measured(
        as_json, asdict(problem), found, further={"ratio": ratio},
        tables=[[_speed(row) for row in found], [_waits(row) for row in found]],
        after=[
            f"replayed depths: {full['seconds'] / replayed['seconds']:.2f} x the speed of fixed depth, "
            f"{replayed['of_flop_bound']:.0%} of the FLOP bound {replayed['flop_bound']:.2f} x"
        ],
        how="float32",
    )  # fmt: skip


def _speed(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "way": row["way"],
        "tokens/s": row["tokens_per_second"],
        "loops": row["mean_loops"],
        "GFLOP": row["gflops"],
        "bound": f"{row['flop_bound']:.2f} x",
        "of it": f"{row['of_flop_bound']:.0%}",
        "FLOP/s": f"{row['of_flop_rate']:.0%}",
        "streamed": f"{row['streamed']:.0%}",
    }


def _waits(row: dict[str, Any]) -> dict[str, Any]:
    """Median and 95 %."""
    names = {"first_token": "first token", "request": "request", "between_tokens": "between"}
    return {"way": row["way"]} | {
        f"{shown}, ms": f"{row[name]['p50']:,.0f}, {row[name]['p95']:,.0f}" if row[name] else ""
        for name, shown in names.items()
    }


@bench.command("speculate")
@one_line_errors
def bench_speculate(
    checkpoint: Checkpoint,
    text: Beginnings = None,
    prompts: Annotated[int, typer.Option(min=1, help="How many prompts.")] = 4,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each completion.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    deterministic: Annotated[bool, typer.Option(help="Calls of exactly 16 rows.")] = False,
    width: Annotated[int | None, typer.Option(min=1, help="Pad the model with zeros to this width: its cost.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="And to so many layers.")] = None,
    against: Against = None,
    repeats: Repeats = 3,
    as_json: AsJson = False,
) -> None:
    """Self-speculation against plain decoding of one request, and the ceiling of each way."""
    from looplm.cli.speculation import measure_speculation

    found = [
        asdict(row)
        for row in measure_speculation(
            checkpoint, text, prompts, tokens, temperature, deterministic, repeats, width, layers, against
        )
    ]
    print_measured(
        as_json, {"checkpoint": checkpoint, "tokens": prompts * tokens, "width": width, "layers": layers}, found
    )


@bench.command("policies")
@one_line_errors
def bench_policies(
    checkpoint: Checkpoint,
    text: HeldOutText = None,
    questions: Annotated[bool, typer.Option(help="Accuracy on the demo's held-out questions, not loss.")] = False,
    policy: Annotated[list[str] | None, typer.Option(help="exit_cdf, margin, ...; may be given again.")] = None,
    points: Annotated[int, typer.Option(min=1, help="Thresholds of each policy.")] = 4,
    requests: Annotated[int, typer.Option(min=1, help="Completions to time.")] = 16,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each.")] = 64,
    rows: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 16,
    text_tokens: Annotated[int, typer.Option(min=2, help="Tokens of the text to judge by.")] = 4096,
    plot: Annotated[Path | None, typer.Option(help="Where to draw it: a file .svg, .png or .pdf.")] = None,
    repeats: Repeats = 3,
    as_json: AsJson = False,
) -> None:
    """Depth policies on a trained model: loss or accuracy against mean loops and the engine's tokens a second."""
    from looplm.cli.policies import measure_policies
    from looplm.studies.bench_policies import PoliciesProblem

    problem = PoliciesProblem(requests=requests, tokens=tokens, rows=rows, points=points, families=tuple(policy or ()))
    measure, found = measure_policies(checkpoint, text, questions, text_tokens, problem, plot, repeats)
    described = {
        "checkpoint": checkpoint, "text": text, "text_tokens": text_tokens, "measure": measure, **asdict(problem)
    }  # fmt: skip
    shown = [
        {
            "policy": row.policy,
            "threshold": row.threshold,
            "loops": row.mean_loops,
            measure: f"{row.measured:.4f}",
            "loops made": row.made_loops,
            "tokens/s": row.tokens_per_second,
        }
        for row in found
    ]
    drawn = [] if plot is None else [f"plot: {plot}"]
    print_measured(as_json, described, [asdict(row) for row in found], tables=[shown], after=drawn)


@bench.command("parallel")
@one_line_errors
def bench_parallel(
    checkpoint: Annotated[str, typer.Argument(help="A trained checkpoint or run folder, of a model with injection.")],
    text: Beginnings = None,
    inner_loops: Annotated[str, typer.Option(help="Loops between two readings, to try in turn.")] = "1,2,4",
    thresholds: Annotated[str, typer.Option(help="Changes below which a position freezes, to try.")] = "0,0.03,0.1",
    wavefront: Annotated[int, typer.Option(min=1, help="Open positions at most.")] = 128,
    momentum: Annotated[float, typer.Option(min=0.0, help="Share of the inputs that stays.")] = 0.0,
    noise: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of start noise mixed in.")] = 0.0,
    prompts: Annotated[int, typer.Option(min=1, help="How many prompts.")] = 4,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each completion.")] = 96,
    repeats: Repeats = 3,
    as_json: AsJson = False,
) -> None:
    """The parallel sampler (lossy) against plain decoding of one text, with the tokens that it changes."""
    from looplm.cli.parallel import measure_parallel

    shared = {"wavefront": wavefront, "momentum": momentum, "noise": noise}
    rows = measure_parallel(checkpoint, text, inner_loops, thresholds, shared, prompts, tokens, repeats)
    found = [asdict(row) for row in rows]
    print_measured(as_json, {"checkpoint": checkpoint, "tokens": prompts * tokens, **shared}, found)


@bench.command("int8")
@one_line_errors
def bench_int8(
    checkpoint: Checkpoint,
    text: HeldOutText = None,
    loops: Annotated[int | None, typer.Option(min=1, help="Last loop to read at; twice the model's own.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each timed completion.")] = 64,
    rows: Annotated[int, typer.Option(min=1, help="Requests at once, besides one alone.")] = 8,
    text_tokens: Annotated[int, typer.Option(min=2, help="Tokens of the text to judge by.")] = 16384,
    repeats: Repeats = 5,
    as_json: AsJson = False,
) -> None:
    """Int8 weights against float32: loss and choices by loops, bytes of the core, the engine's tokens a second."""
    from looplm.cli.int8 import measure_int8
    from looplm.studies.bench_int8 import drift_growth

    problem, by_loop, by_weights = measure_int8(checkpoint, text, text_tokens, loops, tokens, rows, repeats)
    found, weights = [asdict(row) for row in by_loop], [asdict(row) for row in by_weights]
    described = {"checkpoint": checkpoint, "text": text, "text_tokens": text_tokens, **asdict(problem)}
    shown = [
        {"loop": row.loop, "loss": f"{row.loss:.4f}", "int8": f"{row.int8_loss:.4f}"}
        | {"difference": f"{row.difference:+.5f} ({row.standard_error:.5f})"}
        | {"changed": f"{row.changed:.2%}", "drift": f"{row.drift:.2%}"}
        for row in by_loop
    ]
    speeds = [
        {"weights": row["weights"], "core": f"{row['core_bytes']:,} bytes", "tokens/s, 1 row": row["one_row"]}
        | {f"{rows} rows": row["all_rows"]}
        for row in weights
    ]
    growth = drift_growth(by_loop)
    verdict = "more than linear: the loops amplify the rounding" if growth > problem.loops else "no more than linear"
    print_measured(
        as_json, described, found, further={"weights": weights, "drift_growth": growth}, tables=[shown, speeds],
        after=[f"drift of the logits: {growth:.2f} x from loop 1 to loop {problem.loops}, {verdict}"],
    )  # fmt: skip
