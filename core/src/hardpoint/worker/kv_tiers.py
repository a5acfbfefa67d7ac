"""A rank's tiers below the prefix cache: memory of the host and a file on disk, for blocks that the device evicts.

The scheduler decides what is where; this does a step's `TierMoves`. A block is its bytes in one piece, with an XXH64 whose seed is the tag
under which it was stored: bytes that were damaged, and such as were stored under another tag, are a block that is not there.
"""

from __future__ import annotations

import logging
import os
import queue
import tempfile
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import torch

from hardpoint._native import xxh64
from hardpoint.interfaces.attention import KVCacheSpec
from hardpoint.interfaces.batch import TierMoves, TierReport
from hardpoint.interfaces.errors import ConfigError
from hardpoint.interfaces.platform import Event, Platform

if TYPE_CHECKING:
    from torch import Tensor

    from hardpoint.interfaces.batch import Int64Array

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_MAX_UNWRITTEN_BYTES = 256 << 20
"""Bytes that wait to be written to the disk at one time; a block beyond them is given up."""
_PATIENCE = 5.0
"""Seconds that the end of a tier waits for a write that is under way."""

_log = logging.getLogger("hardpoint")


@dataclass
class TierWork:
    """One step's moves, done or queued."""

    _tiers: KVTiers
    failed_loads: list[int] = field(default_factory=list)
    lost: list[tuple[int, int]] = field(default_factory=list)
    checksum_failures: int = 0
    io_errors: int = 0
    seconds: float = 0.0
    storing: list[_Stores] = field(default_factory=list)

    def report(self) -> TierReport:
        """Finish what the device has done by now, and say what became of the moves."""
        self._tiers.finish(self)
        return TierReport(
            tuple(self.failed_loads), tuple(self.lost), self.checksum_failures, self.io_errors, self.seconds
        )


@dataclass(frozen=True, eq=False)
class _Stores:
    """Blocks on their way to the host."""

    done: Event
    moves: Int64Array


class KVTiers:
    """Slots for evicted blocks, numbered from 0 in the host's memory and on from there on disk.

    Attributes:
        host: uint8[num_host, bytes of a block].
    """

    def __init__(
        self, spec: KVCacheSpec, platform: Platform, *, host: Tensor, num_disk: int, folder: str | None
    ) -> None:
        """Take the file; raises ConfigError for a folder that cannot be written to.

        Args:
            host: uint8[num_host, bytes of a block].
        """
        self._spec, self._platform = spec, platform
        self._axis = spec.axes.index("block") + 1
        self.host = host
        self._num_host = num_host = len(host)
        # By slot: the tag that its block was stored under (0: none; negative: the store is in flight), and the checksum of its bytes.
        self._tags = np.zeros(num_host + num_disk, np.int64)
        self._sums = np.zeros(num_host + num_disk, np.uint64)
        self._storing: list[_Stores] = []
        self._disk = _DiskBlocks(folder, spec.block_bytes) if num_disk and folder is not None else None

    def move(self, cache: Tensor, moves: TierMoves) -> TierWork:
        """Do or queue a step's moves, in their order, for the cache; loads have been done, or have failed, when it returns."""
        work = TierWork(self)
        if self._spec.block_bytes == 0:
            return work
        start = time.perf_counter()
        if len(moves.demotions) or len(moves.loads):
            # Demotions and loads read slots that earlier steps store to.
            self._finish_stores(self._storing)
        for source, slot, tag in moves.demotions.tolist():
            self._demote(source, slot, tag, work)
        with torch.inference_mode():
            self._store(cache, moves.stores, work)
            if len(moves.loads):
                self._finish_stores(self._storing)
                self._load(cache, moves.loads, work)
        work.seconds += time.perf_counter() - start
        return work

    def finish(self, work: TierWork) -> None:
        """Check in what the device has copied by now, and add to a step's work what the disk could not keep."""
        start = time.perf_counter()
        self._finish_stores(work.storing)
        if self._disk is not None:
            lost, errors = self._disk.take_failures()
            for slot, tag in lost:
                self._lose(slot, tag, work)
            work.io_errors += errors
        work.seconds += time.perf_counter() - start

    def close(self) -> None:
        """Give the file back; idempotent."""
        if self._disk is not None:
            self._disk.close()

    # Device and host

    def _store(self, cache: Tensor, stores: Int64Array, work: TierWork) -> None:
        for block, slot, tag in stores.tolist():
            self._tags[slot] = -tag
            whole = _of_block(cache, self._axis, block)
            self.host[slot].view(whole.dtype).view(whole.shape).copy_(whole, non_blocking=True)
        done = self._platform.record_event() if len(stores) else None
        if done is None:
            self._check_in(stores)
        else:
            work.storing.append(_Stores(done, stores))
            self._storing.append(work.storing[-1])

    def _finish_stores(self, storing: list[_Stores]) -> None:
        """Wait for stores that are queued, and check them in, in their order."""
        for stores in [one for one in self._storing if one in storing]:
            self._storing.remove(stores)
            stores.done.synchronize()
            self._check_in(stores.moves)

    def _check_in(self, stores: Int64Array) -> None:
        for _, slot, tag in stores.tolist():
            # The tag differs where a later store to the same slot is in flight.
            if self._tags[slot] == -tag:
                self._tags[slot], self._sums[slot] = tag, xxh64(self._row(slot), tag)

    def _row(self, slot: int) -> memoryview:
        return self.host[slot].numpy().data

    def _load(self, cache: Tensor, loads: Int64Array, work: TierWork) -> None:
        for row, (slot, block, tag) in enumerate(loads.tolist()):
            found = self._read(slot, tag, work)
            if found is None:
                work.failed_loads.append(row)
                self._lose(slot, tag, work)
                continue
            whole = _of_block(cache, self._axis, block)
            # A host slot may be copied without waiting: what is queued later writes to it after the copy. Blocks from disk have no slot.
            is_kept = slot < self._num_host
            whole.copy_(found.view(whole.dtype).view(whole.shape), non_blocking=is_kept)

    def _read(self, slot: int, tag: int, work: TierWork) -> Tensor | None:
        """Return the bytes of a block; None where they are not those that were stored under the tag."""
        if self._tags[slot] != tag:
            return None
        if slot < self._num_host:
            found = self.host[slot]
        else:
            found = torch.empty(self._spec.block_bytes, dtype=torch.uint8)
            if self._disk is None or not self._disk.read(slot, slot - self._num_host, found.numpy().data):
                work.io_errors += 1
                return None
        if xxh64(found.numpy().data, tag) == self._sums[slot]:
            return found
        work.checksum_failures += 1
        return None

    # Host and disk

    def _demote(self, source: int, slot: int, tag: int, work: TierWork) -> None:
        disk = self._disk
        if (
            disk is None
            or self._tags[source] != tag
            or not disk.write(slot, slot - self._num_host, tag, self._row(source))
        ):
            self._lose(slot, tag, work)
        else:
            self._tags[slot], self._sums[slot] = tag, self._sums[source]

    def _lose(self, slot: int, tag: int, work: TierWork) -> None:
        if self._tags[slot] == tag:
            self._tags[slot] = 0
        work.lost.append((slot, tag))


