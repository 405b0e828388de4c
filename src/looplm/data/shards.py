"""Token shards on disk: documents end to end in memory-mapped arrays, written once and read by place."""

import json
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast

from looplm.data.streams import offsets_of
from looplm.data.tokenizer import fingerprint

_META, _DOCUMENTS = "shards.json", "documents.npy"


@dataclass(frozen=True, kw_only=True)
class ShardMeta:
    """What a folder of shards holds."""

    num_tokens: int
    num_documents: int
    shard_tokens: int
    dtype: str
    vocab_size: int
    tokenizer: str


def write_shards(
    documents: Iterable[Sequence[int]], folder: str | Path, tokenizer: PreTrainedTokenizerFast,
    shard_tokens: int = 2**26,
) -> ShardMeta:  # fmt: skip
    """Write `documents` (token ids) to `folder` as arrays of `shard_tokens` tokens, across which documents may lie.

    The folder appears under its name when it is complete.

    Raises:
        ValueError: if the folder exists already, or there is no token at all.
    """
    folder = Path(folder)
    if folder.exists():
        raise ValueError(f"'{folder}' exists already; give a new folder")
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    dtype = np.uint16 if len(tokenizer) <= 2**16 else np.uint32
    begins, total = _write_tokens(documents, partial, dtype, shard_tokens, len(tokenizer))
    if not total:
        shutil.rmtree(partial)
        raise ValueError(f"there is no text to write to '{folder}'")
    np.save(partial / _DOCUMENTS, np.asarray(begins, dtype=np.int64), allow_pickle=False)
    meta = ShardMeta(
        num_tokens=total, num_documents=len(begins), shard_tokens=shard_tokens, dtype=np.dtype(dtype).name,
        vocab_size=len(tokenizer), tokenizer=fingerprint(tokenizer),
    )  # fmt: skip
    (partial / _META).write_text(json.dumps(asdict(meta), indent=1) + "\n")
    os.replace(partial, folder)
    return meta


class TokenShards:
    """The token stream (see `streams.TokenStream`) of a folder that `write_shards` made; nothing is read before asked.

    Raises:
        ValueError: if the folder is no such folder, is damaged, or was made with another tokenizer.
    """

    def __init__(self, folder: str | Path, tokenizer: PreTrainedTokenizerFast | None = None) -> None:
        self._folder = Path(folder)
        self.meta = _read_meta(self._folder)
        if tokenizer is not None and fingerprint(tokenizer) != self.meta.tokenizer:
            raise ValueError(f"the shards in '{folder}' were made with another tokenizer; run looplm tokenize again")
        self.num_tokens = self.meta.num_tokens
        self._begins = _open(self._folder / _DOCUMENTS, self.meta.num_documents, "int64")
        sizes = [
            min(self.meta.shard_tokens, self.num_tokens - first)
            for first in range(0, self.num_tokens, self.meta.shard_tokens)
        ]
        self._shards = [_open(self._folder / _name(number), size, self.meta.dtype) for number, size in enumerate(sizes)]

    def __reduce__(self) -> tuple[type, tuple[Path]]:
        """Another process opens the folder again instead of being sent the corpus."""
        return type(self), (self._folder,)

    def read(self, start: int, stop: int) -> np.ndarray:
        """The tokens from `start` to `stop`, int64, whichever shards they lie in."""
        size = self.meta.shard_tokens
        parts = [
            self._shards[shard][max(start - shard * size, 0) : stop - shard * size]
            for shard in range(start // size, (stop - 1) // size + 1)
        ]
        return np.concatenate(parts).astype(np.int64)

    def offsets(self, start: int, stop: int) -> np.ndarray:
        """How far into its document each token from `start` to `stop` is."""
        return offsets_of(self._begins, start, stop)


def _write_tokens(
    documents: Iterable[Sequence[int]], folder: Path, dtype: type, shard_tokens: int, vocab_size: int
) -> tuple[list[int], int]:
    begins, total, number = [], 0, 0
    waiting: list[np.ndarray] = []
    held = 0
    for document in documents:
        if not len(document):
            continue
        tokens = np.asarray(document, dtype=np.int64)
        if tokens.min() < 0 or tokens.max() >= vocab_size:
            raise ValueError(f"document {len(begins) + 1} holds a token outside the vocabulary of {vocab_size}")
        begins.append(total)
        total += len(document)
        waiting.append(tokens.astype(dtype))
        held += len(document)
        while held >= shard_tokens:
            joined = np.concatenate(waiting)
            np.save(folder / _name(number), joined[:shard_tokens], allow_pickle=False)
            waiting, held, number = [joined[shard_tokens:]], held - shard_tokens, number + 1
    if held:
        np.save(folder / _name(number), np.concatenate(waiting), allow_pickle=False)
    return begins, total


def _name(number: int) -> str:
    return f"shard-{number:05d}.npy"


def _read_meta(folder: Path) -> ShardMeta:
    try:
        return ShardMeta(**json.loads((folder / _META).read_text()))
    except FileNotFoundError as error:
        raise ValueError(f"'{folder}' holds no token shards; make them with looplm tokenize") from error
    except (ValueError, TypeError) as error:
        raise ValueError(f"{folder / _META} is damaged; run looplm tokenize again") from error


def _open(file: Path, size: int, dtype: str) -> np.ndarray:
    try:
        array = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{file} cannot be read as token shards; run looplm tokenize again") from error
    if array.shape != (size,) or array.dtype != dtype:
        raise ValueError(
            f"{file} holds {array.shape} numbers of {array.dtype} where {size} of {dtype} were written; "
            "run looplm tokenize again"
        )
    return array
