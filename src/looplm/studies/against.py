"""Any other generate callable, given our weights, to be measured beside ours."""

import importlib.util
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from looplm.models import LoopLMForCausalLM, save

Generate = Callable[[list[list[int]], int], list[list[int]]]


@contextmanager
def given_to(place: str | None, model: LoopLMForCausalLM) -> Generator[Generate | None]:
    """The callable of `place` (see `load_callable`) on the weights of `model`, in Ouro's layout; None for None."""
    if place is None:
        yield None
        return
    factory = load_callable(place)
    with TemporaryDirectory() as folder:
        save(model, folder, layout="ouro")
        yield factory(Path(folder))


def load_callable(place: str) -> Callable[[Path], Generate]:
    """`factory` of "file.py:factory": called with a model folder it gives generate(prompts, max_new_tokens) -> tokens.

    Raises:
        ValueError: if there is no such file or function.
    """
    path, _, name = place.rpartition(":")
    spec = importlib.util.spec_from_file_location("against", path) if Path(path).is_file() else None
    if spec is None or spec.loader is None:
        raise ValueError(f"'{place}' is not file.py:function")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not callable(getattr(module, name, None)):
        raise ValueError(f"{path} has no function '{name}'")
    return getattr(module, name)
