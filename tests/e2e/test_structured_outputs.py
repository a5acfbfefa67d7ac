"""Texts that must match: what ends of itself fits what was asked; nobody else's tokens change; what cannot be is refused at once."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import regex
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from hardpoint import LLM, AsyncLLM, SamplingParams
from hardpoint.interfaces.errors import InvalidSamplingParams
from hardpoint.sampling import StructuredOutputsParams
from hardpoint_conformance.tiny_model import Model, Shape, tiny_model
from tests.e2e.conftest import PROMPTS, engine
from tests.leaks import Belongings

Make = Callable[..., AbstractContextManager[LLM]]

PROMPT = {"prompt_token_ids": [5, 9, 22, 7, 301]}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
MIXED: list[dict[str, Any]] = [
    {"structured_outputs": {"regex": "([a-y]{2} )*z"}},
    {"structured_outputs": {"json": PERSON}, "n": 2},
    {"structured_outputs": {"choice": ["red", "green", "blue"]}, "logprobs": 2},
    {"structured_outputs": {"grammar": 'start: "(" start ")" | /[0-9]/'}, "repetition_penalty": 1.2},
    {},
]
ALL = list(range(len(MIXED)))
DEAD_END = SamplingParams(
    max_tokens=9, structured_outputs=StructuredOutputsParams(grammar='start: "a" X\nX: /[b-c]+/ & /[d-e]+/')
)
"""A grammar that nothing shows to be hopeless before its first token."""


@pytest.fixture(scope="module")
def model() -> Model:
    """A seeded model of the vocabulary of the demo's first layers."""
    return tiny_model(Shape(vocab=8192, max_len=1024))


@pytest.fixture(scope="module")
def make_random(model: Model, shallow_demo: str) -> Make:
    return lambda **settings: engine(model.path, tokenizer=shallow_demo, **settings)


@pytest.fixture(scope="module")
def random(make_random: Make) -> Iterator[LLM]:
    with make_random() as llm:
        yield llm


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": 3, "max_tokens": 200} | values)


def served(llm: LLM, numbers: list[int], max_tokens: int = 40) -> list[Any]:
    """Return tokens, text and reason of every completion of requests that run side by side, by their numbers in `MIXED`."""
    asked = [params(max_tokens=max_tokens, **MIXED[number]) for number in numbers]
    prompts = [{"prompt_token_ids": [17 + number, *range(40, 50 + 3 * number)]} for number in numbers]
    return [
        [(tuple(one.token_ids), one.text, one.finish_reason) for one in output.outputs]
        for output in llm.generate(prompts, asked, use_tqdm=False)
    ]


@pytest.fixture(scope="module")
def expected(random: LLM) -> list[Any]:
    return [served(random, [number])[0] for number in ALL]


# Expressions whose texts are short, as Python has them, too.
atoms = st.sampled_from([r"[a-f]", r"[^a-z\n]", r"\d", "x", "é", "/", r"\.", "[ \t]", '"', r"\\"])
expressions = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.builds("{}{}".format, inner, inner),
        st.builds("(?:{}|{})".format, inner, inner),
        st.builds("(?:{}){{{},{}}}".format, inner, st.integers(0, 1), st.integers(1, 3)),
        st.builds("(?:{})?".format, inner),
    ),
    max_leaves=6,
)
schemas = st.recursive(
    st.one_of(
        st.just({"type": "boolean"}),
        st.just({"type": "null"}),
        st.builds(
            lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more}, *[st.integers(0, 200)] * 2
        ),
        st.builds(lambda most: {"type": "string", "maxLength": most}, st.integers(0, 4)),
        st.builds(
            lambda values: {"enum": values},
            st.lists(st.sampled_from(["a", 'q"', 7, None, "ü"]), min_size=1, unique=True),
        ),
    ),
    lambda inner: st.one_of(
        st.builds(lambda items, most: {"type": "array", "items": items, "maxItems": most}, inner, st.integers(0, 2)),
        st.builds(
            lambda parts: {
                "type": "object",
                "properties": parts,
                "required": sorted(parts)[:1],
                "additionalProperties": False,
            },
            st.dictionaries(st.sampled_from(["a", "b b", "c"]), inner, min_size=1, max_size=3),
        ),
        st.builds(lambda one, other: {"anyOf": [one, other]}, inner, inner),
    ),
    max_leaves=4,
)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(expressions, min_size=6, max_size=6), st.integers(0, 1000))
def test_texts_match_any_expression(random: LLM, asked: list[str], seed: int) -> None:
    many = [params(seed=seed, n=2, structured_outputs={"regex": one}) for one in asked]
    for one, output in zip(asked, random.generate([PROMPT] * len(asked), many, use_tqdm=False), strict=True):
        for made in output.outputs:
            assert made.finish_reason == "stop"
            # Not `re`, whose Unicode is the interpreter's, with fewer digits than the engine's.
            assert regex.fullmatch(one, made.text), (one, made.text)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(schemas, min_size=6, max_size=6), st.integers(0, 1000))
