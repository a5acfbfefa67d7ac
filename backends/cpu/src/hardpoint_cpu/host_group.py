"""Ranks on one host exchange tensors through memory that they share, many times quicker than through a connection.

Each rank has a counter and two slots, used in turn. It writes its tensor into its slot, raises its counter, waits until all counters
are there, and reads all slots. Whoever writes a slot again has seen all others at the exchange in between, and so past reading it.
"""

from __future__ import annotations

import mmap
import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hardpoint.interfaces.errors import WorkerError
from hardpoint_cpu import _native

if TYPE_CHECKING:
    from torch import Tensor

SLOT_BYTES = 1 << 20

_LINE = 64
"""Bytes of a rank's line: its counter, and its process id."""

_LOOK_SECONDS = 0.2
"""Time between two looks at whether the others are alive."""

_MAX_VIEWS = 64


class HostGroup:
    """A rank's side of the shared memory.

    Args:
        file: descriptor of the memory; it can be closed afterwards.
        timeout: seconds after which an exchange has failed.
    """

    def __init__(self, file: int, rank: int, size: int, timeout: float) -> None:
        self._rank, self._size, self._timeout = rank, size, timeout
        self._memory = torch.frombuffer(mmap.mmap(file, _total_bytes(size)), dtype=torch.uint8)
        self._lines = self._memory[_LINE : _LINE * (1 + size)].view(torch.int64).view(size, -1)
        self._lines[rank, 1] = os.getpid()
        self._counters = self._lines.data_ptr()
        self._own = self._counters + rank * _LINE
        self._exchanges = 0
        self._views: dict[tuple[torch.dtype, int], list[list[Tensor]]] = {}
        self._broken = ""

    def exchange(self, tensor: Tensor) -> Sequence[Tensor]:
        """Return all ranks' tensors [n] of at most `SLOT_BYTES`, in the order of ranks; they are good until the next exchange.

        Raises WorkerError when another rank has ended, or does not come in time; every later exchange then fails too.
        """
        if self._broken:
            raise WorkerError("an exchange between ranks failed before", found=self._broken)
        self._exchanges += 1
        slots = self._slots(tensor.dtype, len(tensor))[self._exchanges % 2]
        slots[self._rank].copy_(tensor)
        if not self._arrive(_LOOK_SECONDS):
            self._wait_and_look()
        return slots

    def _arrive(self, seconds: float) -> bool:
        return _native.publish_and_wait(self._own, self._counters, self._size, _LINE, self._exchanges, seconds)

    def _wait_and_look(self) -> None:
        end = time.monotonic() + self._timeout - _LOOK_SECONDS
        while not self._arrive(_LOOK_SECONDS):
            late = [rank for rank in range(self._size) if int(self._lines[rank, 0]) < self._exchanges]
            gone = [rank for rank in late if not _is_alive(int(self._lines[rank, 1]))]
            if gone:
                self._broken = f"the process of rank {', '.join(map(str, gone))} has ended"
            elif time.monotonic() > end:
                self._broken = f"rank {', '.join(map(str, late))} did not come within {self._timeout:g} s"
            if self._broken:
                raise WorkerError(
                    f"rank {self._rank} of {self._size} waited in vain for the other ranks",
                    found=self._broken,
                    hint="Another rank has died, hangs, or is in another operation; its own log says more",
                )

    def _slots(self, dtype: torch.dtype, length: int) -> list[list[Tensor]]:
        """Return, for odd and even exchanges, the beginnings of all ranks' slots as tensors of this type and length."""
        found = self._views.get((dtype, length))
        if found is None:
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            first, size = mmap.PAGESIZE, length * dtype.itemsize
            found = [
                [
                    self._memory[start : start + size].view(dtype)
                    for start in range(first + turn * SLOT_BYTES, _total_bytes(self._size), 2 * SLOT_BYTES)
                ]
                for turn in range(2)
            ]
            self._views[dtype, length] = found
        return found


class Offer:
    """Shared memory that one rank makes and the others find by numbers, which any connection can carry.

    The memory has no name that could be left behind: others open it through the maker's process, which they can on the same host.
    """

    def __init__(self, size: int) -> None:
        self.file = -1
        self.numbers = [0, 0, 0, 0, 0]
        if not hasattr(os, "memfd_create"):
            return
        try:
            self.file = os.memfd_create("hardpoint-ranks", os.MFD_CLOEXEC)
            os.posix_fallocate(self.file, 0, _total_bytes(size))
            token = secrets.randbits(62) | 1
            os.pwrite(self.file, token.to_bytes(8, "little"), 0)
            self.numbers = [os.getpid(), self.file, token, *_host()]
        except OSError:
            self.close()

    def close(self) -> None:
        """Close the descriptor; mappings stay."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1
            self.numbers = [0, 0, 0, 0, 0]


def find(numbers: Sequence[int], size: int) -> int | None:
    """Open the memory that another rank offers; return its descriptor, None where it cannot be reached from here."""
    process, file, token, *host = numbers
    try:
        if not token or host != _host():
            return None
        found = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
        if os.pread(found, 8, 0) == token.to_bytes(8, "little") and os.fstat(found).st_size == _total_bytes(size):
            return found
        os.close(found)
    except OSError:
        pass
    return None


def _host() -> list[int]:
    """Return what tells hosts, and process tables on one host, apart."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    return [int(boot, 16) >> 66, Path("/proc/self/ns/pid").stat().st_ino]


def _is_alive(process: int) -> bool:
    """Whether a process is there and not just waiting to be reaped (proc(5))."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _total_bytes(size: int) -> int:
    if _LINE * (1 + size) > mmap.PAGESIZE:
        raise ValueError(f"{size} ranks are more than one page has lines for")
    return mmap.PAGESIZE + size * 2 * SLOT_BYTES
