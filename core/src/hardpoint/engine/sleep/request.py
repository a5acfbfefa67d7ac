"""What a sleep is asked to be, checked as far as that needs no engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import TypeVar

from hardpoint.interfaces.capabilities import SleepTier
from hardpoint.interfaces.errors import SleepRefused

LEVELS = (0, 1, 2)

E = TypeVar("E", bound=Enum)


class SleepMode(StrEnum):
    """What becomes of requests in progress.

    ABORT: they end, with what they have. WAIT: they are served to their end first. KEEP: they continue after wake.
    """

    ABORT = "abort"
    WAIT = "wait"
    KEEP = "keep"


class KVChoice(StrEnum):
    """What becomes of the KV cache: forgotten, or its live blocks preserved."""

    DISCARD = "discard"
    PRESERVE = "preserve"


@dataclass(frozen=True)
class SleepRequest:
    """A sleep that is possible in some state of an engine.

    Attributes:
        tags: memory to put to sleep; None for all.
        tier: of preserved bytes; None for the engine's own.
        kv: None discards a KV cache that is awake and leaves one that is asleep as it is.
        verify: compare kept backups with the device's bytes.
        progress: called now and then with (bytes done, bytes in all).
    """

    level: int = 1
    mode: SleepMode = SleepMode.ABORT
    tags: frozenset[str] | None = None
    tier: SleepTier | None = None
    kv: KVChoice | None = None
    verify: bool = False
    progress: Callable[[int, int], None] | None = None

    @classmethod
    def parse(
        cls,
        level: int = 1,
        mode: str = "abort",
        tags: str | Sequence[str] | None = None,
        tier: str | None = None,
        kv: str | None = None,
        *,
        verify: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> SleepRequest:
        """Make a request of what a caller passed; raises SleepRefused, which lists what is known."""
        if level not in LEVELS:
            raise SleepRefused(
                f"there is no sleep level {level!r}", hint=f"The levels are {', '.join(map(str, LEVELS))}"
            )
        request = cls(
            level=int(level),
            mode=_member(SleepMode, "mode", mode),
            tags=parse_tags(tags),
            tier=None if tier is None else _member(SleepTier, "tier", tier),
            kv=None if kv is None else _member(KVChoice, "kv", kv),
            verify=verify,
            progress=progress,
        )
        if request.level == 0 and not (tags is None and tier is None and kv is None):
            raise SleepRefused(
                "a sleep of level 0 touches no memory, so it has no tags, tier or KV choice", hint="Use level 1 or 2"
            )
        if request.level == 2 and request.kv is KVChoice.PRESERVE:
            raise SleepRefused(
                "a sleep of level 2 does not preserve the KV cache",
                found="it was computed with weights that are discarded",
                hint="Use level 1, or kv='discard'",
            )
        return request


def parse_tags(tags: str | Sequence[str] | None) -> frozenset[str] | None:
    """Return tags as a set, None for all; raises SleepRefused for an empty list."""
    if tags is None:
        return None
    if not tags:
        raise SleepRefused("the list of tags is empty", hint="Leave it out to mean all tags")
    return frozenset([tags] if isinstance(tags, str) else tags)


def _member(kind: type[E], name: str, value: object) -> E:
    try:
        return kind(value)
    except ValueError:
        choices = ", ".join(str(member.value) for member in kind)
        raise SleepRefused(f"{name}={value!r} is not known", hint=f"Choose one of {choices}") from None
