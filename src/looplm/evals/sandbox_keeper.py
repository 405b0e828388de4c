"""The process that keeps a tested program apart: run as a script, so that nothing of ours is imported with it."""

import contextlib
import ctypes
import json
import os
import re
import resource
import select
import signal
import stat
import subprocess
import sys
import time

_NOBODY = 65534
_TICK = 0.02
_MOST_READ = 1 << 16
_LONGEST = 1000
_RESIDENT = re.compile(rb"^Rss(?:Anon|Shmem):\s*(\d+)", re.MULTILINE)
_PYTHON = os.path.realpath(sys.executable)
_SHOWN = (
    os.path.realpath(sys.base_prefix), "/usr", "/bin", "/lib", "/lib32", "/lib64", "/nix/store", "/gnu/store",
    "/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime",
)  # fmt: skip
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")

# From <linux/sched.h>, <sys/mount.h>, <linux/mount.h>, <linux/prctl.h>; system call numbers of every architecture
# since they are one table (Linux 5.1).
_NEW_USER, _NEW_MOUNTS, _NEW_PROCESSES, _NEW_NETWORK, _NEW_IPC = 0x10000000, 0x20000, 0x20000000, 0x40000000, 0x8000000
_NOSUID, _NODEV, _NOEXEC, _BIND, _RECURSIVE, _PRIVATE, _DETACH = 2, 4, 8, 4096, 16384, 1 << 18, 2
_MOUNT_SETATTR, _HERE, _AT_RECURSIVE, _READ_ONLY_NOSUID = 442, -100, 0x8000, 1 | 2
_NO_NEW_PRIVILEGES = 38
_LIBC = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Read a request from standard input; write to standard output, in a line each, that all is ready, and a verdict.

    The first line is {"refused": reason} instead where this system does not allow the isolation that is asked for.
    """
    request = json.loads(sys.stdin.buffer.read())
    with open(os.path.join(os.path.dirname(__file__), "sandbox_program.py")) as file:
        program = file.read()
    processes = None
    os.umask(0o022)
    try:
        if request["isolation"] == "namespaces":
            _enter()
            keeper = os.fork()  # the first of the new process numbers; when it ends, so does every other
            if keeper:
                os.waitpid(keeper, 0)
                return
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # without a handler, no signal from inside reaches it
            processes = _furnish(request["folder"], request["limits"]["disk"])
        else:
            os.chdir(request["folder"])
        kept = _Kept(program, request, processes)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        _reply({"refused": " ".join(str(error).split())})
        return
    _reply({"ready": True})
    _reply(kept.verdict())
    kept.end()


def _enter() -> None:
    """Move to new namespaces, where this process may do everything, and which know its user as nobody else's."""
    user, group, process = os.geteuid(), os.getegid(), os.getpid()
    if user:
        _call("unshare", _NEW_USER | _NEW_MOUNTS | _NEW_PROCESSES | _NEW_NETWORK | _NEW_IPC)
        _write("/proc/self/setgroups", "deny")
        _map(process, f"{_NOBODY} {user} 1", f"{_NOBODY} {group} 1")
        return
    # Root can give the program a user of its own, but only from outside the new namespace.
    os.setgroups([])
    entered, tell = os.pipe()
    helper = os.fork()
    if not helper:
        os.close(tell)
        if os.read(entered, 1):
            _map(process, *[f"0 0 1\n{_NOBODY} {_NOBODY} 1"] * 2)
        os._exit(0)
    os.close(entered)
    try:
        _call("unshare", _NEW_USER | _NEW_MOUNTS | _NEW_PROCESSES | _NEW_NETWORK | _NEW_IPC)
        os.write(tell, b"1")
    finally:
        os.close(tell)
        os.waitpid(helper, 0)


def _map(process: int, users: str, groups: str) -> None:
    _write(f"/proc/{process}/uid_map", users)
    _write(f"/proc/{process}/gid_map", groups)


