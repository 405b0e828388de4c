"""What runs in a tested program's own process: the program, its tests, then the report that both came to an end."""

import builtins
import json
import os
import sys
import types

_LONGEST = 300
_REFUSED = (
    "ctypes.", "os.exec", "os.fork", "os.kill", "os.posix_spawn", "os.spawn", "os.startfile", "os.system", "pty.",
    "resource.", "signal.pthread_kill", "socket.", "subprocess.",
)  # fmt: skip
_CHANGES = {
    "os.chflags", "os.chmod", "os.chown", "os.link", "os.mkdir", "os.remove", "os.removexattr", "os.rename", "os.rmdir",
    "os.setxattr", "os.symlink", "os.truncate", "os.utime",
}  # fmt: skip
_TO_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def run(asked: int, told: int, source_size: int, tests_size: int) -> None:
    """Run the source and the tests that stand in the pipe `asked`, in one module, and write in `told` what came of it.

    That is the token which follows them in `asked`, and which nothing reads before, or a JSON object that says how they
    failed. What the source did to Python's built-in names is undone before the tests.
    """
    read, write, leave, process, this = os.read, os.write, os._exit, os.getpid(), os.getpid
    source, tests = _whole(asked, source_size), _whole(asked, tests_size)
    names, module = vars(builtins), types.ModuleType("program")
    untouched = dict(names)
    sys.argv, sys.modules["program"] = ["program"], module
    try:
        exec(compile(source.decode(), "program", "exec", dont_inherit=True), vars(module))
        names.update(untouched)
        exec(compile(tests.decode(), "tests", "exec", dont_inherit=True), vars(module))
        _flush()
    except BaseException as error:
        names.update(untouched)
        if this() == process:  # what the program forked has nothing to say
            write(told, _described(error))
        _flush()
        leave(1)
    if this() == process:
        write(told, read(asked, 64))
    leave(0)


def guard(folder: str) -> None:
    """Refuse this process other processes, sockets, ctypes, and changes of files outside `folder`.

    By Python's audit events (PEP 578): this stops accidents, not attackers.
    """
    allowed = (os.path.join(os.path.realpath(folder), ""), os.devnull)

    def refuse(event: str, arguments: tuple) -> None:
        paths: tuple = ()
        if event.startswith(_REFUSED):
            raise PermissionError(f"a tested program may not use {event}")
        if event in _CHANGES:
            paths = arguments[:2] if event in ("os.link", "os.rename", "os.symlink") else arguments[:1]
        elif event == "open" and not isinstance(arguments[0], int):
            # An open folder would be a way to what is in it (dir_fd), which no event tells.
            paths = arguments[:1] if arguments[2] & _TO_WRITE or os.path.isdir(arguments[0]) else ()
        for path in paths:
            if not os.path.join(os.path.realpath(os.fsdecode(path)), "").startswith(allowed):
                raise PermissionError(f"a tested program may not change {path!r}")

    sys.addaudithook(refuse)


def _whole(pipe: int, size: int) -> bytes:
    parts = b""
    while len(parts) < size and (part := os.read(pipe, size - len(parts))):
        parts += part
    return parts


def _described(error: BaseException) -> bytes:
    try:
        text = str(error).strip()[:_LONGEST]
    except BaseException:
        text = ""
    if isinstance(error, SystemExit):
        text = f"it asked to end with {text or 0}"
    place, trace = "", error.__traceback__
    while trace:
        if trace.tb_frame.f_code.co_filename in ("program", "tests"):
            place = f" ({trace.tb_frame.f_code.co_filename}, line {trace.tb_lineno})"
        trace = trace.tb_next
    outcome = "out of memory" if isinstance(error, MemoryError) else "failed"
    said = type(error).__name__ + (f": {text}" if text else "") + place
    return json.dumps({"outcome": outcome, "message": " ".join(said.split())}).encode()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException:
            continue


if __name__ == "__main__":
    if sys.argv[5:]:
        guard(sys.argv[5])
    run(*map(int, sys.argv[1:5]))
