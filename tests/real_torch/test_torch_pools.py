"""Torch's own allocations in our memory, over a simulated driver: sleep, wake, errors, threads, devices.

Run a second time with a driver whose memory the host cannot touch, and whose copies run when they are waited for.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from typing import Any

import pytest
import torch
from torch import nn

from hardpoint.interfaces import DType, MemoryReport, Policy, SleepPlan, SleepTier, TorchPoolScope
from hardpoint.interfaces.allocator import KV_CACHE, WEIGHTS
from hardpoint.interfaces.errors import DeviceOutOfMemory, MemoryBusy

MIB = 1 << 20


class Model(nn.Module):
    """Large and small parameters, tied ones, a view, and buffers of both kinds."""

    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        self.large = nn.Linear(1024, 1536, device=device)  # 6 MiB
        self.small = nn.Linear(16, 16, device=device)
        self.tied = nn.Linear(16, 16, bias=False, device=device)
        self.tied.weight = self.small.weight
        # Not made on the device: for the meta device torch would import hundreds of modules, a second's work.
        self.register_buffer("scale", torch.arange(32.0).to(device or "cpu"))
        self.register_buffer("rotary", torch.arange(64.0).to(device or "cpu"), persistent=False)


def values(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies on the host of all parameters and buffers."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor.detach().cpu().clone() for name, tensor in named}


def addresses(module: nn.Module) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in [*module.named_parameters(), *module.named_buffers()]}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)), name


def level_one(tier: SleepTier, **more: Any) -> SleepPlan:
    return SleepPlan(policies={WEIGHTS: Policy.PRESERVE, KV_CACHE: Policy.DISCARD}, tier=tier, **more)


def segment(machine: Any, mib: int, index: int = 0) -> torch.Tensor:
    """Return a tensor for which torch takes a segment of exactly `mib` MiB; it rounds sizes up, in one build after adding some."""
    return torch.empty(mib * MIB - 512, dtype=torch.uint8, device=f"{machine.torch_type}:{index}")


def filled(machine: Any, mib: int, value: int, index: int = 0) -> torch.Tensor:
    """Return a tensor as `segment` does, with every byte set."""
    tensor = segment(machine, mib, index)
    tensor.copy_(torch.full(tensor.shape, value, dtype=torch.uint8))
    return tensor


def content(tensor: torch.Tensor) -> list[int]:
    """Return the least and the greatest byte in a tensor, or the one that they are: to sort all of them takes a second."""
    return sorted({int(byte) for byte in tensor.cpu().aminmax()})


def test_backend_finds_the_simulated_devices_and_torch_has_as_many(machine: Any) -> None:
    assert [device.simulated for device in machine.devices] == [True, True]
    assert machine.torch.device_count() == 2
    claimed = machine.descriptor.capabilities(machine.devices[0]).memory
    assert claimed == machine.allocator().capabilities()
    assert claimed.torch_pool is TorchPoolScope.ALL


def test_driver_runs_in_the_modes_asked_for(machine: Any) -> None:
    for mode in ("strict_host", "deferred"):
        asked = os.environ.get(f"HARDPOINT_SIM_{mode.upper()}", "0")
        assert machine.simulator.get(mode) == int(asked)


@pytest.mark.parametrize("tier", [SleepTier.HOST, SleepTier.DISK])
def test_model_and_kv_cache_sleep_and_wake(machine: Any, allocator: Any, tier: SleepTier, tmp_path: Any) -> None:
    source = Model()
    expected = values(source)
    with allocator.pool(WEIGHTS):
        model = source.to(f"{machine.torch_type}:0")
    with allocator.pool(KV_CACHE, Policy.DISCARD):
        cache = segment(machine, 48)
    before = addresses(model) | {"cache": cache.data_ptr()}
    books = allocator.stats().tags
    assert books[KV_CACHE].allocated >= 48 * MIB
    assert books[WEIGHTS].allocated >= 6 * MIB
    awake = machine.used()

    report: MemoryReport = allocator.sleep(level_one(tier, disk_directory=str(tmp_path)))
    slept = books[KV_CACHE].mapped + books[WEIGHTS].mapped
    assert awake - machine.used() == report.unmapped == slept
    assert report.free_after - report.free_before == slept
    assert machine.torch.mem_get_info(0)[0] == allocator.memory_info().free
    assert report.preserved >= 6 * MIB
    assert set(report.tiers) == {tier}

    partial = allocator.wake([WEIGHTS])
    assert partial.still_asleep == {KV_CACHE}
    assert awake - machine.used() == books[KV_CACHE].mapped
    assert_same(values(model), expected)

    allocator.wake()
    assert machine.used() == awake
    assert addresses(model) | {"cache": cache.data_ptr()} == before
    assert_same(values(model), expected)
    cache[:5].copy_(torch.arange(5, dtype=torch.uint8))
    assert cache[:5].tolist() == [0, 1, 2, 3, 4]
    assert model.tied.weight is model.small.weight


def test_parameters_are_copied_from_the_host_into_a_model_made_empty(machine: Any, allocator: Any) -> None:
    source = Model()
    with allocator.pool(WEIGHTS):
        model = Model("meta").to_empty(device=f"{machine.torch_type}:0")
    model.tied.weight = model.small.weight
    model.load_state_dict(source.state_dict())
    model.rotary.copy_(source.rotary)
    allocator.sleep(level_one(SleepTier.HOST))
    allocator.wake()
    assert_same(values(model), values(source))


def test_use_while_asleep_is_torchs_error_and_the_process_goes_on(machine: Any, tolerant_allocator: Any) -> None:
    origin = torch.randn(MIB)
    with tolerant_allocator.pool(WEIGHTS):
        tensor = origin.to(f"{machine.torch_type}:0")
    tolerant_allocator.sleep(SleepPlan())
    with pytest.raises(RuntimeError):
        tensor.cpu()
    with pytest.raises(RuntimeError):
        tensor.copy_(origin)
    tolerant_allocator.wake()
    assert torch.equal(tensor.cpu(), origin)


def test_empty_gives_tensors_of_the_device(machine: Any, allocator: Any) -> None:
    tensor = allocator.empty((3, 1000), DType.BFLOAT16, WEIGHTS)
    assert tensor.device == torch.device(machine.torch_type, 0)
    assert (tensor.shape, tensor.dtype) == ((3, 1000), torch.bfloat16)
    origin = torch.randn(3, 1000).bfloat16()
    tensor.copy_(origin)
    assert torch.equal(tensor.cpu(), origin)
    again = torch.empty_like(tensor).copy_(tensor)
    assert torch.equal(again.cpu(), origin)
    allocator.sleep(SleepPlan())
    assert torch.equal(allocator.read_backup(tensor), origin)
    allocator.wake()
    assert torch.equal(tensor[1:].cpu(), origin[1:])


def test_elastic_tensor_grows_in_place_on_the_device(machine: Any, allocator: Any) -> None:
    tensor = allocator.empty((4, MIB), DType.UINT8, KV_CACHE, max_rows=32)
    origin = torch.arange(4 * MIB, dtype=torch.int64).to(torch.uint8).view(4, MIB)
    tensor.copy_(origin)
    grown = allocator.resize(tensor, 24)
    assert (grown.shape, grown.data_ptr()) == ((24, MIB), tensor.data_ptr())
    assert torch.equal(grown[:4].cpu(), origin)
    grown[23].copy_(origin[0])
    shrunk = allocator.resize(grown, 2)
    assert torch.equal(shrunk.cpu(), origin[:2])


def test_module_is_materialised_on_the_device(machine: Any, allocator: Any) -> None:
    source, module = Model(), Model("meta")
    allocator.materialise(module)
    assert {tensor.device.type for tensor in [*module.parameters(), *module.buffers()]} == {machine.torch_type}
    assert module.tied.weight is module.small.weight
    module.load_state_dict(source.state_dict())
    with torch.no_grad():
        module.rotary.copy_(source.rotary)
    allocator.sleep(SleepPlan())
    allocator.wake()
    assert_same(values(module), values(source))


def test_module_is_adopted_from_torchs_memory_and_from_the_host(machine: Any, allocator: Any) -> None:
    for origin in ("cpu", f"{machine.torch_type}:0"):
        module = Model().to(origin)
        expected = values(module)
        allocator.adopt(module)
        assert {tensor.device.type for tensor in module.parameters()} == {machine.torch_type}
        assert module.tied.weight is module.small.weight
        allocator.sleep(SleepPlan())
        allocator.wake()
        assert_same(values(module), expected)


def test_second_sleep_of_unchanged_weights_copies_nothing(machine: Any, allocator: Any) -> None:
    with allocator.pool(WEIGHTS):
        model = Model().to(f"{machine.torch_type}:0")
    expected = values(model)
    plan = SleepPlan(keep=frozenset({WEIGHTS}))
    first = allocator.sleep(plan)
    allocator.wake()
    second = allocator.sleep(plan)
    allocator.wake()
    assert first.preserved > 0
    assert (second.preserved, second.skipped) == (0, first.preserved)
    assert_same(values(model), expected)

    with torch.no_grad():
        model.small.weight.copy_(torch.full((16, 16), 7.0))
    allocator.mark_written([WEIGHTS])
    assert allocator.sleep(plan).preserved == first.preserved
    allocator.wake()
    assert_same(values(model), expected | {"small.weight": torch.full((16, 16), 7.0)})


def test_failing_creation_is_torchs_out_of_memory_error(machine: Any, allocator: Any) -> None:
    before = machine.used()
    machine.fail_create(times=-1)
    with allocator.pool(KV_CACHE), pytest.raises(torch.OutOfMemoryError):
        segment(machine, 64)
    with pytest.raises(DeviceOutOfMemory):
        allocator.empty((64 * MIB,), DType.UINT8, KV_CACHE)
    machine.simulator.clear_faults()
    assert machine.used() == before
    with allocator.pool(KV_CACHE):
        tensor = segment(machine, 64)
    assert machine.used() - before == 64 * MIB
    del tensor


def test_one_failing_creation_is_tried_again_by_torch(machine: Any, allocator: Any) -> None:
    machine.fail_create(times=1)
    with allocator.pool(KV_CACHE):
        tensor = segment(machine, 64)
    tensor[:3].copy_(torch.tensor([1, 2, 3], dtype=torch.uint8))
    assert tensor[:3].tolist() == [1, 2, 3]


def test_more_than_the_device_has_is_torchs_out_of_memory_error(machine: Any, allocator: Any) -> None:
    with allocator.pool(KV_CACHE), pytest.raises(torch.OutOfMemoryError):
        segment(machine, machine.simulator.capacity // MIB + 2)


def test_failing_wake_keeps_the_bytes_and_can_be_repeated(machine: Any, allocator: Any) -> None:
    with allocator.pool(WEIGHTS):
        model = Model().to(f"{machine.torch_type}:0")
    expected = values(model)
    allocator.sleep(SleepPlan())
    asleep = machine.used()
    machine.fail_create(times=-1)
    with pytest.raises(DeviceOutOfMemory):
        allocator.wake()
    assert machine.used() == asleep
    machine.simulator.clear_faults()
    allocator.wake()
    assert_same(values(model), expected)


def test_blocks_nest_and_the_innermost_counts(machine: Any, allocator: Any) -> None:
    def allocated(tag: str) -> int:
        books = allocator.stats().tags.get(tag)
        return books.allocated if books else 0

    kept = []
    with allocator.pool("outer"):
        kept.append(segment(machine, 32))
        with allocator.pool("inner"):
            kept.append(segment(machine, 64))
            with allocator.pool("outer"):
                kept.append(segment(machine, 32))
        kept.append(segment(machine, 32))
        with allocator.pool("outer", Policy.DISCARD):
            kept.append(segment(machine, 32))
    assert (allocated("outer"), allocated("inner")) == (128 * MIB, 64 * MIB)
    report = allocator.sleep(SleepPlan())
    assert (report.preserved, report.discarded) == (160 * MIB, 32 * MIB)
    allocator.wake()
    kept.append(segment(machine, 32))
    assert (allocated("outer"), allocated("inner")) == (128 * MIB, 64 * MIB)


def test_pools_of_two_engines_nest(machine: Any, allocator: Any) -> None:
    other = machine.allocator()
    with allocator.pool(WEIGHTS):
        with other.pool(WEIGHTS):
            second = segment(machine, 64)
        first = segment(machine, 32)
    assert allocator.stats().tags[WEIGHTS].allocated == 32 * MIB
    assert other.stats().tags[WEIGHTS].allocated == 64 * MIB
    allocator.sleep(SleepPlan())
    second[:2].copy_(torch.tensor([5, 6], dtype=torch.uint8))
    assert second[:2].tolist() == [5, 6]
    del first, second
    other.close()


def test_threads_do_not_exchange_tags(machine: Any, allocator: Any) -> None:
    meet = threading.Barrier(4)
    kept: list[torch.Tensor] = []
    problems: list[BaseException] = []

    def allocate(tag: str, mib: int) -> None:
        try:
            for _ in range(3):
                with allocator.pool(tag):
                    meet.wait(240)
                    kept.append(segment(machine, mib))
                    meet.wait(240)
        except BaseException as problem:
            problems.append(problem)
            meet.abort()

    work = [("a", 22), ("b", 24), ("c", 26), ("a", 22)]
    threads = [threading.Thread(target=allocate, args=one) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    books = {tag: one.allocated for tag, one in allocator.stats().tags.items() if one.allocated}
    assert books == {"a": 6 * 22 * MIB, "b": 3 * 24 * MIB, "c": 3 * 26 * MIB}


def test_another_thread_in_no_block_allocates_from_torchs_memory(machine: Any, allocator: Any) -> None:
    kept: list[torch.Tensor] = []
    with allocator.pool(WEIGHTS):
        thread = threading.Thread(target=lambda: kept.append(segment(machine, 64)))
        thread.start()
        thread.join()
    assert len(kept) == 1
    assert allocator.stats().allocated == 0


def test_block_left_by_another_thread_is_refused(machine: Any, allocator: Any) -> None:
    block = allocator.pool(WEIGHTS)
    block.__enter__()
    found: list[BaseException] = []

    def leave() -> None:
        try:
            block.__exit__(None, None, None)
        except MemoryBusy as problem:
            found.append(problem)

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    assert "has not entered it" in str(found[0])
    block.__exit__(None, None, None)


def test_one_context_may_be_entered_again_and_by_several_threads(machine: Any, allocator: Any) -> None:
    context = allocator.pool(WEIGHTS)
    kept: list[torch.Tensor] = []

    def allocate() -> None:
        with context:
            kept.append(segment(machine, 22))

    with context:
        thread = threading.Thread(target=allocate)
        thread.start()
        thread.join()
        allocate()
        kept.append(segment(machine, 24))
    kept.append(segment(machine, 26))
    assert allocator.stats().tags[WEIGHTS].allocated == 68 * MIB


def test_sleep_within_a_block_of_the_tag_is_refused(machine: Any, allocator: Any) -> None:
    with allocator.pool(WEIGHTS):
        tensor = segment(machine, 32)
        used = machine.used()
        with pytest.raises(MemoryBusy, match="weights"):
            allocator.sleep(SleepPlan())
        allocator.sleep(SleepPlan(tags=frozenset({KV_CACHE})))
        assert machine.used() == used
    assert allocator.sleep(SleepPlan()).preserved == 32 * MIB
    del tensor


def test_allocation_while_the_tag_is_asleep_is_awake_memory(machine: Any, allocator: Any) -> None:
    with allocator.pool(WEIGHTS):
        first = torch.ones(1000).to(f"{machine.torch_type}:0")
    allocator.sleep(SleepPlan())
    with allocator.pool(WEIGHTS):
        second = torch.full((1000,), 2.0).to(f"{machine.torch_type}:0")
    assert second.cpu().unique().tolist() == [2.0]
    allocator.wake()
    assert first.cpu().unique().tolist() == [1.0]
    assert second.cpu().unique().tolist() == [2.0]


@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_torch_goes_on_between_the_phases_of_a_sleep(machine: Any, allocator: Any, ending: str) -> None:
    """What torch allocates or frees meanwhile has nothing to do with the segments that are going, whether they go or stay."""
    with allocator.pool(WEIGHTS):
        with pytest.raises(MemoryBusy, match="weights"):
            allocator.begin_sleep(SleepPlan())
        first = torch.ones(1000).to(f"{machine.torch_type}:0")
        freed = torch.ones(3000).to(f"{machine.torch_type}:0")
    transaction = allocator.begin_sleep(SleepPlan())
    with allocator.pool(WEIGHTS):
        second = torch.full((1000,), 2.0).to(f"{machine.torch_type}:0")
    del freed
    assert second.cpu().unique().tolist() == [2.0]
    report = getattr(transaction, ending)()
    if ending == "commit":
        assert report.preserved > 0
        allocator.begin_wake().commit()
    assert first.cpu().unique().tolist() == [1.0]
    assert second.cpu().unique().tolist() == [2.0]
    allocator.sleep(SleepPlan())
    allocator.wake()
    assert first.cpu().unique().tolist() == [1.0]
    assert second.cpu().unique().tolist() == [2.0]


def test_tensors_may_be_freed_while_asleep(machine: Any, allocator: Any) -> None:
    before = machine.used()
    with allocator.pool(WEIGHTS):
        kept, freed = filled(machine, 32, 1), filled(machine, 32, 2)
    allocator.sleep(SleepPlan())
    del freed
    gc.collect()
    allocator.trim()
    assert allocator.stats().tags[WEIGHTS].allocated == 32 * MIB
    allocator.wake()
    assert machine.used() - before == 32 * MIB
    assert content(kept) == [1]


def test_torchs_cache_and_snapshot_can_be_used_while_asleep(machine: Any, allocator: Any) -> None:
    with allocator.pool(WEIGHTS):
        model = Model().to(f"{machine.torch_type}:0")
    expected = values(model)
    allocator.sleep(SleepPlan())
    machine.torch.empty_cache()
    assert machine.torch.memory.memory_snapshot()
    assert machine.torch.memory_allocated(0) > 6 * MIB
    machine.torch.synchronize()
    allocator.wake()
    assert_same(values(model), expected)


def test_segments_without_tensors_go_back(machine: Any, allocator: Any) -> None:
    before = machine.used()
    with allocator.pool(WEIGHTS):
        kept, temporary = filled(machine, 32, 1), segment(machine, 64)
    del temporary
    gc.collect()
    assert machine.used() - before == 96 * MIB
    allocator.trim()
    assert machine.used() - before == 32 * MIB
    with allocator.pool(WEIGHTS):
        again = segment(machine, 64)
    del again
    gc.collect()
    assert allocator.sleep(SleepPlan()).preserved == 32 * MIB
    allocator.wake()
    assert content(kept) == [1]
    del kept
    gc.collect()
    allocator.trim()
    assert machine.used() == before


def test_questions_about_pools_take_no_references(machine: Any, allocator: Any) -> None:
    """Torch's description of one pool takes some of its id's numbers, which are freed while in use once there were 256 pools."""
    with allocator.pool(WEIGHTS):
        weights = filled(machine, 2, 7)
    before = sys.getrefcount(True)
    for _ in range(200):
        allocator.trim()
    assert sys.getrefcount(True) > before - 100
    assert content(weights) == [7]


def test_tensors_outlive_their_allocator(machine: Any) -> None:
    machine.torch.empty_cache()
    before = machine.used()
    allocator = machine.allocator()
    with allocator.pool(WEIGHTS):
        tensor = filled(machine, 32, 3)
    allocator.close()
    assert content(tensor) == [3]
    del tensor
    gc.collect()
    machine.torch.empty_cache()
    assert machine.used() == before


def test_two_devices_sleep_apart(machine: Any, allocator: Any) -> None:
    second = machine.allocator(1)
    current = machine.torch.current_device()
    with allocator.pool(WEIGHTS), second.pool(WEIGHTS):
        one, two = filled(machine, 22, 1), filled(machine, 24, 2, index=1)
        with allocator.pool(KV_CACHE):
            cache = segment(machine, 48)
        three = filled(machine, 26, 3, index=1)
    assert allocator.stats().tags[WEIGHTS].allocated == 22 * MIB
    assert allocator.stats().tags[KV_CACHE].allocated == 48 * MIB
    assert second.stats().tags[WEIGHTS].allocated == 50 * MIB
    used = machine.used(0), machine.used(1)
    second.sleep(SleepPlan())
    assert (machine.used(0), machine.used(1)) == (used[0], used[1] - 50 * MIB)
    assert content(one) == [1]
    second.wake()
    assert content(two) == [2]
    assert content(three) == [3]
    assert machine.torch.current_device() == current
    assert second.empty((4,), DType.FLOAT32).device.index == 1
    del cache, two, three
    second.close()


def test_work_of_a_side_stream_is_done_before_memory_goes(machine: Any, allocator: Any) -> None:
    origin = torch.randn(8 * MIB).pin_memory()
    with allocator.pool(WEIGHTS):
        tensor = torch.empty(8 * MIB, device=f"{machine.torch_type}:0")
    with machine.torch.stream(machine.torch.Stream()):
        tensor.copy_(origin, non_blocking=True)
    allocator.sleep(SleepPlan())
    allocator.wake()
    assert torch.equal(tensor.cpu(), origin)
