"""The contract of device memory: tensors in tagged memory that can be given back and restored at the same addresses."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

from hardpoint.interfaces.capabilities import MemoryCapabilities, SleepTier
from hardpoint.interfaces.contract import Contract
from hardpoint.interfaces.dtypes import DType

if TYPE_CHECKING:
    from torch import Tensor, nn

WEIGHTS = "weights"
BUFFERS = "buffers"
KV_CACHE = "kv_cache"
GRAPHS = "graphs"
ADAPTERS = "adapters"
DEFAULT = "default"


class Policy(Enum):
    """What becomes of an allocation's bytes on sleep, and what is there after wake.

    PRESERVE: the same bytes. DISCARD: undefined bytes. ZERO: zeros. REBUILD: what the registered callback writes.
    RESIDENT: never unmapped.
    """

    PRESERVE = "preserve"
    DISCARD = "discard"
    ZERO = "zero"
    REBUILD = "rebuild"
    RESIDENT = "resident"


@dataclass(frozen=True)
class FileExtent:
    """Where bytes of a tensor came from: `size` bytes from byte `start` of the tensor are those at `offset` of the file."""

    start: int
    size: int
    path: str
    offset: int


@dataclass(frozen=True)
class LiveRanges:
    """The bytes of one tensor that count; the rest of it is undefined after wake.

    Attributes:
        address: of the tensor's first byte.
        ranges: (first byte, number of bytes) within the tensor; increasing, without overlap.
    """

    address: int
    ranges: Sequence[tuple[int, int]]


@dataclass(frozen=True)
class SleepPlan:
    """What one sleep does.

    Attributes:
        policies: by tag; a tag that is not named keeps its allocations' own policy.
        tags: the tags to put to sleep; None for all.
        tier: where preserved bytes go. SOURCE applies to tensors with a declared source; other preserved bytes go to the host.
        keep: tags all of whose writers call `mark_written`. Their backups are kept over wake, and a clean one is not copied again.
        verify: compare kept backups with the device's bytes instead of trusting `mark_written`; a difference raises BackupStale. The
            wake compares what it wrote; a difference raises DriverError, and the memory stays asleep.
        live: tensors of which only some bytes are preserved.
        live_blocks: for a worker: preserve only these KV blocks; None for whatever `policies` says.
        host_budget: most bytes of backups on the host; None for what the host has free.
        disk_directory: for backups on disk; None for HARDPOINT_SLEEP_DIR, or else the user's cache directory.
        disk_budget: most bytes of backups there; None for what the file system has free.
        progress: called now and then with (bytes done, bytes in all).
    """

    policies: Mapping[str, Policy] = field(default_factory=dict)
    tags: frozenset[str] | None = None
    tier: SleepTier = SleepTier.HOST
    keep: frozenset[str] = frozenset()
    verify: bool = False
    live: tuple[LiveRanges, ...] = ()
    live_blocks: Sequence[int] | None = None
    host_budget: int | None = None
    disk_directory: str | None = None
    disk_budget: int | None = None
    progress: Callable[[int, int], None] | None = None


@dataclass(frozen=True)
class WakePlan:
    """What one wake does.

    Attributes:
        tags: the tags to wake; None for all.
    """

    tags: frozenset[str] | None = None


MemoryChange: TypeAlias = SleepPlan | WakePlan
"""What a worker's memory can be asked to become."""


@dataclass(frozen=True)
class MemoryReport:
    """What one sleep or wake did; sizes in bytes, times in seconds.

    Attributes:
        preserved: bytes copied out (or back, or read again from their source), without the rounding of allocations.
        discarded: bytes dropped; on wake, bytes that came back with undefined or zero content.
        skipped: bytes that a sleep did not copy, since a clean backup or their source holds them.
        tiers: preserved and skipped bytes by tier.
        unmapped: device bytes given back (or, on wake, taken).
        seconds: by phase, and "total".
        free_before, free_after: the device's free memory as its driver reports it.
        residual: bytes still in use on the device, by participant.
        retained: bytes that the driver refused to take back when others were gone already; the next operation tries again.
        direct_io: backups on disk did not pass through the page cache.
        still_asleep: tags with memory that is asleep after the operation.
    """

    preserved: int
    discarded: int
    skipped: int
    seconds: Mapping[str, float]
    free_before: int
    free_after: int
    residual: Mapping[str, int] = field(default_factory=dict)
    tiers: Mapping[SleepTier, int] = field(default_factory=dict)
    unmapped: int = 0
    retained: int = 0
    direct_io: bool = True
    still_asleep: frozenset[str] = frozenset()

    @property
    def bytes_per_second(self) -> float:
        """Preserved bytes by total time; 0 when nothing was copied."""
        total = self.seconds.get("total", 0.0)
        return self.preserved / total if total and self.preserved else 0.0


@dataclass(frozen=True)
class MemoryInfo:
    """The device's memory in bytes: free and total as the driver (or operating system) reports them.

    Attributes:
        quirks: deviations of the running system that the driver found by probing, by name (`HP_QUIRK_*` of driver.h in lower case).
    """

    free: int
    total: int
    quirks: tuple[str, ...] = ()


