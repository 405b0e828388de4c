"""Documents end to end as one stream of tokens that knows where each begins."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class TokenStream(Protocol):
    """Documents end to end; token `i` of the stream belongs to the last document that begins at or before `i`."""

    @property
    def num_tokens(self) -> int:
        """The tokens of all documents."""
        ...

    def read(self, start: int, stop: int) -> np.ndarray:
        """The tokens [stop - start] from `start` to `stop`, int64."""
        ...

    def offsets(self, start: int, stop: int) -> np.ndarray:
        """How far into its document each token from `start` to `stop` is, int64."""
        ...


class MemoryStream:
    """A stream of documents in memory; empty documents are left out."""

    def __init__(self, documents: Sequence[Sequence[int]]) -> None:
        arrays = [np.asarray(document, dtype=np.int32) for document in documents if len(document)]
        self._tokens = np.concatenate(arrays or [np.zeros(0, dtype=np.int32)])
        self._begins = np.cumsum([0, *(len(array) for array in arrays)])[:-1]

    @property
    def num_tokens(self) -> int:
        """The tokens of all documents."""
        return len(self._tokens)

    def read(self, start: int, stop: int) -> np.ndarray:
        """The tokens from `start` to `stop`."""
        return self._tokens[start:stop].astype(np.int64)

    def offsets(self, start: int, stop: int) -> np.ndarray:
        """How far into its document each token from `start` to `stop` is."""
        return offsets_of(self._begins, start, stop)


class StreamPart:
    """The documents of a stream that lie between two tokens, the first of which begins a document."""

    def __init__(self, stream: TokenStream, first: int, last: int) -> None:
        self._stream = stream
        self._first = first
        self.num_tokens = last - first

    def read(self, start: int, stop: int) -> np.ndarray:
        """The tokens from `start` to `stop`, counted from the part's own beginning."""
        return self._stream.read(self._first + start, self._first + stop)

    def offsets(self, start: int, stop: int) -> np.ndarray:
        """How far into its document each token from `start` to `stop` is."""
        return self._stream.offsets(self._first + start, self._first + stop)


def offsets_of(begins: np.ndarray, start: int, stop: int) -> np.ndarray:
    """How far tokens `start` to `stop` are from the last of `begins` (ascending) at or before them.

    Only the documents that the tokens touch are looked up, so `begins` may be a memory map.
    """
    places = np.arange(start, stop)
    first, last = np.searchsorted(begins, [start, stop - 1], side="right")
    near = np.asarray(begins[first - 1 : last])
    return places - near[np.searchsorted(near, places, side="right") - 1]
