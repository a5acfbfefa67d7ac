"""The common part of every backend's worker: the contract's calls, each given to the part that answers it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch

from hardpoint.interfaces.allocator import GRAPHS, DeviceAllocator, MemoryChange, MemoryReport
from hardpoint.interfaces.attention import AttentionBackend
from hardpoint.interfaces.batch import StepInput, StepOutput
from hardpoint.interfaces.kernels import KernelSet
from hardpoint.interfaces.worker import MemoryProfile, ModelInfo, WeightWrite, Worker, WorkerContext, WorkerStatus
from hardpoint.sampling import Sampler
from hardpoint.worker.decode_capture import DecodeCapture
from hardpoint.worker.in_flight import StepsInFlight
from hardpoint.worker.kv_memory import KVMemory
from hardpoint.worker.loading import LoadedModel, load_rank
from hardpoint.worker.model_runner import ModelRunner
from hardpoint.worker.profile import StepCost, largest_step
from hardpoint.worker.ranks import check_ranks
from hardpoint.worker.readiness import need
from hardpoint.worker.sleep import SleepCycle
from hardpoint.worker.steps import Steps
from hardpoint.worker.transactions import Transactions
from hardpoint.worker.weights import KEPT, Weights

if TYPE_CHECKING:
    from torch import Tensor


class TorchWorker(Worker, partial=True):
    """A rank on one torch device, in terms of the backend's allocator, attention and kernels.

    A vendor's worker overrides what its device does differently: `_start_device`, `_synchronize`, `_check_computes`,
    `_total_and_used`, `_peak_growth`, `_empty_host`.
    """

    _default_memory_utilization: ClassVar[float] = 0.9
    _default_kv_bytes: ClassVar[int | None] = None
    _compiles: ClassVar[bool] = False
    """Whether the first run of a step compiles kernels and starts libraries, which its time must not include."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._config = context.config
        self._device = context.device
        self._groups = ExitStack()
        self._transactions = Transactions()
        self._in_flight = StepsInFlight()
        # Made by start
        self._allocator: DeviceAllocator | None = None
        self._attention: AttentionBackend | None = None
        self._kernels: KernelSet | None = None
        # Made by load
        self._loaded: LoadedModel | None = None
        self._weights: Weights | None = None
        self._kv: KVMemory | None = None
        self._capture: DecodeCapture | None = None
        self._runner: ModelRunner | None = None
        self._steps: Steps | None = None
        self._sleep: SleepCycle | None = None

    # Hooks for vendors

    def _start_device(self) -> None:
        """Make this rank's device current. Default: nothing."""

    def _synchronize(self) -> None:
        """Wait until the device has done all its work. Default: nothing, for devices that work in the caller's thread."""

    def _check_computes(self) -> None:
        """Raise CapabilityRefused where the device cannot compute a step. Default: nothing."""

    def _total_and_used(self) -> tuple[int, int]:
        """Return the device's memory and what is in use of it, bytes. Default: as the driver reports them."""
        info = need(self._allocator).memory_info()
        return info.total, info.total - info.free

    def _peak_growth(self, step: Callable[[], object]) -> int:
        """Run `step` to its end and return the most device memory that it took beyond what was in use, bytes.

        Default: by the allocator's own books. A device on which torch allocates for itself overrides this with its counters.
        """
        allocator = need(self._allocator)
        before = allocator.stats()
        step()
        self._synchronize()
        return max(allocator.stats().peak_allocated - before.peak_allocated, 0)

    def _empty_host(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return host memory that the device copies to and from; pinned where that helps. Default: plain memory."""
        return torch.empty(tuple(shape), dtype=dtype)

    # Start

    def start(self) -> None:
        """Start the device and make allocator, attention and kernels; raises ConfigError, CapabilityRefused for a rank that cannot be."""
        descriptor = self._context.descriptor
        check_ranks(self._config, descriptor, self._device)
        if self._config.threads is not None:
            torch.set_num_threads(self._config.threads)
        self._start_device()
        self._allocator = descriptor.make("allocator", self._device)
        self._attention = descriptor.make("attention", self._device)
        self._kernels = descriptor.make("kernels", self._device)

    def load(self) -> ModelInfo:
        """Load the model's weights onto the device; raises ModelError, CapabilityRefused, DeviceOutOfMemory."""
        allocator, attention = need(self._allocator), need(self._attention)
        loaded = load_rank(
            self._context, allocator=allocator, attention=attention, kernels=self._kernels, groups=self._groups
        )
        self._synchronize()
        self._loaded, self._weights = loaded, Weights(loaded, allocator, self._synchronize)
        if self._config.prepare_sleep is not None:
            allocator.prepare_sleep(replace(self._config.prepare_sleep, keep=KEPT))
        self._make_parts(loaded, self._weights, allocator, attention)
        return loaded.info

    def _make_parts(
        self, loaded: LoadedModel, weights: Weights, allocator: DeviceAllocator, attention: AttentionBackend
    ) -> None:
        device, synchronize, empty_host = self._device.torch_device, self._synchronize, self._empty_host
        self._kv = KVMemory(
            loaded.plan.kv_cache,
            allocator=allocator,
            attention=attention,
            torch_device=device,
            empty_host=empty_host,
            synchronize=synchronize,
        )
        self._capture = DecodeCapture(
            self._context, loaded, allocator=allocator, attention=attention, empty_host=empty_host
        )
        self._runner = ModelRunner(
            loaded,
            attention,
            self._capture,
            torch_device=device,
            check_computes=self._check_computes,
            synchronize=synchronize,
        )
        sampler = Sampler(loaded.info.vocab_size, device, self._kernels, empty_host)
        self._steps = Steps(self._config, self._runner, self._kv, sampler, synchronize)
        self._sleep = SleepCycle(allocator, weights, self._kv, synchronize)

    def profile(self) -> MemoryProfile:
        """Run the largest legal step with dummy tokens over a KV cache of just its own size, and return what it takes.

        Graphs are counted by a few that are captured for it; raises GraphCaptureFailed as `warm_up` does.
        """
        allocator, kv, asked = need(self._allocator), need(self._kv), self._config.memory_utilization
        total, used = self._total_and_used()
        current = allocator.stats().allocated
        cost = self._largest_step()
        return MemoryProfile(
            total=total,
            used=used,
            peak=current + cost.growth,
            current=current,
            utilization=asked or self._default_memory_utilization,
            kv_limit=kv.limit(self._default_kv_bytes if asked is None else None),
            graphs=cost.graphs,
            seconds_per_token=cost.seconds_per_token,
            seconds_per_swapped_block=cost.seconds_per_swapped_block,
        )

    def _largest_step(self) -> StepCost:
        return largest_step(
            self._config,
            need(self._loaded),
            need(self._runner),
            need(self._kv),
            need(self._capture),
            peak_growth=self._peak_growth,
            used=self._used,
            compiles=self._compiles,
        )

    def _used(self) -> int:
        self._synchronize()
        return self._total_and_used()[1]

    def initialize_kv(self, num_device_blocks: int, num_host_blocks: int) -> None:
        """Allocate the KV cache and the host's swap space; raises DeviceOutOfMemory, HostBudgetExceeded, CapabilityRefused."""
        need(self._runner).drop_graphs()
        need(self._kv).initialize(num_device_blocks, num_host_blocks)

    def warm_up(self) -> None:
        """Run one prefill and one decode of small steps, so that the first request finds everything in place; capture decodes.

        Raises GraphCaptureFailed where graphs are planned, wanted, and not to be had.
        """
        need(self._runner).warm_up(need(self._kv).cache)

    # Steps

    def submit(self, step: StepInput) -> None:
        """Swap, copy, compute and sample one step, and keep its outcome; raises MemoryBusy, MemoryAsleep, WeightsMissing."""
        self._transactions.check_none("compute a step")
        need(self._sleep).check_awake()
        need(self._weights).check_valid()
        self._in_flight.check_room()
        steps = need(self._steps)
        self._in_flight.add(lambda: steps.execute(step))

    def collect(self) -> StepOutput:
        """Return the output of the oldest step that was submitted; see `Worker.collect`."""
        return self._in_flight.collect()

    # Memory

    def begin(self, transaction: int, change: MemoryChange) -> None:
        """Prepare a sleep or wake; see `Worker.begin`.

        Backups of weights are kept over wake: every write of theirs goes through this worker, or is declared.
        """
        self._transactions.begin(transaction, partial(need(self._sleep).prepare, change))

    def commit(self, transaction: int) -> MemoryReport:
        """Finish what was prepared; raises InvalidTransaction."""
        report = self._transactions.commit(transaction)
        held = need(self._runner).graph_bytes()
        return report if held is None else replace(report, residual={**report.residual, GRAPHS: held})

    def rollback(self, transaction: int) -> None:
        """Return to the state before the preparation; raises InvalidTransaction, and what the allocator raises."""
        self._transactions.rollback(transaction)

    def write_weights(
        self, write: WeightWrite, weights: Iterable[tuple[str, Tensor]] = (), model: str | None = None
    ) -> int:
        """Give weights values; see `Worker.write_weights`. Those that are declared valid have no backups and sources any more."""
        self._transactions.check_none("write weights")
        need(self._sleep).check_weights_awake()
        held = need(self._weights)
        match write:
            case WeightWrite.UPDATE:
                return held.update(weights)
            case WeightWrite.RELOAD:
                return held.reload(model, trust_remote_code=self._config.trust_remote_code)
            case WeightWrite.DECLARE:
                held.declare_valid()
                return 0

    def status(self) -> WorkerStatus:
        """Return this rank's account of its memory and weights."""
        memory = need(self._allocator).stats()
        if self._sleep is not None:
            self._sleep.note_asleep()
        return WorkerStatus(memory, frozenset() if self._weights is None else self._weights.ledger.missing)

    # End

    def shutdown(self) -> None:
        """Give everything back, after rolling back what is open; legal in any state and more than once."""
        self._transactions.abandon()
        if self._runner is not None:
            self._runner.drop_graphs()
        self._loaded = self._weights = self._kv = self._capture = self._runner = self._steps = self._sleep = None
        self._attention = self._kernels = None
        self._groups.close()
        if self._allocator is not None:
            self._allocator.close()
            self._allocator = None
