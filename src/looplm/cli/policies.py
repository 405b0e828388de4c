"""`looplm bench policies`: a checkpoint judged on held-out text, or on the demo's held-out questions."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from looplm.cli.calibration import longest_row
from looplm.cli.paths import open_checkpoint
from looplm.data.streams import MemoryStream
from looplm.data.text import read_documents
from looplm.data.tokenizer import encode, load_tokenizer
from looplm.data.windows import split_documents
from looplm.models import LoopLMConfig, load
from looplm.studies.bench_policies import (
    Measure,
    PoliciesProblem,
    PolicyRow,
    bench_policies,
    draw,
    read_questions,
    read_text,
)
from looplm.tasks import Compose

_ROW = 128  # tokens
_HELD_OUT = 0.1  # of each document of Python's manual, as recipes hold out by default
_FIGURES = (".svg", ".png", ".pdf")


def measure_policies(
    checkpoint: str, text: str | None, questions: bool, tokens: int, problem: PoliciesProblem, plot: Path | None,
    repeats: int,
) -> tuple[Measure, list[PolicyRow]]:  # fmt: skip
    """What was measured, and the rows; drawn where `plot` says."""
    if questions and text is not None:
        raise ValueError(f"--questions asks the demo's own; leave the text '{text}' out")
    if plot is not None and plot.suffix not in _FIGURES:
        raise ValueError(f"--plot {plot}: a figure's name ends in one of {', '.join(_FIGURES)}")
    folder = open_checkpoint(checkpoint)
    model, tokenizer = load(folder), load_tokenizer(folder)
    if questions:
        held_out = read_questions(model, tokenizer, Compose(), problem.requests)
    else:
        held_out = read_text(model, held_out_rows(model.config, tokenizer, text, tokens), problem.requests)
    rows = bench_policies(model, held_out, problem, repeats)
    if plot is not None:
        plot.parent.mkdir(parents=True, exist_ok=True)
        draw(rows, held_out.measure).savefig(plot, dpi=200)
    return held_out.measure, rows


def held_out_rows(
    config: LoopLMConfig, tokenizer: PreTrainedTokenizerFast, text: str | None, tokens: int
) -> Tensor:  # fmt: skip
    """The first tokens of a text as rows [B, S]; of Python's manual, only of what recipes hold out by default."""
    documents = encode(tokenizer, read_documents(text), plain=True)
    stream = split_documents(documents, _HELD_OUT)[1] if text is None else MemoryStream(documents)
    assert stream is not None
    count = min(tokens, stream.num_tokens)
    length = min(longest_row(config, _ROW), count)
    if length < 2:
        raise ValueError(f"the text '{text}' has {count} tokens; give at least two")
    return torch.from_numpy(stream.read(0, count // length * length)).view(-1, length)
