"""What only CUDA's torch has: process groups of NCCL, and captures; on the real torch over the simulated driver.

Nothing computes there, so that steps allocate and do no more: what is captured are torch's pools, streams and graphs.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from hardpoint.interfaces import GRAPHS, WEIGHTS, DType, Policy, SleepPlan
from hardpoint.interfaces.errors import ConfigError, GraphCaptureFailed

from .conftest import EXPANDABLE

REGISTRATION = "NCCL_GRAPH_REGISTER"
MIB = 1 << 20


@pytest.fixture
def collectives(machine: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.delenv(REGISTRATION, raising=False)
    made = machine.descriptor.make("collectives", machine.devices[0])
    yield made
    made.stop()


def test_a_group_of_nccl_is_made_and_registers_no_memory_of_graphs(collectives: Any, unused_port: int) -> None:
    collectives.start(0, 1, f"tcp://127.0.0.1:{unused_port}/alone", timeout=10.0)
    assert os.environ[REGISTRATION] == "0"


def test_registration_that_was_asked_for_is_refused(
    collectives: Any, unused_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(REGISTRATION, "1")
    with pytest.raises(ConfigError, match=f"{REGISTRATION}=1"):
        collectives.start(0, 1, f"tcp://127.0.0.1:{unused_port}/alone", timeout=10.0)


@pytest.fixture
def runner(machine: Any, allocator: Any) -> Iterator[Any]:
    made = machine.descriptor.make("graph_runner", machine.devices[0])
    made.start(allocator)
    yield made
    made.reset()


def allocates(mib: int) -> None:
    """A step of which two tensors of `mib` MiB and one of both live in turn."""
    first = torch.empty(mib * MIB, dtype=torch.uint8, device="cuda:0")
    second = torch.empty_like(first)
    del first
    torch.empty(2 * mib * MIB, dtype=torch.uint8, device="cuda:0")
    del second


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_captures_share_one_pool_that_sleeps_and_are_replayed_after_the_wake(
    machine: Any, allocator: Any, runner: Any
) -> None:
    def mapped() -> int:
        return int(allocator.stats().tags[GRAPHS].mapped)

    used = machine.used()
    runner.capture(32, lambda: allocates(32))
    held, outside = mapped(), runner.resident_bytes() - mapped()
    assert held >= 128 * MIB
    assert 0 <= outside <= 4 * MIB  # of torch's generator of random numbers
    for size in (16, 8):
        runner.capture(size, lambda size=size: allocates(size))
    assert mapped() == held
    sizes = [64, 96]
    runner.capture(1, lambda: allocates(sizes.pop(0)))  # the capture needs what the run before it did not
    assert mapped() == runner.resident_bytes() - outside > held + 128 * MIB
    allocator.sleep(SleepPlan(policies={GRAPHS: Policy.PRESERVE}))
    assert (mapped(), runner.resident_bytes()) == (0, outside)
    allocator.wake()
    for key in (32, 16, 8, 1):
        runner.replay(key)
    runner.reset()
    assert runner.resident_bytes() == 0
    assert machine.used() <= used + outside


def raises() -> None:
    if torch.cuda.is_current_stream_capturing():
        raise MemoryError("no memory is left")


def waits() -> None:
    if torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize()


@pytest.mark.parametrize("keeps", [False, True])
def test_a_captured_copy_of_torchs_is_done_where_its_memory_is_after_a_sleep(
    machine: Any, tolerant_allocator: Any, keeps: bool
) -> None:
    """Or fails, over a driver whose graphs keep the memory that they were instantiated with: captured steps of models have no copies."""
    machine.simulator.set("graphs_keep_memory", keeps)
    runner = machine.descriptor.make("graph_runner", machine.devices[0])
    runner.start(tolerant_allocator)
    source, target = (tolerant_allocator.empty((MIB,), DType.UINT8, GRAPHS) for _ in range(2))
    source.copy_(torch.full((MIB,), 3, dtype=torch.uint8))
    runner.capture(1, lambda: target.copy_(source))
    tolerant_allocator.sleep(SleepPlan())
    tolerant_allocator.wake()
    target.copy_(torch.zeros(MIB, dtype=torch.uint8))
    try:
        if keeps:
            with pytest.raises(RuntimeError, match="illegal"):
                runner.replay(1)
        else:
            runner.replay(1)
            assert target.cpu().eq(3).all()
    finally:
        machine.simulator.set("graphs_keep_memory", 0)
        runner.reset()


def test_uploads_and_downloads_wait_for_nothing_and_copy_no_pageable_memory(machine: Any) -> None:
    platform = machine.descriptor.make("platform", machine.devices[0])
    platform.start(None)
    waits = [call for call in machine.simulator.calls() if "Synchronize" in call]

    def counts() -> list[int]:
        return [machine.simulator.stats().pageable_copies, *map(machine.simulator.call_count, waits)]

    torch.cuda.synchronize()
    before = counts()
    for _ in range(3):
        on_device = platform.upload(np.arange(1000))
        on_host = platform.download(on_device)
    assert counts() == before
    platform.synchronize()
    assert on_host.tolist() == list(range(1000))
    del on_device
    platform.release()


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize(
    ("step", "failing", "text"),
    [
        (raises, "", "no memory is left"),
        (waits, "", "a previous error during capture"),
        (lambda: None, "cudaStreamBeginCapture", "not supported"),
        (lambda: None, "cudaGraphInstantiateWithFlags", "not supported"),
    ],
    ids=["step", "invalidated", "beginning", "end"],
)
def test_a_capture_that_fails_leaves_the_stream_as_it_was_and_no_memory(
    machine: Any, tolerant_allocator: Any, step: Callable[[], None], failing: str, text: str
) -> None:
    used, stream = machine.used(), torch.cuda.current_stream()
    runner = machine.descriptor.make("graph_runner", machine.devices[0])
    with pytest.raises(GraphCaptureFailed, match="Call start first"):
        runner.capture(1, step)
    runner.start(tolerant_allocator)
    runner.capture(8, lambda: allocates(8))
    if failing:
        machine.simulator.fail(failing, code=801)

    def allocates_and_fails() -> None:
        allocates(4)
        step()

    with pytest.raises((RuntimeError, MemoryError), match=text) as caught:
        runner.capture(4, allocates_and_fails)
    assert torch.cuda.current_stream() == stream
    with pytest.raises(KeyError):
        runner.replay(4)
    runner.replay(8)
    runner.reset()
    assert (runner.resident_bytes(), machine.used()) == (0, used)
    runner.capture(4, lambda: allocates(4))
    runner.replay(4)
    runner.reset()
    assert machine.used() == used
    del caught


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_memory_that_only_the_collector_can_end_does_not_disturb_a_capture(allocator: Any, runner: Any) -> None:
    """Such as that of an engine before this one: to unmap it the device is waited for."""

    def leaves_cycles() -> None:
        if torch.cuda.is_current_stream_capturing():
            for _ in range(3 * gc.get_threshold()[0]):
                cycle: list[Any] = []
                cycle.append(cycle)

    held: list[Any] = [allocator.empty((64 * MIB,), DType.UINT8, WEIGHTS)]
    held.append(held)
    del held
    runner.capture(1, leaves_cycles)
    gc.collect()
    assert allocator.stats().tags[WEIGHTS].allocated == 0


# Settings of torch's allocator, each in a process of its own


@pytest.mark.parametrize("by_call", [False, True], ids=["environment", "call"])
def test_expandable_segments_are_off_in_our_pools_alone_and_every_other_setting_stays(
    machine: Any, run_child: Any, by_call: bool
) -> None:
    ended = run_child(
        f"""
