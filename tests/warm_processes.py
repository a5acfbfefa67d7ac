"""Python processes for tests that start with torch and the engine imported, which takes most of a short process's time.

`WarmPopen` takes the place of `subprocess.Popen` for `python -P -m MODULE`, as ranks and engines are started, and for `python -P FILE`, for
scripts whose start is not what a test is of. Without -P a script finds the modules beside it, and what it starts is started so, too. The
process is a fork of a server that this one has forked early (`start_server`), yet becomes a child of this one, to which the kernel gives it
when the process between them ends (PR_SET_CHILD_SUBREAPER): it is waited for, watched and killed as any other, and the kernel ends it with
this process if it asks for that. Streams, inherited files, environment, current folder, limits and processors are those that a process
started afresh would have. Tests of how processes are started do so the plain way (`children_by`).
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import json
import os
import resource
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module, invalidate_caches
from inspect import signature
from io import TextIOWrapper
from types import SimpleNamespace
from typing import Any, NoReturn

_IMPORTED = (
    "hardpoint.engine.llm",
    "hardpoint.executor.child",
    "hardpoint.models.description",
    "hardpoint.models.fused",
    "hardpoint.models.stored_blocks",
    "hardpoint.models.tokenizer",
    "hardpoint.worker.worker",
    "hardpoint_cpu.allocator",
    "hardpoint_cpu.attention",
    "hardpoint_cpu.collectives",
    "hardpoint_cpu.kernels",
    "hardpoint_cpu.platform",
)
_IMPORTED_FOR = {
    # Typer imports the last two once it reads a command's options.
    "hardpoint.cli": ("hardpoint.cli.app", "hardpoint.cli.doctor", "pydantic.fields", "pydantic.type_adapter")
}
"""What certain modules, too, import in each process: imported before the first fork that is to run one."""
_ENGINE = "hardpoint.engine.process_main"
_READ_AT_START = ("OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "LD_", "MALLOC_", "GLIBC_", "PYTHON")
"""Beginnings of the variables that the interpreter, the loader and libraries read when they start."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_MESSAGE_BYTES = 1 << 18
_LIMITS = [value for name, value in vars(resource).items() if name.startswith("RLIMIT_")]


class _Server:
    """A fork of this process, of which others are forks; for several threads."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()  # a question and its answer
        self._read, self.client = _read_at_start(os.environ), os.getpid()
        # A thread would be missing in a fork, with whatever it holds; a sanitizer's runtime, which is preloaded, would not see the fork.
        self._is_usable = len(os.listdir("/proc/self/task")) == 1 and "LD_PRELOAD" not in os.environ
        with theirs:
            if self._is_usable and os.fork() == 0:
                self._socket.close()
                end_with(partial(_serve_in_between, theirs))

    def can_start(self, environment: Mapping[str, str]) -> bool:
        """Whether a fork is what a new process with this environment would be."""
        return self._is_usable and self.client == os.getpid() and self._read == _read_at_start(environment)

    def start(self, message: Mapping[str, Any], files: Sequence[int]) -> int:
        """Return the process id of a fork that has these files."""
        with self._lock:
            # Only meanwhile: what other processes leave behind is not this one's.
            _prctl(_PR_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self._socket, [json.dumps(message).encode()], list(files))
                pid = int(self._socket.recv(64) or 0)
            finally:
                _prctl(_PR_SET_CHILD_SUBREAPER, 0)
        if pid <= 0:
            raise OSError(-pid, os.strerror(-pid)) if pid else OSError("the process that others are forks of has ended")
        return pid


_server: _Server | None = None


def start_server() -> None:
    """Fork this process, for as long as it lasts: it has torch imported, and no threads yet.

    Once: a test may run pytest in this process, whose configuration asks for it again.
    """
    global _server
    if _server is not None and _server.client == os.getpid():
        return
    import_engine()
    _server = _Server()


def import_engine() -> None:
    """Import what an engine on the CPU backend, and a rank of it, would import first of all."""
    for name in _IMPORTED:
        import_module(name)


def _read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a fork cannot follow any more."""
    followed = ("PYTHONPATH", "PYTHONUNBUFFERED")
    return {k: v for k, v in environment.items() if k.startswith(_READ_AT_START) and k not in followed}


def freeze() -> None:
    """Have garbage collections, which are enabled, leave out what there is: in forks they would copy its pages, too.

    With the little of it that is garbage, for which all would be looked through. And they come less often than by default.
    """
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()
    # An engine's start asks whether anything is frozen, for which all of it is counted: once, and not in each fork.
    with import_module("hardpoint.executor.start").collection_paused():
        pass


