"""A program can harm nothing but its own verdict, and cannot make that "passed" without its tests."""

import contextlib
import http.server
import json
import os
import subprocess
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from looplm.evals import sandbox
from looplm.evals.sandbox import Limits, run_program

BRIEF = Limits(cpu_seconds=1, wall_seconds=15)
MARK = f"looplm{os.getpid() % 10**6}"
MARKED = f"import ctypes\nctypes.CDLL(None).prctl(15, b'{MARK}', 0, 0, 0)\n"  # PR_SET_NAME, which forks inherit


@pytest.fixture(scope="module")
def namespaces():
    try:
        run_program("")
    except ValueError as error:
        pytest.skip(str(error))
    return "namespaces"


@pytest.fixture(params=["namespaces", "limits"])
def isolation(request):
    return request.getfixturevalue("namespaces") if request.param == "namespaces" else "limits"


def marked_processes():
    """Processes of this machine that a marked program started."""
    found = []
    for place in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):
            found += [place] * (place.read_text().strip() == MARK)
    return found


class Server:
    """A local web server that counts its requests."""

    def __enter__(self):
        requests = self.requests = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                requests.append(self.path)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


def test_a_program_passes_when_it_and_its_tests_come_to_their_end(isolation):
    source = "def double(x):\n    return 2 * x\nprint('täglich')"
    right = run_program(source, tests="assert double(2) == 4", isolation=isolation)
    assert (right.outcome, right.message, right.output, right.isolation) == ("passed", "", "täglich\n", isolation)
    wrong = run_program(source, tests="\nassert double(2) == 5, 'zwölf'", isolation=isolation)
    assert (wrong.outcome, wrong.message) == ("failed", "AssertionError: zwölf (tests, line 2)")
    assert right.passed
    assert not wrong.passed


@pytest.mark.parametrize(
    "source",
    [
        "exit(0)",
        "import sys; sys.exit()",
        "import os; os._exit(0)",
        "raise SystemExit(0)",
        "import os; print('passed'); os.write(1, b'{\"outcome\": \"passed\"}'); os._exit(0)",
        "import os\nfor pipe in range(60):\n  try: os.write(pipe, b'passed')\n  except OSError: pass\nos._exit(0)",
        "import builtins\nbuiltins.abs = lambda x: 0",
        "import builtins\nbuiltins.exec = builtins.compile = print",
        "import os, sys\nos.write = os.read = os._exit = sys.exit = print",
        "import os\nif os.fork(): os._exit(0)",
        "import atexit, os\natexit.register(os._exit, 0); raise KeyboardInterrupt",
        "import threading, os\nthreading.Thread(target=os._exit, args=(0,)).start()\nimport time; time.sleep(5)",
        "class Sly(Exception):\n  def __str__(self): raise SystemExit(0)\nraise Sly",
        "import os; os.closerange(0, 60)",
    ],
)  # fmt: skip
def test_no_program_passes_without_its_tests(namespaces, source):
    assert run_program(source, BRIEF, tests="assert abs(3) == 4").outcome == "failed"


