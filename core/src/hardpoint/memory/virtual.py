"""The ready-made allocator: tensors over a vendor's memory driver, with sleep and wake by the core's native engine."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    Policy,
    SleepPlan,
    TagStats,
)
from hardpoint.interfaces.capabilities import MemoryCapabilities, SleepTier
from hardpoint.interfaces.dtypes import DType
from hardpoint.interfaces.errors import InvalidAllocation, MemoryFault
from hardpoint.memory.driver_table import DriverTable
from hardpoint.memory.tensors import TensorAllocator

if TYPE_CHECKING:
    from torch import Tensor

STANDARD_TAGS = (WEIGHTS, BUFFERS, KV_CACHE, DEFAULT)
SLEEP_DIRECTORY_VARIABLE = "HARDPOINT_SLEEP_DIR"

_POLICIES = {policy: getattr(_native.MemoryPolicy, policy.value) for policy in Policy}
_TIERS = {tier: getattr(_native.MemoryTier, tier.value) for tier in SleepTier}
_REPORTED_TIERS = (SleepTier.HOST, SleepTier.DISK, SleepTier.SOURCE)


def default_sleep_directory() -> Path:
    """Return where backups on disk go when nothing is said: HARDPOINT_SLEEP_DIR, or the user's cache directory."""
    named = os.environ.get(SLEEP_DIRECTORY_VARIABLE)
    if named:
        return Path(named)
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "hardpoint" / "sleep"


