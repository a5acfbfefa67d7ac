"""What torch gives for any device that it has a module for: the platform, and graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch

from hardpoint.interfaces.allocator import GRAPHS, DeviceAllocator
from hardpoint.interfaces.backend import Device
from hardpoint.interfaces.errors import BackendUnavailable, CapabilityRefused, GraphCaptureFailed
from hardpoint.interfaces.graphs import GraphRunner
from hardpoint.interfaces.platform import Event, Platform
from hardpoint.memory import TorchPoolAllocator

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    from hardpoint.memory import TorchGraphPool


class TorchPlatform(Platform):
    """A device that torch drives through one of its modules.

    Work is queued on the device's current stream. Torch counts what it allocates by itself, the allocator what is in its own memory, and
    the driver what kernels and libraries take: a profile adds them up.

    Over a simulated driver everything works that copies and maps memory. Nothing computes: the first step raises CapabilityRefused.
    """

    compiles = True
    steps_in_flight = 1

    def _module(self) -> Any:
        """Return torch's module for the device. A vendor whose module is not torch's own imports it here."""
        return torch.get_device_module(self._device.torch_device)

    @property
    def _index(self) -> int:
        return torch.device(self._device.torch_device).index or 0

    def start(self, threads: int | None) -> None:
        """Make the device current; raises BackendUnavailable where torch does not see it."""
        module, index = self._module(), self._index
        count = module.device_count() if module.is_available() else 0
        if index >= count:
            raise BackendUnavailable(
                f"torch cannot use device {index} of backend '{self._device.backend}'",
                found=f"torch {torch.__version__} sees {count} such devices" + _told_by_init(module),
                hint="Install torch's build for this device and its driver, and look for environment variables that hide devices",
            )
        self.make_current()

    def make_current(self) -> None:
        """Make the device current in this thread."""
        self._module().set_device(self._index)

    def check_computes(self) -> None:
        """Raise CapabilityRefused over a simulated driver."""
        if self._device.simulated:
            raise CapabilityRefused(
                f"a step cannot be computed on {self._device.name}",
                [f"the driver of backend '{self._device.backend}' is a simulation: it has memory and computes nothing"],
                hint="Use a real device, or the backend cpu",
            )

    def synchronize(self) -> None:
        """Wait until the device has done all its work."""
        self._module().synchronize(self._index)

    def record_event(self) -> Event | None:
        """Return the point that the current stream has come to."""
        event: Event = self._module().current_stream(self._index).record_event()
        return event

    def empty_host(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return pinned memory, which torch rounds up to a power of two: for what is small, or soon used again."""
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def upload(self, array: npt.NDArray[np.generic]) -> Tensor:
        """Queue a copy to the device by way of pinned memory, which torch does not give away before the copy is done."""
        given = torch.from_numpy(array)
        pinned = self.empty_host(given.shape, given.dtype)
        pinned.copy_(given)
        return pinned.to(self._device.torch_device, non_blocking=True)

    def download(self, tensor: Tensor) -> Tensor:
        """Queue a copy to pinned memory of its own."""
        host = self.empty_host(tensor.shape, tensor.dtype)
        host.copy_(tensor, non_blocking=True)
        return host

    def peak_growth(self, step: Callable[[], object], allocator: DeviceAllocator) -> int:
        """Run `step`; return torch's growth at its peak, and what kernels and libraries took outside of torch and allocator.

        Torch's memory counts by whole segments, as the device loses it.
        """
        module, index = self._module(), self._index
        self.synchronize()
        module.empty_cache()
        module.reset_peak_memory_stats(index)
        free, reserved, books = allocator.memory_info().free, module.memory_reserved(index), allocator.stats()
        step()
        self.synchronize()
        after = allocator.stats()
        in_torch = module.max_memory_reserved(index) - reserved
        in_books = max(after.peak_allocated - books.peak_allocated, 0)
        kept = module.memory_reserved(index) - reserved + after.allocated - books.allocated
        elsewhere = max(free - allocator.memory_info().free - kept, 0)
        module.empty_cache()
        return int(in_torch + in_books + elsewhere)

    def release(self) -> None:
        """Let torch give back what it keeps of the device's memory and of pinned memory."""
        self._module().empty_cache()
        empty_host_cache = getattr(torch.accelerator, "empty_host_cache", None)
        if empty_host_cache is not None and torch.accelerator.is_available():
            empty_host_cache()


def _told_by_init(module: Any) -> str:
    """Return why torch's module for a device cannot be started (a driver too old for it, say), as the rest of a sentence."""
    try:
        module.init()
    except Exception as error:
        return f": {(str(error).splitlines() or [type(error).__name__])[0]}"
    return ""


