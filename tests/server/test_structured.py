"""Texts that must match, as clients ask for them: OpenAI's formats, vLLM's fields, and the official client's parsed models."""

from __future__ import annotations

import json
import re
from enum import StrEnum
from typing import Any

import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.server.conftest import Running

MESSAGES: Any = [{"role": "user", "content": "Alice is 31 years old and likes red. Describe her as JSON."}]
SEEDED: Any = {"model": "demo", "seed": 4, "max_tokens": 120}


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)
    colours: list[Colour] = Field(max_length=2)


def test_the_official_client_parses_a_model(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(messages=MESSAGES, response_format=Person, n=2, **SEEDED)
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, Person)
    with client.chat.completions.stream(messages=MESSAGES, response_format=Person, **SEEDED) as events:
        streamed = events.get_final_completion()
    assert streamed.choices[0].message.parsed == answer.choices[0].message.parsed


FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "so"}}}}, '"so"'),
    ({"structured_outputs": {"regex": "[0-9]{3}-[0-9]{2}"}}, "[0-9]{3}-[0-9]{2}"),
    ({"structured_outputs": {"json": {"enum": [1, 22]}}}, "1|22"),
    ({"structured_outputs": {"json": None, "json_object": None, "regex": "[ab]", "choice": None}}, "[ab]"),
    ({"guided_json": {"type": "boolean"}}, "true|false"),
    ({"guided_json": '{"type": "null"}'}, "null"),
    ({"guided_regex": "(ab){1,3}"}, "(ab){1,3}"),
    ({"guided_choice": ["Paris", "Rome"]}, "Paris|Rome"),
    ({"guided_grammar": 'root ::= "(" root ")" | [xy]'}, r"\(*[xy]\)*"),
]


@pytest.mark.parametrize(("asked", "wanted"), FIELDS, ids=[next(iter(asked)) for asked, _ in FIELDS])
def test_every_field_holds_completions_and_answers(client: openai.OpenAI, asked: dict[str, Any], wanted: str) -> None:
    given: Any = {**SEEDED, "max_tokens": 40, "temperature": 0.7, "extra_body": asked}
    completion = client.completions.create(prompt="So: ", **given).choices[0]
    answer = client.chat.completions.create(messages=MESSAGES, **given).choices[0]
    for choice, text in ((completion, completion.text), (answer, answer.message.content)):
        assert choice.finish_reason == "stop"
        assert re.fullmatch(wanted, text or "")


def test_any_object_and_plain_text(client: openai.OpenAI) -> None:
    asked: Any = {"model": "demo", "prompt": "A person as JSON: ", "seed": 1, "n": 3, "max_tokens": 40}
    objects = client.completions.create(**asked, extra_body={"response_format": {"type": "json_object"}})
    for choice in objects.choices:
        assert choice.text.startswith("{")
        assert choice.finish_reason == "length" or isinstance(json.loads(choice.text), dict)
    plain = client.completions.create(**asked)
    named = client.completions.create(**asked, extra_body={"response_format": {"type": "text"}})
    assert [choice.text for choice in named.choices] == [choice.text for choice in plain.choices]
    shapes: Any = [{"name": "any"}, {"name": "any", "schema": None}, {"name": "any", "schema": {}}]
    formats = [{"response_format": {"type": "json_schema", "json_schema": shape}} for shape in shapes]
    absent, null, empty = (client.completions.create(**asked, extra_body=one).choices for one in formats)
    assert absent == null == empty


@pytest.mark.parametrize(
    ("asked", "param", "told"),
    [
        ({"guided_regex": "("}, None, "unclosed group"),
        ({"guided_json": {"type": "objct"}}, None, "objct"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex", "at most one"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, None, "exactly one"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs", "regexp"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "missing"),
        ({"response_format": {"type": "xml"}}, "response_format", "json_schema"),
        ({"guided_regex": "a", "ignore_eos": True}, None, "ends the text"),
        ({"guided_json": {"$ref": "#"}}, None, "allow no text"),
        ({"guided_regex": "a", "bad_words": ["a"]}, None, "may begin the text"),
        ({"guided_regex": "[a-z]", "allowed_token_ids": [23]}, None, "may begin the text"),
    ],
    ids=range(11),
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_what_cannot_be_is_refused(
    server: Running, asked: dict[str, Any], param: str | None, told: str, stream: bool
) -> None:
    answer = server.users.post("/v1/completions", json={"prompt": "x", "stream": stream} | asked)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["code"] in ("invalid_value", "unknown_field"), error["param"]) == (True, param), error
    assert told in error["message"]
