"""All ranks on this machine, a process for each; see docs/architecture.md for what happens when one fails."""

from __future__ import annotations

import logging
import os
import select
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hardpoint.executor.base import at_rank
from hardpoint.executor.calls import EXECUTE, SCHEMAS, Progress, may_wait_for_others
from hardpoint.executor.failures import Failure, describe, rebuild
from hardpoint.executor.limits import RankLimits
from hardpoint.executor.link import NAME_BYTES, PROGRESS, Kind, Link, LinkFiles
from hardpoint.executor.meeting import MeetingServer
from hardpoint.executor.messages import Buffer, decode, encode
from hardpoint.executor.processes import RankProcesses
from hardpoint.executor.ranks import rank_specs
from hardpoint.executor.remote import RemoteExecutor
from hardpoint.executor.ring import Frame
from hardpoint.executor.rounds import (
    NOT_YET,
    OUT_OF_STEP,
    Deadline,
    are_in_step,
    culprit,
    without_progress,
)
from hardpoint.executor.weights import encode_weight
from hardpoint.interfaces.errors import EngineDead, MalformedMessage, RankFailed
from hardpoint.interfaces.worker import WorkerConfig
from hardpoint.plugins import Resolved

_log = logging.getLogger("hardpoint")


class MultiProcessExecutor(RemoteExecutor):
    """Ranks in processes of their own, which end with this one.

    A rank that dies, is stopped or does not answer within its limit ends all ranks: every call from then on raises the RankFailed that
    says which one it was. So does an error that leaves the ranks out of step with one another.

    Args:
        resolved: the backend, and the device of the first rank.
        config: of the whole engine; see `rank_specs`.

    Raises:
        ConfigError: there are not enough devices.
        RankFailed, and what making a worker raises: nothing is left behind.
    """

    def __init__(self, resolved: Resolved, config: WorkerConfig, limits: RankLimits | None = None) -> None:
        super().__init__(config, limits)
        self._deadline = Deadline("start", self._limits.start)
        specs = rank_specs(resolved, config)
        meeting = MeetingServer() if len(specs) > 1 else None
        if meeting is not None:
            specs = rank_specs(resolved, config, init_method=meeting.init_method)
        self._where = [spec.where for spec in specs]
        files: list[LinkFiles] = []
        self._links: list[Link] = []
        self._inboxes: list[deque[Frame]] = [deque() for _ in specs]
        self._processes = RankProcesses(self._links, files, self._limits)
        self._finalizer = weakref.finalize(self, _end_all, self._pid, self._processes, self._links, meeting)
        try:
            for _ in specs:
                files.append(LinkFiles.make())
                self._links.append(Link(files[-1], is_rank=False))
            self._processes.start()
            self._arrivals = select.poll()
            for source in self._sources():
                self._arrivals.register(source, select.POLLIN)
            self._driver_arrivals = select.poll()
            troubles = (link.trouble for link in self._links)
            for source in (self._processes.alarm, self._links[self._driver].fileno(), *troubles):
                self._driver_arrivals.register(source, select.POLLIN)
            call = self._next_call()
            deadline = Deadline("start", self._limits.start)
            for rank, spec in enumerate(specs):
                self._send(rank, Kind.START, call, spec.encode(), deadline)
            for rank, outcome in enumerate(self._gather(call, deadline, None, waits=True)):
                if isinstance(outcome, BaseException):
                    raise at_rank(outcome, rank, len(specs))
        except BaseException:
            self._processes.kill()
            self._finalizer()
            raise

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return len(self._links)

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks."""
        return self._processes.pids

    def _send_step(self, parts: list[Buffer]) -> Callable[[], list[Any]]:
        call = self._next_call()
        deadline = Deadline(EXECUTE, self._limits.step)
        for rank in range(len(self._links)):
            self._send(rank, Kind.EXECUTE, call, parts, deadline)
        # The driver is the last one, more often than not: until it has answered, the others' answers wake nobody.
        return lambda: self._gather(call, deadline, None, waits=True, driver_first=True)

    def shutdown(self) -> None:
        """End all ranks: those that are well end their workers first. Legal in any state and more than once."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        if os.getpid() != self._pid:
            return
        try:
            if self._processes.failure is None:
                deadline = Deadline("shutdown", self._limits.shutdown)
                self._processes.expect_end()
                for rank in range(len(self._links)):
                    self._send(rank, Kind.STOP, self._next_call(), [], deadline)
                self._processes.stop(self._limits.shutdown)
        except EngineDead as error:
            _log.warning("a rank was ended while the engine was shut down: %s", error)
        finally:
            self._finalizer()

    def _call_all(self, name: str, args: tuple[Any, ...]) -> list[Any]:
        schema, call = SCHEMAS[name], self._next_call()
        deadline = Deadline(name, self._limits.of(name))
        progress = schema.progress_of(args)
        header = name.encode("ascii").ljust(NAME_BYTES, b"\0")
        requests = [[header, *schema.encode(args)]]
        if progress is not None:
            requests.append([header, *schema.encode([without_progress(argument) for argument in args])])
        try:
            self._check()
            for rank in range(len(self._links)):
                self._send(rank, Kind.CALL, call, requests[min(rank, len(requests) - 1)], deadline)
            if schema.takes_weights:
                return self._results(schema, self._stream(call, schema.weights_of(args), deadline))
            return self._results(schema, self._gather(call, deadline, progress, waits=may_wait_for_others(name)))
        except EngineDead as error:
            return [error] * len(self._links)

    # One round of messages

    def _gather(
        self,
        call: int,
        deadline: Deadline,
        progress: Progress | None,
        *,
        waits: bool,
        driver_first: bool = False,
    ) -> list[Any]:
        """Return each rank's answer to a call: bytes, or the exception that it raised.

        Args:
            waits: ranks wait for one another in this call: when one has failed, the others get little time to follow.
            driver_first: until the driver has answered, or a rank has failed, answers of others wake nobody.
        """
        outcomes: list[Any] = [NOT_YET] * len(self._links)
        missing, has_waited = len(outcomes), False
        while True:
            for rank, outcome in enumerate(outcomes):
                if outcome is NOT_YET and (frame := self._answer(rank, call, progress, has_waited)) is not None:
                    outcomes[rank] = outcome = self._outcome(rank, frame)
                    missing -= 1
                    if isinstance(outcome, BaseException):
                        self._links[rank].forget_trouble()
                        if waits:
                            deadline.shorten(self._limits.behind)
            if not missing:
                return outcomes
            # The first time only: what wakes it then may be a failure, after which all ranks are of interest.
            driver_first = driver_first and outcomes[self._driver] is NOT_YET
            arrivals = self._driver_arrivals if driver_first else self._arrivals
            if not arrivals.poll(deadline.left() * 1000):
                raise self._late(outcomes, deadline)
            driver_first, has_waited = False, True
            self._check_ranks()

    def _answer(self, rank: int, call: int, progress: Progress | None, has_waited: bool = True) -> Frame | None:
        """Return a rank's answer to a call where it is there; reports of progress are served, earlier calls' answers dropped.

        Args:
            has_waited: for the ranks' file descriptors, just before; else only what these would not tell is looked for.
        """
        while (frame := self._next_frame(rank, has_waited)) is not None:
            if frame.kind == Kind.PROGRESS:
                self._report(rank, frame, progress if frame.call == call else None)
            elif frame.call == call:
                return frame
            elif frame.call > call:
                raise self._broken(rank, f"it answered call {frame.call}, which was not made")
            else:
                self._links[rank].forget_trouble()
        return None

    def _next_frame(self, rank: int, has_waited: bool) -> Frame | None:
        if self._inboxes[rank]:
            return self._inboxes[rank].popleft()
        link = self._links[rank]
        try:
            return link.receive() if has_waited or link.has_unread else None
        except MalformedMessage as error:
            raise self._broken(rank, str(error)) from error

    def _outcome(self, rank: int, frame: Frame) -> bytearray | Exception:
        if frame.kind == Kind.RESULT:
            return frame.payload
        if frame.kind != Kind.FAILURE:
            raise self._broken(rank, f"it sent a frame of kind {frame.kind}")
        return rebuild(decode(frame.payload, Failure), self._where[rank])

    def _report(self, rank: int, frame: Frame, progress: Progress | None) -> None:
        """Call back, and have the rank raise what the callback raises."""
        deadline = Deadline("progress", self._limits.other)
        try:
            if progress is not None:
                progress(*PROGRESS.unpack(frame.payload))
        except BaseException as error:
            self._send(rank, Kind.BREAK_OFF, frame.call, encode(describe(error)), deadline)
            if not isinstance(error, Exception):
                raise
        else:
            self._send(rank, Kind.GO_ON, frame.call, [], deadline)

    def _stream(self, call: int, weights: Iterable[Any], deadline: Deadline) -> list[Any]:
        """Send tensors to all ranks until there are no more or a rank has failed, and return the ranks' answers."""
        kind, message = Kind.WEIGHTS_END, encode(None)
        raised: BaseException | None = None
        try:
            for item in weights:
                parts = encode_weight(item)
                for rank in range(len(self._links)):
                    self._send(rank, Kind.WEIGHT, call, parts, deadline)
                deadline.extend()
                if (failure := self._early_failure(call)) is not None:
                    kind, message = Kind.WEIGHTS_FAILED, [failure]
                    break
        except BaseException as error:
            if self._processes.failure is not None:
                raise
            raised = error
            kind, message = Kind.WEIGHTS_FAILED, encode(describe(error))
        for rank in range(len(self._links)):
            self._send(rank, kind, call, message, deadline)
        outcomes = self._gather(call, deadline, None, waits=False)
        if raised is not None:
            # The exception itself; the ranks were given its likeness.
            raise raised
        return outcomes

    def _early_failure(self, call: int) -> Buffer | None:
        """Return the failure with which a rank has answered already, as a message."""
        for rank, inbox in enumerate(self._inboxes):
            frame = self._answer(rank, call, None)
            if frame is not None:
                inbox.append(frame)
                if frame.kind == Kind.FAILURE:
                    return frame.payload
        return None

    def _send(self, rank: int, kind: Kind, call: int, parts: Sequence[Buffer], deadline: Deadline) -> None:
        self._deadline = deadline
        try:
            self._links[rank].send(kind, call, parts, self._wait_for_room)
        except BaseException as error:
            # Torn frames cannot be mended: nothing that follows would be understood.
            if isinstance(error, TimeoutError):
                raise self._processes.fail_hanging(rank, deadline.call, deadline.seconds) from None
            if self._processes.failure is None:
                self._processes.fail(rank, f"a message to it broke off ({type(error).__name__})", output="")
            raise

    def _wait_for_room(self, space: int) -> None:
        """Wait until a ring has room; meanwhile take what ranks send, so that none of them waits for room in turn."""
        poll = select.poll()
        for source in (space, *self._sources()):
            poll.register(source, select.POLLIN)
        if not poll.poll(self._deadline.left() * 1000):
            raise TimeoutError
        self._check_ranks()
        for link, inbox in zip(self._links, self._inboxes, strict=True):
            while (frame := link.receive()) is not None:
                inbox.append(frame)

    def _sources(self) -> tuple[int, ...]:
        """Return the file descriptors that can be read when a rank has sent something or has failed."""
        return (self._processes.alarm, *(link.fileno() for link in self._links))

    # Failures

    def _check_ranks(self) -> None:
        failure = self._processes.failure
        if failure is not None:
            self._processes.wait_ended()
            raise RankFailed.of(failure.rank or 0, failure.ended, failure.output, failure.hint or "")

    def _broken(self, rank: int, what: str) -> RankFailed:
        return self._processes.fail(rank, f"its messages cannot be understood: {what}")

    def _late(self, outcomes: Sequence[Any], deadline: Deadline) -> RankFailed:
        late = next(rank for rank, outcome in enumerate(outcomes) if outcome is NOT_YET)
        if any(isinstance(outcome, BaseException) for outcome in outcomes):
            return self._out_of_step(outcomes, f"rank {late} waits for it")
        return self._processes.fail_hanging(late, deadline.call, deadline.seconds)

    def _failed_step(self, outcomes: Sequence[Any]) -> BaseException:
        """Return what a failed step raises; ranks that are out of step are ended."""
        if are_in_step(outcomes, self._driver):
            error: BaseException = outcomes[self._driver]
            return at_rank(error, self._driver, len(outcomes))
        return self._out_of_step(outcomes, "the others did not fail alike")

    def _out_of_step(self, outcomes: Sequence[Any], others: str) -> RankFailed:
        rank, error = culprit(outcomes)
        failure = self._processes.fail(
            rank,
            f"it raised {type(error).__name__}: {error}, and {others}",
            output="\n".join(getattr(error, "__notes__", ())),
            hint=OUT_OF_STEP,
        )
        failure.__cause__ = error
        return failure


def _end_all(pid: int, processes: RankProcesses, links: Sequence[Link], meeting: MeetingServer | None) -> None:
    """End the ranks and give back all that is shared with them. Also the way out for an executor that nobody shut down.

    Args:
        pid: of the process that they belong to; a forked child of it does nothing here.
    """
    if os.getpid() != pid:
        return
    if processes.is_keeper():
        # Garbage can be collected in any thread; this one cannot wait for itself.
        threading.Thread(target=_end_all, args=(pid, processes, links, meeting)).start()
        return
    processes.stop(0.0)
    for link in links:
        link.close()
    if meeting is not None:
        meeting.close()
