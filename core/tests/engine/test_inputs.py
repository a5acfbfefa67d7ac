"""What `LLM` takes as prompts, conversations and parameters, and what it refuses; no engine is needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from hardpoint.engine.inputs import (
    PromptProcessor,
    RequestArguments,
    as_conversations,
    as_prompts,
    check_params,
    pair_with_params,
    weight_pairs,
)
from hardpoint.interfaces.errors import (
    ConfigError,
    CorruptWeights,
    EmptyPrompt,
    InvalidRequest,
    PromptTooLong,
    TokenOutOfRange,
)
from hardpoint.models import LightTokenizer, load_tokenizer, open_model
from hardpoint.sampling import PoolingParams, SamplingParams

HELLO = {"role": "user", "content": "hello"}


class Letters:
    """A tokenizer with a token for each byte, and a template that writes role and content."""

    chat_template = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    special_tokens_map: Mapping[str, str] = {}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())


@pytest.fixture
def process() -> PromptProcessor:
    return PromptProcessor(Letters(), vocab_size=256, max_model_len=1000)  # type: ignore[arg-type]


def test_a_text_that_no_context_can_hold_is_refused_before_it_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(open_model("demo"))
    process = PromptProcessor(tokenizer, vocab_size=49152, max_model_len=100)
    long = "word " * 30_000
    assert len(process.text(long, truncate=-1).token_ids) == 99
    monkeypatch.setattr(LightTokenizer, "encode", lambda *given, **named: pytest.fail("it was tokenized"))
    for ask in (process, process.text):
        with pytest.raises(PromptTooLong, match="150000 characters"):
            ask(long)
    with pytest.raises(PromptTooLong, match="characters"):
        process.chat([{"role": "user", "content": long}], None, True)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("one", ["one"]),
        ([], []),
        (["one", "two"], ["one", "two"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ({"prompt": "one"}, [{"prompt": "one"}]),
        ([{"prompt": "one"}, "two"], [{"prompt": "one"}, "two"]),
        (np.array([1, 2]), [[1, 2]]),
        (torch.tensor([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        ([np.array([1, 2])], [np.array([1, 2])]),
    ],
)
def test_one_prompt_or_several(given: Any, expected: list[Any]) -> None:
    np.testing.assert_equal(as_prompts(given), expected)


@pytest.mark.parametrize(
    "prompts", [["one", "two", "three"], [[1], [2, 3]], [{"prompt": "one"}, {"prompt": "two"}], [5, 6]]
)
def test_a_generator_of_prompts_loses_none(prompts: list[Any]) -> None:
    def generator() -> Iterator[Any]:
        yield from prompts

    assert as_prompts(generator()) == as_prompts(prompts)


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ({"prompt": "x", "multi_modal_data": {"image": 1}}, "takes no pictures"),
        ({"promt": "x"}, "Did you mean 'prompt'"),
        ({1: "x"}, "1 is not a key of a prompt"),
        ({}, "either a text or token ids"),
        ({"prompt": "x", "prompt_token_ids": [1]}, "either a text or token ids"),
        ({"prompt": 5}, "prompt must be a text"),
        ({"prompt": "x", "cache_salt": 7}, "cache_salt must be a text"),
        ({"prompt": "x", "cache_salt": "\ud800"}, "cache_salt is not valid Unicode"),
        ({"prompt_token_ids": "abc"}, "prompt_token_ids must be a list"),
        ({"prompt_token_ids": [1, True]}, r"prompt_token_ids\[1\] must be an integer"),
        ({"prompt_token_ids": [1, 2.5]}, r"prompt_token_ids\[1\] must be an integer: .*2.5"),
        ({"prompt_token_ids": np.array([[1, 2]])}, r"prompt_token_ids\[0\] must be an integer"),
        (b"abc", "must be a list"),
        (5, "must be a list"),
        ("broken \ud83d text", "lone surrogate, '.ud83d', at position 7"),
        ({"prompt_token_ids": [1, 2**70]}, "token id 1180591620717411303424 at position 1"),
        ([1, 256], "token id 256 at position 1"),
        ([-1], "token id -1"),
        ("", "no tokens"),
    ],
)
def test_prompts_that_cannot_be_are_refused_with_what_is_wrong(
    process: PromptProcessor, prompt: Any, named: str
) -> None:
    with pytest.raises(InvalidRequest, match=named):
        process(prompt)


@pytest.mark.parametrize("ids", [[1, 2], (1, 2), np.array([1, 2]), torch.tensor([1, 2]), [np.int64(1), 2], range(1, 3)])
def test_token_ids_in_every_form(process: PromptProcessor, ids: Any) -> None:
    assert process({"prompt_token_ids": ids}).token_ids == process(ids).token_ids == [1, 2]


def test_tokens_outside_of_the_vocabulary_are_told_from_other_mistakes(process: PromptProcessor) -> None:
    with pytest.raises(TokenOutOfRange):
        process([300])


@pytest.mark.parametrize("given", [5, None, b"bytes", lambda: "x"])
def test_what_is_no_prompt_is_refused(process: PromptProcessor, given: Any) -> None:
    with pytest.raises(InvalidRequest):
        process(as_prompts(given)[0])


def test_one_conversation_or_several() -> None:
    assert as_conversations([HELLO]) == [[HELLO]]
    assert as_conversations([[HELLO], [HELLO, HELLO]]) == [[HELLO], [HELLO, HELLO]]
    assert as_conversations(iter([HELLO, HELLO])) == [[HELLO, HELLO]]
    assert as_conversations(iter([iter([HELLO])])) == [[HELLO]]


@pytest.mark.parametrize("given", ["hello", HELLO, 5, None, ["hello"], [[HELLO], "hello"], [HELLO, "hello"]])
def test_what_is_no_conversation_is_refused(given: Any) -> None:
    with pytest.raises(InvalidRequest):
        as_conversations(given)


def test_text_parts_of_a_message_are_joined_line_by_line(process: PromptProcessor) -> None:
    parts = [{"type": "text", "text": "first"}, {"type": "text", "text": "second"}]
    written = process.chat([{"role": "user", "content": parts}], None, True)
    assert written.text == "<user>first\nsecond"
    assert written.token_ids == list(b"<user>first\nsecond")


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ([{"type": "image_url", "image_url": {"url": "x"}}], "'image_url'"),
        ([{"type": "text", "text": "x"}, {"type": "input_audio"}], "'input_audio'"),
        ([{"type": "text"}], "text is missing"),
        ([{"type": "text", "text": 5}], "text must be a text"),
        ([{"type": "text", "text": "x", "colour": 1}], "'colour' is not a key of a text part"),
        ([5], "5"),
        (5, "a text or a list of parts"),
        ("\ud800", "lone surrogate"),
    ],
)
def test_content_that_is_not_text_is_refused_by_name(process: PromptProcessor, content: Any, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        process.chat([{"role": "user", "content": content}], None, True)


def test_an_empty_conversation_is_refused(process: PromptProcessor) -> None:
    with pytest.raises(EmptyPrompt):
        process.chat([], None, True)


def test_parameters_are_for_all_prompts_or_one_for_each() -> None:
    default, own = SamplingParams(), SamplingParams(n=2)
    assert pair_with_params(2, None, default) == [default, default]
    assert pair_with_params(2, own, default) == [own, own]
    assert pair_with_params(2, iter([own, default]), default) == [own, default]
    with pytest.raises(ConfigError, match="1 sampling parameters for 2 prompts"):
        pair_with_params(2, [own], default)


@pytest.mark.parametrize("given", [{"n": 2}, "greedy", 5, [None], [PoolingParams()], [{"n": 2}]])
def test_what_are_no_parameters_is_refused(given: Any) -> None:
    with pytest.raises(InvalidRequest, match="SamplingParams"):
        pair_with_params(1, given, SamplingParams())


@pytest.mark.parametrize(
    ("request_id", "priority"), [(5, 0), (None, 0), ([], 0), ("x", "high"), ("x", 2**40), ("x", True), ("x", None)]
)
def test_a_request_has_a_name_and_a_rank(request_id: Any, priority: Any) -> None:
    RequestArguments("x", -5)
    with pytest.raises(InvalidRequest, match=r"request_id must be a text|priority must be an integer"):
        RequestArguments(request_id, priority)


@pytest.mark.parametrize("params", [None, {"n": 1}, PoolingParams()])
def test_parameters_of_another_kind_are_refused(params: Any) -> None:
    check_params(SamplingParams(), SamplingParams)
    with pytest.raises(InvalidRequest, match="must be SamplingParams"):
        check_params(params, SamplingParams)


@pytest.mark.parametrize("weights", [5, None, "weights", [5], ["ab"], [("a",)], [(1, 2)], [("a", 2)], {"a": 1}])
def test_weights_that_are_no_pairs_are_refused(weights: object) -> None:
    with pytest.raises(CorruptWeights, match="pairs of a checkpoint name and a tensor"):
        list(weight_pairs(weights))


def test_what_the_source_of_weights_raises_is_raised() -> None:
    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.zeros(1)
        raise KeyError("b")

    pairs = weight_pairs(weights())
    assert next(pairs)[0] == "a"
    with pytest.raises(KeyError):
        next(pairs)
