"""The contract of device memory: tensors in tagged memory that can be given back and restored at the same addresses."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from hardpoint.interfaces.capabilities import MemoryCapabilities, SleepTier
from hardpoint.interfaces.contract import Contract
from hardpoint.interfaces.dtypes import DType

if TYPE_CHECKING:
    from torch import Tensor, nn

WEIGHTS = "weights"
BUFFERS = "buffers"
KV_CACHE = "kv_cache"
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
class SleepPlan:
    """What one sleep does.

    Attributes:
        policies: by tag; a tag that is not named keeps its allocations' own policy.
        tags: the tags to put to sleep; None for all.
        tier: where preserved bytes go.
        verify: check kept backups by checksum instead of trusting their generation.
        progress: called with (bytes done, bytes in all).
    """

    policies: Mapping[str, Policy] = field(default_factory=dict)
    tags: frozenset[str] | None = None
    tier: SleepTier = SleepTier.HOST
    verify: bool = False
    progress: Callable[[int, int], None] | None = None


@dataclass(frozen=True)
class MemoryReport:
    """What one sleep or wake did; sizes in bytes, times in seconds.

    Attributes:
        preserved, discarded, skipped: bytes copied out (or back), dropped, and not copied because a clean backup was kept.
        seconds: by phase, and "total".
        free_before, free_after: the device's free memory as its driver reports it.
        residual: bytes still in use on the device, by participant.
    """

    preserved: int
    discarded: int
    skipped: int
    seconds: Mapping[str, float]
    free_before: int
    free_after: int
    residual: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class MemoryInfo:
    """The device's memory in bytes: free and total as the driver (or operating system) reports them."""

    free: int
    total: int


@dataclass(frozen=True)
class TagStats:
    """Bytes of one tag: handed out to tensors, mapped on the device, and held in backups."""

    allocated: int
    mapped: int
    backed_up: int
    allocations: int


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


class DeviceAllocator(Contract, contract=True):
    """Memory of one device for one engine; made by the descriptor's factory with the device as its only argument.

    Tensors keep their memory alive: it returns to the allocator when the last view of it is gone. Sleep and wake are
    transactions: when any step fails, the state before holds, with all bytes, and a typed error is raised.
    """

    @abstractmethod
    def capabilities(self) -> MemoryCapabilities:
        """Return what this allocator does."""

    @abstractmethod
    def empty(self, shape: Sequence[int], dtype: DType, tag: str = DEFAULT, policy: Policy = Policy.PRESERVE) -> Tensor:
        """Return an uninitialised contiguous tensor in this memory; raises DeviceOutOfMemory."""

    @abstractmethod
    def materialise(self, module: nn.Module, tag: str = WEIGHTS) -> None:
        """Give every meta parameter and buffer of a module uninitialised memory, ties and views kept.

        Non-persistent buffers go to the tag `buffers`, which sleep always preserves.
        """

    @abstractmethod
    def adopt(self, module: nn.Module, tag: str = WEIGHTS) -> None:
        """Move a module's parameters and buffers into this memory, values, ties and views kept."""

    @abstractmethod
    def pool(self, tag: str, policy: Policy = Policy.PRESERVE) -> AbstractContextManager[None]:
        """Return a context in which torch allocates from this memory, as far as `capabilities().torch_pool` says."""

    @abstractmethod
    def sleep(self, plan: SleepPlan) -> MemoryReport:
        """Give device memory back as planned; raises UnknownTag, HostBudgetExceeded, DriverError, CapabilityRefused."""

    @abstractmethod
    def wake(self, tags: Sequence[str] | None = None) -> MemoryReport:
        """Map memory again at the same addresses and restore what was preserved; None for all tags."""

    @abstractmethod
    def resize(self, tensor: Tensor, rows: int) -> Tensor:
        """Grow or shrink an elastic allocation along its first axis, in place; raises CapabilityRefused."""

    @abstractmethod
    def stats(self) -> MemoryStats:
        """Return the books."""

    @abstractmethod
    def memory_info(self) -> MemoryInfo:
        """Return the device's free and total memory."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back. Tensors still alive keep their memory until they are gone; new ones are refused."""
