"""The CPU backend's collectives: gloo, and shared memory for sums and gathers of ranks on one host."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch.distributed import ProcessGroupGloo

from hardpoint.worker.ranks import TorchCollectives, local_address
from hardpoint_cpu.host_group import SLOT_BYTES, HostGroup, Offer, find

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.distributed_c10d import Store

    from hardpoint.interfaces.backend import Device

_MAX_RANKS_PER_HOST = 32


class CpuCollectives(TorchCollectives):
    """Ranks on hosts, over TCP; where all are on one host, the operations of every layer go through memory that they share."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._shared: HostGroup | None = None

    def _make_group(self, store: Store, rank: int, size: int, timeout: timedelta, host: str) -> ProcessGroupGloo:
        options = ProcessGroupGloo._Options()
        # The interface that leads to the others; gloo's own choice is what the host's name resolves to, if it does.
        options._devices = [ProcessGroupGloo.create_device(hostname=local_address(host))]
        options._timeout = timeout
        options._threads = 1
        return ProcessGroupGloo(store, rank, size, options)

    def start(self, rank: int, world_size: int, init_method: str, timeout: float) -> None:
        """Join the group; raises WorkerError when not all ranks are there within `timeout` seconds."""
        super().start(rank, world_size, init_method, timeout)
        if 1 < world_size <= _MAX_RANKS_PER_HOST:
            self._shared = self._share(rank, world_size, timeout)

    def _share(self, rank: int, size: int, timeout: float) -> HostGroup | None:
        """Return the memory that all ranks share; None, on all of them, where one cannot reach it."""
        offer = Offer(size) if rank == 0 else None
        numbers = torch.tensor(offer.numbers if offer is not None else [0] * 5)
        self.broadcast(numbers, 0)
        found = find(numbers.tolist(), size)
        group = HostGroup(found, rank, size, timeout) if found is not None else None
        if found is not None:
            os.close(found)
        reached = torch.tensor([int(group is not None)])
        self.all_reduce(reached)
        if offer is not None:
            offer.close()
        return group if int(reached) == size else None

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace the tensor by the sum over all ranks."""
        if self._shared is None:
            super().all_reduce(tensor)
            return
        dense = tensor.contiguous()
        for part in dense.view(-1).split(SLOT_BYTES // tensor.dtype.itemsize):
            first, second, *others = self._shared.exchange(part)
            torch.add(first, second, out=part)
            for other in others:
                part += other
        if dense is not tensor:
            tensor.copy_(dense)

    def all_gather(self, tensor: Tensor, axis: int) -> Tensor:
        """Return all ranks' tensors, which have one shape, joined along an axis, in the order of ranks."""
        if self._shared is None or tensor.nbytes > SLOT_BYTES:
            return super().all_gather(tensor, axis)
        parts = self._shared.exchange(tensor.contiguous().view(-1))
        return torch.cat([part.view(tensor.shape) for part in parts], dim=axis)

    def stop(self) -> None:
        """Leave the group; callable in any state."""
        self._shared = None
        super().stop()
