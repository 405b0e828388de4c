"""`looplm calibrate`: an exit threshold measured on text, kept with the model."""

from pathlib import Path

import torch

from looplm.cli.paths import open_checkpoint
from looplm.data.text import read_documents
from looplm.data.tokenizer import encode, load_tokenizer
from looplm.engine.calibration import Calibration, calibrate, save_calibration
from looplm.models import LoopLMConfig, load

_ROW = 256  # tokens


def calibrate_checkpoint(
    checkpoint: str, text: str | None, policy: str, mean_loops: float | None, loss: float | None,
    min_loops: int | None, max_loops: int | None, tokens: int,
) -> tuple[Calibration, Path]:  # fmt: skip
    """What was found, and where it is kept."""
    folder = open_checkpoint(checkpoint)
    model, tokenizer = load(folder), load_tokenizer(folder)
    stream: list[int] = []
    for document in read_documents(text):
        stream += encode(tokenizer, [document], plain=True)[0]
        if len(stream) >= tokens:
            break
    length = min(longest_row(model.config, _ROW), tokens, len(stream))
    if length < 2:
        raise ValueError(f"the text '{text}' has {len(stream)} tokens; give at least two")
    rows = torch.tensor(stream[: min(tokens, len(stream)) // length * length]).view(-1, length)
    found = calibrate(
        model, rows, policy, target_loops=mean_loops, target_loss=loss, min_loops=min_loops, max_loops=max_loops
    )
    return found, save_calibration(found, folder)


def longest_row(config: LoopLMConfig, most: int) -> int:
    """At most `most` tokens: learned positions may end before."""
    return min(most, config.max_position_embeddings) if config.rope == "learned" else most
