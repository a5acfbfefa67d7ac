"""Tool calls and reasoning: a text reads the same in any pieces, and the official client calls functions of the demo model."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import jsonschema
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardpoint.interfaces.errors import InvalidRequest
from hardpoint.server.protocol import ChatMessage
from hardpoint.server.reasoning import ReasoningParser, begins_reasoning, parser_of
from hardpoint.server.tools import FORMATS, Hermes, Llama3Json, ToolParser, format_of, in_template
from tests.server.conftest import Running

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"$ref": "#/$defs/city"},
                "days": {"type": "integer", "minimum": 1, "maximum": 7},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
            "$defs": {"city": {"enum": ["Paris", "Rome"]}},
        },
    },
}
CLOCK: Any = {
    "type": "function",
    "function": {"name": 'the "clock"', "parameters": {"type": "object", "maxProperties": 0}},
}
MESSAGES: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
ASKED: Any = {"model": "demo", "messages": MESSAGES, "seed": 2, "max_tokens": 120}

Found = tuple[str, list[tuple[str, str]]]


def read(parser: ToolParser, pieces: list[str]) -> Found:
    """Return content and calls of a text in pieces; the first part of a call, and no other, has its name."""
    content, calls = "", list[tuple[str, str]]()
    for text, parts in [*map(parser.feed, pieces), parser.finish()]:
        content += text
        for part in parts:
            if part.name is not None:
                assert part.index == len(calls)
                calls.append((part.name, part.arguments))
            else:
                name, arguments = calls[part.index]
                calls[part.index] = name, arguments + part.arguments
    return content, calls


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:end] for start, end in pairwise(places)]


CALL = '{"name": "f", "arguments": {"a": "}\\"{", "b": [1, {"c": null}]}}'
ARGUMENTS = '{"a": "}\\"{", "b": [1, {"c": null}]}'
TEXTS: list[tuple[type[ToolParser], str, Found]] = [
    (Hermes, f"<tool_call>\n{CALL}\n</tool_call>", ("", [("f", ARGUMENTS)])),
    (
        Hermes,
        f'Well. \n<tool_call>{CALL}</tool_call>\n<tool_call>{{"arguments": {{}}, "name": "g"}}</tool_call> \n',
        ("Well.", [("f", ARGUMENTS), ("g", "{}")]),
    ),
    (Hermes, '<tool_call>\n{"name": "h"}\n</tool_call>', ("", [("h", "{}")])),
    (Hermes, '<tool_call>{"name": "f", "arguments": {"a', ("", [("f", '{"a')])),
    (Hermes, f"<tool_call>{CALL}\n</tool", ("", [("f", ARGUMENTS)])),
    (Hermes, f"<tool_call>{CALL} and then?", (" and then?", [("f", ARGUMENTS)])),
    (Hermes, "<<tool_call> none </tool_call>\n", ("<<tool_call> none </tool_call>\n", [])),
    (Hermes, '<tool_call>{"name": 3}</tool_call> <tool', ('<tool_call>{"name": 3}</tool_call> <tool', [])),
    (Hermes, " no <tool> at all ", (" no <tool> at all ", [])),
    (Llama3Json, '{"name": "f", "parameters": {"x": 2}}', ("", [("f", '{"x": 2}')])),
    (
        Llama3Json,
        '<|python_tag|>{"type": "function", "name": "f", "parameters": {"x": 2}}; {"name": "g", "parameters": {}}',
        ("", [("f", '{"x": 2}'), ("g", "{}")]),
    ),
    (Llama3Json, '{"nam": 2} is no call', ('{"nam": 2} is no call', [])),
    (Llama3Json, '  {"a', ('  {"a', [])),
    (Llama3Json, f"See: {CALL}", (f"See: {CALL}", [])),
]


@pytest.mark.parametrize(("parser", "text", "wanted"), TEXTS, ids=range(len(TEXTS)))
@given(cuts=st.lists(st.integers(0, 200), max_size=8))
def test_calls_are_read_alike_in_any_pieces(
    parser: type[ToolParser], text: str, wanted: Found, cuts: list[int]
) -> None:
    assert read(parser(), pieces_of(text, cuts)) == wanted


@pytest.mark.parametrize("parser", FORMATS.values())
@given(
    parts=st.lists(
        st.sampled_from([*'{}[]":, \\\n<a', "<tool_call>", "</tool_call>", CALL, '"name"', '"arguments"', ";"])
    ),
    cuts=st.lists(st.integers(0, 200), max_size=8),
)
def test_nothing_of_a_text_depends_on_its_pieces(parser: type[ToolParser], parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    whole = read(parser(), [text])
    assert read(parser(), pieces_of(text, cuts)) == whole
    if not whole[1]:
        assert whole[0] == text


CALLED: list[Any] = [
    {"role": "system", "content": [{"type": "text", "text": "Be kind."}]},
    {"role": "developer", "content": "Be brief."},
    {
        "role": "assistant",
        "content": [{"type": "text", "text": "Well."}],
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "sunny"}]},
]


@pytest.mark.parametrize("has_tools", [False, True])
def test_a_template_without_tools_gets_calls_and_results_as_texts(has_tools: bool) -> None:
    """Whether or not the model may call functions now, and whether contents are texts or parts."""
    messages = [ChatMessage.model_validate(message) for message in CALLED]
    written, tools = in_template(messages, "{{ messages }}", [WEATHER] if has_tools else None)
    assert tools is None
    system, developer, call, result = written
    if has_tools:
        assert system["content"].startswith("Be kind.\n\nYou may call functions.")
        assert "get_weather" in system["content"]
    else:
        assert system == CALLED[0]
    assert developer == {"role": "system", "content": "Be brief."}
    text = 'Well.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert call == {"role": "assistant", "content": text}
    assert result == {"role": "user", "content": "<tool_response>\nsunny\n</tool_response>"}


def test_a_template_with_tools_gets_messages_as_they_are() -> None:
    messages = [ChatMessage.model_validate(message) for message in CALLED]
    written, tools = in_template(messages, "{{ tools }} developer", [WEATHER])
    assert tools == [WEATHER]
    assert [message["role"] for message in written] == ["system", "developer", "assistant", "tool"]
    assert written[2]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert written[3] == CALLED[3]


@pytest.mark.parametrize("has_tools", [True, False])
@pytest.mark.parametrize("arguments", ["[" * 100_000, '{"a":' * 100_000, '{"a"', "5"], ids=range(4))
def test_arguments_that_cannot_be_read_stay_as_they_are(arguments: str, has_tools: bool) -> None:
    called = {"function": {"name": "f", "arguments": arguments}}
    message = ChatMessage.model_validate({"role": "assistant", "tool_calls": [called]})
    (found,), _ = in_template([message], "{{ tools }}" if has_tools else "")
    if has_tools:
        assert found["tool_calls"][0]["function"]["arguments"] == arguments
    else:
        assert json.dumps(arguments) in found["content"]


def test_a_call_whose_name_is_no_text_stays_content() -> None:
    text = '<tool_call>{"name": %s}</tool_call>' % ("[" * 100_000 + "]" * 100_000)
    assert read(Hermes(), [text]) == (text, [])


def test_a_result_with_a_picture_is_refused() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:,"}}
    message = ChatMessage(role="tool", content=[picture])
    with pytest.raises(InvalidRequest, match="no pictures"):
        in_template([message], None)


THOUGHTS = [
    (False, "<think>\nSo?\n</think>\n\nYes.", ("So?", "Yes.")),
    (False, "No thoughts. </think>", ("", "No thoughts. </think>")),
    (False, "\n<think> a <b </thin", ("a <b </thin", "")),
    (True, "a </th </think> b ", ("a </th", "b ")),
    (True, "<think>a</think>", ("a", "")),
    (True, "All of it", ("All of it", "")),
    (True, "</think>x", ("", "x")),
]


@pytest.mark.parametrize(("begins", "text", "wanted"), THOUGHTS, ids=range(len(THOUGHTS)))
@given(cuts=st.lists(st.integers(0, 40), max_size=8))
def test_reasoning_is_told_apart_in_any_pieces(
    begins: bool, text: str, wanted: tuple[str, str], cuts: list[int]
) -> None:
    parser = ReasoningParser(begins=begins)
    found = [*map(parser.feed, pieces_of(text, cuts)), parser.finish()]
    assert ("".join(one for one, _ in found), "".join(one for _, one in found)) == wanted


def test_formats_follow_the_template() -> None:
    assert format_of("... <tool_call> ...") is Hermes
    assert format_of('Respond as {"name": function name, "parameters": dictionary}, <|python_tag|>') is Llama3Json
    assert format_of(None) is Hermes
    assert parser_of("{{ '<think>\\n\\n</think>' }}") == "qwen3"
    assert parser_of("<｜Assistant｜> ... </think>") == "deepseek_r1"
    assert parser_of("no such thing") is None
    assert begins_reasoning("qwen3", "assistant\n<think>\n")
    assert not begins_reasoning("qwen3", "assistant\n")
    assert begins_reasoning("deepseek_r1", "assistant\n")
    assert not begins_reasoning("deepseek_r1", "<think>\n\n</think>\n\n")


def test_a_call_that_must_be_is_one_whole_and_streamed(client: openai.OpenAI) -> None:
    asked = {**ASKED, "tools": [WEATHER, CLOCK], "tool_choice": "required"}
    (choice,) = client.chat.completions.create(**asked, parallel_tool_calls=False).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name in ("get_weather", 'the "clock"')
    # Pieces that a busy machine holds up come together.
    for _ in range(10):
        parts = list(client.chat.completions.create(**asked, parallel_tool_calls=False, stream=True))
        found = [one for part in parts for one in part.choices[0].delta.tool_calls or ()]
        assert [one.id is not None for one in found] == [True] + [False] * (len(found) - 1)
        assert found[0].function is not None
        assert found[0].function.name == call.function.name
        assert "".join(one.function.arguments or "" for one in found if one.function) == call.function.arguments
        assert parts[-1].choices[0].finish_reason == "tool_calls"
        assert not any(part.choices[0].delta.content for part in parts)
        if len(found) > 2:
            break
    else:
        pytest.fail("arguments never come in pieces")


def test_a_named_function_is_called_and_its_result_understood(server: Running, client: openai.OpenAI) -> None:
    chosen: Any = {"type": "function", "function": {"name": "get_weather"}}
    (choice,) = client.chat.completions.create(**ASKED, tools=[CLOCK, WEATHER], tool_choice=chosen).choices
    (call,) = choice.message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name == "get_weather"
    jsonschema.validate(json.loads(call.function.arguments), WEATHER["function"]["parameters"])
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"sky": "clear"}'}
    conversation: Any = [*MESSAGES, choice.message.model_dump(exclude_none=True), result]
    asked: Any = {**ASKED, "max_tokens": 8}
    answer = client.chat.completions.create(**asked | {"messages": conversation}, tools=[WEATHER])
    without = client.chat.completions.create(**asked, tools=[WEATHER], tool_choice="none")
    plain = client.chat.completions.create(**asked)
    last = client.chat.completions.create(**asked | {"messages": conversation})
    tokens = server.users.post("/tokenize", json={"messages": conversation}).json()["count"]
    assert answer.choices[0].message.content
    assert last.usage is not None
    assert last.usage.prompt_tokens == tokens
    assert answer.usage is not None
    assert without.usage is not None
    assert answer.usage.prompt_tokens > without.usage.prompt_tokens, "the call and its result are in the prompt"
    assert without.choices[0].message == plain.choices[0].message, "tools that are not to be called are left out"


@pytest.mark.parametrize(
    "schema",
    [{}, {"maxProperties": 0}, {"type": ["null", "object"]}, {"anyOf": [{"type": "null"}, {"maxProperties": 0}]}],
    ids=range(4),
)
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "now"}}], ids=["any", "named"]
)
def test_a_schema_that_allows_more_than_objects_is_held_to_them(
    client: openai.OpenAI, schema: dict[str, Any], choice: Any
) -> None:
    tools: Any = [{"type": "function", "function": {"name": "now", "parameters": schema}}]
    asked: Any = {**ASKED, "max_tokens": 40, "tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
    (found,) = client.chat.completions.create(**asked).choices
    assert found.message.content is None
    (call,) = found.message.tool_calls or ()
    assert call.type == "function"
    assert call.function.arguments.startswith("{")


UNLIKE = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"not": {}}}}}}
"""A schema that no grammar is compiled of."""


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": [WEATHER], "guided_regex": "a"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "required", "guided_regex": "a"}, "tool_choice"),
        ({"tools": [{"type": "retrieval"}]}, "tools"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "messages"),
        ({"tools": [UNLIKE], "tool_choice": "required"}, "tools"),
    ],
    ids=range(8),
)
def test_tools_that_cannot_be_are_refused(server: Running, asked: dict[str, Any], param: str) -> None:
    answer = server.users.post("/v1/chat/completions", json={"messages": MESSAGES} | asked)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert param in error["message"]


def test_more_tools_than_a_grammar_has_are_refused_as_tools(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hardpoint.sampling.structured.MAX_RULES_LINES", 3)
    asked = {"messages": MESSAGES, "tools": [WEATHER, CLOCK], "tool_choice": "required"}
    error = server.users.post("/v1/chat/completions", json=asked).json()["error"]
    assert error["param"] == "tools"
    assert "tools" in error["message"]
    assert "4 lines" in error["message"]


def test_marks_that_are_special_tokens_are_seen(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: Any = {**ASKED, "max_tokens": 2, "tools": [CLOCK], "extra_body": {"allowed_token_ids": [1]}}
    assert client.chat.completions.create(**asked).choices[0].message.content == ""
    monkeypatch.setattr(Hermes, "marks", ("<tool_call>", "<|im_start|>"))
    assert client.chat.completions.create(**asked).choices[0].message.content == "<|im_start|>" * 2
    asked["extra_body"]["skip_special_tokens"] = True
    assert client.chat.completions.create(**asked).choices[0].message.content == ""


@pytest.fixture
def reasoning(server: Running, monkeypatch: pytest.MonkeyPatch) -> Running:
    """The server, as if it had been started with --reasoning-parser deepseek_r1."""
    model = server.model()
    monkeypatch.setattr(model, "options", replace(model.options, reasoning_parser="deepseek_r1"))
    return server


def test_reasoning_stands_apart(reasoning: Running) -> None:
    (choice,) = reasoning.openai.chat.completions.create(**ASKED | {"max_tokens": 12}).choices
    assert choice.message.content == ""
    assert choice.message.model_extra is not None
    assert choice.message.model_extra["reasoning"] == choice.message.model_extra["reasoning_content"] != ""


def test_what_must_match_comes_after_the_reasoning(reasoning: Running) -> None:
    """The demo model knows no marks: here it may take few tokens beside this one's, and likes these."""

    def tokens(text: str) -> list[int]:
        found: list[int] = reasoning.users.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()[
            "tokens"
        ]
        return found

    mark = tokens("</think>")
    own = {"guided_regex": "[0-9]{4}", "allowed_token_ids": [2, *mark, *tokens("1234")]}
    bias = dict.fromkeys(map(str, mark), 40)
    asked: Any = {**ASKED, "max_tokens": 200, "temperature": 8.0, "logit_bias": bias, "extra_body": own}
    (whole,) = reasoning.openai.chat.completions.create(**asked).choices
    deltas = [part.choices[0].delta for part in reasoning.openai.chat.completions.create(**asked, stream=True)]
    assert "".join(delta.content or "" for delta in deltas) == whole.message.content
    streamed = "".join((delta.model_extra or {}).get("reasoning_content", "") for delta in deltas)
    assert streamed == (whole.message.model_extra or {}).get("reasoning_content", "")
    assert re.fullmatch("[0-9]{4}", whole.message.content or ""), whole
    assert whole.finish_reason == "stop"
