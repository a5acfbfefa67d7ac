"""The virtual-memory engine without torch: addresses, bytes, sleep and wake on one device."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from hardpoint import _native
from hardpoint.interfaces.allocator import (
    BUFFERS,
    DEFAULT,
    KV_CACHE,
    WEIGHTS,
    FileExtent,
    MemoryInfo,
    MemoryReport,
    MemoryStats,
    MemoryTransaction,
    Policy,
    SleepPlan,
    TagStats,
)
from hardpoint.interfaces.capabilities import MemoryCapabilities, SleepTier, TorchPoolScope
from hardpoint.interfaces.errors import CapabilityRefused, DeviceOutOfMemory, InvalidAllocation, MemoryFault
from hardpoint.memory.driver_table import DriverQuirks, DriverTable

STANDARD_TAGS = (WEIGHTS, BUFFERS, KV_CACHE, DEFAULT)
SLEEP_DIRECTORY_VARIABLE = "HARDPOINT_SLEEP_DIR"
ALL_CLAIMS = MemoryCapabilities(frozenset({0, 1, 2}), frozenset(SleepTier), elastic=True, torch_pool=TorchPoolScope.ALL)
"""Of memory whose driver alone says what it can."""

_ADDRESSES = 1 << 63
SEE_DOCTOR = "`hardpoint doctor` lists what the backend supports"
_OTHER_DIRECTORY = (
    f"Name another one (sleep_disk_directory of an engine, or {SLEEP_DIRECTORY_VARIABLE}), or use another tier"
)


@dataclass(frozen=True)
class PoolBooks:
    """A pool's books beyond those of its tags; bytes.

    Attributes:
        reserved: addresses.
        host_held, host_used: host memory of the backup arena, with what the driver has not unpinned so far, and what backups use of it.
        disk_used: files of backups.
        unreturned: freed device memory that the driver has refused to take back so far; it is tried again.
    """

    reserved: int
    host_held: int
    host_used: int
    disk_used: int
    unreturned: int


def check_size(size: int, capacity: int = 0) -> None:
    """Raise InvalidAllocation for no bytes, DeviceOutOfMemory for more than any address can count."""
    if size < 1 or capacity < 0:
        raise InvalidAllocation("an allocation has at least one byte", found=f"{size} bytes, capacity {capacity}")
    if max(size, capacity) >= _ADDRESSES:
        raise DeviceOutOfMemory(f"cannot allocate {max(size, capacity)} bytes", found="no address space is that large")


def default_sleep_directory() -> Path:
    """Return where backups on disk go when nothing is said: HARDPOINT_SLEEP_DIR, or the user's cache directory."""
    named = os.environ.get(SLEEP_DIRECTORY_VARIABLE)
    if named:
        return Path(named)
    return cache_directory() / "sleep"


