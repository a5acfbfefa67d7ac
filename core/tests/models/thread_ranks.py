"""Ranks as threads of one process, and collectives between them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import TypeVar

import torch
from torch import Tensor

from hardpoint.interfaces import Collectives
from hardpoint.models import ParallelRank, Ranks

T = TypeVar("T")

_SECONDS = 240.0


class ThreadGroup:
    """Where threads exchange tensors; a thread that fails breaks it for all."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=_SECONDS)
        self.given: list[Tensor] = [torch.empty(0)] * size
        self.sent: dict[tuple[int, int], Queue[Tensor]] = {
            (source, goal): Queue() for source in range(size) for goal in range(size)
        }


class ThreadCollectives(Collectives):
    """One thread's collectives; counts its operations."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self._group, self._rank = group, rank
        self.calls: list[str] = []

    def start(self, rank: int, world_size: int, init_method: str, timeout: float) -> None:
        raise NotImplementedError("threads have met already")

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        group = self._group
        group.given[self._rank] = tensor.clone()
        group.barrier.wait()
        all_given = list(group.given)
        group.barrier.wait()
        return all_given

    def all_reduce(self, tensor: Tensor) -> None:
        self.calls.append("all_reduce")
        tensor.copy_(torch.stack(self._exchange(tensor)).sum(dim=0))

    def all_gather(self, tensor: Tensor, axis: int) -> Tensor:
        self.calls.append("all_gather")
        return torch.cat(self._exchange(tensor), dim=axis)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        self.calls.append("broadcast")
        tensor.copy_(self._exchange(tensor)[source])

    def send(self, tensor: Tensor, rank: int) -> None:
        self.calls.append("send")
        self._group.sent[self._rank, rank].put(tensor.clone())

    def receive(self, tensor: Tensor, rank: int) -> None:
        self.calls.append("receive")
        tensor.copy_(self._group.sent[rank, self._rank].get(timeout=_SECONDS))

    def barrier(self) -> None:
        self._group.barrier.wait()

    def stop(self) -> None:
        self._group.barrier.abort()


def run_ranks(tensor_size: int, stages: int, work: Callable[[ParallelRank, Ranks], T]) -> list[T]:
    """Run `work` for every rank, each in a thread; return what each gave, in the order of ranks."""
    tensor = [ThreadGroup(tensor_size) for _ in range(stages)]
    pipeline = [ThreadGroup(stages) for _ in range(tensor_size)]

    def rank(number: int) -> T:
        stage, place = divmod(number, tensor_size)
        ranks = Ranks(
            ThreadCollectives(tensor[stage], place) if tensor_size > 1 else None,
            ThreadCollectives(pipeline[place], stage) if stages > 1 else None,
        )
        try:
            return work(ParallelRank(place, tensor_size, stage, stages), ranks)
        except BaseException:
            for group in (*tensor, *pipeline):
                group.barrier.abort()
            raise

    with ThreadPoolExecutor(tensor_size * stages) as threads:
        return list(threads.map(rank, range(tensor_size * stages)))
