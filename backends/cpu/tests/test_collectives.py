"""The CPU backend's collectives: groups that share an address, time limits, and what their neighbours do not feel."""

from __future__ import annotations

import gc
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch.distributed.distributed_c10d import PrefixStore

from hardpoint.interfaces import Device
from hardpoint.interfaces.errors import ConfigError, WorkerError
from hardpoint_cpu import collectives
from hardpoint_cpu.collectives import CpuCollectives
from hardpoint_cpu.host_group import SLOT_BYTES, Offer, find
from tests.warm_processes import WarmPopen

DEVICE = Device(backend="cpu", index=0, name="cpu", torch_device="cpu", total_memory=1, driver_version="")


@pytest.fixture
def address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def on_ranks(size: int, method: str, work: Callable[[CpuCollectives, int], Any], timeout: float = 120.0) -> list[Any]:
    """Run `work` on every rank of a group, each in a thread."""

    def rank(number: int) -> Any:
        group = CpuCollectives(DEVICE)
        group.start(number, size, method, timeout)
        try:
            return work(group, number)
        finally:
            group.stop()

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


def test_an_address_is_served_on_its_own_interface_and_free_again_afterwards(address: str) -> None:
    port = int(address.rpartition(":")[2])

    def work(group: CpuCollectives, rank: int) -> Any:
        listening = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines() if " 0A " in line]
        group.barrier()
        return [one.partition(":")[0] for one in listening if one.endswith(f":{port:04X}")]

    assert on_ranks(2, f"{address}/group", work) == [["0100007F"]] * 2
    gc.collect()
    socket.create_server(("127.0.0.1", port)).close()


def test_an_address_that_another_program_serves_is_refused(address: str) -> None:
    with (
        socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))),
        pytest.raises(WorkerError, match="in use"),
    ):
        CpuCollectives(DEVICE).start(0, 2, f"{address}/group", 2.0)


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
    group, start = CpuCollectives(DEVICE), time.perf_counter()
    with pytest.raises(WorkerError, match=f"rank {rank} of 2 cannot join"):
        group.start(rank, 2, f"{address}/group", 1.0)
    assert time.perf_counter() - start < 60
    group.stop()


