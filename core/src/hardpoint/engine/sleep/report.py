"""What the life cycle says of itself: states, reports of single operations, totals."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, TypeVar

from hardpoint.interfaces.allocator import MemoryReport
from hardpoint.interfaces.capabilities import SleepTier

K = TypeVar("K", bound=Hashable)
N = TypeVar("N", int, float)


class EngineState(StrEnum):
    """Where an engine stands.

    RUNNING: it serves. DRAINING: it serves what it has, on its way to sleep. SLEEPING: it is paused, or some of its memory is
    asleep. WAKING: memory is coming back. WEIGHTS_MISSING: all memory is there, and the weights are not valid.
    FAILED: a worker does not say any more what of its memory is asleep, or ranks differ in it.
    """

    RUNNING = "running"
    DRAINING = "draining"
    SLEEPING = "sleeping"
    WAKING = "waking"
    WEIGHTS_MISSING = "weights_missing"
    FAILED = "failed"


@dataclass(frozen=True)
class TagMemory:
    """Where the bytes of one tag are; of several ranks they add up.

    Attributes:
        allocated: bytes handed out to tensors.
        mapped: bytes on the device, with the rounding of allocations.
        copies: by tier: backups on the host or on disk, of memory that is asleep or, kept for the next sleep, awake; and bytes of
            memory that is asleep and will be read again from its source.
    """

    allocated: int
    mapped: int
    copies: Mapping[SleepTier, int] = field(default_factory=dict)


@dataclass(frozen=True)
class SleepStatus:
    """An engine's state in full.

    Attributes:
        level: the deepest that was asked for since the engine was awake, of whatever tags; None while it is awake.
        asleep: tags with memory that is asleep.
        weights_valid: the weights, awake or preserved, are those of the model.
        missing_weights: how many of the checkpoint's tensors have no valid values.
        waiting_for: participants that could not be woken yet.
        failure: why the state is FAILED.
        memory: by tag, as the workers said it last: at the first call, and after each sleep, wake and change of weights.
    """

    state: EngineState
    level: int | None
    asleep: frozenset[str]
    weights_valid: bool
    missing_weights: int = 0
    waiting_for: tuple[str, ...] = ()
    failure: str | None = None
    memory: Mapping[str, TagMemory] = field(default_factory=dict)


@dataclass(frozen=True)
class SleepReport:
    """What one call of sleep did; sizes in bytes, times in seconds.

    Attributes:
        changed: False where everything that was asked for was so already.
        level: of the engine after it; see SleepStatus.
        tier: as it was used; None for level 0.
        tags: memory that this call put to sleep.
        dropped: tags that were asleep already and whose preserved bytes this call gave up.
        asleep: all tags that are asleep after it.
        aborted, kept: requests that were ended, and that continue after wake.
        seconds: the whole call, with the draining of requests.
        memory: the workers' report; None where no memory was touched. Of several ranks bytes add up, and the slowest one's time counts.
        ranks: each rank's own report, where there are several.
        residual: bytes still in use on the device, by participant.
    """

    changed: bool
    level: int
    mode: str
    tier: SleepTier | None
    tags: frozenset[str]
    dropped: frozenset[str]
    asleep: frozenset[str]
    weights_valid: bool
    seconds: float
    memory: MemoryReport | None = None
    residual: Mapping[str, int] = field(default_factory=dict)
    aborted: int = 0
    kept: int = 0
    ranks: tuple[MemoryReport, ...] = ()

    @property
    def freed(self) -> int:
        """Bytes given back to the device."""
        return 0 if self.memory is None else self.memory.unmapped


@dataclass(frozen=True)
class WakeReport:
    """What one call of wake did; see SleepReport.

    Attributes:
        tags: memory that this call woke.
        asleep: tags that are still asleep.
        state: of the engine after it.
    """

    changed: bool
    tags: frozenset[str]
    asleep: frozenset[str]
    weights_valid: bool
    state: EngineState
    seconds: float
    memory: MemoryReport | None = None
    ranks: tuple[MemoryReport, ...] = ()


@dataclass(slots=True)
class SleepTotals:
    """Counters since the engine was made; no-ops do not count.

    Attributes:
        failures: calls of sleep or wake that raised after they had begun.
        sleep_seconds, wake_seconds: of those that succeeded.
        freed_bytes: given back to the device by sleeps.
        preserved_bytes, skipped_bytes: copied out by sleeps, and not copied since a backup or a source has them.
        restored_bytes: copied back by wakes.
    """

    sleeps: int = 0
    wakes: int = 0
    failures: int = 0
    sleep_seconds: float = 0.0
    wake_seconds: float = 0.0
    freed_bytes: int = 0
    preserved_bytes: int = 0
    skipped_bytes: int = 0
    restored_bytes: int = 0

    def count_sleep(self, seconds: float, memory: MemoryReport | None) -> None:
        """Count one sleep."""
        self.sleeps += 1
        self.sleep_seconds += seconds
        if memory is not None:
            self.freed_bytes += memory.unmapped
            self.preserved_bytes += memory.preserved
            self.skipped_bytes += memory.skipped

    def count_wake(self, seconds: float, memory: MemoryReport | None) -> None:
        """Count one wake."""
        self.wakes += 1
        self.wake_seconds += seconds
        if memory is not None:
            self.restored_bytes += memory.preserved


def over_ranks(reports: Sequence[MemoryReport]) -> MemoryReport | None:
    """Return one report for all ranks: bytes add up, the slowest rank's time counts; None for no reports."""
    if len(reports) <= 1:
        return reports[0] if reports else None
    sums = ("preserved", "discarded", "skipped", "free_before", "free_after", "unmapped", "retained")
    return MemoryReport(
        **{name: sum(getattr(report, name) for report in reports) for name in sums},
        seconds=_combined([report.seconds for report in reports], max),
        residual=_combined([report.residual for report in reports], sum),
        tiers=_combined([report.tiers for report in reports], sum),
        direct_io=all(report.direct_io for report in reports),
        still_asleep=frozenset().union(*(report.still_asleep for report in reports)),
    )