def test_texts_fit_any_schema(random: LLM, asked: list[dict[str, Any]], seed: int) -> None:
    many = [params(seed=seed, n=2, max_tokens=1000, structured_outputs={"json": one}) for one in asked]
    for one, output in zip(asked, random.generate([PROMPT] * len(asked), many, use_tqdm=False), strict=True):
        for made in output.outputs:
            assert made.finish_reason == "stop", made
            jsonschema.validate(json.loads(made.text), one)


def test_the_demo_model_keeps_to_what_is_asked(llm: LLM) -> None:
    words = params(temperature=0, structured_outputs={"choice": ["Paris", "London"]})
    person = params(n=3, structured_outputs={"json": json.dumps(PERSON)}, min_tokens=2)
    thought = params(temperature=0.8, structured_outputs={"regex": "[0-9]{3}", "after": "\n"})
    about = "Alice is 31. As JSON: "
    city, people, after = llm.generate(
        ["The capital of France is ", about, about], [words, person, thought], use_tqdm=False
    )
    assert city.outputs[0].text == "Paris"
    for one in people.outputs:
        jsonschema.validate(json.loads(one.text), PERSON)
    assert re.fullmatch(r"[^\n]*\n[0-9]{3}", after.outputs[0].text)


def test_a_grammar_of_all_texts_changes_nothing(llm: LLM) -> None:
    asked: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.9, "seed": 5, "logprobs": 2, "presence_penalty": 0.5, "top_k": 20},
    ]
    free = [params(max_tokens=24, **one) for one in asked for _ in range(6)]
    bound = [one.clone(structured_outputs={"regex": "(?s:.*)"}) for one in free]
    prompts = PROMPTS[:6] * len(asked)
    before, after = (llm.generate(prompts, some, use_tqdm=False) for some in (free, bound))
    assert [one.outputs for one in after] == [one.outputs for one in before]


def test_neither_side_notices_the_other_in_a_batch(random: LLM, expected: list[Any]) -> None:
    assert served(random, ALL) == expected
    assert served(random, 3 * ALL[::-1]) == 3 * expected[::-1]


@pytest.mark.parametrize(
    "how",
    [
        {"preemption_mode": "swap", "block_size": 8, "num_device_blocks": 12, "max_model_len": 90},
        {"preemption_mode": "recompute", "block_size": 8, "num_device_blocks": 12, "max_model_len": 90},
        {"max_num_batched_tokens": 7, "max_num_seqs": 7, "use_fused_decoder": False},
    ],
    ids=["swapped", "computed again", "in chunks, by modules"],
)
def test_a_place_in_the_grammar_survives(how: dict[str, Any], make_random: Make, expected: list[Any]) -> None:
    with make_random(**how) as llm:
        assert served(llm, ALL) == expected
        assert (llm.stats().preemptions > 0) == ("preemption_mode" in how)


