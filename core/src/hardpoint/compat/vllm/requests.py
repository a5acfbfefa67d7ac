"""What requests are asked with, by vLLM's names, where that is more than the engine's own."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Self

import hardpoint
from hardpoint.engine.argument_names import check_names
from hardpoint.interfaces.errors import HardpointError, InvalidRequest, InvalidSamplingParams
from hardpoint.validation import shown

_NO_ADAPTERS = "Give LoRA adapters to generate(), chat() and beam_search()"

_SAMPLING: Mapping[str, tuple[Any, ...]] = {
    "early_stopping": (False,),
    "length_penalty": (1.0,),
    "logprob_token_ids": (),
    "output_text_buffer_length": (0,),
    "prompt_logprob_start": (0,),
    "prompt_logprob_token_ids": (),
    "repetition_detection": (),
    "routed_experts_prompt_start": (0,),
    "skip_clone": (False, True),
    "skip_reading_prefix_cache": (False,),
    "stream_interval": (1,),
    "thinking_token_budget": (),
    "trace_decode_token_ids": (),
    "use_beam_search": (False,),
    "watermarking": (False,),
}
_STRUCTURED: Mapping[str, tuple[Any, ...]] = {
    "backend": ("auto", "guidance"),
    "disable_additional_properties": (False,),
    "disable_any_whitespace": (False,),
    "structural_tag": (),
    "whitespace_pattern": (),
}
_POOLING: Mapping[str, tuple[Any, ...]] = {
    "extra_kwargs": ({},),
    "late_interaction_params": (),
    "output_kind": (hardpoint.RequestOutputKind.FINAL_ONLY,),
    "requires_token_ids": (False, True),
    "skip_reading_prefix_cache": (False, True),
}
"""Parameters that are not here, with the values beside None that ask for nothing."""


class SamplingParams(hardpoint.SamplingParams):
    """`hardpoint.SamplingParams` under all of vLLM's names; None means the default, except of `max_tokens`.

    `guided_decoding` is a former name of `structured_outputs`. Raises InvalidSamplingParams, also for what is not here.
    """

    __slots__ = ()
    # vLLM's are structs of msgspec, which libraries (outlines) copy by these names.
    __struct_fields__ = tuple(one.name for one in dataclasses.fields(hardpoint.SamplingParams))

    def __new__(cls, *args: object, **values: object) -> Self:
        """Leave the names to `__init__`."""
        return object.__new__(cls)

    def __init__(self, **given: Any) -> None:
        values = _without_neutral(given, _SAMPLING, InvalidSamplingParams, keep=("max_tokens",))
        guided = values.pop("guided_decoding", None)
        if guided is not None and values.setdefault("structured_outputs", guided) is not guided:
            raise InvalidSamplingParams(
                "guided_decoding is a former name of structured_outputs", found="both", hint="Give one of them"
            )
        self._check_names(values)
        super().__init__(**values)

    @classmethod
    def from_optional(cls, **given: Any) -> Self:
        """Return parameters, of which None means the default."""
        return cls(**given)


class StructuredOutputsParams(hardpoint.StructuredOutputsParams):
    """`hardpoint.StructuredOutputsParams` under all of vLLM's names; None means the default. Raises InvalidSamplingParams."""

    __slots__ = ()

    def __new__(cls, *args: object, **values: object) -> Self:
        """Leave the names to `__init__`."""
        return object.__new__(cls)

    def __init__(self, **given: Any) -> None:
        values = _without_neutral(given, _STRUCTURED, InvalidSamplingParams)
        self._check_names(values)
        super().__init__(**values)

    @classmethod
    def from_optional(cls, **given: Any) -> Self:
        """Return parameters, of which None means the default."""
        return cls(**given)


class PoolingParams(hardpoint.PoolingParams):
    """`hardpoint.PoolingParams` under all of vLLM's names; None means the default.

    `normalize`, `softmax` and `activation` are former names of `use_activation`. Raises InvalidRequest, also for what is not here.
    """

    __slots__ = ()

    def __new__(cls, *args: object, **values: object) -> Self:
        """Leave the names to `__init__`."""
        return object.__new__(cls)

    def __init__(self, **given: Any) -> None:
        values = _without_neutral(given, _POOLING, InvalidRequest)
        for former in ("normalize", "softmax", "activation"):
            if former in values:
                flag = values.pop(former)
                if values.setdefault("use_activation", flag) is not flag:
                    raise InvalidRequest(
                        f"{former} is a former name of use_activation", found="both", hint="Give one of them"
                    )
        self._check_names(values)
        super().__init__(**values)


@dataclasses.dataclass(frozen=True, slots=True)
class LoRARequest(hardpoint.LoRARequest):
    """`hardpoint.LoRARequest` with vLLM's further fields, of which the model's name says nothing here; raises InvalidRequest."""

    base_model_name: str | None = None


def check_options(options: Mapping[str, Any], call: Callable[..., Any]) -> None:
    """Raise InvalidRequest for options of a call that it does not have, or that ask for what is not here; None asks for nothing."""
    named = [name for name, one in inspect.signature(call).parameters.items() if one.kind is not one.VAR_KEYWORD]
    check_names(call.__name__, options.keys() - _OPTIONS.keys(), named)
    for name, value in options.items():
        if value is not None and value not in ({}, [], False):
            raise InvalidRequest(f"{name} is not supported", found=f"{name}={shown(value)}", hint=_OPTIONS[name])


_OPTIONS: Mapping[str, str] = {
    "arrival_time": "Leave it out: requests arrive when they are added",
    "data_parallel_rank": "Leave it out",
    "kv_hints": "Leave it out",
    "lora_request": _NO_ADAPTERS,
    "mm_processor_kwargs": "Leave it out",
    "prompt_adapter_request": _NO_ADAPTERS,
    "prompt_text": "Leave it out: give 'prompt' or 'prompt_token_ids'",
    "reasoning_ended": "Leave it out",
    "reset_connector": "Leave it out: what is offloaded of the prefix cache is forgotten with it",
    "reset_running_requests": "Leave it out: requests in progress keep what they have computed, and hold the call up no more",
    "reasoning_parser_kwargs": "Leave it out",
    "session_id": "Leave it out: equal beginnings of prompts are found in the prefix cache",
    "tokenization_kwargs": "Tokenise the prompt with get_tokenizer(), and give its token ids",
    "trace_headers": "Leave it out: the server traces requests",
}


def check_reset(reset_running_requests: bool, reset_connector: bool) -> None:
    """Raise InvalidRequest for options of `reset_prefix_cache` that ask for what is not here."""
    options = {"reset_running_requests": reset_running_requests, "reset_connector": reset_connector}
    check_options(options, check_reset)


def _without_neutral(
    given: Mapping[str, Any],
    absent: Mapping[str, tuple[Any, ...]],
    error: type[HardpointError],
    keep: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Return parameters without those that ask for nothing; raises `error` for one that is not here."""
    values = {name: value for name, value in given.items() if value is not None or name in keep}
    for name, neutral in absent.items():
        if name in values and values.pop(name) not in neutral:
            raise error(f"{name} is not supported", found=f"{name}={shown(given[name])}", hint="Leave it out")
    return values
