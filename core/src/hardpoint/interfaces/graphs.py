"""The optional contract of captured device graphs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

from hardpoint.interfaces.contract import Contract

if TYPE_CHECKING:
    from hardpoint.interfaces.allocator import DeviceAllocator


class GraphRunner(Contract, contract=True):
    """Captures a step once and replays it; made by the descriptor's factory with the device as its only argument."""

    @abstractmethod
    def start(self, allocator: DeviceAllocator) -> None:
        """Take the memory of all graphs from the allocator's pool with the tag `graphs`, which sleep preserves.

        Called once, before the first capture. Captured work goes on at the same addresses after a sleep.
        """

    @abstractmethod
    def capture(self, key: int, step: Callable[[], None]) -> None:
        """Record the device work of `step` under `key` (a padded batch size). All graphs share one memory pool."""

    @abstractmethod
    def replay(self, key: int) -> None:
        """Run the recorded work again; inputs and outputs are at the addresses of the capture. Raises KeyError."""

    @abstractmethod
    def resident_bytes(self) -> int:
        """Return the device bytes that the graphs hold."""

    @abstractmethod
    def reset(self) -> None:
        """Drop all graphs."""
