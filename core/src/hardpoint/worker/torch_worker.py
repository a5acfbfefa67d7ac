"""The common part of every backend's worker."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, TypeVar, cast

import numpy as np
import torch

from hardpoint.interfaces.allocator import (
    GRAPHS,
    KV_CACHE,
    WEIGHTS,
    DeviceAllocator,
    LiveRanges,
    MemoryReport,
    MemoryStats,
    MemoryTransaction,
    Policy,
    SleepPlan,
)
from hardpoint.interfaces.attention import AttentionBackend, AttentionPlan, Refusal
from hardpoint.interfaces.batch import FloatArray, Int32Array, Int64Array, StepBatch, StepInput, StepOutput
from hardpoint.interfaces.capabilities import AttentionFeature, AttentionRequest, GraphLevel, SleepTier
from hardpoint.interfaces.dtypes import DType
from hardpoint.interfaces.errors import (
    CapabilityRefused,
    ConfigError,
    HostBudgetExceeded,
    MemoryAsleep,
    WeightsMissing,
    WorkerError,
)
from hardpoint.interfaces.kernels import DecoderOutput, KernelSet
from hardpoint.interfaces.worker import MemoryProfile, ModelInfo, Worker, WorkerContext
from hardpoint.models import CapturableModel, attention_layers, load_model, open_model
from hardpoint.sampling import Sampler
from hardpoint.worker.decode_graphs import DecodeGraphs, graph_sizes
from hardpoint.worker.dummy import dummy_batch
from hardpoint.worker.live_kv import live_ranges
from hardpoint.worker.pooling import Pooler
from hardpoint.worker.ranks import PlainSequences, check_ranks, join_ranks, place_of
from hardpoint.worker.transactions import MemoryChange, Transactions
from hardpoint.worker.weight_ledger import WeightLedger

if TYPE_CHECKING:
    from torch import Tensor

    from hardpoint.models import ModelSource, RunnableModel

T = TypeVar("T")

_log = logging.getLogger("hardpoint")

_TIMED_TOKENS = 256
"""Length of the timed step of a model that needs no memory measured."""

_KEPT = frozenset({WEIGHTS})
"""Tags all of whose writers say so: the loader, updates and reloads."""

_ENGINE_FEATURES = frozenset({AttentionFeature.CHUNKED_PREFILL, AttentionFeature.MIXED_BATCH})


class TorchWorker(Worker, partial=True):
    """A rank on one torch device, in terms of the backend's allocator, attention and kernels.

    A vendor's worker overrides what its device does differently: `_start_device`, `_synchronize`,
    `_total_and_used`, `_peak_growth`, `_empty_host`.
    """

    _default_memory_utilization: ClassVar[float] = 0.9
    _default_kv_bytes: ClassVar[int | None] = None

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._config = context.config
        self._device = context.device
        self._allocator: DeviceAllocator | None = None
        self._attention: AttentionBackend | None = None
        self._kernels: KernelSet | None = None
        self._source: ModelSource | None = None
        self._model: RunnableModel | None = None
        self._plan: AttentionPlan | None = None
        self._info: ModelInfo | None = None
        self._sampler: Sampler | None = None
        self._pooler = Pooler()
        self._ledger = WeightLedger(frozenset())
        self._asleep: frozenset[str] = frozenset()
        self._transactions = Transactions()
        self._unsourced = ""
        self._kv_cache: Tensor | None = None
        self._host_kv_cache: Tensor | None = None
        self._graphs: DecodeGraphs | None = None
        self._place = place_of(context.config)
        self._groups = ExitStack()
        self._plain = PlainSequences()

    # Hooks for vendors

    def _start_device(self) -> None:
        """Make this rank's device current. Default: nothing."""

    def _synchronize(self) -> None:
        """Wait until the device has done all its work. Default: nothing, for devices that work in the caller's thread."""

    def _total_and_used(self) -> tuple[int, int]:
        """Return the device's memory and what is in use of it, bytes. Default: as the driver reports them."""
        info = _need(self._allocator).memory_info()
        return info.total, info.total - info.free

    def _peak_growth(self, step: Callable[[], object]) -> int:
        """Run `step` to its end and return the most device memory that it took beyond what was in use, bytes.

        Default: by the allocator's own books. A device on which torch allocates for itself overrides this with its counters.
        """
        allocator = _need(self._allocator)
        before = allocator.stats()
        step()
        self._synchronize()
        return max(allocator.stats().peak_allocated - before.peak_allocated, 0)

    def _empty_host(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return host memory that the device copies to and from; pinned where that helps. Default: plain memory."""
        return torch.empty(tuple(shape), dtype=dtype)

    # The contract

    def init_device(self) -> None:
        """Start the device and make allocator, attention and kernels; raises ConfigError, CapabilityRefused for a rank that cannot be."""
        check_ranks(self._config, self._context.descriptor, self._device)
        if self._config.threads is not None:
            torch.set_num_threads(self._config.threads)
        self._start_device()
        descriptor = self._context.descriptor
        self._allocator = descriptor.make("allocator", self._device)
        self._attention = descriptor.make("attention", self._device)
        self._kernels = descriptor.make("kernels", self._device)

    def load_model(self) -> ModelInfo:
        """Load the model's weights onto the device; raises ModelError, CapabilityRefused, DeviceOutOfMemory."""
        config, attention, allocator = self._config, _need(self._attention), _need(self._allocator)
        source = open_model(config.model, load_format=config.load_format, trust_remote_code=config.trust_remote_code)
        fingerprint = source.fingerprint()
        dtype = config.dtype or source.dtype
        max_model_len = self._max_model_len(source)
        request = AttentionRequest(
            layers=attention_layers(source, dtype, self._place, config.kv_dtype),
            dtype=dtype,
            kv_dtype=config.kv_dtype or dtype,
            block_size=config.block_size,
            max_context=max_model_len,
            features=_ENGINE_FEATURES,
        )
        plan = attention.plan(request)
        if isinstance(plan, Refusal):
            raise CapabilityRefused(
                f"the {self._context.descriptor.name} backend cannot run {source.path}",
                plan.reasons,
                hint="`hardpoint doctor` lists what the backend supports",
            )
        ranks = None
        if not self._place.is_alone:
            ranks, self._groups = join_ranks(config, self._context.descriptor, self._device)
        with torch.no_grad(), _default_dtype(torch.get_default_dtype()):
            self._model = load_model(
                source,
                dtype=dtype,
                plan=plan,
                attention=attention,
                kernels=self._kernels,
                allocator=allocator,
                torch_device=self._device.torch_device,
                load_format=config.load_format,
                max_num_tokens=config.max_num_batched_tokens,
                max_num_samples=config.max_num_seqs,
                max_context=max_model_len,
                use_fused_decoder=config.use_fused_decoder,
                seed=config.seed,
                place=self._place,
                ranks=ranks,
            )
        self._synchronize()
        self._source, self._plan = source, plan
        self._ledger = WeightLedger(self._model.weight_names())
        self._declare_sources(source, fingerprint)
        source.close_weights()
        if config.prepare_sleep is not None:
            allocator.prepare_sleep(replace(config.prepare_sleep, keep=_KEPT))
        self._sampler = Sampler(source.vocab_size, self._kernels)
        self._info = ModelInfo(
            architecture=source.architecture,
            dtype=dtype,
            vocab_size=source.vocab_size,
            max_model_len=max_model_len,
            num_layers=len(source.attention_layers()),
            weight_bytes=self._model.weight_bytes,
            attention=plan,
            path=self._model.path,
            is_generative=source.is_generative,
        )
        return self._info

    def profile(self) -> MemoryProfile:
        """Run the largest legal step with dummy tokens over a KV cache of just its own size, and return what it takes.

        A model that holds its working memory for the largest step already (`scratch_bytes`) is run with a shorter one, for the time.
        """
        allocator, info, model = _need(self._allocator), _need(self._info), _need(self._model)
        total, used = self._total_and_used()
        before = allocator.stats().allocated
        batch = dummy_batch(
            num_tokens=min(self._config.max_num_batched_tokens, _TIMED_TOKENS if model.scratch_bytes else sys.maxsize),
            max_len=info.max_model_len,
            block_size=info.attention.block_size,
            max_seqs=self._config.max_num_seqs,
        )
        spec = info.attention.kv_cache
        num_blocks = int(batch.block_table.max()) + 1
        cache = allocator.empty(spec.shape(num_blocks), spec.dtype, KV_CACHE, Policy.DISCARD)
        cache.zero_()
        start = time.perf_counter()
        growth = self._peak_growth(partial(self._forward, batch, cache, DecoderOutput.LOGITS))
        seconds = time.perf_counter() - start
        unsampled = self._config.max_num_seqs - len(batch.sample_rows) if self._place.is_last else 0
        growth += unsampled * info.vocab_size * DType.FLOAT32.itemsize
        del cache
        return MemoryProfile(
            total=total,
            used=used,
            peak=before + growth,
            current=before,
            utilization=self._config.memory_utilization or self._default_memory_utilization,
            kv_limit=self._kv_limit(),
            seconds_per_token=seconds / batch.num_tokens,
            seconds_per_swapped_block=self._seconds_per_swapped_block(),
        )

    def initialize_kv(self, num_device_blocks: int, num_host_blocks: int) -> None:
        """Allocate the KV cache and the host's swap space; raises DeviceOutOfMemory, HostBudgetExceeded, CapabilityRefused."""
        self._drop_graphs()
        spec = _need(self._plan).kv_cache
        self._check_addressable(num_device_blocks)
        self._kv_cache = _need(self._allocator).empty(
            spec.shape(num_device_blocks), spec.dtype, KV_CACHE, Policy.DISCARD
        )
        self._host_kv_cache = self._swap_space(num_host_blocks) if num_host_blocks else None

    def warm_up(self) -> None:
        """Run one prefill and one decode of small steps, so that the first request finds everything in place; capture decodes.

        Raises GraphCaptureFailed where graphs are planned, wanted, and not to be had.
        """
        self._drop_graphs()
        info, cache = _need(self._info), _need(self._kv_cache)
        for length in (min(16, info.max_model_len, info.attention.block_size), 1):
            batch = dummy_batch(num_tokens=length, max_len=length, block_size=info.attention.block_size, max_seqs=1)
            self._forward(batch, cache, DecoderOutput.ARGMAX)
        self._synchronize()
        self._graphs = self._capture()

    def execute(self, step: StepInput) -> StepOutput:
        """Swap, copy, compute and sample one step; raises MemoryAsleep, WeightsMissing."""
        self._check_awake()
        batch, sampler, cache = step.batch, _need(self._sampler), _need(self._kv_cache)
        if step.finished_seq_ids:
            sampler.remove(step.finished_seq_ids)
            self._plain.remove(step.finished_seq_ids)
            self._pooler.remove(step.finished_seq_ids)
        for sequence in step.new_sequences:
            self._plain.add(sequence)
            if self._is_driver:
                sampler.add(sequence)
        self._move_blocks(batch, cache)
        if batch.num_tokens == 0:
            return StepOutput(token_ids=np.empty(0, np.int64))
        embeddings = self._pool(step, cache) if step.pooling else {}
        if not len(batch.sample_seq_ids):
            if not step.pooling:
                self._forward(batch, cache, DecoderOutput.ARGMAX)
                self._synchronize()
            return StepOutput(token_ids=np.empty(0, np.int64), embeddings=embeddings)
        output = DecoderOutput.ARGMAX if self._wants_argmax(batch.sample_seq_ids) else DecoderOutput.LOGITS
        result = self._forward(batch, cache, output)
        if not self._is_driver:
            self._synchronize()
            return StepOutput(token_ids=np.empty(0, np.int64))
        if output is DecoderOutput.ARGMAX:
            return StepOutput(token_ids=result.numpy(force=True), embeddings=embeddings)
        token_ids, logprobs = sampler.sample(result, batch.sample_seq_ids)
        return StepOutput(token_ids=token_ids, logprobs=logprobs, embeddings=embeddings)

    def sleep(self, plan: SleepPlan) -> MemoryReport:
        """Give device memory back; raises what the allocator raises, and CapabilityRefused for weights without a source.

        Backups of weights are kept over wake: every write of theirs goes through this worker, or is declared.
        """
        self._transactions.check_none("sleep")
        return self._with_graphs(self._prepare_sleep(plan).commit())

    def wake(self, tags: Sequence[str] | None = None) -> MemoryReport:
        """Take device memory again."""
        self._transactions.check_none("wake")
        return self._prepare_wake(tags).commit()

    def begin_sleep(self, transaction: int, plan: SleepPlan) -> None:
        """Prepare `sleep(plan)`; see `Worker.begin_sleep`."""
        self._transactions.begin(transaction, partial(self._prepare_sleep, plan))

    def begin_wake(self, transaction: int, tags: Sequence[str] | None = None) -> None:
        """Prepare `wake(tags)`; see `Worker.begin_wake`."""
        self._transactions.begin(transaction, partial(self._prepare_wake, tags))

    def commit(self, transaction: int) -> MemoryReport:
        """Finish what was prepared; raises InvalidTransaction."""
        return self._with_graphs(self._transactions.commit(transaction))

    def rollback(self, transaction: int) -> None:
        """Return to the state before the preparation; raises InvalidTransaction, and what the allocator raises."""
        self._transactions.rollback(transaction)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> int:
        """Replace weights by (checkpoint name, tensor) pairs; see `Worker.update_weights`."""
        self._check_weights_awake()
        self._synchronize()
        written: set[str] = set()
        try:
            with torch.inference_mode(), self._ledger.writing(written):
                return _need(self._model).update_weights(weights, written)
        finally:
            self._note_written(written, "they were updated since they were loaded")

    def reload_weights(self, model: str | None = None) -> int:
        """Load the weights again from the checkpoint that was loaded last, or from another one of the same model.

        Returns how many tensors were loaded; see `Worker.reload_weights` for errors.
        """
        self._check_weights_awake()
        trust = self._config.trust_remote_code
        source = _need(self._source).opener()() if model is None else open_model(model, trust_remote_code=trust)
        fingerprint = source.fingerprint()
        self._synchronize()
        written: set[str] = set()
        try:
            with torch.no_grad(), _default_dtype(torch.get_default_dtype()), self._ledger.writing(written):
                count = _need(self._model).reload(source, written)
        finally:
            self._note_written(written, "a reload broke off")
        self._source = source
        self._declare_sources(source, fingerprint)
        source.close_weights()
        return count

    def missing_weights(self) -> frozenset[str]:
        """Return the checkpoint names of weights without valid values."""
        return self._ledger.missing

    def declare_weights_valid(self) -> None:
        """Say that the weights are right as they stand; backups and sources of them are void."""
        self._check_weights_awake()
        self._note_written(self._ledger.missing or _KEPT, "they were written by ways that the engine does not see")
        self._ledger.declare_valid()

    def memory_stats(self) -> MemoryStats:
        """Return the books of this rank's allocator."""
        return _need(self._allocator).stats()

    def shutdown(self) -> None:
        """Give everything back, after rolling back what is open; legal in any state and more than once."""
        self._transactions.abandon()
        self._drop_graphs()
        self._model = self._sampler = self._kv_cache = self._host_kv_cache = None
        self._attention = self._kernels = None
        self._groups.close()
        if self._allocator is not None:
            self._allocator.close()
            self._allocator = None

    # Sleep

    def _prepare_sleep(self, plan: SleepPlan) -> MemoryChange:
        self._synchronize()
        allocator = _need(self._allocator)
        before = allocator.stats()
        plan = self._completed(plan)
        self._check_source(plan, before)
        obsolete = [tag for tag in sorted(before.asleep) if _discards(plan, tag) and _is_restorable(before, tag)]

        def on_commit() -> None:
            if _discards(plan, WEIGHTS):
                self._ledger.discard_all()
            if obsolete:
                allocator.discard_backup(obsolete)

        return self._change(lambda: allocator.begin_sleep(plan), on_commit)

    def _prepare_wake(self, tags: Sequence[str] | None) -> MemoryChange:
        allocator = _need(self._allocator)
        with torch.no_grad():
            return self._change(lambda: allocator.begin_wake(tags), lambda: None)

    def _change(self, begin: Callable[[], MemoryTransaction], on_commit: Callable[[], None]) -> MemoryChange:
        try:
            return MemoryChange(begin(), on_commit, self._note_asleep)
        except BaseException:
            self._note_asleep()
            raise

    def _note_asleep(self) -> None:
        self._asleep = _need(self._allocator).stats().asleep

    def _completed(self, plan: SleepPlan) -> SleepPlan:
        """Return the plan with what only the worker knows: bytes of live KV blocks, and whose writers are all known."""
        plan = replace(plan, keep=plan.keep | _KEPT)
        if plan.live_blocks is None or not _includes(plan, KV_CACHE):
            return plan
        cache = _need(self._kv_cache)
        spec = _need(self._plan).kv_cache
        num_blocks = cache.shape[spec.axes.index("block") + 1]
        ranges = live_ranges(plan.live_blocks, spec, num_blocks)
        policy = Policy.PRESERVE if ranges else Policy.DISCARD
        live = (*plan.live, LiveRanges(cache, ranges)) if ranges else plan.live
        return replace(plan, policies={**plan.policies, KV_CACHE: policy}, live=live)

    def _check_source(self, plan: SleepPlan, stats: MemoryStats) -> None:
        """Refuse the tier `source` for weights that are nowhere to be read again."""
        concerned = _includes(plan, WEIGHTS) and not _discards(plan, WEIGHTS) and WEIGHTS not in stats.asleep
        if plan.tier is not SleepTier.SOURCE or not concerned:
            return
        weights = stats.tags.get(WEIGHTS)
        if weights is None or not weights.sourced:
            raise CapabilityRefused(
                "the weights cannot be left to their source",
                (self._unsourced or "they cannot be told apart from other memory of the decoder",),
                hint="Use the tier host or disk, or reload_weights() first",
            )

    def _declare_sources(self, source: ModelSource, fingerprint: object) -> None:
        """Tell the allocator where the weights can be read again, unless their files changed while they were loaded."""
        if source.fingerprint() == fingerprint:
            _need(self._model).declare_sources(_need(self._allocator), source)
            self._unsourced = ""
        else:
            self._unsourced = "the checkpoint changed while it was loaded"

    def _note_written(self, written: Set[str], reason: str) -> None:
        if written:
            _need(self._allocator).mark_written([WEIGHTS])
            self._unsourced = reason

    def _check_awake(self) -> None:
        self._transactions.check_none("compute a step")
        if self._asleep:
            raise MemoryAsleep(
                "a step needs memory that is asleep", found=", ".join(sorted(self._asleep)), hint="Wake it first"
            )
        missing = self._ledger.missing
        if missing:
            raise WeightsMissing(
                "the weights were discarded and have not been loaded again",
                found=f"{len(missing)} tensors are missing",
                hint="Call reload_weights(), update_weights() with all of them, or declare_weights_valid()",
            )

    def _check_weights_awake(self) -> None:
        self._transactions.check_none("write weights")
        if WEIGHTS in self._asleep:
            raise MemoryAsleep("the weights are asleep and cannot be written", hint="Wake the tag 'weights' first")

    # Steps

    @property
    def _is_driver(self) -> bool:
        return self._config.rank == self._config.driver_rank

    def _wants_argmax(self, seq_ids: Int64Array) -> bool:
        """Whether a step needs no logits; the same answer on all ranks, of which only the driver counts tokens."""
        if self._place.is_alone:
            return _need(self._sampler).all_plain_argmax(seq_ids)
        return self._plain.all(seq_ids)

    @torch.inference_mode()
    def _forward(
        self, batch: StepBatch, cache: Tensor, output: DecoderOutput, rows: Int32Array | None = None
    ) -> Tensor:
        """Run the model on one step; `rows` are token indices, by default the last token of each sampled sequence."""
        if rows is None:
            rows = batch.query_start[batch.sample_rows + 1] - 1
        if self._graphs is not None and cache is self._kv_cache and self._graphs.fits(batch):
            return self._replay(self._graphs, batch, output, rows)
        metadata = _need(self._attention).prepare(_need(self._plan), batch)
        wanted = torch.from_numpy(rows).to(self._device.torch_device)
        return _need(self._model).run(batch, metadata, cache, wanted, output)

    # Graphs

    def _capture(self) -> DecodeGraphs | None:
        """Capture the decode steps; None where the user or the plan wants none, or the model cannot be captured."""
        plan, model = _need(self._plan), _need(self._model)
        if self._config.enforce_eager or plan.graph_level is GraphLevel.NONE:
            return None
        if self._config.pipeline_parallel_size > 1:
            _log.warning("steps run without graphs: stages of a pipeline are not captured")
            return None
        runner = self._context.descriptor.make("graph_runner", self._device)
        if runner is None:
            return None
        if not isinstance(model, CapturableModel):
            _log.warning("steps of this model run without graphs: its way to run (%s) cannot be captured", model.path)
            return None
        with torch.inference_mode():
            return DecodeGraphs(
                runner,
                attention=_need(self._attention),
                plan=plan,
                model=model,
                kv_cache=_need(self._kv_cache),
                sizes=graph_sizes(self._config.max_num_seqs),
                allocator=_need(self._allocator),
                empty_host=self._empty_host,
            )

    def _drop_graphs(self) -> None:
        graphs, self._graphs = self._graphs, None
        if graphs is not None:
            graphs.reset()

    def _replay(self, graphs: DecodeGraphs, batch: StepBatch, output: DecoderOutput, rows: Int32Array) -> Tensor:
        """Compute a step of decodes by its graph; token `i` of such a step is that of sequence `i`."""
        hidden = graphs.replay(batch)
        if len(rows) != len(hidden) or not np.array_equal(rows, np.arange(len(rows))):
            hidden = hidden.index_select(0, torch.from_numpy(rows).to(self._device.torch_device))
        return hidden if output is DecoderOutput.HIDDEN else cast(CapturableModel, self._model).head(hidden, output)

    def _with_graphs(self, report: MemoryReport) -> MemoryReport:
        """Return a report with what the graphs hold on the device now."""
        if self._graphs is None:
            return report
        return replace(report, residual={**report.residual, GRAPHS: self._graphs.resident_bytes()})

    def _pool(self, step: StepInput, cache: Tensor) -> dict[int, FloatArray]:
        """Run a step for hidden states; return the embeddings of the prompts that end in it.

        A step that also samples runs once more for its logits: keys and values are then written again, the same ones.
        """
        batch = step.batch
        rows = np.arange(batch.num_tokens, dtype=np.int32)
        hidden = self._forward(batch, cache, DecoderOutput.HIDDEN, rows)
        if not self._is_driver:
            return {}
        embeddings = {}
        for row, seq_id in enumerate(batch.seq_ids.tolist()):
            request = step.pooling.get(seq_id)
            if request is None:
                continue
            chunk = hidden[batch.query_start[row] : batch.query_start[row + 1]]
            context = int(batch.context_lens[row])
            embedding = self._pooler.add(
                seq_id, request.pooling, chunk, ends=context == request.prompt_len, starts=context == len(chunk)
            )
            if embedding is not None:
                embeddings[seq_id] = embedding
        return embeddings

    def _move_blocks(self, batch: StepBatch, cache: Tensor) -> None:
        attention = _need(self._attention)
        if len(batch.swap_out):
            attention.swap_blocks(cache, _need(self._host_kv_cache), batch.swap_out)
        if len(batch.swap_in):
            attention.swap_blocks(_need(self._host_kv_cache), cache, batch.swap_in)
        if len(batch.copies):
            attention.copy_blocks(cache, batch.copies)

    # Sizes

    def _kv_limit(self) -> int | None:
        """Return the most bytes for the KV cache: the worker's default where nothing was asked, and what attention can address."""
        default = self._default_kv_bytes if self._config.memory_utilization is None else None
        elements = _need(self._attention).capabilities().max_cache_elements
        if elements is None:
            return default
        spec = _need(self._plan).kv_cache
        addressable = 2 * spec.num_layers * elements * spec.dtype.itemsize
        return addressable if default is None else min(default, addressable)

    def _check_addressable(self, num_blocks: int) -> None:
        """Refuse a KV cache whose layers attention cannot address."""
        elements = _need(self._attention).capabilities().max_cache_elements
        spec = _need(self._plan).kv_cache
        per_block = spec.block_size * spec.num_kv_heads * spec.head_dim
        if elements is not None and num_blocks * per_block > elements:
            raise CapabilityRefused(
                f"a KV cache of {num_blocks} blocks was asked for",
                [
                    f"attention addresses {elements} elements of a layer's keys, which are {elements // per_block} blocks"
                ],
                hint=f"Ask for {elements // per_block} blocks at most",
            )

    def _swap_space(self, num_blocks: int) -> Tensor:
        spec = _need(self._plan).kv_cache
        try:
            return self._empty_host(spec.shape(num_blocks), spec.dtype.to_torch())
        except (RuntimeError, MemoryError) as error:
            raise HostBudgetExceeded(
                f"cannot take {num_blocks * spec.block_bytes} bytes of host memory for swapped KV blocks",
                found=str(error).splitlines()[0],
                hint="Lower swap_space",
            ) from error

    def _max_model_len(self, source: ModelSource) -> int:
        asked = self._config.max_model_len
        if asked is None:
            return source.max_model_len
        if not 1 <= asked <= source.max_model_len:
            raise ConfigError(
                f"max_model_len={asked} is not possible",
                found=f"the model's context is {source.max_model_len} tokens",
                hint=f"Give a value from 1 to {source.max_model_len}",
            )
        return asked

    def _seconds_per_swapped_block(self) -> float:
        """Estimate the time to move one KV block to the host: its bytes at the speed of a measured copy."""
        spec = _need(self._plan).kv_cache
        sample = torch.zeros(max(4 << 20, spec.block_bytes), dtype=torch.uint8, device=self._device.torch_device)
        host = self._empty_host(sample.shape, torch.uint8)
        best = math.inf
        for _ in range(3):
            start = time.perf_counter()
            host.copy_(sample)
            self._synchronize()
            best = min(best, time.perf_counter() - start)
        return best * spec.block_bytes / sample.nbytes


def _includes(plan: SleepPlan, tag: str) -> bool:
    return plan.tags is None or tag in plan.tags


def _discards(plan: SleepPlan, tag: str) -> bool:
    return _includes(plan, tag) and plan.policies.get(tag) is Policy.DISCARD


def _is_restorable(stats: MemoryStats, tag: str) -> bool:
    return bool(stats.tags[tag].backed_up or stats.tags[tag].sourced)


def _need(part: T | None) -> T:
    """Return a part of the worker; raises WorkerError when the call that makes it has not been made."""
    if part is None:
        raise WorkerError(
            "the worker is not ready for this call",
            hint="Call init_device, load_model, profile, initialize_kv and warm_up first, in this order",
        )
    return part


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Restore torch's default dtype, which model code may change, on exit."""
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
