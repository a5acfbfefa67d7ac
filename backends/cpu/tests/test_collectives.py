"""The CPU backend's collectives: groups that share an address, time limits, and what their neighbours do not feel."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed

from hardpoint.interfaces import Device
from hardpoint.interfaces.errors import ConfigError, WorkerError
from hardpoint_cpu.collectives import CpuCollectives

DEVICE = Device(backend="cpu", index=0, name="cpu", torch_device="cpu", total_memory=1, driver_version="")


@pytest.fixture
def address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def on_ranks(size: int, method: str, work: Callable[[CpuCollectives, int], Any], timeout: float = 20.0) -> list[Any]:
    """Run `work` on every rank of a group, each in a thread."""

    def rank(number: int) -> Any:
        collectives = CpuCollectives(DEVICE)
        collectives.start(number, size, method, timeout)
        try:
            return work(collectives, number)
        finally:
            collectives.stop()

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(rank, range(size)))


def test_three_ranks_sum_gather_and_pass_on(address: str) -> None:
    def work(group: CpuCollectives, rank: int) -> Any:
        total = torch.full((2, 3), float(rank + 1))
        group.all_reduce(total)
        joined = group.all_gather(torch.full((2, 1), rank), 1)
        source = torch.full((2,), rank)
        group.broadcast(source, 2)
        passed = torch.full((2,), rank)
        if rank:
            group.receive(passed, rank - 1)
        if rank < 2:
            group.send(passed + 10, rank + 1)
        group.barrier()
        return total.tolist(), joined.tolist(), source.tolist(), passed.tolist()

    found = on_ranks(3, f"{address}/group", work)
    assert [passed for *_, passed in found] == [[0, 0], [10, 10], [20, 20]]
    for total, joined, source, _ in found:
        assert total == [[6.0] * 3] * 2
        assert joined == [[0, 1, 2]] * 2
        assert source == [2, 2]


def test_tensors_need_not_be_contiguous(address: str) -> None:
    def work(group: CpuCollectives, rank: int) -> Any:
        whole = torch.zeros(4, 6)
        columns = whole[:, 1:3]
        columns += rank + 1
        group.all_reduce(columns)
        return whole.sum(dim=0).tolist()

    assert on_ranks(2, f"{address}/group", work) == [[0, 12, 12, 0, 0, 0]] * 2


def test_groups_share_an_address_and_a_name_does_not_reach_another_group(address: str) -> None:
    def both(group: CpuCollectives, rank: int) -> Any:
        other = CpuCollectives(DEVICE)
        other.start(1 - rank, 2, f"{address}/other" + ("?served" if rank else ""), 20.0)
        first, second = torch.tensor([rank]), torch.tensor([10 * rank])
        group.broadcast(first, 1)
        other.broadcast(second, 1)
        other.stop()
        return first.item(), second.item()

    assert on_ranks(2, f"{address}/group", both) == [(1, 0), (1, 0)]


def test_an_address_that_is_served_already_needs_no_rank_that_serves_it(address: str) -> None:
    host, port = address.removeprefix("tcp://").split(":")
    server = torch.distributed.TCPStore(host, int(port), is_master=True, wait_for_workers=False)

    def work(group: CpuCollectives, rank: int) -> Any:
        value = torch.ones(1)
        group.all_reduce(value)
        return value.item()

    for name in ("one", "two"):
        assert on_ranks(2, f"{address}/{name}?served", work) == [2.0, 2.0]
    del server


def test_torchs_own_group_is_left_alone(address: str) -> None:
    on_ranks(2, f"{address}/group", lambda group, rank: None)
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_never_comes_is_reported_in_time(address: str, rank: int) -> None:
    collectives, start = CpuCollectives(DEVICE), time.perf_counter()
    with pytest.raises(WorkerError, match=f"rank {rank} of 2 cannot join"):
        collectives.start(rank, 2, f"{address}/group", 1.0)
    assert time.perf_counter() - start < 10
    collectives.stop()


def test_an_operation_without_the_others_ends_at_the_time_limit(address: str) -> None:
    done = threading.Event()

    def work(group: CpuCollectives, rank: int) -> Any:
        if rank == 0:
            try:
                with pytest.raises(WorkerError, match=r"rank 0 of 2 failed in all_reduce"):
                    group.all_reduce(torch.ones(3))
            finally:
                done.set()
        return done.wait(30)

    assert on_ranks(2, f"{address}/group", work, timeout=2.0) == [True, True]


def test_a_rank_in_no_group_says_so() -> None:
    collectives = CpuCollectives(DEVICE)
    collectives.stop()
    with pytest.raises(WorkerError, match="Call start first"):
        collectives.all_reduce(torch.ones(1))


def test_a_rank_outside_the_group_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="rank 2 is not one of 2"):
        CpuCollectives(DEVICE).start(2, 2, f"{address}/group", 1.0)
