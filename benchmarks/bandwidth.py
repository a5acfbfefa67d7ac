"""Read bandwidth of main memory: the limit that decoding on a CPU is held against."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Several times the last-level cache that one core can see.
_BYTES_PER_THREAD = 256 << 20


@dataclass(frozen=True)
class Bandwidth:
    """Attributes:
    gb_per_s: bytes read by all threads together per second, in 1e9.
    reader: what read them; the portable one reaches less than the memory can give.
    """

    gb_per_s: float
    reader: str


def read_bandwidth(threads: int, repeats: int = 5) -> Bandwidth:
    """Return the best of `repeats` passes, each thread reading its own 256 MiB once per pass."""
    return Reader(threads).measure(repeats)


class Reader:
    """Measures the bandwidth again and again, by threads that read the same memory each time."""

    def __init__(self, threads: int) -> None:
        self._buffers = [_huge_pages(_BYTES_PER_THREAD) for _ in range(threads)]
        self.name, self._read = _reader()

    def measure(self, repeats: int = 5) -> Bandwidth:
        """Return the best of `repeats` passes."""
        best = float("inf")
        for _ in range(repeats):
            start = threading.Barrier(len(self._buffers) + 1)
            workers = [threading.Thread(target=_read_after, args=(start, self._read, one)) for one in self._buffers]
            for worker in workers:
                worker.start()
            # Before the barrier: the readers may hold every core by the time that this thread comes back from it.
            started = time.perf_counter()
            start.wait()
            for worker in workers:
                worker.join()
            best = min(best, time.perf_counter() - started)
        return Bandwidth(len(self._buffers) * _BYTES_PER_THREAD / best / 1e9, self.name)


def _huge_pages(size: int) -> Any:
    """Return touched memory in huge pages where the system grants them, as model weights are held."""
    import numpy as np

    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    buffer = np.frombuffer(pages, dtype=np.uint64)
    buffer[:] = 1
    return buffer


def _read_after(start: threading.Barrier, read: Callable[[object], object], buffer: object) -> None:
    start.wait()
    read(buffer)


def _reader() -> tuple[str, Callable[..., object]]:
    """Return the CPU backend's own read loop, or numpy's sum where the backend is not built."""
    import numpy as np

    try:
        from hardpoint_cpu import _native

        native = _native.read_bandwidth
    except (ImportError, AttributeError):
        return "numpy sum", np.add.reduce
    return "hardpoint_cpu", lambda buffer: native(buffer.ctypes.data, buffer.nbytes)
