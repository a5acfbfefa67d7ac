"""`/v1/responses` by OpenAI's own client."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.server.conftest import Running

ASKED: Any = {"model": "demo", "temperature": 0.0}


def test_a_text_and_a_conversation_are_answered_as_in_chat(client: openai.OpenAI) -> None:
    question = "What is the capital of France?"
    chat = client.chat.completions.create(
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}],
        max_tokens=40,
        **ASKED,
    )
    made = client.responses.create(
        input=question, instructions="Be brief.", max_output_tokens=40, metadata={"a": "b"}, **ASKED
    )
    assert made.output_text == chat.choices[0].message.content
    assert chat.usage is not None
    assert made.usage is not None
    assert (made.usage.input_tokens, made.usage.output_tokens) == (
        chat.usage.prompt_tokens,
        chat.usage.completion_tokens,
    )
    # `test_command.py` has one that the model ends.
    assert (made.status, made.error, made.metadata, made.instructions) == ("incomplete", None, {"a": "b"}, "Be brief.")
    # An answer is given back as part of the next request.
    conversation: Any = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": question}]},
        made.output[0].model_dump(),
        {"role": "user", "content": "And of Italy?"},
    ]
    second = client.responses.create(input=conversation, max_output_tokens=40, **ASKED)
    assert second.usage is not None
    assert second.usage.input_tokens > made.usage.total_tokens


def test_a_stream_has_openais_events_in_order(client: openai.OpenAI) -> None:
    given: Any = {"input": "Say hello to the moon.", "max_output_tokens": 12} | ASKED
    whole = client.responses.create(**given)
    # Pieces that a busy machine holds up come together.
    for _ in range(10):
        events = list(client.responses.create(stream=True, **given))
        kinds = [event.type for event in events]
        deltas = kinds.count("response.output_text.delta")
        if deltas >= 2:
            break
    assert deltas >= 2
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        f"response.{whole.status}",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert whole.status == "incomplete"
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    final = events[-1]
    assert final.type == "response.incomplete"
    assert text == final.response.output_text == whole.output_text
    assert final.response.usage is not None
    assert final.response.usage.output_tokens == 12


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"text": {"format": {"type": "json_object"}}}, "text"),
        ({"truncation": "auto"}, "truncation"),
        ({"reasoning": {"effort": "low"}}, "reasoning"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_supported_is_refused_by_name(
    client: openai.OpenAI, more: dict[str, Any], param: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(input="x", stream=stream, **ASKED, **more)
    assert (refused.value.code, refused.value.param) == ("unsupported", param)


@pytest.mark.parametrize(
    "more",
    [
        {"max_output_tokens": 0},
        {"max_output_tokens": 1 << 40},
        {"temperature": -1.0},
        {"top_p": 0},
        {"input": []},
        {"input": [{"type": "function_call"}]},
    ],
)
def test_bad_values_are_refused(server: Running, more: dict[str, Any]) -> None:
    for stream in (False, True):
        answer = server.users.post("/v1/responses", json={"input": "x", "stream": stream} | more)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        (param,) = more
        assert error["message"].startswith(param) or param == "input"
        assert error["param"] in (param, None if param == "input" else param)


def test_a_stream_that_fails_says_so(slow_server: Running) -> None:
    client = slow_server.openai
    late: Any = {"X-Request-Timeout": "0.5"}
    events = list(
        client.responses.create(model="demo", input="x", max_output_tokens=400, stream=True, extra_headers=late)
    )
    assert events[0].type == "response.created"
    last = events[-1]
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert last.response.error.code == "request_timeout"
