"""The optional contract of captured device graphs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

from hardpoint.interfaces.contract import Contract


class GraphRunner(Contract, contract=True):
    """Captures a step once and replays it; made by the descriptor's factory with the device as its only argument."""

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
