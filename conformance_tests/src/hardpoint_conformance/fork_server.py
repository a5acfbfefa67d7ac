"""Processes that are forks of one which has imported what the suite needs: `python -m hardpoint_conformance.fork_server SOCKET TORCH`.

A fresh interpreter takes seconds of processor time for its imports (torch, pytest, the suite's own modules), and a run of the suite
has some twenty processes. The server imports none of the backend's code and starts neither threads nor a device, so that a fork of it
is as good as a fresh process; what crashes or hangs in one costs that process alone. What is forked can ask for processes, too: see `here`.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from select import select
from types import TracebackType

from hardpoint_conformance.processes import environment, imports_kept

_IMPORTED = (
    "hypothesis.stateful",
    "pytest",
    "hardpoint_conformance.batches",
    "hardpoint_conformance.device_memory",
    "hardpoint_conformance.interposed",
    "hardpoint_conformance.memory_model",
    "hardpoint_conformance.packaging",
    "hardpoint_conformance.reference",
    "hardpoint_conformance.worker_bench",
)
_MESSAGE_BYTES = 1 << 20
PROGRAM = "-c"
"""In a module's place: the first argument is a program's text, as Python's own option takes it."""

_here: ForkServer | None = None


def here() -> ForkServer | None:
    """Return the server that this process is a fork of, or has been given by `share`; None where there is none."""
    return _here


def share(server: ForkServer) -> None:
    """Let forks of this process use its server, and start it for them."""
    global _here
    server.begin()
    _here = server


class ForkServer:
    """A server, started at the first use; for several threads.

    Args:
        for_ranks: processes start ranks, so import what ranks need, too.
        variables: of the environment, besides this process's own.
        reached: where a server that is there takes requests; None for one of its own.
    """

    def __init__(self, *, for_ranks: bool, variables: Mapping[str, str], reached: socket.socket | None = None) -> None:
        self._for_ranks = for_ranks
        self._variables = dict(variables)
        self._lock = threading.Lock()  # guards the start
        self._server: subprocess.Popen[bytes] | None = None
        self._socket = reached

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._socket is not None and self._server is not None:
            # A fork of this process may hold a copy, which closing this one would leave open.
            self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
            self._server.wait()

    def begin(self) -> socket.socket:
        """Start the server, if it is not there; return where it takes requests."""
        with self._lock:
            if self._socket is None:
                self._socket = self._start_server()
        return self._socket

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        folder: Path,
        stdout: Path,
        stderr: Path,
        variables: Mapping[str, str],
        group: int = 0,
    ) -> ForkedProcess:
        """Start what `python -m module` would: see `processes.start`.

        Args:
            group: of processes, which the new one is to join, so that it ends with them; 0 for one of its own.

        Raises:
            OSError: the server has ended.
        """
        reached = self.begin()
        message = {
            "module": module,
            "arguments": list(arguments),
            "folder": str(folder),
            "stdout": str(stdout),
            "stderr": str(stderr),
            "environment": dict(variables),
            "group": group,
        }
        status, told = os.pipe()
        try:
            socket.send_fds(reached, [json.dumps(message).encode()], [told])
        finally:
            os.close(told)
        return ForkedProcess(module, status)

    def _start_server(self) -> socket.socket:
        # Packets: each is one message, also where several threads send.
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [
                sys.executable,
                "-m",
                "hardpoint_conformance.fork_server",
                str(theirs.fileno()),
                str(int(self._for_ranks)),
            ]
            # In a group of its own: an interrupt from the terminal is its client's to deal with.
            self._server = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                env=environment(**self._variables),
                pass_fds=[theirs.fileno()],
                process_group=0,
            )
        return ours


