"""Marking by math-verify: verdicts by hand, and processes that hang, die and go (field reports R35, R39)."""

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import Pipe

import psutil
import pytest

from looplm.rl import GradeCounts, MathGrader
from looplm.tasks.math_answers import _SCRIPT

SOURCE = _SCRIPT.parents[2]
LIMIT = 2.0
TOWER = "9^{9^{9^{9}}}"


def processes():
    """Those that run the worker script under this process."""
    return [child for child in psutil.Process().children(recursive=True) if _SCRIPT.name in " ".join(child.cmdline())]


@pytest.fixture(scope="module")
def grader():
    with MathGrader(workers=2, limit=LIMIT) as grader:
        assert grader.grade(["1", "2"], ["1", "2"]) == [1.0, 1.0]
        yield grader
        pids = [child.pid for child in processes()]
        assert len(pids) >= 2
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.fixture(autouse=True)
def _fresh_counts(grader):
    grader.drain()


@pytest.mark.parametrize(
    ("gold", "answer", "mark"),
    [
        (r"\frac{1}{3}", r"\frac13", 1.0),
        (r"\frac{1}{3}", "1/3", 1.0),
        ("0.5", r"\frac{1}{2}", 1.0),
        ("2x+4", "2(x+2)", 1.0),
        (r"\{1, 2\}", r"\{2, 1\}", 1.0),
        (r"50\%", "50", 1.0),  # only after light normalisation
        (r"7", r"7\text{ cm}", 1.0),
        (r"\text{Evelyn}", "Evelyn", 1.0),
        ("5", "5.0000005", 1.0),
        ("(1, 2)", "(2, 1)", 0.0),
        ("5", "6", 0.0),
        ("5", "", 0.0),
        ("5", None, 0.0),
        ("5", r"\frac{", 0.0),
        ("5", "\ud800", 0.0),
        ("5", "9" * 20_000, 0.0),
        ("???", "???", None),
        ("", "", None),
        (r"\frac{1}{", r"\frac{1}{", None),
        ("???", None, None),
    ],
)
def test_marks(grader, gold, answer, mark):
    assert grader.grade([gold], [answer]) == [mark]


def test_gold_first(grader):
    """math-verify takes a set for an inequality only if the set is the answer, so that a swap would show."""
    assert grader.grade(["x<3", r"(-\infty,3)"], [r"(-\infty,3)", "x<3"]) == [1.0, 0.0]


def test_fates_are_counted_apart(grader):
    golds = ["1", "1", "1", "???", r"x \ne 3", "1"]
    answers = ["1", "2", None, "1", "x<3", TOWER]
    assert grader.grade(golds, answers) == [1.0, 0.0, 0.0, None, 0.0, 0.0]
    assert grader.drain() == GradeCounts(right=1, wrong=1, unanswered=1, unreadable=1, errors=1, hangs=1)
    assert grader.drain() == GradeCounts()


@pytest.mark.parametrize("answer", [TOWER, r"10^{10^{10}}"])
def test_a_hang_is_0_in_time_and_the_next_call_works(grader, answer):
    assert grader.grade(["1", "1"], ["1", "1"]) == [1.0, 1.0]  # both processes have started
    begin = time.monotonic()
    assert grader.grade(["5"], [answer]) == [0.0]
    assert time.monotonic() - begin < LIMIT + 1
    assert grader.grade([r"\frac{1}{3}"] * 3, [r"\frac{1}{3}"] * 3) == [1.0] * 3
    assert grader.drain() == GradeCounts(right=5, hangs=1)
    assert len(processes()) == 2


def test_a_hang_delays_no_other_answer(grader):
    begin = time.monotonic()
    assert grader.grade(["5"] * 41, [TOWER, *["5"] * 40]) == [0.0, *[1.0] * 40]
    assert time.monotonic() - begin < LIMIT + 1


def test_from_another_thread(grader):
    found = []
    thread = threading.Thread(target=lambda: found.extend(grader.grade([r"\frac{1}{3}"] * 2, [r"\frac{1}{3}", "1"])))
    thread.start()
    thread.join()
    assert found == [1.0, 0.0]


def test_from_several_threads_at_once(grader):
    found = {}

    def ask(number):
        found[number] = grader.grade([str(number)] * 30, [str(number + shift % 2) for shift in range(30)])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(4), [1.0, 0.0] * 15)
    assert grader.drain() == GradeCounts(right=60, wrong=60)


