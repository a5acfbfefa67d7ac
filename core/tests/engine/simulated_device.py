"""A backend whose device computes asynchronously, in simulated time: for tests of the engine's loop, and for `benchmarks/overlap.py`.

A token is a pure function of its sequence's seed, its number and the token before it, which is on the device alone while its step is in
flight. A step takes `HARDPOINT_SIMULATED_STEP` seconds after the step before; `HARDPOINT_SIMULATED_DEPTH` steps may be in flight.
Parts of the contract that only one of its versions has are left out where they are not wanted, so that older engines run on it too.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pluggy

from hardpoint import interfaces
from hardpoint.interfaces import (
    API_VERSION,
    AttentionPlan,
    AttentionRequest,
    BackendDescriptor,
    Capabilities,
    Device,
    DType,
    KVCacheSpec,
    MemoryProfile,
    MemoryReport,
    MemoryStats,
    ModelInfo,
    ProbeResult,
    StepInput,
    StepOutput,
    TokenLogprobs,
    Worker,
)

NAME = "simulated_device"
VOCAB_SIZE = 49152
MAX_MODEL_LEN = 4096


class _Parts:
    """What workers of all versions of the contract do here."""

    def start(self) -> None:
        self._depth = int(os.environ.get("HARDPOINT_SIMULATED_DEPTH", "0"))
        self._seconds = float(os.environ.get("HARDPOINT_SIMULATED_STEP", "0"))
        self._steps: deque[tuple[float, StepOutput | Exception]] = deque()
        self._free_at = 0.0
        self._seeds = self._last = np.zeros(4096, np.int64)
        self._logprobs: set[int] = set()
        self.fails: set[int] = set()
        self.num_steps = 0

    init_device = start

    def load(self) -> ModelInfo:
        request = AttentionRequest((), DType.FLOAT32, DType.FLOAT32, 16, MAX_MODEL_LEN)
        plan = AttentionPlan(request, KVCacheSpec(1, 16, 1, 8, DType.FLOAT32))
        info = ModelInfo("Simulated", DType.FLOAT32, VOCAB_SIZE, MAX_MODEL_LEN, 1, 0, plan, "simulated")
        if self._depth:
            object.__setattr__(info, "steps_in_flight", self._depth)
        return info

    load_model = load

    def profile(self) -> MemoryProfile:
        return MemoryProfile(1 << 30, 0, 0, 0, 1.0)

    def initialize_kv(self, num_device_blocks: int, num_host_blocks: int) -> None: ...

    def warm_up(self) -> None: ...

    def submit(self, step: StepInput) -> None:
        self._free_at = max(self._free_at, time.perf_counter()) + self._seconds
        self.num_steps += 1
        if self.num_steps in self.fails:
            self._steps.append((self._free_at, RuntimeError(f"step {self.num_steps} fails")))
        else:
            self._steps.append((self._free_at, self._compute(step)))

    def collect(self) -> StepOutput:
        ready_at, output = self._steps.popleft()
        wait = ready_at - time.perf_counter()
        if wait > 0:
            time.sleep(wait)
        if isinstance(output, Exception):
            raise output
        return output

    def execute(self, step: StepInput) -> StepOutput:
        self.submit(step)
        return self.collect()

    def _compute(self, step: StepInput) -> StepOutput:
        batch = step.batch
        if not hasattr(batch, "sample_positions"):
            return StepOutput(np.full(len(batch.sample_rows), 1000, np.int64))
        for sampling in step.new_sequences:
            if sampling.state_row >= len(self._seeds):
                self._seeds, self._last = (np.concatenate((a, np.zeros_like(a))) for a in (self._seeds, self._last))
            self._seeds[sampling.state_row] = sampling.seed & 0x7FFFFFFF
            self._logprobs.discard(sampling.state_row)
            if sampling.logprobs is not None:
                self._logprobs.add(sampling.state_row)
        before = batch.token_ids[batch.query_start[1:] - 1]
        before = np.where(before < 0, self._last[batch.state_rows], before)[batch.sample_rows]
        rows = batch.sample_state_rows
        mixed = (self._seeds[rows] * 1103515245 + batch.sample_positions * 40503 + before * 69069 + 12345) & 0x7FFFFFFF
        tokens = 300 + (mixed >> 7) % 5000
        self._last[rows] = tokens
        logprobs = {}
        if self._logprobs:
            for sample, row in enumerate(rows.tolist()):
                if row in self._logprobs:
                    logprobs[sample] = TokenLogprobs(tokens[sample : sample + 1], np.full(1, -0.5, np.float32), 1)
        pooled = {s: np.full(4, p.prompt_len, np.float32) for s, p in step.pooling.items()}
        whole = dict(zip(batch.seq_ids.tolist(), batch.context_lens.tolist(), strict=True))
        embeddings = {s: v for s, v in pooled.items() if whole[s] == v[0]}
        scoring = getattr(step, "scoring", {})
        if not scoring or "HARDPOINT_SIMULATED_NO_SCORES" in os.environ:
            return StepOutput(tokens, logprobs, embeddings)
        scores = {
            s: interfaces.PromptLogprobs(
                one.targets[:, None], (one.targets[:, None] / -1e3).astype(np.float32), one.targets
            )
            for s, one in scoring.items()
        }
        return StepOutput(tokens, logprobs, embeddings, prompt_logprobs=scores)

    def begin(self, transaction: int, change: Any) -> None: ...

    def commit(self, transaction: int) -> MemoryReport:
        return MemoryReport(0, 0, 0, {}, 0, 0)

    def rollback(self, transaction: int) -> None: ...

    def write_weights(self, write: Any, weights: Any = (), model: str | None = None) -> int:
        return sum(1 for _ in weights)

    def status(self) -> Any:
        return interfaces.WorkerStatus(MemoryStats({}, 0))

    # Of an older version of the contract.

    def sleep(self, plan: Any) -> MemoryReport:
        return MemoryReport(0, 0, 0, {}, 0, 0)

    def wake(self, tags: Any = None) -> MemoryReport:
        return MemoryReport(0, 0, 0, {}, 0, 0)

    def begin_sleep(self, transaction: int, plan: Any) -> None: ...

    def begin_wake(self, transaction: int, tags: Any = None) -> None: ...

    def update_weights(self, weights: Any) -> int:
        return 0

    def reload_weights(self, model: str | None = None) -> int:
        return 0

    def declare_weights_valid(self) -> None: ...

    def memory_stats(self) -> MemoryStats:
        return MemoryStats({}, 0)

    def missing_weights(self) -> frozenset[str]:
        return frozenset()

    def shutdown(self) -> None: ...


def _not_here(*_: object, **__: object) -> Any:
    raise AssertionError("this simulated device has no such part")


def _worker() -> type[Worker]:
    wanted = set(Worker.__abstractmethods__)
    methods = {}
    for name in wanted | {"_compute"}:
        method = _Parts.__dict__.get(name)
        methods[name] = getattr(Worker, name) if method is None else method
    methods |= {name: _Parts.__dict__[name] for name in ("submit", "collect") if name not in wanted}
    if "submit" not in wanted:
        methods["_submit"], methods["_collect"] = methods.pop("submit"), methods.pop("collect")
        methods["execute"] = lambda self, step: (self._submit(step), self._collect())[1]
    methods["__module__"] = __name__
    cls: type[Worker] = type("SimulatedWorker", (Worker,), methods)
    cls.__abstractmethods__ = frozenset()  # type: ignore[misc]
    return cls


@pluggy.HookimplMarker("hardpoint")
def hardpoint_backend() -> BackendDescriptor:
    """Describe it."""
    return BackendDescriptor(
        name=NAME,
        vendor="tests",
        api=(API_VERSION, API_VERSION),
        probe=lambda: ProbeResult((Device(NAME, 0, "simulated time", "cpu"),)),
        capabilities=lambda device: Capabilities.none(),
        allocator=_not_here,
        attention=_not_here,
        worker=_worker,
        priority=-1,
        accelerator=False,
    )


def install(site: Path) -> None:
    """Install this file as a backend into a folder, from where this process finds it."""
    module = "hardpoint_simulated_device"
    (site / f"{module}.py").write_text(Path(__file__).read_text("utf-8"), "utf-8")
    info = site / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n", "utf-8")
    (info / "entry_points.txt").write_text(f"[hardpoint.backends]\n{NAME} = {module}\n", "utf-8")
    sys.path.insert(0, str(site))
    import_module("hardpoint.plugins").installed(refresh=True)