def test_in_a_process_of_its_own_with_two_ranks(make_random: Make, expected: list[Any]) -> None:
    before = Belongings.now()
    with make_random(engine_process=True, pipeline_parallel_size=2) as llm:
        assert served(llm, ALL) == expected
        llm.sleep(mode="keep")
        llm.wake_up()
        assert served(llm, ALL) == expected
        (stuck,) = llm.generate([PROMPT], DEAD_END, use_tqdm=False)
        assert "no token goes on" in str(stuck.outputs[0].stop_reason)
    assert Belongings.now().new_since(before) == []


def test_asynchronously_and_through_a_sleep(model: Model, shallow_demo: str, expected: list[Any]) -> None:
    async def whole() -> list[Any]:
        async with await AsyncLLM.create(
            model.path,
            tokenizer=shallow_demo,
            backend="cpu",
            dtype="float32",
            max_model_len=1024,
            num_device_blocks=256,
        ) as llm:
            prompt = {"prompt_token_ids": [17, *range(40, 50)]}
            found = []
            async for output in llm.generate(prompt, params(max_tokens=40, **MIXED[0])):
                found.append(output)
                if len(found) == 2:
                    await llm.sleep(mode="keep")
                    await llm.wake_up()
            with pytest.raises(InvalidSamplingParams):
                async for _ in llm.generate(prompt, params(structured_outputs={"regex": "("})):
                    pass
            assert len(found) > 2
            return [(tuple(one.token_ids), one.text, one.finish_reason) for one in found[-1].outputs]

    assert asyncio.run(whole()) == expected[0]


def test_the_end_of_the_grammar_is_the_end(random: LLM) -> None:
    eos = 2
    asked = [
        {"regex": "abc"},
        {"choice": ["a", "a"]},
        {"grammar": 'root ::= "x" [0-9] "y"'},
        {"json": {"const": 1}},
    ]
    many = [params(structured_outputs=one, min_tokens=8) for one in asked]
    for output, wanted in zip(
        random.generate([PROMPT] * 4, many, use_tqdm=False), ["abc", "a", "x.y", "1"], strict=True
    ):
        (made,) = output.outputs
        assert re.fullmatch(wanted, made.text)
        assert made.finish_reason == "stop"
        assert len(made.token_ids) == 8, "min_tokens are made of the end of text where there is nothing else"
        assert made.token_ids[-1] == eos
    longer = params(structured_outputs={"regex": "[a-z]+"}, min_tokens=12)
    (output,) = random.generate([PROMPT], longer, use_tqdm=False)
    assert eos not in output.outputs[0].token_ids[:11]
    stopped = params(structured_outputs={"regex": "[a-z]+"}, ignore_eos=True, stop_token_ids=[50], logit_bias={50: 30})
    (output,) = random.generate([PROMPT], stopped, use_tqdm=False)
    assert output.outputs[0].stop_reason == 50
    assert re.fullmatch("[a-z]+", output.outputs[0].text)


def test_what_no_token_can_go_on_ends_alone(random: LLM, expected: list[Any]) -> None:
    """The tokens that are allowed are not of the grammar's rest, or a step of it takes more than it may."""
    letters = [token for token in range(60, 110) if random.get_tokenizer().decode([token]).islower()]
    hopeless = params(structured_outputs={"regex": "[a-z][0-9]"}, allowed_token_ids=letters)
    endless = params(
        structured_outputs={"regex": "(.*[ab].{400})*"}, allowed_token_ids=list(range(60, 110)), max_tokens=900
    )
    with ThreadPoolExecutor(1) as other:
        beside = other.submit(random.generate, [PROMPT] * 3, [hopeless, endless, DEAD_END], use_tqdm=False)
        assert served(random, ALL) == expected
        ended = [output.outputs[0] for output in beside.result()]
    assert [one.finish_reason for one in ended] == ["error"] * 3
    told = ["masks leave no token .*structured_outputs, allowed_token_ids", "too many states", "no token goes on"]
    for one, words in zip(ended, told, strict=True):
        assert isinstance(one.stop_reason, str)
        assert re.search(words, one.stop_reason), one.stop_reason
    with pytest.raises(InvalidSamplingParams, match="may begin the text"):
        random.generate([PROMPT], hopeless.clone(allowed_token_ids=[23]), use_tqdm=False)


