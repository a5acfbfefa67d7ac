"""Who drives an engine's loop: its client, a thread, or a process (`hardpoint.engine.process_loop`)."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, Protocol, TypeAlias

from hardpoint.engine.commands import (
    Abort,
    CheckStep,
    Command,
    Died,
    Event,
    Finish,
    GiveUp,
    Pause,
    Reply,
    Resume,
    ShutDown,
    Sleep,
)
from hardpoint.engine.config import EngineConfig
from hardpoint.engine.core import EngineCore
from hardpoint.engine.info import EngineInfo
from hardpoint.engine.sleep import SleepMode
from hardpoint.executor.interrupts import AllowedInterrupts, DeferredInterrupts, raise_deferred
from hardpoint.interfaces.errors import EngineDead, ForkedProcess, HardpointError, InboxFull, InvalidRequest
from hardpoint.interfaces.worker import ModelInfo

Deliver: TypeAlias = Callable[[list[Event]], None]
"""Takes the events of a loop, in order and in a thread of the loop's; it must be quick."""

_IDLE_SECONDS = 0.02
"""After which a client that waits for events asks whether any will come."""

_UNLIMITED = (Abort, Finish, Resume, GiveUp, ShutDown)
"""Commands that a full inbox takes: they end something."""


class FairLock:
    """A re-entrant lock that goes to the thread that waits for it, not back to one that has just released it.

    A `threading.RLock` may be taken again before a waiting thread has woken: who computes step after step would keep out, for many
    of them, who wants to add a request or to end one. To be taken where interrupts are deferred; they are allowed while it waits.
    """

    def __init__(self) -> None:
        self._turn = threading.RLock()
        """Held by the one thread that waits for the lock next."""
        self._lock = threading.RLock()
        self._owner: int | None = None
        self._depth = 0
        self._here = threading.local()

    @contextmanager
    def refused_here(self) -> Iterator[None]:
        """Refuse the lock to this thread instead of letting it wait: it runs a function whose end the lock's holder may wait for."""
        before, self._here.is_refused = self.is_refused_here, True
        try:
            yield
        finally:
            self._here.is_refused = before

    @property
    def is_refused_here(self) -> bool:
        """This thread is within `refused_here`."""
        return getattr(self._here, "is_refused", False)

    def __enter__(self) -> None:
        thread = threading.get_ident()
        if self._owner != thread:
            if self.is_refused_here:
                raise called_back("a call of the engine")
            _acquire(self._turn)
            try:
                _acquire(self._lock)
            finally:
                self._turn.release()
            self._owner = thread
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._lock.release()

    def give_way(self) -> None:
        """Let threads that wait for the lock have it in between, where this one holds it; no interrupt ends its wait to go on."""
        depth, self._owner, self._depth = self._depth, None, 0
        self._lock.release()
        with self._turn:
            self._lock.acquire()
        self._owner, self._depth = threading.get_ident(), depth

    def wait_until_free(self, timeout: float) -> None:
        """Wait until no thread holds the lock, at most so many seconds, ahead of those that want to take it."""
        if self._lock.acquire(timeout=timeout):
            self._lock.release()


def called_back(what: str) -> InvalidRequest:
    """Return the error of what is asked of several engines from within a function that they wait for."""
    return InvalidRequest(
        "the engines wait for what a call of theirs was given",
        found=f"{what} from a progress callback or from the tensors of update_weights",
        hint="Call them before or after it",
    )


def _acquire(lock: threading.RLock) -> None:
    """Take a lock that this thread does not hold; an interrupt that ends the wait leaves it to others."""
    if lock.acquire(blocking=False):
        return
    try:
        with AllowedInterrupts():
            lock.acquire()
    except BaseException:
        # The interrupt may have come just before the lock was taken, or just after; only then is there something to release.
        with contextlib.suppress(RuntimeError):
            lock.release()
        raise


class Loop(ABC):
    """A client's way to the loop of one engine; safe to use from any thread.

    Attributes:
        lock: its client's, too, for requests and the events about them, which are to stay together.
    """

    info: EngineInfo
    model: ModelInfo

    def __init__(self) -> None:
        self.lock = FairLock()

    @abstractmethod
    def submit(self, command: Command) -> Future[Reply]:
        """Hand a command over; the events that it brings come before its answer. Raises EngineDead, InboxFull, ForkedProcess."""

    @abstractmethod
    def call(self, command: Command) -> Reply:
        """Have a command done and return its answer; raises what refuses it, EngineDead, InboxFull, ForkedProcess."""

    @abstractmethod
    def events(self) -> list[Event]:
        """Return what came up since the last call, after at least one step where there is one to be computed.

        Raises EngineAsleep, WeightsMissing or EngineDead in a state without steps, where nothing came up.
        """

    @abstractmethod
    def pending(self) -> list[Event]:
        """Return what came up since the last call, at once."""

    @abstractmethod
    def shutdown(self) -> None:
        """End the engine: its requests are dropped, its memory is given back. Idempotent."""


