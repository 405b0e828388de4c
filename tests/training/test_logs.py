"""The log: JSON whatever the numbers are, and alarms when they begin and when they are over."""

import json
import math

import pytest
from rich.console import Console

from looplm.studies.records import read_log
from looplm.training.logs import RunLog


def records_of(folder):
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in (folder / "log.jsonl").read_text().splitlines()]


def opened(folder, start=0):
    return RunLog(folder, start, Console(quiet=True))


def test_what_is_not_finite_is_null_and_read_as_nan(tmp_path):
    log = opened(tmp_path)
    log.write(3, {"loss": math.nan, "grad_norm": -math.inf, "lr_factor": 0.1})
    log.close()
    assert records_of(tmp_path) == [{"step": 3, "loss": None, "grad_norm": None, "lr_factor": 0.1}]
    (record,) = read_log(tmp_path)
    assert math.isnan(record["loss"])
    assert record["lr_factor"] == 0.1


# What the numbers of each step raise, and what a log says of it.
RAISED = [{"a": "x1"}, {"a": "x2", "b": "y"}, {"b": "y"}, {}, {"a": "x5"}]
SAID = [(1, "a", "x1"), (2, "b", "y"), (3, "a", "over"), (4, "b", "over"), (5, "a", "x5")]


@pytest.mark.parametrize("stop", [None, 1, 2, 3, 4])
def test_alarms_are_written_when_they_begin_and_when_they_are_over(tmp_path, stop):
    """Also by a run that goes on from a checkpoint after `stop` steps, having lost one step more."""
    log = opened(tmp_path)
    log.alarms(1, "held out", {"a": "other numbers"})
    for step, found in enumerate(RAISED, start=1):
        if stop is not None and step == stop + 1:
            log.alarms(step, "step", found)
            log.close()
            log = opened(tmp_path, stop)
            log.alarms(stop, "held out", {"a": "still"})
        log.alarms(step, "step", found)
    log.close()
    first, *rest = records_of(tmp_path)
    assert first == {"step": 1, "alarm": "a", "of": "held out", "message": "other numbers"}
    assert [(record["step"], record["alarm"], record["message"]) for record in rest] == SAID
    assert {record["of"] for record in rest} == {"step"}


def test_an_alarm_is_printed_once(tmp_path):
    console = Console(record=True, quiet=False, file=(tmp_path / "out").open("w"))
    log = RunLog(tmp_path, 0, console)
    for step, found in enumerate(RAISED, start=1):
        log.alarms(step, "step", found)
    log.close()
    assert console.export_text().splitlines() == ["alarm at step 1: x1", "alarm at step 2: y"]
