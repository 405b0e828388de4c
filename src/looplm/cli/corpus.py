"""`looplm tokenize` and `looplm average`: text into token shards, checkpoints into one model."""

from pathlib import Path

from looplm.cli.paths import open_checkpoint
from looplm.data.shards import ShardMeta, write_shards
from looplm.data.text import iterate_documents
from looplm.data.tokenizer import encode, load_tokenizer
from looplm.training.averaging import write_average
from looplm.training.checkpoints import complete_checkpoints

_AT_ONCE = 1000  # documents


def tokenize_corpus(text: str, tokenizer: str, out: Path, field: str) -> ShardMeta:
    """Write the documents of `text` (see `looplm.data.text`) as token shards, each ended by the end token."""
    folder = Path(tokenizer)
    reader = load_tokenizer(folder if (folder / "tokenizer.json").exists() else open_checkpoint(tokenizer))
    if reader.eos_token_id is None:
        raise ValueError(f"the tokenizer in '{tokenizer}' has no end token, so documents could not be told apart")

    def documents():
        waiting: list[str] = []
        for text_of_one in iterate_documents(text, field):
            waiting.append(text_of_one)
            if len(waiting) == _AT_ONCE:
                yield from encode(reader, waiting, plain=True)
                waiting = []
        yield from encode(reader, waiting, plain=True)

    return write_shards(([*ids, reader.eos_token_id] for ids in documents()), out, reader)


def average_run(run: Path, out: Path, beta: float, last: int, dilation: int) -> list[Path]:
    """Write the average of a run's checkpoints as a model folder; the checkpoints that went in."""
    done = complete_checkpoints(run / "checkpoints")
    if not done:
        raise ValueError(f"'{run}' is no run with a complete checkpoint")
    return write_average(done, out, beta, last, dilation)
