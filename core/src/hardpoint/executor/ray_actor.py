"""One rank as a Ray actor. Only the Ray transport imports this module, where Ray is installed.

What goes in and out is bytes, so Ray pickles no value of ours, and no exception. The worker runs in a thread of its own; Ray's threads
only hand frames over.
"""

from __future__ import annotations

import logging
import os
import platform
import queue
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any, TypeVar

import msgspec
import ray

from hardpoint.executor.messages import Buffer, encode
from hardpoint.executor.rank_server import RankServer
from hardpoint.executor.rendezvous import RendezvousServer
from hardpoint.executor.transport import Frame, Kind
from hardpoint.interfaces import API_VERSION
from hardpoint.plugins import installed

EXCHANGE, SIDE = "exchange", "side"
THREADS = {EXCHANGE: 16, SIDE: 2}
"""Threads of Ray's concurrency groups: a frame that awaits an answer holds one, `watch` holds one for ever."""

_WAITING_FRAMES = 2
"""Frames that the worker has not taken yet: the most tensors that are held here."""

_HEADER = struct.Struct("<IQ")

_F = TypeVar("_F", bound=Callable[..., Any])


def pack(kind: int, call: int, parts: Sequence[Buffer]) -> bytes:
    """Return a frame as bytes."""
    return b"".join([_HEADER.pack(kind, call), *parts])


def unpack(message: bytes) -> Frame:
    """Return the frame of bytes; raises struct.error."""
    kind, call = _HEADER.unpack_from(message)
    # Arrays are views of the payload, and torch takes no read-only ones.
    return Frame(kind, call, bytearray(memoryview(message)[_HEADER.size :]))


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


def _in_group(name: str) -> Callable[[_F], _F]:
    """Have Ray run a method in a concurrency group."""

    def mark(method: _F) -> _F:
        marked: _F = ray.method(concurrency_group=name)(method)
        return marked

    return mark


class RankActor:
    """Serves one worker."""

    def __init__(self, log_level: int) -> None:
        logging.basicConfig(level=log_level, format="%(levelname)s %(name)s: %(message)s")
        self._rendezvous: RendezvousServer | None = None
        self._turn = threading.Condition()
        self._next = 0
        self._inbox: queue.Queue[Frame] = queue.Queue(_WAITING_FRAMES)
        self._outbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._ended = threading.Event()
        threading.Thread(target=self._serve, name="hardpoint rank", daemon=True).start()

    def facts(self, backend: str, resource: str) -> bytes:
        """Return `Facts`.

        Args:
            resource: that Ray set aside for this actor.
        """
        context = ray.get_runtime_context()
        facts = Facts(
            context.get_node_id(),
            ray.util.get_node_ip_address(),
            socket.gethostname(),
            os.getpid(),
            versions_of(backend),
            bool(context.get_accelerator_ids().get(resource)),
            len(os.sched_getaffinity(0)),
        )
        return b"".join(encode(facts))

    def open_rendezvous(self, address: str) -> bytes:
        """Serve the place where the ranks meet, and return its `init_method`."""
        self._rendezvous = RendezvousServer(address)
        return b"".join(encode(self._rendezvous.init_method))

    @_in_group(EXCHANGE)
    def exchange(self, number: int, message: bytes, is_answered: bool) -> bytes:
        """Give the rank a frame, and return one of its answers: to this frame, or to another that awaits one.

        Args:
            number: of the frame; Ray's threads may come in another order.
        """
        with self._turn:
            self._turn.wait_for(lambda: self._next == number)
            self._inbox.put(unpack(message))
            self._next += 1
            self._turn.notify_all()
        return self._outbox.get() if is_answered else b""

    @_in_group(SIDE)
    def watch(self) -> None:
        """Return when the rank was stopped: Ray reports any other end of the process as the failure of this call."""
        self._ended.wait()

    @_in_group(SIDE)
    def trace(self) -> str:
        """Return where every thread stands."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        return "\n".join(
            f"Thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame)).rstrip()}"
            for ident, frame in sys._current_frames().items()
            if ident != threading.get_ident()
        )

    def _serve(self) -> None:
        try:
            RankServer(self._inbox.get, self._send).serve()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        self._ended.set()

    def _send(self, kind: Kind, call: int, parts: Sequence[Buffer]) -> None:
        self._outbox.put(pack(kind, call, parts))
