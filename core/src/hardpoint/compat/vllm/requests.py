"""What requests are asked with, by vLLM's names, where that is more than the engine's own."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from types import SimpleNamespace
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


class NotHere(InvalidRequest, AttributeError):
    """A name of vLLM's for which there is nothing here."""


class Part(SimpleNamespace):
    """Those attributes of an object within vLLM's engines that are here; raises NotHere for others."""

    def __getattr__(self, name: str) -> Any:
        here = ", ".join(vars(self))
        raise NotHere(f"Hardpoint has nothing for {name!r} within vLLM's engines", hint=f"There is: {here}")


def check_attribute(name: str) -> None:
    """Raise NotHere for a name of vLLM's engines that has nothing here."""
    if name in _NOT_HERE:
        raise NotHere(f"Hardpoint has nothing for {name!r} of vLLM's engines", hint=_NOT_HERE[name])


_BY_PAIRS = "Use update_weights with (name, tensor) pairs, or reload_weights"
_AT_ONCE = "Use generate with all prompts, or LLMEngine.add_request and step"
_TASKS = "Call what is wanted: what the model cannot do is refused"
_PICTURES = "Leave it out: pictures are known by their bytes or multi_modal_uuids, and forgotten for others"
_BY_ARGUMENTS = "Settings are arguments of the engine; `info` says what it made of them"

_NOT_HERE: Mapping[str, str] = {
    "add_request": "Use generate, which gives the outputs as they come",
    "apply_model": "The model itself is not reachable: weights are written by update_weights",
    "cache_config": "`stats` counts the blocks of the KV cache",
    "create_engine_config": _BY_ARGUMENTS,
    "engine_core": "It is within the engine: what there is of it are methods of the engine itself",
    "enqueue": _AT_ONCE,
    "enqueue_chat": _AT_ONCE,
    "finish_weight_update": _BY_PAIRS,
    "get_model_config": "Use model_config",
    "get_supported_tasks": _TASKS,
    "init_weight_transfer_engine": _BY_PAIRS,
    "list_loras": "Use adapters, which gives their names",
    "pin_lora": "Leave it out: adapters stay until unload_adapter",
    "preprocess_chat": "Use get_tokenizer().apply_chat_template",
    "remove_lora": "Use unload_adapter with the adapter's name",
    "reset_encoder_cache": _PICTURES,
    "reset_mm_cache": _PICTURES,
    "scale_elastic_ep": "Make an engine of another size",
    "set_tokenizer": "Give tokenizer, a folder with the other one",
    "start_weight_update": _BY_PAIRS,
    "supported_tasks": _TASKS,
    "vllm_config": _BY_ARGUMENTS,
    "wait_for_completion": _AT_ONCE,
}


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
    "profile_prefix": "Give another folder",
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
