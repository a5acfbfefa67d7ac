"""One model that is served: its engine, and what becomes of requests when that is busy, asleep, or dead."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar

from hardpoint.engine.adapters import LoRARequest
from hardpoint.engine.async_llm import AsyncLLM, OutputStream
from hardpoint.engine.inputs import TokenizedPrompt
from hardpoint.engine.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput
from hardpoint.engine.sleep import EngineState, SleepReport, SleepStatus, WakeReport
from hardpoint.interfaces.errors import (
    EngineAsleep,
    EngineDead,
    HardpointError,
    InvalidAdapter,
    InvalidRequest,
    MemoryBusy,
    RequestTimeout,
)
from hardpoint.sampling import BeamSearchParams, PoolingParams, SamplingParams
from hardpoint.server.errors import ApiError
from hardpoint.server.metrics import ModelMetrics
from hardpoint.validation import NonNegativeFloat, PositiveInt, Seconds, Validated

_log = logging.getLogger("hardpoint.server")

_FIRST_DELAY, _LONGEST_DELAY = 1.0, 60.0
"""Seconds before an engine that died is started again: doubled with every death that follows soon."""
_STABLE_SECONDS = 300.0
_BUSY_SECONDS = 0.02
_LONG_TEXT = 10_000
"""Characters from which a prompt is tokenized in another thread; it takes about 2 ms."""

T = TypeVar("T")
Room: TypeAlias = Callable[["ServedModel"], AbstractAsyncContextManager[None]]


class WhenAsleep(StrEnum):
    """What becomes of a request that comes while its model sleeps.

    REJECT: it is refused, with 503. QUEUE: it waits until somebody wakes the model. WAKE: it wakes the model.
    """

    REJECT = "reject"
    QUEUE = "queue"
    WAKE = "wake"


class ModelState(StrEnum):
    """Where a served model stands, beside the states of its engine (`EngineState`)."""

    STARTING = "starting"
    RESTARTING = "restarting"
    CLOSED = "closed"


@dataclass(frozen=True, kw_only=True)
class ServingOptions(Validated):
    """How a model is served.

    Attributes:
        max_requests: most requests in progress; one more is refused with 429.
        when_asleep: for requests that do not say it; None wakes models that the server itself puts to sleep, and rejects for others.
        max_waiting: most requests that wait for a model to wake.
        waking_timeout: seconds that a request waits for that.
        request_timeout: seconds that a request may take, where it does not say it itself; None for no limit.
        drain_seconds: that requests in progress have when the server ends.
        idle_sleep: seconds without a request after which the model sleeps at level 1; None never. Requests wake it then.
        tool_call_parser: how the model writes calls; "auto" goes by its chat template.
        reasoning_parser: how the model's reasoning is told from its answer; None leaves it there, "auto" goes by the chat template.
    """

    _called = "an option of serving"

    max_requests: PositiveInt = 4096
    when_asleep: WhenAsleep | None = None
    max_waiting: PositiveInt = 1024
    waking_timeout: Seconds = 300.0
    request_timeout: Seconds | None = None
    drain_seconds: NonNegativeFloat = 60.0
    idle_sleep: Seconds | None = None
    tool_call_parser: Literal["auto", "hermes", "llama3_json"] = "auto"
    reasoning_parser: Literal["auto", "qwen3", "deepseek_r1"] | None = None


class ServedModel:
    """A model under the name by which requests ask for it; started again when its engine dies.

    Args:
        name: by which requests ask for it.
        model, settings: of its engine, see `LLM`.
        adapters: folders of LoRA adapters by the names under which requests ask for them; loaded with each engine.

    Attributes:
        room: gives the context in which the model takes memory of its device; it waits until there is enough.
        need: bytes of the device that it takes while it is awake, by its driver's books; 0 until it was loaded once.
        device_bytes: that it has now, by the same.
        awake_since, last_used: by `time.monotonic`.
        reason: why it was put to sleep last.
    """

    def __init__(
        self,
        name: str,
        model: str,
        settings: Mapping[str, Any],
        options: ServingOptions,
        metrics: ModelMetrics,
        adapters: Mapping[str, str] | None = None,
    ) -> None:
        self.adapters = dict(adapters or {})
        self.name, self.model, self.options, self.metrics = name, model, options, metrics
        self.created = int(time.time())
        self.restarts = 0
        self.failure: Exception | None = None
        self.room: Room = _enough_room
        self.need = self.device_bytes = 0
        self.awake_since = self.last_used = time.monotonic()
        self.reason = ""
        self.settings = dict(settings) | {"engine_process": True}
        self._llm: AsyncLLM | None = None
        self._state: ModelState | None = ModelState.STARTING
        self._in_progress = 0
        self._waiting = 0
        self._awake = asyncio.Event()
        self._awake.set()
        self._waking: asyncio.Task[WakeReport] | None = None
        self._changing = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []

    # Life

    async def start(self) -> None:
        """Load the model; raises what `LLM` raises."""
        await self._load()
        assert self._llm is not None
        # The first use of a template compiles it.
        with suppress(InvalidRequest):
            await asyncio.to_thread(self._llm.process_chat, [{"role": "user", "content": ""}])
        self._state = None
        self._tasks.append(asyncio.create_task(self._restart_when_dead()))
        if self.options.idle_sleep is not None:
            self._tasks.append(asyncio.create_task(self._sleep_when_idle(self.options.idle_sleep)))

    async def _load(self) -> None:
        """Make an engine, once its device has room; raises what `LLM` raises."""
        async with self.room(self):
            self._llm = await AsyncLLM.create(self.model, **self.settings)
            try:
                await self._load_adapters(self._llm)
                self._note_memory(await self._llm.sleep_status())
            except BaseException:
                await self._llm.close()
                raise
            self.need = self.device_bytes
            self.awake_since = time.monotonic()

    async def _load_adapters(self, llm: AsyncLLM) -> None:
        """Give a new engine the adapters; with one that is started again those whose files are gone are left out, as if unloaded."""
        for name, path in list(self.adapters.items()):
            try:
                await llm.load_adapter(LoRARequest(name, 1, path))
            except InvalidAdapter as error:
                if self._state is not ModelState.RESTARTING:
                    raise
                del self.adapters[name]
                _log.error("'%s' starts again without the adapter '%s': %s", self.name, name, error)

    async def close(self) -> None:
        """Refuse further requests, serve those in progress for a while, and end the engine."""
        self._state = ModelState.CLOSED
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        deadline = time.monotonic() + self.options.drain_seconds
        while self._in_progress and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if self._llm is not None:
            self._llm.abort()
            await self._llm.close()

    async def _restart_when_dead(self) -> None:
        delay = _FIRST_DELAY
        while True:
            assert self._llm is not None
            started = time.monotonic()
            self.failure = await self._llm.died
            self._state = ModelState.RESTARTING
            self.metrics.deaths.inc()
            _log.error("the engine of '%s' died: %s", self.name, self.failure)
            await self._llm.close()
            self.device_bytes = 0
            if time.monotonic() - started > _STABLE_SECONDS:
                delay = _FIRST_DELAY
            while self._state is ModelState.RESTARTING:
                _log.warning("'%s' starts again in %g s", self.name, delay)
                await asyncio.sleep(delay)
                delay = min(2 * delay, _LONGEST_DELAY)
                try:
                    await self._load()
                    self._state, self.restarts = None, self.restarts + 1
                    self._awake.set()
                except Exception as error:  # whatever it was: nobody else would try again
                    self.failure = error
                    _log.error(
                        "'%s' did not start: %s", self.name, error, exc_info=not isinstance(error, HardpointError)
                    )

    async def _sleep_when_idle(self, seconds: float) -> None:
        while True:
            idle = time.monotonic() - self.last_used
            await asyncio.sleep(max(seconds - idle, min(seconds / 10, 1.0)))
            is_idle = not self._in_progress and time.monotonic() - self.last_used >= seconds
            if is_idle and self.is_open and self._awake.is_set():
                with suppress(HardpointError, ApiError):
                    await self.make_way(f"there was no request for {seconds:g} s")

    async def make_way(self, reason: str) -> None:
        """Sleep at level 1 once the requests in progress have ended; those that come meanwhile wait. Raises what `LLM.sleep` raises."""
        async with self._changing:
            if self.device_bytes:
                with self._counting_failure("sleep"):
                    await self.sleep(mode="wait")
                self.reason = reason
                _log.info("'%s' sleeps: %s", self.name, reason)

    # What requests see

    parent: str | None = None
    """Name of the model that this one is an adapter of."""

    @property
    def in_progress(self) -> int:
        """Requests that were taken and have not ended."""
        return self._in_progress

    @property
    def waiting(self) -> int:
        """Requests, of those in progress, that wait for it to wake."""
        return self._waiting

    @property
    def can_make_way(self) -> bool:
        """Whether it may be put to sleep: nothing changes it now, it has served what it was woken for, and is not paused amid requests."""
        is_paused = bool(self._in_progress) and not self._awake.is_set()
        return not (self._waiting or self._changing.locked() or is_paused)

    @property
    def is_open(self) -> bool:
        """Whether there is an engine, awake or asleep."""
        return self._llm is not None and self._state is None

    @property
    def llm(self) -> AsyncLLM:
        """The engine's client; raises ApiError while there is no engine."""
        if self._llm is None or self._state is not None:
            why = f": {self.failure}" if self._state is ModelState.RESTARTING and self.failure else ""
            raise ApiError(503, f"the model '{self.name}' is {self._state}{why}", f"model_{self._state}", retry_after=5)
        return self._llm

    @property
    def chat_template(self) -> str | None:
        """The model's own, as text; None where it has none. Raises ApiError while there is no engine."""
        template = getattr(self.llm.get_tokenizer(), "chat_template", None)
        return template.get("default") if isinstance(template, Mapping) else template

    def leaves_out(self, mark: str) -> bool:
        """Whether a text without special tokens is without this mark of the model's: with some models it is one. Raises as `tokenize`."""
        tokens = self.llm.process_text(mark, add_special_tokens=False).token_ids
        return mark not in self.llm.decode(tokens, skip_special_tokens=True)

    async def state(self) -> str:
        """Return where it stands: a `ModelState`, or else an `EngineState`."""
        try:
            return (await self.llm.sleep_status()).state
        except (ApiError, EngineDead):
            return self._state or ModelState.RESTARTING

    async def tokenize(
        self,
        prompt: str | list[int],
        *,
        add_special_tokens: bool = True,
        reserve: int = 1,
        truncate: int | None = None,
    ) -> TokenizedPrompt:
        """Return a text or token ids as a prompt that leaves `reserve` tokens of the context free; raises InvalidRequest."""
        llm = self.llm
        if not isinstance(prompt, str):
            return llm.process(prompt, reserve=reserve, truncate=truncate)
        make = partial(
            llm.process_text, prompt, add_special_tokens=add_special_tokens, reserve=reserve, truncate=truncate
        )
        return await self._in_thread_if(len(prompt) > _LONG_TEXT, make)

    async def tokenize_pair(self, text: str, second: str, *, truncate: int | None = None) -> TokenizedPrompt:
        """Return two texts as one prompt, as the model's publisher puts them together; raises InvalidRequest."""
        make = partial(self.llm.process_pair, text, second, truncate=truncate)
        return await self._in_thread_if(len(text) + len(second) > _LONG_TEXT, make)

    async def apply_template(self, messages: Sequence[Mapping[str, Any]], **how: Any) -> TokenizedPrompt:
        """Return a conversation as the model's chat template writes it; arguments and errors as for `AsyncLLM.process_chat`."""
        size = sum(len(str(message.get("content"))) for message in messages)
        return await self._in_thread_if(size > _LONG_TEXT, partial(self.llm.process_chat, messages, **how))

    @asynccontextmanager
    async def taken(self, count: int = 1) -> AsyncIterator[None]:
        """Take requests for as long as the context lasts; raises ApiError where there are too many: 429, or 400 where there always are."""
        if count > self.options.max_requests:
            raise ApiError(
                400,
                f"{count} prompts in one request: the model '{self.name}' takes {self.options.max_requests} at a time",
                "invalid_value",
            )
        if self._in_progress + count > self.options.max_requests:
            self.metrics.refused.inc()
            raise ApiError(
                429,
                f"the model '{self.name}' has {self._in_progress} requests in progress, and takes {self.options.max_requests}",
                "queue_full",
                retry_after=1,
            )
        self._in_progress += count
        try:
            yield
        finally:
            self._in_progress -= count
            self.last_used = time.monotonic()

    @asynccontextmanager
    async def stream(
        self,
        prompt: TokenizedPrompt,
        params: SamplingParams | BeamSearchParams,
        *,
        priority: int = 0,
        timeout: float | None = None,
        when_asleep: WhenAsleep | None = None,
        adapter: str | None = None,
    ) -> AsyncIterator[OutputStream[RequestOutput]]:
        """Give the outputs of a request, which goes through an adapter where one is named; as `AsyncLLM.stream`."""
        timeout = self.options.request_timeout if timeout is None else timeout
        deadline = None if timeout is None else time.monotonic() + timeout
        count = params.beam_width if isinstance(params, BeamSearchParams) else params.n
        with self.metrics.request(len(prompt.token_ids), count) as watch:
            while True:
                left = None if deadline is None else max(deadline - time.monotonic(), 0.001)
                stream = self.llm.stream(
                    prompt, params, priority=priority, timeout=left, lora_request=adapter, note=watch.output
                )
                async with AsyncExitStack() as stack:
                    try:
                        outputs = await stack.enter_async_context(stream)
                    except EngineAsleep as error:
                        await self._until_awake(error, when_asleep, left)
                        continue
                    watch.is_taken = True
                    yield outputs
                return

    async def encode(
        self,
        prompt: TokenizedPrompt,
        params: PoolingParams,
        *,
        timeout: float | None = None,
        when_asleep: WhenAsleep | None = None,
    ) -> PoolingRequestOutput[PoolingOutput]:
        """Return what is made of a prompt's hidden states; errors as for `AsyncLLM.encode`, and RequestTimeout."""
        timeout = self.options.request_timeout if timeout is None else timeout
        self.metrics.embedded(len(prompt.token_ids))
        try:
            async with asyncio.timeout(timeout):
                while True:
                    try:
                        return await self.llm.encode(prompt, params)
                    except EngineAsleep as error:
                        await self._until_awake(error, when_asleep, None)
        except RequestTimeout:
            raise
        except TimeoutError as error:
            raise RequestTimeout(
                f"the request was not done within {timeout:.3g} s", hint="Ask for less, or allow more time"
            ) from error

    async def _until_awake(self, refused: EngineAsleep, when_asleep: WhenAsleep | None, left: float | None) -> None:
        """Wait until the engine, which refused a request, is awake; raises the refusal where the request is not to wait."""
        puts_to_sleep = self.options.idle_sleep is not None or self.room is not _enough_room
        own = WhenAsleep.WAKE if puts_to_sleep else WhenAsleep.REJECT
        policy = when_asleep or self.options.when_asleep or own
        if policy is WhenAsleep.REJECT or self._waiting >= self.options.max_waiting:
            raise refused
        self._waiting += 1
        limit = self.options.waking_timeout if left is None else min(left, self.options.waking_timeout)
        try:
            if policy is WhenAsleep.WAKE:
                await asyncio.wait_for(asyncio.shield(self._wake_once()), limit)
            else:
                # `_awake` may still be set while the engine goes to sleep: without this, the request would ask again and again.
                await self._note_state()
                await asyncio.wait_for(self._awake.wait(), limit)
        except TimeoutError:
            raise RequestTimeout(
                f"the model '{self.name}' did not wake within {limit:g} s", hint="Wake it, or try again later"
            ) from refused
        finally:
            self._waiting -= 1

    def _wake_once(self) -> asyncio.Task[WakeReport]:
        """Return the wake that all waiting requests share."""
        if self._waking is None or self._waking.done():
            self._waking = asyncio.create_task(self._wake())
        return self._waking

    async def _wake(self) -> WakeReport:
        """Wake the engine once whatever changes it now is over."""
        async with self._changing:
            while True:
                with self._counting_failure("wake"):
                    try:
                        return await self.wake_up()
                    except MemoryBusy:
                        await asyncio.sleep(_BUSY_SECONDS)

    @contextmanager
    def _counting_failure(self, kind: str) -> Iterator[None]:
        """Count a change that fails and that nobody asked for: those of operators are counted with their operations."""
        try:
            yield
        except Exception as error:
            self.metrics.failed(kind, error)
            raise

    # What operators do

    async def sleep(self, **arguments: Any) -> SleepReport:
        """Put the engine to sleep; see `LLM.sleep`."""
        with self.metrics.operation("sleep"):
            try:
                report = await self.llm.sleep(**arguments)
                self.reason = "an operator asked for it"
            finally:
                # Requests may wait for a sleep that was under way, also where it failed: let them see the state.
                with suppress(HardpointError, ApiError):
                    await self._note_state()
            self.metrics.slept(report)
        return report

    async def wake_up(self, tags: Any = None) -> WakeReport:
        """Wake the engine once its device has room; see `LLM.wake_up`."""
        with self.metrics.operation("wake"):
            async with self.room(self):
                report = await self.llm.wake_up(tags)
                if report.changed:
                    self.awake_since = self.last_used = time.monotonic()
                await self._note_state()
            self.metrics.woke(report)
        return report

    async def pause(self, mode: str = "keep", drain_timeout: float | None = None) -> SleepReport:
        """Compute no more steps until `resume`; see `LLM.pause`."""
        report = await self.llm.pause(mode, drain_timeout)
        await self._note_state()
        return report

    async def resume(self) -> None:
        """Compute steps again; see `LLM.resume`."""
        await self.llm.resume()
        await self._note_state()

    async def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter from a folder on the server; requests name it as a model. Raises what `LLM.load_adapter` raises."""
        await self.llm.load_adapter(LoRARequest(name, 1, path))
        self.adapters[name] = path

    async def unload_adapter(self, name: str) -> None:
        """Forget a LoRA adapter; raises what `LLM.unload_adapter` raises."""
        await self.llm.unload_adapter(name)
        self.adapters.pop(name, None)

    async def status(self) -> SleepStatus:
        """Return the engine's state in full."""
        status = await self.llm.sleep_status()
        self._note_memory(status)
        self.metrics.state(status)
        return status

    def _note_memory(self, status: SleepStatus) -> None:
        if status.memory:
            self.device_bytes = sum(one.mapped for one in status.memory.values())

    async def _note_state(self) -> None:
        if (await self.status()).state is EngineState.RUNNING:
            self._awake.set()
        else:
            self._awake.clear()

    @staticmethod
    async def _in_thread_if(long: bool, make: Callable[[], T]) -> T:
        return await asyncio.to_thread(make) if long else make()


