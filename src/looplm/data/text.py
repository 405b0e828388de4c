"""Real text: the reference manual inside every CPython, or the user's files."""

import warnings
from pathlib import Path
from pydoc_data.topics import topics


def read_documents(path: str | Path | None = None) -> list[str]:
    """The documents of a file, of every UTF-8 file under a folder (by name; others are left out with a warning), or of
    Python's own manual.

    Raises:
        ValueError: if the path is missing, holds no text, or is not UTF-8.
    """
    if path is None:
        return [topics[name] for name in sorted(topics)]
    path = Path(path)
    if not path.exists():
        raise ValueError(f"the text '{path}' does not exist")
    documents = [document for document in (_read_folder(path) if path.is_dir() else [_read(path)]) if document.strip()]
    if not documents:
        raise ValueError(f"the text '{path}' is empty")
    return documents


def _read_folder(folder: Path) -> list[str]:
    documents, skipped = [], []
    for file in sorted(file for file in folder.rglob("*") if file.is_file()):
        try:
            documents.append(_read(file))
        except ValueError:
            skipped.append(file)
    if skipped:
        warnings.warn(f"left out {len(skipped)} files that are not UTF-8 text, such as {skipped[0]}", stacklevel=3)
    return documents


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"'{file}' is not UTF-8 text") from error