class VirtualAllocator(TensorAllocator):
    """A `DeviceAllocator` over a memory driver.

    Tensors below 8 MiB share allocations by tag and policy; larger ones have their own. A backend derives from it and adds
    `capabilities`, and `pool` where torch has a pluggable allocator for the device (see `torch_pool`).

    While a tag is asleep, new tensors of it are awake memory; they join the next sleep.
    """

    def __init__(self, driver: DriverTable, *, device: int, torch_device: str, capabilities: MemoryCapabilities) -> None:
        """Open the device.

        Args:
            driver: the device's memory driver.
            device: the device's index, as DLPack and torch count.
            torch_device: the device's name in torch.
            capabilities: what the backend claims for the device.
        """
        self._driver = driver
        self._torch_device = torch_device
        self._capabilities = capabilities
        self._device_index = device
        self._pool = _native.MemoryPool(driver.capsule)
        self._pool.know_tags(list(STANDARD_TAGS))
        self._tensors = _native.MemoryTensors(self._pool, device)
        self._rebuilds: dict[int, Callable[[], None]] = {}

    def capabilities(self) -> MemoryCapabilities:
        """Return what this allocator does."""
        return self._capabilities

    def empty(
        self,
        shape: Sequence[int],
        dtype: DType,
        tag: str = DEFAULT,
        policy: Policy = Policy.PRESERVE,
        max_rows: int | None = None,
    ) -> Tensor:
        """Return an uninitialised contiguous tensor in this memory.

        Raises InvalidAllocation for a size that cannot be addressed, DeviceOutOfMemory, DriverError.
        """
        import torch

        shape = tuple(shape)
        size = prod(shape) * dtype.itemsize
        if size == 0 and max_rows is None:
            return torch.empty(shape, dtype=dtype.to_torch(), device=self._torch_device)
        if size <= 0 or any(extent < 0 for extent in shape):
            raise InvalidAllocation("a tensor has no negative extent, and an elastic one has a row", found=f"shape {list(shape)}")
        capacity = 0 if max_rows is None else size // shape[0] * max_rows
        capsule = self._tensors.make(size, tag, _POLICIES[policy], capacity)
        return self._as_tensor(capsule, shape, dtype.to_torch())

    def resize(self, tensor: Tensor, rows: int) -> Tensor:
        """Grow or shrink an elastic tensor along its first axis, in place."""
        if tensor.dim() == 0 or not tensor.is_contiguous() or rows < 1:
            raise InvalidAllocation(
                "only a contiguous tensor with rows can be resized, to at least one",
                found=f"shape {list(tensor.shape)}, {rows} rows",
            )
        size = tensor[0].numel() * tensor.itemsize * rows
        capsule = self._tensors.resize(tensor.data_ptr(), size)
        return self._as_tensor(capsule, (rows, *tensor.shape[1:]), tensor.dtype)

    def declare_source(self, tensor: Tensor, source: Sequence[FileExtent] | Callable[[], None]) -> None:
        """Say where a tensor's bytes come from; raises ForeignMemory, InvalidAllocation."""
        if callable(source):
            key = id(source)
            self._rebuilds[key] = source
            self._pool.declare_source(tensor.data_ptr(), tensor.nbytes, [], key)
            return
        extents = [(extent.start, extent.size, extent.path, extent.offset) for extent in source]
        self._pool.declare_source(tensor.data_ptr(), tensor.nbytes, extents)

    def mark_written(self, tags: Sequence[str]) -> None:
        """Void kept backups and declared sources of these tags; raises UnknownTag."""
        self._pool.mark_written(list(tags))

    def prepare_sleep(self, plan: SleepPlan) -> None:
        """Take and pin the host memory that `sleep(plan)` will need, in the background; raises HostBudgetExceeded."""
        self._pool.prepare_host(self._native_plan(plan))

    def sleep(self, plan: SleepPlan) -> MemoryReport:
        """Give device memory back as planned."""
        return self._report(self._pool.begin_sleep(self._native_plan(plan), plan.progress).commit())

    def wake(self, tags: Sequence[str] | None = None) -> MemoryReport:
        """Map memory again and restore what was preserved; callbacks of declared sources run before it counts as awake."""
        operation = self._pool.begin_wake(None if tags is None else list(tags), None)
        try:
            for key in operation.rebuilds():
                self._rebuilds[key]()
        except BaseException:
            operation.rollback()
            raise
        return self._report(operation.commit())

    def discard_backup(self, tags: Sequence[str]) -> None:
        """Drop the backups of memory that is asleep; raises UnknownTag."""
        self._pool.discard_backup(list(tags))

    def read_backup(self, tensor: Tensor) -> Tensor:
        """Return a copy, on the host, of a sleeping tensor's bytes."""
        import torch

        if not tensor.is_contiguous():
            raise InvalidAllocation("only a contiguous tensor's backup can be read", found=f"strides {tensor.stride()}")
        copy = torch.empty(tensor.shape, dtype=tensor.dtype)
        if tensor.nbytes:
            self._pool.read_backup(tensor.data_ptr(), copy.view(-1).view(torch.uint8).numpy())
        return copy

    def stats(self) -> MemoryStats:
        """Return the books."""
        books = self._pool.stats()
        tags = {
            name: TagStats(**{key: value for key, value in tag.items() if key != "asleep"})
            for name, tag in books["tags"].items()
            if tag["allocations"]
        }
        asleep = frozenset(name for name, tag in books["tags"].items() if tag["asleep"])
        return MemoryStats(tags=tags, peak_allocated=books["peak_allocated"], asleep=asleep)

    def memory_info(self) -> MemoryInfo:
        """Return the device's free and total memory as its driver reports them."""
        free, total = self._pool.memory_info()
        return MemoryInfo(free=free, total=total)

    def close(self) -> None:
        """Give everything back that nobody uses; tensors still alive keep their memory until they are gone."""
        self._pool.close()

    def _native_plan(self, plan: SleepPlan) -> Any:
        native = _native.MemorySleepPlan()
        native.tags = None if plan.tags is None else sorted(plan.tags)
        native.policies = {tag: _POLICIES[policy] for tag, policy in plan.policies.items()}
        native.keep = sorted(plan.keep)
        native.tier = _TIERS[plan.tier]
        native.verify = plan.verify
        native.host_budget = plan.host_budget
        native.disk_budget = plan.disk_budget
        for live in plan.live:
            native.add_live(live.tensor.data_ptr(), live.ranges)
        if plan.tier is SleepTier.DISK:
            native.disk_directory = str(_sleep_directory(plan.disk_directory))
        return native

    def _report(self, report: Mapping[str, Any]) -> MemoryReport:
        return MemoryReport(
            preserved=report["preserved"],
            discarded=report["discarded"],
            skipped=report["skipped"],
            seconds=report["seconds"],
            free_before=report["free_before"],
            free_after=report["free_after"],
            tiers={tier: size for tier, size in zip(_REPORTED_TIERS, report["tiers"], strict=True) if size},
            unmapped=report["unmapped"],
            still_asleep=frozenset(report["still_asleep"]),
        )

    def _as_tensor(self, capsule: object, shape: tuple[int, ...], dtype: Any) -> Tensor:
        from torch.utils.dlpack import from_dlpack

        bytes_: Tensor = from_dlpack(capsule)
        return bytes_.view(dtype).view(shape)


def _sleep_directory(named: str | None) -> Path:
    directory = Path(named) if named else default_sleep_directory()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MemoryFault(
            f"the directory {directory} for backups cannot be made", found=str(error), hint=f"Set {SLEEP_DIRECTORY_VARIABLE}"
        ) from error
    return directory


# Backups on disk are removed; memory needs no return, and drivers may be gone when the last tensors are.
atexit.register(_native.abandon_memory_pools)
