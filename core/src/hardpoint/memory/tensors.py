"""The torch side of an allocator, the same on every device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from hardpoint.interfaces.allocator import (
    BUFFERS,
    WEIGHTS,
    DeviceAllocator,
    FileExtent,
    MemoryReport,
    MemoryStats,
    MemoryTransaction,
    Policy,
    SleepPlan,
    TagStats,
)
from hardpoint.interfaces.dtypes import DType
from hardpoint.interfaces.errors import CapabilityRefused

if TYPE_CHECKING:
    from torch import Tensor, nn


BESIDE_THE_CONTRACT = frozenset({"pool", "read_backup", "resize", "sleep", "wake"})
"""What users of memory alone find convenient, and the engine does not call."""


class Accounting:
    """Bytes handed out, by tag; safe to use from several threads and from finalizers."""

    def __init__(self) -> None:
        # A finalizer may run inside any allocation of the same thread, hence re-entrant.
        self._lock = threading.RLock()
        self._tags: dict[str, tuple[int, int]] = {}
        self._allocated = 0
        self._peak = 0

    def add(self, tag: str, size: int) -> None:
        """Count one allocation of `size` bytes."""
        with self._lock:
            allocated, count = self._tags.get(tag, (0, 0))
            self._tags[tag] = (allocated + size, count + 1)
            self._allocated += size
            self._peak = max(self._peak, self._allocated)

    def remove(self, tag: str, size: int) -> None:
        """Count one allocation of `size` bytes as returned."""
        with self._lock:
            allocated, count = self._tags[tag]
            self._tags[tag] = (allocated - size, count - 1)
            self._allocated -= size

    def stats(self) -> MemoryStats:
        """Return the books; what is handed out counts as mapped."""
        with self._lock:
            tags = {
                tag: TagStats(allocated=allocated, mapped=allocated, backed_up=0, allocations=count)
                for tag, (allocated, count) in self._tags.items()
            }
            return MemoryStats(tags=tags, peak_allocated=self._peak)


class TensorAllocator(DeviceAllocator, partial=True, beside=BESIDE_THE_CONTRACT):
    """`materialise` and `adopt` over an allocator's `empty`; sleep is refused, for memory that cannot be given back.

    Beside the contract, which is what the engine calls, it has what users of memory alone find convenient: `sleep` and `wake` in one call,
    `pool`, `resize`, `read_backup`.

    Tensors are re-homed by storage, so that tied parameters and views stay tied and views.
    """

    def pool(self, tag: str, policy: Policy = Policy.PRESERVE) -> AbstractContextManager[None]:
        """Return a context in which torch allocates from this memory, as far as `capabilities().torch_pool` says. Refused."""
        raise _refusal("let torch allocate from a pool")

    def declare_source(self, tensor: Tensor, source: Sequence[FileExtent] | Callable[[], None]) -> None:
        """Nothing to remember: this memory never sleeps."""

    def mark_written(self, tags: Sequence[str]) -> None:
        """Nothing to void: there are no backups."""

    def prepare_sleep(self, plan: SleepPlan) -> None:
        """Refused."""
        raise _refusal("sleep")

    def begin_sleep(self, plan: SleepPlan) -> MemoryTransaction:
        """Refused."""
        raise _refusal("sleep")

    def begin_wake(self, tags: Sequence[str] | None = None) -> MemoryTransaction:
        """Refused."""
        raise _refusal("wake")

    def sleep(self, plan: SleepPlan) -> MemoryReport:
        """Give device memory back as planned: `begin_sleep` and its commit."""
        return self.begin_sleep(plan).commit()

    def wake(self, tags: Sequence[str] | None = None) -> MemoryReport:
        """Map memory again and restore what was preserved: `begin_wake` and its commit."""
        return self.begin_wake(tags).commit()

    def discard_backup(self, tags: Sequence[str]) -> None:
        """Refused."""
        raise _refusal("discard a backup")

    def read_backup(self, tensor: Tensor) -> Tensor:
        """Return a copy, on the host, of a sleeping tensor's bytes, as a tensor of the same shape and dtype. Refused.

        Raises MemoryFault when it is awake or its bytes were discarded, BackupCorrupt.
        """
        raise _refusal("read a backup")

    def resize(self, tensor: Tensor, rows: int) -> Tensor:
        """Grow or shrink an elastic tensor along its first axis, in place, and return it in its new extent. Refused.

        Rows that stay keep their bytes. Older tensors over the memory must not be used beyond it. Raises DeviceOutOfMemory,
        InvalidAllocation for one that is not elastic or more than its `max_rows`, MemoryAsleep, CapabilityRefused.
        """
        raise _refusal("resize a tensor in place")

    def materialise(self, module: nn.Module, tag: str = WEIGHTS) -> None:
        """Give every meta parameter and buffer of a module uninitialised memory, ties and views kept."""
        self._rehome(module, tag, lambda tensor: tensor.is_meta, copy=False)

    def adopt(self, module: nn.Module, tag: str = WEIGHTS) -> None:
        """Move a module's parameters and buffers into this memory, values, ties and views kept."""
        self._rehome(module, tag, lambda tensor: not tensor.is_meta, copy=True)

    def _rehome(self, module: nn.Module, tag: str, wanted: Callable[[Tensor], bool], *, copy: bool) -> None:
        import torch

        storages: dict[int, tuple[object, Tensor]] = {}
        replaced: dict[int, Tensor] = {}
        originals: list[Tensor] = []
        for owner, name, tensor, persistent in _tensors(module):
            if id(tensor) in replaced:
                _assign(owner, name, replaced[id(tensor)])
                continue
            if not wanted(tensor):
                continue
            originals.append(tensor)  # keeps its id from being used again
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in storages:
                home = self.empty((storage.nbytes(),), DType.UINT8, tag if persistent else BUFFERS)
                if copy:
                    home.copy_(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage))
                storages[key] = (storage, home)
            home = storages[key][1]
            view = torch.empty(0, dtype=tensor.dtype, device=home.device)
            offset = home.storage_offset() // tensor.itemsize + tensor.storage_offset()
            view.set_(home.untyped_storage(), offset, tensor.shape, tensor.stride())
            replaced[id(tensor)] = _in_place_of(tensor, view)
            _assign(owner, name, replaced[id(tensor)])


def _refusal(what: str) -> CapabilityRefused:
    return CapabilityRefused(
        f"this allocator cannot {what}", ("its memory cannot be given back",), hint="`hardpoint doctor` lists what can"
    )


def _tensors(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor, bool]]:
    """Yield (owner, name, tensor, persistent) of every parameter and buffer; a tied one once for each owner."""
    for owner in module.modules():
        for name, parameter in list(owner._parameters.items()):
            if parameter is not None:
                yield owner, name, parameter, True
        for name, buffer in list(owner._buffers.items()):
            if buffer is not None:
                yield owner, name, buffer, name not in owner._non_persistent_buffers_set


def _in_place_of(old: Tensor, view: Tensor) -> Tensor:
    """Return what stands for `old` from now on; a parameter that stays on its device keeps its identity."""
    import torch

    if not isinstance(old, torch.nn.Parameter):
        return view
    if old.is_meta or old.device != view.device:
        return torch.nn.Parameter(view, requires_grad=old.requires_grad)
    old.data = view
    return old


def _assign(owner: nn.Module, name: str, tensor: Tensor) -> None:
    table = owner._parameters if name in owner._parameters else owner._buffers
    table[name] = tensor  # type: ignore[assignment]
