"""`looplm eval code` and `looplm eval reason`: what the engine writes, run or marked."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from looplm.cli import eval_options as options
from looplm.cli.errors import one_line_errors
from looplm.cli.progress import progress
from looplm.cli.tables import AsJson

Ks = Annotated[str | None, typer.Option("--k", help="The k of pass@k, joined by commas.")]


@one_line_errors
def code(
    model: options.Model,
    task: Annotated[Literal["humaneval", "mbpp"], typer.Option(help="Whose problems and prompts.")],
    problems: Annotated[Path | None, typer.Option(help="A file of them, instead of a package's.")] = None,
    data: options.Data = None, loops: options.Loops = None, exits: options.Exits = None, kv: options.Kv = "full",
    form: Annotated[
        Literal["base", "prefilled", "chat"], typer.Option(help="As text, or by the chat template.")
    ] = "base",
    samples: Annotated[int, typer.Option(min=1, help="Programs of each problem.")] = 1,
    temperature: options.Temperature = 0.0, top_p: options.TopP = 1.0, k: Ks = "1",
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a program at most.")] = 1024,
    isolation: Annotated[
        Literal["namespaces", "limits"], typer.Option(help="How programs are kept; limits stop accidents only.")
    ] = "namespaces",
    limit: options.Limit = None, batch_size: options.BatchSize = 8,
    seed: Annotated[int, typer.Option(min=0, help="Of the sampling.")] = 0,
    against: options.Against = None, dtype: options.Dtype = "float32", device: options.Device = "cpu",
    out: options.Out = None, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Write HumanEval's or MBPP's programs, run them apart, and give pass@k."""
    from looplm.evals.code_run import CodeSettings, run_code

    chosen = options.model_settings(model, loops, exits, kv, dtype, device, against)
    asked = CodeSettings(
        task=task, problems=problems, data=data, limit=limit, form=form, samples=samples, ks=options.counts("--k", k),
        temperature=temperature, top_p=top_p, max_tokens=max_tokens, seed=seed, isolation=isolation, rows=batch_size,
    )  # fmt: skip
    with progress() as advance:
        found = run_code(chosen, asked, advance)
    options.finish(found, out, as_json)


@one_line_errors
def reason(
    model: options.Model,
    problems: Annotated[str, typer.Argument(help="A file of problems, or a benchmark's name.", show_default=False)],
    name: Annotated[str | None, typer.Option(help="Of the task in results.")] = None,
    question: Annotated[str | None, typer.Option(help="The field of a record that asks, with --answer.")] = None,
    answer: Annotated[str | None, typer.Option(help="The field of a record that answers.")] = None,
    data: options.Data = None, loops: options.Loops = None, exits: options.Exits = None, kv: options.Kv = "full",
    budgets: Annotated[str, typer.Option(help="Limits of new tokens, all read of one generation.")] = "2048",
    seeds: Annotated[int, typer.Option(min=1, help="Samples of each problem; with a temperature.")] = 1,
    temperature: options.Temperature = 0.0, top_p: options.TopP = 1.0, k: Ks = None,
    shots: Annotated[str, typer.Option(help="Solved examples before a problem; several numbers are compared.")] = "0",
    worked: Annotated[Path | None, typer.Option(help="A file of solved examples.")] = None,
    chat: Annotated[bool, typer.Option(help="Ask through the tokenizer's chat template.")] = False,
    stop: Annotated[list[str] | None, typer.Option(help="A string that ends an answer; may be given again.")] = None,
    limit: options.Limit = None, batch_size: options.BatchSize = 8, against: options.Against = None,
    dtype: options.Dtype = "float32", device: options.Device = "cpu", out: options.Out = None, as_json: AsJson = False,
) -> None:  # fmt: skip
    r"""Ask problems by the papers' prompt, mark the last \boxed{}, at every depth and decode budget."""
    from looplm.evals.problems import Fields
    from looplm.evals.reason_run import ReasonSettings, run_reasoning

    chosen = options.model_settings(model, loops, exits, kv, dtype, device, against)
    asked = ReasonSettings(
        problems=problems, name=name or _named(problems), data=data, fields=Fields(question=question, answer=answer),
        limit=limit, shots=options.counts("--shots", shots, least=0), worked=worked, chat=chat,
        budgets=options.counts("--budgets", budgets), seeds=seeds, temperature=temperature, top_p=top_p,
        pass_at=options.counts("--k", k), stops=tuple(stop or ()), rows=batch_size,
    )  # fmt: skip
    with progress() as advance:
        found = run_reasoning(chosen, asked, advance)
    options.finish(found, out, as_json)


def _named(problems: str) -> str:
    """A benchmark's name, or a file's with that of its folder ("svamp/test")."""
    path = Path(problems)
    return "/".join(path.resolve().with_suffix("").parts[-2:]) if path.exists() else problems
