"""The worker's typed errors and its closed call table."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from hardpoint.executor import InProcessExecutor
from hardpoint.interfaces import WORKER_CALLS, Platform, SleepPlan
from hardpoint.interfaces.batch import StepInput
from hardpoint.interfaces.errors import ConfigError, HostBudgetExceeded, WorkerError
from hardpoint.interfaces.worker import WorkerConfig, WorkerContext
from hardpoint.plugins import resolve_backend
from hardpoint.worker import StandardWorker
from hardpoint.worker.dummy_batches import dummy_batch
from hardpoint_conformance.tiny_model import Shape, tiny_model

if TYPE_CHECKING:
    from hardpoint.interfaces import AttentionPlan, StepBatch
    from hardpoint.interfaces.batch import Int32Array


class PlainWorker(StandardWorker):
    """The core's worker, unchanged."""


class NoHostMemory(Platform):
    """A host that has no memory left for swapping."""

    def empty_host(self, shape: object, dtype: torch.dtype) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory\nmore lines")


class Compiling(Platform):
    """A host on which steps compile when they first run."""

    compiles = True


@pytest.fixture
def context() -> WorkerContext:
    resolved = resolve_backend("cpu")
    return WorkerContext(resolved.descriptor, resolved.device, WorkerConfig(model=tiny_model(Shape(max_len=1024)).path))


def test_a_call_before_its_time_says_which_calls_come_first(context: WorkerContext) -> None:
    worker = PlainWorker(context)
    batch = dummy_batch(num_tokens=1, max_len=1, block_size=8, max_seqs=1)
    with pytest.raises(WorkerError, match="start, load"):
        worker.submit(StepInput(batch))


def test_shutdown_is_legal_in_any_state_and_twice(context: WorkerContext) -> None:
    worker = PlainWorker(context)
    worker.shutdown()
    worker.start()
    worker.shutdown()
    worker.shutdown()


def test_no_host_memory_for_swapping_names_the_setting(context: WorkerContext) -> None:
    worker = PlainWorker(replace(context, descriptor=replace(context.descriptor, platform=lambda: NoHostMemory)))
    worker.start()
    worker.load()
    with pytest.raises(HostBudgetExceeded, match="swap_space"):
        worker.initialize_kv(4, 2)
    worker.shutdown()


def test_a_host_that_lacks_room_for_the_first_sleep_is_said_and_loads(
    context: WorkerContext, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from hardpoint_cpu.allocator import CpuAllocator

    def full(self: CpuAllocator, plan: SleepPlan) -> None:
        raise HostBudgetExceeded("backups need 5 bytes of host memory", found="the host has room for 4 bytes")

    monkeypatch.setattr(CpuAllocator, "prepare_sleep", full)
    worker = PlainWorker(replace(context, config=replace(context.config, prepare_sleep=SleepPlan())))
    worker.start()
    with caplog.at_level("WARNING", "hardpoint"):
        worker.load()
    (record,) = [record for record in caplog.records if "first sleep" in record.message]
    assert "the host has room for 4 bytes" in record.message
    worker.shutdown()


def test_a_budget_that_no_sleep_can_keep_to_ends_the_load(context: WorkerContext) -> None:
    worker = PlainWorker(replace(context, config=replace(context.config, prepare_sleep=SleepPlan(host_budget=4096))))
    worker.start()
    with pytest.raises(HostBudgetExceeded, match="budget is 4096 bytes"):
        worker.load()
    worker.shutdown()


def test_an_executor_calls_nothing_outside_the_contract(context: WorkerContext) -> None:
    executor = InProcessExecutor(PlainWorker(context))
    with pytest.raises(ConfigError, match="format_disk"):
        executor.call("format_disk")
    assert "submit" in WORKER_CALLS
    executor.shutdown()


@pytest.mark.parametrize("platform", [Compiling, Platform])
def test_warming_up_runs_what_would_else_compile_while_requests_wait(
    platform: type[Platform], context: WorkerContext
) -> None:
    steps, copies = list[tuple[int, int, int]](), list[list[list[int]]]()
    attention_class: type[Any] = context.descriptor.attention()

    class Watched(attention_class):  # type: ignore[misc]
        """The backend's attention, which notes the steps and the copies of blocks."""

        def prepare(self, plan: AttentionPlan, batch: StepBatch) -> Any:
            steps.append((batch.num_tokens, batch.num_decodes, int(batch.context_lens[0])))
            return super().prepare(plan, batch)

        def copy_blocks(self, kv_cache: torch.Tensor, pairs: Int32Array) -> None:
            copies.append(pairs.tolist())
            super().copy_blocks(kv_cache, pairs)

    descriptor = replace(context.descriptor, attention=lambda: Watched, platform=lambda: platform)
    worker = PlainWorker(replace(context, descriptor=descriptor))
    worker.start()
    worker.load()
    worker.initialize_kv(64, 0)
    worker.warm_up()
    expected = [(16, 0, 16), (1, 1, 1), (1, 1, 1024)] if platform.compiles else []
    assert steps == expected, "a prompt, a decode in one part and one in several"
    assert copies == ([[[0, 63]]] if platform.compiles else [])
    worker.shutdown()
