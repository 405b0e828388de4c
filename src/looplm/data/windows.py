"""Windows of running text for next-token training, drawn as a pure function of a seed."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from looplm.data.packing import IGNORED


class TextWindows:
    """Tokenised documents end to end, cut into a training part and a held-out part (the tail of each document).

    `train` draws `rows` windows of `length` tokens with the given seed; `held_out` walks through the other part from
    its start. Positions restart where a document starts inside a window, so documents do not see each other.
    """

    def __init__(self, documents: Sequence[Sequence[int]], length: int, held_out: float = 0.05) -> None:
        cuts = [max(1, round(len(document) * (1 - held_out))) for document in documents]
        self.length = length
        self._train = _Stream([doc[:cut] for doc, cut in zip(documents, cuts, strict=True)], length, "training")
        self._held_out = _Stream([doc[cut:] for doc, cut in zip(documents, cuts, strict=True)], length, "held-out")

    def train(self, rows: int, seed: Sequence[int]) -> dict[str, Tensor]:
        """`rows` windows at random places of the training part; the same seed gives the same windows."""
        places = np.random.default_rng(seed).integers(0, self._train.num_places, rows)
        return self._train.windows(places)

    def held_out(self, rows: int) -> dict[str, Tensor]:
        """Up to `rows` windows, side by side, from the start of the held-out part."""
        places = np.arange(0, self._held_out.num_places, self.length)[:rows]
        return self._held_out.windows(places)


class _Stream:
    def __init__(self, documents: Sequence[Sequence[int]], length: int, part: str) -> None:
        documents = [document for document in documents if len(document)]
        sizes = [len(document) for document in documents]
        self.length = length
        self.tokens = np.concatenate([np.asarray(document, dtype=np.int64) for document in documents] or [[]])
        self.starts = np.repeat(np.cumsum([0, *sizes[:-1]]), sizes)  # of the document that each token belongs to
        self.num_places = len(self.tokens) - length + 1
        if self.num_places < 1:
            raise ValueError(f"the {part} text has {len(self.tokens)} tokens; a window needs {length}: give more text")

    def windows(self, places: np.ndarray) -> dict[str, Tensor]:
        index = places[:, None] + np.arange(self.length)
        positions = index - np.maximum(self.starts[index], places[:, None])
        labels = np.where(positions == 0, IGNORED, self.tokens[index])
        columns = {"input_ids": self.tokens[index], "labels": labels, "position_ids": positions}
        return {name: torch.from_numpy(column) for name, column in columns.items()}
