"""The executor of ranks that are reached by frames; see docs/ranks.md for what happens when one of them fails."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from hardpoint.executor.base import Executor, at_rank, raise_first
from hardpoint.executor.calls import COMMUNICATING, SCHEMAS, Progress
from hardpoint.executor.failures import Failure, describe, rebuild
from hardpoint.executor.interrupts import AllowedInterrupts, DeferredInterrupts
from hardpoint.executor.messages import Buffer, decode, encode
from hardpoint.executor.steps import StepEncoder, decode_output
from hardpoint.executor.transport import NAME_BYTES, PROGRESS, Deadline, Frame, Kind, Transport
from hardpoint.executor.weights import encode_weight
from hardpoint.interfaces.allocator import SleepPlan
from hardpoint.interfaces.batch import StepInput, StepOutput, TierReport
from hardpoint.interfaces.errors import (
    EngineDead,
    ForkedProcess,
    MalformedMessage,
    MemoryBusy,
    NothingToCollect,
    OutputFailed,
    RankFailed,
    WorkerError,
)
from hardpoint.interfaces.worker import ModelInfo

_log = logging.getLogger("hardpoint")

_PENDING = object()
"""Outcome of a rank that has not answered."""

_BRIEF = frozenset({"commit", "rollback", "status"})
"""Calls that end a change of memory: to be told in their midst, what is asleep would not be known."""

_PATIENCE = 2.0
"""Seconds that an interrupt waits for the answers to a brief call; from then on it is raised."""

_INCONSISTENT = "Ranks that are out of step cannot go on, so all were ended; make a new engine"


class _Round:
    """One call of all ranks, and the outcome of each: bytes, or the exception that it raised."""

    __slots__ = ("call", "first_failure", "missing", "outcomes")

    def __init__(self, call: int, num_ranks: int) -> None:
        self.call, self.missing = call, num_ranks
        self.outcomes: list[Any] = [_PENDING] * num_ranks
        self.first_failure: Exception | None = None


class RemoteExecutor(Executor):
    """Ranks in processes of their own, which end with this one.

    A rank that dies, is stopped or does not answer within its limit ends all ranks: every call from then on raises the RankFailed that
    says which one it was. So does an error that leaves the ranks out of step with one another.

    An interrupt comes while answers are waited for, and leaves these to be dropped. It does not come in the middle of a message, except
    where a rank has taken nothing of it for seconds; that ends the ranks.

    Args:
        transport: not started yet; it belongs to this executor from here on.

    Raises:
        What starting the transport and making a worker raise; RankFailed: nothing is left behind.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport, self._limits = transport, transport.limits
        self._pid = os.getpid()
        self._is_shut_down = self._is_streaming = False
        self._steps = StepEncoder()
        self._depth = 0
        self._last_call = 0
        self._rounds: dict[int, _Round] = {}
        self._submitted: deque[_Round] = deque()
        self._reports: deque[tuple[int, Frame]] = deque()
        self._finalizer = weakref.finalize(self, _close, transport, self._pid)
        try:
            deadline = Deadline("start", self._limits.start)
            specs = transport.start(deadline)
            self._all = range(len(specs))
            self._driver = specs[0].config.driver_rank
            round = self._begin()
            for rank, spec in enumerate(specs):
                self._send([rank], Kind.START, round.call, spec.encode(), deadline)
            raise_first(self._gather(round, deadline, waits=True))
        except BaseException:
            transport.kill()
            self._finalizer()
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks, each on its machine."""
        return self._transport.pids

    @DeferredInterrupts()
    def submit(self, step: StepInput) -> None:
        """Send one step to every rank; what refuses it there is raised by `collect`. Raises RankFailed, EngineDead, ForkedProcess."""
        self._check()
        message = self._steps.encode(step)
        # Either all ranks get the step and the encoder counts it as sent, or the ranks end: half a step would give wrong tokens later.
        try:
            round = self._begin()
            deadline = Deadline("step", self._limits.step)
            self._transport.send(self._all, Kind.STEP, round.call, message, deadline)
            self._steps.commit()
            self._submitted.append(round)
        except BaseException as error:
            self._end_ranks(error)
            raise

    @DeferredInterrupts()
    def collect(self) -> StepOutput:
        """Return the driver rank's output of the oldest step that was submitted.

        When all ranks raise the same error, or the driver alone OutputFailed, that error is raised and the ranks go on; otherwise they
        are out of step, and RankFailed is raised. A step whose collection is interrupted is not collected again.
        """
        self._check()
        if not self._submitted:
            raise NothingToCollect("there is no step whose output could be collected", hint="Submit one first")
        round = self._submitted.popleft()
        deadline = Deadline("step", self._limits.step)
        if len(self._submitted) < self._depth and round.missing:
            # Workers answer a step unasked when as many steps follow it as they take; otherwise they are asked.
            self._send(self._all, Kind.COLLECT, round.call, (), deadline)
        # The driver answers last, more often than not: this process sleeps until it has, whatever the others answer before.
        outcomes = self._gather(round, deadline, waits=True, first=self._driver)
        if round.first_failure is not None:
            raise self._failed_step(outcomes)
        output = decode_output(outcomes[self._driver])
        if output.tiers is None or len(outcomes) == 1:
            return output
        # Each rank keeps its part of a block in the tiers: the block is there only where all parts are.
        return replace(output, tiers=_over_ranks([decode_output(one).tiers or output.tiers for one in outcomes]))

    def shutdown(self) -> None:
        """End all ranks: those that are well end their workers first. Callable in any state; idempotent."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        if os.getpid() != self._pid:
            return
        try:
            self._transport.check()
            self._transport.expect_end()
            deadline = Deadline("shutdown", self._limits.shutdown)
            self._send(self._all, Kind.STOP, self._last_call + 1, (), deadline)
            self._transport.close(deadline.left())
        except EngineDead as error:
            _log.debug("a rank had ended before the engine was shut down: %s", error)
        finally:
            self._finalizer()

    @DeferredInterrupts()
    def _call_all(self, name: str, args: tuple[Any, ...]) -> list[Any]:
        schema = SCHEMAS[name]
        deadline = Deadline(name, self._limits.of(name))
        header = name.encode("ascii").ljust(NAME_BYTES, b"\0")
        progress = schema.progress_of(args)
        raised = None
        try:
            self._check()
            round = self._begin()
            self._send(self._all[:1], Kind.CALL, round.call, [header, *schema.encode(args)], deadline)
            if len(self._all) > 1:
                # The first rank's progress is shown for all.
                quiet = [
                    replace(argument, progress=None) if isinstance(argument, SleepPlan) else argument
                    for argument in args
                ]
                self._send(self._all[1:], Kind.CALL, round.call, [header, *schema.encode(quiet)], deadline)
            if schema.takes_weights:
                raised = self._stream(round, schema.weights_of(args), deadline)
            patience = _PATIENCE if name in _BRIEF else 0.0
            outcomes = self._gather(round, deadline, progress, waits=name in COMMUNICATING, patience=patience)
        except EngineDead as error:
            return [error] * len(self._all)
        if raised is not None:
            # Raise the exception itself; the ranks were given a description of it.
            raise raised
        answers = [one if isinstance(one, Exception) else decode(one, schema.result) for one in outcomes]
        if isinstance(answers[0], ModelInfo):
            self._steps.block_size = answers[0].attention.block_size
            self._depth = answers[0].steps_in_flight
        return answers

    def _stream(self, round: _Round, weights: Iterable[Any], deadline: Deadline) -> BaseException | None:
        """Send tensors to all ranks until there are no more or a rank has failed; returns what the iterator raised."""
        kind, message, raised = Kind.WEIGHTS_END, encode(None), None
        self._is_streaming = True
        try:
            for item in weights:
                self._send(self._all, Kind.WEIGHT, round.call, encode_weight(item), deadline)
                deadline.extend()
                self._receive()
                if round.first_failure is not None:
                    kind, message = Kind.WEIGHTS_FAILED, encode(describe(round.first_failure))
                    break
        except BaseException as error:
            self._transport.check()
            kind, message, raised = Kind.WEIGHTS_FAILED, encode(describe(error)), error
        finally:
            self._is_streaming = False
        self._send(self._all, kind, round.call, message, deadline)
        return raised

    # One round of frames

    def _begin(self) -> _Round:
        self._last_call += 1
        round = self._rounds[self._last_call] = _Round(self._last_call, len(self._all))
        return round

    def _send(self, ranks: Sequence[int], kind: Kind, call: int, parts: Sequence[Buffer], deadline: Deadline) -> None:
        try:
            self._transport.send(ranks, kind, call, parts, deadline)
        except BaseException as error:
            self._end_ranks(error)
            raise

    def _gather(
        self,
        round: _Round,
        deadline: Deadline,
        progress: Progress | None = None,
        *,
        waits: bool,
        first: int | None = None,
        patience: float = 0.0,
    ) -> list[Any]:
        """Return each rank's outcome.

        Args:
            waits: ranks wait for one another in this call: when one has failed, the others get little time to follow.
            first: see `Transport.wait`.
            patience: seconds for which no interrupt is raised while nothing arrives.
        """
        try:
            while round.missing:
                if not (patience and self._transport.wait(min(patience, deadline.left()), first)):
                    with AllowedInterrupts():
                        has_arrived = self._transport.wait(deadline.left(), first)
                    if not has_arrived:
                        raise self._late(round, deadline)
                # A failure may have ended the wait; from here on, wait for any rank and not for the first alone.
                first = None
                self._receive()
                while self._reports:
                    self._answer_report(round.call, progress)
                if waits and round.first_failure is not None:
                    deadline.shorten(self._limits.behind)
            return round.outcomes
        finally:
            self._rounds.pop(round.call, None)

    def _receive(self) -> None:
        """Take the frames that have arrived: answers to their rounds, those of rounds that were given up to nowhere."""
        try:
            for rank, frame in self._transport.receive():
                if frame.kind == Kind.PROGRESS:
                    self._reports.append((rank, frame))
                elif (round := self._rounds.get(frame.call)) is not None:
                    round.outcomes[rank] = outcome = self._outcome(rank, frame)
                    round.missing -= 1
                    if isinstance(outcome, Exception) and round.first_failure is None:
                        round.first_failure = outcome
                elif frame.call > self._last_call:
                    raise self._transport.fail_malformed(rank, f"it answered call {frame.call}, which was not made")
        except BaseException as error:
            self._end_ranks(error)
            raise

    def _outcome(self, rank: int, frame: Frame) -> bytearray | Exception:
        if frame.kind == Kind.RESULT:
            return frame.payload
        if frame.kind != Kind.FAILURE:
            raise self._transport.fail_malformed(rank, f"a frame of kind {frame.kind}")
        try:
            failure = decode(frame.payload, Failure)
        except MalformedMessage as error:
            raise self._transport.fail_malformed(rank, error) from error
        return rebuild(failure, f"rank {rank} of {len(self._all)}{self._transport.where(rank)}")

    def _answer_report(self, call: int, progress: Progress | None) -> None:
        """Call back, and have the rank raise what the callback raises."""
        rank, frame = self._reports.popleft()
        deadline = Deadline("progress", self._limits.other)
        try:
            if progress is not None and frame.call == call:
                progress(*PROGRESS.unpack(frame.payload))
        except BaseException as error:
            self._send([rank], Kind.CANCEL, frame.call, encode(describe(error)), deadline)
            if not isinstance(error, Exception):
                raise
        else:
            self._send([rank], Kind.CONTINUE, frame.call, (), deadline)

    # Failures

    def _check(self) -> None:
        """Raise ForkedProcess, EngineDead or RankFailed where the ranks cannot be called from here any more, MemoryBusy where not now."""
        if os.getpid() != self._pid:
            raise ForkedProcess("the ranks belong to the process that started them", hint="Make an engine in this one")
        if self._is_shut_down:
            raise EngineDead("the ranks were shut down", hint="Make a new engine")
        if self._is_streaming:
            # The iterator that makes the tensors makes this call, and the ranks take any frame that is no tensor for their end.
            raise MemoryBusy(
                "the ranks cannot be called",
                found="they wait for the tensors of an update",
                hint="Do it when that call has returned",
            )
        self._transport.check()

    def _end_ranks(self, error: BaseException) -> None:
        """End the ranks, where none has failed before: a message to them or from them broke off."""
        self._transport.fail(0, f"a message broke off ({type(error).__name__})")

    def _late(self, round: _Round, deadline: Deadline) -> RankFailed:
        late = round.outcomes.index(_PENDING)
        if round.first_failure is not None:
            return self._inconsistent(round.outcomes, f"rank {late} waits for it")
        return self._transport.fail_hanging(late, deadline)

    def _failed_step(self, outcomes: Sequence[Any]) -> BaseException:
        """Return what a failed step raises; ranks that are out of step are ended."""
        if ranks_consistent(outcomes, self._driver):
            return at_rank(outcomes[self._driver], self._driver, len(outcomes))
        return self._inconsistent(outcomes, "the others did not fail alike")

    def _inconsistent(self, outcomes: Sequence[Any], others: str) -> RankFailed:
        rank, error = first_failure(outcomes)
        ended = f"it raised {type(error).__name__}: {error}, and {others}"
        failure = self._transport.fail(rank, ended, "\n".join(getattr(error, "__notes__", ())), _INCONSISTENT)
        failure.__cause__ = error
        return failure


