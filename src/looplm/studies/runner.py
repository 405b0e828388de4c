"""Many training runs side by side, one single-threaded process a core, each resumed where it stopped."""

import multiprocessing
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed

import torch
from rich.console import Console

from looplm.training import Recipe, RunResult, train


def run_all(recipes: Mapping[str, Recipe], processes: int, console: Console) -> dict[str, RunResult]:
    """The result of every named recipe; finished runs cost nothing. One line is printed as each ends."""
    done: dict[str, RunResult] = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        waiting = {pool.submit(_run, recipe, name): name for name, recipe in recipes.items()}
        for future in as_completed(waiting):
            name = waiting[future]
            done[name] = future.result()
            console.print(f"{name}: step {done[name].step} of {done[name].steps}", highlight=False)
    return {name: done[name] for name in recipes}


def _run(recipe: Recipe, name: str) -> RunResult:
    return train(recipe, Console(quiet=True), title=name)
