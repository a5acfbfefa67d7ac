"""One request never ends others: extreme parameters, and whatever is given at any door, beside requests that must not notice."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from hardpoint import LLM, AsyncLLM, PoolingParams, SamplingParams
from hardpoint.engine.inputs import TokenizedPrompt
from hardpoint.engine.outputs import RequestOutput
from hardpoint.interfaces.batch import FloatArray
from hardpoint.interfaces.errors import ConfigError, InvalidRequest
from hardpoint_conformance.tiny_model import Shape, tiny_model, write_checkpoint
from hardpoint_cpu.kernels import CpuKernels
from tests.e2e.extremes import (
    NEIGHBOURS,
    PROMPT,
    WRONG,
    Beside,
    batches,
    check_that_a_request_of_nan_ends_alone,
    combined,
    end_of,
    short,
    single,
    together,
    values_of,
)

SPECIAL = ["<s>", "</s>", "<end>", "<pad>"]
VOCABULARY = len(SPECIAL) + 256 + 4
"""Tokens of the model, of which the tokenizer does not know the last four, as in models with padded heads."""
SHAPE = Shape(vocab=VOCABULARY, hidden=32, intermediate=32, layers=1, heads=2, kv_heads=1)
SETTINGS: dict[str, Any] = {
    "backend": "cpu",
    "dtype": "float32",
    "max_model_len": 20,
    "num_device_blocks": 256,
    "max_num_seqs": 128,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model whose tokens are bytes."""
    folder = tmp_path_factory.mktemp("model") / "bytes"
    write_checkpoint(folder, SHAPE, tiny_model(SHAPE).weights)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(SPECIAL + letters)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template})
    )
    return str(folder)


@pytest.fixture(scope="module")
def llm(model: str) -> Iterator[LLM]:
    with LLM(model, **SETTINGS) as made:
        yield made


@pytest.fixture(scope="module")
def apart(model: str) -> Iterator[LLM]:
    with LLM(model, engine_process=True, **SETTINGS) as made:
        yield made