@dataclass(frozen=True)
class TagStats:
    """Bytes of one tag: handed out to tensors, mapped on the device, held in backups, and readable again from their source."""

    allocated: int
    mapped: int
    backed_up: int
    allocations: int
    sourced: int = 0


@dataclass(frozen=True)
class MemoryStats:
    """An allocator's books.

    Attributes:
        tags: by tag.
        peak_allocated: most bytes handed out at one time since creation.
        asleep: tags that are asleep.
    """

    tags: Mapping[str, TagStats]
    peak_allocated: int
    asleep: frozenset[str] = frozenset()

    @property
    def allocated(self) -> int:
        """Bytes handed out to tensors, all tags together."""
        return sum(tag.allocated for tag in self.tags.values())


class MemoryTransaction(Contract, contract=True):
    """A sleep or wake that is prepared: everything that can fail has been done, and both ways out are open.

    While it is, its memory must not be used, and the allocator refuses other changes with MemoryBusy; tensors may be freed. It
    ends once, by `commit` or by `rollback`; a second end raises InvalidTransaction. One that is dropped without an end is rolled
    back.
    """

    @abstractmethod
    def commit(self) -> MemoryReport:
        """Make it so, and return what was done. No call of the device can make it fail.

        What the driver refuses to take back is `retained`: it stays in the books, and later operations try again.
        """

    @abstractmethod
    def rollback(self) -> None:
        """Return to the state before, with all bytes.

        Raises DriverError, DeviceOutOfMemory or ForeignMemory when memory of a sleep could not be mapped again; that memory is
        then asleep with its backup, and a wake can be tried. The transaction has ended all the same.
        """


class DeviceAllocator(Contract, contract=True):
    """Memory of one device for one engine; made by the descriptor's factory with the device as its only argument.

    Tensors keep their memory alive: it returns to the allocator when the last view of it is gone. Sleep and wake are
    transactions: when any step fails, the state before holds, with all bytes, and a typed error is raised.
    """

    @abstractmethod
    def capabilities(self) -> MemoryCapabilities:
        """Return what this allocator does."""

    @abstractmethod
    def empty(
        self,
        shape: Sequence[int],
        dtype: DType,
        tag: str = DEFAULT,
        policy: Policy = Policy.PRESERVE,
        max_rows: int | None = None,
    ) -> Tensor:
        """Return an uninitialised contiguous tensor in this memory; raises DeviceOutOfMemory, InvalidAllocation.

        With `max_rows` it is elastic, where `capabilities().elastic` says so: addresses for that number of rows are reserved.
        """

    @abstractmethod
    def materialise(self, module: nn.Module, tag: str = WEIGHTS) -> None:
        """Give every meta parameter and buffer of a module uninitialised memory, ties and views kept.

        Non-persistent buffers go to the tag `buffers`, which sleep always preserves.
        """

    @abstractmethod
    def adopt(self, module: nn.Module, tag: str = WEIGHTS) -> None:
        """Move a module's parameters and buffers into this memory, values, ties and views kept."""

    @abstractmethod
    def declare_source(self, tensor: Tensor, source: Sequence[FileExtent] | Callable[[], None]) -> None:
        """Say where a tensor's bytes come from: extents of files that cover it, or a callback that writes them again.

        The tier SOURCE uses it instead of a backup, and the policy REBUILD needs a callback. One callback given for several
        tensors runs once per wake. `mark_written` ends it: what was written since is not in the source.
        """

    @abstractmethod
    def mark_written(self, tags: Sequence[str]) -> None:
        """Say that tensors of these tags were written: kept backups and declared sources of them are void."""

    @abstractmethod
    def prepare_sleep(self, plan: SleepPlan) -> None:
        """Take and pin the host memory that `sleep(plan)` will need, in the background; raises HostBudgetExceeded."""

    @abstractmethod
    def begin_sleep(self, plan: SleepPlan) -> MemoryTransaction:
        """Do everything of a sleep that can fail: check, take room for backups, copy, and unmap.

        Raises UnknownTag, HostBudgetExceeded, DriverError, CapabilityRefused, BackupStale; the state before then holds. A tag that
        is asleep already is left as it is.
        """

    @abstractmethod
    def begin_wake(self, tags: Sequence[str] | None = None) -> MemoryTransaction:
        """Do everything of a wake that can fail: map memory at the same addresses, restore what was preserved, run callbacks.

        None for all tags. Raises UnknownTag, DeviceOutOfMemory, DriverError, BackupCorrupt, and what a callback raises; the memory
        then stays asleep with its backups.
        """

    @abstractmethod
    def discard_backup(self, tags: Sequence[str]) -> None:
        """Drop the backups of memory that is asleep: it wakes with undefined content. The way out of BackupCorrupt."""

    @abstractmethod
    def stats(self) -> MemoryStats:
        """Return the books."""

    @abstractmethod
    def memory_info(self) -> MemoryInfo:
        """Return the device's free and total memory."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back. Tensors still alive keep their memory until they are gone; new ones are refused."""
