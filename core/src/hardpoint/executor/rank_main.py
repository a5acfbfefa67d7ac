"""The process of one rank: `python -m hardpoint.executor.rank_main`, started by the multi-process executor and by nobody else.

It serves frames until it is told to stop, and ends with its parent, whatever happens to that.
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
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from hardpoint.executor.calls import SCHEMAS
from hardpoint.executor.failures import Failure, describe, rebuild
from hardpoint.executor.link import NAME_BYTES, PROGRESS, TRACE_SIGNAL, Kind, Link, LinkFiles
from hardpoint.executor.messages import Buffer, decode, encode
from hardpoint.executor.ranks import RankSpec
from hardpoint.executor.ring import Frame
from hardpoint.executor.serving import RankServer
from hardpoint.executor.weights import decode_weight
from hardpoint.interfaces.errors import MalformedMessage

if TYPE_CHECKING:
    from torch import Tensor

HEARTBEAT_SECONDS = 0.25
_PR_SET_PDEATHSIG = 1
_SPIN_SECONDS = 50e-6


class _Rank:
    def __init__(self, link: Link, *, spins: bool) -> None:
        self._link = link
        self._server: RankServer | None = None
        self._where = "a rank"
        self._spin = _SPIN_SECONDS if spins else 0.0
        self._arrivals = select.poll()
        self._arrivals.register(link.fileno(), select.POLLIN)

    def serve(self) -> None:
        """Serve until told to stop; raises MalformedMessage, after which nothing that arrives can be trusted."""
        while (frame := self._receive()).kind != Kind.STOP:
            match frame.kind:
                case Kind.EXECUTE:
                    self._answer(frame.call, partial(self._made().execute, frame.payload))
                case Kind.CALL:
                    self._call(frame)
                case Kind.START:
                    self._answer(frame.call, partial(self._start, frame.payload))
                case _:
                    raise MalformedMessage(f"a frame of kind {frame.kind} begins nothing")
        if self._server is not None:
            self._server.call("shutdown", b"".join(SCHEMAS["shutdown"].encode([])))

    def _answer(self, call: int, function: Callable[[], list[Buffer]]) -> None:
        try:
            kind, parts = Kind.RESULT, function()
        except Exception as error:
            kind, parts = Kind.FAILURE, encode(describe(error))
        self._send(kind, call, parts)

    def _start(self, payload: Buffer) -> list[Buffer]:
        spec = RankSpec.decode(payload)
        self._where = spec.where
        self._server = RankServer(spec)
        return encode(None)

    def _made(self) -> RankServer:
        if self._server is None:
            raise MalformedMessage("a call came before the worker was made")
        return self._server

    def _call(self, frame: Frame) -> None:
        name = bytes(frame.payload[:NAME_BYTES]).rstrip(b"\0").decode("ascii", "replace")
        schema, server = SCHEMAS.get(name), self._made()
        weights = _Weights(self._receive)
        message = memoryview(frame.payload)[NAME_BYTES:]
        self._answer(
            frame.call, lambda: server.call(name, message, progress=self._progress(frame.call), weights=weights)
        )
        if schema is not None and schema.takes_weights:
            weights.skip()

    def _progress(self, call: int) -> Callable[[int, int], None]:
        def report(done: int, total: int) -> None:
            self._send(Kind.PROGRESS, call, [PROGRESS.pack(done, total)])
            answer = self._receive()
            if answer.kind == Kind.BREAK_OFF:
                raise rebuild(decode(answer.payload, Failure), "the engine's process")
            if answer.kind != Kind.GO_ON:
                raise MalformedMessage(f"a frame of kind {answer.kind} came for a report of progress")

        return report

    def _receive(self) -> Frame:
        if self._spin:
            end = time.perf_counter() + self._spin
            while time.perf_counter() < end:
                if (frame := self._link.receive()) is not None:
                    return frame
        # To look where nothing has arrived is a call to the kernel, and takes time from whoever waits for the processor.
        frame = self._link.receive() if self._link.has_unread else None
        while frame is None:
            self._arrivals.poll()
            frame = self._link.receive()
        return frame

    def _send(self, kind: Kind, call: int, parts: list[Buffer]) -> None:
        self._link.send(kind, call, parts, _wait)


class _Weights:
    """The tensors that follow a call; raises what the engine's own iterator raised."""

    def __init__(self, receive: Callable[[], Frame]) -> None:
        self._receive = receive
        self._ended = False

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        while not self._ended:
            frame = self._receive()
            if frame.kind == Kind.WEIGHT:
                yield decode_weight(frame.payload)
                continue
            self._ended = True
            if frame.kind == Kind.WEIGHTS_FAILED:
                raise rebuild(decode(frame.payload, Failure), "the engine's process")
            if frame.kind != Kind.WEIGHTS_END:
                raise MalformedMessage(f"a frame of kind {frame.kind} came among weights")

    def skip(self) -> None:
        """Take what the worker has not asked for, so that the next frame is the next call."""
        while not self._ended:
            self._ended = self._receive().kind != Kind.WEIGHT


class _Heart(threading.Thread):
    def __init__(self, link: Link) -> None:
        super().__init__(name="hardpoint heartbeat", daemon=True)
        self._link = link

    def run(self) -> None:
        while True:
            self._link.beat()
            time.sleep(HEARTBEAT_SECONDS)


def _wait(fd: int) -> None:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    poll.poll()


def _end_with_parent(parent: int) -> None:
    """Have the kernel end this process when the thread that started it ends, with its process or before."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(1)


def main(arguments: list[str]) -> None:
    """Serve one rank.

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
    _Heart(link).start()
    _Rank(link, spins=spins == "1").serve()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not the interpreter's own end: libraries that hold a device may hang or crash in theirs.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
