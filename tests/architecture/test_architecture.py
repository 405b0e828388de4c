"""The shape of the house: rooms point one way, files and functions stay small, forbidden things stay out."""

import ast
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "src" / "looplm").rglob("*.py"))
TREES = {file: ast.parse(file.read_text()) for file in FILES}


def functions(tree):
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def length(node):
    return node.end_lineno - node.lineno + 1


def test_rooms_point_one_way():
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_files_and_functions_are_small(file):
    assert len(file.read_text().splitlines()) <= 400
    assert all(length(node) <= 60 for node in functions(TREES[file]))


def test_the_median_function_is_far_below_the_limit():
    assert statistics.median(length(node) for tree in TREES.values() for node in functions(tree)) <= 12


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_every_file_opens_with_one_sentence(file):
    docstring = ast.get_docstring(TREES[file])
    assert docstring
    assert docstring.splitlines()[0].endswith((".", ":"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_stranger_code_and_no_pickles(file):
    text = file.read_text()
    for forbidden in (
        r"trust_remote_code\s*=\s*True",
        r"\btorch\.load\(",
        r"\bpickle\b",
        r"\bhasattr\(config",
        r"TODO",
    ):
        assert not re.search(forbidden, text), forbidden


def test_there_is_no_utils_room():
    assert not [file for file in FILES if "utils" in file.parts or file.stem == "utils"]


def test_no_two_test_files_share_a_name():
    names = [file.name for file in (ROOT / "tests").rglob("*.py") if file.name != "__init__.py"]
    assert not {name for name in names if names.count(name) > 1}, "pytest imports test files by their bare names"


# Third parties that only some runs need, and that take seconds to import.
OPTIONAL = {
    "datasets", "numba", "peft", "reasoning_gym", "torchao.optim", "torchao.optim.subclass_8bit",
    "torchao.quantization.quant_api",
}  # fmt: skip


def imported(node):
    return {alias.name for alias in node.names} if isinstance(node, ast.Import) else {node.module}


def test_imports_inside_functions_only_in_the_command_line_and_of_optional_packages():
    for file, tree in TREES.items():
        if "cli" in file.parts:
            continue
        inside = [n for f in functions(tree) for n in ast.walk(f) if isinstance(n, ast.Import | ast.ImportFrom)]
        assert all(imported(node) <= OPTIONAL for node in inside), file


def test_the_readme_names_every_room_and_file_and_has_no_blanks():
    readme = (ROOT / "README.md").read_text()
    assert not re.search(r"\b[A-Z]+_[A-Z_]+\b", readme)
    assert all(file.name in readme for file in FILES if file.stem not in ("__init__", "__main__"))
    assert not [name for name in re.findall(r"\]\((docs/[^)]+)\)", readme) if not (ROOT / name).exists()]
    for room in (path for path in (ROOT / "src" / "looplm").iterdir() if path.is_dir() and path.name != "__pycache__"):
        assert f"{room.name}/" in readme
