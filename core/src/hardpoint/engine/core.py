"""The engine's loop: commands in, steps over tokens, events out."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hardpoint.engine.adapters import Adapters, salted
from hardpoint.engine.beam_search import Search
from hardpoint.engine.commands import (
    Abort,
    Added,
    Beam,
    BeamSearch,
    CheckStep,
    Command,
    DeclareWeightsValid,
    Died,
    Embed,
    Ended,
    Event,
    Finish,
    Generate,
    GetStats,
    GetStatus,
    GiveUp,
    ListAdapters,
    LoadAdapter,
    Lost,
    Pause,
    RegisterParticipant,
    ReloadWeights,
    Reply,
    ResetPrefixCache,
    Resume,
    ShutDown,
    Sleep,
    StartProfile,
    StepDone,
    StopProfile,
    UnloadAdapter,
    UpdateWeights,
    Wake,
)
from hardpoint.engine.config import EngineConfig
from hardpoint.engine.embedding_sources import EmbeddingSources
from hardpoint.engine.info import EngineInfo, EngineStats, StepTotals
from hardpoint.engine.inputs import check_checkpoint, weight_pairs
from hardpoint.engine.kv_size import kv_cache_size
from hardpoint.engine.notices import warn_once
from hardpoint.engine.sleep import (
    EngineState,
    LifeCycle,
    SleepMode,
    SleepReport,
    SleepRequest,
    WakeReport,
)
from hardpoint.engine.speculation import StepCosts, check_speculation, parse_speculative_config, takes_drafts
from hardpoint.engine.startup import check_sleep, make_executor, prepared_sleep, resolve
from hardpoint.executor.start import await_torch, collection_paused
from hardpoint.interfaces.batch import (
    Int32Array,
    Int64Array,
    PromptScoring,
    SequencePooling,
    SequenceSampling,
    StepBatch,
    StepInput,
    StepOutput,
    TierReport,
    TokenLogprobs,
)
from hardpoint.interfaces.errors import (
    DrainTimeout,
    EngineDead,
    InvalidRequest,
    MemoryBusy,
    RankFailed,
    SleepRefused,
    WorkerError,
)
from hardpoint.interfaces.worker import MemoryProfile, ModelInfo, WeightWrite
from hardpoint.plugins import Resolved
from hardpoint.scheduler import FinishReason, Scheduler, SchedulerConfig

if TYPE_CHECKING:
    from torch import Tensor

_NO_IDS = np.empty(0, np.int64)

_WITHIN_A_STEP = (Abort, Finish, CheckStep, GetStats, GetStatus, ListAdapters)
"""Commands that a request's own function may call while a step is computed: they ask, or end requests."""

_log = logging.getLogger("hardpoint")


@dataclass(slots=True)
class _Scoring:
    """A prompt whose log probabilities are wanted.

    Attributes:
        next: position of the first token whose log probability no step was asked for. A prompt that is computed again is not asked twice.
    """

    token_ids: Int64Array
    count: int
    next: int

    def of_step(self, context: int, length: int) -> PromptScoring | None:
        """Return what a step is asked for that computes the last `length` tokens of `context`."""
        start = context - length
        first, end = max(self.next, start + 1), min(context + 1, len(self.token_ids))
        if first >= end:
            return None
        self.next = end
        return PromptScoring(first - 1 - start, self.token_ids[first:end], self.count)