def test_an_operation_without_the_others_ends_at_the_time_limit(address: str) -> None:
    done = threading.Event()

    def work(group: CpuCollectives, rank: int) -> Any:
        if rank == 0:
            try:
                with pytest.raises(WorkerError, match="rank 1 did not come within 4 s"):
                    group.all_reduce(torch.ones(3))
            finally:
                done.set()
        return done.wait(240)

    assert on_ranks(2, f"{address}/group", work, timeout=4.0) == [True, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_sums_of_any_size_and_type_are_exact(address: str, dtype: torch.dtype) -> None:
    longest = 2 * SLOT_BYTES // dtype.itemsize + 3

    def numbers(rank: int, length: int) -> torch.Tensor:
        return (torch.arange(length) * (rank + 3) % 61 - 20 * rank).to(dtype)

    given = {length: torch.stack([numbers(rank, length) for rank in range(3)]) for length in (0, 1, 7, longest)}
    sums = {length: sum(values) for length, values in given.items()}

    def work(group: CpuCollectives, rank: int) -> Any:
        found = []
        for length, all_values in given.items():
            values = all_values[rank].clone()
            group.all_reduce(values)
            found.append(torch.equal(values, sums[length]))
        return [*found, torch.equal(group.all_gather(given[longest][rank, None], 0), given[longest])]

    assert on_ranks(3, f"{address}/group", work) == [[True] * 5] * 3


def test_a_slot_is_not_written_while_another_rank_reads_it(address: str) -> None:
    count, length = 300, 5000

    def work(group: CpuCollectives, rank: int) -> int:
        pauses = random.Random(rank)
        wrong = 0
        for turn in range(count):
            values = torch.full((length,), float(turn + rank))
            group.all_reduce(values)
            wrong += int((values != 2 * turn + 1).sum())
            if pauses.random() < 0.02:
                time.sleep(0.001)
        return wrong

    assert on_ranks(2, f"{address}/group", work) == [0, 0]


@pytest.mark.parametrize("blind", [0, 1])
def test_ranks_that_cannot_share_memory_use_the_network(
    address: str, blind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank that does not reach the memory is enough."""
    tries = iter(range(2))
    monkeypatch.setattr(
        collectives, "find", lambda numbers, size: None if next(tries) == blind else find(numbers, size)
    )

    def work(group: CpuCollectives, rank: int) -> Any:
        value = torch.tensor([float(rank + 1)])
        group.all_reduce(value)
        return group._shared is None, value.item(), group.all_gather(value, 0).tolist()

    assert on_ranks(2, f"{address}/group", work) == [(True, 3.0, [3.0, 3.0])] * 2


def test_memory_of_another_host_is_not_opened() -> None:
    offer = Offer(2)
    try:
        mine = find(offer.numbers, 2)
        assert mine is not None
        os.close(mine)
        for index in range(len(offer.numbers)):
            other = list(offer.numbers)
            # The process after this one may be a thread of it, and has its files then.
            other[index] += 1 if index else 1 << 40
            assert find(other, 2) is None
        assert find(offer.numbers, 3) is None
    finally:
        offer.close()


def test_shared_memory_is_gone_when_the_ranks_have_left(address: str) -> None:
    def shared() -> int:
        gc.collect()
        return Path("/proc/self/maps").read_text().count("hardpoint-ranks")

    def work(group: CpuCollectives, rank: int) -> int:
        group.barrier()
        count = shared()
        group.barrier()
        return count

    descriptors = len(os.listdir("/proc/self/fd"))
    assert on_ranks(2, f"{address}/group", work) == [2, 2]
    assert shared() == 0
    assert len(os.listdir("/proc/self/fd")) <= descriptors


DIES = """
import os, signal, sys, torch
from hardpoint.interfaces import Device
from hardpoint_cpu.collectives import CpuCollectives
group = CpuCollectives(Device("cpu", 0, "cpu", "cpu"))
group.start(1, 2, sys.argv[1], 300.0)
group.all_reduce(torch.ones(1))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_rank_is_reported_long_before_the_time_limit(address: str, tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text(DIES)
    process = WarmPopen([sys.executable, "-P", str(tmp_path / "dies.py"), f"{address}/group"])
    group = CpuCollectives(DEVICE)
    try:
        group.start(0, 2, f"{address}/group", 300.0)
        group.all_reduce(torch.ones(1))
        start = time.perf_counter()
        with pytest.raises(WorkerError, match="the process of rank 1 has ended"):
            group.all_reduce(torch.ones(1))
        assert time.perf_counter() - start < 120
        with pytest.raises(WorkerError, match="failed before"):
            group.all_reduce(torch.ones(1))
    finally:
        group.stop()
        process.kill()
        process.wait()


def test_ranks_of_one_host_meet_in_a_file(tmp_path: Path) -> None:
    def work(group: CpuCollectives, rank: int) -> Any:
        total = torch.tensor([float(rank)])
        group.all_reduce(total)
        return total.item()

    for group in ("one", "two"):
        assert on_ranks(3, f"file://{tmp_path}/store#{group}", work) == [3.0] * 3


def test_a_process_that_connects_in_place_of_a_rank_is_found_out(tmp_path: Path) -> None:
    def impostor() -> None:
        store = PrefixStore("group", torch.distributed.FileStore(str(tmp_path / "store"), -1))
        options = torch.distributed.ProcessGroupGloo._Options()
        options._devices = [torch.distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        joined = torch.distributed.ProcessGroupGloo(store, 1, 2, options)
        store.set("token/1/0", bytes(16).hex())
        token = torch.ones(16, dtype=torch.uint8)
        said, heard = joined.send([token], 0, 0), joined.recv([token.clone()], 0, 0)
        said.wait()
        heard.wait()
        found.wait(240)

    found = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(impostor)
        with pytest.raises(WorkerError, match="what is connected as rank 1 is not that rank"):
            CpuCollectives(DEVICE).start(0, 2, f"file://{tmp_path}/store#group", 20.0)
        found.set()
        done.result()


def test_a_rank_in_no_group_says_so() -> None:
    group = CpuCollectives(DEVICE)
    group.stop()
    with pytest.raises(WorkerError, match="Call start first"):
        group.all_reduce(torch.ones(1))


def test_a_rank_outside_the_group_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="rank 2 is not one of 2"):
        CpuCollectives(DEVICE).start(2, 2, f"{address}/group", 1.0)
