"""Launches of a kernel: what Triton works out anew for each of them is kept for those that are alike."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

_MAX_KEPT = 4096
"""Kinds of launches of one kernel that are kept; some kernels have one for each number of tokens."""
# Mapped over the tensors of each launch, so that no line of Python runs for each of them.
_address, _device, _storage = torch.Tensor.data_ptr, torch.Tensor.get_device, torch.Tensor.untyped_storage
_dtype, _nbytes = attrgetter("dtype"), torch.UntypedStorage.nbytes


class Launch:
    """One kernel with its compile-time arguments; a call launches it.

    For every launch Triton looks at all arguments to find the compiled kernel that serves them, which takes the host longer than most
    kernels take the device. Here Triton does so for the first launch of a kind, and the compiled kernel that it used serves the others
    of the kind. Launches are of one kind whose numbers and types of numbers are equal, and whose tensors have the same dtypes, devices
    and alignment: Triton tells no more apart than that.

    Everything is left to Triton in its interpreter, for tensors on the host, and while hooks watch launches, as profilers do.

    Attributes:
        constants: the compile-time arguments and launch options, by name.

    Args:
        kernel: a function of tensors, then numbers, then compile-time arguments.
    """

    def __init__(self, kernel: Any, constants: Mapping[str, Any]) -> None:
        from triton import knobs
        from triton.compiler import CompiledKernel
        from triton.runtime import JITFunction, driver

        self.constants = dict(constants)
        self._kernel = kernel
        # In the kernel's order: a compiled kernel is given them, and reads none.
        self._values = tuple(constants[name] for name in kernel.arg_names if name in constants)
        self._is_compiled = isinstance(kernel, JITFunction)
        self._compiled_kernel, self._drivers, self._hooks = CompiledKernel, driver, knobs.runtime
        self._by_storage = False
        self._kept: dict[tuple[Any, ...], tuple[Any, Any, Any]] = {}

    def __call__(self, grid: tuple[int, int, int], tensors: tuple[Tensor, ...], *numbers: float) -> None:
        """Launch the kernel on the current device, in its current stream.

        Args:
            grid: programs in each dimension.
            tensors, numbers: the kernel's arguments, in its order.
        """
        if not self._is_compiled or self._is_watched():
            self._kernel[grid](*tensors, *numbers, **self.constants)
            return
        driver = self._drivers.active
        device = driver.get_current_device()
        addresses, bits = [*map(_address, tensors)], 0
        for address in addresses:
            bits |= address
        kind = (
            device,
            tuple([address & 15 for address in addresses]) if bits & 15 else None,
            tuple(map(_nbytes, map(_storage, tensors))) if self._by_storage else None,
            numbers,
            # Without their types 1, 1.0 and True are the same.
            *map(type, numbers),
            *map(_dtype, tensors),
            *map(_device, tensors),
        )
        kept = self._kept.get(kind)
        if kept is None:
            self._launch_first(kind, grid, tensors, numbers)
            return
        run, function, metadata = kept
        stream = driver.get_current_stream(device)
        # For a tensor Triton asks the driver where kernels find it. On a device that is its address, which Triton takes as it is.
        run(*grid, stream, function, metadata, None, None, None, *addresses, *numbers, *self._values)

    def _launch_first(
        self, kind: tuple[Any, ...], grid: tuple[int, int, int], tensors: tuple[Tensor, ...], numbers: tuple[float, ...]
    ) -> None:
        """Let Triton launch, and keep the compiled kernel that it used."""
        used = self._kernel[grid](*tensors, *numbers, **self.constants)
        if not isinstance(used, self._compiled_kernel):
            return  # a hook kept it from being compiled
        if any(_device(tensor) < 0 for tensor in tensors):
            return  # whether kernels reach the host's memory, and where, differs from tensor to tensor
        backend = self._kernel.device_caches[kind[0]][3]
        by_storage = not getattr(backend, "supports_native_tensor_specialization", False)
        if by_storage != self._by_storage:
            # The compiler has rules of its own for tensors: how much memory a tensor is part of. The next launch of the kind is kept.
            self._by_storage = by_storage
            return
        if len(self._kept) >= _MAX_KEPT:
            self._kept.clear()
        self._kept[kind] = used.run, used.function, used.packed_metadata

    def _is_watched(self) -> bool:
        """Whether anything is to be called for each launch, or kernels are compiled in other ways than usual."""
        hooks = self._hooks
        # A hook is a chain of functions, by default without any; some set a function in its place.
        return bool(
            getattr(hooks.launch_enter_hook, "calls", hooks.launch_enter_hook)
            or getattr(hooks.launch_exit_hook, "calls", hooks.launch_exit_hook)
            or self._kernel.pre_run_hooks
            or hooks.debug
            or getattr(hooks, "add_stages_inspection_hook", None)
        )
