"""A rank's KV blocks: the cache on the device, swapped blocks on the host, how large either may be, and how blocks are moved."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import torch

from hardpoint.interfaces.allocator import KV_CACHE, DeviceAllocator, LiveRanges, Policy
from hardpoint.interfaces.attention import AttentionBackend, KVCacheSpec
from hardpoint.interfaces.batch import StepBatch
from hardpoint.interfaces.dtypes import DType
from hardpoint.interfaces.errors import CapabilityRefused, HostBudgetExceeded, WorkerError
from hardpoint.interfaces.platform import Platform
from hardpoint.memory import VirtualAllocator
from hardpoint.worker.attention_checks import check_block_pairs
from hardpoint.worker.kv_tiers import KVTiers, TierWork

if TYPE_CHECKING:
    from torch import Tensor

    from hardpoint.interfaces.batch import Int32Array, TierMoves
    from hardpoint.worker.state_memory import StateMemory


class KVMemory:
    """The KV cache and its swap space, in the layout that attention planned, and the slots of recurrent states.

    Attributes:
        states: None for a model without.
        tiers: for blocks that the prefix cache evicts; None without.
    """

    def __init__(
        self,
        spec: KVCacheSpec,
        *,
        allocator: DeviceAllocator,
        attention: AttentionBackend,
        platform: Platform,
        torch_device: str,
        states: StateMemory | None = None,
    ) -> None:
        """Take nothing yet.

        Args:
            states: the slots of sequences' recurrent states, where the model has any.
        """
        self.states = states
        self._spec, self._allocator, self._attention = spec, allocator, attention
        self._torch_device = torch_device
        self._platform = platform
        self._cache: Tensor | None = None
        self._host: Tensor | None = None
        self.tiers: KVTiers | None = None

    @property
    def cache(self) -> Tensor:
        """The whole cache on the device; raises WorkerError before `initialize`."""
        self.check_initialized()
        assert self._cache is not None
        return self._cache

    def check_initialized(self) -> None:
        """Raise WorkerError before `initialize`."""
        if self._cache is None:
            raise WorkerError("there is no KV cache", hint="Call initialize_kv first")

    def initialize(self, num_device_blocks: int, num_host_blocks: int) -> None:
        """Allocate the cache and the swap space; raises DeviceOutOfMemory, HostBudgetExceeded, CapabilityRefused."""
        self._check_addressable(num_device_blocks)
        self._cache = self._empty(num_device_blocks)
        self._host = None  # what it was goes first
        if num_host_blocks:
            self._host = self._host_blocks(
                self._spec.shape(num_host_blocks),
                self._spec.dtype,
                f"cannot take {num_host_blocks * self._spec.block_bytes} bytes of host memory for swapped KV blocks",
                "Lower swap_space",
            )

    def scratch(self, num_blocks: int) -> Tensor:
        """Return a zeroed cache of its own for a profile, given back with its last reference."""
        return self._empty(num_blocks).zero_()

    def move_blocks(self, batch: StepBatch) -> None:
        """Swap and copy the blocks, and copy the slots, that a step asks for."""
        if len(batch.swap_out):
            self._attention.swap_blocks(self.cache, self._swapped(), batch.swap_out)
        if len(batch.swap_in):
            self._attention.swap_blocks(self._swapped(), self.cache, batch.swap_in)
        if len(batch.copies):
            self._attention.copy_blocks(self.cache, batch.copies)
        if self.states is not None:
            self.states.copy_rows(batch)

    def open_tiers(self, num_host_blocks: int, num_disk_blocks: int, folder: str | None) -> None:
        """Take the memory of the tiers below the prefix cache; raises HostBudgetExceeded, ConfigError."""
        self.check_initialized()
        host = self._host_blocks(
            (num_host_blocks, self._spec.block_bytes),
            DType.UINT8,
            f"cannot take {num_host_blocks * self._spec.block_bytes} bytes of host memory for evicted KV blocks",
            "Lower kv_offload_gib",
        )
        self.tiers = KVTiers(self._spec, self._platform, host=host, num_disk=num_disk_blocks, folder=folder)

    def move_tiers(self, moves: TierMoves | None) -> TierWork | None:
        """Do a step's moves to and from the tiers; they come before its others. None for a step without."""
        if moves is None:
            return None
        if self.tiers is None:
            raise WorkerError("a step moves blocks of tiers, and there are none", hint="Call open_tiers first")
        return self.tiers.move(self.cache, moves)

    def close(self) -> None:
        """Give the disk's tier back; idempotent."""
        if self.tiers is not None:
            self.tiers.close()

    def _swapped(self) -> Tensor:
        if self._host is None:
            raise WorkerError("a step swaps blocks, and there is no swap space", hint="Give initialize_kv host blocks")
        return self._host

    def live(self, blocks: Sequence[int]) -> LiveRanges | None:
        """Return the bytes of these blocks in the cache, None where there are none."""
        num_blocks = self.cache.shape[self._spec.axes.index("block") + 1]
        ranges = live_ranges(blocks, self._spec, num_blocks)
        return LiveRanges(self.cache.data_ptr(), ranges) if ranges else None

    # Sizes

    def limit(self, default: int | None) -> int | None:
        """Return the most bytes for the cache: `default`, and what attention can address; None for no limit."""
        elements = self._attention.capabilities().max_cache_elements
        if elements is None:
            return default
        addressable = 2 * self._spec.num_layers * elements * self._spec.dtype.itemsize
        return addressable if default is None else min(default, addressable)

    def seconds_per_swapped_block(self) -> float:
        """Estimate the time to move one block to the host: its bytes at the speed of a measured copy."""
        # To a device so many bytes that a copy's beginning does not count; on the host, where it takes no time, touching them would.
        least = 256 << 10 if torch.device(self._torch_device).type == "cpu" else 4 << 20
        sample = torch.zeros(max(least, self._spec.block_bytes), dtype=torch.uint8, device=self._torch_device)
        host = self._platform.empty_host(sample.shape, torch.uint8)
        best = math.inf
        for _ in range(3):
            start = time.perf_counter()
            host.copy_(sample)
            self._platform.synchronize()
            best = min(best, time.perf_counter() - start)
        return best * self._spec.block_bytes / sample.nbytes

    def _empty(self, num_blocks: int) -> Tensor:
        if self._spec.num_layers == 0:
            return torch.empty(
                self._spec.shape(num_blocks), dtype=self._spec.dtype.to_torch(), device=self._torch_device
            )
        return self._allocator.empty(self._spec.shape(num_blocks), self._spec.dtype, KV_CACHE, Policy.DISCARD)

    def _host_blocks(self, shape: Sequence[int], dtype: DType, problem: str, hint: str) -> Tensor:
        """Return host memory for blocks, and no more of it than the user allows; raises HostBudgetExceeded, DriverError."""
        try:
            pinned = _pinned_by_driver(self._allocator, shape, dtype)
            return self._platform.empty_host(shape, dtype.to_torch()) if pinned is None else pinned
        except (RuntimeError, MemoryError) as error:
            raise HostBudgetExceeded(problem, found=str(error).splitlines()[0], hint=hint) from error

    def _check_addressable(self, num_blocks: int) -> None:
        """Refuse a cache whose layers attention cannot address."""
        elements = self._attention.capabilities().max_cache_elements
        per_block = self._spec.block_size * self._spec.num_kv_heads * self._spec.head_dim
        if elements is not None and num_blocks * per_block > elements:
            raise CapabilityRefused(
                f"a KV cache of {num_blocks} blocks was asked for",
                [
                    f"attention addresses {elements} elements of a layer's keys, which are {elements // per_block} blocks"
                ],
                hint=f"Ask for {elements // per_block} blocks at most",
            )


