"""The asynchronous interface: a model whose requests are awaited side by side."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, cast

from hardpoint.engine.adapters import AdapterName, LoRARequest, adapter_name
from hardpoint.engine.argument_names import named_arguments
from hardpoint.engine.commands import (
    Abort,
    CheckStep,
    Command,
    DeclareWeightsValid,
    Died,
    Embed,
    Event,
    Finish,
    Generate,
    GetStats,
    GetStatus,
    ListAdapters,
    LoadAdapter,
    RegisterParticipant,
    ReloadWeights,
    Reply,
    ResetPrefixCache,
    Resume,
    Sleep,
    StopProfile,
    UnloadAdapter,
    UpdateWeights,
    Wake,
)
from hardpoint.engine.config import EngineConfig
from hardpoint.engine.data_parallel import engine_processes
from hardpoint.engine.detokenizer import Detokenizer
from hardpoint.engine.info import EngineInfo, EngineStats
from hardpoint.engine.inputs import Message, Prompt, Timeout, TokenizedPrompt, as_conversations, check_params
from hardpoint.engine.loops import Deliver, RunningLoop, ThreadLoop
from hardpoint.engine.outputs import (
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
)
from hardpoint.engine.pooling import PoolingModel, for_use
from hardpoint.engine.process_loop import ProcessLoop
from hardpoint.engine.request import AnyRequest, Output, Recipient, RequestTable
from hardpoint.engine.request_maker import pause_command, profile_command
from hardpoint.engine.sleep import (
    EngineState,
    SleepParticipant,
    SleepReport,
    SleepRequest,
    SleepStatus,
    Tags,
    WakeReport,
)
from hardpoint.engine.startup import start_engine
from hardpoint.interfaces.errors import EngineAsleep, EngineDead, InboxFull, RequestTimeout, WeightsMissing
from hardpoint.sampling import BeamSearchParams, PoolingParams, PoolingUse, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

AnyOutput = TypeVar("AnyOutput", RequestOutput, PoolingRequestOutput[PoolingOutput])


class OutputStream(Generic[AnyOutput]):
    """The outputs of a request, as they come; the last one is finished. For one reader.

    What was not taken becomes one output, of all deltas together, or the latest of others.

    Not a generator, which would cost each token of a busy server a few microseconds.

    Args:
        note: is called with each output that is taken.
    """

    def __init__(self, note: Callable[[AnyOutput], None] | None = None) -> None:
        self._event_loop = asyncio.get_running_loop()
        self._note: Callable[[AnyOutput], None] | None = note
        self._make: Callable[[], Output] | None = None
        self._error: Exception | None = None
        self._is_done = False
        # Not an asyncio.Event: each of its waits looks up the event loop, which asks the system for the process id.
        self._reader: asyncio.Future[None] | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> AnyOutput:
        """Wait for an output and return it; raises the error that ended the request once none is left."""
        if self._is_done:
            raise StopAsyncIteration
        if self._make is None and self._error is None:
            self._reader = self._event_loop.create_future()
            await self._reader
        make, self._make = self._make, None
        if make is None:
            assert self._error is not None
            raise self._error
        output = cast("AnyOutput", make())
        self._is_done = output.finished
        if self._note is not None:
            self._note(output)
        return output

    def put(self, make: Callable[[], Output]) -> None:
        """Take what makes the next output, which has what the one before would have had."""
        self._make = make
        self._notify()

    def fail(self, error: Exception) -> None:
        """Take the error that ended the request."""
        self._error = error
        self._notify()

    def _notify(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


@dataclass(slots=True, eq=False)
class _Making:
    """A request that is being made, in another thread, before the table of requests has it."""

    request_id: str
    is_aborted: bool = False


class AsyncLLM:
    """A model on a backend for one asyncio event loop; settings and errors as for `LLM`.

    The engine runs in a thread of its own, or with `engine_process` in a process; text is made in the event loop's thread. Used in one
    event loop alone: the one that runs when it is made, else when it is first used. Ended with `close`. `create` lets the event loop run
    while the model loads.

    Attributes:
        died: has a result once the engine cannot go on; not where it was closed.

    Args:
        event_loop: in which it is used, where it is made in another thread; None for the running one, or the first to run.

    Example:
        >>> async for output in llm.generate("The capital of France is", SamplingParams(output_kind=RequestOutputKind.DELTA)):
        ...     print(output.outputs[0].text, end="")
    """

    def __init__(self, model: str, *, event_loop: asyncio.AbstractEventLoop | None = None, **settings: Any) -> None:
        self.died: asyncio.Future[EngineDead]
        self._event_loop: asyncio.AbstractEventLoop | None = None
        with suppress(RuntimeError):  # none is running yet
            self._join(event_loop or asyncio.get_running_loop())
        self._requests = RequestTable()
        self._making: set[_Making] = set()
        self._ids = itertools.count()
        self._closed = False
        config = EngineConfig.from_arguments(model, settings)
        kind: Callable[[EngineConfig, Deliver], RunningLoop] = engine_processes if config.other_engines else ThreadLoop
        self._loop, self._maker = start_engine(config, lambda one: kind(one, self._deliver))
        self.info: EngineInfo = self._loop.info

    def _join(self, event_loop: asyncio.AbstractEventLoop) -> None:
        self._event_loop = event_loop
        self.died = event_loop.create_future()

    @property
    def pid(self) -> int | None:
        """Process id of the engine; None where it runs in this process, or where there are several."""
        return self._loop.pid if isinstance(self._loop, ProcessLoop) else None

    @classmethod
    async def create(cls, model: str, **settings: Any) -> Self:
        """Make one while the event loop goes on; a task that is cancelled meanwhile leaves no engine."""
        making = asyncio.ensure_future(asyncio.to_thread(cls, model, event_loop=asyncio.get_running_loop(), **settings))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(_close_unused)
            raise

    @named_arguments
    async def generate(
        self,
        prompt: Prompt | TokenizedPrompt,
        params: SamplingParams | BeamSearchParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        lora_request: AdapterName = None,
        timeout: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete a prompt and yield its outputs as they come, as `params.output_kind` says; the last one is finished.

        With `BeamSearchParams` it is a beam search, whose only output has the best texts, best first.

        A caller that leaves early, or whose task is cancelled, aborts the request. One that does not read holds nobody up: what it has not
        taken becomes one output, of all deltas together, or the latest of others.

        Args:
            lora_request: an adapter that the request goes through.
            timeout: seconds from now after which the request is aborted with RequestTimeout.

        Raises:
            InvalidRequest, EngineAsleep, WeightsMissing, InboxFull: nothing was queued.
            WorkerError: the worker failed in a step of this request.
            EngineDead: the engine was closed, or cannot go on.
        """
        stream = self.stream(prompt, params, request_id, priority=priority, lora_request=lora_request, timeout=timeout)
        async with stream as outputs:
            async for output in outputs:
                yield output

    @asynccontextmanager
    async def stream(
        self,
        prompt: Prompt | TokenizedPrompt,
        params: SamplingParams | BeamSearchParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        lora_request: AdapterName = None,
        timeout: float | None = None,
        note: Callable[[RequestOutput], None] | None = None,
    ) -> AsyncIterator[OutputStream[RequestOutput]]:
        """Queue a prompt, and give its outputs; where the context ends before the last of them has come, the request is aborted.

        What the server uses: it knows of a refusal before it reads, and each token takes less. Otherwise as `generate`.

        Args:
            note: is called with each output that is read.
        """
        timeout = Timeout(timeout).seconds
        params = self._maker.default_sampling_params if params is None else params
        if isinstance(lora_request, LoRARequest):
            await self.load_adapter(lora_request)
        adapter = adapter_name(lora_request, lambda loaded: None)
        outputs = OutputStream(note)
        recipient, making = Recipient(outputs.put, outputs.fail), _Making(self._name(request_id))
        name = making.request_id
        self._check_open()
        request: AnyRequest
        if isinstance(params, BeamSearchParams):
            request, command = self._maker.beam_search(name, prompt, params, priority, recipient, adapter)
        elif isinstance(params, SamplingParams) and (params.structured_outputs or params.bad_words):
            # Grammars and many words take long; meanwhile `abort` and `close` are to find the request.
            number = self._maker.next_number()
            self._making.add(making)
            try:
                make = partial(self._maker.generation, name, prompt, params, priority, recipient, adapter, number)
                request, command = await asyncio.to_thread(make)
            finally:
                self._making.discard(making)
        else:
            request, command = self._maker.generation(name, prompt, params, priority, recipient, adapter)
        timer = None
        if timeout is not None:
            late = RequestTimeout(
                f"the request was not done within {timeout:.3g} s", hint="Ask for less, or allow more time"
            )
            timer = asyncio.get_running_loop().call_later(timeout, outputs.fail, late)
        try:
            if making.is_aborted:
                self._requests.add(request)
                self._requests.abort(name)
                yield outputs
                return
            async with self._asked(request, command):
                yield outputs
        finally:
            if timer is not None:
                timer.cancel()

    @named_arguments
    def chat(
        self,
        messages: Iterable[Message],
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        lora_request: AdapterName = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a conversation, as the model's chat template writes it: arguments as for `LLM.chat`, otherwise as `generate`."""
        if params is not None:
            check_params(params, SamplingParams)
        prompt = self.process_chat(
            messages,
            chat_template,
            add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            variables=chat_template_kwargs,
            truncate=None if params is None else params.truncate_prompt_tokens,
        )
        return self.generate(prompt, params, request_id, priority=priority, lora_request=lora_request)

    @named_arguments
    async def encode(
        self, prompt: Prompt | TokenizedPrompt, params: PoolingParams | None = None, request_id: str | None = None
    ) -> PoolingRequestOutput[PoolingOutput]:
        """Return what is made of a prompt's hidden states, as the parameters say, or else as the model is for; errors as for `generate`."""
        self._check_open()
        outputs = OutputStream[PoolingRequestOutput[PoolingOutput]]()
        recipient = Recipient(outputs.put, outputs.fail)
        request, command = self._maker.pooling(self._name(request_id), prompt, params, recipient)
        async with self._asked(request, command):
            return await anext(outputs)

    @named_arguments
    async def embed(
        self, prompt: Prompt | TokenizedPrompt, params: PoolingParams | None = None, request_id: str | None = None
    ) -> EmbeddingRequestOutput:
        """Return the embedding of a prompt; errors as for `generate`."""
        if params is not None:
            check_params(params, PoolingParams)
        output = await self.encode(prompt, for_use(PoolingUse.EMBED, params), request_id)
        return EmbeddingRequestOutput.from_base(output)

    @property
    def pooling_model(self) -> PoolingModel:
        """What the model gives for prompts that are pooled."""
        return self._maker.pooling_model

    async def sleep(self, level: int = 1, mode: str = "abort", **arguments: Any) -> SleepReport:
        """Put the engine to sleep; arguments and errors as for `LLM.sleep`."""
        report: SleepReport = await self._call(Sleep(SleepRequest.parse({"level": level, "mode": mode, **arguments})))
        return report

    async def wake_up(self, tags: str | Iterable[str] | None = None) -> WakeReport:
        """Take memory again; see `LLM.wake_up`."""
        report: WakeReport = await self._call(Wake(Tags.parse({"tags": tags}).tags))
        return report

    async def pause(self, mode: str = "keep", drain_timeout: float | None = None) -> SleepReport:
        """Compute no more steps until `resume`; see `LLM.pause`."""
        report: SleepReport = await self._call(pause_command(mode, drain_timeout))
        return report

    async def resume(self) -> None:
        """Compute steps again; see `LLM.resume`."""
        await self._call(Resume())

    async def is_sleeping(self) -> bool:
        """Whether the engine is paused, or any of its memory is asleep."""
        return (await self.sleep_status()).state is EngineState.SLEEPING

    async def sleep_status(self) -> SleepStatus:
        """Return state, level, sleeping tags, and whether the weights are valid."""
        status: SleepStatus = await self._call(GetStatus())
        return status

    async def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> int:
        """Replace weights; see `LLM.update_weights`. The pairs are read in another thread than the event loop's."""
        count: int = await self._call(UpdateWeights(weights))
        return count

    async def reload_weights(self, model: str | None = None) -> int:
        """Load the weights again; see `LLM.reload_weights`."""
        count: int = await self._call(ReloadWeights(model))
        return count

    async def declare_weights_valid(self) -> None:
        """Say that the weights are right as they stand; see `LLM.declare_weights_valid`."""
        await self._call(DeclareWeightsValid())

    async def register_participant(self, participant: SleepParticipant) -> None:
        """Let something take part in sleep and wake; its methods are called in another thread than the event loop's."""
        await self._call(RegisterParticipant(participant))

    async def load_adapter(self, adapter: LoRARequest) -> None:
        """Load a LoRA adapter; see `LLMEngine.load_adapter`."""
        await self._call(LoadAdapter(adapter.lora_name, adapter.lora_path))

    async def unload_adapter(self, name: str) -> None:
        """Forget a LoRA adapter; see `LLMEngine.unload_adapter`."""
        await self._call(UnloadAdapter(name))

    async def adapters(self) -> list[str]:
        """Return the names of the LoRA adapters that are loaded."""
        names: list[str] = await self._call(ListAdapters())
        return names

    async def start_profile(self, folder: str | None = None) -> None:
        """Record what every rank does; see `LLMEngine.start_profile`."""
        await self._call(profile_command(folder))

    async def stop_profile(self) -> list[str]:
        """Write the profile and return its files; see `LLMEngine.stop_profile`."""
        files: list[str] = await self._call(StopProfile())
        return files

    async def reset_prefix_cache(self) -> None:
        """Forget all cached prompt beginnings."""
        await self._call(ResetPrefixCache())

    def process(self, prompt: Prompt, *, reserve: int = 1, truncate: int | None = None) -> TokenizedPrompt:
        """Return a prompt's checked token ids; `reserve` tokens of the context stay free for output. Safe to call from any thread.

        Args:
            truncate: see `SamplingParams.truncate_prompt_tokens`.
        """
        return self._maker.process(prompt, reserve=reserve, truncate=truncate)

    def load_embeds(self, serialised: bytes) -> Any:
        """Return embeddings that `torch.save` wrote, for a prompt `{"prompt_embeds": ...}`, read without running code of theirs.

        Safe to call from any thread. Raises InvalidRequest.
        """
        return self._maker.process.load_embeds(serialised)

    def process_text(
        self, text: str, *, add_special_tokens: bool = True, reserve: int = 1, truncate: int | None = None
    ) -> TokenizedPrompt:
        """Return a text's checked token ids, with or without those that the model's publisher adds; otherwise as `process`."""
        return self._maker.process.text(text, add_special_tokens=add_special_tokens, reserve=reserve, truncate=truncate)

    def process_pair(self, text: str, second: str, *, truncate: int | None = None) -> TokenizedPrompt:
        """Return two texts as the prompt of a model whose head scores them; otherwise as `process`."""
        return self._maker.process.pair(text, second, truncate=truncate)

    def process_chat(
        self,
        messages: Iterable[Message],
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        **how: Any,
    ) -> TokenizedPrompt:
        """Return a conversation as the model's chat template writes it; safe to call from any thread.

        Args:
            how: see `PromptProcessor.chat`.
        """
        (conversation,) = as_conversations([messages])
        return self._maker.process.chat(conversation, chat_template, add_generation_prompt, **how)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of tokens; raises InvalidRequest where there is no tokenizer or an id is not in the vocabulary."""
        return self._maker.decode(token_ids, skip_special_tokens=skip_special_tokens)

    @property
    def detokenizer(self) -> Detokenizer:
        """Makes text of tokens as they come; raises InvalidRequest where there is no tokenizer."""
        return self._maker.detokenizer

    def get_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """Return the model's tokenizer."""
        return self._maker.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return a copy of what `generate` and `chat` use where no parameters are given: the publisher's, see `generation_config`."""
        return self._maker.default_sampling_params.clone()

    async def stats(self) -> EngineStats:
        """Return the counters."""
        stats: EngineStats = await self._call(GetStats())
        return stats

    def abort(self, request_ids: str | Iterable[str] | None = None) -> None:
        """End a request, several, or all; whoever reads one gets what was streamed of it, with the finish reason "abort"."""
        given = [request_ids] if isinstance(request_ids, str) else None if request_ids is None else list(request_ids)
        for making in self._making:
            making.is_aborted |= given is None or making.request_id in given
        keys = [self._requests.abort(name) for name in list(self._requests.ids if given is None else given)]
        self._tell(Abort(tuple(key for key in keys if key is not None)))

    async def close(self) -> None:
        """Take no more requests, serve those in progress to their end, and end the engine. Idempotent.

        Where it is paused, asleep or without weights, they have no end: they are aborted.
        """
        self._closed = True
        while len(self._requests) or self._making:
            try:
                await self._call(CheckStep())
            except (EngineAsleep, WeightsMissing):
                self.abort()
            except InboxFull:
                pass
            except EngineDead:  # its requests have ended
                break
            await asyncio.sleep(0.005)
        await asyncio.to_thread(self._loop.shutdown)

    def shutdown(self) -> None:
        """End the engine after its present step; whoever still reads a request gets EngineDead. Idempotent."""
        self._closed = True
        self._loop.shutdown()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @asynccontextmanager
    async def _asked(self, request: AnyRequest, command: Generate | Embed) -> AsyncIterator[None]:
        """Queue a request; it is aborted where the context ends before its last output has come."""
        self._requests.add(request)
        try:
            try:
                queued = self._submit(command)
            except (InboxFull, EngineDead):
                # The engine knows nothing of the request: an abort would only take room in the inbox.
                self._requests.remove(request.request_id)
                raise
            await asyncio.wrap_future(queued)
            yield
        finally:
            # Another request may have this one's id by now.
            if self._requests.discard(request):
                self._tell(Abort((request.key,)))

    async def _call(self, command: Command) -> Reply:
        reply = self._submit(command)
        try:
            return await asyncio.wrap_future(reply)
        except asyncio.CancelledError:
            # A command that the engine had not begun was cancelled with this task, so that its future is done.
            if not reply.done():
                self._loop.give_up(command)
            raise

    def _submit(self, command: Command) -> Future[Reply]:
        if self._event_loop is None:
            self._join(asyncio.get_running_loop())
        return self._loop.submit(command)

    def _tell(self, command: Command) -> None:
        try:
            self._loop.submit(command)
        except EngineDead:
            return

    def _deliver(self, events: list[Event]) -> None:
        if self._event_loop is not None and not self._event_loop.is_closed():
            self._event_loop.call_soon_threadsafe(self._apply, events)

    def _apply(self, events: list[Event]) -> None:
        stopped: list[int] = []
        for event in events:
            stopped += self._requests.apply(event)
            if isinstance(event, Died) and not (self._closed or self.died.done()):
                self.died.set_result(event.error)
        if stopped:
            self._tell(Finish(tuple(stopped)))

    def _name(self, request_id: str | None) -> str:
        return f"async-{next(self._ids)}" if request_id is None else request_id

    def _check_open(self) -> None:
        if self._closed:
            raise EngineDead("the engine was closed", hint="Make a new one")


def _close_unused(making: asyncio.Future[Any]) -> None:
    """End an engine that was made for nobody."""
    if not making.cancelled() and making.exception() is None:
        closing = making.get_loop().create_task(making.result().close())
        _closing.add(closing)
        closing.add_done_callback(_closing.discard)


_closing: set[asyncio.Task[None]] = set()
"""Kept here, because an event loop forgets tasks that nobody keeps."""
