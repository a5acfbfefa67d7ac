"""The CPU backend's collectives: gloo, and shared memory for sums and gathers of ranks on one host."""

from __future__ import annotations

import os
import secrets
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
        group = ProcessGroupGloo(store, rank, size, options)
        _check_partners(group, store, rank, size)
        return group

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


def _check_partners(group: ProcessGroupGloo, store: Store, rank: int, size: int) -> None:
    """Raise RuntimeError where a connection leads to a process that is none of the ranks.

    gloo takes whoever connects to a rank's port with the right number for another rank. A rank says over each connection what it left in
    the store for that rank alone, which others cannot know where the store is private.
    """
    others = [other for other in range(size) if other != rank]
    said = {other: secrets.token_bytes(16) for other in others}
    for other in others:
        store.set(f"token/{rank}/{other}", said[other].hex())
    heard = {other: torch.empty(16, dtype=torch.uint8) for other in others}
    works = [group.recv([heard[other]], other, 0) for other in others]
    works += [group.send([torch.frombuffer(bytearray(said[other]), dtype=torch.uint8)], other, 0) for other in others]
    for work in works:
        work.wait()
    for other in others:
        if heard[other].numpy().tobytes().hex() != store.get(f"token/{other}/{rank}").decode():
            raise RuntimeError(f"what is connected as rank {other} is not that rank")
