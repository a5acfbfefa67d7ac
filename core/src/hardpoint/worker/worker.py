"""The common part of every backend's worker: the contract's calls, each given to the part that answers it."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING

import torch

from hardpoint.interfaces.allocator import GRAPHS, DeviceAllocator, MemoryChange, MemoryReport, SleepPlan
from hardpoint.interfaces.attention import AttentionBackend
from hardpoint.interfaces.batch import StepInput, StepOutput
from hardpoint.interfaces.errors import CapabilityRefused, HostBudgetExceeded, NothingToCollect, WorkerError
from hardpoint.interfaces.kernels import KernelSet
from hardpoint.interfaces.platform import Platform
from hardpoint.interfaces.worker import MemoryProfile, ModelInfo, WeightWrite, Worker, WorkerContext, WorkerStatus
from hardpoint.models import TokenizerBackend
from hardpoint.sampling.guidance import Grammars
from hardpoint.sampling.sampler import Sampler
from hardpoint.worker.adapter_memory import AdapterMemory
from hardpoint.worker.draft_model import DraftModel, load_draft
from hardpoint.worker.kv_memory import KVMemory
from hardpoint.worker.loading import LoadedModel, load_rank
from hardpoint.worker.memory_changes import SleepCycle, Transactions
from hardpoint.worker.model_runner import LaunchedStep, ModelRunner
from hardpoint.worker.profile import StepCost, largest_step, logits_bytes
from hardpoint.worker.ranks import check_ranks
from hardpoint.worker.state_memory import StateMemory
from hardpoint.worker.step_graphs import StepCapture
from hardpoint.worker.trace import Trace
from hardpoint.worker.weights import KEPT, Weights

if TYPE_CHECKING:
    from torch import Tensor

COLLECTIVES = "collectives"
"""What the library of collectives keeps of the device, among a report's residual bytes."""

_log = logging.getLogger("hardpoint")

_is_forked = False
"""This process was forked from one in which a worker had started."""


@dataclass(frozen=True)
class _Started:
    """A rank whose device runs."""

    platform: Platform
    allocator: DeviceAllocator
    attention: AttentionBackend
    kernels: KernelSet | None


@dataclass(frozen=True)
class _Loaded:
    """A rank whose model is on the device; of the KV cache there is a plan only, until `initialize_kv`.

    Attributes:
        draft: the model that makes drafted tokens; None where they come with the steps.
        in_flight: what was submitted and not collected, the oldest first: steps, and what others failed with before they were queued.
    """

    model: LoadedModel
    weights: Weights
    kv: KVMemory
    capture: StepCapture
    sampler: Sampler
    runner: ModelRunner
    sleep: SleepCycle
    draft: DraftModel | None = None
    in_flight: deque[LaunchedStep | Exception] = field(default_factory=deque)


