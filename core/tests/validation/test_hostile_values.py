"""Any value in any field of any settings class is accepted or is the class's one typed error."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import MISSING, fields
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from hardpoint import EngineConfig, PoolingParams, SamplingParams
from hardpoint.engine.inputs import PromptProcessor, TokenizedPrompt, as_conversations, as_prompts, pair_with_params
from hardpoint.engine.sleep import SleepRequest, Tags
from hardpoint.executor import RankLimits, RaySettings
from hardpoint.interfaces.errors import ConfigError, InvalidRequest, InvalidSamplingParams, SleepRefused
from hardpoint.scheduler import SchedulerConfig
from hardpoint.validation import Validated

REQUIRED: dict[type[Validated], dict[str, Any]] = {
    EngineConfig: {"model": "demo"},
    SchedulerConfig: {"block_size": 16, "num_device_blocks": 100},
    TokenizedPrompt: {"text": None, "token_ids": [1]},
}
ERRORS = {
    EngineConfig: ConfigError,
    SchedulerConfig: ConfigError,
    RankLimits: ConfigError,
    RaySettings: ConfigError,
    SamplingParams: InvalidSamplingParams,
    PoolingParams: InvalidRequest,
    TokenizedPrompt: InvalidRequest,
    SleepRequest: SleepRefused,
    Tags: SleepRefused,
}


class Rude:
    """An object that raises whatever is asked of it."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __repr__(self) -> str:
        raise RuntimeError("no")


def hostile() -> list[Any]:
    endless: list[Any] = []
    endless.append(endless)
    numbers = [0, -1, 1, 2**31, 2**63, 2**64, 2**70, -(2**70), 10**400, 10**5000]
    numbers += [-0.0, 0.5, 1e-45, 5e-324, 1e-320, 1e39, 1e308, math.inf, -math.inf, math.nan, 1j]
    texts: list[Any] = ["", "x", "512", "auto", "\ud800", "\0", "x" * 10_000, b"x", bytearray(b"x")]
    containers = [
        [],
        [None],
        [[]],
        [math.nan],
        [2**70],
        ["\ud800"],
        ["", ""],
        (1, 2),
        {1, 2},
        range(3),
        deque([1]),
        endless,
    ]
    mappings = [{}, {"a": 1}, {1: math.nan}, {2**70: 1.0}, {None: None}, {"\ud800": 1}, {1: {2: 3}}, {(1,): 1}]
    foreign = [
        np.float64("nan"),
        np.int64(5),
        np.array(5),
        np.array([[1.0]]),
        np.array([None]),
        np.datetime64("2020-01-01"),
    ]
    foreign += [torch.tensor(5), torch.empty(2, device="meta"), torch.float16]
    objects = [None, True, object(), Rude(), MagicMock(), int, print, iter([1]), Exception("x"), Ellipsis]
    return [*numbers, *texts, *containers, *mappings, *foreign, *objects]


def values(made: Validated) -> dict[str, object]:
    return {field.name: getattr(made, field.name) for field in fields(made)}  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_every_field_of_every_settings_class(kind: type[Validated]) -> None:
    accepted = 0
    for name in (field.name for field in fields(kind)):  # type: ignore[arg-type]
        for value in hostile():
            try:
                made = kind(**{**REQUIRED.get(kind, {}), name: value})
            except ERRORS[kind] as error:
                str(error).encode()
            else:
                accepted += 1
                kept = values(made)
                # Not the objects: from Python 3.13 on they compare their fields by `==`, and NaN is not itself.
                assert values(kind(**kept)) == kept, name
    assert accepted > 0


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_defaults_are_what_their_types_say(kind: type[Validated]) -> None:
    made = kind(**REQUIRED.get(kind, {}))
    for field in fields(kind):  # type: ignore[arg-type]
        if field.default is not MISSING:
            assert getattr(made, field.name) == field.default


def test_every_prompt() -> None:
    tokenizer = MagicMock(chat_template="x")
    tokenizer.encode.return_value = [1]
    process = PromptProcessor(tokenizer, vocab_size=100, max_model_len=50)
    for value in hostile():
        for prompts in (
            value,
            [value],
            {"prompt": value},
            {"prompt_token_ids": value},
            {"prompt": "x", "cache_salt": value},
        ):
            try:
                many = as_prompts(prompts)
                for prompt in many:
                    process(prompt)
            except InvalidRequest as error:
                str(error).encode()
        for messages in (
            value,
            [value],
            [{"role": "user", "content": value}],
            [{"content": [value]}],
            [{"content": [{"type": value}]}],
        ):
            try:
                for conversation in as_conversations(messages):
                    process.chat(conversation, None, True)
            except InvalidRequest as error:
                str(error).encode()
        for default in (SamplingParams(), PoolingParams(), 0):
            try:
                pair_with_params(1, value, default)
            except (InvalidRequest, ConfigError) as error:
                str(error).encode()


def test_every_name() -> None:
    for kind, error in ERRORS.items():
        for name in ("", "x", "\ud800", "Model", "__class__", "_error", "self_"):
            with pytest.raises(error):
                kind(**{**REQUIRED.get(kind, {}), name: 1})
