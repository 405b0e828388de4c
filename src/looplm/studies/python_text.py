"""Real text that every CPython carries: its library's source, and questions that its docstrings answer."""

import ast
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

_CODE_BYTES = 3_000_000


def write_code(folder: Path) -> None:
    """Write modules of the standard library, in order of name, to `folder` as text (about 3 MB)."""
    folder.mkdir(parents=True, exist_ok=True)
    written = 0
    for file in _modules():
        text = file.read_text(encoding="utf-8")
        (folder / f"{file.stem}.txt").write_text(text, encoding="utf-8")
        written += len(text)
        if written > _CODE_BYTES:
            return


def write_conversations(path: Path) -> int:
    """Write a question and its docstring's first paragraph for every documented name of the library; how many."""
    path.parent.mkdir(parents=True, exist_ok=True)
    records = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in _questions()
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return len(records)


def _modules() -> list[Path]:
    return sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))


def _questions() -> Iterator[tuple[str, str]]:
    for file in _modules():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                paragraph = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
                if 20 <= len(paragraph) <= 200:
                    yield f"What does {file.stem}.{node.name} do?", paragraph
