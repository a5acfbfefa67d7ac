"""The process of one engine: `python -m hardpoint.engine.process_main`; see `hardpoint.executor.child`."""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from hardpoint.engine.commands import Command, Event, RegisterParticipant, Reply, Sleep, UpdateWeights, Wake
from hardpoint.engine.core import EngineCore
from hardpoint.engine.loops import Work, do, run
from hardpoint.engine.process_messages import (
    CLIENT,
    RegisterRemote,
    Sent,
    SleepRemote,
    StreamWeights,
    decode_command,
    decode_config,
    encode_events,
    encode_told,
)
from hardpoint.executor.child import Connection, run_child
from hardpoint.executor.failures import Failure, describe, rebuild
from hardpoint.executor.messages import Buffer, decode, encode
from hardpoint.executor.transport import PROGRESS, WITHIN_CALL, Frame, Kind
from hardpoint.executor.weights import decode_weight
from hardpoint.interfaces.allocator import SleepPlan
from hardpoint.interfaces.errors import EngineDead, MalformedMessage

if TYPE_CHECKING:
    from torch import Tensor


class EngineServer:
    """Serves one engine, whose loop runs in the thread that calls `serve`: between its steps it does the commands that have arrived."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._core: EngineCore
        self._waiting: deque[Frame] = deque()
        self._changing = 0

    def serve(self) -> None:
        """Start the engine, and serve it until it is shut down or dies."""
        start = self._connection.receive()
        try:
            self._core = EngineCore(decode_config(start.payload))
        except Exception as error:
            self._connection.send(Kind.FAILURE, start.call, encode(describe(error)))
            return
        # What there is now stays while the process lives: full collections need not go through it.
        gc.freeze()
        try:
            self._connection.send(Kind.RESULT, start.call, encode((self._core.info, self._core.model)))
            run(self._core, self._take, self._deliver)
        finally:
            self._core.shutdown()

    def _take(self, waits: bool) -> Work | None:
        if self._waiting:
            frame: Frame | None = self._waiting.popleft()
        else:
            frame = self._connection.receive() if waits else self._connection.receive_now()
        return None if frame is None else self._work(frame)

    def _deliver(self, events: list[Event]) -> None:
        self._connection.send(Kind.EVENTS, 0, encode_events(events))

    def _work(self, frame: Frame) -> Work:
        if frame.kind not in (Kind.CALL, Kind.NESTED):
            raise MalformedMessage(f"a frame of kind {frame.kind} is no command")
        command = self._command(frame.call, decode_command(frame.payload))
        if isinstance(command, Sleep | Wake):
            self._changing = frame.call
        return Work(command, _Answer(self._connection, frame.call))

    def _command(self, call: int, sent: Sent) -> Command:
        match sent:
            case StreamWeights():
                return UpdateWeights(self._weights(call))
            case RegisterRemote(name=name, number=number):
                return RegisterParticipant(_Participant(name, partial(self._tell, number)))
            case SleepRemote(sleep=sleep):
                return Sleep(replace(sleep.request, progress=partial(self._report, call)), sleep.key)
        return sent

    # What the client is asked for

    def _ask(self, kind: Kind, call: int, parts: Sequence[Buffer]) -> Frame:
        """Wait for what a client answers, and do what it asks for meanwhile from within its answer; raises what the client raised."""
        self._connection.send(kind, call, parts)
        while (frame := self._connection.receive()).kind not in WITHIN_CALL:
            if frame.kind == Kind.NESTED:
                changing = self._changing
                do(self._core, self._work(frame), self._deliver)
                self._changing = changing
                if self._core.is_shut_down:
                    raise EngineDead("the engine was shut down from within an answer to it", hint="Make a new one")
            else:
                self._waiting.append(frame)
        if frame.kind in (Kind.CANCEL, Kind.WEIGHTS_FAILED):
            raise rebuild(decode(frame.payload, Failure), CLIENT)
        return frame

    def _report(self, call: int, done: int, total: int) -> None:
        self._ask(Kind.PROGRESS, call, [PROGRESS.pack(done, total)])

    def _weights(self, call: int) -> Iterator[tuple[str, Tensor]]:
        while (frame := self._ask(Kind.WANT_WEIGHT, call, ())).kind == Kind.WEIGHT:
            yield decode_weight(frame.payload)

    def _tell(self, number: int, method: str, argument: Any = None) -> int:
        frame = self._ask(Kind.PARTICIPANT, self._changing, encode_told(number, method, argument))
        result: int = decode(frame.payload, int)
        return result


class _Answer:
    """Sends the answer to a command."""

    def __init__(self, connection: Connection, call: int) -> None:
        self._connection, self._call = connection, call

    def set_result(self, result: Reply, /) -> None:
        self._connection.send(Kind.RESULT, self._call, encode(result))

    def set_exception(self, error: BaseException | None, /) -> None:
        assert error is not None
        self._connection.send(Kind.FAILURE, self._call, encode(describe(error)))


class _Participant:
    """A participant of sleeps that lives in the client's process."""

    def __init__(self, name: str, tell: partial[int]) -> None:
        self.name, self._tell = name, tell

    def before_sleep(self, plan: SleepPlan) -> None:
        self._tell("before_sleep", plan)

    def after_wake(self, tags: frozenset[str]) -> None:
        self._tell("after_wake", tags)

    def resident_bytes(self) -> int:
        return self._tell("resident_bytes")


def _serve(connection: Connection) -> None:
    EngineServer(connection).serve()


if __name__ == "__main__":
    run_child(sys.argv[1:], _serve)