class AdaptedModel(ServedModel):
    """A served model with one of its LoRA adapters, under the adapter's name."""

    def __init__(self, name: str, base: ServedModel) -> None:
        super().__init__(name, base.adapters[name], base.settings, base.options, base.metrics)
        self._base, self.created, self.parent = base, base.created, base.name

    @property
    def is_open(self) -> bool:
        """Whether the model has an engine."""
        return self._base.is_open

    @property
    def llm(self) -> AsyncLLM:
        """The model's engine."""
        return self._base.llm

    async def state(self) -> str:
        """Return where the model stands."""
        return await self._base.state()

    @asynccontextmanager
    async def taken(self, count: int = 1) -> AsyncIterator[None]:
        """Take requests of the model."""
        async with self._base.taken(count):
            yield

    @asynccontextmanager
    async def stream(
        self,
        prompt: TokenizedPrompt,
        params: SamplingParams | BeamSearchParams,
        *,
        priority: int = 0,
        timeout: float | None = None,
        when_asleep: WhenAsleep | None = None,
        adapter: str | None = None,
    ) -> AsyncIterator[OutputStream[RequestOutput]]:
        """Give the outputs of a request that goes through the adapter."""
        stream = self._base.stream(
            prompt, params, priority=priority, timeout=timeout, when_asleep=when_asleep, adapter=self.name
        )
        async with stream as outputs:
            yield outputs

    async def encode(
        self,
        prompt: TokenizedPrompt,
        params: PoolingParams,
        *,
        timeout: float | None = None,
        when_asleep: WhenAsleep | None = None,
    ) -> PoolingRequestOutput[PoolingOutput]:
        """Refuse: prompts that are pooled go through no adapter."""
        raise InvalidRequest(
            "prompts that are pooled go through no adapter", found=f"the adapter '{self.name}'", hint="Name the model"
        )


@asynccontextmanager
async def _enough_room(model: ServedModel) -> AsyncIterator[None]:
    yield
