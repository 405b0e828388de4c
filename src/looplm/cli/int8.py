"""`looplm bench int8`: a checkpoint and its int8 copy on held-out text."""

from looplm.cli.paths import open_checkpoint
from looplm.cli.policies import held_out_rows
from looplm.data.tokenizer import load_tokenizer
from looplm.models import load
from looplm.studies.bench_int8 import Int8Problem, LoopRow, WeightsRow, bench_int8


def measure_int8(
    checkpoint: str, text: str | None, text_tokens: int, loops: int | None, tokens: int, rows: int, repeats: int
) -> tuple[Int8Problem, list[LoopRow], list[WeightsRow]]:  # fmt: skip
    """What was measured, by loops and by weights; twice the model's own loops by default."""
    folder = open_checkpoint(checkpoint)
    model = load(folder)
    held_out = held_out_rows(model.config, load_tokenizer(folder), text, text_tokens)
    problem = Int8Problem(loops=2 * model.config.loops if loops is None else loops, tokens=tokens, rows=rows)
    return problem, *bench_int8(model, held_out, problem, repeats)
