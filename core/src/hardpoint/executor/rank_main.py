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
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from hardpoint.executor.failures import Failure, describe, rebuild
from hardpoint.executor.link import NAME_BYTES, Kind, Link, LinkFiles
from hardpoint.executor.messages import Buffer, decode, encode
from hardpoint.executor.ranks import RankSpec
from hardpoint.executor.ring import Frame
from hardpoint.executor.serving import RankServer
from hardpoint.executor.weights import decode_weight
from hardpoint.interfaces.errors import MalformedMessage

if TYPE_CHECKING:
    from torch import Tensor

TRACE_SIGNAL = signal.SIGUSR1
"""Makes a rank write the traceback of all its threads to standard error."""

HEARTBEAT_SECONDS = 0.25
_PR_SET_PDEATHSIG = 1
PROGRESS = struct.Struct("<qq")
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
                    self._answer(frame.call, self._made().execute, frame.payload)
                case Kind.CALL:
                    self._answer(frame.call, self._call, frame)
                case Kind.START:
                    self._answer(frame.call, self._start, frame.payload)
                case _:
                    raise MalformedMessage(f"a frame of kind {frame.kind} begins nothing")
        if self._server is not None:
            self._server.call("shutdown", b"".join(encode([])))

    def _answer(self, call: int, function: Callable[..., list[Buffer]], argument: object) -> None:
        try:
            kind, parts = Kind.RESULT, function(argument)
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

    def _call(self, frame: Frame) -> list[Buffer]:
        name = bytes(frame.payload[:NAME_BYTES]).rstrip(b"\0").decode("ascii", "replace")
        weights = _Weights(self._receive)
        try:
            return self._made().call(
                name, memoryview(frame.payload)[NAME_BYTES:], progress=self._progress(frame.call), weights=weights
            )
        except BaseException as error:
            if weights.is_open:
                self._send(Kind.FAILURE, frame.call, encode(describe(error)))
                weights.skip()
            raise

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
        while (frame := self._link.receive()) is None:
            self._arrivals.poll()
        return frame

    def _send(self, kind: Kind, call: int, parts: list[Buffer]) -> None:
        self._link.send(kind, call, parts, _wait)


class _Weights:
    """The tensors that follow a call; raises what the engine's own iterator raised."""

    def __init__(self, receive: Callable[[], Frame]) -> None:
        self._receive = receive
        self.is_open = False
