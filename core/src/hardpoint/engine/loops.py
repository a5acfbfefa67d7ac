"""Who drives an engine's loop: its client, or a thread."""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeAlias

from hardpoint.engine.commands import Command, Died, Event, Reply
from hardpoint.engine.config import EngineConfig
from hardpoint.engine.core import EngineCore, EngineInfo
from hardpoint.interfaces.errors import EngineDead, InboxFull
from hardpoint.interfaces.worker import ModelInfo

Deliver: TypeAlias = Callable[[list[Event]], None]
"""Takes the events of a loop, in order and in the loop's own thread; it must be quick."""


class Loop(ABC):
    """A client's way to the loop of one engine; safe to use from any thread."""

    info: EngineInfo
    model: ModelInfo

    @abstractmethod
    def call(self, command: Command) -> Reply:
        """Have a command done and return its answer; raises what refuses it, EngineDead, InboxFull."""

    @abstractmethod
    def events(self) -> list[Event]:
        """Return what came up since the last call, after at least one step where there is one to be computed.

        Raises EngineAsleep, WeightsMissing or EngineDead in a state without steps.
        """

    @abstractmethod
    def pending(self) -> list[Event]:
        """Return what came up since the last call, at once."""

    @abstractmethod
    def shutdown(self) -> None:
        """End the engine: its requests are dropped, its memory is given back. Idempotent."""


class InlineLoop(Loop):
    """A loop that its clients drive, one after the other: a command is done when it is called, and a step is computed by `events`."""

    def __init__(self, config: EngineConfig) -> None:
        self.core = EngineCore(config)
        self.info, self.model = self.core.info, self.core.model
        self._lock = threading.RLock()
        self._is_shut_down = False

    def call(self, command: Command) -> Reply:
        """Do a command; a sleep that waits for requests serves them first."""
        with self._lock:
            self._check()
            reply = self.core.execute(command)
            if not isinstance(reply, Future):
                return reply
            try:
                while not reply.done():
                    self.core.advance()
            except BaseException:
                self.core.cancel_drain()
                raise
            return reply.result()

    def events(self) -> list[Event]:
        """Go one step on."""
        with self._lock:
            self._check()
            self.core.advance()
            return self.core.take_events()

    def pending(self) -> list[Event]:
        """Return what came up, without a step."""
        with self._lock:
            return self.core.take_events()

    def shutdown(self) -> None:
        """End the engine, once a step that another thread drives is done."""
        with self._lock:
            self._is_shut_down = True
            self.core.shutdown()

    def _check(self) -> None:
        if self._is_shut_down:
            raise EngineDead("the engine was shut down", hint="Make a new one")


class Inbox:
    """Commands on their way to a loop in another thread, each with the future of its answer.

    Args:
        limit: most commands that may wait.
    """

    def __init__(self, limit: int) -> None:
        self._queue: queue.Queue[tuple[Command, Future[Reply]] | None] = queue.Queue()
        self._limit = limit
        self._lock = threading.Lock()
        self._closed: EngineDead | None = None

    def put(self, command: Command, reply: Future[Reply] | None = None) -> Future[Reply]:
        """Add a command; raises InboxFull, and EngineDead once the inbox is closed."""
        reply = Future() if reply is None else reply
        with self._lock:
            if self._closed is not None:
                raise self._closed
            if self._queue.qsize() >= self._limit:
                raise InboxFull(
                    "the engine's inbox is full", found=f"{self._limit} commands wait", hint="Try again later"
                )
            self._queue.put((command, reply))
        return reply

    def stop(self) -> None:
        """Have the loop end; commands that are there already are done first."""
        self._queue.put(None)

    def close(self, error: EngineDead) -> None:
        """Refuse all commands from here on, and those that wait, with `error`."""
        with self._lock:
            self._closed = self._closed or error
        while not self._queue.empty():
            item = self._queue.get_nowait()
            if item is not None:
                item[1].set_exception(error)

    def serve(self, core: EngineCore, deliver: Deliver) -> None:
        """Run a loop until it is told to stop, or dies, which is the last event; then the inbox is closed."""
        dead = EngineDead("the engine was shut down", hint="Make a new one")
        try:
            while self._take(core):
                if core.can_advance:
                    core.advance()
                if core.has_events:
                    events = core.take_events()
                    deliver(events)
                    if isinstance(events[-1], Died):
                        dead = events[-1].error
                        break
        except BaseException as error:
            dead = EngineDead(
                "the engine's loop failed", found=f"{type(error).__name__}: {error}", hint="Make a new one"
            )
            dead.__cause__ = error
        self.close(dead)
        deliver([Died(dead)])

    def _take(self, core: EngineCore) -> bool:
        """Do the commands that wait, or wait for one where there is nothing else to do; returns False when told to stop."""
        while not (self._queue.empty() and core.can_advance):
            if self._queue.empty() and core.has_events:
                return True
            item = self._queue.get()
            if item is None:
                return False
            command, reply = item
            if not reply.set_running_or_notify_cancel():
                continue
            try:
                answer = core.execute(command)
            except Exception as error:
                reply.set_exception(error)
                continue
            if isinstance(answer, Future):
                answer.add_done_callback(partial(_copy, reply))
            else:
                reply.set_result(answer)
        return True


def _copy(reply: Future[Reply], done: Future[Reply]) -> None:
    error = done.exception()
    if error is None:
        reply.set_result(done.result())
    else:
        reply.set_exception(error)


class ThreadLoop(Loop):
    """A loop in a thread of its own.

    Args:
        deliver: takes events where a client wants them as they come; None keeps them for `events`.
    """

    def __init__(self, config: EngineConfig, deliver: Deliver | None = None) -> None:
        self.inbox = Inbox(config.max_commands)
        self._arrived: queue.SimpleQueue[list[Event]] = queue.SimpleQueue()
        self._dead: EngineDead | None = None
        self._deliver = deliver or self._arrived.put
        made: Future[EngineCore] = Future()
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
        made.set_result(core)
        del made
        try:
            self.inbox.serve(core, self._deliver)
        finally:
            core.shutdown()

    def submit(self, command: Command) -> Future[Reply]:
        """Hand a command over; raises InboxFull, EngineDead."""
        return self.inbox.put(command)

    def call(self, command: Command) -> Reply:
        """Have a command done and wait for its answer."""
        return self.inbox.put(command).result()

    def events(self) -> list[Event]:
        """Wait for the next events."""
        if self._dead is not None:
            raise self._dead
        events = self._arrived.get()
        if isinstance(events[-1], Died):
            self._dead = events[-1].error
        return events

    def pending(self) -> list[Event]:
        """Return what has arrived."""
        events: list[Event] = []
        while not self._arrived.empty():
            events += self._arrived.get()
        return events

    def shutdown(self) -> None:
        """End the loop after its present step."""
        self.inbox.stop()
        if threading.current_thread() is not self._thread:
            self._thread.join()