class ForkedProcess:
    """A process that the server started; the same calls as `subprocess.Popen` has."""

    def __init__(self, module: str, status: int) -> None:
        self._module = module
        self._status = os.fdopen(status, "rb")
        self.returncode: int | None = None
        self.pid = int(self._status.readline() or 0)
        if not self.pid:
            raise OSError("the process that the suite's processes are forks of has ended")

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while the process runs."""
        return self._read(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status when the process has ended; raises subprocess.TimeoutExpired."""
        code = self._read(timeout)
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self._module, timeout)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal; raises ProcessLookupError when the process has ended."""
        os.kill(self.pid, number)

    def _read(self, timeout: float | None) -> int | None:
        if self.returncode is None and select([self._status], [], [], timeout)[0]:
            self.returncode = int(self._status.readline() or -signal.SIGKILL)  # nothing: the server itself was ended
            self._status.close()
        return self.returncode


def main(descriptor: str, for_ranks: str) -> None:
    """Be the server until its client is gone; returns in a fork, to be the process that was asked for."""
    requests = socket.socket(fileno=int(descriptor))
    with imports_kept():
        for name in _IMPORTED:
            import_module(name)
        if for_ranks == "1":
            from hardpoint_conformance.ranks import import_for_ranks

            import_for_ranks()
    # Forks have a way of their own, which does not keep the server when its client is gone.
    of_forks, reached = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    message = _serve(requests, of_forks)
    if message is None:
        os._exit(0)  # nothing of a backend is here, whose end would be of interest
    module = import_module("hardpoint_conformance.fork_server")  # which others import; this one is `__main__`
    module.share(module.ForkServer(for_ranks=False, variables={}, reached=reached))
    _become(message, for_ranks == "1")


def _serve(client: socket.socket, forks: socket.socket) -> dict[str, object] | None:
    """Start processes and tell how they ended; returns a request in the fork that serves it, and None when the client is gone.

    Args:
        client, forks: where requests come from.
    """
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    told: dict[int, int] = {}
    """By process id: where its client reads how it ended."""
    while True:
        readable: list[socket.socket | int] = [client, forks, ended]
        ready, _, _ = select(readable, [], [])
        if ended in ready:
            os.read(ended, 4096)
            for pid in list(told):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    _tell(told.pop(pid), os.waitstatus_to_exitcode(status))
        for requests in (source for source in (client, forks) if source in ready):
            data, descriptors, _, _ = socket.recv_fds(requests, _MESSAGE_BYTES, 1)
            if not data:
                return None
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for descriptor in (*told.values(), *descriptors, ended, wake):
                    os.close(descriptor)
                client.close()
                forks.close()
                request: dict[str, object] = json.loads(data)
                return request
            told[pid] = descriptors[0]
            with suppress(BrokenPipeError):  # who asked may have been ended
                os.write(descriptors[0], b"%d\n" % pid)


def _tell(descriptor: int, code: int) -> None:
    with suppress(BrokenPipeError):
        os.write(descriptor, b"%d\n" % code)
    os.close(descriptor)


def _become(request: Mapping[str, object], for_ranks: bool) -> None:
    """Be a fresh process that runs a module: with its group, streams, environment, folder and arguments."""
    try:
        os.setpgid(0, int(str(request["group"])))
    except (ProcessLookupError, PermissionError):
        os._exit(1)  # the group has been ended
    for stream, (name, flags) in enumerate(
        ((os.devnull, os.O_RDONLY), (request["stdout"], os.O_WRONLY), (request["stderr"], os.O_WRONLY))
    ):
        try:
            file = os.open(str(name), flags)
        except FileNotFoundError:
            os._exit(1)  # an interrupted run has removed its folder, and nobody waits for this process
        os.dup2(file, stream)
        os.close(file)
    variables, arguments = request["environment"], request["arguments"]
    assert isinstance(variables, dict)
    assert isinstance(arguments, list)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(str(request["folder"]))
    if for_ranks:
        from hardpoint_conformance.ranks import fork_server_here

        fork_server_here()
    module = str(request["module"])
    sys.path[0], sys.argv = str(request["folder"]), [module, *map(str, arguments)]
    if module == PROGRAM:
        del sys.argv[1]
        sys.orig_argv = [sys.executable, module, *map(str, arguments)]
        exec(str(arguments[0]), vars(sys.modules["__main__"]))  # its names live as long as the interpreter
    else:
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
