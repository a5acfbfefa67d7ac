"""Requests, prompts and arguments of an engine that no caller should give; one who asks beside them must not notice."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from random import Random
from typing import Any

from hardpoint import LLM, EngineConfig, PoolingParams, SamplingParams
from hardpoint.engine.inputs import TokenizedPrompt
from hardpoint.interfaces.errors import HardpointError
from tests.e2e.extremes import WRONG, extremes, values_of

from .configurations import _TEMPLATES, SETTINGS_OF_TOKENIZERS, tokenizer_json
from .models import GREEDY, SETTINGS, SHAPE, config
from .values import TEXTS, hostile

_VOCABULARY = SHAPE["vocab_size"]
_PROBE = {"prompt_token_ids": [5, 6, 7]}
_ARGUMENTS = [
    "model",
    *(item.name for item in fields(EngineConfig)),
    "gpu_memory_utilization",
    "distributed_executor_backend",
]


def prepare(own: Path) -> Any:
    """Return the case of a seed: of four, three ask one engine, and one makes an engine of its own."""
    (own / "config.json").write_text(json.dumps(config("llama")))
    (own / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    (own / "tokenizer_config.json").write_text(json.dumps(SETTINGS_OF_TOKENIZERS))
    llm = LLM(str(own), load_format="dummy", **SETTINGS)
    values = extremes(SamplingParams, _VOCABULARY)
    accepted = {name: [value for value in some if _fits(SamplingParams, name, value)] for name, some in values.items()}
    pooling = extremes(PoolingParams, _VOCABULARY)
    arguments = extremes(EngineConfig, _VOCABULARY)
    sound = {
        name: [value for value in some if _fits(EngineConfig, name, value, model="x")]
        for name, some in arguments.items()
    }
    prompts = [*values_of(str, _VOCABULARY), *values_of(Sequence[int], _VOCABULARY), *WRONG]
    expected = _answer(llm)

    def params(rng: Random) -> SamplingParams:
        names = rng.sample(sorted(values), rng.randint(0, 4))
        chosen = {name: rng.choice((accepted if rng.random() < 0.9 else values)[name]) for name in names}
        return SamplingParams(**{"max_tokens": 3, "seed": 1} | chosen)

    def prompt(rng: Random) -> Any:
        kind = rng.random()
        if kind < 0.4:
            return rng.choice(["the", {"prompt_token_ids": [5, 6]}, [5, 6], ["the", "he"]])
        one = rng.choice(prompts) if kind < 0.9 else hostile(rng)
        wrapped = [one, [one], {"prompt": one}, {"prompt_token_ids": one}, {"prompt": "the", "cache_salt": one}]
        if type(one) is list:
            wrapped.append(TokenizedPrompt(None, one))
        return rng.choice(wrapped)

    def messages(rng: Random) -> Any:
        made: Any = [{"role": "user", "content": "the"}]
        for _ in range(rng.randint(0, 2)):
            one = rng.choice([*prompts, *TEXTS])
            made = rng.choice(
                [
                    one,
                    [one],
                    [{"role": one, "content": "the"}],
                    [{"role": "user", "content": one}],
                    [{"role": "user", "content": [{"type": "text", "text": one}]}],
                    [{"role": "user", "content": [one]}, {"role": "assistant", "content": None}],
                ]
            )
        return made

    def ask(rng: Random) -> None:
        kind = rng.random()
        if kind < 0.65:
            outputs = llm.generate(prompt(rng), params(rng), use_tqdm=False)
            assert all(one.finish_reason is not None for output in outputs for one in output.outputs)
        elif kind < 0.85:
            template = rng.choice([None, None, *_TEMPLATES, *WRONG])
            llm.chat(messages(rng), rng.choice([GREEDY, params(rng)]), use_tqdm=False, chat_template=template)
        else:
            given = {name: rng.choice(some) for name, some in pooling.items() if rng.random() < 0.5}
            llm.embed(prompt(rng), PoolingParams(**given), use_tqdm=False)

    def make(rng: Random, place: Path) -> None:
        given: dict[str, Any] = {"model": str(own), "load_format": "dummy", **SETTINGS}
        given["sleep_disk_directory"] = str(place)
        for name in rng.sample(_ARGUMENTS, rng.choice([1, 1, 2, 3])):
            known = sound.get(name) if rng.random() < 0.8 else arguments.get(name)
            given[name] = rng.choice(known) if known else hostile(rng)
        model = given.pop("model")
        made = EngineConfig.from_arguments(model, given)
        if made.other_processes:
            return
        with LLM(model, **given) as other:
            if not isinstance(given.get("skip_tokenizer_init"), bool):
                other.generate("the", GREEDY, use_tqdm=False)
            other.generate(_PROBE, GREEDY, use_tqdm=False)

    def case(seed: int, place: Path) -> None:
        rng = Random(seed)
        try:
            if seed % 4 == 0:
                make(rng, place)
            else:
                ask(rng)
        finally:
            try:
                found = _answer(llm)
            except HardpointError as error:  # which would count as an answer to the case
                raise AssertionError("the engine does not answer any more") from error
            assert found == expected, "the engine answers otherwise than before"

    return case


def _fits(kind: type, name: str, value: Any, **more: Any) -> bool:
    try:
        kind(**more | {name: value})
    except HardpointError:
        return False
    return True


def _answer(llm: LLM) -> list[int]:
    (output,) = llm.generate(_PROBE, GREEDY, use_tqdm=False)
    return list(output.outputs[0].token_ids)
