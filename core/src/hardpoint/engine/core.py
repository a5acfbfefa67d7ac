"""The engine's core: one backend, one executor, one scheduler, and the step that joins them. It knows tokens, not text."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hardpoint.engine.config import EngineConfig
from hardpoint.engine.sleep import LifeCycle, SleepSettings, SleepTotals
from hardpoint.executor import Executor, InProcessExecutor, ProcessTransport, RankLimits, RemoteExecutor
from hardpoint.interfaces.allocator import KV_CACHE, WEIGHTS, Policy, SleepPlan
from hardpoint.interfaces.batch import FloatArray, SequencePooling, SequenceSampling, StepInput, TokenLogprobs
from hardpoint.interfaces.capabilities import MemoryCapabilities, SleepTier
from hardpoint.interfaces.errors import CapabilityRefused, EngineDead, KVCacheTooSmall, WorkerError
from hardpoint.interfaces.worker import MemoryProfile, ModelInfo, WorkerConfig, WorkerContext
from hardpoint.plugins import Resolved, resolve_backend
from hardpoint.scheduler import FinishReason, Scheduler, SchedulerConfig
from hardpoint.worker.ranks import check_claims

_PRESERVED = {WEIGHTS: Policy.PRESERVE, KV_CACHE: Policy.DISCARD}

_log = logging.getLogger("hardpoint")


@dataclass(frozen=True)
class EngineInfo:
    """What an engine turned out to be; sizes in bytes, times in seconds.

    Attributes:
        path: how the model runs: "fused" (one native call per step), "lean" (the core's torch decoder) or "transformers".
        weight_bytes, kv_bytes: of all ranks together.
        accelerator: the device has memory of its own; False where it is the host's.
        notice: one line where a backend of higher priority was passed over; logged as a warning when the engine is made.
    """

    backend: str
    device: str
    simulated: bool
    model: str
    architecture: str
    dtype: str
    path: str
    max_model_len: int
    block_size: int
    num_device_blocks: int
    num_host_blocks: int
    weight_bytes: int
    kv_bytes: int
    load_seconds: float
    accelerator: bool = False
    notice: str = ""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1

    @property
    def num_ranks(self) -> int:
        """How many ranks share the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


@dataclass(slots=True)
class StepTotals:
    """Tokens and seconds since the engine was made; a step with any prompt token counts as prefill.

    Attributes:
        prefill_tokens, prefill_seconds: prompt tokens computed, and the time of steps that had any.
        decode_tokens, decode_seconds: tokens sampled in, and the time of, steps that had no prompt token.
        sampled_tokens: all tokens sampled.
        preemptions: sequences preempted.
        sleep: what sleeps and wakes did.
    """

    steps: int = 0
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    sampled_tokens: int = 0
    preemptions: int = 0
    sleep: SleepTotals = field(default_factory=SleepTotals)


@dataclass(frozen=True, slots=True)
class CoreOutput:
    """What one step brought: sampled tokens by sequence, finished sequences, embeddings.

    Attributes:
        seq_ids, token_ids: one entry per sample, in order; samples of sequences that ended before are left out by the reader, as are those
            without a token, which is -1 then.
        logprobs: by index into token_ids.
        finished: (sequence, reason), in order.
        idle: the scheduler has no sequence left.
    """

    seq_ids: Sequence[int] = ()
    token_ids: Sequence[int] = ()
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    finished: Sequence[tuple[int, FinishReason]] = ()
    embeddings: Mapping[int, FloatArray] = field(default_factory=dict)
    idle: bool = False


class EngineCore:
    """Loads a model on the resolved backend and runs steps.

    Raises, while it is made: BackendError, ModelError, CapabilityRefused, ClusterError, ConfigError, KVCacheTooSmall, DeviceOutOfMemory,
    RankFailed; what was started by then is shut down again.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        start = time.perf_counter()
        resolved = resolve_backend(config.backend, device=config.device, require_accelerator=config.require_accelerator)
        if resolved.notice:
            _log.warning(resolved.notice)
        memory = resolved.descriptor.capabilities(resolved.device).memory
        settings = config.sleep_settings(accelerator=resolved.descriptor.accelerator, tiers=memory.tiers)
        _check_sleep(config, resolved, memory, settings)
        worker_config = config.worker_config(_prepared_sleep(config, resolved, settings))
        check_claims(worker_config, resolved.descriptor, resolved.device)
        self.executor = _make_executor(config, resolved, worker_config)
        try:
            self.model = self._start(resolved, start)
        except BaseException:
            self.executor.shutdown()
            raise
        self.life = LifeCycle(self.executor, self.scheduler, memory, settings, resolved.descriptor.name)
        self.totals = StepTotals(sleep=self.life.totals)
        self._new_sampling: dict[int, SequenceSampling] = {}
        self._pooling: dict[int, SequencePooling] = {}
        self._forgotten: list[int] = []

    def _start(self, resolved: Resolved, start: float) -> ModelInfo:
        call = self.executor.call
        call("start")
        models: list[ModelInfo] = call("load")
        profiles: list[MemoryProfile] = call("profile")
        if not resolved.descriptor.accelerator:
            profiles = [_share(profile, len(profiles)) for profile in profiles]
        model = models[0]
        spec = model.attention.kv_cache
        num_blocks = min(map(self._num_device_blocks, profiles, models))
        block_bytes = sum(one.attention.kv_cache.block_bytes for one in models)
        num_host = min(int(self.config.swap_space * (1 << 30)) // block_bytes, num_blocks)
        call("initialize_kv", num_blocks, num_host)
        call("warm_up")
        config = self.config
        self.scheduler = Scheduler(
            SchedulerConfig.complete(
                config,
                block_size=spec.block_size,
                num_device_blocks=num_blocks,
                num_host_blocks=num_host,
                max_model_len=model.max_model_len,
                vocab_size=model.vocab_size,
                swap_seconds_per_block=max(profile.seconds_per_swapped_block for profile in profiles),
                recompute_seconds_per_token=max(profile.seconds_per_token for profile in profiles),
            )
        )
        self.info = EngineInfo(
            backend=resolved.descriptor.name,
            device=resolved.device.name,
            simulated=resolved.device.simulated,
            model=config.model,
            architecture=model.architecture,
            dtype=str(model.dtype),
            path=model.path,
            max_model_len=model.max_model_len,
            block_size=spec.block_size,
            num_device_blocks=num_blocks,
            num_host_blocks=num_host,
            weight_bytes=sum(one.weight_bytes for one in models),
            kv_bytes=num_blocks * block_bytes,
            load_seconds=time.perf_counter() - start,
            accelerator=resolved.descriptor.accelerator,
            notice=resolved.notice,
            tensor_parallel_size=config.tensor_parallel_size,
            pipeline_parallel_size=config.pipeline_parallel_size,
        )
        return model

    def _num_device_blocks(self, profile: MemoryProfile, model: ModelInfo) -> int:
        """Return how many KV blocks to allocate; raises KVCacheTooSmall with what to change."""
        spec = model.attention.kv_cache
        if self.config.num_device_blocks is not None:
            return self.config.num_device_blocks
        needed = -(-model.max_model_len // spec.block_size)
        num_blocks = profile.kv_bytes // spec.block_bytes
        if num_blocks < needed:
            fits = max(num_blocks, 0) * spec.block_size
            raise KVCacheTooSmall(
                f"one request of {model.max_model_len} tokens needs {needed * spec.block_bytes} bytes of KV cache",
                found=(
                    f"{profile.kv_bytes} bytes are left of {profile.total} at a memory utilisation of"
                    f" {profile.utilization} ({profile.used} in use, {profile.peak - profile.current} for the largest step,"
                    f" {profile.graphs} for captured decodes)"
                ),
                hint=(
                    f"Lower max_model_len (at most {fits} fits), max_num_batched_tokens or max_num_seqs, or raise memory_utilization"
                ),
            )
        return int(num_blocks)

    def register(self, sampling: SequenceSampling) -> None:
        """Say how a sequence will be sampled; sent to the worker with the first step that samples it."""
        self._new_sampling[sampling.seq_id] = sampling

    def register_pooling(self, seq_id: int, pooling: SequencePooling) -> None:
        """Say that a sequence is an embedding request."""
        self._pooling[seq_id] = pooling

    def forget(self, seq_ids: Sequence[int]) -> None:
        """Drop what is kept of sequences that ended; the worker is told with the next step."""
        for seq_id in seq_ids:
            self._new_sampling.pop(seq_id, None)
            self._pooling.pop(seq_id, None)
        self._forgotten.extend(seq_ids)

    def step(self) -> CoreOutput:
        """Schedule, execute and book one step.

        A worker that fails ends the sequences of this step (they are aborted and their blocks freed) and raises WorkerError; all
        others go on with the next step. A rank that is gone raises RankFailed, and no step follows. Raises EngineAsleep,
        WeightsMissing or EngineDead in a state without steps.
        """
        self.life.check_step()
        start = time.perf_counter()
        batch = self.scheduler.schedule()
        if batch is None:
            return CoreOutput(idle=not self.scheduler.has_unfinished())
        new = self._new_sampling
        sampled = batch.sample_seq_ids.tolist()
        first: tuple[SequenceSampling, ...] = ()
        if new:
            rows = zip(sampled, batch.sample_state_rows.tolist(), strict=True)
            first = tuple(replace(new.pop(seq_id), state_row=row) for seq_id, row in rows if seq_id in new)
        pooling = {s: self._pooling[s] for s in batch.seq_ids.tolist() if s in self._pooling} if self._pooling else {}
        forgotten, self._forgotten = tuple(self._forgotten), []
        prefill_tokens = batch.num_tokens - batch.num_decodes
        preempted = len(batch.preempted)
        try:
            self.executor.submit(StepInput(batch, first, forgotten, pooling))
            output = self.executor.collect()
        except BaseException as error:
            if not isinstance(error, Exception):
                self._drop_submitted()
            # The worker may not have come to forget them; to forget twice does no harm.
            self._forgotten[:0] = forgotten
            lost = tuple(seq_id for seq_id, _ in self.scheduler.fail_step())
            if isinstance(error, EngineDead):
                self.life.die(error)
                raise
            if not isinstance(error, Exception):
                raise
            raise WorkerError.of(error, lost) from error
        finished = self.scheduler.update(output.token_ids)
        self._count(time.perf_counter() - start, prefill_tokens, len(sampled), preempted)
        for index, reason in output.failed.items():
            _log.warning("sequence %d ends with an error: %s", sampled[index], reason)
        return CoreOutput(
            seq_ids=sampled,
            token_ids=output.token_ids.tolist(),
            logprobs=output.logprobs,
            finished=finished,
            embeddings=output.embeddings,
        )

    def _drop_submitted(self) -> None:
        """Collect what an interrupt left between a step's submission and its collection."""
        for _ in range(self.model.steps_in_flight + 1):
            with contextlib.suppress(Exception):
                self.executor.collect()

    def _count(self, seconds: float, prefill_tokens: int, sampled: int, preempted: int) -> None:
        totals = self.totals
        totals.steps += 1
        totals.sampled_tokens += sampled
        totals.preemptions += preempted
        if prefill_tokens:
            totals.prefill_tokens += prefill_tokens
            totals.prefill_seconds += seconds
        else:
            totals.decode_tokens += sampled
            totals.decode_seconds += seconds

    def shutdown(self) -> None:
        """End the workers and give all memory back; legal more than once."""
        self.executor.shutdown()


def _make_executor(config: EngineConfig, resolved: Resolved, worker_config: WorkerConfig) -> Executor:
    kind = config.executor
    if kind == "ray":
        # Imported where it is asked for: on one machine nobody needs Ray.
        from hardpoint.executor.ray_transport import RayTransport

        return RemoteExecutor(RayTransport(resolved, worker_config, RankLimits.parse(config.rank_limits), config.ray))
    if kind == "multi_process" or config.num_ranks > 1:
        return RemoteExecutor(ProcessTransport(resolved, worker_config, RankLimits.parse(config.rank_limits)))
    context = WorkerContext(descriptor=resolved.descriptor, device=resolved.device, config=worker_config)
    return InProcessExecutor(resolved.descriptor.worker()(context))


def _share(profile: MemoryProfile, ranks: int) -> MemoryProfile:
    """Return the profile of one of several ranks in the same memory: its part of what the engine may use there."""
    limit = profile.kv_limit
    return replace(profile, total=profile.total // ranks, kv_limit=None if limit is None else limit // ranks)


def _check_sleep(config: EngineConfig, resolved: Resolved, memory: MemoryCapabilities, settings: SleepSettings) -> None:
    if not config.enable_sleep_mode:
        return
    reasons = []
    if not memory.sleep_levels & {1, 2}:
        reasons.append("its allocator supports no sleep level")
    elif settings.tier not in memory.tiers:
        reasons.append(
            f"its allocator has the tiers {', '.join(sorted(tier.value for tier in memory.tiers)) or 'none'}"
        )
    if reasons:
        raise CapabilityRefused(
            f"the {resolved.descriptor.name} backend cannot run with enable_sleep_mode",
            reasons,
            hint="Leave enable_sleep_mode off, or choose a backend whose `hardpoint doctor` entry lists sleep levels and tier",
        )


def _prepared_sleep(config: EngineConfig, resolved: Resolved, settings: SleepSettings) -> SleepPlan | None:
    """Return the sleep to make ready for: pinning host memory takes longer than the sleep that uses it."""
    wanted = config.enable_sleep_mode and resolved.descriptor.accelerator and settings.tier is SleepTier.HOST
    return SleepPlan(policies=_PRESERVED, host_budget=settings.host_budget) if wanted else None