def _pinned_by_driver(allocator: DeviceAllocator, shape: Sequence[int], dtype: DType) -> Tensor | None:
    """Return memory that the device's driver has pinned; None where it pins none, or torch would wait for each copy of it.

    Torch rounds what it pins itself up to a power of two (ATen/core/CachingHostAllocator.h). Not every build of it knows memory that
    others pinned.
    """
    if not isinstance(allocator, VirtualAllocator):
        return None
    page = allocator.empty_host((1,), DType.UINT8)
    return allocator.empty_host(shape, dtype) if page is not None and page.is_pinned() else None


def live_ranges(blocks: Sequence[int], spec: KVCacheSpec, num_blocks: int) -> list[tuple[int, int]]:
    """Return (first byte, number of bytes) of these blocks in a cache of `num_blocks`, rising, neighbours joined.

    A block has one piece for each layer and each axis value before the block axis (keys and values, in the usual layout).
    """
    if len(blocks) == 0 or spec.num_layers == 0:
        return []
    shape = spec.shape(num_blocks)
    axis = spec.axes.index("block") + 1
    piece = prod(shape[axis + 1 :]) * spec.dtype.itemsize
    ordered = np.unique(np.asarray(blocks, np.int64))
    first = np.concatenate([[True], np.diff(ordered) != 1])
    starts = ordered[first]
    lengths = np.diff(np.append(np.flatnonzero(first), len(ordered)))
    outer = np.arange(prod(shape[:axis]), dtype=np.int64) * num_blocks
    begins = (outer[:, None] + starts).reshape(-1)
    ends = (outer[:, None] + starts + lengths).reshape(-1)
    # The last block of one piece and the first of the next are neighbours.
    joined = np.concatenate([[True], begins[1:] != ends[:-1]])
    begins, ends = begins[joined], ends[np.append(np.flatnonzero(joined)[1:] - 1, len(ends) - 1)]
    return list(zip((begins * piece).tolist(), ((ends - begins) * piece).tolist(), strict=True))


_PIECE_BYTES = 64 << 20
"""Most bytes of blocks that are gathered at once."""


def copy_blocks(source: Tensor, destination: Tensor, pairs: Int32Array, axis: int) -> None:
    """Copy whole blocks in all layers, pair by pair, within a cache or from one to another, whose devices may differ.

    Args:
        source, destination: whole caches, which differ in the number of blocks and the device only.
        pairs: int32[k, 2], blocks (of the source, of the destination).
        axis: of blocks in a whole cache.

    Raises:
        InvalidBatch: caches that do not match, or a block outside; nothing was copied.
    """
    if not len(pairs):
        return
    check_block_pairs(source, destination, pairs, axis)
    # What one pair writes and a later one reads must not be gathered before it is written.
    is_chained = source is destination and bool(np.isin(pairs[:, 0], pairs[:, 1]).any())
    block_bytes = source.nbytes // source.shape[axis]
    numbers = torch.from_numpy(np.ascontiguousarray(pairs, dtype=np.int64))
    for piece in torch.split(numbers, 1 if is_chained else max(1, _PIECE_BYTES // block_bytes)):
        gathered = source.index_select(axis, piece[:, 0].to(source.device))
        destination.index_copy_(axis, piece[:, 1].to(destination.device), gathered.to(destination.device))
