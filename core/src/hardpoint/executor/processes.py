"""The processes of the ranks of an engine, or that of the engine: started, watched and ended by one thread of their parent.

A child asks the kernel to end it when the *thread* that started it ends, so that thread lives as long as the children do. It passes
what they write on to the log, and it alone judges whether they live.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from hardpoint.executor.limits import RankLimits
from hardpoint.executor.link import TRACE_SIGNAL, Link, LinkFiles

_log = logging.getLogger("hardpoint")

_CHECK_SECONDS = 0.5
_TRACE_SECONDS = 0.5
_KILL_SECONDS = 1.0
_KEPT_LINES = 60
_LEVEL = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) ")
_OUT_OF_MEMORY = (
    "Somebody ended it, or the kernel did, out of memory (its log says so); then lower memory_utilization or swap_space"
)


class _Process:
    """One child, seen from the keeper's thread."""

    def __init__(self, rank: int, name: str, popen: subprocess.Popen[bytes], link: Link) -> None:
        self.rank, self._name, self.popen, self.link = rank, name, popen, link
        assert popen.stdout is not None
        self.output = popen.stdout
        try:
            self.pidfd = os.pidfd_open(popen.pid)
        except OSError:
            popen.kill()
            popen.wait()
            self.output.close()
            raise
        os.set_blocking(self.output.fileno(), False)
        self.lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._partial = b""
        self._heartbeat, self._silent = -1, 0.0

    def read_output(self) -> bool:
        """Pass what the rank wrote on to the log; returns False at its end."""
        while True:
            try:
                data = os.read(self.output.fileno(), 1 << 16)
            except BlockingIOError:
                return True
            if not data:
                self._pass_on([self._partial] if self._partial else [])
                self._partial = b""
                return False
            *lines, self._partial = (self._partial + data).split(b"\n")
            self._pass_on(lines)

    def _pass_on(self, lines: Sequence[bytes]) -> None:
        for line in lines:
            text = line.decode("utf-8", "replace")
            self.lines.append(text)
            level = _LEVEL.match(text)
            _log.log(logging.getLevelNamesMapping()[level[1]] if level else logging.INFO, "%s: %s", self._name, text)

    def silence(self, elapsed: float) -> float:
        """Return for how many seconds the rank's heart has not beaten; `elapsed` were since the last question."""
        beat = self.link.heartbeat
        self._silent = 0.0 if beat != self._heartbeat else self._silent + elapsed
        self._heartbeat = beat
        return self._silent

    def state(self) -> str:
        """Return what the kernel says of the main thread: "R" runs, "S" sleeps, "D" waits for a disk, "T" and "t" are stopped."""
        with contextlib.suppress(OSError, IndexError):
            return Path(f"/proc/{self.popen.pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[0]
        return ""

    def kill(self) -> None:
        """End it and what it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, signal.SIGKILL)

    def close(self) -> None:
        """Give its file descriptors back."""
        self.output.close()
        os.close(self.pidfd)


class ChildProcesses:
    """All ranks of one engine, or an engine.

    Args:
        module: what the children run; it ends in `run_child`.
        name: what the log calls child `{}`.
        fail: called with a rank that has failed, what became of it, what it wrote last, and a hint; from the keeper's thread.
    """

    def __init__(
        self, module: str, name: str, limits: RankLimits, fail: Callable[[int, str, str, str], object]
    ) -> None:
        self._module, self._name, self._limits, self._fail = module, name, limits, fail
        self._processes: list[_Process] = []
        self._started = threading.Event()
        self._start_error: BaseException | None = None
        self._alarm = self._command = -1
        self._keeper: threading.Thread | None = None

    def start(self, links: Sequence[Link], files: Sequence[LinkFiles], shared: Sequence[int] = ()) -> None:
        """Start all; returns when the processes are there. Raises OSError.

        Args:
            links: the engine's side of them, in the order of ranks.
            files: what each rank inherits.
            shared: file descriptors that all of them inherit, under the same numbers.
        """
        flags = os.EFD_CLOEXEC | os.EFD_NONBLOCK
        self._alarm = os.eventfd(0, flags)
        self._command = os.eventfd(0, flags)
        self._keeper = threading.Thread(
            target=self._keep, args=(links, files, shared), name="hardpoint keeper", daemon=True
        )
        self._keeper.start()
        self._started.wait()
        if self._start_error is not None:
            raise self._start_error

    @property
    def alarm(self) -> int:
        """The file descriptor that can be read once a rank has failed."""
        return self._alarm

    def sound_alarm(self) -> None:
        """Wake who waits for the alarm."""
        if self._alarm >= 0:
            os.eventfd_write(self._alarm, 1)

    @property
    def pids(self) -> list[int]:
        """Process ids in the order of ranks."""
        return [process.popen.pid for process in self._processes]

    def trace(self, rank: int) -> str:
        """Have a rank write the traceback of all its threads, and return what it wrote."""
        process = self._processes[rank]
        process.lines.clear()
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(process.pidfd, TRACE_SIGNAL)
            time.sleep(_TRACE_SECONDS)
        return "\n".join(process.lines)

    def kill(self) -> None:
        """End all at once, and what they started; waits, though not for long, until they are gone: what follows may need what they held."""
        for process in self._processes:
            if process.popen.returncode is None:
                process.kill()
        if self._keeper is not None and not self.is_keeper():
            self._keeper.join(_KILL_SECONDS)

    def stop(self, patience: float) -> None:
        """Wait for all to end by themselves, then end them; nothing of them is left. Idempotent."""
        if self._keeper is not None:
            os.eventfd_write(self._command, 1)
            self._keeper.join(patience)
            self.kill()
            self._keeper.join()
            self._keeper = None
        for fd in (self._alarm, self._command):
            if fd >= 0:
                os.close(fd)
        self._alarm = self._command = -1

    def is_keeper(self) -> bool:
        """Whether this is the thread that watches the ranks."""
        return threading.current_thread() is self._keeper

    # In the keeper's thread

    def _keep(self, links: Sequence[Link], files: Sequence[LinkFiles], shared: Sequence[int]) -> None:
        spins = len(os.sched_getaffinity(0)) > len(links)
        try:
            for rank, (link, inherited) in enumerate(zip(links, files, strict=True)):
                popen = _spawn(self._module, inherited, shared, spins=spins)
                self._processes.append(_Process(rank, self._name.format(rank), popen, link))
        except BaseException as error:
            self._start_error = error
            self.kill()
        self._started.set()
        self._watch()
        for process in self._processes:
            process.close()

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._command, select.POLLIN)
        alive = {process.pidfd: process for process in self._processes}
        written = {process.output.fileno(): process for process in self._processes}
        for fd in (*alive, *written):
            poll.register(fd, select.POLLIN)
        checked = time.monotonic()
        while alive:
            for fd, _ in poll.poll(_CHECK_SECONDS * 1000):
                if fd in written and not written[fd].read_output():
                    poll.unregister(fd)
                    del written[fd]
                if fd in alive:
                    poll.unregister(fd)
                    self._ended(alive.pop(fd))
                if fd == self._command:
                    poll.unregister(fd)
            now = time.monotonic()
            if now - checked >= _CHECK_SECONDS:
                # If more time has passed, this process was stopped itself, which does not count against the others.
                elapsed = min(now - checked, 2 * _CHECK_SECONDS)
                checked = now
                for process in alive.values():
                    self._check(process, elapsed)

    def _ended(self, process: _Process) -> None:
        # Kill the processes that it started, before `wait`: until then its process id is given to no other.
        process.kill()
        code = process.popen.wait()
        process.read_output()
        if code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            hint = f"{_OUT_OF_MEMORY}. Make a new engine" if -code == signal.SIGKILL else ""
            self._fail(process.rank, f"its process was ended by {name}", "\n".join(process.lines), hint)
        else:
            self._fail(process.rank, f"its process ended with exit code {code}", "\n".join(process.lines), "")

    def _check(self, process: _Process, elapsed: float) -> None:
        silence = process.silence(elapsed)
        if silence < self._limits.stopped:
            return
        state = process.state()
        if state in ("T", "t"):
            ended = f"its process has been stopped for {silence:.1f} s (state {state})"
        elif state == "S" and silence >= self._limits.silent:
            ended = f"its interpreter has not run for {silence:.0f} s while its process did nothing"
        else:
            return
        self._fail(process.rank, ended, "\n".join(process.lines), "")


def _spawn(module: str, files: LinkFiles, shared: Sequence[int], *, spins: bool) -> subprocess.Popen[bytes]:
    arguments = [str(os.getpid()), files.to_text(), str(_log.getEffectiveLevel()), str(int(spins))]
    # PYTHONPATH: the same modules as here, and nothing that happens to lie in the current folder.
    # OMP_WAIT_POLICY: torch's threads wait asleep, since those of the backend's kernels need the cores in between.
    environment = (
        {"OMP_WAIT_POLICY": "passive"}
        | os.environ
        | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUNBUFFERED": "1"}
    )
    # Not `subprocess.DEVNULL`: where no file is left for the pipe, what Popen opened for it stays open.
    with open(os.devnull, "rb") as nothing:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", module, *arguments],
            stdin=nothing,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(*files.all, *shared),
            env=environment,
            process_group=0,
        )