def cache_directory() -> Path:
    """Return the folder in the user's cache directory (XDG_CACHE_HOME) for what can be made again."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "hardpoint"


class VirtualMemory:
    """What a `VirtualPool` and a `VirtualAllocator` have in common: the native engine over a driver, its sleeps, wakes and books.

    Every method may be called from any thread. Operations (sleep, wake, resize) follow one another; allocations go on meanwhile.
    Errors are those of the contract (`hardpoint.interfaces.errors`), ForkedProcess in a forked child. What is not claimed is
    refused with CapabilityRefused before anything is done.

    Attributes:
        driver: the device's memory driver.
        native: the engine's own object, for what is built on it inside the core.
    """

    def __init__(self, driver: DriverTable, claims: MemoryCapabilities = ALL_CLAIMS) -> None:
        """Open the device; raises DriverError.

        Args:
            driver: the device's memory driver.
            claims: what may be asked of the memory; by default all that the driver can.
        """
        self.driver = driver
        self._claims = claims
        self.native = _native.MemoryPool(driver.capsule)
        self.native.know_tags(list(STANDARD_TAGS))
        self._rebuilds: dict[int, Callable[[], None]] = {}
        self._rebuilds_lock = threading.Lock()  # between adding a callback and declaring it, nobody may find it unused
        self._many_rebuilds = 16

    def mark_written(self, tags: Sequence[str]) -> None:
        """Void kept backups and declared sources of tags; raises UnknownTag."""
        self.native.mark_written(list(tags))

    def prepare_sleep(self, plan: SleepPlan) -> None:
        """Take and pin the host memory that `sleep(plan)` will need, in the background; raises HostBudgetExceeded, CapabilityRefused.

        For one to disk, remove the backups that dead processes left in its directory.
        """
        self._check_plan(plan)
        if plan.tier is SleepTier.DISK:
            try:
                plan = replace(plan, disk_directory=str(_sleep_directory(plan.disk_directory)))
            except MemoryFault:
                return  # the sleep will say so
        self.native.prepare_host(plan)

    def begin_sleep(self, plan: SleepPlan) -> MemoryTransaction:
        """Do everything of a sleep that can fail; see `DeviceAllocator.begin_sleep`.

        Until it ends, operations of any thread raise MemoryBusy.
        """
        self._check_plan(plan)
        with self._quiet(plan):
            operation = self.native.begin_sleep(_placed(plan))
            operation.hold()
            return _Transaction(operation)

    def begin_wake(self, tags: Sequence[str] | None = None) -> MemoryTransaction:
        """Do everything of a wake that can fail, callbacks of declared sources included; see `DeviceAllocator.begin_wake`.

        Until it ends, operations of any thread raise MemoryBusy.
        """
        operation = self.native.begin_wake(None if tags is None else list(tags))
        self._rebuild(operation)
        operation.hold()
        return _Transaction(operation)

    def sleep(self, plan: SleepPlan) -> MemoryReport:
        """Give device memory back as planned; operations of other threads wait for it."""
        self._check_plan(plan)
        with self._quiet(plan):
            return _Transaction(self.native.begin_sleep(_placed(plan))).commit()

    def wake(
        self, tags: Sequence[str] | None = None, progress: Callable[[int, int], None] | None = None
    ) -> MemoryReport:
        """Map memory again at the same addresses and restore what was preserved; operations of other threads wait for it."""
        operation = self.native.begin_wake(None if tags is None else list(tags), progress)
        self._rebuild(operation)
        return _Transaction(operation).commit()

    def discard_backup(self, tags: Sequence[str]) -> None:
        """Drop the backups of memory that is asleep; raises UnknownTag."""
        self.native.discard_backup(list(tags))

    def stats(self) -> MemoryStats:
        """Return the books by tag."""
        tags, peak, asleep = self.native.stats()
        return MemoryStats({tag: TagStats(*fields) for tag, fields in tags.items()}, peak, asleep)

    def memory_info(self) -> MemoryInfo:
        """Return the device's free and total memory as its driver reports them."""
        free, total = self.native.memory_info()
        quirks = tuple(quirk.name.lower() for quirk in DriverQuirks(self.native.quirks) if quirk.name)
        return MemoryInfo(free=free, total=total, quirks=quirks)

    def close(self) -> None:
        """Refuse new memory; what is in use stays until it is freed."""
        self.native.close()

    def _check_plan(self, plan: SleepPlan) -> None:
        """Raise CapabilityRefused for a sleep that is not claimed: by its level, which is what becomes of the weights, or its tier."""
        levels, tiers = self._claims.sleep_levels, self._claims.tiers
        policy, needed = plan.policies.get(WEIGHTS), {1, 2}
        if policy in (Policy.DISCARD, Policy.ZERO):
            needed = {2}
        elif policy is not Policy.RESIDENT and (plan.tags is None or WEIGHTS in plan.tags):
            needed = {1} if self.stats().tags[WEIGHTS].mapped else needed
        reasons = []
        if not needed & levels:
            reasons.append(f"its memory has the sleep levels {', '.join(map(str, sorted(levels))) or 'none'}")
        # Level 2 preserves what is neither weights nor KV cache on the host, also where no tier is claimed for more.
        if plan.tier not in (tiers or {SleepTier.HOST}):
            reasons.append(f"its tiers are {', '.join(sorted(tier.value for tier in tiers)) or 'none'}")
        if reasons:
            level = "1 or 2" if len(needed) > 1 else str(*needed)
            raise CapabilityRefused(
                f"this memory cannot sleep at level {level} with the tier '{plan.tier.value}'", reasons, hint=SEE_DOCTOR
            )

    def _check_elastic(self) -> None:
        """Raise CapabilityRefused where elastic memory is not claimed."""
        if not self._claims.elastic:
            raise CapabilityRefused(
                "this memory cannot grow or shrink in place", ["elastic memory is not claimed"], hint=SEE_DOCTOR
            )

    def _quiet(self, plan: SleepPlan) -> AbstractContextManager[None]:
        """Keep others from the memory that a sleep takes, for the time of its work; may refuse it. Default: nothing."""
        return nullcontext()

    def _declare(self, address: int, size: int, source: Sequence[FileExtent] | Callable[[], None]) -> None:
        """Say where the bytes at an address come from."""
        if callable(source):
            with self._rebuilds_lock:
                self._drop_unused_callbacks()
                self._rebuilds[id(source)] = source
                self.native.declare_source(address, size, [], id(source))
            return
        extents = [(extent.start, extent.size, extent.path, extent.offset) for extent in source]
        self.native.declare_source(address, size, extents)

    def _rebuild(self, operation: _native.MemoryOperation) -> None:
        """Run the callbacks that a wake waits for; rolls it back where one fails."""
        try:
            for key in operation.rebuilds():
                self._rebuilds[key]()
        except BaseException:
            operation.rollback()
            raise

    def _drop_unused_callbacks(self) -> None:
        if len(self._rebuilds) < self._many_rebuilds:
            return
        used = set(self.native.callbacks())
        self._rebuilds = {key: callback for key, callback in self._rebuilds.items() if key in used}
        self._many_rebuilds = 2 * len(self._rebuilds) + 16


