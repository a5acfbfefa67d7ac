"""One rank as a Ray actor. Only the Ray executor imports this module, where Ray is installed.

What goes in and out is bytes: messages as those of the multi-process executor, an answer with one byte before it that says whether it is
a result or a failure. So Ray pickles no value of ours, and no exception.

The worker's calls run one after the other in one thread. What is said during a call (reports of progress, tensors, questions) runs
in Ray's concurrency group `SIDE`, in other threads.
"""

from __future__ import annotations

import logging
import os
import platform
import queue
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import ray

from hardpoint.executor.failures import Failure, describe, rebuild
from hardpoint.executor.link import PROGRESS
from hardpoint.executor.meeting import MeetingServer
from hardpoint.executor.messages import Buffer, decode, encode
from hardpoint.executor.ranks import RankSpec
from hardpoint.executor.serving import RankServer
from hardpoint.executor.weights import decode_weight
from hardpoint.interfaces import API_VERSION
from hardpoint.interfaces.errors import MalformedMessage
from hardpoint.plugins import installed

if TYPE_CHECKING:
    from torch import Tensor

SIDE = "side"
THREADS = {SIDE: 3}
"""Threads of the concurrency group: `watch` holds one for ever."""

_F = TypeVar("_F", bound=Callable[..., Any])


def _beside(method: _F) -> _F:
    """Have Ray run a method in the concurrency group."""
    marked: _F = ray.method(concurrency_group=SIDE)(method)
    return marked


RESULT, FAILURE = b"\0", b"\1"
"""First byte of an answer."""

GO_ON, END = b"\0", b"\1"
"""First byte of what the engine says during a call: go on (with the message that follows), or there is no more."""

ENGINE = "the engine's process"


class Facts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where an actor runs, and with what.

    Attributes:
        node: Ray's id of the machine.
        address: of the machine, as the others reach it.
        versions: of what must be the same on all machines.
        isolated: Ray shows this process the devices that it set aside, and no others.
        cpus: that this process may use.
    """

    node: str
    address: str
    host: str
    pid: int
    versions: dict[str, str]
    isolated: bool
    cpus: int


def versions_of(backend: str) -> dict[str, str]:
    """Return what must be the same for all ranks and the engine, by name, with the version that is installed here."""
    records = [record for record in installed().records(backend) if record.name == backend]
    return {
        "hardpoint": metadata.version("hardpoint"),
        "the contract": str(API_VERSION),
        "Python": ".".join(platform.python_version_tuple()[:2]),
        f"the backend '{backend}'": ", ".join(sorted(f"{one.distribution} {one.version}" for one in records)) or "none",
    }


class RankActor:
    """Serves one worker."""

    def __init__(self, log_level: int) -> None:
        logging.basicConfig(level=log_level, format="%(levelname)s %(name)s: %(message)s")
        self._server: RankServer | None = None
        self._meeting: MeetingServer | None = None
        self._talks: dict[int, _Talk] = {}
        self._over = 0
        self._lock = threading.Lock()

    def facts(self, backend: str, resource: str) -> bytes:
        """Return `Facts`.

        Args:
            resource: that Ray set aside for this actor.
        """
        context = ray.get_runtime_context()
        return _answer(
            lambda: encode(
                Facts(
                    context.get_node_id(),
                    ray.util.get_node_ip_address(),
                    socket.gethostname(),
                    os.getpid(),
                    versions_of(backend),
                    bool(context.get_accelerator_ids().get(resource)),
                    len(os.sched_getaffinity(0)),
                )
            )
        )

    def open_meeting(self, address: str) -> bytes:
        """Serve the place where the ranks meet, and return its `init_method`."""

        def serve() -> list[Buffer]:
            self._meeting = MeetingServer(address)
            return encode(self._meeting.init_method)

        return _answer(serve)

    def start(self, spec: bytes) -> bytes:
        """Make the worker of a `RankSpec`."""

        def make() -> list[Buffer]:
            self._server = RankServer(RankSpec.decode(spec))
            return encode(None)

        return _answer(make)

    def execute(self, message: bytes) -> bytes:
        """Run one step."""
        # Arrays are views of the message, and torch takes no read-only ones.
        return _answer(lambda: self._made().execute(bytearray(message)))

    def call(self, number: int, name: str, message: bytes) -> bytes:
        """Make a call of the contract's table.

        Args:
            number: of the call, which grows; `report` and `weight` name it.
        """
        talk = self._talk(number)
        try:
            return _answer(lambda: self._made().call(name, message, progress=talk.report, weights=talk.weights()))
        finally:
            with self._lock:
                self._over = number
                self._talks.pop(number, None)
            talk.end()

    @_beside
    def report(self, number: int, reply: bytes) -> bytes:
        """Wait for the next report of progress of a call, and return it; nothing once the call is over.

        Args:
            reply: to the report before: `GO_ON`, or `END` and the failure that the engine's callback raised; empty the first time.
        """
        return self._talk(number).next_report(reply)

    @_beside
    def weight(self, number: int, message: bytes) -> bytes:
        """Give a call its next tensor, once it has taken the one before; returns `GO_ON`, or `END` where the call is over already.

        Args:
            message: `GO_ON` and a tensor, `END`, or `END` and the failure of the engine's iterator.
        """
        return self._talk(number).put_weight(message)

    @_beside
    def watch(self) -> None:
        """Never return: Ray reports the end of the process as the end of this call."""
        threading.Event().wait()

    @_beside
    def trace(self) -> str:
        """Return where every thread stands."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        return "\n".join(
            f"Thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame)).rstrip()}"
            for ident, frame in sys._current_frames().items()
            if ident != threading.get_ident()
        )

    def _made(self) -> RankServer:
        if self._server is None:
            raise MalformedMessage("a call came before the worker was made")
        return self._server

    def _talk(self, number: int) -> _Talk:
        with self._lock:
            if number <= self._over:
                return _Talk(is_over=True)
            return self._talks.setdefault(number, _Talk())