LOOP = "while True: pass"
CATCHES = "import signal; signal.signal(signal.SIGXCPU, lambda *_: None)\n"
HOSTILE = {
    "loop": (LOOP, "timed out"),
    "loop that catches": (CATCHES + LOOP, "timed out"),
    "sleep": ("import time; time.sleep(10**6)", "timed out"),
    "memory": ("kept = []\nwhile True: kept.append(bytearray(10**7))", "out of memory"),
    "file": ("with open('x', 'wb') as file:\n  while True: file.write(b'0' * 10**6)", "failed"),
    "output": ("while True: print('x' * 10**5)", "timed out"),
    "signal": ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "crashed"),
    "stack": ("import sys; sys.setrecursionlimit(10**9)\ndef f(): return f()\nf()", None),
    "half a character": ("x = '\ud800'", "failed"),
    "null": ("x = '\0'", "failed"),
    "deep": ("(" * 10**5, None),
    "input": ("input()", "failed"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_programs_fail(isolation, kind):
    source, outcome = HOSTILE[kind]
    limits = Limits(
        cpu_seconds=1 if outcome == "timed out" else 20, memory=2**28, output=20,  # only one can be met first
        wall_seconds=1.0 if kind in ("sleep", "output") else 60.0,
    )  # fmt: skip
    found = run_program(source, limits, isolation=isolation)
    if isolation == "limits" and kind == "signal":
        outcome = "failed"  # the guard refuses it
    assert found.outcome == outcome or (outcome is None and not found.passed), found
    assert found.output == ("x" * 20 if kind == "output" else found.output[:20])


BOMBS = [
    ("failed", "while True: os.fork()"),
    ("timed out", "while True:\n  try: os.fork()\n  except OSError: pass"),
    ("out of memory", "for _ in range(20):\n  if not os.fork(): break\nx = bytearray(10**8)\ntime.sleep(99)"),
    (
        "out of memory",
        "k = []\nfor n in range(40): k.append(os.memfd_create('x')); os.write(k[-1], bytes(2**24))\ntime.sleep(99)",
    ),
    (
        "out of memory",
        "shared = ctypes.CDLL(None)\nshared.shmat.restype = ctypes.c_void_p\nfor n in range(8):\n"
        "  place = ctypes.c_void_p(shared.shmat(shared.shmget(0, 2**27, 0o1600), None, 0))\n"
        "  ctypes.memset(place, 1, 2**27); shared.shmdt(place)\ntime.sleep(99)",
    ),
    ("passed", "if not os.fork():\n  os.setsid()\n  if os.fork(): os._exit(0)\n  time.sleep(999)"),
]


@pytest.mark.parametrize(("outcome", "source"), BOMBS)
def test_fork_bombs_die_with_their_namespace(namespaces, outcome, source):
    limits = Limits(wall_seconds=2.0 if outcome == "timed out" else 20.0, memory=2**29)
    found = run_program(f"{MARKED}import os, time\n{source}", limits)
    assert found.outcome == outcome, found
    assert not marked_processes()


def test_marked_processes_are_seen():
    with subprocess.Popen(
        ["python3", "-c", MARKED + "print('marked', flush=True); input()"], stdin=-1, stdout=-1
    ) as one:
        one.stdout.readline()
        assert len(marked_processes()) == 1
        one.stdin.close()


def test_nothing_outside_is_deleted_or_written(isolation, tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("gold")
    attempts = f"""
os.remove({str(precious)!r})
open({str(precious)!r}, "w")
open({str(precious)!r}, "r+")
os.open({str(precious)!r}, os.O_TRUNC)
os.rename({str(precious)!r}, "mine")
os.rename("mine", {str(precious)!r})
os.truncate({str(precious)!r}, 0)
os.chmod({str(precious)!r}, 0)
shutil.rmtree({str(tmp_path)!r})
pathlib.Path({str(precious)!r}).unlink()
os.symlink({str(tmp_path)!r}, "link")
os.remove("link/precious")
shutil.rmtree("link")
os.remove("precious", dir_fd=os.open({str(tmp_path)!r}, os.O_RDONLY))
os.system("rm -rf {tmp_path}")
subprocess.run(["rm", "-rf", {str(tmp_path)!r}])
pathlib.Path({str(tmp_path / "new")!r}).write_text("x")
os.mkdir({str(tmp_path / "folder")!r})
"""
    source = "import os, pathlib, shutil, subprocess\nopen('mine', 'w').write('x')\n"
    source += "\n".join(f"try: {attempt}\nexcept Exception: pass" for attempt in attempts.split("\n") if attempt)
    found = run_program(source, isolation=isolation)
    assert found.passed, found
    assert precious.read_text() == "gold"
    assert list(tmp_path.iterdir()) == [precious]
    os.remove("precious", dir_fd=os.open(tmp_path, os.O_RDONLY))  # the test can fail: here an attempt does harm
    assert not precious.exists()


def test_the_system_is_read_only_and_home_is_not_there(namespaces, monkeypatch):
    source = f"""
import glob, os, sys
def refused(name, mode):
    try: open(name, mode)
    except OSError as error: return type(error).__name__
assert refused(os.__file__, "a") in ("OSError", "PermissionError")
assert refused("/usr/x", "w") in ("OSError", "PermissionError")
for gone in ("/etc/passwd", {str(Path(__file__))!r}, "/proc/self/environ", "/proc/1/maps"):
    assert refused(gone, "r") == "FileNotFoundError", gone
assert os.getuid() == 65534 and os.getcwd() == os.environ["HOME"] == "/tmp" and not os.listdir()
assert "LOOPLM_SECRET" not in os.environ
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
assert libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, None) == -1
assert libc.unshare(0x10000000) == -1, "a user namespace of its own"
assert libc.setuid(0) == -1
for signal in (2, 9, 15):
    try: os.kill(1, signal)
    except PermissionError: pass
try: import numpy
except ImportError: pass
else: raise AssertionError("more than the standard library")
"""
    monkeypatch.setenv("LOOPLM_SECRET", "x")
    found = run_program(source)
    assert found.passed, found


def test_no_program_reaches_a_server(isolation):
    with Server() as server:
        call = f"import urllib.request; urllib.request.urlopen({server.url!r}, timeout=5)"
        found = run_program(call, isolation=isolation)
        assert found.outcome == "failed"
        assert server.requests == []
        with urllib.request.urlopen(server.url):
            assert server.requests == ["/"]


def test_ordinary_programs_have_what_they_need(namespaces):
    source = """
import concurrent.futures, multiprocessing, os, random, subprocess, tempfile, threading
with tempfile.NamedTemporaryFile("w+") as file: file.write("x")
results = []
threads = [threading.Thread(target=results.append, args=(i,)) for i in range(30)]
for thread in threads: thread.start()
for thread in threads: thread.join()
for _ in range(10):
    if not os.fork(): os._exit(0)  # never waited for
assert subprocess.run(["sh", "-c", "echo ok"], stdin=subprocess.DEVNULL, capture_output=True).stdout == b"ok\\n"
with multiprocessing.get_context("fork").Pool(2) as pool: assert pool.map(abs, [-1, 2]) == [1, 2]
threading.Thread(target=lambda: threading.Event().wait()).start()  # and nobody sets it
open("a", "w").write("b"); os.remove("a"); os.mkdir("c"); os.rmdir("c")
print(hash("the same in every run"))
big = "%s"
""" % ("é" * 200_000)
    first = run_program(source, tests="assert len(results) == 30 and len(big) == 200_000")
    assert first.passed, first
    assert run_program(source, tests="if __name__ == '__main__': raise ValueError").output == first.output


def test_a_forked_child_does_not_speak_for_the_program(namespaces):
    child_fails = "import os\nchild = os.fork()\nif not child: raise ValueError\nos.waitpid(child, 0)"
    assert run_program(child_fails).passed
    parent_fails = "import os\nchild = os.fork()\nif child: os.waitpid(child, 0); raise ValueError('parent')"
    assert "parent" in run_program(parent_fails).message


def test_a_refusal_of_the_kernel_is_one_line_and_nothing_runs(tmp_path, monkeypatch, namespaces):
    """The real keeper, in a namespace that allows no further ones."""
    refusing = tmp_path / "refusing.py"
    refusing.write_text(
        "import ctypes, runpy\nctypes.CDLL(None).unshare(0x10000000)\n"
        "open('/proc/sys/user/max_user_namespaces', 'w').write('0')\n"
        f"runpy.run_path({str(sandbox._KEEPER)!r}, run_name='__main__')\n"
    )
    monkeypatch.setattr(sandbox, "_KEEPER", refusing)
    with pytest.raises(ValueError, match=r"cannot be kept by isolation='namespaces' here .*unshare.*'limits'") as error:
        run_program("")
    assert "\n" not in str(error.value)
    assert run_program("", isolation="limits").isolation == "limits"


def test_a_keeper_that_fails_is_no_verdict_until_the_program_runs(tmp_path, monkeypatch):
    keeper = tmp_path / "keeper.py"
    monkeypatch.setattr(sandbox, "_KEEPER", keeper)
    keeper.write_text("raise ImportError('no ctypes')")
    with pytest.raises(ValueError, match=r"here \(ImportError: no ctypes\)"):
        run_program("", isolation="limits")
    keeper.write_text("print('{\"ready\": true}')")
    assert run_program("", isolation="limits").outcome == "crashed"


def test_a_program_ends_when_nobody_listens_any_more(namespaces, tmp_path):
    request = {"source": MARKED + "import time; time.sleep(99)", "tests": "", "isolation": namespaces}
    request |= {"folder": str(tmp_path), "limits": vars(Limits(wall_seconds=99))}
    keeper = subprocess.Popen([sandbox._PYTHON, "-I", "-S", sandbox._KEEPER], stdin=-1, stdout=-1)
    keeper.stdin.write(json.dumps(request).encode())
    keeper.stdin.close()
    assert keeper.stdout.readline() == b'{"ready": true}\n'
    wait_for(marked_processes)
    keeper.kill()
    keeper.stdout.close()
    keeper.wait()
    wait_for(lambda: not marked_processes())


def wait_for(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.skipif(os.geteuid() != 0, reason="every other test has run without root already")
def test_users_who_are_not_root_can_run_programs(namespaces):
    """The keeper is a script of the standard library: a Python that everybody may read runs it."""
    user = 12345
    readable = [python for python in (sandbox._PYTHON, "/usr/bin/python3") if can_run(python, user)]
    if not readable:
        pytest.skip("no Python 3.11 here that other users may read")
    source = MARKED + "import os; assert os.getuid() == 65534\nwhile True: os.fork()"
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        for script in (sandbox._KEEPER, sandbox._KEEPER.with_name("sandbox_program.py")):
            Path(folder, script.name).write_text(script.read_text())
        os.mkdir(f"{folder}/mount")
        request = {"source": source, "tests": "", "isolation": namespaces, "folder": f"{folder}/mount"}
        done = subprocess.run(
            [readable[0], "-I", "-S", "-B", f"{folder}/{sandbox._KEEPER.name}"], user=user, group=user, extra_groups=[],
            input=json.dumps(request | {"limits": vars(Limits())}), text=True, capture_output=True, check=True,
        )  # fmt: skip
    ready, verdict = map(json.loads, done.stdout.splitlines())
    assert ready == {"ready": True}
    assert "BlockingIOError" in verdict["message"]
    assert not marked_processes()


def can_run(python, user):
    with contextlib.suppress(OSError):
        command = [python, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
        return subprocess.run(command, user=user, group=user, cwd="/", capture_output=True, check=False).returncode == 0
    return False


def test_limits_and_isolations_are_checked():
    with pytest.raises(ValueError, match=r"limit memory must be above 0, got 0"):
        Limits(memory=0)
    with pytest.raises(ValueError, match=r"no isolation 'namespace', only namespaces and limits"):
        run_program("", isolation="namespace")