def _furnish(root: str, size: int) -> int:
    """Make `root` the root: `size` bytes of memory to write in, Python and the system's libraries to read, no more.

    Returns an open folder, the processes of this namespace (/proc), which has no path.
    """
    _mount(None, "/", None, _RECURSIVE | _PRIVATE)
    _mount("tmpfs", root, "tmpfs", _NOSUID | _NODEV, f"size={size},nr_inodes=4096,mode=755")
    for path in _SHOWN:
        _show(path, root)
    for device in _DEVICES:
        _place(device, root)
        _mount(device, root + device, None, _BIND)
    for folder in ("/proc", "/tmp", "/dev/shm"):
        os.mkdir(root + folder)
        os.chmod(root + folder, 0o1777)
    _mount("proc", root + "/proc", "proc", _NOSUID | _NODEV | _NOEXEC)
    processes = os.open(root + "/proc", os.O_RDONLY | os.O_DIRECTORY)
    _write("self/oom_score_adj", "1000", processes)  # should the machine's memory end all the same, this goes first
    _write("sys/user/max_user_namespaces", "0", processes)  # in one of its own, a program could mount things
    _call("umount2", os.fsencode(root + "/proc"), _DETACH)
    os.chdir(root)
    _call("pivot_root", b".", b".")
    _call("umount2", b".", _DETACH)
    os.chdir("/tmp")
    return processes


def _show(path: str, root: str) -> None:
    """`path` under `root` as well, for reading."""
    if os.path.islink(path):
        os.makedirs(os.path.dirname(root + path), exist_ok=True)
        os.symlink(os.readlink(path), root + path)
    elif os.path.exists(path) and not os.path.exists(root + path):
        _place(path, root)
        _mount(path, root + path, None, _BIND | _RECURSIVE)
        flags = (ctypes.c_uint64 * 4)(_READ_ONLY_NOSUID, 0, 0, 0)
        _call("syscall", _MOUNT_SETATTR, _HERE, os.fsencode(root + path), _AT_RECURSIVE, flags, ctypes.sizeof(flags))


def _place(path: str, root: str) -> None:
    if os.path.isdir(path):
        os.makedirs(root + path)
    else:
        os.makedirs(os.path.dirname(root + path), exist_ok=True)
        _write(root + path, "")


