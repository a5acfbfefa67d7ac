"""Requests in, outputs out, one step at a time: the engine that servers and `LLM` drive."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from hardpoint.engine.config import EngineConfig
from hardpoint.engine.core import CoreOutput, EngineCore, StepTotals
from hardpoint.engine.detokenizer import Detokenizer
from hardpoint.engine.inputs import Message, Prompt, PromptProcessor, RequestArguments, TokenizedPrompt, check_params
from hardpoint.engine.outputs import EmbeddingOutput, EmbeddingRequestOutput, RequestOutput
from hardpoint.engine.request import RequestState, SequenceState
from hardpoint.engine.sleep import (
    EngineState,
    SleepMode,
    SleepParticipant,
    SleepReport,
    SleepRequest,
    SleepStatus,
    SleepTotals,
    Tags,
    WakeReport,
)
from hardpoint.interfaces.batch import FloatArray, Pooling, SequencePooling
from hardpoint.interfaces.errors import (
    DrainTimeout,
    EngineDead,
    InvalidRequest,
    InvalidSamplingParams,
    ModelError,
    WorkerError,
)
from hardpoint.interfaces.worker import WeightWrite
from hardpoint.models import ModelSource, load_tokenizer, open_model
from hardpoint.sampling import PoolingParams, RequestOutputKind, SamplingParams
from hardpoint.scheduler import FinishReason

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class EngineStats:
    """Counters since the engine was made; see StepTotals for the first ones.

    Attributes:
        prefix_queries, prefix_hits: prompt tokens looked up in, and found in, the prefix cache.
        blocks_used, blocks_free, blocks_cached: device blocks; those cached hold reusable prefixes, in use or free.
        sleep: what sleeps and wakes did.
    """

    steps: int
    prefill_tokens: int
    prefill_seconds: float
    decode_tokens: int
    decode_seconds: float
    sampled_tokens: int
    preemptions: int
    prefix_queries: int
    prefix_hits: int
    blocks_used: int
    blocks_free: int
    blocks_cached: int
    sleep: SleepTotals = field(default_factory=SleepTotals)


@dataclass(slots=True)
class _Embedding:
    request_id: str
    seq_id: int
    prompt: TokenizedPrompt
    params: PoolingParams


class LLMEngine:
    """A loaded model and the requests in progress.

    `add_request` checks a request and queues it; `step` computes one step for all and returns what is new; `abort_request` ends
    requests at any time. Not safe to call from several threads at once.
    """

    def __init__(self, config: EngineConfig) -> None:
        start = time.perf_counter()
        self.config = config
        source = open_model(
            config.model,
            load_format=config.load_format,
            trust_remote_code=config.trust_remote_code,
            generation_config=config.generation_config,
        )
        self.default_sampling_params = _recommended_params(source)
        with ThreadPoolExecutor(1) as background:
            # Beside the weights, which are read and converted outside the interpreter lock.
            tokenizer = background.submit(_load_tokenizer, config, source)
            self._core = EngineCore(config)
            try:
                self.tokenizer = tokenizer.result()
            except BaseException:
                self._core.shutdown()
                raise
        self.info = replace(self._core.info, load_seconds=time.perf_counter() - start)
        model = self._core.model
        self.process = PromptProcessor(self.tokenizer, model.vocab_size, model.max_model_len)
        self._eos_ids = frozenset(source.eos_token_ids)
        self._detokenizer = None if self.tokenizer is None else Detokenizer(self.tokenizer)
        self._requests: dict[str, RequestState | _Embedding] = {}
        self._by_sequence: dict[int, tuple[RequestState, SequenceState]] = {}
        self._embeddings: dict[int, _Embedding] = {}
        self._followed: set[int] = set()
        self._awaiting_first: set[int] = set()
        self._num_added = 0
        self._undelivered: list[RequestOutput | EmbeddingRequestOutput] = []
        self._queued: set[str] = set()
        self._dead = False

    @property
    def totals(self) -> StepTotals:
        """Tokens and seconds so far."""
        return self._core.totals

    def add_request(
        self,
        request_id: str,
        prompt: Prompt | TokenizedPrompt,
        params: SamplingParams,
        *,
        priority: int = 0,
    ) -> None:
        """Queue a request.

        Args:
            request_id: unique among the requests in progress.
            priority: lower values go first; only with scheduling_policy="priority".

        Raises:
            InvalidRequest: the prompt or a parameter is not possible, or the request could never fit; nothing was queued.
            EngineAsleep, WeightsMissing: the engine sleeps, or has no weights, and queues no (more) requests.
        """
        RequestArguments(request_id, priority)
        check_params(params, SamplingParams)
        self._check_new(request_id)
        if not self._core.model.is_generative:
            raise InvalidRequest("the model has no language-model head", hint="Use embed")
        tokens = prompt if isinstance(prompt, TokenizedPrompt) else self.process(prompt)
        params.check_vocab(self._core.model.vocab_size)
        if params.num_sequences > self.config.max_num_seqs:
            raise InvalidSamplingParams(
                f"{params.num_sequences} completions are asked for",
                found=f"the engine runs at most {self.config.max_num_seqs} sequences at a time",
                hint="Lower n or best_of, or raise max_num_seqs",
            )
        scheduler = self._core.scheduler
        handle = scheduler.add_request(
            tokens.token_ids,
            n=params.num_sequences,
            max_tokens=params.max_tokens,
            min_tokens=params.min_tokens,
            stop_token_ids=sorted(params.all_stop_token_ids(self._eos_ids)),
            priority=priority,
            salt=tokens.cache_salt or "",
        )
        seq_ids = range(handle, handle + params.num_sequences)
        try:
            for fork, seq_id in enumerate(seq_ids):
                self._core.register(
                    params.to_sequence_sampling(
                        seq_id, tokens.token_ids, fork, self.config.seed + self._num_added, self._eos_ids
                    )
                )
        except BaseException:
            self._end(handle, seq_ids)
            raise
        self._num_added += 1
        self._note_queued(request_id)
        request = RequestState(request_id, tokens, params, seq_ids, self._detokenizer, self._eos_ids)
        self._requests[request_id] = request
        for sequence in request.sequences:
            self._by_sequence[sequence.seq_id] = request, sequence
        self._awaiting_first.add(handle)
        if request.is_followed:
            self._followed.update(seq_ids)

    def add_embedding_request(
        self, request_id: str, prompt: Prompt | TokenizedPrompt, params: PoolingParams | None = None
    ) -> None:
        """Queue an embedding request; raises InvalidRequest, EngineAsleep, WeightsMissing."""
        RequestArguments(request_id)
        params = PoolingParams() if params is None else params
        check_params(params, PoolingParams)
        self._check_new(request_id)
        tokens = prompt if isinstance(prompt, TokenizedPrompt) else self.process(prompt, reserve=0)
        seq_id = self._core.scheduler.add_request(tokens.token_ids, pooling=True, skip_prefix_cache=True)
        self._note_queued(request_id)
        request = _Embedding(request_id, seq_id, tokens, params)
        self._requests[request_id] = self._embeddings[seq_id] = request
        self._core.register_pooling(seq_id, SequencePooling(params.pooling or Pooling.LAST, len(tokens.token_ids)))

    def process_chat(
        self, messages: Sequence[Message], template: str | None = None, add_generation_prompt: bool = True
    ) -> TokenizedPrompt:
        """Return a conversation as the model's chat template writes it; raises InvalidRequest."""
        return self.process.chat(messages, template, add_generation_prompt)

    def step(self) -> list[RequestOutput | EmbeddingRequestOutput]:
        """Compute one step and return the outputs of requests that have something new.

        Outputs that came up while the engine went to sleep are returned first, without a step.

        Raises:
            WorkerError: the worker failed; the requests of this step have ended, all others go on.
            EngineAsleep, WeightsMissing: the engine cannot compute a step in its state; all requests stay as they are.
            EngineDead: the engine was shut down, or (RankFailed) a rank is gone; then all requests have ended.
        """
        self._check_alive()
        if self._undelivered:
            outputs, self._undelivered = self._undelivered, []
            return outputs
        return self._compute()

    def _compute(self) -> list[RequestOutput | EmbeddingRequestOutput]:
        try:
            events = self._core.step()
        except WorkerError as error:
            self._drop(error.lost_seq_ids)
            raise
        except EngineDead:
            if self._core.life.is_dead:
                self.abort_request(list(self._requests))
            raise
        if events.idle and self._requests:
            lost = ", ".join(sorted(self._requests))
            self.abort_request(list(self._requests))
            raise EngineDead("requests are in progress that the scheduler does not know", found=lost)
        changed: dict[str, RequestState] = {}
        if self._awaiting_first:
            self._note_first_tokens(events)
        if self._followed:
            self._follow(events, changed)
        outputs = [self._finish_embedding(seq_id, vector) for seq_id, vector in events.embeddings.items()]
        for seq_id, reason in events.finished:
            if seq_id in self._by_sequence:
                request = self._finish(seq_id, reason)
                if request.finished or request.params.output_kind is not RequestOutputKind.FINAL_ONLY:
                    changed[request.request_id] = request
        return [*outputs, *(request.output() for request in changed.values())]

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests and free their blocks; ids that are not in progress are passed over."""
        for request_id in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            request = self._requests.pop(request_id, None)
            if isinstance(request, _Embedding):
                self._embeddings.pop(request.seq_id)
                self._end(request.seq_id, [request.seq_id])
            elif request is not None:
                for sequence in request.sequences:
                    self._by_sequence.pop(sequence.seq_id, None)
                alive = [sequence.seq_id for sequence in request.sequences if not sequence.finished]
                self._end(request.sequences[0].seq_id, alive)

    def has_unfinished_requests(self) -> bool:
        """There is something to compute, or to return from `step`."""
        return bool(self._requests) or bool(self._undelivered)

    def get_num_unfinished_requests(self) -> int:
        """Return how many requests are in progress."""
        return len(self._requests)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prompt beginnings."""
        self._core.scheduler.reset_prefix_cache()

    def stats(self) -> EngineStats:
        """Return the counters."""
        blocks = self._core.scheduler.block_stats
        totals = self._core.totals
        return EngineStats(
            **{f.name: getattr(totals, f.name) for f in fields(totals) if f.name != "sleep"},
            sleep=replace(totals.sleep),
            prefix_queries=blocks.queried_tokens,
            prefix_hits=blocks.hit_tokens,
            blocks_used=blocks.device_used,
            blocks_free=blocks.device_free,
            blocks_cached=blocks.cached,
        )

    def shutdown(self) -> None:
        """End the engine: requests in progress are dropped, memory is given back. Legal more than once."""
        self._dead = True
        self._requests.clear()
        self._by_sequence.clear()
        self._undelivered.clear()
        self._core.shutdown()

    # Sleep

    def sleep(
        self,
        level: int = 1,
        mode: str = "abort",
        tags: str | Sequence[str] | None = None,
        tier: str | None = None,
        kv: str | None = None,
        *,
        verify: bool = False,
        drain_timeout: float | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> SleepReport:
        """Put the engine to sleep: its memory goes back to the device, or with level 0 only its requests pause.

        What is asleep already is left as it is, except that level 2 drops weights, and kv="discard" a KV cache, that were
        preserved. docs/sleep.md has the whole table.

        Args:
            level: 0 pauses requests; 1 preserves the weights; 2 discards them. 1 and 2 preserve the model's buffers.
            mode: what becomes of requests in progress: "abort" ends them, with what they have, as outputs of `step`; "wait" serves
                them to their end first; "keep" lets them continue after wake, with the same tokens.
            tags: memory to put to sleep ("weights", "kv_cache", ...); None for all.
            tier: where preserved bytes go, "host", "disk" or "source"; None for the engine's `sleep_tier`.
            kv: "discard" the KV cache, or "preserve" its live blocks, with which the prefix cache stays valid. None discards it where
                it is awake.
            verify: compare kept backups of weights with the device's bytes instead of trusting them.
            drain_timeout: most seconds for serving requests in the mode "wait"; None for no limit.
            progress: called now and then with (bytes done, bytes in all).

        Raises:
            SleepRefused, UnknownTag, CapabilityRefused: it is not possible; nothing was done.
            DrainTimeout: requests were still running when the time was over; the engine runs on.
            HostBudgetExceeded, DriverError, ParticipantError, WorkerError and others: it failed, and the engine runs on as before.
        """
        self._check_alive()
        request = SleepRequest.parse(
            {
                "level": level,
                "mode": mode,
                "tags": tags,
                "tier": tier,
                "kv": kv,
                "verify": verify,
                "drain_timeout": drain_timeout,
                "progress": progress,
            }
        )
        if self._core.life.state is EngineState.RUNNING:
            self._queued.clear()
        report = self._core.life.sleep(request, partial(self._drain, request.drain_timeout))
        aborted = len(self._requests) if request.mode is SleepMode.ABORT else 0
        if aborted:
            self._finish_all()
        return replace(report, aborted=aborted, kept=len(self._requests))

    def wake_up(self, tags: str | Sequence[str] | None = None) -> WakeReport:
        """Take memory again, at the same addresses; requests run again once nothing is asleep.

        Args:
            tags: memory to wake ("weights", "kv_cache", ...), and with it the engine's own; None for all.

        Raises:
            UnknownTag, SleepRefused: nothing was done.
            DeviceOutOfMemory, DriverError, BackupCorrupt, ParticipantError and others: the engine is asleep still; try again.
        """
        self._check_alive()
        return self._core.life.wake(Tags.parse({"tags": tags}).tags)

    def is_sleeping(self) -> bool:
        """Whether the engine is paused, or any of its memory is asleep."""
        return self._core.life.state is EngineState.SLEEPING

    def sleep_status(self) -> SleepStatus:
        """Return state, level, sleeping tags, and whether the weights are valid."""
        return self._core.life.status()

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> int:
        """Replace weights by (checkpoint name, tensor) pairs; returns how many were used.

        KV blocks that were computed with the old ones are forgotten, and requests in progress computed again. Tensors before a
        failing one are in place: the engine then refuses to generate until all weights were loaded or updated.

        Raises:
            CorruptWeights: a name or shape that the model does not have.
            MemoryAsleep: the weights are asleep.
        """
        self._check_alive()
        return self._core.life.change_weights(WeightWrite.UPDATE, weights)

    def reload_weights(self, model: str | None = None) -> int:
        """Load the weights again, from the checkpoint or another one of the same model; returns how many tensors.

        Everything is compared before the first tensor is written; see `update_weights` for what follows a failure after that.

        Raises:
            ModelError, CorruptWeights: there is no such checkpoint, or it does not fit.
            MemoryAsleep: the weights are asleep.
        """
        self._check_alive()
        return self._core.life.change_weights(WeightWrite.RELOAD, (), model)

    def declare_weights_valid(self) -> None:
        """Say that the weights are right as they stand, after writing them by ways that the engine does not see.

        Backups of them, and KV blocks computed before, are void. Raises MemoryAsleep while the weights are asleep.
        """
        self._check_alive()
        self._core.life.change_weights(WeightWrite.DECLARE)

    def register_participant(self, participant: SleepParticipant) -> None:
        """Let something take part in sleep and wake; raises ConfigError when its name is taken."""
        self._core.life.register(participant)

    def _drain(self, timeout: float | None) -> None:
        end = math.inf if timeout is None else time.monotonic() + timeout
        while self._requests:
            if time.monotonic() >= end:
                raise DrainTimeout(
                    f"requests were still running after {timeout} seconds",
                    found=f"{len(self._requests)} in progress",
                    hint="Give more time, or sleep with the mode 'keep' or 'abort'",
                )
            self._undelivered += self._compute()

    def _finish_all(self) -> None:
        """End all requests with what they have; `step` returns their outputs."""
        for request in list(self._requests.values()):
            if isinstance(request, _Embedding):
                self._core.scheduler.abort([request.seq_id])
                output = self._finish_embedding(request.seq_id, np.empty(0, np.float32), "abort")
                self._undelivered.append(output)
                continue
            alive = [sequence.seq_id for sequence in request.sequences if not sequence.finished]
            self._core.scheduler.abort([request.sequences[0].seq_id])
            for seq_id in alive:
                self._finish(seq_id, FinishReason.ABORT)
            self._undelivered.append(request.output())

    # Events of a step

    def _note_first_tokens(self, events: CoreOutput) -> None:
        for seq_id in self._awaiting_first.intersection(events.seq_ids):
            request, _ = self._by_sequence[seq_id]
            request.first_token(self._core.scheduler.num_cached_tokens(seq_id))
            self._awaiting_first.discard(seq_id)

    def _follow(self, events: CoreOutput, changed: dict[str, RequestState]) -> None:
        """Give followed sequences their tokens; end those whose text has reached a stop string."""
        ended = {seq_id for seq_id, _ in events.finished}
        for sample, seq_id in enumerate(events.seq_ids):
            if seq_id not in self._followed or events.token_ids[sample] < 0:
                continue
            request, sequence = self._by_sequence[seq_id]
            token_id, logprobs = events.token_ids[sample], events.logprobs.get(sample)
            stopped = request.append(sequence, token_id, logprobs, ends=seq_id in ended)
            if stopped:
                if seq_id not in ended:
                    self._core.scheduler.finish(seq_id, FinishReason.STOP)
                self._finish(seq_id, FinishReason.STOP)
            if request.finished or request.params.output_kind is not RequestOutputKind.FINAL_ONLY:
                changed[request.request_id] = request

    def _finish(self, seq_id: int, reason: FinishReason) -> RequestState:
        """End one sequence, and its request with the last one."""
        request, sequence = self._by_sequence.pop(seq_id)
        token_ids = [] if request.is_followed else self._core.scheduler.output_token_ids(seq_id).tolist()
        request.finish(sequence, reason, token_ids)
        self._forget([seq_id])
        self._core.scheduler.release([seq_id])
        if request.finished:
            self._requests.pop(request.request_id, None)
        return request

    def _finish_embedding(self, seq_id: int, vector: FloatArray, reason: str = "stop") -> EmbeddingRequestOutput:
        request = self._embeddings.pop(seq_id)
        self._requests.pop(request.request_id, None)
        self._forget([seq_id])
        self._core.scheduler.release([seq_id])
        if request.params.normalize:
            vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
        return EmbeddingRequestOutput(
            request_id=request.request_id,
            outputs=EmbeddingOutput(embedding=vector),
            prompt_token_ids=request.prompt.token_ids,
            finished=True,
            finish_reason=reason,
        )

    # Ends without an output

    def _end(self, handle: int, seq_ids: Sequence[int]) -> None:
        """Abort a request in the scheduler and forget those of its sequences that have not ended."""
        scheduler = self._core.scheduler
        scheduler.abort([handle])
        self._forget(seq_ids)
        scheduler.release(seq_ids)

    def _drop(self, lost_seq_ids: Iterable[int]) -> None:
        """Drop the requests of sequences that a failed step ended, with all their other sequences."""
        for seq_id in lost_seq_ids:
            embedding, generation = self._embeddings.get(seq_id), self._by_sequence.get(seq_id)
            if embedding is not None:
                self.abort_request(embedding.request_id)
            elif generation is not None:
                self.abort_request(generation[0].request_id)

    def _forget(self, seq_ids: Sequence[int]) -> None:
        self._followed.difference_update(seq_ids)
        self._awaiting_first.difference_update(seq_ids)
        self._core.forget(seq_ids)

    def _note_queued(self, request_id: str) -> None:
        if self._core.life.state is not EngineState.RUNNING:
            self._queued.add(request_id)

    def _check_alive(self) -> None:
        if self._dead:
            raise EngineDead("the engine was shut down", hint="Make a new one")

    def _check_new(self, request_id: str) -> None:
        self._check_alive()
        queued = len(self._queued & self._requests.keys()) if self._queued else 0
        self._core.life.check_admission(queued, self.config.queue_while_asleep)
        if request_id in self._requests:
            raise InvalidRequest(f"the request id '{request_id}' is in use", hint="Give each request an id of its own")


def _recommended_params(source: ModelSource) -> SamplingParams:
    try:
        return SamplingParams(**source.generation_defaults)
    except InvalidSamplingParams as error:
        raise ModelError(
            "the model's recommended sampling parameters are not possible",
            found=str(error),
            hint="Correct its generation_config.json, or give generation_config='vllm' to leave it out",
        ) from error


def _load_tokenizer(config: EngineConfig, source: ModelSource) -> PreTrainedTokenizerBase | None:
    if config.skip_tokenizer_init:
        return None
    if config.tokenizer is not None:
        source = open_model(config.tokenizer, trust_remote_code=config.trust_remote_code)
    tokenizer: PreTrainedTokenizerBase = load_tokenizer(source, config.trust_remote_code)
    return tokenizer