class TorchGraphRunner(GraphRunner):
    """Graphs that torch captures on a stream of its own, their memory in one pool with the tag `graphs`.

    Each step runs once before it is captured, into the same pool: kernels are compiled and libraries started then, and the capture
    finds memory there.
    """

    def __init__(self, device: Device) -> None:
        self._device = torch.device(device.torch_device)
        self._index = self._device.index or 0
        self._backend = device.backend
        self._graphs: dict[int, Any] = {}
        self._allocator: TorchPoolAllocator | None = None
        self._memory: TorchGraphPool | None = None
        self._stream: Any = None
        self._outside = 0

    def start(self, allocator: DeviceAllocator) -> None:
        """Take the graphs' memory from an allocator whose pools are torch's; raises CapabilityRefused for another one."""
        if not isinstance(allocator, TorchPoolAllocator):
            raise CapabilityRefused(
                f"the graphs of backend '{self._backend}' cannot take their memory from this allocator",
                [f"{type(allocator).__name__} has no torch pools"],
                hint="Derive the backend's allocator from TorchPoolAllocator",
            )
        self._allocator = allocator

    def capture(self, key: int, step: Callable[[], None]) -> None:
        """Run `step` once and record its device work under `key`; raises what `step` or torch's capture raises, and keeps nothing then."""
        module, allocator = self._torch(), self._allocator
        if allocator is None:
            raise GraphCaptureFailed("nothing can be captured before the runner is started", hint="Call start first")
        if self._memory is None:
            self._memory = allocator.graph_pool(GRAPHS)
            self._stream = module.Stream(self._index)
            # Torch has few streams, and gives them out in turn: what lies in another engine's pool would go with that engine.
            self._forget_workspaces()
        memory, stream = self._memory, self._stream
        # Torch does it before a capture, too late for what is measured, and not for want of memory while a pool is in use.
        module.empty_cache()
        stream.wait_stream(module.current_stream(self._index))
        with memory.allocating(), module.stream(stream):
            step()
        module.synchronize(self._index)
        free, mapped = allocator.memory_info().free, memory.mapped_bytes()
        graph = self._new_graph()
        # Relaxed: new segments are mapped by driver calls that the stricter modes forbid while capturing. The current stream is
        # entered once more, because torch's context leaves the capture's in force when its beginning fails.
        try:
            with (
                memory.capturing(),
                _no_garbage_collection(),
                module.stream(module.current_stream(self._index)),
                module.graph(graph, pool=memory.id, stream=stream, capture_error_mode="relaxed"),
            ):
                self._record(graph, step)
        except BaseException:
            graph.reset()  # it uses the pool, and the error's frames hold it
            self._forget_capture(memory)
            raise
        module.synchronize(self._index)
        self._outside += max(free - allocator.memory_info().free - (memory.mapped_bytes() - mapped), 0)
        self._graphs[key] = graph

    def replay(self, key: int) -> None:
        """Run the recorded work again, in the order of the current stream; raises KeyError."""
        self._graphs[key].replay()

    def resident_bytes(self) -> int:
        """Return what is mapped of the graphs' pool, and what the driver took for their launches."""
        return self._outside + (self._memory.mapped_bytes() if self._memory is not None else 0)

    def reset(self) -> None:
        """Drop all graphs and their memory."""
        if self._memory is None:
            return
        self._torch().synchronize(self._index)
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()
        self._forget_workspaces()
        self._memory.close()
        self._memory, self._stream, self._outside = None, None, 0

    def _torch(self) -> Any:
        """Return torch's module for the device."""
        return torch.get_device_module(self._device)

    def _new_graph(self) -> Any:
        """Return an empty graph. Default: of the class that torch's module names after the type of its devices."""
        return getattr(self._torch(), f"{self._device.type.upper()}Graph")()

    def _record(self, graph: Any, step: Callable[[], None]) -> None:
        """Run a step while `graph` captures. Default: that alone."""
        step()

    def _forget_capture(self, memory: TorchGraphPool) -> None:
        """Take back what torch notes when a capture into a pool begins, where it could not be ended.

        Torch gives up at the first call that fails: later captures would ask this one, which is gone, for each allocation.
        """
        end, release = self._in_torch("endAllocateToPool"), self._in_torch("releasePool")
        if end is None or release is None:
            return
        with suppress(RuntimeError):  # it had come to that
            end(self._index, memory.id)
        if memory.users() > 1 + len(self._graphs):
            release(self._index, memory.id)

    def _forget_workspaces(self) -> None:
        """Let libraries drop what they keep for each stream, the capture's among them, and take from the pool in effect."""
        forget = self._in_torch("clearCublasWorkspaces")
        if forget is not None:
            forget()

    def _in_torch(self, name: str) -> Any:
        """Return a function that torch's builds have for some types of devices, None for others."""
        return getattr(torch._C, f"_{self._device.type}_{name}", None)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Hold the collector off: what it finds may be device memory, whose end waits for the device, and a capture does not bear that."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
