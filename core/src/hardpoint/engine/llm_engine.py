"""Requests in, outputs out, one step at a time: the engine that servers and `LLM` drive."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from hardpoint.engine.config import EngineConfig
from hardpoint.engine.core import CoreOutput, EngineCore, StepTotals
from hardpoint.engine.detokenizer import Detokenizer
from hardpoint.engine.inputs import Message, Prompt, PromptProcessor, TokenizedPrompt
from hardpoint.engine.outputs import EmbeddingOutput, EmbeddingRequestOutput, RequestOutput
from hardpoint.engine.request import RequestState, SequenceState
from hardpoint.interfaces.batch import FloatArray, Pooling, SequencePooling
from hardpoint.interfaces.errors import EngineDead, InvalidRequest, InvalidSamplingParams, WorkerError
from hardpoint.models import ModelSource, load_tokenizer, open_model
from hardpoint.sampling import PoolingParams, RequestOutputKind, SamplingParams
from hardpoint.scheduler import FinishReason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class EngineStats:
    """Counters since the engine was made; see StepTotals for the first ones.

    Attributes:
        prefix_queries, prefix_hits: prompt tokens looked up in, and found in, the prefix cache.
        blocks_used, blocks_free, blocks_cached: device blocks; those cached hold reusable prefixes, in use or free.
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
        source = open_model(config.model, load_format=config.load_format, trust_remote_code=config.trust_remote_code)
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
        """
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
        """Queue an embedding request; raises InvalidRequest."""
        self._check_new(request_id)
        tokens = prompt if isinstance(prompt, TokenizedPrompt) else self.process(prompt, reserve=0)
        params = params or PoolingParams()
        seq_id = self._core.scheduler.add_request(tokens.token_ids, pooling=True, skip_prefix_cache=True)
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

        Raises:
            WorkerError: the worker failed; the requests of this step have ended, all others go on.
            EngineDead: the engine was shut down.
        """
        if self._dead:
            raise EngineDead("the engine was shut down", hint="Make a new one")
        try:
            events = self._core.step()
        except WorkerError as error:
            self._drop(error.lost_seq_ids)
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
        """There is something to compute."""
        return bool(self._requests)

    def get_num_unfinished_requests(self) -> int:
        """Return how many requests are in progress."""
        return len(self._requests)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prompt beginnings."""
        self._core.scheduler.reset_prefix_cache()

    def stats(self) -> EngineStats:
        """Return the counters."""
        blocks = self._core.scheduler.block_stats
        return EngineStats(
            **asdict(self._core.totals),
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
        self._core.shutdown()

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
            if seq_id not in self._followed:
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

    def _finish_embedding(self, seq_id: int, vector: FloatArray) -> EmbeddingRequestOutput:
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

    def _check_new(self, request_id: str) -> None:
        if self._dead:
            raise EngineDead("the engine was shut down", hint="Make a new one")
        if request_id in self._requests:
            raise InvalidRequest(f"the request id '{request_id}' is in use", hint="Give each request an id of its own")


def _load_tokenizer(config: EngineConfig, source: ModelSource) -> PreTrainedTokenizerBase | None:
    if config.skip_tokenizer_init:
        return None
    if config.tokenizer is not None:
        source = open_model(config.tokenizer, trust_remote_code=config.trust_remote_code)
    tokenizer: PreTrainedTokenizerBase = load_tokenizer(source, config.trust_remote_code)
    return tokenizer