class InlineLoop(Loop):
    """A loop that its clients drive, one after the other: a command is done when it is called, and a step is computed by `events`.

    An interrupt comes after a command or a step, or where one waits: for a rank elsewhere, or for what a caller's function does.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__()
        self.core = EngineCore(config)
        self.info, self.model = self.core.info, self.core.model

    def submit(self, command: Command) -> Future[Reply]:
        """Do a command; one that takes steps is done by `events`."""
        with DeferredInterrupts(), self.lock:
            try:
                reply = self.core.execute(command)
            except Exception as error:
                return _refused(error)
            if isinstance(reply, Future):
                return reply
            done: Future[Reply] = Future()
            done.set_result(reply)
            return done

    def call(self, command: Command) -> Reply:
        """Do a command; a sleep that waits for requests serves them first.

        Between its steps other threads have their turns; another sleep comes after it.
        """
        with DeferredInterrupts(), self.lock:
            if isinstance(command, (Sleep, Pause)) and not self.core.is_busy:
                while self.core.is_draining:
                    self._drain_on()
            reply = self.core.execute(command)
            if not isinstance(reply, Future):
                return reply
            try:
                while not reply.done():
                    self._drain_on()
                return reply.result()
            except BaseException:
                if not reply.done():
                    self.core.cancel_drain()
                raise
            finally:
                # The error's traceback has this frame: if the frame kept the error, what its frames hold would stay until a collection.
                del reply

    def _drain_on(self) -> None:
        """Compute a step for a sleep that waits; other threads come next, but not into the midst of something."""
        self.core.advance()
        if not self.core.is_busy:
            self.lock.give_way()
        raise_deferred()

    def events(self) -> list[Event]:
        """Go one step on."""
        with DeferredInterrupts(), self.lock:
            self.core.advance()
            return self.core.take_events()

    def pending(self) -> list[Event]:
        """Return what came up, without a step."""
        with DeferredInterrupts(), self.lock:
            return self.core.take_events()

    def shutdown(self) -> None:
        """End the engine, once a step that another thread drives is done."""
        self.call(ShutDown())


def _refused(error: Exception) -> Future[Reply]:
    """Return the answer to a command that was refused; no frame that the error leads to has it."""
    answer: Future[Reply] = Future()
    answer.set_exception(error)
    return answer


class RunningLoop(Loop):
    """A loop that runs by itself.

    Args:
        deliver: takes events where a client wants them as they come; None keeps them for `events`.
    """

    def __init__(self, deliver: Deliver | None) -> None:
        super().__init__()
        self._arrived: queue.SimpleQueue[list[Event]] = queue.SimpleQueue()
        self._deliver: Deliver = deliver or self._arrived.put

    def call(self, command: Command) -> Reply:
        """Have a command done and wait for its answer."""
        reply = self.submit(command)
        try:
            with AllowedInterrupts():
                return reply.result()
        except BaseException:
            if not reply.done():
                self.give_up(command)
            raise

    def give_up(self, command: Command) -> None:
        """Nobody waits for the answer to a command any more: a sleep or pause need not wait for requests. Returns at once."""
        if not isinstance(command, Sleep | Pause):
            return
        asked = command.request if isinstance(command, Sleep) else command
        if asked.mode is SleepMode.WAIT:
            with contextlib.suppress(EngineDead):
                self.submit(GiveUp(command.key))

    def events(self) -> list[Event]:
        """Wait for the next events, as long as any can come."""
        while True:
            # A deferred interrupt is raised here, before events are taken, so that none are lost to it.
            raise_deferred()
            with contextlib.suppress(queue.Empty):
                return self._arrived.get(timeout=_IDLE_SECONDS)
            try:
                if self.call(CheckStep()):
                    continue
            except HardpointError:
                # Events that came before this error are the client's first; it gets the error at the next call.
                if events := self.pending():
                    return events
                raise
            return self.pending()

    def pending(self) -> list[Event]:
        """Return what has arrived."""
        events: list[Event] = []
        while not self._arrived.empty():
            events += self._arrived.get()
        return events


class Answer(Protocol):
    """Takes the answer to a command; a `Future` is one."""

    def set_result(self, result: Reply, /) -> None:
        """Take what the command is answered with."""

    def set_exception(self, error: BaseException | None, /) -> None:
        """Take what refuses the command."""


class Work(NamedTuple):
    """A command on its way to a loop."""

    command: Command
    answer: Answer


def run(core: EngineCore, take: Callable[[bool], Work | None], deliver: Deliver) -> EngineDead:
    """Run a loop until it is shut down or dies, which is its last event; returns the error that refuses all further commands.

    Args:
        take: returns the next command, None where there is none; with True, it waits for one.
    """
    try:
        while core.death is None:
            while (work := take(not core.can_advance)) is not None:
                if not do(core, work, deliver):
                    break
            if core.can_advance:
                core.advance()
            _flush(core, deliver)
        return core.death
    except BaseException as error:
        dead = EngineDead("the engine's loop failed", found=f"{type(error).__name__}: {error}", hint="Make a new one")
        dead.__cause__ = error
        deliver([Died(dead)])
        return dead


def do(core: EngineCore, work: Work, deliver: Deliver) -> bool:
    """Do a command and answer it, after the events that it brought; returns whether the engine goes on."""
    try:
        answer = core.execute(work.command)
    except Exception as error:
        _flush(core, deliver)
        work.answer.set_exception(error)
        del work  # as in `InlineLoop.call`
    else:
        if isinstance(answer, Future):
            answer.add_done_callback(partial(_answer_later, core, work.answer, deliver))
        else:
            _flush(core, deliver)
            work.answer.set_result(answer)
    return core.death is None


def _answer_later(core: EngineCore, answer: Answer, deliver: Deliver, done: Future[Reply]) -> None:
    _flush(core, deliver)
    error = done.exception()
    if error is None:
        answer.set_result(done.result())
    else:
        answer.set_exception(error)


def _flush(core: EngineCore, deliver: Deliver) -> None:
    if core.has_events:
        deliver(core.take_events())


class Inbox:
    """Commands on their way to a loop in another thread, each with the future of its answer.

    Args:
        limit: most commands that may wait.
    """

    def __init__(self, limit: int) -> None:
        self._queue: queue.Queue[Work] = queue.Queue()
        self._limit = limit
        self._lock = threading.Lock()
        self._closed: EngineDead | None = None

    def put(self, command: Command) -> Future[Reply]:
        """Add a command; raises InboxFull, and EngineDead once the inbox is closed."""
        reply: Future[Reply] = Future()
        with self._lock:
            if self._closed is not None:
                raise self._closed
            check_room(command, self._queue.qsize(), self._limit)
            self._queue.put(Work(command, reply))
        return reply

    def take(self, waits: bool) -> Work | None:
        """Return the next command that was not cancelled; None where there is none, unless it waits."""
        while True:
            try:
                work = self._queue.get(waits)
            except queue.Empty:
                return None
            assert isinstance(work.answer, Future)
            if work.answer.set_running_or_notify_cancel():
                return work

    def close(self, error: EngineDead) -> None:
        """Refuse all commands from here on, and those that wait, with `error`."""
        with self._lock:
            self._closed = self._closed or error
        while not self._queue.empty():
            if (work := self.take(waits=False)) is not None:
                work.answer.set_exception(None if isinstance(work.command, ShutDown) else error)


def check_room(command: Command, waiting: int, limit: int) -> None:
    """Raise InboxFull where the limit of waiting commands is reached, and this one is not exempt."""
    if waiting >= limit and not isinstance(command, _UNLIMITED):
        found = f"{waiting} commands wait, of at most {limit}"
        raise InboxFull("the engine's inbox is full", found=found, hint="Try again later")


class ThreadLoop(RunningLoop):
    """A loop in a thread of its own; see `RunningLoop`."""

    def __init__(self, config: EngineConfig, deliver: Deliver | None = None) -> None:
        super().__init__(deliver)
        self.inbox = Inbox(config.max_commands)
        self._pid = os.getpid()
        made: Future[EngineCore] = Future()
        self._core: EngineCore | None = None
        self._thread = threading.Thread(target=self._run, args=(config, made), name="hardpoint engine", daemon=True)
        self._thread.start()
        core = made.result()
        self.info, self.model = core.info, core.model

    def _run(self, config: EngineConfig, made: Future[EngineCore]) -> None:
        try:
            core = EngineCore(config)
        except BaseException as error:
            made.set_exception(error)
            return
        self._core = core
        made.set_result(core)
        del made
        try:
            self.inbox.close(run(core, self.inbox.take, self._deliver))
        finally:
            core.shutdown()
            self._core = None

    def submit(self, command: Command) -> Future[Reply]:
        """Hand a command over; one of a function that the engine calls is done at once, since the loop cannot wait for itself."""
        if os.getpid() != self._pid:
            # A fork has no thread of the loop, so that no answer would ever come.
            raise ForkedProcess("the engine belongs to the process that started it", hint="Make an engine in this one")
        core = self._core
        is_called_back = threading.current_thread() is self._thread and core is not None and core.is_busy
        if core is None or not is_called_back or isinstance(command, Abort | Finish):
            return self.inbox.put(command)
        reply: Future[Reply] = Future()
        do(core, Work(command, reply), self._deliver)
        return reply

    def shutdown(self) -> None:
        """End the loop after its present step; in a forked child there is nothing to end."""
        with contextlib.suppress(EngineDead, ForkedProcess):
            self.submit(ShutDown())
        if threading.current_thread() is not self._thread:
            self._thread.join()
