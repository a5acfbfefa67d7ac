"""vLLM's engines, one step at a time or awaited, over this one's."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import hardpoint
from hardpoint import EngineConfig, PoolingParams, PoolingRequestOutput, RequestOutput, SamplingParams
from hardpoint.compat.vllm.arguments import engine_settings, profile_folder
from hardpoint.compat.vllm.engine_args import arguments_of
from hardpoint.compat.vllm.metrics import Metric, under_their_names
from hardpoint.compat.vllm.requests import Part, check_attribute, check_options, check_reset
from hardpoint.compat.vllm.results import OutputConverter
from hardpoint.engine.info import EngineInfo
from hardpoint.engine.inputs import Prompt
from hardpoint.engine.outputs import PoolingOutput
from hardpoint.interfaces.errors import EngineDead, InvalidRequest

if TYPE_CHECKING:
    from torch import Tensor

_CALLS = ("declare_weights_valid", "is_sleeping", "reload_weights", "reset_prefix_cache", "sleep", "wake_up")


def call_on_rank(
    engine: hardpoint.LLMEngine | AsyncLLM,
    method: Any,
    timeout: float | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
) -> list[Any]:
    """Call one of a closed list of an engine's methods, and return its result as of one rank.

    Raises InvalidRequest for another method, for arguments that it does not take, and for a timeout, which these do not have.
    """
    if not isinstance(method, str) or method not in _CALLS:
        raise InvalidRequest(
            f"collective_rpc cannot call {repr(method) if isinstance(method, str) else 'a function'}",
            hint=f"It can call one of: {', '.join(_CALLS)}; weights are written by update_weights",
        )
    if timeout is not None:
        raise InvalidRequest("calls of collective_rpc have no time limit", found=f"timeout={timeout!r}")
    call = getattr(engine, method)
    try:
        inspect.signature(call).bind(*args, **(kwargs or {}))
    except TypeError as error:
        raise InvalidRequest(f"collective_rpc cannot call '{method}' with these arguments", found=str(error)) from error
    return [call(*args, **(kwargs or {}))]


def with_tensor(output: PoolingRequestOutput[Any]) -> PoolingRequestOutput[Any]:
    """Return a pooling request's result with its data as a tensor of torch, which vLLM's users expect there."""
    import torch

    return replace(output, outputs=PoolingOutput(torch.from_numpy(output.outputs.data)))  # type: ignore[arg-type]


def model_config(info: EngineInfo, **more: Any) -> Part:
    """Return what there is of vLLM's configuration of the model."""
    import torch

    return Part(max_model_len=info.max_model_len, dtype=getattr(torch, info.dtype), **more)


def without_scheduling(tags: str | Iterable[str] | None) -> list[str] | None:
    """Return tags of memory to wake; without "scheduling", which vLLM has for an engine that is paused and not asleep."""
    named = [tags] if isinstance(tags, str) else tags
    return None if named is None else [one for one in named if one != "scheduling"]


