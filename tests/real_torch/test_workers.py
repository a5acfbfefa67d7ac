"""A worker on a real build of torch over its simulated driver: everything up to the first step that would compute."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from hardpoint import LLM
from hardpoint.interfaces import (
    GRAPHS,
    KV_CACHE,
    WEIGHTS,
    DType,
    Policy,
    SequenceSampling,
    SleepPlan,
    SleepTier,
    StepInput,
    WeightWrite,
    WorkerConfig,
    WorkerContext,
)
from hardpoint.interfaces.errors import CapabilityRefused
from hardpoint.worker.dummy_batches import dummy_batch
from hardpoint_conformance.tiny_model import Model, Shape, tiny_model
from hardpoint_conformance.worker_bench import sleep, wake

MIB = 1 << 20
BLOCKS = 256


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model(Shape(hidden=256, intermediate=512, heads=4, kv_heads=2, head_dim=64, vocab=4096))


@pytest.fixture
def started(machine: Any, model: Model) -> Iterator[tuple[Any, dict[str, torch.Tensor]]]:
    """A worker with its weights loaded and its KV cache allocated, and the tensors that it holds on the device."""
    held: dict[str, torch.Tensor] = {}
    allocator = machine.descriptor.allocator()

    class Noting(allocator):  # type: ignore[misc, valid-type]
        def materialise(self, module: Any, tag: str = WEIGHTS) -> None:
            super().materialise(module, tag)
            held.update(module.named_parameters())
            held.update(module.named_buffers())

        def empty(self, shape: Any, dtype: Any, tag: str = "default", *more: Any, **named: Any) -> Any:
            tensor = super().empty(shape, dtype, tag, *more, **named)
            if tag == KV_CACHE:
                held[KV_CACHE] = tensor
            return tensor

    descriptor = replace(machine.descriptor, allocator=lambda: Noting)
    config = WorkerConfig(
        model=model.path, dtype=DType.BFLOAT16, swap_space=4 * MIB, max_num_batched_tokens=256, max_num_seqs=8
    )
    worker = descriptor.worker()(WorkerContext(descriptor, machine.devices[1], config))
    broken_before = len(machine.broken_rules())
    used_before, pinned_before = machine.used(1), machine.simulator.stats().host_bytes
    worker.start()
    worker.load()
    worker.initialize_kv(BLOCKS, 2)
    yield worker, held
    held.clear()
    worker.shutdown()
    assert machine.used(1) == used_before
    assert machine.simulator.stats().host_bytes <= pinned_before
    assert machine.broken_rules()[broken_before:] == []


def content(held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu().clone() for name, tensor in held.items() if name != KV_CACHE}


def addresses(held: dict[str, torch.Tensor]) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in held.items()}


def test_weights_and_cache_lie_in_the_devices_memory(started: Any, machine: Any, model: Model) -> None:
    worker, held = started
    cache = held[KV_CACHE]
    assert cache.device == torch.device(machine.devices[1].torch_device)
    assert {tensor.device for tensor in held.values()} == {cache.device}
    embedding = held["model.embed_tokens.weight"].cpu().float()
    assert torch.equal(embedding, model.weights["model.embed_tokens.weight"].to(torch.bfloat16).float())
    books = worker.status().memory.tags
    block_size = machine.descriptor.capabilities(machine.devices[1]).attention.default_block_size
    assert books[KV_CACHE].allocated == cache.nbytes == BLOCKS * 2 * 2 * block_size * 2 * 64 * 2
    assert books[WEIGHTS].allocated == sum(
        tensor.nbytes for name, tensor in held.items() if name != KV_CACHE and not name.startswith("model.rotary.")
    )
    assert torch.get_default_dtype() is torch.float32


def test_kv_cache_is_sized_from_the_devices_memory_without_a_step(started: Any, machine: Any) -> None:
    worker, _ = started
    profile = worker.profile()
    assert profile.total == 1 << 30
    assert profile.used == machine.used(1)
    assert profile.kv_bytes == int(0.9 * profile.total) - profile.used - 8 * 4096 * 4


@pytest.mark.parametrize("tier", [SleepTier.HOST, SleepTier.SOURCE, SleepTier.DISK])
def test_sleep_gives_the_memory_back_and_wake_restores_bytes_and_addresses(
    started: Any, machine: Any, tier: SleepTier, tmp_path: Any
) -> None:
    worker, held = started
    before, places = content(held), addresses(held)
    policies = {WEIGHTS: Policy.PRESERVE, KV_CACHE: Policy.DISCARD}
    report = sleep(worker, SleepPlan(policies=policies, tier=tier, disk_directory=str(tmp_path)))
    assert report.unmapped >= sum(tensor.nbytes for tensor in held.values())
    assert machine.used(1) < 2 * MIB
    wake(worker, [WEIGHTS])
    wake(worker)
    assert addresses(held) == places
    after = content(held)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_weights_are_updated_in_place(started: Any, model: Model) -> None:
    worker, held = started
    places = addresses(held)
    new = torch.full_like(model.weights["model.norm.weight"], 0.5)
    assert worker.write_weights(WeightWrite.UPDATE, [("model.norm.weight", new)]) == 1
    assert held["model.norm.weight"].cpu().float().unique().tolist() == [0.5]
    assert worker.write_weights(WeightWrite.RELOAD) == len(model.weights)
    assert torch.equal(
        held["model.norm.weight"].cpu().float(), model.weights["model.norm.weight"].to(torch.bfloat16).float()
    )
    assert addresses(held) == places


def test_blocks_swap_to_pinned_memory_of_the_size_asked_for(started: Any, machine: Any) -> None:
    worker, _ = started
    kv, before = worker._loaded.kv, machine.simulator.stats().host_bytes
    swapped = kv._host.nbytes
    assert kv._host.is_pinned()
    assert kv._host.shape[2] == 2
    kv.initialize(BLOCKS, 37)
    assert kv._host.is_pinned()
    if (
        machine.backend == "cuda"
    ):  # over the simulation torch_npu takes no memory for pinned but its own, which it rounds up
        assert machine.simulator.stats().host_bytes - before == 37 * swapped // 2 - swapped
    worker.initialize_kv(BLOCKS, 2)


def test_a_step_says_that_the_driver_is_simulated(started: Any) -> None:
    worker, _ = started
    batch = dummy_batch(num_tokens=4, max_len=4, block_size=32, max_seqs=1)
    step = StepInput(batch, (SequenceSampling(0, (1, 2, 3, 4), seed=0, temperature=0.0, state_row=0),))
    for call in (worker.warm_up, lambda: (worker.submit(step), worker.collect())):
        with pytest.raises(CapabilityRefused, match=r"the driver of backend '\w+' is a simulation"):
            call()


def test_engine_ends_with_the_same_words_and_gives_everything_back(machine: Any, model: Model) -> None:
    used = machine.used(0)
    with pytest.raises(CapabilityRefused, match="is a simulation"):
        LLM(model.path, backend=machine.backend, dtype="bfloat16", max_num_seqs=4, swap_space=0.001)
    gc.collect()  # the error's frames hold the cache
    assert machine.used(0) == used


SUPPORTED = {
    "cuda": {"head dimension": "16 to 256 in multiples of 16", "block size": "16, 32, 64, 128"},
    "ascend": {"head dimension": "64, 128", "block size": "128"},
}
"""What the backends support, as their refusals write it."""


@pytest.mark.parametrize(
    ("shape", "settings", "refused"),
    [
        (Shape(head_dim=24, hidden=96, heads=4), {"block_size": 24}, {"block size": 24}),
        (Shape(head_dim=260, hidden=1040), {}, {"head dimension": 260}),
        (Shape(head_dim=8, hidden=32), {"block_size": 8}, {"head dimension": 8, "block size": 8}),
    ],
    ids=["block size", "head dimension", "both"],
)
def test_engine_refuses_what_attention_does_not_do_with_all_reasons(
    machine: Any, shape: Shape, settings: dict[str, Any], refused: dict[str, int]
) -> None:
    used = machine.used(0)
    with pytest.raises(CapabilityRefused) as caught:
        LLM(tiny_model(shape).path, backend=machine.backend, dtype="bfloat16", kv_cache_dtype="int8", **settings)
    assert any("KV dtype int8 with bfloat16 is not supported" in reason for reason in caught.value.reasons)
    for what, number in refused.items():
        expected = f"{what} {number} is not supported (supported: {SUPPORTED[machine.backend][what]})"
        assert expected in caught.value.reasons
    del caught
    gc.collect()
    assert machine.used(0) == used


def test_memory_of_captured_work_sleeps_and_stays_until_it_is_closed(machine: Any, allocator: Any) -> None:
    pool = allocator.graph_pool(GRAPHS)
    with pool.allocating():
        tensor = torch.empty(48 * MIB - 512, dtype=torch.uint8, device=machine.devices[0].torch_device)
    tensor.copy_(torch.full(tensor.shape, 7, dtype=torch.uint8))
    mapped, address = pool.mapped_bytes(), tensor.data_ptr()
    assert mapped == allocator.stats().tags[GRAPHS].mapped >= 48 * MIB
    allocator.sleep(SleepPlan(policies={WEIGHTS: Policy.DISCARD}))
    assert (pool.mapped_bytes(), machine.used()) == (0, 0)
    allocator.wake()
    assert (tensor.data_ptr(), [int(byte) for byte in tensor.cpu().aminmax()]) == (address, [7, 7])
    del tensor
    allocator.trim()
    assert pool.mapped_bytes() == mapped
    pool.close()
    assert allocator.stats().tags[GRAPHS].allocated == 0
