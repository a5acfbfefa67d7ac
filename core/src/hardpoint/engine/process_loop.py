"""A loop in a process of its own, seen from its client; `hardpoint.engine.process_main` is the other side."""

from __future__ import annotations

import itertools
import logging
import operator
import os
import queue
import select
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from hardpoint.engine.commands import Command, Died, RegisterParticipant, Reply, ShutDown, Sleep, UpdateWeights
from hardpoint.engine.config import EngineConfig
from hardpoint.engine.inputs import weight_pairs
from hardpoint.engine.loops import Deliver, RunningLoop, check_room
from hardpoint.engine.process_messages import (
    CLIENT,
    ENGINE,
    REPLIES,
    STARTED,
    decode_events,
    decode_told,
    encode_command,
    encode_config,
)
from hardpoint.engine.sleep import SleepParticipant
from hardpoint.executor.failures import Failure, describe, rebuild
from hardpoint.executor.interrupts import AllowedInterrupts
from hardpoint.executor.limits import RankLimits
from hardpoint.executor.link import Link, LinkFiles
from hardpoint.executor.messages import Buffer, decode, encode
from hardpoint.executor.processes import ChildProcesses
from hardpoint.executor.ring import take
from hardpoint.executor.transport import PROGRESS, Frame, Kind
from hardpoint.executor.weights import encode_weight
from hardpoint.interfaces.errors import EngineDead, ForkedProcess, MalformedMessage

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger("hardpoint")

_MODULE = "hardpoint.engine.process_main"
_NEW = "Make a new engine"


class ProcessLoop(RunningLoop):
    """A loop in a process of its own, which ends with this one; see `RunningLoop`.

    What a command brings along stays here: the engine asks for the tensors of `UpdateWeights` one by one, and reports progress to, and
    tells participants in, the thread that waits for the answer to the command, or a thread of this loop's where none does. They may
    call the engine meanwhile.

    Raises what `EngineCore` raises, and EngineDead where the process ends while it starts; nothing is left then.
    """

    def __init__(self, config: EngineConfig, deliver: Deliver | None = None) -> None:
        super().__init__(deliver)
        self._process = EngineProcess(config, self._deliver)
        self._finalizer = weakref.finalize(self, EngineProcess.close, self._process)
        try:
            self.info, self.model = self._process.start(config)
        except BaseException:
            self._process.kill()
            self._finalizer()
            raise

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._process.pid

    def submit(self, command: Command) -> Future[Reply]:
        """Hand a command over."""
        return self._process.submit(command)

    def call(self, command: Command) -> Reply:
        """Have a command done and wait for its answer; what it calls back is called in this thread."""
        reply = self._process.submit(command, is_awaited=True)
        try:
            with AllowedInterrupts():
                return self._process.wait(reply)
        except BaseException as error:
            if not reply.done():
                self._process.abandon(reply, error)
                self.give_up(command)
            raise

    def kill(self) -> None:
        """End the process at once, without waiting for that; `shutdown` is still to be called."""
        self._process.kill()

    def shutdown(self) -> None:
        """End the loop after its present step, and the process."""
        self._finalizer()


class _Pending(Future[Any]):
    """A command that was not answered yet.

    Attributes:
        kind: type of the answer; None for no answer.
        callbacks: what the engine asks for, where a thread waits for that; None at its end.
        asked: what it waits for now.
        weights: the tensors that it may ask for.
        raised: what a callback of this process raised.
    """

    def __init__(self, call: int, command: Command | None, kind: Any, *, is_awaited: bool) -> None:
        super().__init__()
        # Not to be cancelled: the engine does the command, whether anybody still waits for the answer or not.
        self.set_running_or_notify_cancel()
        self.call, self.command, self.kind = call, command, kind
        self.callbacks: queue.SimpleQueue[Frame | None] | None = queue.SimpleQueue() if is_awaited else None
        self.asked: Frame | None = None
        self.abandoned: BaseException | None = None
        self.weights: Iterator[tuple[str, Tensor]] = iter(())
        self.raised: BaseException | None = None


