"""Streams as they are written: the short way of events gives what declared types give."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from hardpoint.server.events import TextEvents, written
from hardpoint.server.protocol import AnswerMessage, ChatChunk, ChatDelta, Completion, CompletionChoice
from tests.server.conftest import Running


def _chat(index: int, text: str) -> ChatChunk:
    delta = ChatDelta(index=index, delta=AnswerMessage(content=text), logprobs=None, finish_reason=None)
    return ChatChunk(id="chatcmpl-1", object="chat.completion.chunk", created=7, model='a "b"', choices=[delta])


def _completion(index: int, text: str) -> Completion:
    choice = CompletionChoice(index=index, text=text, logprobs=None, finish_reason=None)
    return Completion(id="cmpl-1", object="text_completion", created=7, model="é", choices=[choice])


@pytest.mark.parametrize("make", [_chat, _completion])
@given(texts=some.lists(some.tuples(some.integers(0, 2), some.text()), max_size=5))
def test_text_events_are_those_of_declared_types(make: Any, texts: list[tuple[int, str]]) -> None:
    events = TextEvents(make)
    for index, text in texts:
        assert events.written(index, text) == written(make(index, text))


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("completions", {"prompt": "The capital of France is"}),
        ("chat/completions", {"messages": [{"role": "user", "content": "Where is Paris?"}]}),
    ],
)
def test_a_stream_of_text_alone_has_the_fields_of_any(server: Running, path: str, asked: dict[str, Any]) -> None:
    asked = asked | {"stream": True, "max_tokens": 12, "seed": 3, "n": 2, "ignore_eos": True}

    def streamed(**more: Any) -> tuple[dict[int, str], set[str]]:
        """Return the text of each choice, and what else the events have."""
        lines = server.users.post(f"/v1/{path}", json=asked | more).text.split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        texts, others = {0: "", 1: ""}, set()
        for line in lines[:-2]:
            event = json.loads(line.removeprefix("data: "))
            (choice,) = event["choices"]
            holder = choice if "text" in choice else choice["delta"]
            key = "text" if "text" in choice else "content"
            texts[choice["index"]] += holder[key]
            holder[key] = ""
            others.add(json.dumps(event | {"id": "", "created": 0, "usage": None}))
        return texts, others

    # With token counts in every event, all of them are written the long way.
    assert streamed() == streamed(stream_options={"continuous_usage_stats": True})
