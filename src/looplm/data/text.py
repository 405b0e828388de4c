"""Real text: the reference manual inside every CPython, or the user's files."""

from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

from looplm.data.files import check_characters, read_records, value_of


def read_documents(path: str | Path | None = None, field: str = "text") -> list[str]:
    """The documents of `path` (see `iterate_documents`), or of Python's own manual.

    Raises:
        ValueError: if the path is missing, holds no text, or is not UTF-8.
    """
    documents = list(iterate_documents(path, field))
    if not documents:
        raise ValueError(f"the text '{path}' is empty")
    return documents


def iterate_documents(path: str | Path | None = None, field: str = "text") -> Iterator[str]:
    """The documents of a text file, of a .jsonl, .parquet or .arrow file (one a record, under `field`), of every such
    file under a folder, or of a dataset "hub:owner/name"; of Python's own manual without a path. Blank ones are not
    given.

    Raises:
        ValueError: if something cannot be read or is not text; file and line are named.
    """
    if path is None:
        yield from (topics[name] for name in sorted(topics))
        return
    for record in read_records(path, field):
        text = value_of(record, field)
        if not isinstance(text, str):
            raise ValueError(f"{record.where}: the field '{field}' is a {type(text).__name__}, not text")
        if text.strip():
            yield check_characters(record, text)
