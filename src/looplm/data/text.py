"""Real text: the reference manual inside every CPython, or the user's files."""

from pathlib import Path
from pydoc_data.topics import topics


def read_documents(path: str | Path | None = None) -> list[str]:
    """The documents of a file, of every text file under a folder (by name), or of Python's own manual.

    Raises:
        ValueError: if the path is missing, holds no text, or is not UTF-8.
    """
    if path is None:
        return [topics[name] for name in sorted(topics)]
    path = Path(path)
    if not path.exists():
        raise ValueError(f"the text '{path}' does not exist")
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    documents = [document for document in map(_read, files) if document.strip()]
    if not documents:
        raise ValueError(f"the text '{path}' is empty")
    return documents


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"'{file}' is not UTF-8 text") from error
