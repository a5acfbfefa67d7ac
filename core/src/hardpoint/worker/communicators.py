"""What the library of collectives takes of a rank's device: measured when it is taken, and given back while memory sleeps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from hardpoint.interfaces.collectives import Collectives
from hardpoint.interfaces.errors import DeviceOutOfMemory

_log = logging.getLogger("hardpoint")


class Communicators:
    """The communicators of a rank's groups. All ranks call `suspend` and `resume` alike, since their libraries wait for one another.

    Args:
        groups: that the rank is in. They make their communicators here, which libraries do at the first operation.
        free: the device's free bytes.
    """

    def __init__(self, groups: Sequence[Collectives] = (), free: Callable[[], int] = lambda: 0) -> None:
        self._groups, self._free = groups, free
        self._suspended: list[tuple[Collectives, int]] = []
        before = free()
        for group in groups:
            group.barrier()
        self._size = max(before - free(), 0)

    def resident_bytes(self) -> int:
        """Return the bytes of the device that the communicators hold now."""
        return max(self._size - self._given(), 0)

    def suspend(self) -> None:
        """Let the groups give back what they can; one that fails keeps its memory, and a warning says why."""
        suspended = [group for group, _ in self._suspended]
        for group in self._groups:
            if group in suspended:
                continue
            before = self._free()
            try:
                if group.suspend():
                    self._suspended.append((group, max(self._free() - before, 0)))
            except Exception as error:
                _log.warning("communicators keep their device memory during this sleep: %s", error)

    def check_room(self) -> None:
        """Raise DeviceOutOfMemory where the device has not what `resume` takes; it can be asked on one rank alone."""
        needed, free = self._given(), self._free()
        if free < needed:
            raise DeviceOutOfMemory(
                f"the communicators of the ranks take {needed} bytes of the device",
                found=f"{free} free",
                hint="Free memory on the device, and wake up again",
            )

    def resume(self) -> None:
        """Let the groups take back what they gave, in reverse order; raises WorkerError, and goes on from there when called again."""
        while self._suspended:
            self._suspended[-1][0].resume()
            self._suspended.pop()

    def _given(self) -> int:
        return sum(size for _, size in self._suspended)