def in_force():
    found = torch.cuda.memory._snapshot()["allocator_settings"]
    return found["expandable_segments"], found["max_split_size"] >> 20
def given():
    # Torch 2.11 tells it here alone.
    return next(x for x in torch.cuda.memory._snapshot()["allocator_settings"].values() if isinstance(x, str))
asked = torch._C._accelerator_setAllocatorSettings
torch.cuda.init()
if {by_call}:
    asked({EXPANDABLE!r})
allocator = hardpoint_backend().make("allocator", DEVICE)
print(*in_force())
with allocator.pool("weights"):
    print(*in_force())
    first = torch.empty(4 << 20, dtype=torch.uint8, device=DEVICE.torch_device)
    with allocator.pool("kv_cache"):
        second = torch.empty(4 << 20, dtype=torch.uint8, device=DEVICE.torch_device)
    print(*in_force())
print(*in_force(), given())
print(*[allocator.stats().tags[tag].allocated >> 20 for tag in ("weights", "kv_cache")])
allocator.sleep(SleepPlan()); allocator.wake()
with allocator.pool("weights"):
    asked("max_split_size_mb:32")
print(*in_force())
""",
        **({} if by_call else {machine.settings[0]: EXPANDABLE}),
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-6:] == [
        *("True 64", "False 64", "False 64"),
        f"True 64 {EXPANDABLE}",
        "20 20",
        "False 32",
    ]
