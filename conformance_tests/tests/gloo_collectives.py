"""Collectives over torch.distributed's gloo, and known-bad ones, for the test of the suite's own tests."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from hardpoint.interfaces import Collectives
from hardpoint.interfaces.errors import WorkerError


class Gloo(Collectives):
    """Right in every operation."""

    def start(self, rank: int, world_size: int, init_method: str, timeout: float) -> None:
        try:
            dist.init_process_group(
                "gloo",
                init_method=init_method,
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout),
            )
        except (RuntimeError, ValueError) as error:
            raise WorkerError("not all ranks came", found=str(error)) from error

    def all_reduce(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor)

    def all_gather(self, tensor: Tensor, axis: int) -> Tensor:
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, tensor)
        return torch.cat(parts, dim=axis)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        dist.broadcast(tensor, source)

    def send(self, tensor: Tensor, rank: int) -> None:
        dist.send(tensor, rank)

    def receive(self, tensor: Tensor, rank: int) -> None:
        dist.recv(tensor, rank)

    def barrier(self) -> None:
        dist.barrier()

    def stop(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


class Faulty(Gloo):
    """Wrong in most of them: a sum of one half, an axis and a source that are not looked at, a barrier that lets everyone pass."""

    def all_reduce(self, tensor: Tensor) -> None:
        first = tensor.reshape(-1)[: tensor.numel() // 2].clone()
        dist.all_reduce(first)
        tensor.reshape(-1)[: tensor.numel() // 2] = first

    def all_gather(self, tensor: Tensor, axis: int) -> Tensor:
        return super().all_gather(tensor, 0)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        dist.broadcast(tensor, 0)

    def barrier(self) -> None:
        pass


def gloo(rank: int) -> tuple[Collectives, str]:
    """Make a rank's right collectives."""
    return Gloo(), "cpu"


def faulty(rank: int) -> tuple[Collectives, str]:
    """Make a rank's wrong collectives."""
    return Faulty(), "cpu"