class LLMEngine:
    """`hardpoint.LLMEngine` under vLLM's names; what is not written here is its own."""

    def __init__(self, engine: hardpoint.LLMEngine) -> None:
        self._engine = engine
        self._converters: dict[str, OutputConverter] = {}
        self.model_config = model_config(engine.info, model=engine.config.model)

    @classmethod
    def from_engine_args(cls, engine_args: Any, usage_context: Any = None, **_: Any) -> Self:
        """Make an engine of `EngineArgs`; raises what `LLM` raises."""
        return cls(hardpoint.LLMEngine(_config(engine_args)))

    @property
    def model_executor(self) -> Part:
        """The way on which trainers reach `load_weights` of the model."""
        model = Part(load_weights=self._load_weights)
        return Part(driver_worker=Part(model_runner=Part(model=model)))

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        *,
        priority: int = 0,
        lora_request: Any = None,
        **options: Any,
    ) -> None:
        """Queue a request, whose outputs `step` returns; see `hardpoint.LLMEngine.add_request`."""
        check_options({name: value for name, value in options.items() if name != "arrival_time"}, self.add_request)
        if isinstance(params, PoolingParams):
            self._engine.add_pooling_request(request_id, prompt, params)
        else:
            self._engine.add_request(request_id, prompt, params, priority=priority, lora_request=lora_request)
            self._converters[request_id] = OutputConverter(params, lora_request)

    def step(self) -> list[Any]:
        """Compute one step and return the outputs of requests that have something new; see `hardpoint.LLMEngine.step`."""
        made: list[Any] = []
        for one in self._engine.step():
            if isinstance(one, RequestOutput):
                converter = self._converters.get(one.request_id) or OutputConverter()
                made.append(converter.convert(one))
            else:
                made.append(with_tensor(one))
            if one.finished:
                self._converters.pop(one.request_id, None)
        return made

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests; see `hardpoint.LLMEngine.abort_request`."""
        if not isinstance(request_ids, str) and isinstance(request_ids, Iterable):
            request_ids = list(request_ids)
        self._engine.abort_request(request_ids)
        for request_id in [request_ids] if isinstance(request_ids, str) else request_ids:
            self._converters.pop(request_id, None)

    def do_log_stats(self) -> None:
        """Do nothing: the engine does not log its counters."""

    def add_lora(self, lora_request: Any) -> bool:
        """Load an adapter; raises InvalidAdapter."""
        self._engine.load_adapter(lora_request)
        return True

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Record what every rank does, in the folder of VLLM_TORCH_PROFILER_DIR; see `hardpoint.LLM.start_profile`."""
        check_options({"profile_prefix": profile_prefix}, self.start_profile)
        self._engine.start_profile(profile_folder(None))

    def get_metrics(self) -> list[Metric]:
        """Return the engine's metrics under vLLM's names; see `hardpoint.LLM.get_metrics`."""
        return under_their_names(self._engine.get_metrics())

    def get_tokenizer(self) -> Any:
        """Return the model's tokenizer."""
        return self._engine.tokenizer

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all cached prompt beginnings; True, since requests in progress do not keep it from that."""
        check_reset(reset_running_requests, reset_connector)
        self._engine.reset_prefix_cache()
        return True

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call one of a closed list of methods; see `call_on_rank`."""
        return call_on_rank(self._engine, method, timeout, args, kwargs)

    def _load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Replace weights and return their names; errors as for `update_weights`."""
        names: set[str] = set()

        def named() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                names.add(name)
                yield name, tensor

        self._engine.update_weights(named())
        return names

    def __getattr__(self, name: str) -> Any:
        check_attribute(name)
        return getattr(self._engine, name)


class AsyncLLM:
    """`hardpoint.AsyncLLM` under vLLM's names; what is not written here is its own.

    Made within a running event loop or before there is one; used in one alone.
    """

    def __init__(self, engine: hardpoint.AsyncLLM) -> None:
        self._engine = engine
        self.model_config = model_config(engine.info)

    @classmethod
    def from_engine_args(cls, engine_args: Any, usage_context: Any = None, **_: Any) -> Self:
        """Make an engine of `AsyncEngineArgs`; raises what `LLM` raises."""
        arguments = engine_settings(arguments_of(engine_args))
        return cls(hardpoint.AsyncLLM(**arguments))

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        lora_request: Any = None,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete a prompt and yield its outputs as they come; see `hardpoint.AsyncLLM.generate`."""
        check_options(options, self.generate)
        return self._generate(prompt, sampling_params, request_id, priority=priority, lora_request=lora_request)

    async def _generate(
        self, prompt: Prompt, params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        async with self._engine.stream(prompt, params, request_id, **options) as outputs:
            converter = OutputConverter(params, options["lora_request"])
            async for output in outputs:
                yield converter.convert(output)

    async def encode(
        self, prompt: Prompt, pooling_params: PoolingParams, request_id: str, *, priority: int = 0, **options: Any
    ) -> AsyncGenerator[Any, None]:
        """Yield what is made of a prompt's hidden states, whatever its priority; see `hardpoint.AsyncLLM.encode`."""
        check_options(options, self.encode)
        yield with_tensor(await self._engine.encode(prompt, pooling_params, request_id))

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests; whoever reads one gets what was streamed of it."""
        self._engine.abort([request_id] if isinstance(request_id, str) else request_id)

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Put the engine to sleep; see `hardpoint.LLM.sleep`."""
        await self._engine.sleep(level=level, mode=mode)

    async def wake_up(self, tags: str | Iterable[str] | None = None) -> None:
        """Take memory again and compute steps; see `hardpoint.LLM.wake_up`. The tag "scheduling" is of a pause (`sleep(level=0)`)."""
        rest = without_scheduling(tags)
        await (self._engine.resume() if tags and rest == [] else self._engine.wake_up(rest))

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all cached prompt beginnings; True, since requests in progress do not keep it from that."""
        check_reset(reset_running_requests, reset_connector)
        await self._engine.reset_prefix_cache()
        return True

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call one of a closed list of methods, and return its result as of one rank; see `call_on_rank`."""
        (called,) = call_on_rank(self, method, timeout, args, kwargs)
        return [await called]

    async def pause_generation(
        self, *, mode: str = "abort", wait_for_inflight_requests: bool | None = None, clear_cache: bool = True
    ) -> None:
        """Compute no more steps until `resume_generation`.

        Args:
            mode: what becomes of requests in progress: "abort" ends them, "wait" serves them first, "keep" lets them continue later.
            wait_for_inflight_requests: True is a former name of the mode "wait".
            clear_cache: forget cached beginnings of prompts.
        """
        mode = "wait" if wait_for_inflight_requests else mode
        await self._engine.pause(mode)
        if clear_cache and mode != "keep":
            await self._engine.reset_prefix_cache()

    async def resume_generation(self) -> None:
        """Compute steps again."""
        await self._engine.resume()

    async def is_paused(self) -> bool:
        """Return whether the engine computes no steps."""
        return await self._engine.is_sleeping()

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer; None where there is none."""
        return self._engine.get_tokenizer()

    @property
    def errored(self) -> bool:
        """The engine cannot go on."""
        died = getattr(self._engine, "died", None)  # there is none before the first event loop
        return died is not None and died.done()

    @property
    def is_stopped(self) -> bool:
        """`errored`."""
        return self.errored

    @property
    def is_running(self) -> bool:
        """The engine can go on."""
        return not self.errored

    @property
    def dead_error(self) -> EngineDead:
        """Why the engine cannot go on."""
        return self._engine.died.result() if self.errored else EngineDead("the engine cannot go on", found="no reason")

    async def add_lora(self, lora_request: Any) -> bool:
        """Load an adapter; raises InvalidAdapter."""
        await self._engine.load_adapter(lora_request)
        return True

    async def is_tracing_enabled(self) -> bool:
        """Return False: the server traces."""
        return False

    async def do_log_stats(self) -> None:
        """Do nothing: the engine does not log its counters."""

    async def start_profile(self, profile_prefix: str | None = None) -> None:
        """Record what every rank does, in the folder of VLLM_TORCH_PROFILER_DIR; see `hardpoint.LLM.start_profile`."""
        check_options({"profile_prefix": profile_prefix}, self.start_profile)
        await self._engine.start_profile(profile_folder(None))

    async def check_health(self) -> None:
        """Raise EngineDead where the engine cannot go on."""
        await self._engine.stats()

    def shutdown(self, timeout: float | None = None) -> None:
        """End the engine at once."""
        self._engine.shutdown()

    def __getattr__(self, name: str) -> Any:
        check_attribute(name)
        return getattr(self._engine, name)


def _config(engine_args: Any) -> EngineConfig:
    settings = engine_settings(arguments_of(engine_args))
    return EngineConfig.from_arguments(settings.pop("model"), settings)