def test_a_death_is_counted_and_the_process_replaced(grader):
    for child in processes():
        child.kill()
    marks = grader.grade(["2x"] * 6, ["x+x"] * 6)
    assert sorted(marks) == [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    assert grader.drain() == GradeCounts(right=4, deaths=2)
    assert len(processes()) == 2


def test_what_math_verify_does_not_come_to_is_right_where_it_is_spelt_as_the_gold(grader):
    assert grader.grade([TOWER, TOWER], ["x=" + TOWER, "x=9"]) == [1.0, 0.0]
    assert grader.drain() == GradeCounts(right=1, hangs=1)
    assert grader.grade(["1", "1"], ["1", "1"]) == [1.0, 1.0]  # both processes have started again
    for child in processes():
        child.kill()
    assert grader.grade(["7"] * 2, [r"7\text{ cm}"] * 2) == [1.0, 1.0]
    assert grader.drain() == GradeCounts(right=4)


def test_no_process_outlives_its_grader():
    before = {child.pid for child in processes()}
    closed, dropped = MathGrader(workers=1), MathGrader(workers=1)
    pids = {child.pid for child in processes()} - before
    assert len(pids) == 2
    closed.close()
    closed.close()
    with pytest.raises(ValueError, match="closed"):
        closed.grade(["1"], ["1"])
    del dropped
    gc.collect()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_no_process_outlives_python():
    """A script that neither closes its grader nor guards its top level, and ends in the midst of an answer."""
    script = f"""
import sys, threading, types
for name in ("looplm", "looplm.rl", "looplm.tasks"):  # the packages without what else they import, which takes seconds
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = ["/".join([{str(SOURCE)!r}, *name.split(".")])]
from looplm.tasks.math_answers import MathGrader
grader = MathGrader(workers=2, limit=1.0)
threading.Thread(target=grader.grade, args=(["5"], ["{TOWER}"]), daemon=True).start()
print(grader.grade(["1/2"], ["0.5"]), *(worker._process.pid for worker in grader._workers))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    mark, *pids = done.stdout.split()
    assert mark == "[1.0]"
    assert len(pids) == 2
    assert not any(psutil.pid_exists(int(pid)) for pid in pids)


def test_a_hung_process_ends_even_if_nobody_is_left_to_kill_it():
    ours, theirs = Pipe()
    place = theirs.fileno()
    worker = subprocess.Popen([sys.executable, "-P", str(_SCRIPT), str(place), "0.1"], pass_fds=[place])
    theirs.close()
    assert ours.recv_bytes() == b"ready"
    ours.send_bytes(json.dumps([["5"], [TOWER]]).encode())
    ours.close()
    assert worker.wait(timeout=30) == -signal.SIGALRM


def test_an_idle_process_ends_with_its_pipe_and_not_with_ctrl_c():
    ours, theirs = Pipe()
    place = theirs.fileno()
    worker = subprocess.Popen([sys.executable, "-P", str(_SCRIPT), str(place), "5"], pass_fds=[place])
    theirs.close()
    assert ours.recv_bytes() == b"ready"
    os.kill(worker.pid, signal.SIGINT)
    ours.send_bytes(json.dumps([["5"], ["5"]]).encode())
    assert ours.recv_bytes() == b"right"
    ours.close()
    assert worker.wait(timeout=30) == 0


def test_the_process_imports_neither_torch_nor_us():
    code = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('worker', {str(_SCRIPT)!r})\n"
        "spec.loader.exec_module(importlib.util.module_from_spec(spec))\n"
        "print([name for name in ('torch', 'transformers', 'looplm', 'math_verify') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["['math_verify']"]


@pytest.mark.parametrize(("workers", "limit"), [(0, 1.0), (1, 0.0), (1, float("nan"))])
def test_settings_without_sense_are_refused(workers, limit):
    with pytest.raises(ValueError, match="at least one worker"):
        MathGrader(workers=workers, limit=limit)


def test_a_missing_math_verify_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'looplm\[eval\]'"):
        MathGrader()


def test_processes_that_do_not_start_are_an_error_of_one_line(monkeypatch, tmp_path):
    broken = tmp_path / "worker.py"
    broken.write_text("raise SystemExit(1)")
    monkeypatch.setattr("looplm.tasks.math_answers._SCRIPT", broken)
    with MathGrader(workers=1) as grader, pytest.raises(ValueError, match="does not start"):
        grader.grade(["1"], ["1"])