class StandardWorker(Worker):
    """A rank on one torch device, in terms of the backend's platform, allocator, attention and kernels.

    A vendor whose device differs says so in its `Platform`, or overrides a call of the contract.
    """

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._config = context.config
        self._device = context.device
        self._groups = ExitStack()
        self._transactions = Transactions()
        self._trace = Trace(context.config.rank)
        self._rank: _Started | None = None
        self._model: _Loaded | None = None

    @property
    def _started(self) -> _Started:
        if self._rank is None:
            raise _too_early()
        return self._rank

    @property
    def _loaded(self) -> _Loaded:
        if self._model is None:
            raise _too_early()
        return self._model

    # Start

    def start(self) -> None:
        """Start the device and make allocator, attention and kernels; raises ConfigError, CapabilityRefused for a rank that cannot be."""
        descriptor, device = self._context.descriptor, self._device
        check_ranks(self._config, descriptor, device)
        _prepare_for_forks()
        if self._config.threads is not None and not _is_forked:
            torch.set_num_threads(self._config.threads)
        platform: Platform = descriptor.make("platform", device) or Platform(device)
        platform.start(self._config.threads)
        self._rank = _Started(
            platform,
            descriptor.make("allocator", device),
            descriptor.make("attention", device),
            descriptor.make("kernels", device),
        )

    def load(self) -> ModelInfo:
        """Load the model's weights onto the device; raises ModelError, CapabilityRefused, DeviceOutOfMemory."""
        rank, config = self._started, self._config
        platform, allocator, attention = rank.platform, rank.allocator, rank.attention
        platform.make_current()
        model = load_rank(
            self._context,
            allocator=allocator,
            attention=attention,
            kernels=rank.kernels,
            platform=platform,
            groups=self._groups,
        )
        weights, kv, capture = self._parts_of(self._context, model, attention)
        vocabulary = TokenizerBackend.of(config.model, config.tokenizer, config.load_format, config.trust_remote_code)
        vocab_size = model.info.vocab_size
        grammars = Grammars(vocabulary, vocab_size)
        sampler = Sampler(vocab_size, self._device.torch_device, rank.kernels, platform, grammars)
        draft = None
        if config.draft_model is not None:
            draft, model = self._load_draft(rank, model, sampler)
        if config.prepare_sleep is not None:
            _prepare_sleep(allocator, replace(config.prepare_sleep, keep=KEPT))
        runner = ModelRunner(
            config, model, attention=attention, capture=capture, kv=kv, sampler=sampler, platform=platform, draft=draft
        )
        sleep = SleepCycle(allocator, weights, kv, model.communicators, platform.synchronize, draft)
        self._model = _Loaded(model, weights, kv, capture, sampler, runner, sleep, draft)
        return model.info

    def _load_draft(self, rank: _Started, target: LoadedModel, sampler: Sampler) -> tuple[DraftModel, LoadedModel]:
        """Load the draft model; return it, and the model with an account of both."""
        platform, allocator = rank.platform, rank.allocator
        # The draft model has an attention backend of its own: what is prepared for a step and captured is of one model.
        attention = self._context.descriptor.make("attention", self._device)
        context, model = load_draft(
            self._context,
            target,
            allocator=allocator,
            attention=attention,
            kernels=rank.kernels,
            platform=platform,
            groups=self._groups,
        )
        weights, kv, capture = self._parts_of(context, model, attention)
        runner = ModelRunner(
            context.config, model, attention=attention, capture=capture, kv=kv, sampler=sampler, platform=platform
        )
        draft = DraftModel(
            weights,
            kv,
            runner,
            sampler,
            platform,
            ranks=model.ranks.tensor,
            is_driver=self._config.rank == self._config.driver_rank,
            block_size=model.plan.block_size,
            max_tokens=context.config.max_num_batched_tokens,
        )
        info = replace(
            target.info,
            weight_bytes=target.info.weight_bytes + model.info.weight_bytes,
            draft_block_bytes=model.plan.kv_cache.block_bytes,
            # The host has to know each guess before the next one is drawn.
            steps_in_flight=0,
        )
        return draft, replace(target, info=info)

    def _parts_of(
        self, context: WorkerContext, model: LoadedModel, attention: AttentionBackend
    ) -> tuple[Weights, KVMemory, StepCapture]:
        """Return what writes a loaded model's weights, what holds its KV cache and states, and what captures its steps."""
        rank, states = self._started, None
        rank.platform.synchronize()
        if layers := model.model.state_layers():
            upload = rank.platform.upload
            states = StateMemory(layers, context.config.max_num_seqs, allocator=rank.allocator, upload=upload)
        kv = KVMemory(
            model.plan.kv_cache,
            allocator=rank.allocator,
            attention=attention,
            platform=rank.platform,
            torch_device=self._device.torch_device,
            states=states,
        )
        capture = StepCapture(context, model, allocator=rank.allocator, attention=attention, platform=rank.platform)
        return Weights(model, rank.allocator, rank.platform.synchronize), kv, capture

    def profile(self) -> MemoryProfile:
        """Run the largest legal step with dummy tokens over a KV cache of just its own size, and return what it takes.

        Graphs are counted by a few that are captured for it; raises GraphCaptureFailed as `warm_up` does. Over a simulated driver, which
        computes nothing, the step counts as its logits alone.
        """
        rank, model, config = self._started, self._loaded, self._config
        rank.platform.make_current()
        total, used = rank.platform.total_and_used(rank.allocator, config.world_size)
        current = rank.allocator.stats().allocated
        cost = self._largest_step(rank, model)
        asked = config.memory_utilization
        return MemoryProfile(
            total=total,
            used=used,
            peak=current + cost.growth,
            current=current,
            utilization=asked or rank.platform.memory_utilization,
            kv_limit=model.kv.limit(rank.platform.kv_bytes if asked is None else None),
            graphs=cost.graphs,
            seconds_per_token=cost.seconds_per_token,
            seconds_per_swapped_block=cost.seconds_per_swapped_block,
        )

    def _largest_step(self, rank: _Started, model: _Loaded) -> StepCost:
        try:
            rank.platform.check_computes()
        except CapabilityRefused:
            _log.warning(
                "the driver of %s is simulated: the largest step is not run, and counts as its logits alone",
                self._device.name,
            )
            return StepCost(growth=logits_bytes(self._config.max_num_samples, model.model.info.vocab_size))
        return largest_step(
            self._config,
            model.model,
            model.runner,
            model.kv,
            model.capture,
            model.sampler,
            rank.platform,
            rank.allocator,
        )

    def initialize_kv(self, num_device_blocks: int, num_host_blocks: int) -> None:
        """Allocate the KV cache and the host's swap space; raises DeviceOutOfMemory, HostBudgetExceeded, CapabilityRefused."""
        self._loaded.runner.drop_graphs()
        self._loaded.kv.initialize(num_device_blocks, num_host_blocks)
        if self._loaded.draft is not None:
            self._loaded.draft.kv.initialize(num_device_blocks, num_host_blocks)

    def open_tiers(self, num_host_blocks: int, num_disk_blocks: int, folder: str | None) -> None:
        """Take memory for blocks that the prefix cache evicts; raises HostBudgetExceeded, ConfigError."""
        self._loaded.kv.open_tiers(num_host_blocks, num_disk_blocks, folder)
        if self._loaded.draft is not None:
            self._loaded.draft.kv.open_tiers(num_host_blocks, num_disk_blocks, folder)

    def warm_up(self) -> None:
        """Run small steps where the first run of one compiles, so that the first request finds everything in place; capture decodes.

        Raises GraphCaptureFailed where graphs are planned, wanted, and not to be had.
        """
        self._started.platform.make_current()
        self._loaded.runner.warm_up()
        if self._loaded.draft is not None:
            self._loaded.draft.runner.warm_up()

    # Steps

    def submit(self, step: StepInput) -> None:
        """Queue one step on the device; raises MemoryBusy, MemoryAsleep, WeightsMissing, WorkerError; see `Worker.submit`."""
        model = self._loaded
        self._transactions.check_none("compute a step")
        model.sleep.check_awake()
        model.weights.check_valid()
        if model.draft is not None:
            model.draft.weights.check_valid()
        if len(model.in_flight) > model.model.info.steps_in_flight:
            raise WorkerError(
                "a step was submitted too early",
                found=f"{len(model.in_flight)} steps wait to be collected",
                hint="Collect the oldest one first",
            )
        model.kv.check_initialized()
        self._started.platform.make_current()
        # No local name may outlive the exception: its traceback refers to this frame, and the cycle would keep the step's tensors.
        try:
            model.in_flight.append(model.runner.launch(step))
        except Exception as error:
            model.in_flight.append(error)

    def collect(self) -> StepOutput:
        """Wait for the oldest step that was submitted, and return its output; see `Worker.collect`."""
        in_flight = self._loaded.in_flight
        if not in_flight:
            raise NothingToCollect("there is no step whose output could be collected", hint="Submit one first")
        outcome = in_flight.popleft()
        if isinstance(outcome, Exception):
            try:
                raise outcome
            finally:
                # The traceback refers to this frame: if the frame referred back, the step's tensors would stay until a collection.
                del outcome
        return outcome.collect()

    # Memory

    def begin(self, transaction: int, change: MemoryChange) -> None:
        """Prepare a sleep or wake; see `Worker.begin`.

        Backups of weights are kept over wake: every write of theirs goes through this worker, or is declared.
        """
        sleep = self._loaded.sleep
        self._transactions.take(transaction)
        self._loaded.runner.forget_embeddings()
        self._transactions.open = sleep.prepare(change)

    def commit(self, transaction: int) -> MemoryReport:
        """Finish what was prepared; raises InvalidTransaction."""
        communicators = self._loaded.model.communicators
        before = communicators.resident_bytes()
        report = self._transactions.commit(transaction)
        kept = communicators.resident_bytes()
        held = {GRAPHS: self._loaded.runner.graph_bytes(), COLLECTIVES: kept or None}
        named = {name: size for name, size in held.items() if size is not None}
        # A sleep gives communicators' memory back, and a wake takes it.
        unmapped = report.unmapped + abs(before - kept)
        return replace(report, unmapped=unmapped, residual={**report.residual, **named})

    def rollback(self, transaction: int) -> None:
        """Return to the state before the preparation; raises InvalidTransaction, and what the allocator raises."""
        self._transactions.rollback(transaction)

    def write_weights(
        self, write: WeightWrite, weights: Iterable[tuple[str, Tensor]] = (), model: str | None = None
    ) -> int:
        """Give weights values; see `Worker.write_weights`. Those that are declared valid have no backups and sources any more."""
        self._transactions.check_none("write weights")
        self._loaded.sleep.check_weights_awake()
        held, draft = self._loaded.weights, self._loaded.draft
        self._loaded.runner.forget_embeddings()
        if draft is not None:
            # Callers write the model's weights alone, so that the draft model's are loaded here again where a sleep has discarded them.
            draft.weights.restore(trust_remote_code=self._config.trust_remote_code)
        match write:
            case WeightWrite.UPDATE:
                return held.update(weights)
            case WeightWrite.RELOAD:
                return held.reload(model, trust_remote_code=self._config.trust_remote_code)
            case WeightWrite.DECLARE:
                held.declare_valid()
                return 0

    def load_adapter(self, number: int, path: str) -> int:
        """Read an adapter and keep it on the host; returns its bytes there. Raises InvalidAdapter, CapabilityRefused."""
        return self._adapters.load(number, path)

    def unload_adapter(self, number: int) -> None:
        """Forget an adapter; raises CapabilityRefused."""
        self._adapters.unload(number)

    @property
    def _adapters(self) -> AdapterMemory:
        adapters = self._loaded.model.adapters
        if adapters is None:
            raise CapabilityRefused(
                "the model takes no adapters",
                ["it was loaded without them"],
                hint="Make the engine with enable_lora=True",
            )
        return adapters

    def status(self) -> WorkerStatus:
        """Return this rank's account of its memory and weights."""
        memory = self._started.allocator.stats()
        if self._model is None:
            return WorkerStatus(memory)
        self._model.sleep.forget_asleep()
        missing, draft = self._model.weights.ledger.missing, self._model.draft
        if draft is not None:
            missing |= {f"draft model: {name}" for name in draft.weights.ledger.missing}
        return WorkerStatus(memory, missing)

    def start_trace(self, folder: str) -> None:
        """Record what the host and the device do; raises InvalidRequest."""
        self._started.platform.synchronize()
        self._trace.start(folder)

    def stop_trace(self) -> str:
        """Write what was recorded to a file of Chrome's trace format, and return its path; raises InvalidRequest."""
        self._started.platform.synchronize()
        return self._trace.stop()

    # End

    def shutdown(self) -> None:
        """Give everything back, after rolling back what is open; callable in any state, and idempotent."""
        self._trace.abandon()
        self._transactions.abandon()
        if self._model is not None:
            if self._model.in_flight and self._rank is not None:
                # A device that failed raises here; its memory is given back all the same.
                with suppress(Exception):
                    self._rank.platform.synchronize()
            self._model.runner.drop_graphs()
            self._model.sampler.close()
            self._model.kv.close()
            if self._model.draft is not None:
                self._model.draft.kv.close()
        self._model = None
        self._groups.close()
        rank, self._rank = self._rank, None
        if rank is not None:
            rank.allocator.close()
            rank.platform.release()


@cache
def _prepare_for_forks() -> None:
    """Have forked children compute torch's operators in one thread: OpenMP's others are not there, and would be waited for without end."""
    os.register_at_fork(after_in_child=_compute_in_one_thread)


def _compute_in_one_thread() -> None:
    global _is_forked
    _is_forked = True
    torch.set_num_threads(1)


def _prepare_sleep(allocator: DeviceAllocator, plan: SleepPlan) -> None:
    """Ready the host for a sleep; raises HostBudgetExceeded for a budget that no sleep can keep to.

    Room that the host lacks now may be there by then, and the model can be served without: the sleep itself refuses where it is not.
    """
    try:
        allocator.prepare_sleep(plan)
    except HostBudgetExceeded as error:
        if plan.host_budget is not None:
            raise
        _log.warning("the first sleep is not made ready, and will take longer or be refused: %s", error)


def _too_early() -> WorkerError:
    return WorkerError(
        "the worker is not ready for this call",
        found="an earlier call is missing",
        hint="Call start, load, profile, initialize_kv and warm_up first, in this order",
    )
