"""Speculative decoding changes no token: greedy, drawn with a seed, whatever else a request asks, and however sequences are scheduled.

That drawn tokens are the same for each seed is more than an unchanged distribution: a guess is taken exactly where the draw at its place is
that token, which is the rule of rejection sampling for a guess that is certain.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

from hardpoint import LLM, SamplingParams
from hardpoint.interfaces.errors import ConfigError
from tests.e2e.conftest import engine
from tests.e2e.test_invariance import PROMPTS

Make = Callable[..., AbstractContextManager[LLM]]

NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 5,
    "prompt_lookup_max": 4,
    "prompt_lookup_min": 1,
    "adaptive": False,
}
FEW = list(range(300, 305))
"""With so few tokens to choose from, a text of random weights repeats itself, but never for long."""


def params(**more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 40, "ignore_eos": True, "allowed_token_ids": FEW} | more)


ASKED = [
    params(),
    params(logprobs=2),
    params(temperature=0.3, seed=7, n=2),
    params(temperature=0.8, top_k=40, top_p=0.9, seed=3, logprobs=1),
    params(allowed_token_ids=None),
    params(repetition_penalty=1.2),
    params(min_tokens=8, stop_token_ids=FEW[:2]),
]


def results(llm: LLM) -> list[Any]:
    """Return tokens, reasons and log probabilities of prompts that ask for various things at once."""
    outputs = llm.generate(PROMPTS[: len(ASKED)], ASKED)
    return [
        (
            list(one.token_ids),
            one.finish_reason,
            [[(token, entry.rank) for token, entry in place.items()] for place in one.logprobs or ()],
        )
        for output in outputs
        for one in output.outputs
    ]


@pytest.fixture(scope="module")
def expected(make_shallow: Make) -> list[Any]:
    with make_shallow() as llm:
        found = results(llm)
        assert llm.stats().draft_tokens == 0
    return found


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="fused"),
        pytest.param({"use_fused_decoder": False}, id="modules"),
        pytest.param({"block_size": 8, "num_device_blocks": 20, "max_model_len": 80}, id="preempted"),
        pytest.param({"max_num_seqs": 2}, id="two-sequences"),
        pytest.param({"tensor_parallel_size": 3, "dtype": "float32"}, id="ranks"),
        pytest.param({"engine_process": True}, id="engine-process"),
    ],
)
def test_tokens_are_those_without(settings: dict[str, Any], make_shallow: Make, expected: list[Any]) -> None:
    with make_shallow(**settings, speculative_config=NGRAM) as llm:
        assert results(llm) == expected
        stats = llm.stats()
        assert 0 < stats.accepted_tokens <= stats.draft_tokens
        assert stats.drafts <= stats.draft_tokens
        if "num_device_blocks" in settings:
            assert stats.preemptions > 0
        names = {one.name: getattr(one, "value", None) for one in llm.get_metrics()}
        assert names["hardpoint:spec_decode_num_accepted_tokens"] == stats.accepted_tokens


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="fused"),
        pytest.param({"use_fused_decoder": False}, id="modules"),
        pytest.param(
            {
                "block_size": 8,
                "num_device_blocks": 40,
                "max_model_len": 144,
                "preemption_mode": "swap",
                "enable_prefix_caching": False,
            },
            id="swapped",
        ),
    ],
)
def test_tokens_in_bfloat16_are_those_without(settings: dict[str, Any], make_shallow: Make) -> None:
    """Sums in another order would be rounded apart among so many tokens. A swap keeps the bits of keys.

    Neither a recompute nor a prefix that comes of the cache does, and which prompts find one is a matter of when they are admitted.
    """
    asked = [params(temperature=0.3 * (number % 2), seed=number, max_tokens=100) for number in range(len(PROMPTS))]
    found = []
    for speculation in (None, NGRAM):
        with make_shallow(dtype="bfloat16", speculative_config=speculation, **settings) as llm:
            found.append([list(one.outputs[0].token_ids) for one in llm.generate(PROMPTS, asked)])
            assert (llm.stats().accepted_tokens > 0) is (speculation is not None)
            assert (llm.stats().preemptions > 0) is ("num_device_blocks" in settings)
    assert found[0] == found[1]


def test_a_step_may_sample_more_rows_than_it_computes_tokens(make_shallow: Make) -> None:
    """Guesses and one token of a prompt that seven completions share."""
    repeating = {"prompt_token_ids": [1, 2, 3] * 8}
    asked = [params(max_tokens=40), params(max_tokens=2, n=7, temperature=0.5, seed=1)]
    found = []
    for speculation in (None, {"method": "ngram", "num_speculative_tokens": 5}):
        with make_shallow(max_num_batched_tokens=8, max_num_seqs=8, speculative_config=speculation) as llm:
            requests = [
                ("long", repeating, asked[0]),
                *((str(i), {"prompt_token_ids": [5 + i]}, asked[1]) for i in range(4)),
            ]
            outputs: dict[str, Any] = {}
            for name, prompt, given in requests:
                llm.engine.add_request(name, prompt, given)
                for _ in range(6):
                    outputs |= {one.request_id: one for one in llm.engine.step() if one.finished}
            while llm.engine.has_unfinished_requests():
                outputs |= {one.request_id: one for one in llm.engine.step() if one.finished}
            found.append([[list(one.token_ids) for one in outputs[name].outputs] for name, _, _ in requests])
    assert found[0] == found[1]


def test_steps_are_saved_and_a_sleep_between_changes_nothing(make_shallow: Make, expected: list[Any]) -> None:
    with make_shallow(speculative_config=NGRAM) as llm:
        before = llm.stats()
        first = llm.generate(PROMPTS[:1], params())[0].outputs[0]
        after = llm.stats()
        assert list(first.token_ids) == expected[0][0]
        assert after.steps - before.steps == 40 - (after.accepted_tokens - before.accepted_tokens)
        llm.sleep(level=1)
        llm.wake_up()
        assert list(llm.generate(PROMPTS[:1], params())[0].outputs[0].token_ids) == expected[0][0]


def test_each_seed_draws_the_same_tokens(make_shallow: Make) -> None:
    asked = [params(temperature=1.0, top_k=3, max_tokens=6, seed=seed) for seed in range(48)]
    prompts = [PROMPTS[seed % 3] for seed in range(48)]
    found = []
    for speculation in (None, NGRAM):
        with make_shallow(speculative_config=speculation) as llm:
            found.append([list(one.outputs[0].token_ids) for one in llm.generate(prompts, asked)])
    assert found[0] == found[1]
    assert len({tuple(tokens) for tokens in found[0]}) > 20, "not a distribution of few outcomes"


def test_text_stops_and_streams_within_a_step_of_several_tokens(shallow_demo: str) -> None:
    """A stop string may end a text before tokens that the same step has accepted; outputs of a stream join to the whole text."""
    prompt, unlimited = "red green blue yellow " * 12, params(max_tokens=30, allowed_token_ids=None)
    texts = []
    for speculation in (None, NGRAM):
        with engine(shallow_demo, speculative_config=speculation) as llm:
            whole = llm.generate(prompt, unlimited)[0].outputs[0].text
            stop = whole[len(whole) // 2 :][:3]
            stopped = llm.generate(prompt, params(max_tokens=30, allowed_token_ids=None, stop=[stop]))[0].outputs[0]
            streamed = "".join(output.outputs[0].text for output in llm.stream(prompt, unlimited))
            asked = params(
                max_tokens=12, allowed_token_ids=None, ignore_eos=False, structured_outputs={"regex": "(ab|cd)+"}
            )
            guided = llm.generate(prompt, asked)[0].outputs[0]
            assert streamed == whole
            texts.append((whole, stop, stopped.text, stopped.finish_reason, guided.text))
            if speculation is not None:
                assert llm.stats().accepted_tokens > 0
    assert texts[0] == texts[1]
    assert texts[0][3] == "stop"


WORDS = "(red |green |blue |yellow ){4,}"
OBJECTS = {
    "type": "array",
    "minItems": 3,
    "maxItems": 3,
    "items": {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "green", "blue"]}, "known": {"type": "boolean"}},
        "required": ["colour", "known"],
        "additionalProperties": False,
    },
}
GUIDED: list[tuple[str, dict[str, Any]]] = [
    ("red green blue yellow " * 12, {"structured_outputs": {"regex": WORDS}, "max_tokens": 30}),
    ("red green blue yellow " * 12, {"structured_outputs": {"regex": WORDS}, "temperature": 0.9, "seed": 5, "n": 2}),
    (
        '[{"colour": "red", "known": true}, {"colour": "red", "known": true}] ' * 3,
        {"structured_outputs": {"json": OBJECTS}, "max_tokens": 160},
    ),
    ("blue red " * 9, {"structured_outputs": {"choice": ["blue red " * 3, "blue red " * 5]}, "logprobs": 2}),
    (
        "blue red " * 9,
        {
            "structured_outputs": {"regex": "(blue |red )+"},
            "min_tokens": 9,
            "temperature": 1.0,
            "seed": 2,
            "logprobs": 1,
        },
    ),
    # Beside them, one whose text is free.
    ("red green blue yellow " * 12, {"max_tokens": 30}),
]


def guided_results(llm: LLM, requests: list[tuple[str, dict[str, Any]]] = GUIDED) -> list[Any]:
    """Return tokens, texts, reasons and log probabilities of requests with grammars, and of one without."""
    asked = [params(**{"allowed_token_ids": None, "ignore_eos": False} | more) for _, more in requests]
    return [
        (
            list(one.token_ids),
            one.text,
            one.finish_reason,
            [
                {token: (entry.rank, pytest.approx(entry.logprob, abs=1e-4)) for token, entry in place.items()}
                for place in one.logprobs or ()
            ],
        )
        for output in llm.generate([prompt for prompt, _ in requests], asked)
        for one in output.outputs
    ]


@pytest.fixture(scope="module")
def guided_expected(shallow_demo: str) -> dict[str, list[Any]]:
    found = {}
    for mode in ("raw_logprobs", "processed_logprobs"):
        with engine(shallow_demo, dtype="float32", logprobs_mode=mode) as llm:
            found[mode] = guided_results(llm)
    assert found["raw_logprobs"] != found["processed_logprobs"]
    texts = [one[1] for one in found["raw_logprobs"]]
    for text in texts[:3]:
        assert re.fullmatch(
            "(red |green |blue |yellow )*(r|re|red|g|gr|gre|gree|green|b|bl|blu|blue|y|ye|yel|yell|yello|yellow)?", text
        )
    assert re.fullmatch("(blue red ){3}|(blue red ){5}", texts[4])
    assert all(set(one) == {"colour", "known"} for one in json.loads(texts[3]))
    return found


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="fused"),
        pytest.param({"use_fused_decoder": False, "logprobs_mode": "processed_logprobs"}, id="modules"),
        pytest.param({"max_num_seqs": 2, "engine_process": True}, id="two-sequences"),
        pytest.param({"tensor_parallel_size": 3, "logprobs_mode": "processed_logprobs"}, id="ranks"),
    ],
)
def test_texts_that_follow_a_grammar_are_those_without(
    settings: dict[str, Any], method: str, shallow_demo: str, guided_expected: dict[str, list[Any]]
) -> None:
    itself = {"method": "draft_model", "model": shallow_demo, "num_speculative_tokens": 3, "adaptive": False}
    speculation = NGRAM if method == "ngram" else itself
    with engine(shallow_demo, dtype="float32", speculative_config=speculation, **settings) as llm:
        found = guided_results(llm)
        stats = llm.stats()
        free = GUIDED[-1][1]["max_tokens"]
        assert stats.accepted_tokens > 20 + free, "many of texts with grammars"
        if method == "draft_model":
            # What a model guesses for itself by the same masks is right, but for two guesses at most behind the end of a text.
            ended = sum(reason == "stop" for _, _, reason, _ in found)
            assert 0 <= stats.draft_tokens - stats.accepted_tokens <= 2 * ended
        assert found == guided_expected[settings.get("logprobs_mode", "raw_logprobs")]
        if settings.get("max_num_seqs"):
            assert stats.prefix_hits > 0, "of those that begin later"


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"method": "medusa"}, "method"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"method": "ngram", "num_speculative_tokens": True}, "num_speculative_tokens"),
        ({"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 2}, "prompt_lookup_min"),
        ({"method": "ngram", "lookup": 4}, "lookup"),
        ("ngram", "speculative_config"),
    ],
)
def test_impossible_settings_are_refused(given: Any, found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        LLM("demo", speculative_config=given)
