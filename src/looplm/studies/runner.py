"""Many runs side by side, one single-threaded process a core, each resumed where it stopped."""

import json
import multiprocessing
import os
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from threading import Thread

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers.utils import logging

from looplm.studies.study import Job, Outcome

_OUTCOME = "outcome.json"
_LOOK_EVERY = 5  # seconds between two looks at the logs of the runs


def run_jobs(
    jobs: Mapping[Path, Job], processes: int, console: Console, again: bool = False
) -> dict[Path, Outcome]:  # fmt: skip
    """The outcome of the job of every folder; those that lie there already cost nothing, unless all run `again`.

    A bar counts the training steps of all jobs, as the logs tell them, and one line is printed as each job ends.
    """
    done = {} if again else {folder: _read(folder) for folder in jobs if (folder / _OUTCOME).exists()}
    open_jobs = {folder: job for folder, job in jobs.items() if folder not in done}
    if open_jobs:
        context = multiprocessing.get_context("spawn")
        with (
            ProcessPoolExecutor(processes, mp_context=context, initializer=_begin) as pool,
            _bar(console) as bar,
        ):
            steps = {folder: job.steps() for folder, job in jobs.items()}
            task = bar.add_task("", total=sum(steps.values()))
            waiting: dict[Future[Outcome], Path] = {
                pool.submit(_run, job, folder): folder for folder, job in open_jobs.items()
            }
            while True:
                taken = sum(steps[folder] if folder in done else logged_steps(folder) for folder in jobs)
                bar.update(task, completed=taken, description=f"{len(done)} of {len(jobs)} runs")
                if not waiting:
                    break
                ended, _ = wait(waiting, _LOOK_EVERY, FIRST_COMPLETED)
                for future in ended:
                    folder = waiting.pop(future)
                    done[folder] = _result(future, waiting)
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
    Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    logging.disable_progress_bar()


def _end_with_parent() -> None:
    """A study that is killed leaves no run behind that would write beside the next one's."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


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


def logged_steps(folder: Path) -> int:
    """Training steps that the logs under `folder` tell of: each log's last whole line's."""
    texts = (log.read_text() for log in folder.glob("stage*/log.jsonl"))
    lines = (text[: text.rfind("\n") + 1].rstrip().rpartition("\n")[2] for text in texts)
    return sum(json.loads(line)["step"] for line in lines if line)


def _bar(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"), TimeElapsedColumn(),
        TimeRemainingColumn(),
    )  # fmt: skip
    return Progress(*columns, console=console, disable=not console.is_terminal, speed_estimate_period=600)
