"""The optional contract of captured device graphs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hardpoint.interfaces.contract import Contract
from hardpoint.interfaces.errors import CapabilityRefused

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
        """Record the device work of `step` under `key`: its sequences with padding, of a step with prompts minus its tokens.

        All graphs share one memory pool.
        """

    def update(self, key: int, arguments: Mapping[str, Any]) -> None:
        """Give the recorded work other arguments that its operators take from the host, for the replays of `key` that follow.

        Called before a replay, where attention has such arguments (`AttentionBackend.host_arguments`). A graph repeats the numbers
        of its capture unless the device's software can write others into it.

        Args:
            arguments: by the operators' names for them; every recorded operator that has an argument of a name takes it.

        Raises:
            CapabilityRefused: always, where it is not implemented.
            KeyError: nothing was captured under `key`.
        """
        raise CapabilityRefused(
            "a captured step takes arguments from the host",
            [f"{type(self).__name__} cannot write them into a graph"],
            hint="Implement GraphRunner.update, or plan no graphs",
        )

    @abstractmethod
    def replay(self, key: int) -> None:
        """Run the recorded work again; inputs and outputs are at the addresses of the capture. Raises KeyError."""

    @abstractmethod
    def resident_bytes(self) -> int:
        """Return the device bytes that the graphs hold."""

    @abstractmethod
    def reset(self) -> None:
        """Drop all graphs."""
