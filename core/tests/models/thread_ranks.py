"""Ranks as threads of one process, and collectives between them.

One rank works at a time, until it waits for others: threads that contend for the interpreter at every operator take twice the time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import Queue
from typing import TypeVar

import torch
from torch import Tensor

from hardpoint.interfaces import Collectives
from hardpoint.models import ParallelRank, Ranks

T = TypeVar("T")

_SECONDS = 240.0


class ThreadGroup:
    """Where threads exchange tensors; a thread that fails breaks it for all. `turn` is held by the one that works."""

    def __init__(self, size: int, turn: threading.Lock) -> None:
        self.turn = turn
        self.barrier = threading.Barrier(size, timeout=_SECONDS)
        # In turns: who gives for the next exchange but one has met all others at the next, when they had taken from this one.
        self.given: list[list[Tensor]] = [[torch.empty(0)] * size for _ in range(2)]
        self.sent: dict[tuple[int, int], Queue[Tensor]] = {
            (source, goal): Queue() for source in range(size) for goal in range(size)
        }

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Leave the turn to the others."""
        self.turn.release()
        try:
            yield
        finally:
            self.turn.acquire()

    def meet(self) -> None:
        """Wait for all others."""
        with self.waiting():
            self.barrier.wait()


class ThreadCollectives(Collectives):
    """One thread's collectives; counts its operations."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self._group, self._rank = group, rank
        self._exchanges = 0
        self.calls: list[str] = []

    def start(self, rank: int, world_size: int, init_method: str, timeout: float) -> None:
        raise NotImplementedError("threads have met already")

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        given = self._group.given[self._exchanges % 2]
        self._exchanges += 1
        given[self._rank] = tensor.clone()
        self._group.meet()
        return list(given)

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
        with self._group.waiting():
            received = self._group.sent[rank, self._rank].get(timeout=_SECONDS)
        tensor.copy_(received)

    def barrier(self) -> None:
        self._group.meet()

    def stop(self) -> None:
        self._group.barrier.abort()


def run_ranks(tensor_size: int, stages: int, work: Callable[[ParallelRank, Ranks], T]) -> list[T]:
    """Run `work` for every rank, each in a thread; return what each gave, in the order of ranks."""
    turn = threading.Lock()
    tensor = [ThreadGroup(tensor_size, turn) for _ in range(stages)]
    pipeline = [ThreadGroup(stages, turn) for _ in range(tensor_size)]

    def rank(number: int) -> T:
        stage, place = divmod(number, tensor_size)
        ranks = Ranks(
            ThreadCollectives(tensor[stage], place) if tensor_size > 1 else None,
            ThreadCollectives(pipeline[place], stage) if stages > 1 else None,
        )
        try:
            with turn:
                return work(ParallelRank(place, tensor_size, stage, stages), ranks)
        except BaseException:
            for group in (*tensor, *pipeline):
                group.barrier.abort()
            raise

    with ThreadPoolExecutor(tensor_size * stages) as threads:
        return list(threads.map(rank, range(tensor_size * stages)))
