"""What the processes of ranks, and that of an engine, have in common: a link to the process that started them, and their end.

They are started by `ChildProcesses` and by nobody else, serve frames until they are told to stop, and end with their parent, whatever
happens to that.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from hardpoint.executor.link import TRACE_SIGNAL, Link, LinkFiles
from hardpoint.executor.messages import Buffer
from hardpoint.executor.transport import Frame, Kind

HEARTBEAT_SECONDS = 0.25
_PR_SET_PDEATHSIG = 1
_SPIN_SECONDS = 50e-6


class Connection:
    """The child's side of its link, which waits; it looks for a while first where processors are to spare (`spins`)."""

    def __init__(self, link: Link, *, spins: bool) -> None:
        self._link = link
        self._spin = _SPIN_SECONDS if spins else 0.0
        self._arrivals = select.poll()
        self._arrivals.register(link.fileno(), select.POLLIN)

    def receive(self) -> Frame:
        """Return the next frame, once there is one."""
        if self._spin:
            end = time.perf_counter() + self._spin
            while time.perf_counter() < end:
                if (frame := self._link.receive()) is not None:
                    return frame
        # Receiving without need is a call to the kernel, which takes time from processes that wait for the processor.
        frame = self._link.receive() if self._link.has_unread else None
        while frame is None:
            self._arrivals.poll()
            frame = self._link.receive()
        return frame

    def receive_now(self) -> Frame | None:
        """Return the next frame, None where it has not arrived as a whole yet."""
        return self._link.receive()

    def send(self, kind: Kind, call: int, parts: Sequence[Buffer]) -> None:
        """Send a frame, once there is room for it."""
        self._link.send(kind, call, parts, _wait)


def _wait(fd: int) -> None:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    poll.poll()


def _beat(link: Link) -> None:
    while True:
        link.beat()
        time.sleep(HEARTBEAT_SECONDS)


def _end_with_parent(parent: int) -> None:
    """Have the kernel end this process when the thread that started it ends, with its process or before."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(1)


def run_child(arguments: Sequence[str], serve: Callable[[Connection], None]) -> NoReturn:
    """Serve frames, and end the process.

    Args:
        arguments: the parent's process id, the link's files, the level of the log, and whether to spin before waiting.
    """
    parent, files, level, spins = arguments
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(TRACE_SIGNAL, all_threads=True)
    _end_with_parent(int(parent))
    logging.basicConfig(level=int(level), format="%(levelname)s %(name)s: %(message)s")
    link = Link(LinkFiles.parse(files), is_rank=True)
    threading.Thread(target=_beat, args=(link,), name="hardpoint heartbeat", daemon=True).start()
    serve(Connection(link, spins=spins == "1"))
    sys.stdout.flush()
    sys.stderr.flush()
    # Not the interpreter's own end: libraries that hold a device may hang or crash in theirs.
    os._exit(0)
