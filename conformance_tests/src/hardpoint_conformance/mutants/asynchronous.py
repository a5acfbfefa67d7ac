"""A device that is behind its queue, in a backend that computes at once: what crosses between host and device arrives late.

It is correct as it stands: a copy to the host holds nothing that is true before its event is waited for, and host memory that a copy to
the device still reads must not change. A fault replaces one part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from hardpoint.interfaces import Device
from hardpoint_conformance.mutants.derived import Methods, MethodsOf, derived
from hardpoint_conformance.target import Target

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

DEPTH = 2
"""Steps in flight of the device."""

_NOT_YET = -77


class Queue:
    """What the device has still to do, in order; an event of it as well.

    Nothing is done before something is waited for, and everything then: a device may be as slow as that, and as fast.
    """

    def __init__(self) -> None:
        self._work: list[Callable[[], None]] = []

    def add(self, work: Callable[[], None]) -> None:
        """Queue something."""
        self._work.append(work)

    def synchronize(self) -> None:
        """Do all that is queued."""
        work, self._work = self._work, []
        for one in work:
            one()


def queued(base: Any) -> Methods:
    """Return the methods of a platform whose device does what is queued when it is waited for, and no sooner."""

    def init(self: Any, device: Device) -> None:
        base.__init__(self, device)
        self._queue = Queue()

    def synchronize(self: Any) -> None:
        self._queue.synchronize()

    def record_event(self: Any) -> Queue:
        queue: Queue = self._queue
        return queue

    def upload(self: Any, array: npt.NDArray[np.generic]) -> Tensor:
        given = torch.from_numpy(array)
        pinned = self._pinned("up", given.shape, given.dtype)
        pinned.copy_(given)
        read = pinned.clone()

        def check() -> None:
            if not torch.equal(pinned, read):
                raise RuntimeError("host memory was written before the device had read it")

        self._queue.add(check)
        on_device: Tensor = read.clone()
        return on_device

    def download(self: Any, tensor: Tensor) -> Tensor:
        host: Tensor = self._pinned("down", tensor.shape, tensor.dtype)
        values = tensor.clone()
        host.fill_(_NOT_YET)

        def arrive() -> None:
            host.copy_(values)

        self._queue.add(arrive)
        return host

    def _pinned(self: Any, way: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    return {
        "__init__": init,
        "synchronize": synchronize,
        "record_event": record_event,
        "upload": upload,
        "download": download,
        "_pinned": _pinned,
    }


def asynchronous(target: Target, methods_of: MethodsOf = lambda base: {}) -> Target:
    """Return a target whose platform has steps in flight; `methods_of` replace those of its platform, given the correct class."""

    @cache
    def platform() -> Any:
        from hardpoint.interfaces import Platform

        base = Platform if target.descriptor.platform is None else target.descriptor.platform()
        correct: Any = derived(base, queued(base))
        correct.steps_in_flight = DEPTH
        return derived(correct, methods_of(correct))

    return target.with_descriptor(platform=platform)
