"""One rank's side of every transport: frames in, the worker's methods called, frames out. How frames travel is not known here.

Calls come by name from the contract's closed table, and what comes with them is checked against the contract's types before the worker
sees it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from hardpoint.executor.calls import SCHEMAS
from hardpoint.executor.failures import Failure, describe, rebuild
from hardpoint.executor.messages import Buffer, decode, encode
from hardpoint.executor.ranks import RankSpec
from hardpoint.executor.steps import StepDecoder, encode_output
from hardpoint.executor.transport import NAME_BYTES, PROGRESS, WITHIN_CALL, Frame, Kind
from hardpoint.executor.weights import decode_weight
from hardpoint.interfaces.errors import MalformedMessage
from hardpoint.interfaces.worker import ModelInfo, Worker

if TYPE_CHECKING:
    from torch import Tensor

Send: TypeAlias = Callable[[Kind, int, Sequence[Buffer]], None]
"""Sends a frame to the engine."""

_ENGINE = "the engine's process"


class RankServer:
    """Serves one worker, which runs in the thread that calls `serve`.

    Args:
        receive: returns the next frame from the engine, once there is one.
    """

    def __init__(self, receive: Callable[[], Frame], send: Send) -> None:
        self._receive_new, self._send = receive, send
        self._held: Frame | None = None
        self._made: Worker | None = None
        self._steps = StepDecoder()
        self._depth = 0
        self._submitted: deque[tuple[int, list[Buffer] | None]] = deque()

    def serve(self) -> None:
        """Serve until told to stop; raises MalformedMessage, after which nothing that arrives can be trusted."""
        while (frame := self._receive()).kind != Kind.STOP:
            match frame.kind:
                case Kind.STEP:
                    self._submit(frame)
                case Kind.COLLECT:
                    while self._submitted and self._submitted[0][0] <= frame.call:
                        self._collect()
                case Kind.CALL:
                    self._answer(frame.call, partial(self._call, frame))
                case Kind.START:
                    self._answer(frame.call, partial(self._start, frame.payload))
                case kind if kind not in WITHIN_CALL:
                    raise MalformedMessage(f"a frame of kind {kind} begins nothing")
        if self._made is not None:
            self._made.shutdown()

    @property
    def _worker(self) -> Worker:
        if self._made is None:
            raise MalformedMessage("a call came before the worker was made")
        return self._made

    def _receive(self) -> Frame:
        frame, self._held = self._held, None
        return frame or self._receive_new()

    def _answer(self, call: int, function: Callable[[], list[Buffer]]) -> None:
        try:
            kind, parts = Kind.RESULT, function()
        except Exception as error:
            kind, parts = Kind.FAILURE, encode(describe(error))
        self._send(kind, call, parts)

    def _start(self, payload: Buffer) -> list[Buffer]:
        self._made = RankSpec.decode(payload).make_worker()
        return encode(None)

    # Steps

    def _submit(self, frame: Frame) -> None:
        """Submit a step; the oldest one is collected as soon as the worker has as many as it takes."""
        step = self._steps.decode(frame.payload)
        refusal = None
        try:
            self._worker.submit(step)
        except Exception as error:
            refusal = encode(describe(error))
        self._submitted.append((frame.call, refusal))
        if len(self._submitted) > self._depth:
            self._collect()

    def _collect(self) -> None:
        call, refusal = self._submitted.popleft()
        if refusal is None:
            self._answer(call, lambda: encode_output(self._worker.collect()))
        else:
            self._send(Kind.FAILURE, call, refusal)

    # Calls

    def _call(self, frame: Frame) -> list[Buffer]:
        name = bytes(frame.payload[:NAME_BYTES]).rstrip(b"\0").decode("ascii", "replace")
        schema = SCHEMAS.get(name)
        if schema is None:
            raise MalformedMessage(f"'{name}' is not a call of the worker contract")
        message = memoryview(frame.payload)[NAME_BYTES:]
        arguments = schema.decode(message, partial(self._report, frame.call), self._weights(frame.call))
        result = getattr(self._worker, name)(*arguments)
        if isinstance(result, ModelInfo):
            self._depth = result.steps_in_flight
        return encode(result)

    def _report(self, call: int, done: int, total: int) -> None:
        """Tell the engine of progress, and raise what its callback raises."""
        self._send(Kind.PROGRESS, call, [PROGRESS.pack(done, total)])
        answer = self._receive_within(call)
        if answer.kind == Kind.CANCEL:
            raise rebuild(decode(answer.payload, Failure), _ENGINE)
        if answer.kind != Kind.CONTINUE:
            raise MalformedMessage(f"a frame of kind {answer.kind} came for a report of progress")

    def _weights(self, call: int) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that follow a call; raises what the engine's own iterator raised."""
        while (frame := self._receive_within(call)).kind == Kind.WEIGHT:
            yield decode_weight(frame.payload)
        if frame.kind == Kind.WEIGHTS_FAILED:
            raise rebuild(decode(frame.payload, Failure), _ENGINE)
        if frame.kind != Kind.WEIGHTS_END:
            raise MalformedMessage(f"a frame of kind {frame.kind} came among weights")

    def _receive_within(self, call: int) -> Frame:
        """Return the next frame of a call under way; raises MalformedMessage where the engine has given the call up."""
        while (frame := self._receive()).call < call:
            pass  # What an earlier call did not wait for.
        if frame.call > call:
            self._held = frame
            raise MalformedMessage(
                f"the engine has given the call {call} up", found=f"a frame of the call {frame.call}"
            )
        return frame
