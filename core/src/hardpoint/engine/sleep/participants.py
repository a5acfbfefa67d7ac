"""Parts of an engine that hold device memory of their own, or must know when memory goes and comes back."""

from __future__ import annotations

import logging
import operator
from dataclasses import dataclass, field
from typing import Protocol

from hardpoint.executor.interrupts import AllowedInterrupts
from hardpoint.interfaces.allocator import SleepPlan
from hardpoint.interfaces.errors import ConfigError, ParticipantError

_log = logging.getLogger("hardpoint")


class SleepParticipant(Protocol):
    """What takes part in sleep and wake: captured graphs, communicators, workspaces, KV scales, adapters, KV connectors.

    Participants are told before memory goes, in the order in which they were registered, and after it came back, in reverse
    order. Each method may raise, and leaves its participant as it was then: the sleep or wake fails. After a failed sleep, those
    that were told of it are told the opposite, the last one first; after a failed wake, the next one goes on where it ended.
    """

    @property
    def name(self) -> str:
        """What reports call it."""

    def before_sleep(self, plan: SleepPlan) -> None:
        """The planned tags are about to lose their memory: let go of what depends on it."""

    def after_wake(self, tags: frozenset[str]) -> None:
        """These tags have memory again; discarded ones have undefined content (KV scales are set again here)."""

    def resident_bytes(self) -> int:
        """Return the bytes of device memory that it still holds."""


def check_participant(participant: object) -> None:
    """Raise ConfigError for what cannot take part: every sleep would fail on it."""
    methods = ("before_sleep", "after_wake", "resident_bytes")
    missing = [name for name in methods if not callable(getattr(participant, name, None))]
    if isinstance(participant, type):
        found = f"the class {participant.__name__} and no object of it"
    elif not isinstance(name := getattr(participant, "name", None), str):
        found = f"its name is {name!r:.80}"
    elif missing:
        found = f"it has no method {missing[0]}"
    else:
        return
    raise ConfigError(
        f"a {type(participant).__name__} cannot take part in sleeps",
        found=found,
        hint="A participant has a text `name` and the methods before_sleep(plan), after_wake(tags) and resident_bytes()",
    )


@dataclass
class _Entry:
    participant: SleepParticipant
    name: str
    # Tags that it was told are going to sleep, and not yet that they are awake.
    asleep: set[str] = field(default_factory=set)


class Participants:
    """The participants of one engine, in order."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []

    def register(self, participant: SleepParticipant) -> None:
        """Add one at the end; raises ConfigError when its name is taken, or it is no participant."""
        check_participant(participant)
        name = participant.name
        if any(entry.name == name for entry in self._entries):
            raise ConfigError(f"a participant '{name}' is registered already", hint="Give it another name")
        self._entries.append(_Entry(participant, name))

    def waiting_for(self, asleep: frozenset[str]) -> tuple[str, ...]:
        """Return the names of those that were not told that memory is awake again, where only `asleep` sleeps."""
        return tuple(entry.name for entry in self._entries if entry.asleep - asleep)

    def before_sleep(self, plan: SleepPlan, tags: frozenset[str]) -> None:
        """Tell all that `tags` go to sleep; raises ParticipantError with those told before told the opposite."""
        for entry in self._entries:
            try:
                with AllowedInterrupts():
                    entry.participant.before_sleep(plan)
            except BaseException as error:
                self.undo(tags)
                if isinstance(error, Exception):
                    raise ParticipantError.of(entry.name, "before_sleep", error) from error
                raise
            # Also tags asleep already whose copies this sleep drops: one registered since is told of them here first.
            entry.asleep |= plan.tags or tags

    def after_wake(self, asleep: frozenset[str]) -> None:
        """Tell each, the last one first, which of its tags are awake again; raises ParticipantError.

        Those that were not told then are told by the next call.
        """
        for entry in reversed(self._entries):
            woken = frozenset(entry.asleep - asleep)
            if not woken:
                continue
            try:
                with AllowedInterrupts():
                    entry.participant.after_wake(woken)
            except Exception as error:
                raise ParticipantError.of(entry.name, "after_wake", error) from error
            entry.asleep -= woken

    def undo(self, tags: frozenset[str]) -> None:
        """Tell those that were told that `tags` go to sleep that they are awake; one that fails is logged and waited for."""
        for entry in reversed(self._entries):
            woken = frozenset(entry.asleep & tags)
            if not woken:
                continue
            try:
                with AllowedInterrupts():
                    entry.participant.after_wake(woken)
            except Exception:
                _log.exception("the participant '%s' could not be woken after a sleep failed", entry.name)
                continue
            entry.asleep -= woken

    def resident_bytes(self) -> dict[str, int]:
        """Return what each holds on the device; one that cannot say is logged and left out."""
        held: dict[str, int] = {}
        for entry in self._entries:
            try:
                held[entry.name] = operator.index(entry.participant.resident_bytes())
            except Exception:
                _log.exception("the participant '%s' cannot say how much memory it holds", entry.name)
        return held