class _Kept:
    """A program in its own process, under limits that it cannot raise."""

    def __init__(self, program: str, request: dict, processes: int | None) -> None:
        self._limits, self._processes = request["limits"], processes
        source, tests = (request[part].encode("utf-8", "surrogatepass") for part in ("source", "tests"))
        asked, ask = os.pipe()
        self._told, tell = os.pipe()
        self._output, output = os.pipe()
        user, folder = (None, [request["folder"]]) if processes is None else (_NOBODY, [])
        arguments = [str(number) for number in (asked, tell, len(source), len(tests))] + folder
        self._program = subprocess.Popen(
            [_PYTHON, "-s", "-S", "-P", "-B", "-X", "utf8", "-c", program, *arguments],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=(asked, tell), start_new_session=True,
            user=user, group=user, preexec_fn=self._limit,
            env={"HOME": os.getcwd(), "TMPDIR": os.getcwd(), "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
            | {"PYTHONHASHSEED": "0", "MALLOC_ARENA_MAX": "1"},  # the same verdict each time; threads within RLIMIT_AS
        )  # fmt: skip
        for file in (asked, tell, output):
            os.close(file)
        self._token = os.urandom(16).hex().encode()
        with contextlib.suppress(BrokenPipeError), open(ask, "wb") as pipe:
            pipe.write(source + tests + self._token)

    def verdict(self) -> dict:
        """Wait for the program, at most as long as it may take; {"outcome", "message", "output", "seconds"}."""
        begun, looked, printed = time.monotonic(), 0.0, b""
        excess: dict[str, str] = {}
        poll = select.poll()
        poll.register(self._output, select.POLLIN)
        poll.register(self._told, 0)
        poll.register(1, 0)
        while not ((ended := self._reap()) or excess):
            for file, _ in poll.poll(_TICK * 1000):
                if file == 1:  # nobody is left to read the verdict
                    self.end()
                    os._exit(1)
                part = os.read(file, _MOST_READ) if file == self._output else b""
                printed += part[: self._limits["output"] - len(printed)]
                if not part:
                    poll.unregister(file)
            now = time.monotonic()
            if now > begun + self._limits["wall_seconds"]:
                excess = {"outcome": "timed out", "message": f"it ran for more than {self._limits['wall_seconds']:g} s"}
            elif now > looked + _TICK:
                looked, excess = now, self._too_big()
        found = self._found(*ended) if ended else excess
        printed += _rest(self._output)[: self._limits["output"] - len(printed)]
        return found | {"output": printed.decode(errors="replace"), "seconds": time.monotonic() - begun}

    def end(self) -> None:
        """Kill the program with its process group; its namespace ends with this process."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._program.pid, signal.SIGKILL)

    def _limit(self) -> None:
        """Called in the program's process before Python starts in it."""
        limits = self._limits
        values = {
            resource.RLIMIT_AS: limits["memory"], resource.RLIMIT_FSIZE: limits["disk"], resource.RLIMIT_CORE: 0,
            resource.RLIMIT_NOFILE: limits["files"],
        }  # fmt: skip
        if self._processes is not None:  # elsewhere all processes of this user would count
            values[resource.RLIMIT_NPROC] = limits["processes"]
            _call("prctl", _NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        for kind, value in values.items():
            _lower(kind, value)
        # SIGXCPU tells this end from others, whatever the machine's clocks say; who catches it has a second more.
        _lower(resource.RLIMIT_CPU, limits["cpu_seconds"], grace=1)

    def _reap(self) -> tuple[int, float] | None:
        """Take in every process that ended, also the orphans left to this one; the program's status and CPU seconds."""
        ended = None
        while True:
            try:
                process, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return ended
            if not process:
                return ended
            if process == self._program.pid:
                ended = status, usage.ru_utime + usage.ru_stime

    def _too_big(self) -> dict[str, str]:
        """Memory of all processes together, which no limit of one process bounds."""
        if self._processes is None:
            return {}
        held, files = _detached(self._processes), {}
        for process in os.listdir(self._processes):
            if process.isdigit() and process != "1":
                # What ends or only starts has no files to look at, which to other users than root is a refusal.
                with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                    resident = _RESIDENT.findall(_read(f"{process}/status", self._processes))
                    held += 1024 * sum(map(int, resident))
                    files |= _nameless(process, self._processes)
        held += sum(files.values())
        if held <= self._limits["memory"]:
            return {}
        return {"outcome": "out of memory", "message": f"its processes held {held >> 20} MiB together"}

    def _found(self, status: int, seconds: float) -> dict[str, str]:
        told = _rest(self._told)
        if told == self._token:
            return {"outcome": "passed", "message": ""}
        code = os.waitstatus_to_exitcode(status)
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            failed = json.loads(told)
            if failed["outcome"] in ("failed", "out of memory"):
                return {"outcome": failed["outcome"], "message": str(failed["message"])[:_LONGEST]}
        if code == -signal.SIGXCPU or (code == -signal.SIGKILL and seconds > self._limits["cpu_seconds"]):
            return {"outcome": "timed out", "message": f"it computed for more than {self._limits['cpu_seconds']} s"}
        if code < 0:
            return {"outcome": "crashed", "message": f"ended by signal {-code} ({signal.strsignal(-code)})"}
        return {"outcome": "failed", "message": f"it ended before its tests did, with exit code {code}"}


def _nameless(process: str, processes: int) -> dict[tuple[int, int], int]:
    """The bytes of open files that have no name, such as those of memfd_create, which lie in memory."""
    found = {}
    folder = os.open(f"{process}/fd", os.O_RDONLY | os.O_DIRECTORY, dir_fd=processes)
    try:
        for file in os.listdir(folder):
            with contextlib.suppress(FileNotFoundError):
                told = os.stat(file, dir_fd=folder)
                if stat.S_ISREG(told.st_mode) and not told.st_nlink:
                    found[told.st_dev, told.st_ino] = 512 * told.st_blocks
    finally:
        os.close(folder)
    return found


def _detached(processes: int) -> int:
    """The bytes of shared memory (System V) that no process has in its addresses."""
    rows = (line.split() for line in _read("sysvipc/shm", processes).splitlines()[1:])
    return sum(int(row[-2]) + int(row[-1]) for row in rows if row[6] == b"0")  # nattch; rss and swap


def _lower(kind: int, value: int, grace: int = 0) -> None:
    _, hard = resource.getrlimit(kind)
    highest = value + grace if hard == resource.RLIM_INFINITY else min(value + grace, hard)
    resource.setrlimit(kind, (min(value, highest), highest))


def _rest(pipe: int) -> bytes:
    os.set_blocking(pipe, False)
    try:
        return os.read(pipe, _MOST_READ)
    except BlockingIOError:
        return b""


def _reply(line: dict) -> None:
    os.write(1, json.dumps(line).encode() + b"\n")


def _read(path: str, folder: int) -> bytes:
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags, dir_fd=folder)) as file:
        return file.read()


def _write(path: str, value: str, folder: int | None = None) -> None:
    with open(path, "w", opener=lambda name, flags: os.open(name, flags, 0o644, dir_fd=folder)) as file:
        file.write(value)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    parts = [None if part is None else os.fsencode(part) for part in (source, target, kind, options)]
    _call("mount", *parts[:3], ctypes.c_ulong(flags), parts[3])


def _call(name: str, *arguments: object) -> None:
    if getattr(_LIBC, name)(*arguments):
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


if __name__ == "__main__":
    main()