class WarmPopen(subprocess.Popen[Any]):
    """`subprocess.Popen`, whose child is a fork of a process that has imported torch and the engine, where it can be one."""

    def _execute_child(self, *arguments: Any) -> None:
        plain = super()._execute_child  # type: ignore[misc]
        asked = SimpleNamespace(**signature(plain).bind(*arguments).arguments)
        environment = dict(os.environ if asked.env is None else asked.env)
        command = _command(asked)
        if _server is None or command is None or not _server.can_start(environment):
            plain(*arguments)
            return
        streams = [
            number if given == -1 else given
            for number, given in enumerate((asked.p2cread, asked.c2pwrite, asked.errwrite))
        ]
        message = {
            "command": command,
            "numbers": [0, 1, 2, *asked.pass_fds],
            "environment": environment,
            "folder": os.path.abspath(asked.cwd or "."),
            "finds_modules_beside_it": asked.args[1] != "-P",
            "group": os.getpgid(0) if asked.process_group == -1 else asked.process_group,
            "session": bool(asked.start_new_session),
            "limits": [(kind, *resource.getrlimit(kind)) for kind in _LIMITS],
            "processors": sorted(os.sched_getaffinity(0)),
        }
        self.pid = _server.start(message, [*streams, *asked.pass_fds])
        self._child_created = True
        pipes = (asked.p2cread, asked.p2cwrite, asked.c2pread, asked.c2pwrite, asked.errread, asked.errwrite)
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def run_warm(
    command: Sequence[str], *, timeout: float | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run as `subprocess.run` does, by `WarmPopen`; output is text. The child is killed where the wait for it ends before it does."""
    with WarmPopen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        finally:
            process.kill()
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


@contextmanager
def children_by(popen: type[subprocess.Popen[Any]]) -> Iterator[None]:
    """Have the processes of ranks and engines started so, to the context's end."""
    from hardpoint.executor import processes

    before = processes.subprocess
    processes.subprocess = SimpleNamespace(**vars(subprocess) | {"Popen": popen})  # type: ignore[assignment]
    try:
        yield
    finally:
        processes.subprocess = before


def _command(asked: SimpleNamespace) -> list[str] | None:
    """Return the module or file that a fork is to run, and its arguments; None for what is no such command, or cannot be followed."""
    odd = (asked.preexec_fn, asked.shell, asked.executable not in (None, sys.executable), not asked.close_fds)
    if any(odd) or isinstance(asked.args, str | bytes | os.PathLike):
        return None
    match list(map(os.fspath, asked.args)):
        case [sys.executable, "-P", "-m", module, *arguments]:
            return [module, *arguments]
        case [sys.executable, "-P", file, *arguments] | [sys.executable, file, *arguments] if file.endswith(".py"):
            return [file, *arguments]
    return None


# In the server's process


def _serve(requests: socket.socket) -> Mapping[str, Any] | None:
    """Make forks; returns a request in the fork that is to serve it, and None when the client is gone."""
    while True:
        data, files, _, _ = socket.recv_fds(requests, _MESSAGE_BYTES, 250)
        if not data:
            return None
        message: dict[str, Any] = json.loads(data)
        for name in _IMPORTED_FOR.get(message["command"][0], ()):
            import_module(name)
        pid = _fork_sibling()
        if pid == 0:
            requests.close()
            _take_files(files, message["numbers"])
            return message
        for file in files:
            os.close(file)
        requests.send(b"%d" % pid)


def _serve_in_between(requests: socket.socket) -> None:
    """Make forks in the midst of a program, whose other parts see nothing of it."""
    # Ends with its client, as forks that ask for it do, and not by Ctrl-C.
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    freeze()
    message = _serve(requests)
    if message is not None:
        _become(message)


def end_with(run: Callable[[], object]) -> NoReturn:
    """Run what a fork is for, and end it as a program of that alone would end."""
    code = 1
    try:
        run()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _fork_sibling() -> int:
    """Fork as `os.fork` does, but for this process's parent, which takes orphans; returns a negative error number on failure."""
    read, write = os.pipe()
    between = os.fork()
    if between == 0:
        between = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            pid = -(error.errno or 1)
        if pid == 0:
            os.close(read)
            os.close(write)
            while os.getppid() == between:
                time.sleep(0.0002)
            return 0
        os.write(write, b"%d" % pid)
        os._exit(0)
    os.close(write)
    os.waitpid(between, 0)
    with os.fdopen(read, "rb") as answer:
        return int(answer.read() or -1)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _take_files(files: Sequence[int], numbers: Sequence[int]) -> None:
    """Have the files under these numbers, and no others."""
    above = max(*numbers, *files) + 1
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, above) for file in files]
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in moved:
            with suppress(OSError):  # that of the listing itself
                os.close(int(name))
    for file, number in zip(moved, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)


def _become(message: Mapping[str, Any]) -> None:
    """Be a process that has just been started, and run what was asked for."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if message["session"]:
        os.setsid()
    else:
        os.setpgid(0, message["group"])
    os.environ.clear()
    os.environ.update(message["environment"])
    os.chdir(message["folder"])
    for kind, soft, hard in message["limits"]:
        if resource.getrlimit(kind) != (soft, hard):
            resource.setrlimit(kind, (soft, hard))
    os.sched_setaffinity(0, message["processors"])
    buffering = 0 if os.environ.get("PYTHONUNBUFFERED") else -1
    for name, number in (("stdout", 1), ("stderr", 2)):
        binary = open(number, "wb", buffering, closefd=False)  # noqa: SIM115  # to the process's end
        errors = "backslashreplace" if number == 2 else None
        text = TextIOWrapper(binary, "utf-8", errors, line_buffering=number == 2, write_through=not buffering)
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)  # type: ignore[misc]  # noqa: SIM115
    folders = os.environ.get("PYTHONPATH", "")
    sys.path[:0] = folders.split(os.pathsep) if folders else []
    invalidate_caches()
    # Torch makes its pool of threads anew after a fork, when it is first asked for, and one of two threads that ask at once gets none.
    torch = import_module("torch")
    torch.set_num_threads(torch.get_num_threads())
    program, *arguments = message["command"]
    sys.argv = [program, *arguments]
    if message["finds_modules_beside_it"]:
        sys.path.insert(0, os.path.dirname(os.path.abspath(program)))
        start_server()
        subprocess.Popen = WarmPopen  # type: ignore[misc]
    if program.endswith(".py"):
        runpy.run_path(program, run_name="__main__")
    elif program == _ENGINE:
        start_server()  # its ranks, too, are forks
        with children_by(WarmPopen):
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
