"""Many runs side by side, one single-threaded process a core, each resumed where it stopped."""

import json
import multiprocessing
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers.utils import logging

from looplm.studies.study import Job, Outcome

_OUTCOME = "outcome.json"


def run_jobs(
    jobs: Mapping[Path, Job], processes: int, console: Console, again: bool = False
) -> dict[Path, Outcome]:  # fmt: skip
    """The outcome of the job of every folder; those that lie there already cost nothing, unless all run `again`.

    A bar counts the jobs that are done, and one line is printed as each ends.
    """
    done = {} if again else {folder: _read(folder) for folder in jobs if (folder / _OUTCOME).exists()}
    open_jobs = {folder: job for folder, job in jobs.items() if folder not in done}
    if open_jobs:
        context = multiprocessing.get_context("spawn")
        with (
            ProcessPoolExecutor(processes, mp_context=context, initializer=_begin) as pool,
            _bar(console) as bar,
        ):
            task = bar.add_task("runs", total=len(jobs), completed=len(done))
            waiting: dict[Future[Outcome], Path] = {
                pool.submit(_run, job, folder): folder for folder, job in open_jobs.items()
            }
            while waiting:
                ended, _ = wait(waiting, return_when=FIRST_COMPLETED)
                for future in ended:
                    folder = waiting.pop(future)
                    done[folder] = _result(future, waiting)
                    bar.advance(task)
                    console.print(f"done: {folder}", highlight=False, soft_wrap=True)
    return {folder: done[folder] for folder in jobs}


def _result(future: Future[Outcome], others: Mapping[Future[Outcome], Path]) -> Outcome:
    """What the job gave; where it failed, those that have not begun are not to begin."""
    try:
        return future.result()
    except BaseException:
        for other in others:
            other.cancel()
        raise


def _begin() -> None:
    torch.set_num_threads(1)
    logging.disable_progress_bar()


def _run(job: Job, folder: Path) -> Outcome:
    outcome = job(folder)
    folder.mkdir(parents=True, exist_ok=True)
    aside = folder / f"{_OUTCOME}.partial"
    aside.write_text(json.dumps(asdict(outcome), indent=1) + "\n")
    aside.rename(folder / _OUTCOME)
    return _read(folder)  # as a later call will see it


def _read(folder: Path) -> Outcome:
    held = json.loads((folder / _OUTCOME).read_text())
    series = {name: [(x, y) for x, y in points] for name, points in held["series"].items()}
    return Outcome(values=held["values"], series=series, facts=held["facts"])


def _bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal)
