"""Graphs that record calls: a replay makes the launches of the capture again, with the tensors and numbers of the capture."""

from __future__ import annotations

from collections.abc import Callable

from hardpoint.interfaces import Device, DeviceAllocator, GraphRunner


class RecordedCalls(GraphRunner):
    """Shows what metadata at fixed addresses are for: a recorded step knows the new batch by what is at these addresses alone."""

    def __init__(self, device: Device) -> None:
        self._steps: dict[int, Callable[[], None]] = {}

    def start(self, allocator: DeviceAllocator) -> None:
        """Take nothing: calls of the host need no memory of the device."""

    def capture(self, key: int, step: Callable[[], None]) -> None:
        """Run the step, and keep it."""
        step()
        self._steps[key] = step

    def replay(self, key: int) -> None:
        """Run the recorded step again; raises KeyError."""
        self._steps[key]()

    def resident_bytes(self) -> int:
        """Return 0."""
        return 0

    def reset(self) -> None:
        """Drop all graphs."""
        self._steps.clear()
