"""The CPU allocator: books by tag, memory that goes back, typed refusals."""

from __future__ import annotations

import gc
import re
from pathlib import Path

import pytest
import torch

from hardpoint.interfaces import KV_CACHE, WEIGHTS, Device, DType, Policy, SleepPlan, SleepTier, TorchPoolScope
from hardpoint.interfaces.errors import DeviceOutOfMemory, MemoryFault
from hardpoint_cpu.allocator import CpuAllocator
from hardpoint_cpu.capabilities import capabilities
from hardpoint_cpu.driver import use_small_pages

DEVICE = Device(backend="cpu", index=0, name="host", torch_device="cpu")


@pytest.fixture
def allocator() -> CpuAllocator:
    return CpuAllocator(DEVICE)


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16, DType.UINT8, DType.INT64])
def test_empty_gives_an_aligned_contiguous_tensor(allocator: CpuAllocator, dtype: DType) -> None:
    tensor = allocator.empty((3, 5, 7), dtype)
    assert tensor.shape == (3, 5, 7)
    assert tensor.dtype == dtype.to_torch()
    assert tensor.is_contiguous()
    assert tensor.data_ptr() % 64 == 0
    tensor.fill_(1)
    assert tensor.sum().item() == 105


def test_memory_is_counted_by_tag_and_returns_with_the_last_view(allocator: CpuAllocator) -> None:
    kept = allocator.empty((1000,), DType.FLOAT32, KV_CACHE)
    view = allocator.empty((1 << 20,), DType.FLOAT32, WEIGHTS)[10:20]
    gc.collect()
    assert allocator.stats().tags[WEIGHTS].allocated == 4 << 20
    del view
    gc.collect()
    stats = allocator.stats()
    assert stats.tags[WEIGHTS].allocated == 0
    assert stats.allocated == kept.nbytes
    assert stats.peak_allocated == kept.nbytes + (4 << 20)


def test_an_impossible_size_is_out_of_memory(allocator: CpuAllocator) -> None:
    with pytest.raises(DeviceOutOfMemory, match="kv_cache"):
        allocator.empty((1 << 60,), DType.FLOAT32, KV_CACHE)
    assert allocator.stats().allocated == 0


def test_an_empty_shape_is_legal(allocator: CpuAllocator) -> None:
    assert allocator.empty((0, 4), DType.FLOAT32).shape == (0, 4)


def test_claims_are_those_of_the_descriptor(allocator: CpuAllocator) -> None:
    claimed = allocator.capabilities()
    assert claimed == capabilities(DEVICE).memory
    assert claimed.sleep_levels == {0, 1, 2}
    assert claimed.tiers == set(SleepTier)
    assert claimed.torch_pool is TorchPoolScope.FACTORY_CALLS


def test_pool_catches_factory_calls(allocator: CpuAllocator) -> None:
    with allocator.pool(WEIGHTS):
        tensor = torch.ones(1000)
    outside = torch.ones(1000)
    assert allocator.stats().tags[WEIGHTS].allocated == tensor.nbytes
    assert torch.equal(tensor, outside)


def test_a_closed_allocator_keeps_living_tensors_and_refuses_new_ones(allocator: CpuAllocator) -> None:
    tensor = allocator.empty((4,), DType.FLOAT32)
    allocator.close()
    tensor.fill_(3.0)
    assert tensor.tolist() == [3.0] * 4
    with pytest.raises(MemoryFault):
        allocator.empty((4,), DType.FLOAT32)


def test_memory_info_is_the_hosts(allocator: CpuAllocator) -> None:
    info = allocator.memory_info()
    assert 0 < info.free <= info.total


def _resident(tensor: torch.Tensor) -> int:
    """Return how many bytes of a tensor's mappings are in memory."""
    begin, found, inside = tensor.data_ptr(), 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if edges := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(edges[1], 16) < begin + tensor.nbytes and int(edges[2], 16) > begin
        elif inside and line.startswith("Rss:"):
            found += int(line.split()[1]) << 10
    return found


def test_a_kv_cache_takes_memory_for_what_is_written_also_after_a_wake(allocator: CpuAllocator) -> None:
    """Of each layer a few tokens, whose blocks lie MiBs apart. More than one chunk of the driver, so that ranges of several are found."""
    cache = allocator.empty((40, 4 << 20), DType.UINT8, KV_CACHE, Policy.DISCARD)
    for _ in range(2):
        cache[:, :4096] = 1
        assert 40 * 4096 <= _resident(cache) <= 4 * 40 * 4096
        allocator.sleep(SleepPlan())
        allocator.wake()


def test_other_tensors_at_the_address_of_a_kv_cache_are_not_on_small_pages(allocator: CpuAllocator) -> None:
    """Where the kernel gives no huge pages, the flag of the mapping is all that can be seen."""
    kept = []
    # Others in the process, a sanitizer's runtime too, may map memory in the place of the first caches.
    for _ in range(16):
        cache = allocator.empty((16 << 20,), DType.UINT8, KV_CACHE, Policy.DISCARD)
        assert "nh" in _flags(cache)
        address = cache.data_ptr()
        del cache
        gc.collect()
        kept.append(allocator.empty((16 << 20,), DType.UINT8, WEIGHTS))
        if kept[-1].data_ptr() == address:
            break
    else:
        pytest.fail("the kernel gives no address a second time: this shows nothing")
    assert "nh" not in _flags(kept[-1])


def _flags(tensor: torch.Tensor) -> list[str]:
    mapping = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if edges := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            mapping = line if int(edges[1], 16) <= tensor.data_ptr() < int(edges[2], 16) else ""
        elif mapping and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError("the tensor is in no mapping")


@pytest.mark.parametrize("offset", [4096, 1 << 40])
def test_small_pages_are_refused_where_nothing_is_reserved(allocator: CpuAllocator, offset: int) -> None:
    tensor = allocator.empty((16 << 20,), DType.UINT8)
    with pytest.raises(ValueError, match="not within one reservation"):
        use_small_pages(allocator.driver, tensor.data_ptr() + offset, 2 << 20)
