"""`pool` for devices without a pluggable allocator in torch: the results of torch's factory calls, put into an allocator's memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from hardpoint.interfaces.allocator import DeviceAllocator, Policy
from hardpoint.interfaces.dtypes import DType

if TYPE_CHECKING:
    from torch import Tensor

_FACTORIES = (
    "arange", "empty", "empty_like", "empty_permuted", "empty_strided", "eye", "full", "full_like", "linspace", "logspace",
    "ones", "ones_like", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm", "scalar_tensor",
    "tensor", "zeros", "zeros_like",
)  # fmt: skip


class _Thread(threading.local):
    """The modes that this thread is in, outermost first; torch calls all of them, and only the innermost one is to act."""

    def __init__(self) -> None:
        self.modes: list[object] = []


_thread = _Thread()


@contextmanager
def factory_call_pool(allocator: DeviceAllocator, tag: str, policy: Policy = Policy.PRESERVE) -> Iterator[None]:
    """Put what torch's factory calls of this thread make on the allocator's device into its memory.

    Covered are the functions of `torch` that make a tensor from sizes and values: `empty`, `zeros`, `rand`, `arange`, `tensor`, their
    `*_like` and the like. A tensor is made by torch and copied, so it has the values, strides, dtype and `requires_grad` that it
    would have had. Not covered are results of operators, of `Tensor.new_*` and of loaders, tensors passed as `out`, pinned or
    empty ones, other layouts and other devices: they are as without the pool.

    Blocks may be nested; the innermost one counts.

    Raises:
        DeviceOutOfMemory, DriverError: from the factory call, where the allocator has no memory for its result.
    """
    mode = _mode_class()(allocator, tag, policy)
    with mode:
        _thread.modes.append(mode)
        try:
            yield
        finally:
            _thread.modes.remove(mode)


@cache
def _mode_class() -> Any:
    """Return the class of the mode, which cannot be defined before torch is imported."""
    import torch
    from torch.overrides import TorchFunctionMode

    factories = frozenset(getattr(torch, name) for name in _FACTORIES)

    class FactoryCalls(TorchFunctionMode):
        def __init__(self, allocator: DeviceAllocator, tag: str, policy: Policy) -> None:
            super().__init__()
            self._allocator, self._tag, self._policy = allocator, tag, policy
            self._device = allocator.empty((0,), DType.UINT8, tag).device

        def __torch_function__(
            self,
            function: Any,
            types: Sequence[type],
            arguments: Sequence[Any] = (),
            named: dict[str, Any] | None = None,
        ) -> Any:
            named = named or {}
            made = function(*arguments, **named)
            acts = function in factories and _thread.modes[-1:] == [self]
            if not acts or named.get("out") is not None or named.get("pin_memory") or not self._covers(made):
                return made
            return self._moved(made)

        def _covers(self, made: Tensor) -> bool:
            return (
                type(made) is torch.Tensor
                and made.device == self._device
                and made.layout is torch.strided
                and not made.is_quantized
                and made.untyped_storage().nbytes() > 0
            )

        def _moved(self, made: Tensor) -> Tensor:
            size = made.untyped_storage().nbytes()
            home = self._allocator.empty((size,), DType.UINT8, self._tag, self._policy)
            with torch.no_grad():
                home.copy_(torch.empty(0, dtype=torch.uint8, device=made.device).set_(made.untyped_storage()))
                moved = torch.empty(0, dtype=made.dtype, device=made.device)
                offset = home.storage_offset() // made.itemsize + made.storage_offset()
                moved.set_(home.untyped_storage(), offset, made.shape, made.stride())
            return moved.requires_grad_(made.requires_grad)

    return FactoryCalls