class VirtualPool(VirtualMemory):
    """Memory of one device for one engine, by address and without torch."""

    def allocate(
        self,
        size: int,
        tag: str = DEFAULT,
        policy: Policy = Policy.PRESERVE,
        capacity: int = 0,
        *,
        shared: bool = False,
    ) -> int:
        """Return the address of `size` bytes.

        Args:
            capacity: bytes of addresses to reserve, for `resize`: 0 for none, or at least `size`.
            shared: cut small sizes from a common allocation of the tag and policy, aligned to 512 bytes.

        Raises:
            InvalidAllocation: no bytes, or more than the capacity.
            CapabilityRefused: the device has no elastic memory, or it is not claimed.
            DeviceOutOfMemory, DriverError.
        """
        check_size(size, capacity)
        if capacity:
            self._check_elastic()
        if shared and not capacity:
            return self.native.allocate_block(size, tag, policy)
        return self.native.allocate(size, tag, policy, capacity)

    def free(self, address: int) -> None:
        """Give an allocation back, awake or asleep; raises ForeignMemory."""
        self.native.free(address)

    def resize(self, address: int, size: int) -> None:
        """Grow or shrink an allocation within its capacity; raises InvalidAllocation, MemoryAsleep, DeviceOutOfMemory, DriverError."""
        check_size(size)
        self.native.resize(address, size)

    def is_asleep(self, address: int) -> bool:
        """Return whether an allocation has no memory now; raises ForeignMemory."""
        return self.native.is_asleep(address)

    def read(self, address: int, size: int) -> bytes:
        """Return bytes of awake memory; raises MemoryAsleep, ForeignMemory, DriverError."""
        data = bytearray(size)
        self.native.read(address, data)
        return bytes(data)

    def write(self, address: int, data: bytes | bytearray | memoryview) -> None:
        """Write bytes to awake memory, which voids its kept backup and declared source; raises as `read` does.

        A callback of a declared source writes what its memory holds by this, too, and voids nothing.
        """
        self.native.write(address, data)

    def declare_source(self, address: int, size: int, source: Sequence[FileExtent] | Callable[[], None]) -> None:
        """Say where bytes come from; see `DeviceAllocator.declare_source`."""
        self._declare(address, size, source)

    def read_backup(self, address: int, size: int) -> bytes:
        """Return preserved bytes of sleeping memory; raises MemoryFault where there are none, BackupCorrupt."""
        data = bytearray(size)
        self.native.read_backup(address, data)
        return bytes(data)

    def books(self) -> PoolBooks:
        """Return the books of addresses and backups."""
        return PoolBooks(**self.native.books())

    def trim(self) -> None:
        """Give host memory that no backup uses back to the operating system."""
        self.native.trim()


# A native operation has the methods of the contract, and no need of a class in between.


class _Transaction(MemoryTransaction):
    """A native operation that is prepared; dropped without an end, it is rolled back."""

    def __init__(self, operation: _native.MemoryOperation) -> None:
        self._operation = operation

    def commit(self) -> MemoryReport:
        fields = self._operation.commit()
        return MemoryReport(**fields | {"tiers": {SleepTier(tier): size for tier, size in fields["tiers"].items()}})

    def rollback(self) -> None:
        self._operation.rollback()


def _placed(plan: SleepPlan) -> SleepPlan:
    """Return a plan that names the directory of its backups on disk, which is made for this user alone."""
    if plan.tier is not SleepTier.DISK:
        return plan
    directory = _sleep_directory(plan.disk_directory)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise MemoryFault(
            f"the directory {directory} for backups cannot be made",
            found=str(error),
            hint=_OTHER_DIRECTORY,
        ) from error
    return replace(plan, disk_directory=str(directory))


def _sleep_directory(named: str | None) -> Path:
    try:
        directory = Path(named) if named else default_sleep_directory()
        if b"\0" in str(directory).encode():
            raise ValueError("embedded null byte")
    except (RuntimeError, ValueError) as error:  # no home; no path
        raise MemoryFault(
            "there is no directory for backups", found=ascii(error), hint=f"Set {SLEEP_DIRECTORY_VARIABLE}"
        ) from error
    return directory


# Backups on disk are removed; memory needs no return, and drivers may be gone when the last tensors are.
atexit.register(_native.abandon_memory_pools)
