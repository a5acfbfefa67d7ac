"""An open file of weights, read by copies.

A file that is mapped and then cut short by somebody else ends the process (SIGBUS) where it is next touched; a read is an error instead.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import finalize

from hardpoint.interfaces.errors import CorruptWeights

if TYPE_CHECKING:
    from torch import Tensor

CHUNK_BYTES = 2 << 20
"""A good size of a read: large against the cost of a call, small against the processor's caches."""


class OpenFile:
    """A file that stays open until nothing refers to it; its name may become another file's. May be read by several threads at once."""

    def __init__(self, path: Path) -> None:
        """Open it; raises OSError."""
        self.path = path
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        finalize(self, os.close, self._file)

    @property
    def number(self) -> int:
        """The file's descriptor, for native code to read by."""
        return self._file

    def size(self) -> int:
        """Return its bytes now."""
        return os.fstat(self._file).st_size

    def start(self, size: int) -> bytes:
        """Return the first `size` bytes, fewer where the file has fewer; raises OSError."""
        found = b""
        while len(found) < size and (more := os.pread(self._file, size - len(found), len(found))):
            found += more
        return found

    def read(self, offset: int, size: int) -> Tensor:
        """Return `size` bytes from `offset` on, a uint8 vector of its own; raises as `read_into` does."""
        import torch

        data = torch.empty(size, dtype=torch.uint8)
        self.read_into(data, offset)
        return data

    def read_into(self, out: Tensor, offset: int) -> None:
        """Write the bytes from `offset` on into a uint8 vector on the host; raises CorruptWeights where the file has fewer, OSError."""
        left = out.numpy().data
        while left:
            count = os.preadv(self._file, [left], offset + out.nbytes - len(left))
            if count == 0:
                raise self._truncated(offset, out.nbytes)
            left = left[count:]

    def check(self, error: int, offset: int, size: int) -> None:
        """Raise what a native read of these bytes says: CorruptWeights for -1, where the file has fewer, OSError for an error's number."""
        if error < 0:
            raise self._truncated(offset, size)
        if error > 0:
            raise OSError(error, os.strerror(error), str(self.path))

    def _truncated(self, offset: int, size: int) -> CorruptWeights:
        return CorruptWeights(
            f"{self.path} is truncated",
            found=f"{self.size()} bytes, where bytes {offset} to {offset + size} are to be read",
            hint="Download or convert the file again",
        )
