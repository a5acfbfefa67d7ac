"""Timing of work on a torch device, and the two limits that a device's speed is held against: copying and matrix products."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

Work = Callable[[], object]

GRAPH_CLASSES = {"cuda": "CUDAGraph", "npu": "NPUGraph"}
"""By the type of torch's device, which is "cuda" for ROCm as well."""

WARM_UPS = 3


class Clock:
    """Times work on one device: by the device's own events, and on the host's processor by its clock."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = None if device.type == "cpu" else getattr(torch, device.type)
        if self._module is not None:
            self._module.set_device(device)

    @property
    def is_host(self) -> bool:
        """Whether the device is the host's processor."""
        return self._module is None

    def synchronize(self) -> None:
        """Wait until the device has done all its work."""
        if self._module is not None:
            self._module.synchronize()

    def seconds(self, work: Work, repeats: int, *, captured: bool = False) -> list[float]:
        """Return the seconds of each of `repeats` runs, after some that are not counted.

        Args:
            captured: record the work in a graph and time its replays, so that the host's part of launching is left out. The work
                must be one that can be captured; on the host's processor it runs as it is.
        """
        for _ in range(WARM_UPS):
            work()
        self.synchronize()
        if self._module is None:
            return [_on_host(work) for _ in range(repeats)]
        run = self._capture(work) if captured else work
        run()
        marks = [self._module.Event(enable_timing=True) for _ in range(repeats + 1)]
        marks[0].record()
        for mark in marks[1:]:
            run()
            mark.record()
        self.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in pairwise(marks)]

    def _capture(self, work: Work) -> Work:
        stream = self._module.Stream()
        stream.wait_stream(self._module.current_stream())
        with self._module.stream(stream):
            work()
        self._module.current_stream().wait_stream(stream)
        graph: Any = getattr(self._module, GRAPH_CLASSES[self.device.type])()
        with self._module.graph(graph):
            work()
        replay: Work = graph.replay
        return replay


def copy_bandwidth(clock: Clock, size: int, repeats: int) -> float:
    """Return bytes per second of the best of several copies within the device's memory, bytes read and bytes written counted.

    Args:
        size: bytes of each of two buffers; several times the device's caches.
    """
    source = torch.randint(256, (size,), dtype=torch.uint8, device=clock.device)
    target = torch.empty_like(source)
    return 2 * size / min(clock.seconds(lambda: target.copy_(source), repeats))


def matrix_peak(clock: Clock, width: int, repeats: int) -> float:
    """Return the operations per second of the best of several products of random square bfloat16 matrices."""
    left, right = (torch.randn(width, width, device=clock.device).to(torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)
    return float(2 * width**3 / min(clock.seconds(lambda: torch.matmul(left, right, out=out), repeats)))


def _on_host(work: Work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