def _over_ranks(reports: Sequence[TierReport]) -> TierReport:
    return TierReport(
        failed_loads=tuple(sorted({row for one in reports for row in one.failed_loads})),
        lost=tuple(sorted({lost for one in reports for lost in one.lost})),
        checksum_failures=sum(one.checksum_failures for one in reports),
        io_errors=sum(one.io_errors for one in reports),
        seconds=max(one.seconds for one in reports),
    )


def ranks_consistent(outcomes: Sequence[Any], driver: int) -> bool:
    """Whether the next communication of all ranks of a failed step is the next step's.

    So it is where all raised the same error, since they stopped at the same point, and where the driver alone failed, with the error that
    says that it needed the others no more. Of others it is not known.
    """
    failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if len(failed) == len(outcomes):
        return len(set(map(type, failed))) == 1
    return len(failed) == 1 and isinstance(outcomes[driver], OutputFailed)


def first_failure(outcomes: Sequence[Any]) -> tuple[int, Exception]:
    """Return the rank that failed first and its error, where some failed and others did not.

    An error of communication follows from another rank's failure, more often than not.
    """
    errors = {rank: outcome for rank, outcome in enumerate(outcomes) if isinstance(outcome, Exception)}
    rank = next((rank for rank, error in errors.items() if not isinstance(error, WorkerError)), next(iter(errors)))
    return rank, errors[rank]


def _close(transport: Transport, pid: int) -> None:
    """End the ranks. Also the way out for an executor that was not shut down, from whatever thread.

    Args:
        pid: of the process that they belong to; a forked child of it does nothing here.
    """
    if os.getpid() != pid:
        return
    if transport.is_watcher():
        # A garbage collection may close the executor in any thread, and this one cannot wait for itself.
        threading.Thread(target=transport.close).start()
    else:
        transport.close()