class _Talk:
    """What engine and worker say to each other during one call."""

    def __init__(self, *, is_over: bool = False) -> None:
        self._changed = threading.Condition()
        self._report: bytes | None = None
        self._reply: bytes | None = None
        self._weights: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._room = 1
        self._is_over = is_over

    def end(self) -> None:
        """Let everybody who waits know that the call is over."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def report(self, done: int, total: int) -> None:
        """Tell the engine, and raise what its callback raises; called by the worker."""
        with self._changed:
            self._report, self._reply = PROGRESS.pack(done, total), None
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._reply is not None)
            reply = self._reply or b""
        if reply[:1] == END:
            raise rebuild(decode(memoryview(reply)[1:], Failure), ENGINE)

    def next_report(self, reply: bytes) -> bytes:
        """Return the next report, nothing at the end; called by the engine."""
        with self._changed:
            if reply:
                self._report, self._reply = None, reply
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._report is not None or self._is_over)
            return b"" if self._is_over else self._report or b""

    def put_weight(self, message: bytes) -> bytes:
        """Return whether the worker goes on, once it has taken the tensor before this one; called by the engine."""
        with self._changed:
            self._changed.wait_for(lambda: self._room > 0 or self._is_over)
            if self._is_over:
                return END
            self._room -= 1
            self._weights.put(message)
            return GO_ON

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors until the engine has no more; raises what its iterator raised."""
        while (message := self._weights.get())[:1] == GO_ON:
            with self._changed:
                self._room += 1
                self._changed.notify_all()
            yield decode_weight(bytearray(memoryview(message)[1:]))
        if len(message) > 1:
            raise rebuild(decode(memoryview(message)[1:], Failure), ENGINE)


def _answer(function: Callable[[], list[Buffer]]) -> bytes:
    try:
        return b"".join([RESULT, *function()])
    except Exception as error:
        return b"".join([FAILURE, *encode(describe(error))])
