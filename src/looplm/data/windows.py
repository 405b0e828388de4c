"""Windows of running text for next-token training, every one once an epoch."""

from collections.abc import Sequence

import numpy as np
import torch

from looplm.data.permutation import permute
from looplm.data.rows import IGNORED, Row
from looplm.data.streams import MemoryStream, TokenStream


class TextWindows:
    """Rows of `length` tokens cut from a stream, one beside the other.

    An epoch begins its cutting at a place of its own and closes the stream to a ring, so that it visits every token
    once but for a rest shorter than a row, which moves from epoch to epoch; its rows come in an order of its own.
    Positions restart where a document starts inside a row, so documents do not see each other.

    Raises:
        ValueError: if a stream is shorter than a row.
    """

    def __init__(
        self, train: TokenStream, held_out: TokenStream | None, length: int, seed: int, held_out_rows: int = 64
    ) -> None:
        for part, stream in (("training", train), ("held-out", held_out)):
            if stream is not None and stream.num_tokens < length:
                tokens = stream.num_tokens
                raise ValueError(f"the {part} text has {tokens} tokens; a window needs {length}: give more text")
        self._train = train
        self._held_out = held_out
        self._held_out_rows = held_out_rows
        self._length = length
        self._seed = seed
        self._per_epoch = train.num_tokens // length

    def row(self, index: int) -> Row:
        """The window number `index` since the start of the run."""
        epoch, index = divmod(index, self._per_epoch)
        begin = int(np.random.SeedSequence([self._seed, epoch, 0]).generate_state(1, np.uint64)[0] % self._length)
        window = int(permute([index], self._per_epoch, [self._seed, epoch, 1])[0])
        return _window(self._train, begin + window * self._length, self._length)

    def rows_in_epochs(self, epochs: int) -> int:
        """The windows of the first `epochs` epochs."""
        return epochs * self._per_epoch

    def held_out(self) -> list[Row]:
        """The first windows of the held-out part, side by side."""
        if self._held_out is None:
            return []
        places = range(0, self._held_out.num_tokens - self._length + 1, self._length)[: self._held_out_rows]
        return [_window(self._held_out, place, self._length) for place in places]


def split_documents(documents: Sequence[Sequence[int]], held_out: float) -> tuple[MemoryStream, MemoryStream | None]:
    """A training part and a held-out part, the tail of each document; no such part if `held_out` is 0."""
    cuts = [max(1, round(len(document) * (1 - held_out))) for document in documents]
    pairs = list(zip(documents, cuts, strict=True))
    train = MemoryStream([document[:cut] for document, cut in pairs])
    return train, MemoryStream([document[cut:] for document, cut in pairs]) if held_out else None


def _window(stream: TokenStream, place: int, length: int) -> Row:
    parts = [(place, min(place + length, stream.num_tokens)), (0, place + length - stream.num_tokens)]
    parts = [(start, stop) for start, stop in parts if stop > start]
    tokens = np.concatenate([stream.read(*part) for part in parts])
    in_document = np.concatenate([stream.offsets(*part) for part in parts])
    positions = np.minimum(in_document, np.arange(length))
    labels = np.where(positions == 0, IGNORED, tokens)
    columns = {"input_ids": tokens, "labels": labels, "position_ids": positions}
    return {name: torch.from_numpy(column) for name, column in columns.items()}