def slept_over_engines(reports: Sequence[SleepReport]) -> SleepReport:
    """Return one report for engines that slept together: bytes and requests add up, the slowest one's time counts."""
    return replace(
        reports[0],
        **_over_engines(reports),
        dropped=frozenset().union(*(report.dropped for report in reports)),
        residual=_combined([report.residual for report in reports], sum),
        aborted=sum(report.aborted for report in reports),
        kept=sum(report.kept for report in reports),
    )


def woken_over_engines(reports: Sequence[WakeReport]) -> WakeReport:
    """Return one report for engines that woke together: bytes add up, the slowest one's time counts."""
    return replace(reports[0], **_over_engines(reports), state=_foremost(report.state for report in reports))


def _over_engines(reports: Sequence[SleepReport] | Sequence[WakeReport]) -> dict[str, Any]:
    by_engine = [report.memory for report in reports if report.memory is not None]
    return {
        "changed": any(report.changed for report in reports),
        "tags": frozenset().union(*(report.tags for report in reports)),
        "asleep": frozenset().union(*(report.asleep for report in reports)),
        "weights_valid": all(report.weights_valid for report in reports),
        "seconds": max(report.seconds for report in reports),
        "memory": over_ranks(by_engine),
        "ranks": tuple(rank for report in reports for rank in report.ranks) or tuple(by_engine),
    }


def status_over_engines(statuses: Sequence[SleepStatus]) -> SleepStatus:
    """Return one status for engines that serve together: they stand where the one farthest from running does."""
    tags = {tag for status in statuses for tag in status.memory}
    parts = {tag: [status.memory[tag] for status in statuses if tag in status.memory] for tag in sorted(tags)}
    return SleepStatus(
        state=_foremost(status.state for status in statuses),
        level=max((status.level for status in statuses if status.level is not None), default=None),
        asleep=frozenset().union(*(status.asleep for status in statuses)),
        weights_valid=all(status.weights_valid for status in statuses),
        missing_weights=max(status.missing_weights for status in statuses),
        waiting_for=tuple(dict.fromkeys(name for status in statuses for name in status.waiting_for)),
        failure=next((status.failure for status in statuses if status.failure is not None), None),
        memory={
            tag: TagMemory(
                sum(one.allocated for one in some),
                sum(one.mapped for one in some),
                _combined([one.copies for one in some], sum),
            )
            for tag, some in parts.items()
        },
    )


def totals_over_engines(totals: Sequence[SleepTotals]) -> SleepTotals:
    """Return the counters of engines that slept together: bytes add up, times and numbers are of the one with the most."""
    return SleepTotals(
        **{
            one.name: (sum if one.name.endswith("_bytes") else max)(getattr(part, one.name) for part in totals)
            for one in fields(SleepTotals)
        }
    )


_BY_DISTANCE = (
    EngineState.FAILED,
    EngineState.WAKING,
    EngineState.SLEEPING,
    EngineState.DRAINING,
    EngineState.WEIGHTS_MISSING,
    EngineState.RUNNING,
)
"""From the one farthest from running."""


def _foremost(states: Iterable[EngineState]) -> EngineState:
    return min(states, key=_BY_DISTANCE.index)


def _combined(parts: Sequence[Mapping[K, N]], combine: Callable[[Iterable[N]], N]) -> dict[K, N]:
    keys = {key: None for part in parts for key in part}
    return {key: combine(part[key] for part in parts if key in part) for key in keys}
