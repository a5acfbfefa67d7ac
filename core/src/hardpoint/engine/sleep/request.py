"""What a sleep is asked to be, checked as far as that needs no engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Literal

from msgspec import Meta

from hardpoint.interfaces.capabilities import SleepTier
from hardpoint.interfaces.errors import SleepRefused
from hardpoint.validation import Validated


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
class Tags(Validated):
    """Memory by its tags, one or several; None for all. Raises SleepRefused."""

    _error = SleepRefused

    tags: frozenset[str] | None = None

    def __post_init__(self) -> None:
        tags: object = self.tags
        if isinstance(tags, str):
            object.__setattr__(self, "tags", (tags,))
        self._check_types()
        if self.tags is not None and not self.tags:
            raise SleepRefused("the list of tags is empty", hint="Leave it out to mean all tags")


@dataclass(frozen=True)
class SleepRequest(Tags):
    """A sleep that is possible in some state of an engine; raises SleepRefused.

    Attributes:
        level: 0 pauses requests, 1 preserves weights, 2 discards them.
        mode: what becomes of requests in progress.
        tier: of preserved bytes; None for the engine's own.
        kv: None discards a KV cache that is awake and leaves one that is asleep as it is.
        verify: compare kept backups with the device's bytes, and at the wake the device's with those of the backups.
        drain_timeout: most seconds for serving requests in the mode WAIT; None for no limit.
        progress: called now and then with (bytes done, bytes in all).
    """

    _called = "an argument of sleep"

    level: Literal[0, 1, 2] = 1
    mode: SleepMode = SleepMode.ABORT
    tier: SleepTier | None = None
    kv: KVChoice | None = None
    verify: bool = False
    drain_timeout: Annotated[float, Meta(ge=0)] | None = None
    progress: Callable[[int, int], None] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.progress is not None and not callable(self.progress):
            self._refuse("progress", self.progress, "a function of (bytes done, bytes in all)")
        if self.level == 0 and not (self.tags is None and self.tier is None and self.kv is None):
            raise SleepRefused(
                "a sleep of level 0 touches no memory, so it has no tags, tier or KV choice", hint="Use level 1 or 2"
            )
        if self.level == 2 and self.kv is KVChoice.PRESERVE:
            raise SleepRefused(
                "a sleep of level 2 does not preserve the KV cache",
                found="it was computed with weights that are discarded",
                hint="Use level 1, or kv='discard'",
            )
