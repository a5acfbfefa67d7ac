"""`LLM` with vLLM's arguments, and the way by which trainers reach its weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import hardpoint
from hardpoint import RequestOutput
from hardpoint.compat.vllm.arguments import choose, engine_settings
from hardpoint.compat.vllm.engine_args import arguments_of
from hardpoint.compat.vllm.engines import LLMEngine, call_on_rank
from hardpoint.compat.vllm.requests import check_options
from hardpoint.engine.inputs import Message, Prompt
from hardpoint.interfaces.errors import ConfigError, InvalidSamplingParams

_RAW, _PROCESSED = "raw_logprobs", "processed_logprobs"
_NEUTRAL: Mapping[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "min_tokens": 0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": {},
    "allowed_token_ids": None,
    "bad_words": (),
    "structured_outputs": None,
    "logits_processors": (),
}
"""Sampling parameters with which a token is drawn from the model's own distribution."""


class LLM(hardpoint.LLM):
    """This engine under vLLM's arguments.

    None means the default, as it does there. Beside the settings of `EngineConfig`:

    - `distributed_executor_backend="external_launcher"`: the process that a launcher started is the engine's only rank.
    - `chat_template`: of `chat` where a call gives none; a text or the path of a file.
    - `logprobs_mode`: "raw_logprobs" is what this engine returns; "processed_logprobs" is accepted as long as a request's parameters
      leave the distribution as it is, so that both are the same.
    - what tunes vLLM's kernels is accepted and said to have no effect; what asks for features that are not here is refused by name.

    Raises:
        ConfigError: an argument, or a value of one, that is not supported.
    """

    def __init__(self, model: str, **arguments: Any) -> None:
        given = {name: value for name, value in arguments.items() if value is not None}
        self._logprobs_mode = choose("logprobs_mode", given.pop("logprobs_mode", _RAW), (_RAW, _PROCESSED))
        self._chat_template = _template(given.pop("chat_template", None))
        super().__init__(model, **engine_settings(given))

    @classmethod
    def from_engine_args(cls, engine_args: Any) -> Self:
        """Make an engine of `EngineArgs`."""
        return cls(**arguments_of(engine_args))

    @property
    def llm_engine(self) -> LLMEngine:
        """The engine under vLLM's names."""
        return LLMEngine(self.engine)

    def get_world_size(self, include_dp: bool = True) -> int:
        """Return how many ranks share the model."""
        return self.info.num_ranks

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: hardpoint.SamplingParams | Sequence[hardpoint.SamplingParams] | None = None,
        *,
        use_tqdm: Any = True,
        priority: Any = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Complete prompts; see `hardpoint.LLM.generate`. Raises InvalidSamplingParams for log probabilities that are not there."""
        check_options(options)
        self._check_logprobs(sampling_params)
        return super().generate(prompts, sampling_params, use_tqdm=bool(use_tqdm), priority=priority)

    def chat(
        self,
        messages: Iterable[Message] | Iterable[Iterable[Message]],
        sampling_params: hardpoint.SamplingParams | Sequence[hardpoint.SamplingParams] | None = None,
        use_tqdm: Any = True,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer conversations; see `hardpoint.LLM.chat`."""
        choose("chat_template_content_format", chat_template_content_format, ("auto", "string"))
        check_options(options)
        self._check_logprobs(sampling_params)
        return super().chat(
            messages,
            sampling_params,
            use_tqdm=bool(use_tqdm),
            chat_template=chat_template or self._chat_template,
            add_generation_prompt=add_generation_prompt,
        )

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call one of a closed list of methods, and return its result as of one rank; see `call_on_rank`."""
        return call_on_rank(self.engine, method, timeout, args, kwargs)

    def _check_logprobs(self, params: Any) -> None:
        if self._logprobs_mode == _PROCESSED:
            params = self.get_default_sampling_params() if params is None else params
            for one in [params] if isinstance(params, hardpoint.SamplingParams) else params:
                _check_processed(one)


def _template(given: str | Path | None) -> str | None:
    """Return a chat template that was given as a text or by its file; raises ConfigError."""
    if given is None or (isinstance(given, str) and "{" in given):
        return given
    try:
        return Path(given).read_text("utf-8")
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError("chat_template is neither a template nor the path of one", found=str(error)) from error


def _check_processed(params: hardpoint.SamplingParams) -> None:
    """Raise InvalidSamplingParams for log probabilities of a distribution that the parameters change."""
    changed = [name for name, neutral in _NEUTRAL.items() if getattr(params, name) != neutral]
    if params.logprobs is not None and changed:
        raise InvalidSamplingParams(
            "log probabilities are of the model's own distribution, and not of the one that is sampled from",
            found=f"logprobs_mode='{_PROCESSED}' with "
            + ", ".join(f"{name}={getattr(params, name)!r}" for name in changed),
            hint="Leave these parameters as they are by default, or ask for no log probabilities",
        )