@dataclass(slots=True)
class _Request:
    """A request in the loop.

    Attributes:
        handle: its first sequence.
        alive: those of its sequences that have not ended.
        adapter: number and name of the adapter that it goes through.
        arrival: when it came, in seconds of `time.perf_counter`.
        begun: when the first step of its prompt was planned.
    """

    key: int
    handle: int
    alive: set[int]
    adapter: tuple[int, str] | None = None
    pooling: SequencePooling | None = None
    scoring: _Scoring | None = None
    search: Search | None = None
    arrival: float = field(default_factory=time.perf_counter)
    begun: float | None = None

    @property
    def is_plain(self) -> bool:
        """Its steps ask for tokens alone."""
        return self.adapter is None and self.pooling is None and self.scoring is None and self.search is None


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A step that was submitted, and when it was planned."""

    step: StepInput
    start: float


class _Computing:
    """Where steps are submitted and booked. What leaves it, an interrupt or a defect, comes where it is not known how far they are.

    A class of its own, and not a generator, because each step enters it.
    """

    def __init__(self, abandon_steps: Callable[[BaseException], None]) -> None:
        self._abandon_steps = abandon_steps
        self.is_entered = False

    def __enter__(self) -> None:
        self.is_entered = True

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            if error is not None:
                self._abandon_steps(error)
        finally:
            self.is_entered = False


@dataclass(frozen=True, slots=True)
class _Drain:
    """A sleep that waits for the requests in progress."""

    command: Sleep
    reply: Future[SleepReport]
    start: float
    deadline: float


class EngineCore:
    """The loop of one engine: the only owner of its scheduler, its life cycle and its executor. It knows tokens, not text.

    `execute` does what a client asks, `advance` goes one step on, and what came of it is taken with `take_events`. As many steps
    are in flight as the worker can have, so that the device computes while the host plans, books and makes text. Whoever drives
    it calls from one thread at a time: `hardpoint.engine.loops`.

    Raises, while it is made: BackendError, ModelError, CapabilityRefused, ClusterError, ConfigError, KVCacheTooSmall, DeviceOutOfMemory,
    RankFailed; what was started by then is shut down again.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        start = time.perf_counter()
        resolved = resolve(config)
        if resolved.notice:
            warn_once(resolved.notice)
        memory = resolved.descriptor.capabilities(resolved.device).memory
        settings = config.sleep_settings(accelerator=resolved.descriptor.accelerator, tiers=memory.tiers)
        check_sleep(config, resolved, memory, settings)
        self._worker_config = worker_config = config.worker_config(prepared_sleep(config, resolved, settings))
        if config.num_ranks > 1:
            # Imported here: worker.ranks imports torch, and an engine whose ranks are in other processes does without.
            from hardpoint.worker.ranks import check_claims

            check_claims(worker_config, resolved.descriptor, resolved.device)
        self._step_costs: StepCosts | None = None
        await_torch()
        with collection_paused():
            self.executor = make_executor(config, resolved, worker_config)
            try:
                self.model = self._start(resolved, start)
            except BaseException:
                self.executor.shutdown()
                raise
        self.lifecycle = LifeCycle(self.executor, self.scheduler, memory, settings, resolved.descriptor.name)
        self.totals = StepTotals(sleep=self.lifecycle.totals)
        self._tier_totals = TierReport()
        self._requests: dict[int, _Request] = {}
        """By key."""
        self._sequences: dict[int, _Request] = {}
        """Requests by each sequence that has not ended."""
        self._special: dict[int, _Request] = {}
        """The part of `_sequences` whose requests are not plain; while there are none, a step looks at none of its rows."""
        self._new_sampling: dict[int, SequenceSampling] = {}
        """By sequence, until a step samples it for the first time."""
        self._queued: set[int] = set()
        """Keys of requests that came while the engine was asleep, until it takes a step again."""
        model = self.model
        self._embedding_sources = EmbeddingSources(
            model.vocab_size, model.hidden_size * model.dtype.itemsize, config.encoder_cache_bytes
        )
        held = max(config.max_loras, config.max_cpu_loras or 0)
        self._adapters = Adapters(
            config.max_loras if config.enable_lora else 0,
            held,
            self._load_adapter,
            self._unload_adapter,
            self._adapter_bytes,
        )
        self._waiting: deque[Generate] = deque()
        """Requests that wait for room among the adapters of a step."""
        self._held: deque[Generate | Embed] = deque()
        """Requests that came while a sleep waits for the ones before them."""
        self._forgotten: list[int] = []
        """Sequences that ended, until a step tells the worker."""
        self._in_flight: deque[_InFlight] = deque()
        self._last_booking = 0.0
        self._drain: _Drain | None = None
        self._is_dead = self._is_shut_down = False
        self._computing = _Computing(self._abandon_steps)
        self._under_way = 0
        """Commands and steps under way: a caller's function, such as a logits processor, may call the engine in their midst."""
        self._events: list[Event] = []
        self._handlers: dict[type[Any], Callable[[Any], Reply]] = {
            Generate: self._take,
            Embed: self._take,
            Abort: self._abort,
            Finish: self._finish,
            Sleep: self._sleep,
            Pause: self._pause,
            Resume: lambda command: self._resume(),
            GiveUp: self._give_up,
            Wake: self._wake,
            UpdateWeights: lambda command: self._update_weights(command.weights),
            ReloadWeights: self._reload_weights,
            DeclareWeightsValid: self._declare_weights_valid,
            GetStats: lambda command: self._stats(),
            GetStatus: lambda command: self.lifecycle.status(),
            ResetPrefixCache: lambda command: self.scheduler.reset_prefix_cache(),
            RegisterParticipant: lambda command: self.lifecycle.register(command.participant),
            LoadAdapter: lambda command: self._adapters.load(command.name, command.path),
            UnloadAdapter: lambda command: self._adapters.unload(command.name),
            ListAdapters: lambda command: self._adapters.names,
            StartProfile: self._start_profile,
            StopProfile: self._stop_profile,
            CheckStep: lambda command: self._check_step(),
        }

    def _start(self, resolved: Resolved, start: float) -> ModelInfo:
        call = self.executor.call
        call("start")
        models: list[ModelInfo] = call("load")
        profiles: list[MemoryProfile] = call("profile")
        size = kv_cache_size(self.config, models, profiles, accelerator=resolved.descriptor.accelerator)
        model = models[0]
        self._adapter_bytes = sum(one.adapter_bytes for one in models)
        overridden: dict[str, Any] = {}
        if model.state_bytes:
            # A state that is lost can only be computed again from the sequence's first token, so that no cached prefix is of use.
            overridden["enable_prefix_caching"] = False
            _log.info("%s keeps recurrent states: prefixes are not cached, and nothing is swapped", model.architecture)
        self._block_bytes = size.block_bytes
        speculation = parse_speculative_config(self.config.speculative_config)
        if speculation is not None:
            check_speculation(speculation, model, takes_embeddings=self.config.enable_prompt_embeds)
            overridden |= speculation.scheduler_settings(self._worker_config.num_draft_slots)
            if speculation.adaptive:
                self._step_costs = StepCosts(max(profile.seconds_per_token for profile in profiles))
        call("initialize_kv", size.num_device_blocks, size.num_host_blocks)
        if size.num_tier_host_blocks:
            call("open_tiers", size.num_tier_host_blocks, size.num_tier_disk_blocks, self.config.kv_offload_path)
        call("warm_up")
        config = self.config
        if model.whole_prompts:
            overridden |= {
                "enable_chunked_prefill": False,
                "long_prefill_token_threshold": None,
                "mixed_prefill_tokens": None,
                "max_num_batched_tokens": model.step_tokens(config.max_num_batched_tokens),
            }
        self.scheduler = Scheduler(
            SchedulerConfig.complete(
                config,
                block_size=model.attention.kv_cache.block_size,
                num_device_blocks=size.num_device_blocks,
                num_host_blocks=size.num_host_blocks,
                num_tier_host_blocks=size.num_tier_host_blocks,
                num_tier_disk_blocks=size.num_tier_disk_blocks,
                steps_in_flight=model.steps_in_flight,
                max_model_len=model.max_model_len,
                group_windows=model.kv_group_windows,
                vocab_size=model.vocab_size,
                swap_seconds_per_block=max(profile.seconds_per_swapped_block for profile in profiles),
                recompute_seconds_per_token=max(profile.seconds_per_token for profile in profiles),
                **overridden,
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
            block_size=model.attention.kv_cache.block_size,
            num_device_blocks=size.num_device_blocks,
            num_host_blocks=size.num_host_blocks,
            weight_bytes=sum(one.weight_bytes for one in models),
            kv_bytes=size.num_device_blocks * size.block_bytes
            + config.max_num_seqs * sum(one.state_bytes for one in models),
            load_seconds=time.perf_counter() - start,
            accelerator=resolved.descriptor.accelerator,
            notice=resolved.notice,
            tensor_parallel_size=config.tensor_parallel_size,
            pipeline_parallel_size=config.pipeline_parallel_size,
            weight_formats=dict(sum((Counter(one.weight_formats) for one in models), Counter())),
        )
        return model

    # Commands

    def execute(self, command: Command) -> Reply:
        """Do what a client asks and return the answer, which for a sleep that waits is a future; raises what refuses it.

        Where a function of the caller's calls while a step is computed, all but questions and the end of requests is refused: MemoryBusy.
        """
        if isinstance(command, ShutDown):
            self.shutdown()
            return None
        self._check_not_shut_down()
        if not isinstance(command, _WITHIN_A_STEP):
            self._check_not_computing()
        self._under_way += 1
        try:
            reply = self._handlers[type(command)](command)
        except EngineDead:
            raise
        except Exception as error:
            if self._is_shut_down:
                raise _shut_down() from error
            raise
        finally:
            self._leave()
        # A function that the command called (a participant, an iterator of weights) may have shut the engine down.
        self._check_not_shut_down()
        return reply

    @property
    def is_busy(self) -> bool:
        """A command or a step is under way."""
        return self._under_way > 0

    @property
    def is_shut_down(self) -> bool:
        """The engine was shut down; what is under way is the last that it does."""
        return self._is_shut_down

    def _leave(self) -> None:
        """End a command or a step, and with the outermost one an engine that was shut down in its midst."""
        self._under_way -= 1
        if self._is_shut_down and not self._under_way:
            self._end()

    def _check_not_shut_down(self) -> None:
        if self._is_shut_down:
            raise _shut_down()

    def _check_not_computing(self) -> None:
        """Raise MemoryBusy in the midst of a step: a function of a request's calls, and the workers have not returned."""
        if self._computing.is_entered:
            raise MemoryBusy(
                "the engine cannot be changed from within a step",
                found="a step calls a function of one of its requests",
                hint="Do it when the step has ended",
            )

    def _take(self, command: Generate | Embed) -> None:
        self._check_admission()
        if self._drain is None:
            self._begin(command)
            return
        # A sleep waits for the requests in progress. Those that come now are held: served too, they would put it off without end.
        self._check_fits(command)
        if adapter := _adapter_of(command):
            self._adapters.has_room(adapter)
            self._adapters.wait(adapter)
        self._held.append(command)

    def _check_fits(self, command: Generate | Embed) -> None:
        """Refuse a request that is to wait now, where the scheduler would refuse it later, in the midst of others."""
        length = len(command.prompt_token_ids)
        if isinstance(command, Embed):
            self.scheduler.check_fits(length, pooling=True)
        else:
            self.scheduler.check_fits(length, len(command.sampling), beams=command.beams is not None)

    def _begin(self, command: Generate | Embed) -> None:
        if isinstance(command, Embed):
            self._add_pooling(command)
            return
        name = command.adapter
        if not name:
            self._add(command, None)
        elif self._waiting or not self._adapters.has_room(name):
            # Requests with adapters begin in the order in which they came, so that none waits for ever.
            self._check_fits(command)
            self._adapters.has_room(name)
            self._adapters.wait(name)
            self._waiting.append(command)
            self._note_queued(command.key)
        else:
            self._add_adapted(command)

    def _add_adapted(self, command: Generate) -> None:
        name = command.adapter
        number = self._adapters.begin(name)
        try:
            self._add(command, (number, name))
        except BaseException:
            self._adapters.end(name)
            raise

    def _add_waiting(self) -> None:
        """Begin the requests that have waited for others' adapters to end, as far as there is room now."""
        while self._waiting and self._adapters.has_room(self._waiting[0].adapter):
            command = self._waiting.popleft()
            with self._ending_wait(command):
                self._add_adapted(command)

    def _begin_held(self) -> None:
        """Begin the requests that came while a sleep waited; where it has come, they wait for the wake like those that come after them."""
        while self._held:
            command = self._held.popleft()
            with self._ending_wait(command):
                self._begin(command)

    @contextlib.contextmanager
    def _ending_wait(self, command: Generate | Embed) -> Iterator[None]:
        """Begin a request that was told to wait; what refuses it now ends it."""
        try:
            yield
        except (InvalidRequest, WorkerError) as error:
            self._events.append(Lost((command.key,), error))
        finally:
            if adapter := _adapter_of(command):
                self._adapters.end_wait(adapter)

    def _load_adapter(self, number: int, path: str) -> int:
        with self._between_steps():
            return sum(self.executor.call("load_adapter", number, path))

    def _unload_adapter(self, number: int) -> None:
        with self._between_steps():
            self.executor.call("unload_adapter", number)

    def _add(self, command: Generate, adapter: tuple[int, str] | None) -> None:
        scored_from = None if command.prompt_logprobs is None else command.prompt_logprobs_start
        contents = self._embedding_sources.contents(command.embedded) if command.embedded else ()
        handle = self.scheduler.add_request(
            command.prompt_token_ids,
            n=len(command.sampling),
            max_tokens=command.max_tokens,
            min_tokens=command.min_tokens,
            stop_token_ids=command.stop_token_ids,
            priority=command.priority,
            arrival=self._arrival(command.prompt_token_ids),
            salt=command.salt if adapter is None else salted(adapter[0], command.salt),
            max_cached_tokens=None if scored_from is None else max(scored_from - 1, 0),
            # A function or a grammar needs all tokens before the one it masks, so that none of them may still be in flight.
            plan_ahead=not any(
                one.logits_processors or one.bad_words or one.grammar is not None for one in command.sampling
            ),
            beams=command.beams is not None,
            contents=contents,
            drafts=command.beams is None and all(map(takes_drafts, command.sampling)),
        )
        if contents:
            seq_ids = range(handle, handle + len(command.sampling))
            self._embedding_sources.add(
                seq_ids, command.prompt_token_ids, command.embedded, contents, command.positions
            )
        for seq_id, sampling in enumerate(command.sampling, start=handle):
            self._new_sampling[seq_id] = replace(sampling, seq_id=seq_id, prompt_token_ids=command.prompt_token_ids)
        request = _Request(command.key, handle, set(range(handle, handle + len(command.sampling))), adapter)
        if command.beams is not None:
            request.search = self._search(command, command.beams)
        if command.prompt_logprobs is not None:
            first = max(command.prompt_logprobs_start, 1)
            if len(command.prompt_token_ids) > first:
                token_ids = np.asarray(command.prompt_token_ids, np.int64)
                request.scoring = _Scoring(token_ids, command.prompt_logprobs, first)
        self._note_added(request)

    def _search(self, command: Generate, asked: BeamSearch) -> Search:
        prompt_len = len(command.prompt_token_ids)
        room = self.scheduler.config.beam_tokens(asked.width) - prompt_len
        max_tokens = room if command.max_tokens is None else min(room, command.max_tokens)
        return Search(asked, prompt_len, max_tokens)

    def _add_pooling(self, command: Embed) -> None:
        tokens = command.prompt_token_ids
        handle = self.scheduler.add_request(tokens, arrival=self._arrival(tokens), pooling=True, max_cached_tokens=0)
        pooling = SequencePooling(command.pooling, len(tokens), command.task, command.second_text)
        self._note_added(_Request(command.key, handle, {handle}, pooling=pooling))

    def _arrival(self, prompt: Sequence[int]) -> int | None:
        return self.scheduler.config.arrival(len(prompt), time.monotonic())

    def _check_admission(self) -> None:
        if self._queued:
            waiting = {command.key for command in self._waiting}
            self._queued = {key for key in self._queued if key in self._requests or key in waiting}
        self.lifecycle.check_admission(len(self._queued) + len(self._held), self.config.queue_while_asleep)

    def _note_added(self, request: _Request) -> None:
        self._requests[request.key] = request
        by_sequence = dict.fromkeys(request.alive, request)
        self._sequences.update(by_sequence)
        if not request.is_plain:
            self._special.update(by_sequence)
        self._note_queued(request.key)
        self._events.append(Added(request.key, request.handle))

    def _note_queued(self, key: int) -> None:
        if self.lifecycle.state is not EngineState.RUNNING:
            self._queued.add(key)

    def _abort(self, command: Abort) -> None:
        for key in command.keys:
            request = self._requests.get(key)
            if request is None and (self._waiting or self._held):
                self._stop_waiting(key)
            if request is not None:
                self.scheduler.abort([request.handle])
                self._forget(sorted(request.alive))

    def _stop_waiting(self, key: int) -> None:
        for queue in (self._waiting, self._held):
            for command in [one for one in queue if one.key == key]:
                queue.remove(command)  # type: ignore[arg-type]
                if adapter := _adapter_of(command):
                    self._adapters.end_wait(adapter)

    def _finish(self, command: Finish) -> None:
        for seq_id in command.seq_ids:
            if seq_id in self._sequences:
                self.scheduler.finish(seq_id)
                self._forget([seq_id])

    def _forget(self, seq_ids: Sequence[int]) -> None:
        """Drop what is kept of sequences that ended; the worker is told with the next step."""
        for seq_id in seq_ids:
            self._new_sampling.pop(seq_id, None)
            self._special.pop(seq_id, None)
            self._embedding_sources.remove(seq_id)
            request = self._sequences.pop(seq_id)
            request.alive.discard(seq_id)
            if not request.alive:
                del self._requests[request.key]
                if request.adapter is not None:
                    self._adapters.end(request.adapter[1])
        self._forgotten.extend(seq_ids)
        self.scheduler.release(seq_ids)

    def _end_search(self, request: _Request, reason: FinishReason, error: str | None = None) -> Ended:
        """End all sequences of a search; its first one stands for all."""
        self.scheduler.abort([request.handle])
        self._forget(sorted(request.alive))
        return Ended(request.handle, reason, np.empty(0, np.int32), error)

    def _ended(self, seq_id: int, reason: FinishReason, error: str | None = None) -> Ended:
        ended = Ended(seq_id, reason, self.scheduler.output_token_ids(seq_id), error)
        self._forget([seq_id])
        return ended

    def _reload_weights(self, command: ReloadWeights) -> int:
        check_checkpoint(command.model)
        return self._change_weights(WeightWrite.RELOAD, (), command.model)

    def _declare_weights_valid(self, command: DeclareWeightsValid) -> None:
        self._change_weights(WeightWrite.DECLARE)

    def _change_weights(self, write: WeightWrite, *arguments: Any) -> int:
        with self._between_steps():
            return self.lifecycle.change_weights(write, *arguments)

    def _update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> int:
        def still_wanted(pair: tuple[str, Tensor]) -> tuple[str, Tensor]:
            # The iterator that makes the pairs may have shut the engine down.
            self._check_not_shut_down()
            return pair

        return self._change_weights(WeightWrite.UPDATE, map(still_wanted, weight_pairs(weights)))

    def _wake(self, command: Wake) -> WakeReport:
        with self._between_steps():
            return self.lifecycle.wake(command.tags)

    def _start_profile(self, command: StartProfile) -> None:
        with self._between_steps():
            self.executor.call("start_trace", command.folder)

    def _stop_profile(self, command: StopProfile) -> list[str]:
        with self._between_steps():
            return self.executor.call("stop_trace")

    @contextlib.contextmanager
    def _between_steps(self) -> Iterator[None]:
        """Do what no step may be in flight for; a rank that is found gone meanwhile ends the engine.

        Raises MemoryBusy in the midst of a change of weights, from whose iterator the engine is called.
        """
        self.lifecycle.check_not_writing("the engine cannot be changed")
        self._book_all()
        self._embedding_sources.forget_held()
        try:
            yield
        except RankFailed as error:
            if self.lifecycle.death is None:
                self.lifecycle.mark_dead(error)
            raise
        finally:
            death = self.lifecycle.death
            if death is not None and not self._is_dead:
                self._mark_dead(death)

    def _stats(self) -> EngineStats:
        blocks, totals, queues = self.scheduler.block_stats, self.totals, self.scheduler.stats
        drafts, tiers, moved = self.scheduler.draft_stats, self.scheduler.tier_stats, self._tier_totals
        return EngineStats(
            **{f.name: getattr(totals, f.name) for f in fields(totals) if f.name != "sleep"},
            sleep=replace(totals.sleep),
            prefix_queries=blocks.queried_tokens,
            prefix_hits=blocks.hit_tokens,
            blocks_used=blocks.device_used,
            blocks_free=blocks.device_free,
            blocks_cached=blocks.cached,
            running=queues.num_running,
            waiting=queues.num_waiting + len(self._waiting) + len(self._held),
            swapped=queues.num_swapped,
            drafts=drafts.num_drafts,
            draft_tokens=drafts.num_draft_tokens,
            accepted_tokens=drafts.num_accepted_tokens,
            offload_host_blocks=tiers.host_blocks,
            offload_disk_blocks=tiers.disk_blocks,
            offload_host_bytes=tiers.host_blocks * self._block_bytes,
            offload_disk_bytes=tiers.disk_blocks * self._block_bytes,
            offload_queries=tiers.queries,
            offload_host_hits=tiers.host_hits,
            offload_disk_hits=tiers.disk_hits,
            offload_stores=tiers.stores,
            offload_demotions=tiers.demotions,
            offload_evictions=tiers.evictions,
            offload_failures=tiers.failed_loads,
            offload_checksum_failures=moved.checksum_failures,
            offload_io_errors=moved.io_errors,
            offload_seconds=moved.seconds,
            adapters=self._adapters.stats(),
        )

    # Sleep

    def _pause(self, command: Pause) -> Reply:
        if command.before is not None:
            self.lifecycle.check_sleep(command.before)
        request = SleepRequest(level=0, mode=command.mode, drain_timeout=command.drain_timeout)
        return self._sleep(Sleep(request, command.key))

    def _resume(self) -> None:
        drain = self._drain
        if drain is None:
            self.lifecycle.resume()
            return
        self.cancel_drain()
        drain.reply.set_exception(
            SleepRefused(
                "the sleep that waited for requests was given up", found=f"{self._in_progress} are in progress"
            )
        )

    def _give_up(self, command: GiveUp) -> None:
        if self._drain is not None and self._drain.command.key == command.key:
            self._resume()

    def _sleep(self, command: Sleep, waited_since: float | None = None) -> Reply:
        """Go to sleep; where that waits for requests, return the future that is answered when it has `waited_since` then for them."""
        request = command.request
        start = time.perf_counter() if waited_since is None else waited_since
        if waited_since is None and request.mode is SleepMode.WAIT and self._in_progress:
            self.lifecycle.begin_drain(request)
            limit = math.inf if request.drain_timeout is None else request.drain_timeout
            self._drain = _Drain(command, Future(), start, time.monotonic() + limit)
            return self._drain.reply
        with self._between_steps():
            if self.scheduler.config.num_tier_host_blocks and self.lifecycle.loses_kv(request):
                self._store_cached()
            report = self.lifecycle.sleep(request, start)
        if request.mode is not SleepMode.ABORT or not report.changed:
            return replace(report, kept=self._in_progress + len(self._held))
        aborted = self._in_progress
        while self._in_progress:
            for one in list(self._requests.values()):
                self.scheduler.abort([one.handle])
                ended = [self._ended(seq_id, FinishReason.ABORT) for seq_id in sorted(one.alive)]
                self._events.append(StepDone(_NO_IDS, _NO_IDS, ended=ended))
            self._add_waiting()
        return replace(report, aborted=aborted)

    def _check_drain(self) -> bool:
        """Go to sleep where that waited for the requests, and all have ended; or give it up where it has waited long enough.

        Returns whether it did one of them.
        """
        drain = self._drain
        if drain is None or (self._in_progress and time.monotonic() < drain.deadline):
            return False
        self._end_drain()
        try:
            if self._in_progress:
                raise DrainTimeout(
                    f"requests were still running after {drain.command.request.drain_timeout} seconds",
                    found=f"{self._in_progress} in progress",
                    hint="Give more time, or sleep with the mode 'keep' or 'abort'",
                )
            drain.reply.set_result(self._sleep(drain.command, drain.start))
        except Exception as error:
            drain.reply.set_exception(error)
        finally:
            # The error's traceback has this frame: if the frame kept the error, what its frames hold would stay until a collection.
            del drain
            self._begin_held()
        return True

    def cancel_drain(self) -> None:
        """Give up a sleep that waits for requests; the engine runs on. Does nothing where there is none."""
        if self._drain is not None:
            self._end_drain()
            self._begin_held()

    def _end_drain(self) -> None:
        self._drain = None
        self.lifecycle.end_drain(failed=bool(self._in_progress))

    # Steps

    @property
    def death(self) -> EngineDead | None:
        """Why the engine has ended; None while it goes on."""
        return self.lifecycle.death

    @property
    def can_advance(self) -> bool:
        """There are requests in progress and the engine is in a state to serve them, steps in flight, or a sleep that waits."""
        return bool(self._in_flight or self._drain) or (bool(self._in_progress) and self.lifecycle.can_step)

    @property
    def is_draining(self) -> bool:
        """A sleep waits for requests."""
        return self._drain is not None

    @property
    def _in_progress(self) -> int:
        """How many requests have not ended, with those that wait for the adapters of others, without those that a drain holds back."""
        return len(self._requests) + len(self._waiting)

    @property
    def has_events(self) -> bool:
        """There is something to be taken with `take_events`."""
        return bool(self._events)

    def take_events(self) -> list[Event]:
        """Return what came up since the last call."""
        events, self._events = self._events, []
        return events

    def advance(self) -> None:
        """Submit steps as far ahead as may be, and book the oldest one.

        A step that fails ends the requests in it; all others go on with the next one. A rank that is gone ends the engine.

        Raises:
            EngineAsleep, WeightsMissing, MemoryBusy, EngineDead: a state without steps; requests stay as they are.
        """
        self._check_not_computing()
        self._under_way += 1
        try:
            if self._check_drain():
                return
            self.lifecycle.check_step()
            self._queued.clear()
            self._add_waiting()
            with self._computing:
                while len(self._in_flight) <= self.model.steps_in_flight and self._submit():
                    pass
                if self._in_flight:
                    self._book()
            if not self.scheduler.has_unfinished():
                self._book_all()
            self._check_drain()
        finally:
            self._leave()

    def _check_step(self) -> bool:
        self.lifecycle.check_step()
        return bool(self._in_progress)

    def _submit(self) -> bool:
        """Plan and submit the next step; returns whether there is one."""
        start = time.perf_counter()
        batch = self.scheduler.schedule()
        if batch is None:
            return False
        first: tuple[SequenceSampling, ...] = ()
        new = self._new_sampling
        if new:
            for seq_id in new.keys() & batch.seq_ids.tolist():
                request = self._sequences[seq_id]
                request.begun = request.begun or start
            rows = zip(batch.sample_seq_ids.tolist(), batch.sample_state_rows.tolist(), strict=True)
            first = tuple(replace(new.pop(seq_id), state_row=row) for seq_id, row in rows if seq_id in new)
        forgotten, self._forgotten = tuple(self._forgotten), []
        given = self._embedding_sources.of_step(batch)
        try:
            step = StepInput(batch, first, forgotten)
            if self._special:
                step = self._with_special(step)
            if given is not None:
                step = replace(
                    step,
                    embedded=tuple(given.embedded),
                    new_sources=given.new_sources,
                    dropped_sources=given.dropped_sources,
                    positions=given.positions,
                )
            self.executor.submit(step)
        except Exception as error:
            self._embedding_sources.forget_held(given)
            # The worker may not have forgotten these sequences before it failed; to tell it twice does no harm.
            self._forgotten[:0] = forgotten
            while self._in_flight:
                self._book()
            self._lose_oldest(error)
            return False
        self._in_flight.append(_InFlight(step, start))
        return True

    def _with_special(self, step: StepInput) -> StepInput:
        """Return a step with what requests that are not plain ask of it."""
        batch = step.batch
        adapters: dict[int, int] = {}
        pooling: dict[int, SequencePooling] = {}
        scoring: dict[int, PromptScoring] = {}
        for row, seq_id in enumerate(batch.seq_ids.tolist()):
            request = self._special.get(seq_id)
            if request is None:
                continue
            if request.adapter is not None:
                adapters[seq_id] = request.adapter[0]
            if request.pooling is not None:
                pooling[seq_id] = request.pooling
            if request.scoring is not None and seq_id == request.handle:
                length = int(batch.query_start[row + 1] - batch.query_start[row])
                asked = request.scoring.of_step(int(batch.context_lens[row]), length)
                if asked is not None:
                    scoring[seq_id] = asked
        return replace(step, adapters=adapters, pooling=pooling, scoring=scoring)

    def _book(self) -> None:
        """Take the output of the oldest step."""
        try:
            output = self.executor.collect()
            step, start = self._in_flight[0].step, self._in_flight[0].start
            seq_ids, batch = step.batch.sample_seq_ids.copy(), step.batch
            decode_tokens, preempted = _decode_tokens(batch), len(batch.preempted)
            num_tokens, prefill_tokens = batch.num_tokens, batch.num_tokens - decode_tokens
            finished = self._update(output)
            kept = self.scheduler.kept()
        except Exception as error:
            self._in_flight.popleft()
            self._lose_oldest(error)
            return
        self._in_flight.popleft()
        if kept is not None:
            seq_ids, output = seq_ids[kept], _kept(output, kept)
        errors = {int(seq_ids[index]): reason for index, reason in output.failed.items()}
        for seq_id, wrong in errors.items():
            _log.warning("sequence %d ends with an error: %s", seq_id, wrong)
        now = time.perf_counter()
        seconds = now - max(start, self._last_booking)
        self._count(seconds, prefill_tokens, len(seq_ids), preempted)
        if self._step_costs is not None and num_tokens and not prefill_tokens:
            self._step_costs.note(num_tokens, seconds)
            self.scheduler.set_step_cost(*self._step_costs.line())
        self._last_booking = now
        num_cached, queued = dict[int, int](), dict[int, float]()
        for seq_id in [one.seq_id for one in step.new_sequences]:
            if (request := self._sequences.get(seq_id)) is not None:
                num_cached[seq_id] = self.scheduler.num_cached_tokens(seq_id)
                if seq_id == request.handle and request.begun is not None:
                    queued[seq_id] = request.begun - request.arrival
        if step.scoring:
            self._check_scores([seq_id for seq_id in step.scoring if seq_id not in output.prompt_logprobs])
        logprobs, beams, ended = output.logprobs, dict[int, list[Beam]](), list[Ended]()
        if self._special:
            logprobs, ended = self._advance_searches(seq_ids, output, finished, errors, beams)
        ended += [
            self._ended(seq_id, reason, errors.get(seq_id)) for seq_id, reason in finished if seq_id in self._sequences
        ]
        # A copy: the worker may make the next step's tokens in the same memory before a client reads these.
        token_ids = output.token_ids.copy()
        self._events.append(
            StepDone(
                seq_ids,
                token_ids,
                logprobs,
                num_cached,
                ended,
                output.embeddings,
                output.prompt_logprobs,
                queued,
                beams,
            )
        )

    def _update(self, output: StepOutput) -> list[tuple[int, FinishReason]]:
        """Book the oldest step in the scheduler, with what became of blocks that went to and from the tiers."""
        report = output.tiers
        if report is None:
            return self.scheduler.update(output.token_ids, output.drafted)
        finished = self.scheduler.update(output.token_ids, output.drafted, report.failed_loads)
        self.scheduler.drop_stored(report.lost)
        totals = self._tier_totals
        self._tier_totals = TierReport(
            checksum_failures=totals.checksum_failures + report.checksum_failures,
            io_errors=totals.io_errors + report.io_errors,
            seconds=totals.seconds + report.seconds,
        )
        return finished

    def _store_cached(self) -> None:
        """Store what the prefix cache has on the device in the host's tier, before a sleep that discards it; no step is in flight."""
        batch = self.scheduler.store_cached()
        if batch is None:
            return
        try:
            self.executor.submit(StepInput(batch))
            self._update(self.executor.collect())
        except EngineDead as error:
            self._lose_oldest(error)
        except Exception as error:
            self.scheduler.fail_step()
            _log.warning("the prefix cache is not kept over the sleep: %s", error)
        except BaseException as error:
            self._abandon_steps(error)
            raise

    def _advance_searches(
        self,
        seq_ids: Int64Array,
        output: StepOutput,
        finished: Sequence[tuple[int, FinishReason]],
        errors: Mapping[int, str],
        beams: dict[int, list[Beam]],
    ) -> tuple[dict[int, TokenLogprobs], list[Ended]]:
        """Let the searches whose beams have all been sampled go on, and add the `beams` of those that ended.

        Returns:
            The output's log probabilities that are not of searches, and the sequences of the searches that ended.
        """
        others: dict[int, TokenLogprobs] = {}
        sampled: dict[int, tuple[_Request, Search]] = {}
        for index, entry in output.logprobs.items():
            seq_id = int(seq_ids[index])
            request = self._special.get(seq_id)
            if request is None or request.search is None:
                others[index] = entry
            else:
                request.search.pending[seq_id] = entry
                sampled[request.handle] = request, request.search
        ended: list[Ended] = []
        for seq_id, reason in finished:
            request = self._special.get(seq_id)
            if request is not None and request.search is not None:
                ended.append(self._end_search(request, reason, errors.get(seq_id)))
        for handle, (request, search) in sampled.items():
            if not request.alive or not self.scheduler.beams_sampled(handle):
                continue
            entries = [search.pending.pop(seq_id) for seq_id in range(handle, handle + search.asked.width)]
            following = search.advance(entries)
            if following is None:
                beams[handle] = search.best()
                ended.append(self._end_search(request, FinishReason.STOP))
            else:
                self.scheduler.advance_beams(handle, *following)
        return others, ended

    def _check_scores(self, missing: Sequence[int]) -> None:
        """End the requests whose prompts' log probabilities a worker left out."""
        lost = tuple(self._sequences[seq_id].key for seq_id in missing if seq_id in self._sequences)
        if lost:
            self._abort(Abort(lost))
            error = WorkerError(
                "the worker gave no log probabilities of the prompt",
                found=f"the backend {self.info.backend}",
                hint="Leave prompt_logprobs out, or choose another backend",
            )
            self._events.append(Lost(lost, error))

    def _book_all(self) -> None:
        with self._computing:
            while self._in_flight:
                self._book()

    def _lose_oldest(self, error: Exception) -> None:
        """End the requests of the oldest step, which failed; with the engine, where a rank is gone."""
        self._embedding_sources.forget_held()
        lost = [seq_id for seq_id, _ in self.scheduler.fail_step()]
        if isinstance(error, EngineDead):
            self._mark_dead(error)
            return
        failure = WorkerError.of(error)
        failure.__cause__ = error
        keys = tuple(dict.fromkeys(self._sequences[seq_id].key for seq_id in lost if seq_id in self._sequences))
        self._abort(Abort(keys))
        self._events.append(Lost(keys, failure))

    def _abandon_steps(self, error: BaseException) -> None:
        """Give up all steps in flight: an interrupt came where it is not known how far they are."""
        for _ in range(self.model.steps_in_flight + 1):
            with contextlib.suppress(Exception):
                self.executor.collect()
        self._in_flight.clear()
        while self.scheduler.num_in_flight:
            self._lose_oldest(WorkerError("the step was given up", found=type(error).__name__))

    def _mark_dead(self, error: EngineDead) -> None:
        self._is_dead = True
        self.lifecycle.mark_dead(error)
        self._in_flight.clear()
        self._waiting.clear()
        self._held.clear()
        while self.scheduler.num_in_flight:
            self.scheduler.fail_step()
        self._abort(Abort(tuple(self._requests)))
        if self._drain is not None:
            drain, self._drain = self._drain, None
            self.lifecycle.end_drain(failed=True)
            drain.reply.set_exception(error)
        self._events.append(Died(error))

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
        """Drop all requests, end the workers and give all memory back; idempotent.

        In the midst of a command or a step it is done when that ends: the workers are in a call.
        """
        self._is_shut_down = True
        if not self._under_way:
            self._end()

    def _end(self) -> None:
        if not self._is_dead:
            self._mark_dead(_shut_down())
        self.executor.shutdown()


def _shut_down() -> EngineDead:
    return EngineDead("the engine was shut down", hint="Make a new one")


def _adapter_of(command: Generate | Embed) -> str:
    """Return the name of the adapter that a request goes through; empty for none."""
    return command.adapter if isinstance(command, Generate) else ""


def _decode_tokens(batch: StepBatch) -> int:
    """Return how many tokens of a step are of decoding sequences; one with drafts has as many as are sampled for it."""
    if not len(batch.sample_tokens):
        return batch.num_decodes
    _, counts = np.unique(batch.sample_seq_ids, return_counts=True)
    return batch.num_decodes + int(counts[counts > 1].sum())


def _kept(output: StepOutput, kept: Int32Array) -> StepOutput:
    """Return the output of the samples that count, under their new numbers."""
    places = {int(sample): place for place, sample in enumerate(kept)}
    logprobs = {places[sample]: entry for sample, entry in output.logprobs.items() if sample in places}
    failed = {places[sample]: reason for sample, reason in output.failed.items() if sample in places}
    return replace(output, token_ids=output.token_ids[kept], logprobs=logprobs, failed=failed)