class EngineProcess:
    """The process, and one thread here that writes and reads all messages, so that an interrupt of the main thread tears none."""

    def __init__(self, config: EngineConfig, deliver: Deliver) -> None:
        self._deliver = deliver
        self._limit = config.max_commands
        self._limits = RankLimits.parse(config.rank_limits)
        self._pid = os.getpid()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._pending: dict[int, _Pending] = {}
        self._outgoing: deque[tuple[Kind, int, Sequence[Buffer]]] = deque()
        self._participants: dict[int, SleepParticipant] = {}
        self._death: EngineDead | None = None
        self._refusal: EngineDead | None = None
        """What refuses all commands, from when the last events were delivered: nobody is told of the end before them."""
        self._is_closing = False
        self._inside = threading.local()
        self._unattended: queue.SimpleQueue[tuple[_Pending, Frame] | None] = queue.SimpleQueue()
        self._helper: threading.Thread | None = None
        self._processes = ChildProcesses(_MODULE, "engine", self._limits, self._ended)
        files = LinkFiles.make()
        try:
            self._link = Link(files, is_rank=False)
        except OSError:
            files.close()
            raise
        self._wake = -1
        try:
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._processes.start([self._link], [files])
        except BaseException:
            self._processes.stop(0.0)
            self._release()
            raise
        self._thread = threading.Thread(target=self._run, name="hardpoint engine client", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._processes.pids[0]

    def start(self, config: EngineConfig) -> Any:
        """Make the engine, and return what it is: `STARTED`. Raises what making it raises."""
        started = _Pending(next(self._numbers), None, STARTED, is_awaited=False)
        self._send(started, Kind.START, encode_config(config))
        return started.result()

    def submit(self, command: Command, *, is_awaited: bool = False) -> _Pending:
        """Hand a command over; raises EngineDead, InboxFull, ForkedProcess.

        Args:
            is_awaited: the caller calls `wait`, and does meanwhile what the engine asks for.
        """
        number = next(self._numbers)
        pending = _Pending(number, command, REPLIES.get(type(command)), is_awaited=is_awaited)
        match command:
            case UpdateWeights(weights=weights):
                pending.weights = weight_pairs(weights)
            case RegisterParticipant(participant=participant):
                self._participants[number] = participant
        if pending.callbacks is not None:
            ended = pending.callbacks
            pending.add_done_callback(lambda _: ended.put(None))
        kind = Kind.NESTED if getattr(self._inside, "is_called_back", False) else Kind.CALL
        self._send(pending, kind, encode_command(command, number))
        return pending

    def _send(self, pending: _Pending, kind: Kind, message: Sequence[Buffer]) -> None:
        if os.getpid() != self._pid:
            raise ForkedProcess("the engine belongs to the process that started it", hint="Make an engine in this one")
        with self._lock:
            if self._refusal is not None:
                raise self._refusal
            if pending.command is not None:
                check_room(pending.command, len(self._pending), self._limit)
            self._pending[pending.call] = pending
            self._outgoing.append((kind, pending.call, message))
            # If other messages wait to be sent, the thread has been woken for them already, and takes all that wait.
            if len(self._outgoing) == 1:
                os.eventfd_write(self._wake, 1)

    def wait(self, pending: _Pending) -> Reply:
        """Return the answer to a command, and do until then what the engine asks for."""
        assert pending.callbacks is not None
        while (frame := pending.callbacks.get()) is not None:
            self._call_back(pending, frame)
        return pending.result()

    def abandon(self, pending: _Pending, error: BaseException) -> None:
        """Nobody waits for the answer any more; what the engine asks for is refused with `error`."""
        with self._lock:
            pending.abandoned = error
        self._reply(pending, Kind.CANCEL, encode(describe(error)))

    def kill(self) -> None:
        """End the process at once."""
        with self._lock:
            self._is_closing = True
        self._processes.kill()

    def close(self) -> None:
        """End the engine and its process, which has a while to end by itself. Idempotent; callable from any thread."""
        if os.getpid() != self._pid:
            return
        if threading.current_thread() in (self._thread, self._helper) or self._processes.is_keeper():
            # A garbage collection may close the loop in any thread, and these threads cannot wait for themselves.
            threading.Thread(target=self.close).start()
            return
        if self._wake < 0:
            return
        if self._death is None and not self._is_closing:
            self._is_closing = True
            try:
                self.submit(ShutDown())
                self._thread.join(self._limits.shutdown)
            except EngineDead:
                pass
        is_well = not self._thread.is_alive()
        self._is_closing = True
        self._processes.stop(self._limits.shutdown if is_well else 0.0)
        self._thread.join()
        self._unattended.put(None)
        self._release()

    def _release(self) -> None:
        self._link.close()
        with self._lock:
            if self._wake >= 0:
                os.close(self._wake)
            self._wake = -1

    # In the thread of the messages

    def _run(self) -> None:
        poll = select.poll()
        alarm = self._processes.alarm
        for source in (self._link.fileno(), self._wake, alarm):
            poll.register(source, select.POLLIN)
        try:
            while self._death is None:
                if not self._link.has_unread:
                    poll.poll()
                take(self._wake)
                self._receive()
                while self._outgoing and self._death is None:
                    kind, call, message = self._outgoing.popleft()
                    self._link.send(kind, call, message, self._wait_for_room)
            # Take what the engine sent before it ended.
            self._receive()
        except BaseException as error:
            self._die(EngineDead("the messages of the engine's process broke off", found=repr(error), hint=_NEW))
            self._processes.kill()
        assert self._death is not None
        with self._lock:
            self._refusal = self._death
            pending = list(self._pending.values())
            self._pending.clear()
        for one in pending:
            if isinstance(one.command, ShutDown):
                one.set_result(None)
            else:
                one.set_exception(self._death)
        self._deliver([Died(self._death)])

    def _wait_for_room(self, space: int) -> None:
        """Wait until the ring has room; meanwhile take what the engine sends, so that it does not wait for room in turn."""
        poll = select.poll()
        for source in (space, self._link.fileno(), self._processes.alarm):
            poll.register(source, select.POLLIN)
        poll.poll()
        self._receive()
        if self._death is not None:
            raise self._death

    def _receive(self) -> None:
        while (frame := self._link.receive()) is not None:
            match frame.kind:
                case Kind.EVENTS:
                    self._take_events(frame)
                case Kind.RESULT | Kind.FAILURE:
                    self._answer(frame)
                case _:
                    self._ask(frame)

    def _take_events(self, frame: Frame) -> None:
        events = decode_events(frame.payload)
        if isinstance(last := events[-1], Died):
            # `Died` is delivered last, when all commands were refused.
            events.pop()
            self._die(last.error)
        if events:
            self._deliver(events)

    def _answer(self, frame: Frame) -> None:
        # The command stays among the pending ones until its answer was decoded: an answer that cannot be decoded ends them all.
        is_result, pending = frame.kind == Kind.RESULT, self._pending[frame.call]
        answer = decode(frame.payload, pending.kind if is_result else Failure)
        with self._lock:
            del self._pending[frame.call]
        if is_result:
            pending.set_result(answer)
            return
        failure: Failure = answer
        if pending.command is None:
            self._is_closing = True
        if isinstance(pending.command, RegisterParticipant):
            self._participants.pop(frame.call)
        raised = pending.raised
        if raised is not None and failure.text == str(rebuild(describe(raised), CLIENT)):
            pending.set_exception(raised)
        else:
            pending.set_exception(rebuild(failure, ENGINE))

    def _ask(self, frame: Frame) -> None:
        """Hand on what the engine asks for: to the thread that waits for the call's answer, else to one of this loop's own."""
        with self._lock:
            # The engine may ask a participant after it has answered the call that this belongs to, which is not pending any more.
            pending = self._pending.get(frame.call) or _Pending(frame.call, None, None, is_awaited=False)
            pending.asked = frame
            abandoned = pending.abandoned
        if abandoned is not None and frame.kind != Kind.PARTICIPANT:
            self._reply(pending, Kind.CANCEL, encode(describe(abandoned)))
        elif pending.callbacks is not None and abandoned is None:
            pending.callbacks.put(frame)
        else:
            if self._helper is None:
                self._helper = threading.Thread(target=self._attend, name="hardpoint callbacks", daemon=True)
                self._helper.start()
            self._unattended.put((pending, frame))

    # Callbacks

    def _attend(self) -> None:
        while (item := self._unattended.get()) is not None:
            self._call_back(*item)

    def _call_back(self, pending: _Pending, frame: Frame) -> None:
        """Do what the engine asks for, and have it raise what that raises."""
        self._inside.is_called_back = True
        try:
            kind, message = self._called_back(pending, frame)
        except BaseException as error:
            pending.raised = error
            self._reply(pending, Kind.CANCEL, encode(describe(error)))
            if not isinstance(error, Exception):
                raise
        else:
            self._reply(pending, kind, message)
        finally:
            self._inside.is_called_back = False

    def _called_back(self, pending: _Pending, frame: Frame) -> tuple[Kind, Sequence[Buffer]]:
        match frame.kind:
            case Kind.PROGRESS:
                assert isinstance(pending.command, Sleep)
                assert pending.command.request.progress is not None
                pending.command.request.progress(*PROGRESS.unpack(frame.payload))
                return Kind.CONTINUE, ()
            case Kind.WANT_WEIGHT:
                pair = next(pending.weights, None)
                return (Kind.WEIGHTS_END, ()) if pair is None else (Kind.WEIGHT, encode_weight(pair))
            case Kind.PARTICIPANT:
                number, method, arguments = decode_told(frame.payload)
                result = getattr(self._participants[number], method)(*arguments)
                # What the other methods return means nothing.
                return Kind.CONTINUE, encode(operator.index(result) if method == "resident_bytes" else 0)
        raise MalformedMessage(f"the engine asks for a frame of kind {frame.kind}")

    def _reply(self, pending: _Pending, kind: Kind, message: Sequence[Buffer]) -> None:
        """Answer what the engine waits for, unless that was done."""
        with self._lock:
            if pending.asked is None or self._wake < 0:
                return
            pending.asked = None
            self._outgoing.append((kind, pending.call, message))
            os.eventfd_write(self._wake, 1)

    # The end

    def _ended(self, rank: int, ended: str, output: str, hint: str) -> None:
        """Take what the keeper says of the process; there is one only."""
        if self._is_closing:
            ended, output = "it was shut down", ""
        found = f"{ended}; it left:\n{output.rstrip()}\n" if output.strip() else ended
        self._die(EngineDead("the engine's process has ended", found=found, hint=hint or _NEW))
        self._processes.kill()
        self._processes.sound_alarm()

    def _die(self, error: EngineDead) -> None:
        with self._lock:
            if self._death is not None:
                return
            self._death = error
        if not self._is_closing:
            _log.error("%s", error)
