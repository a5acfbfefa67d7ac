"""A backend for tests of executors: its workers compute nothing, and fail, hang, die or stop where they are told to.

What a worker is to do is in its configuration's `model`, as JSON: a list of `{"call", "rank", "does"}`, with `"rank": null` for all ranks
and `"after"` for how many calls of that name to let pass; of the call "steps_in_flight", the number that it claims. It is installed as a
distribution of its own, so that ranks find it by name.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pluggy

from hardpoint.interfaces import (
    API_VERSION,
    AttentionLayer,
    AttentionPlan,
    AttentionRequest,
    BackendDescriptor,
    Capabilities,
    Device,
    DType,
    IntSet,
    KVCacheSpec,
    MemoryCapabilities,
    MemoryChange,
    MemoryProfile,
    MemoryReport,
    MemoryStats,
    ModelInfo,
    ProbeResult,
    SleepPlan,
    SleepTier,
    StepInput,
    StepOutput,
    TagStats,
    TierReport,
    TokenLogprobs,
    WeightWrite,
    Worker,
    WorkerContext,
    WorkerStatus,
)
from hardpoint.interfaces.errors import (
    DriverError,
    HostBudgetExceeded,
    InvalidTransaction,
    OutputFailed,
    WeightsMissing,
)

NAME = "fakeranks"
BLOCK_SIZE = 16


class ForeignError(Exception):
    """An error that the other side does not know."""


def _fail(error: Exception) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


def _exit() -> None:
    print("the last words of this rank")
    sys.stdout.flush()
    os._exit(3)


DEEDS: dict[str, Callable[[], Any]] = {
    "fail": _fail(DriverError("fakeMalloc", 2, "out of everything")),
    "fail_value": _fail(ValueError("a value", 7)),
    "fail_foreign": _fail(ForeignError("whatever")),
    "fail_output": _fail(OutputFailed("no token can be drawn", found="masks leave none")),
    "fail_weights": _fail(WeightsMissing("no weights", hint="load them")),
    "exit": _exit,
    "sys_exit": lambda: sys.exit("sys.exit was called"),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "abort": os.abort,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hang": lambda: time.sleep(1000),
    "wait": lambda: time.sleep(0.4),
}


class FakeWorker(Worker):
    """Keeps account of what it was asked."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._config = context.config
        self._orders = json.loads(context.config.model or "[]")
        self._calls: Counter[str] = Counter()
        self._asleep: frozenset[str] = frozenset()
        self._table = np.zeros((0, 0), np.int32)
        self._submitted: deque[StepOutput] = deque()
        self._open: tuple[int, frozenset[str]] | None = None
        self._do("made")

    def _do(self, call: str) -> None:
        self._calls[call] += 1
        for order in self._orders:
            is_mine = order["call"] == call and order.get("rank") in (None, self._config.rank)
            if is_mine and self._calls[call] == order.get("after", 0) + 1:
                DEEDS[order["does"]]()

    def start(self) -> None:
        self._do("start")

    def load(self) -> ModelInfo:
        self._do("load")
        layer = AttentionLayer(num_heads=4, num_kv_heads=2, head_dim=8, scale=0.5, sliding_window=128)
        request = AttentionRequest((layer,) * 2, DType.FLOAT32, DType.BFLOAT16, None, 128)
        plan = AttentionPlan(request, KVCacheSpec(2, BLOCK_SIZE, 2, 8, DType.FLOAT32), notes=("fake",))
        path = f"pid {os.getpid()} rank {self._config.rank} device {self._context.device.index} {self._config.threads}"
        in_flight = next((order["does"] for order in self._orders if order["call"] == "steps_in_flight"), 0)
        return ModelInfo("Fake", DType.FLOAT32, 100, 128, 2, 1 << 20, plan, path, steps_in_flight=in_flight)

    def profile(self) -> MemoryProfile:
        self._do("profile")
        return MemoryProfile(1 << 30, 1 << 20, 1 << 21, 1 << 20, 0.5 - 0.1 * self._config.rank, seconds_per_token=1e-3)

    def initialize_kv(self, num_device_blocks: int, num_host_blocks: int) -> None:
        self._do("initialize_kv")
        self._blocks = num_device_blocks, num_host_blocks

    def open_tiers(self, num_host_blocks: int, num_disk_blocks: int, folder: str | None) -> None:
        self._do("open_tiers")

    def warm_up(self) -> None:
        self._do("warm_up")

    def submit(self, step: StepInput) -> None:
        self._do("submit")
        self._submitted.append(self._output(step))

    def collect(self) -> StepOutput:
        output = self._submitted.popleft()
        self._do("collect")
        return output

    def _output(self, step: StepInput) -> StepOutput:
        """Return for each sample the sum of its sequence's block table, so that a wrong table is seen."""
        batch, rank, tiers = step.batch, self._config.rank, None
        if batch.tier_moves is not None:
            # Each rank loses a load of its own, and says what it was told to store.
            stored = tuple((slot, tag) for _, slot, tag in batch.tier_moves.stores.tolist())
            tiers = TierReport((rank, 3 + rank), stored, checksum_failures=1, io_errors=rank, seconds=1.0 + rank)
        if rank != self._config.driver_rank:
            return StepOutput(np.empty(0, np.int64), tiers=tiers)
        used = -(-batch.context_lens // BLOCK_SIZE)
        sums = [int(batch.block_table[row, :n].sum()) for row, n in zip(batch.rows, used, strict=True)]
        tokens = np.array([sums[row] for row in batch.sample_rows], np.int64)
        logprobs = {
            index: TokenLogprobs(np.arange(s.logprobs, dtype=np.int64), np.full(s.logprobs, -0.5, np.float32), 1)
            for index, s in enumerate(step.new_sequences)
            if s.logprobs is not None
        }
        embeddings = {seq: np.full(3, p.prompt_len, np.float32) for seq, p in step.pooling.items()}
        return StepOutput(tokens, logprobs, embeddings, tiers=tiers)

    def begin(self, transaction: int, change: MemoryChange) -> None:
        if isinstance(change, SleepPlan) and change.progress is not None:
            change.progress(1, 2)
        self._do("begin")
        before = self._asleep
        if isinstance(change, SleepPlan):
            if change.host_budget == 0:
                raise HostBudgetExceeded("no host memory", found="0 bytes allowed")
            self._asleep = change.tags or frozenset({"weights", "kv_cache"})
        else:
            self._asleep = frozenset() if change.tags is None else self._asleep - change.tags
        self._open = transaction, before

    def commit(self, transaction: int) -> MemoryReport:
        self._do("commit")
        self._take(transaction)
        return MemoryReport(1, 2, 3, {"total": 0.5}, 4, 5, tiers={SleepTier.HOST: 6}, still_asleep=self._asleep)

    def rollback(self, transaction: int) -> None:
        self._do("rollback")
        self._asleep = self._take(transaction)

    def _take(self, transaction: int) -> frozenset[str]:
        if self._open is None or self._open[0] != transaction:
            raise InvalidTransaction(f"transaction {transaction} is not open", found=str(self._open))
        (_, before), self._open = self._open, None
        return before

    def write_weights(
        self, write: WeightWrite, weights: Iterable[tuple[str, Any]] = (), model: str | None = None
    ) -> int:
        """Return a sum over the bytes of all tensors and the model's name; an order for "tensor" is followed after each one."""
        self._do("write_weights")
        total = 0 if model is None else len(model)
        for name, tensor in weights:
            self._do("tensor")
            total += len(name) + int(tensor.to("cpu").float().sum())
        return total

    def status(self) -> WorkerStatus:
        self._do("status")
        memory = MemoryStats({"weights": TagStats(1, 2, 3, 4)}, 9, self._asleep)
        return WorkerStatus(memory, frozenset({f"of rank {self._config.rank}"}))

    def start_trace(self, folder: str) -> None:
        self._do("start_trace")

    def stop_trace(self) -> str:
        self._do("stop_trace")
        return f"of rank {self._config.rank}"

    def load_adapter(self, number: int, path: str) -> None:
        self._do("load_adapter")

    def unload_adapter(self, number: int) -> None:
        self._do("unload_adapter")

    def shutdown(self) -> None:
        self._do("shutdown")


def _never(*_: object) -> Any:
    raise AssertionError("executors make no such part")


def _probe() -> ProbeResult:
    return ProbeResult(tuple(Device(NAME, index, f"fake {index}", "cpu") for index in range(3)))


def _capabilities(device: Device) -> Capabilities:
    memory = MemoryCapabilities(frozenset({1}), frozenset({SleepTier.HOST}))
    return replace(Capabilities.none(), memory=memory, tensor_parallel=IntSet.of(1, 2), collectives=("none",))


@pluggy.HookimplMarker("hardpoint")
def hardpoint_backend() -> BackendDescriptor:
    return BackendDescriptor(
        name=NAME,
        vendor="tests",
        api=(API_VERSION, API_VERSION),
        probe=_probe,
        capabilities=_capabilities,
        allocator=_never,
        attention=_never,
        worker=lambda: FakeWorker,
        collectives=_never,
        priority=-1,
        cluster_resource="fakes",
    )