class _DiskBlocks:
    """A file without a name, which nobody else can open, and which is gone with the process however that ends; a thread writes to it.

    A write that fails ends the writing for good: the file system is full, or does not work. What is there can be read still.
    """

    def __init__(self, folder: str, block_bytes: int) -> None:
        self._block_bytes, self._folder = block_bytes, folder
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            self._file: BinaryIO = tempfile.TemporaryFile(dir=folder, prefix="hardpoint-kv-", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise ConfigError(
                f"kv_offload_path={folder!r} cannot hold KV blocks",
                found=str(error),
                hint="Give a folder that this user can write to",
            ) from error
        self._most_unwritten = max(1, _MAX_UNWRITTEN_BYTES // max(block_bytes, 1))
        # Guards the fields below. `_unwritten` has the last bytes of slots that wait to be written, and is read until the file has them.
        self._lock = threading.Lock()
        self._unwritten: dict[int, tuple[int, bytes]] = {}
        self._lost: list[tuple[int, int]] = []
        self._errors = 0
        self._is_failed = False
        self._jobs: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write_all, name="hardpoint-kv-tier", daemon=True)
        self._writer.start()

    def write(self, slot: int, place: int, tag: int, block: memoryview) -> bool:
        """Have a block written; False where it cannot be taken: too many wait, or the disk has failed."""
        with self._lock:
            if self._is_failed or len(self._unwritten) >= self._most_unwritten:
                # The slot's earlier block is void, and must not be written over one that comes there next.
                self._unwritten.pop(slot, None)
                return False
            self._unwritten[slot] = (tag, bytes(block))
        self._jobs.put((slot, place))
        return True

    def read(self, slot: int, place: int, to: memoryview) -> bool:
        """Read a block; False where the disk does not give it."""
        with self._lock:
            waiting = self._unwritten.get(slot)
        if waiting is not None:
            to[:] = waiting[1]
            return True
        try:
            return os.preadv(self._file.fileno(), [to], place * self._block_bytes) == len(to)
        except OSError as error:
            _log.warning("a KV block in %s cannot be read (%s), and is computed again", self._folder, error)
            return False

    def take_failures(self) -> tuple[list[tuple[int, int]], int]:
        """Return (slot, tag) of the blocks whose writing has failed since the last call, and the number of errors."""
        with self._lock:
            lost, self._lost = self._lost, []
            errors, self._errors = self._errors, 0
        return lost, errors

    def close(self) -> None:
        """End the writing and close the file; a write that hangs is left alone. Idempotent."""
        with self._lock:
            self._is_failed = True
            self._unwritten.clear()
        self._jobs.put(None)
        self._writer.join(_PATIENCE)
        if not self._writer.is_alive():
            self._file.close()

    def _write_all(self) -> None:
        while (job := self._jobs.get()) is not None:
            slot, place = job
            with self._lock:
                waiting = self._unwritten.get(slot)
            # None where an earlier job for this slot has already written the slot's last bytes.
            if waiting is not None:
                self._write_one(slot, place, *waiting)

    def _write_one(self, slot: int, place: int, tag: int, block: bytes) -> None:
        error: OSError | None = None
        try:
            written = os.pwrite(self._file.fileno(), block, place * self._block_bytes)
            if written < len(block):
                error = OSError(f"{written} of {len(block)} bytes were written")
        except OSError as raised:
            error = raised
        with self._lock:
            current = self._unwritten.get(slot)
            if error is None:
                if current is not None and current[0] == tag:
                    del self._unwritten[slot]
                return
            first, self._is_failed = not self._is_failed, True
            self._errors += 1
            self._lost += [(at, waiting[0]) for at, waiting in self._unwritten.items()]
            self._unwritten.clear()
        if first:
            _log.warning("no more KV blocks go to %s, which cannot be written to: %s", self._folder, error)


def _of_block(cache: Tensor, axis: int, block: int) -> Tensor:
    """Return a block's part of the cache as integers, which a copy leaves as they are."""
    return cache.view(_INTEGERS[cache.dtype.itemsize]).select(axis, block)
