"""Torch's side: tensors over pool memory keep it alive, have every type, and outlive who made them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

from hardpoint.interfaces import Device, DType, LiveRanges, Policy, SleepPlan
from hardpoint.interfaces.errors import DeviceOutOfMemory, InvalidAllocation
from hardpoint_cpu.allocator import CpuAllocator

from .support import PRELUDE, run_program, runs_cleanly

WITH_TORCH = (
    PRELUDE
    + """
import torch
from hardpoint.interfaces import Device, DType
from hardpoint_cpu.allocator import CpuAllocator
"""
)


@pytest.fixture
def allocator() -> Iterator[CpuAllocator]:
    made = CpuAllocator(Device(backend="cpu", index=0, name="host", torch_device="cpu"))
    yield made
    made.close()


def allocated(allocator: CpuAllocator) -> int:
    gc.collect()
    return allocator.stats().allocated


def test_tensors_die_asleep_and_awake(allocator: CpuAllocator) -> None:
    tensors = [allocator.empty((1 << 18,), DType.FLOAT32, "weights") for _ in range(6)]
    for index, tensor in enumerate(tensors):
        tensor.fill_(index)
    allocator.sleep(SleepPlan())
    del tensors[::2], tensor
    assert allocated(allocator) == 3 << 20
    allocator.wake()
    assert [tensor[0].item() for tensor in tensors] == [1, 3, 5]


def test_tensors_die_in_a_progress_callback(allocator: CpuAllocator) -> None:
    """Fact 36: the collector runs in the middle of the operation and finds cycles that own tensors."""

    class Node:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor, self.me = tensor, self

    kept = allocator.empty((1 << 20,), DType.FLOAT32)
    kept.fill_(3.0)
    gc.disable()
    try:
        gone = [weakref.ref(Node(allocator.empty((1 << 20,), DType.FLOAT32))) for _ in range(4)]
        assert all(node() is not None for node in gone)
        allocator.sleep(SleepPlan(progress=lambda done, in_all: gc.collect() and None))
    finally:
        gc.enable()
    assert all(node() is None for node in gone)
    assert allocated(allocator) == 4 << 20
    allocator.wake()
    assert bool((kept == 3.0).all())


def test_elastic_tensors_grow_and_shrink_in_place(allocator: CpuAllocator) -> None:
    cache = allocator.empty((4, 1 << 19), DType.FLOAT32, "kv_cache", max_rows=64)
    cache.copy_(torch.arange(4.0).view(4, 1).expand(4, 1 << 19))
    grown = allocator.resize(cache, 10)
    assert grown.data_ptr() == cache.data_ptr()
    assert grown.shape == (10, 1 << 19)
    assert grown[:4, 7].tolist() == [0.0, 1.0, 2.0, 3.0]
    del cache
    shrunk = allocator.resize(grown, 2)
    assert shrunk[:, -1].tolist() == [0.0, 1.0]
    assert allocated(allocator) == 2 << 21
    allocator.sleep(SleepPlan())
    allocator.wake()
    assert shrunk[:, -1].tolist() == [0.0, 1.0]
    with pytest.raises(InvalidAllocation):
        allocator.resize(shrunk, 65)
    with pytest.raises(InvalidAllocation):
        allocator.resize(allocator.empty((4, 4), DType.FLOAT32), 2)


def test_a_tensor_at_its_most_rows_can_shrink(allocator: CpuAllocator) -> None:
    cache = allocator.empty((8, 1 << 19), DType.FLOAT32, "kv_cache", max_rows=8)
    assert allocator.resize(cache, 1).shape == (1, 1 << 19)


@pytest.mark.parametrize(
    ("shape", "max_rows"),
    [((-1, -1), None), ((0, -1), None), ((-3,), None), ((), 4), ((0, 4), 4), ((5, 4), 4), ((4, 0), 8)],
    ids=str,
)
def test_an_impossible_shape_is_refused(allocator: CpuAllocator, shape: tuple[int, ...], max_rows: int | None) -> None:
    with pytest.raises(InvalidAllocation):
        allocator.empty(shape, DType.FLOAT32, max_rows=max_rows)


def test_a_shape_beyond_every_address_is_out_of_memory(allocator: CpuAllocator) -> None:
    for shape in ((1 << 40, 1 << 40), (1 << 62,)):
        with pytest.raises(DeviceOutOfMemory):
            allocator.empty(shape, DType.FLOAT32)


def test_live_ranges_of_a_tensor_are_kept(allocator: CpuAllocator) -> None:
    cache = allocator.empty((1 << 20,), DType.FLOAT32, "kv_cache", Policy.PRESERVE)
    cache.copy_(torch.arange(float(1 << 20)))
    report = allocator.sleep(SleepPlan(live=(LiveRanges(cache.data_ptr(), [(4096, 8192)]),)))
    assert report.preserved == 8192
    allocator.wake()
    assert torch.equal(cache[1024:3072], torch.arange(1024.0, 3072.0))


def test_use_while_asleep_is_a_fault_and_not_other_bytes() -> None:
    """Fact 47, on the CPU: the process dies at the access."""
    program = """
    allocator = CpuAllocator(Device(backend="cpu", index=0, name="host", torch_device="cpu"))
    tensor = allocator.empty((1 << 20,), DType.FLOAT32)
    tensor.fill_(1.0)
    allocator.sleep(SleepPlan())
    print(tensor[5].item())
    """
    ended = run_program(program, prelude=WITH_TORCH)
    assert ended.returncode in (-11, 1)
    assert ended.returncode != 1 or "AddressSanitizer" in ended.stderr
    assert ended.stdout == ""


@pytest.mark.parametrize("state", ["awake", "asleep"])
def test_the_interpreter_ends_cleanly_with_living_tensors(state: str) -> None:
    """Modules keep tensors beyond the end of everything else."""
    program = f"""
    allocator = CpuAllocator(Device(backend="cpu", index=0, name="host", torch_device="cpu"))
    torch.kept = allocator.empty((1 << 20,), DType.FLOAT32)
    torch.block = allocator.empty((100,), DType.FLOAT32)
    if "{state}" == "asleep":
        allocator.sleep(SleepPlan())
    """
    runs_cleanly(program, prelude=WITH_TORCH)


def test_flags_are_bytes_of_the_pool(allocator: CpuAllocator) -> None:
    flags = allocator.empty((1000,), DType.UINT8).view(torch.bool)
    flags.copy_(torch.arange(1000) % 3 == 0)
    allocator.sleep(SleepPlan())
    allocator.wake()
    assert torch.equal(flags, torch.arange(1000) % 3 == 0)