REFERENCES = {f"a{i}": {"type": "array", "items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(3_900)}
CHAIN = {"$ref": "#/$defs/a0", "$defs": {**REFERENCES, "a3900": {"type": "null"}}}
"""llguidance recurses once for each reference, and would overflow a usual stack."""
RULES = "start: a0\n" + "\n".join(f'a{i}: "s" a{i + 1}' for i in range(240))
SELF = {"$defs": {"t": {"type": "object", "properties": {"t": {"$ref": "#/$defs/t"}}}}, "$ref": "#/$defs/t"}
DEEP: Any = json.loads('{"items":' * 90 + "{}" + "}" * 90)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"regex": "(", "after": None}, "unclosed group"),
        ({"regex": r"(a)\1"}, "backreferences are not supported"),
        ({"grammar": 'start: A b\nA: "x"'}, 'unknown name: "b"'),
        ({"grammar": "root ::= ("}, "GBNF"),
        ({"json": {"type": "objct"}}, "objct"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"$ref": "http://example.com/x"}}, "example.com"),
        ({"json": '{"type": '}, "column 10"),
        ({"json": "3"}, "not 3"),
        ({"json": {"type": "string", "minLength": 5, "maxLength": 2}}, "minLength"),
        ({"choice": ["\ud800"]}, "surrogates"),
        ({"json": {"enum": [float("nan")]}}, "JSON"),
        ({"regex": "a" * (1 << 21)}, "at most 262144"),
        ({"regex": "(" * 50_000 + ")" * 50_000}, "invalid regex"),
        (
            {"json": {"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {}}} for j in range(9)]} for i in range(9)]}},
            "too large",
        ),
        ({"grammar": RULES}, "a240"),
        ({"grammar": RULES + "\n" * 10}, "250 lines"),
        ({"json": {"$ref": "#/$defs/a0", "$defs": REFERENCES}}, "a3900"),
        ({"json": {"$ref": "#"}}, "allow no text"),
        ({"regex": r"[^\s\S]"}, "allow no text"),
    ],
    ids=range(20),
)
def test_what_cannot_be_is_refused_soon(random: LLM, asked: dict[str, Any], told: str) -> None:
    start = time.process_time()
    with pytest.raises(InvalidSamplingParams, match=f"(?s)structured_outputs.*(?:{told})") as refused:
        random.generate([PROMPT], params(structured_outputs=asked), use_tqdm=False)
    assert time.process_time() - start < 5
    assert len(str(refused.value)) < 3000


@pytest.mark.parametrize(
    "asked",
    [{"json": SELF}, {"json": DEEP}, {"regex": "(a|aa)*b"}, {"regex": "(?:x{0,99999}y){0,9999}"}, {"json": CHAIN}],
    ids=["recursive", "nested", "ambiguous", "counted", "chained"],
)
def test_what_only_looks_endless_is_served(random: LLM, asked: dict[str, Any]) -> None:
    (output,) = random.generate([PROMPT], params(structured_outputs=asked, max_tokens=12), use_tqdm=False)
    assert output.outputs[0].finish_reason in ("stop", "length")


def test_an_engine_without_tokenizer_says_so(make_shallow: Make) -> None:
    with make_shallow() as llm, pytest.raises(InvalidSamplingParams, match="need the model's tokenizer"):
        llm.generate([PROMPT], params(structured_outputs={"regex": "a"}), use_tqdm=False)


def test_a_tokenizer_of_whole_words_says_so(make_engine: Any, shallow: Model, tmp_path: Path) -> None:
    """It has no decoder, which would tell the bytes of a token."""
    words = Tokenizer(WordLevel({"<unk>": 0, "moon": 1}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    shutil.copy(Path(shallow.path) / "config.json", tmp_path)
    with make_engine(shallow.path, tokenizer=str(tmp_path)) as llm:
        with pytest.raises(InvalidSamplingParams, match="the bytes of each token"):
            llm.generate(["moon"], params(structured_outputs={"regex": "a"}), use_tqdm=False)
        assert llm.generate(["moon"], params(max_tokens=1), use_tqdm=False)
