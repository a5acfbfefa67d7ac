"""What requests are asked with, by vLLM's names, where that is more than the engine's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import hardpoint
from hardpoint.interfaces.errors import HardpointError, InvalidRequest, InvalidSamplingParams
from hardpoint.validation import shown

NO_ADAPTERS = "Merge the adapter into the model's weights (peft: merge_and_unload), and load the merged folder"

_SAMPLING: Mapping[str, tuple[Any, ...]] = {
    "early_stopping": (False,),
    "length_penalty": (1.0,),
    "logprob_token_ids": (),
    "output_text_buffer_length": (0,),
    "repetition_detection": (),
    "routed_experts_prompt_start": (0,),
    "skip_clone": (False, True),
    "skip_reading_prefix_cache": (False,),
    "stream_interval": (1,),
    "thinking_token_budget": (),
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
"""Parameters that are not here, with the values beside None that ask for nothing."""


class SamplingParams(hardpoint.SamplingParams):
    """`hardpoint.SamplingParams` under all of vLLM's names; None means the default, except of `max_tokens`.

    `guided_decoding` is a former name of `structured_outputs`. Raises InvalidSamplingParams, also for what is not here.
    """

    __slots__ = ()

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


@dataclass(frozen=True)
class LoRARequest:
    """An adapter by name, which requests may name only where there is none: adapters are not supported."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None


def check_options(options: Mapping[str, Any]) -> None:
    """Raise InvalidRequest for options of a call that ask for what is not here; None asks for nothing."""
    for name, value in options.items():
        if name not in _OPTIONS:
            raise InvalidRequest(f"{name!r} is not an option of this call")
        if value is not None and value not in ({}, [], False):
            raise InvalidRequest(f"{name} is not supported", found=f"{name}={shown(value)}", hint=_OPTIONS[name])


_OPTIONS: Mapping[str, str] = {
    "arrival_time": "Leave it out: requests arrive when they are added",
    "data_parallel_rank": "Leave it out",
    "kv_hints": "Leave it out",
    "lora_request": NO_ADAPTERS,
    "mm_processor_kwargs": "Leave it out",
    "prompt_adapter_request": NO_ADAPTERS,
    "prompt_text": "Leave it out: give 'prompt' or 'prompt_token_ids'",
    "reasoning_ended": "Leave it out",
    "reasoning_parser_kwargs": "Leave it out",
    "session_id": "Leave it out: equal beginnings of prompts are found in the prefix cache",
    "tokenization_kwargs": "Tokenise the prompt with get_tokenizer(), and give its token ids",
    "trace_headers": "Leave it out: the server traces requests",
}


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