@pytest.fixture(scope="module")
def logits(llm: LLM) -> FloatArray:
    """What the model says after the prompt of the trials."""
    seen: list[FloatArray] = []

    def note(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append(logits.numpy().copy())
        return logits

    llm.generate([PROMPT], SamplingParams(max_tokens=1, logits_processors=[note]), use_tqdm=False)
    return seen[0]


@pytest.mark.parametrize("sampler", ["native", "torch"])
def test_extreme_parameters_are_refused_or_a_matter_of_their_request(
    sampler: str, llm: LLM, logits: FloatArray, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sampler == "torch":
        monkeypatch.setattr(CpuKernels, "sample", lambda *arguments: None)
    beside = Beside(llm.engine, logits)
    for trials in batches([*together(VOCABULARY), *single(VOCABULARY), *combined(VOCABULARY, 400)]):
        beside.try_params(trials)
    assert not beside.wrong, "\n".join(beside.wrong)
    assert min(beside.counts.values()) > 0, "something of each kind happened"


def test_in_a_process_of_its_own_too(apart: LLM, logits: FloatArray) -> None:
    beside = Beside(apart.engine, logits)
    for trials in batches([*together(VOCABULARY), *single(VOCABULARY)]):
        beside.try_params(trials)
    assert not beside.wrong, "\n".join(beside.wrong)
    assert min(beside.counts.values()) > 0


Door = Callable[[Any], object]
ONE = SamplingParams(max_tokens=1)


def doors(llm: LLM) -> Mapping[str, Door]:
    """Return each way to a request, for what is given in one place of it."""
    user, engine, ids = {"role": "user", "content": "a"}, llm.engine, itertools.count()

    def new() -> str:
        return f"request {next(ids)}"

    return {
        "prompts": lambda given: llm.generate(given, ONE),
        "one of the prompts": lambda given: llm.generate(["a", given], ONE),
        "text": lambda given: llm.generate({"prompt": given}, ONE),
        "token ids": lambda given: llm.generate({"prompt_token_ids": given}, ONE),
        "salt": lambda given: llm.generate({"prompt": "a", "cache_salt": given}, ONE),
        "parameters": lambda given: llm.generate("a", given),
        "one of the parameters": lambda given: llm.generate(["a", "b"], [ONE, given]),
        "priorities": lambda given: llm.generate("a", ONE, priority=given),
        "one of the priorities": lambda given: llm.generate("a", ONE, priority=[given]),
        "messages": lambda given: llm.chat(given, ONE),
        "a message": lambda given: llm.chat([user, given], ONE),
        "role": lambda given: llm.chat([{"role": given, "content": "a"}], ONE),
        "content": lambda given: llm.chat([{"role": "user", "content": given}], ONE),
        "a part": lambda given: llm.chat([{"role": "user", "content": [{"type": "text", "text": given}]}], ONE),
        "chat's parameters": lambda given: llm.chat([user], given),
        "template": lambda given: llm.chat([user], ONE, chat_template=given),
        "prompts to embed": lambda given: llm.embed(given),
        "pooling": lambda given: llm.embed("a", given),
        "pooling task": lambda given: llm.encode("a", pooling_task=given),
        "text to score": lambda given: llm.score(given, "a"),
        "texts to score with": lambda given: llm.score("a", given),
        "added id": lambda given: engine.add_request(given, "a", ONE),
        "added prompt": lambda given: engine.add_request(new(), given, ONE),
        "added tokens": lambda given: engine.add_request(new(), TokenizedPrompt(None, given), ONE),
        "added salt": lambda given: engine.add_request(new(), TokenizedPrompt(None, [1], given), ONE),
        "added parameters": lambda given: engine.add_request(new(), "a", given),
        "added priority": lambda given: engine.add_request(new(), "a", ONE, priority=given),
        "added id to embed": lambda given: engine.add_pooling_request(given, "a"),
        "added prompt to embed": lambda given: engine.add_pooling_request(new(), given),
        "added tokens to embed": lambda given: engine.add_pooling_request(new(), TokenizedPrompt(None, given)),
        "added pooling": lambda given: engine.add_pooling_request(new(), "a", given),
    }


def arguments() -> list[Any]:
    """Return what may be given at a door, of every kind."""
    tokens = values_of(Sequence[int], VOCABULARY)
    made = [ONE, PoolingParams(), TokenizedPrompt("a", [1]), np.arange(3), torch.arange(3), iter([1])]
    return [
        *values_of(int, VOCABULARY),
        *values_of(float, VOCABULARY),
        *values_of(str, VOCABULARY),
        *tokens,
        *WRONG,
        *made,
    ]


@pytest.mark.parametrize("engine", ["llm", "apart"])
def test_whatever_is_given_at_a_door_is_refused_or_a_matter_of_its_request(
    engine: str, request: pytest.FixtureRequest, logits: FloatArray
) -> None:
    llm = request.getfixturevalue(engine)
    beside = Beside(llm.engine, logits)
    for name, door in doors(llm).items():
        for some in batches(arguments()):
            with beside.neighbours((name, some)):
                for given in some:
                    with beside.trial((name, given)):
                        door(given)
    assert not beside.wrong, "\n".join(beside.wrong)
    assert min(beside.counts.values()) > 0


def test_whatever_is_given_to_an_asynchronous_client(model: str) -> None:
    async def end(outputs: AsyncIterator[RequestOutput]) -> Any:
        async for output in outputs:
            last = output
        return end_of([last])

    async def run() -> list[str]:
        wrong: list[str] = []
        user = {"role": "user", "content": "a"}
        async with AsyncLLM(model, **SETTINGS) as llm:
            ways: dict[str, Callable[[Any], Awaitable[object]]] = {
                "prompt": lambda given: end(llm.generate(given, ONE)),
                "salt": lambda given: end(llm.generate({"prompt": "a", "cache_salt": given}, ONE)),
                "parameters": lambda given: end(llm.generate("a", given)),
                "id": lambda given: end(llm.generate("a", ONE, given)),
                "priority": lambda given: end(llm.generate("a", ONE, priority=given)),
                "messages": lambda given: end(llm.chat(given, ONE)),
                "content": lambda given: end(llm.chat([user | {"content": given}], ONE)),
                "chat's parameters": lambda given: end(llm.chat([user], given)),
                "prompt to embed": lambda given: llm.embed(given),
                "pooling": lambda given: llm.embed("a", given),
            }

            async def neighbours() -> list[Any]:
                return list(await asyncio.gather(*(end(llm.generate(*given)) for given in NEIGHBOURS.values())))

            async def attempt(name: str, given: Any) -> None:
                try:
                    await ways[name](given)
                except (InvalidRequest, ConfigError):
                    pass
                except Exception as error:
                    wrong.append(f"{name}={short(given)} raised {type(error).__name__}: {error}")

            expected = await neighbours()
            for name in ways:
                for some in batches(arguments()):
                    found, *_ = await asyncio.gather(neighbours(), *(attempt(name, given) for given in some))
                    if found != expected:
                        wrong.append(f"beside {name}={short(some)}: {found}")
        return wrong

    wrong = asyncio.run(run())
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("is_fused", [True, False], ids=["fused", "modules"])
def test_logits_that_are_no_numbers_end_their_request_alone(model: str, logits: FloatArray, *, is_fused: bool) -> None:
    with LLM(model, **SETTINGS | {"num_device_blocks": 8, "use_fused_decoder": is_fused}) as llm:
        assert llm.info.path == ("fused" if is_fused else "modules")
        embeddings = tiny_model(SHAPE).weights["model.embed_tokens.weight"]
        check_that_a_request_of_nan_ends_alone(llm, logits, embeddings)
