"""`LLM` with vLLM's arguments, and the way by which trainers reach its weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import hardpoint
from hardpoint import (
    BeamSearchOutput,
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from hardpoint.compat.vllm.arguments import choose, engine_settings, profile_folder
from hardpoint.compat.vllm.engine_args import arguments_of
from hardpoint.compat.vllm.engines import LLMEngine, call_on_rank, with_tensor, without_scheduling
from hardpoint.compat.vllm.metrics import Metric, under_their_names
from hardpoint.compat.vllm.requests import check_attribute, check_options, check_reset
from hardpoint.compat.vllm.results import OutputConverter
from hardpoint.engine.inputs import Message, Prompt
from hardpoint.engine.outputs import EmbeddingOutput
from hardpoint.interfaces.errors import ConfigError


class LLM(hardpoint.LLM):
    """This engine under vLLM's arguments.

    None means the default, as it does there. Beside the settings of `EngineConfig`:

    - `distributed_executor_backend="external_launcher"`: the process that a launcher started is the engine's only rank.
    - `chat_template`: of `chat` where a call gives none; a text or the path of a file.
    - what tunes vLLM's kernels is accepted and said to have no effect; what asks for features that are not here is refused by name.

    Raises:
        ConfigError: an argument, or a value of one, that is not supported.
    """

    def __init__(self, model: str, **arguments: Any) -> None:
        given = {name: value for name, value in arguments.items() if value is not None}
        self._profiles = profile_folder(given.pop("profiler_config", None))
        self._chat_template = _template(given.pop("chat_template", None))
        super().__init__(model, **engine_settings(given))
        self.llm_engine = LLMEngine(self.engine)
        self.model_config = self.llm_engine.model_config

    @classmethod
    def from_engine_args(cls, engine_args: Any) -> Self:
        """Make an engine of `EngineArgs`."""
        return cls(**arguments_of(engine_args))

    def get_world_size(self, include_dp: bool = True) -> int:
        """Return how many ranks share the model."""
        return self.info.num_ranks

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: hardpoint.SamplingParams | Sequence[hardpoint.SamplingParams] | None = None,
        *,
        use_tqdm: Any = True,
        lora_request: Any = None,
        priority: Any = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Complete prompts; see `hardpoint.LLM.generate`."""
        check_options(options, self.generate)
        return super().generate(
            prompts, sampling_params, use_tqdm=bool(use_tqdm), lora_request=lora_request, priority=priority
        )

    def chat(
        self,
        messages: Iterable[Message] | Iterable[Iterable[Message]],
        sampling_params: hardpoint.SamplingParams | Sequence[hardpoint.SamplingParams] | None = None,
        use_tqdm: Any = True,
        lora_request: Any = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: Any = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer conversations; see `hardpoint.LLM.chat`."""
        choose("chat_template_content_format", chat_template_content_format, ("auto", "string"))
        check_options(options, self.chat)
        return super().chat(
            messages,
            sampling_params,
            use_tqdm=bool(use_tqdm),
            lora_request=lora_request,
            chat_template=chat_template or self._chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            priority=priority,
        )

    def beam_search(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: hardpoint.BeamSearchParams,
        lora_request: Any = None,
        use_tqdm: Any = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Search for the best texts; see `hardpoint.LLM.beam_search`. How many run at a time is the scheduler's, whatever the limit."""
        return super().beam_search(prompts, params, use_tqdm=bool(use_tqdm), lora_request=lora_request)

    def encode(
        self,
        prompts: Prompt | Iterable[Prompt],
        pooling_params: hardpoint.PoolingParams | Sequence[hardpoint.PoolingParams] | None = None,
        *,
        use_tqdm: Any = True,
        pooling_task: str | None = None,
        **options: Any,
    ) -> list[PoolingRequestOutput[Any]]:
        """Return what is made of prompts' hidden states, as tensors of torch; see `hardpoint.LLM.encode`."""
        check_options(options, self.encode)
        found = super().encode(prompts, pooling_params, pooling_task=pooling_task, use_tqdm=bool(use_tqdm))
        return [with_tensor(one) for one in found]

    def embed(
        self,
        prompts: Prompt | Iterable[Prompt],
        pooling_params: hardpoint.PoolingParams | Sequence[hardpoint.PoolingParams] | None = None,
        *,
        use_tqdm: Any = True,
        **options: Any,
    ) -> list[EmbeddingRequestOutput]:
        """Return embeddings; see `hardpoint.LLM.embed`."""
        check_options(options, self.embed)
        found = super().encode(prompts, pooling_params, pooling_task="embed", use_tqdm=bool(use_tqdm))
        return [_listed(EmbeddingRequestOutput.from_base(one)) for one in found]

    def classify(
        self,
        prompts: Prompt | Iterable[Prompt],
        pooling_params: hardpoint.PoolingParams | Sequence[hardpoint.PoolingParams] | None = None,
        *,
        use_tqdm: Any = True,
        **options: Any,
    ) -> list[ClassificationRequestOutput]:
        """Return the probabilities of prompts' labels; see `hardpoint.LLM.classify`."""
        check_options(options, self.classify)
        found = super().encode(prompts, pooling_params, pooling_task="classify", use_tqdm=bool(use_tqdm))
        return [ClassificationRequestOutput.from_base(one) for one in found]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        pooling_params: hardpoint.PoolingParams | None = None,
        chat_template: str | None = None,
        use_tqdm: Any = True,
        **options: Any,
    ) -> list[ScoringRequestOutput]:
        """Return how well texts fit; see `hardpoint.LLM.score`."""
        check_options(options, self.score)
        return super().score(
            data_1, data_2, pooling_params=pooling_params, chat_template=chat_template, use_tqdm=bool(use_tqdm)
        )

    def reset_prefix_cache(  # type: ignore[override]
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget all cached prompt beginnings; True, since requests in progress do not keep it from that."""
        check_reset(reset_running_requests, reset_connector)
        super().reset_prefix_cache()
        return True

    def wake_up(self, tags: str | Sequence[str] | None = None) -> Any:
        """Take memory again and compute steps; see `hardpoint.LLM.wake_up`. The tag "scheduling" is of a pause (`sleep(level=0)`)."""
        rest = without_scheduling(tags)
        return self.resume() if tags and rest == [] else super().wake_up(rest)

    def start_profile(self, folder: str | None = None, *, profile_prefix: str | None = None) -> None:
        """Record what every rank does; without a folder, in that of `profiler_config` or of VLLM_TORCH_PROFILER_DIR."""
        check_options({"profile_prefix": profile_prefix}, self.start_profile)
        super().start_profile(folder or self._profiles)

    def get_metrics(self) -> list[Metric]:
        """Return the engine's metrics under vLLM's names; see `hardpoint.LLM.get_metrics`."""
        return under_their_names(super().get_metrics())

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call one of a closed list of methods, and return its result as of one rank; see `call_on_rank`."""
        return call_on_rank(self.engine, method, timeout, args, kwargs)

    def _next_id(self) -> str:
        # Numbers, as in vLLM: scripts sort outputs by int(request_id).
        return str(next(self._request_ids))

    def _generate(self, prompts: Any, params: Any, use_tqdm: bool, priority: Any, lora_request: Any) -> list[Any]:
        found = super()._generate(prompts, params, use_tqdm, priority, lora_request)
        is_one = isinstance(lora_request, str) or not isinstance(lora_request, Sequence)
        adapters = [lora_request] * len(found) if is_one else lora_request
        return [OutputConverter(lora_request=one).convert(output) for output, one in zip(found, adapters, strict=True)]

    def __getattr__(self, name: str) -> Any:
        check_attribute(name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def _listed(output: EmbeddingRequestOutput) -> EmbeddingRequestOutput:
    """Return an embedding as a list of floats, as in vLLM: scripts write it as JSON."""
    return replace(output, outputs=EmbeddingOutput(output.outputs.embedding.tolist()))  # type: ignore[arg-type]


def _template(given: str | Path | None) -> str | None:
    """Return a chat template that was given as a text or by its file; raises ConfigError."""
    if given is None or (isinstance(given, str) and "{" in given):
        return given
    try:
        return Path(given).read_text("utf-8")
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError("chat_template is neither a template nor the path of one", found=str(error)) from error
