"""The offline interface: a model, lists of prompts in, lists of outputs out."""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from hardpoint.engine.adapters import AdapterName, LoRARequest, adapter_name
from hardpoint.engine.argument_names import named_arguments
from hardpoint.engine.config import EngineConfig
from hardpoint.engine.info import EngineInfo
from hardpoint.engine.inputs import (
    Message,
    Prompt,
    TokenizedPrompt,
    as_conversations,
    as_prompts,
    check_params,
    pair_with_params,
)
from hardpoint.engine.llm_engine import EngineStats, LLMEngine
from hardpoint.engine.metrics import Metric
from hardpoint.engine.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from hardpoint.engine.pooling import cosine_score, for_use, text_pairs
from hardpoint.engine.progress import StepProgress
from hardpoint.engine.request import Recipient
from hardpoint.engine.sleep import SleepParticipant, SleepReport, SleepStatus, WakeReport
from hardpoint.interfaces.errors import InboxFull, InvalidRequest
from hardpoint.sampling import BeamSearchParams, PoolingParams, PoolingUse, RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase


class LLM:
    """A model on a backend, ready to generate, chat, embed, classify and score.

    The settings are those of `EngineConfig`, also under the names that vLLM uses, so that a script moves over by changing its
    import. An engine is a context manager; `shutdown` gives its memory back.

    Raises BackendError, ModelError, CapabilityRefused, ConfigError, KVCacheTooSmall or DeviceOutOfMemory, each of which says what to do.

    Example:
        >>> from hardpoint import LLM, SamplingParams
        >>> llm = LLM("demo")
        >>> llm.generate("The capital of France is", SamplingParams(temperature=0))[0].outputs[0].text
    """

    def __init__(self, model: str, **settings: Any) -> None:
        self.engine = LLMEngine(EngineConfig.from_arguments(model, settings))
        self._request_ids = itertools.count()

    @property
    def info(self) -> EngineInfo:
        """What the engine turned out to be: backend, device, sizes, load time."""
        return self.engine.info

    def stats(self) -> EngineStats:
        """Tokens, times, preemptions and prefix-cache hits since the engine was made."""
        return self.engine.stats()

    def get_metrics(self) -> list[Metric]:
        """Return the engine's metrics as values; see `LLMEngine.get_metrics`."""
        return self.engine.get_metrics()

    def get_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """Return the model's tokenizer."""
        return self.engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return a copy of what `generate` and `chat` use where no parameters are given: the publisher's, see `generation_config`."""
        return self.engine.default_sampling_params.clone()

    @named_arguments
    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: AdapterName | Sequence[AdapterName] = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt and return the outputs in the same order.

        All prompts are checked before the first is run.

        Args:
            prompts: one or several texts, token id lists, or mappings with `prompt` or `prompt_token_ids`.
            sampling_params: for all prompts, or one for each; None for `get_default_sampling_params`.
            use_tqdm: show a progress bar with prefill and decode tokens per second, where stderr is a terminal.
            lora_request: an adapter that the prompts go through, or one (or None) for each; see `enable_lora`.
            priority: one value per prompt, lower first; only with scheduling_policy="priority".

        Raises:
            InvalidRequest: a prompt or parameter is not possible; nothing was run.
            WorkerError: the worker failed; requests that were not in the failing step are aborted too.
            EngineAsleep, WeightsMissing: the engine sleeps, or has no weights; nothing was run.
        """
        many = as_prompts(prompts)
        params = pair_with_params(len(many), sampling_params, self.engine.default_sampling_params)
        tokenized = [
            self.engine.process(prompt, truncate=one.truncate_prompt_tokens)
            for prompt, one in zip(many, params, strict=True)
        ]
        return self._generate(tokenized, params, use_tqdm, priority, lora_request)

    @named_arguments
    def chat(
        self,
        messages: Iterable[Message] | Iterable[Iterable[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: AdapterName | Sequence[AdapterName] = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, as the model's chat template writes them; errors as for `generate`.

        Args:
            messages: mappings with `role` and `content`, a text or parts `{"type": "text", "text": ...}`, and what else the template knows.
            chat_template: instead of the model's own.
            add_generation_prompt: end with the beginning of the model's answer.
            continue_final_message: end within the last message, which the model goes on with; only with add_generation_prompt=False.
            tools: functions that the model may call, as OpenAI describes them.
            chat_template_kwargs: further variables of the template.
        """
        conversations = as_conversations(messages)
        params = pair_with_params(len(conversations), sampling_params, self.engine.default_sampling_params)
        tokenized = [
            self.engine.process_chat(
                conversation,
                chat_template,
                add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                variables=chat_template_kwargs,
                truncate=one.truncate_prompt_tokens,
            )
            for conversation, one in zip(conversations, params, strict=True)
        ]
        return self._generate(tokenized, params, use_tqdm, priority, lora_request)

    @named_arguments
    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: AdapterName = None,
    ) -> Iterator[RequestOutput]:
        """Yield what is new of one prompt's completions, step by step; the last output is finished. Errors as for `generate`.

        The request ends with the iterator: one that is left before its end is aborted. Requests of other threads are served meanwhile.
        """
        check_params(params := sampling_params or self.engine.default_sampling_params, SamplingParams)
        tokenized = self.engine.process(prompt, truncate=params.truncate_prompt_tokens)
        return self._stream(tokenized, params.clone(output_kind=RequestOutputKind.DELTA), lora_request)

    @named_arguments
    def beam_search(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
        lora_request: AdapterName | Sequence[AdapterName] = None,
    ) -> list[BeamSearchOutput]:
        """Return, for each prompt, the `beam_width` best texts that go on from it, best first; adapters and errors as for `generate`."""
        many = as_prompts(prompts)
        check_params(params, BeamSearchParams)
        # As vLLM has it, the end-of-text token is among the tokens here.
        params = replace(params, include_stop_str_in_output=True)
        tokenized = [self.engine.process(prompt) for prompt in many]
        adapters = self._adapters(len(many), lora_request)

        def submit(index: int, request_id: str, recipient: Recipient) -> Future[None]:
            return self.engine.submit_beam_search(request_id, tokenized[index], params, recipient, adapters[index])

        return [self._beams_of(output) for output in self._run(len(tokenized), submit, use_tqdm)]

    @named_arguments
    def encode(
        self,
        prompts: Prompt | Iterable[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        pooling_task: str | None = None,
        use_tqdm: bool = True,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return what is made of each prompt's hidden states; errors as for `generate`.

        Args:
            pooling_params: for all prompts, or one for each; None for the model's own way.
            pooling_task: "embed", "classify", "token_embed" or "token_classify"; None for what
                the parameters say, or else the model is for.
        """
        many = as_prompts(prompts)
        params: list[PoolingParams] = pair_with_params(len(many), pooling_params, PoolingParams())
        if pooling_task is not None:
            use = PoolingParams(task=pooling_task).task  # type: ignore[arg-type]  # it is checked there
            assert use is not None
            params = [for_use(use, one) for one in params]
        return self._encode(many, params, use_tqdm)

    @named_arguments
    def embed(
        self,
        prompts: Prompt | Iterable[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """Return one embedding per prompt, pooled from the final hidden states; arguments and errors as for `encode`."""
        found = self.encode(prompts, pooling_params, pooling_task=PoolingUse.EMBED, use_tqdm=use_tqdm)
        return [EmbeddingRequestOutput.from_base(one) for one in found]

    @named_arguments
    def classify(
        self,
        prompts: Prompt | Iterable[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[ClassificationRequestOutput]:
        """Return the probabilities of each prompt's labels, by the model's head; arguments and errors as for `encode`."""
        found = self.encode(prompts, pooling_params, pooling_task=PoolingUse.CLASSIFY, use_tqdm=use_tqdm)
        return [ClassificationRequestOutput.from_base(one) for one in found]

    @named_arguments
    def reward(
        self,
        prompts: Prompt | Iterable[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return the rewards of each prompt, by the model's head: of the text, or of each token where the head is for tokens.

        Arguments and errors as for `encode`.
        """
        own = self.engine.pooling_model.own_use
        task = own if own.labels else PoolingUse.CLASSIFY
        return self.encode(prompts, pooling_params, pooling_task=task, use_tqdm=use_tqdm)

    @named_arguments
    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        pooling_params: PoolingParams | None = None,
        chat_template: str | None = None,
        use_tqdm: bool = True,
    ) -> list[ScoringRequestOutput]:
        """Return how well texts fit: by a head with one label, for which the two are one prompt, or by the cosine of their embeddings.

        Args:
            data_1: a text, which is scored with each of `data_2`, or as many texts as there.
            chat_template: writes the prompt of two texts for the model's head, as messages of the roles "query" and "document".

        Raises:
            InvalidRequest: the lists do not fit, or the model has another head; and as for `encode`.
        """
        first, second = text_pairs(data_1, data_2)
        model = self.engine.pooling_model
        params = model.check_scores(pooling_params)
        if not model.scores_pairs:
            if chat_template is not None:
                raise InvalidRequest(
                    "chat_template is of models whose head scores two texts as one prompt", hint="Leave it out"
                )
            found = self._encode([*first, *second], [params] * (len(first) + len(second)), use_tqdm)
            ones = found[: len(first)] * (len(second) // len(first))
            separator = self.engine.process.pad_token_ids
            return [cosine_score(*both, separator) for both in zip(ones, found[len(first) :], strict=True)]
        pairs = [
            self.engine.process.pair(one, other, template=chat_template, truncate=params.truncate_prompt_tokens)
            for one, other in zip(first * (len(second) // len(first)), second, strict=True)
        ]
        return [ScoringRequestOutput.from_base(one) for one in self._encode(pairs, [params] * len(pairs), use_tqdm)]

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
        **unknown: object,
    ) -> SleepReport:
        """Put the engine to sleep: its memory goes back to the device, or with level 0 only its requests pause.

        What is asleep already is left as it is, except that level 2 drops weights, and kv="discard" a KV cache, that were
        preserved. docs/sleep.md has the whole table.

        Args:
            level: 0 pauses requests; 1 preserves the weights; 2 discards them. 1 and 2 preserve the model's buffers.
            mode: what becomes of requests in progress: "abort" ends them, with what they have, as outputs; "wait" serves
                them to their end first; "keep" lets them continue after wake, with the same tokens.
            tags: memory to put to sleep ("weights", "kv_cache", ...); None for all.
            tier: where preserved bytes go, "host", "disk" or "source"; None for the engine's `sleep_tier`.
            kv: "discard" the KV cache, or "preserve" its live blocks, with which the prefix cache stays valid. None discards it where
                it is awake.
            verify: compare kept backups of weights with the device's bytes instead of trusting them.
            drain_timeout: most seconds for serving requests in the mode "wait"; None for no limit.
            progress: called now and then with (bytes done, bytes in all).
            unknown: refused, with the name that was meant.

        Raises:
            SleepRefused, UnknownTag, CapabilityRefused: it is not possible; nothing was done.
            DrainTimeout: requests were still running when the time was over; the engine runs on.
            HostBudgetExceeded, DriverError, ParticipantError, WorkerError and others: it failed, and the engine runs on as before.
        """
        return self.engine.sleep(
            level,
            mode,
            tags=tags,
            tier=tier,
            kv=kv,
            verify=verify,
            drain_timeout=drain_timeout,
            progress=progress,
            **unknown,
        )

    def wake_up(self, tags: str | Sequence[str] | None = None) -> WakeReport:
        """Take memory again; see `LLMEngine.wake_up`."""
        return self.engine.wake_up(tags)

    def pause(self, mode: str = "keep", drain_timeout: float | None = None) -> SleepReport:
        """Compute no more steps until `resume`; see `LLMEngine.pause`."""
        return self.engine.pause(mode, drain_timeout)

    def resume(self) -> None:
        """Compute steps again; see `LLMEngine.resume`."""
        self.engine.resume()

    def is_sleeping(self) -> bool:
        """Whether the engine is paused, or any of its memory is asleep."""
        return self.engine.is_sleeping()

    def sleep_status(self) -> SleepStatus:
        """Return state, level, sleeping tags, and whether the weights are valid."""
        return self.engine.sleep_status()

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> int:
        """Replace weights by (checkpoint name, tensor) pairs; see `LLMEngine.update_weights`."""
        return self.engine.update_weights(weights)

    def reload_weights(self, model: str | None = None) -> int:
        """Load the weights again; see `LLMEngine.reload_weights`."""
        return self.engine.reload_weights(model)

    def declare_weights_valid(self) -> None:
        """Say that the weights are right as they stand; see `LLMEngine.declare_weights_valid`."""
        self.engine.declare_weights_valid()

    def start_profile(self, folder: str | None = None) -> None:
        """Record what every rank does; see `LLMEngine.start_profile`."""
        self.engine.start_profile(folder)

    def stop_profile(self) -> list[str]:
        """Write the profile and return its files; see `LLMEngine.stop_profile`."""
        return self.engine.stop_profile()

    def reset_prefix_cache(self) -> None:
        """Forget all cached prompt beginnings."""
        self.engine.reset_prefix_cache()

    def register_participant(self, participant: SleepParticipant) -> None:
        """Let something take part in sleep and wake; see `SleepParticipant`."""
        self.engine.register_participant(participant)

    def shutdown(self) -> None:
        """End the engine and give its memory back; idempotent."""
        self.engine.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _encode(
        self, prompts: Sequence[Prompt], params: Sequence[PoolingParams], use_tqdm: bool
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        for one in params:
            self.engine.pooling_model.plan(one)
        tokenized = [
            self.engine.process(prompt, reserve=0, truncate=one.truncate_prompt_tokens)
            for prompt, one in zip(prompts, params, strict=True)
        ]

        def submit(index: int, request_id: str, recipient: Recipient) -> Future[None]:
            return self.engine.submit_pooling_request(request_id, tokenized[index], params[index], recipient)

        return self._run(len(tokenized), submit, use_tqdm)

    def _generate(
        self,
        prompts: Sequence[Any],
        params: Sequence[SamplingParams],
        use_tqdm: bool,
        priority: Sequence[int] | None,
        lora_request: AdapterName | Sequence[AdapterName],
    ) -> list[RequestOutput]:
        priorities = pair_with_params(len(prompts), priority, 0)
        adapters = self._adapters(len(prompts), lora_request)

        def submit(index: int, request_id: str, recipient: Recipient) -> Future[None]:
            final = params[index].clone(output_kind=RequestOutputKind.FINAL_ONLY)
            return self.engine.submit_request(
                request_id, prompts[index], final, recipient, priorities[index], adapters[index]
            )

        return self._run(len(prompts), submit, use_tqdm)

    def _adapters(self, count: int, given: AdapterName | Sequence[AdapterName]) -> list[str | None]:
        """Return the name of each prompt's adapter; each is loaded once."""
        if given is None or isinstance(given, (str, LoRARequest)) or not isinstance(given, Sequence):
            return [adapter_name(given, self.engine.load_adapter) or None] * count
        if len(given) != count:
            raise InvalidRequest(
                f"there are {len(given)} adapters for {count} prompts", hint="Give one, or one for each"
            )
        loaded: dict[str, LoRARequest] = {}

        def load(adapter: LoRARequest) -> None:
            if loaded.get(adapter.lora_name) != adapter:
                self.engine.load_adapter(adapter)
                loaded[adapter.lora_name] = adapter

        return [adapter_name(one, load) or None for one in given]

    def load_adapter(self, adapter: LoRARequest) -> None:
        """Load a LoRA adapter before the first request that goes through it; see `LLMEngine.load_adapter`."""
        self.engine.load_adapter(adapter)

    def unload_adapter(self, name: str) -> None:
        """Forget a LoRA adapter; see `LLMEngine.unload_adapter`."""
        self.engine.unload_adapter(name)

    def _stream(
        self, prompt: TokenizedPrompt, params: SamplingParams, lora_request: AdapterName
    ) -> Iterator[RequestOutput]:
        request_id = self._next_id()
        new: deque[Any] = deque()
        failures: list[Exception] = []
        try:
            recipient = Recipient(lambda make: new.append(make()), failures.append)
            self.engine.submit_request(request_id, prompt, params, recipient, 0, lora_request).result()
            finished = False
            while not finished:
                self.engine.serve([request_id], new, failures, None)
                output: RequestOutput = new.popleft()
                finished = output.finished
                yield output
        finally:
            self.engine.abort_request(request_id)

    def _run(self, count: int, submit: Callable[[int, str, Recipient], Future[None]], use_tqdm: bool) -> list[Any]:
        """Add requests, drive the engine until they have ended, and return their outputs in order; aborts them if that fails."""
        ids = [self._next_id() for _ in range(count)]
        done: dict[str, Any] = {}
        failures: list[Exception] = []

        def take(make: Callable[[], Any]) -> None:
            output = make()
            done[output.request_id] = output

        recipient = Recipient(take, failures.append)
        try:
            taken: list[Future[None]] = []
            for index, request_id in enumerate(ids):
                try:
                    taken.append(submit(index, request_id, recipient))
                except InboxFull:
                    # The inbox has room once the engine has taken these requests.
                    _await_all(taken)
                    taken.append(submit(index, request_id, recipient))
            _await_all(taken)
            # Made only where it is shown: for its rates the engine is asked for its counters.
            is_shown = use_tqdm and sys.stderr.isatty()
            bar: AbstractContextManager[StepProgress | None] = StepProgress(count) if is_shown else nullcontext()
            with bar as progress:
                self.engine.serve(ids, done, failures, progress)
        except BaseException:
            self.engine.abort_request(ids)
            raise
        return [done[request_id] for request_id in ids]

    def _beams_of(self, output: RequestOutput) -> BeamSearchOutput:
        sequences = []
        for found in output.outputs:
            # A finished search has all three.
            assert found.logprobs is not None
            assert found.cumulative_logprob is not None
            assert found.finish_reason is not None
            tokens = [*output.prompt_token_ids, *found.token_ids]
            text = "" if self.engine.tokenizer is None else self.engine.decode(tokens)
            one = BeamSearchSequence(
                tokens, found.logprobs, found.cumulative_logprob, text, found.finish_reason, found.stop_reason
            )
            sequences.append(one)
        return BeamSearchOutput(sequences)

    def _next_id(self) -> str:
        return f"offline-{next(self._request_ids)}"


def _await_all(taken: list[Future[None]]) -> None:
    """Wait until the engine has taken these requests, and forget them; raises what refuses one."""
    for one in taken:
        one.result()
    taken.clear()
