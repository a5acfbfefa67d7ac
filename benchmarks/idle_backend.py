"""A backend whose workers compute nothing, for `executor.py`: what is left of a step is the executor's own time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pluggy

from hardpoint.interfaces import (
    API_VERSION,
    AttentionPlan,
    AttentionRequest,
    BackendDescriptor,
    Capabilities,
    Device,
    DType,
    KVCacheSpec,
    MemoryChange,
    MemoryProfile,
    MemoryReport,
    MemoryStats,
    ModelInfo,
    ProbeResult,
    StepInput,
    StepOutput,
    WeightWrite,
    Worker,
    WorkerStatus,
)

_TOKENS = np.zeros(4096, np.int64)


class IdleWorker(Worker):
    """Answers every step with tokens that were there before."""

    def submit(self, step: StepInput) -> None:
        self._num_samples = len(step.batch.sample_rows)

    def collect(self) -> StepOutput:
        return StepOutput(_TOKENS[: self._num_samples])

    def load(self) -> ModelInfo:
        request = AttentionRequest((), DType.FLOAT32, DType.FLOAT32, 16, 8192)
        plan = AttentionPlan(request, KVCacheSpec(1, 16, 1, 8, DType.FLOAT32))
        return ModelInfo("Idle", DType.FLOAT32, 50_000, 8192, 1, 0, plan, "idle")

    def start(self) -> None: ...

    def profile(self) -> MemoryProfile:
        return MemoryProfile(0, 0, 0, 0, 1.0)

    def initialize_kv(self, num_device_blocks: int, num_host_blocks: int) -> None: ...

    def warm_up(self) -> None: ...

    def begin(self, transaction: int, change: MemoryChange) -> None: ...

    def commit(self, transaction: int) -> MemoryReport:
        return MemoryReport(0, 0, 0, {}, 0, 0)

    def rollback(self, transaction: int) -> None: ...

    def write_weights(
        self, write: WeightWrite, weights: Iterable[tuple[str, Any]] = (), model: str | None = None
    ) -> int:
        return 0

    def status(self) -> WorkerStatus:
        return WorkerStatus(MemoryStats({}, 0))

    def shutdown(self) -> None: ...


def _never(*_: object) -> Any:
    raise AssertionError("an idle worker has no such part")


@pluggy.HookimplMarker("hardpoint")
def hardpoint_backend() -> BackendDescriptor:
    """Describe it."""
    return BackendDescriptor(
        name="idle",
        vendor="benchmarks",
        api=(API_VERSION, API_VERSION),
        probe=lambda: ProbeResult((Device("idle", 0, "nothing", "cpu"),)),
        capabilities=lambda device: Capabilities.none(),
        allocator=_never,
        attention=_never,
        worker=lambda: IdleWorker,
        priority=-1,
        accelerator=False,
    )
