"""The official client against the server: what it sends is understood, and what it reads is the engine's answer."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from hardpoint import LLM, BeamSearchParams, SamplingParams
from tests.server.conftest import ENGINE, KEY, Running

PROMPT = "The capital of France is"
MESSAGES: Any = [{"role": "user", "content": "Give three facts about the moon."}]
GREEDY: Any = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def llm(shallow: str) -> Any:
    """The engine without a server."""
    llm = LLM(shallow, **ENGINE)
    yield llm
    llm.shutdown()


def test_completions_are_the_engines(client: openai.OpenAI, llm: LLM) -> None:
    prompts = [PROMPT, "Water boils at"]
    expected = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12))
    answer = client.completions.create(model="demo", prompt=prompts, **GREEDY)
    assert [choice.text for choice in answer.choices] == [one.outputs[0].text for one in expected]
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(len(one.prompt_token_ids) for one in expected)
    assert answer.usage.completion_tokens == 24
    by_ids = client.completions.create(model="demo", prompt=list(expected[0].prompt_token_ids), **GREEDY)
    assert by_ids.choices[0].text == expected[0].outputs[0].text


def test_what_a_request_leaves_out_is_as_the_publisher_recommends(start: Any, shallow: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.0, "max_new_tokens": 3}')
    with start({"demo": shallow}, {"generation_config": str(tmp_path)}) as server:

        def tokens(path: str, **body: Any) -> int:
            answer = server.users.post(f"/v1/{path}", json=body).raise_for_status()
            usage = answer.json()["usage"]
            return int(usage["output_tokens" if path == "responses" else "completion_tokens"])

        more: Any = {"ignore_eos": True}
        for path, prompt in (("completions", {"prompt": PROMPT}), ("chat/completions", {"messages": MESSAGES})):
            assert tokens(path, **prompt, **more) == 3
            assert tokens(path, **prompt, **more, max_tokens=None) == 3
            assert tokens(path, **prompt, **more, max_tokens=5) == 5
            assert tokens(path, **prompt, **more, use_beam_search=True, n=2) == 6
        assert tokens("responses", input=PROMPT) == 3


def test_beam_search_is_the_engines(client: openai.OpenAI, llm: LLM) -> None:
    asked: Any = {
        "model": "demo",
        "max_tokens": 6,
        "n": 2,
        "extra_body": {"use_beam_search": True, "length_penalty": 0.5},
    }
    params = BeamSearchParams(beam_width=2, max_tokens=6, length_penalty=0.5)
    prompts = [PROMPT, "Water boils at"]
    expected = [one for output in llm.beam_search(prompts, params) for one in output.sequences]
    answer = client.completions.create(prompt=prompts, logprobs=1, **asked)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    texts = [prompts[choice.index // 2] + choice.text for choice in answer.choices]
    assert texts == [one.text.removesuffix("<|im_end|>") for one in expected]
    for choice, one in zip(answer.choices, expected, strict=True):
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs is not None
        if choice.finish_reason == "stop":
            continue
        assert sum(choice.logprobs.token_logprobs) == pytest.approx(one.cum_logprob, abs=1e-3)  # type: ignore[arg-type]
    whole = client.completions.create(prompt=prompts, logprobs=-1, **asked)
    for choice, most in zip(answer.choices, whole.choices, strict=True):
        assert choice.logprobs is not None
        assert most.logprobs is not None
        assert most.logprobs.token_logprobs == choice.logprobs.token_logprobs
        assert {len(one) for one in most.logprobs.top_logprobs or ()} == {4}  # of the 2 * 2 candidates of each step
    streamed = list(client.completions.create(prompt=PROMPT, stream=True, **asked))
    assert [event.choices[0].text for event in streamed] == [choice.text for choice in answer.choices[:2]]
    chat = client.chat.completions.create(messages=MESSAGES, **asked)
    assert len({choice.message.content for choice in chat.choices}) == 2
    with pytest.raises(openai.BadRequestError, match="stop: not with use_beam_search"):
        client.completions.create(prompt=PROMPT, stop=["x"], **asked)


def test_chat_is_the_engines(client: openai.OpenAI, llm: LLM) -> None:
    (expected,) = llm.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=12))
    answer = client.chat.completions.create(model="demo", messages=MESSAGES, **GREEDY)
    assert answer.choices[0].message.content == expected.outputs[0].text
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"


def test_a_last_message_is_continued_and_a_salt_keeps_prefixes_apart(client: openai.OpenAI, llm: LLM) -> None:
    begun: Any = [*MESSAGES, {"role": "assistant", "content": "1. The moon is"}]
    asked: Any = {"model": "demo", "messages": begun, **GREEDY}
    own: Any = {"continue_final_message": True, "add_generation_prompt": False}
    (expected,) = llm.chat(begun, SamplingParams(temperature=0, max_tokens=12), **own)
    answer = client.chat.completions.create(**asked, extra_body=own)
    again = client.chat.completions.create(**asked, extra_body=own)
    salted = client.chat.completions.create(**asked, extra_body=own | {"cache_salt": "a tenant"})
    assert answer.choices[0].message.content == salted.choices[0].message.content
    assert answer.choices[0].message.content == expected.outputs[0].text
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    cached = [one.usage.prompt_tokens_details.cached_tokens for one in (again, salted)]  # type: ignore[union-attr]
    assert cached[0] > 0
    assert cached[1] == 0


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_is_the_whole_answer_in_parts(client: openai.OpenAI, n: int) -> None:
    asked: Any = {
        "model": "demo",
        "messages": MESSAGES,
        "n": n,
        "seed": 5,
        "max_tokens": 16,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = client.chat.completions.create(**asked)
    stream = list(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **asked))
    *parts, last = stream
    assert last.choices == []
    assert last.usage == whole.usage
    for choice in whole.choices:
        mine = [one for part in parts for one in part.choices if one.index == choice.index]
        assert mine[0].delta.role == "assistant"
        assert "".join(one.delta.content or "" for one in mine) == choice.message.content
        assert [one.finish_reason for one in mine if one.finish_reason] == [choice.finish_reason]
        assert choice.logprobs is not None
        streamed = [entry for one in mine if one.logprobs for entry in one.logprobs.content or ()]
        assert [entry.token for entry in streamed] == [entry.token for entry in choice.logprobs.content or ()]
        assert all(len(entry.top_logprobs) == 2 for entry in streamed)


def test_null_in_stream_options_is_as_if_it_were_absent(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": None, "continuous_usage_stats": None}
    asked: Any = {"model": "demo", "max_tokens": 2, "stream": True, "stream_options": options}
    for stream in (
        client.completions.create(prompt="x", **asked),
        client.chat.completions.create(messages=MESSAGES, **asked),
    ):
        assert not any(part.usage for part in stream)


def test_logprobs_of_tokens_that_are_parts_of_characters(server: Running, client: openai.OpenAI) -> None:
    written = {"structured_outputs": {"choice": ["\U0001f600\u65e5\u672c a"]}}
    text = written["structured_outputs"]["choice"][0]
    asked: Any = {"model": "demo", "max_tokens": 30, "extra_body": written}
    (choice,) = client.chat.completions.create(messages=MESSAGES, logprobs=True, **asked).choices
    assert choice.logprobs is not None
    entries = choice.logprobs.content or []
    assert len(entries) > 5
    assert bytes(byte for entry in entries for byte in entry.bytes or ()).decode().startswith(text)
    assert all(entry.top_logprobs == [] for entry in entries)
    for stream in (False, True):
        parts: Any = client.completions.create(prompt="x", logprobs=0, stream=stream, **asked)
        found = [one.choices[0].logprobs for one in (parts if stream else [parts]) if one.choices]
        tokens = [token for one in found if one for token in one.tokens]
        offsets = [offset for one in found if one for offset in one.text_offset]
        assert offsets[tokens.index(" a")] == text.index(" a")
        assert offsets == sorted(offsets)
        assert offsets[:2] == [0, 0]


def test_echo_of_token_ids_leaves_special_tokens_out_of_the_text(server: Running, client: openai.OpenAI) -> None:
    asked: Any = {"model": "demo", "prompt": [1, *client_tokens(server, "The moon")], "echo": True, "logprobs": 1}
    (choice,) = client.completions.create(max_tokens=2, temperature=0, **asked).choices
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert choice.logprobs.tokens[:3] == ["<|im_start|>", "The", " moon"]
    assert choice.logprobs.text_offset is not None
    assert choice.logprobs.text_offset[:4] == [0, 0, 3, 8]
    assert choice.text.startswith("The moon")
    cut: Any = {"truncate_prompt_tokens": 1}
    (short,) = client.completions.create(max_tokens=1, **asked | {"prompt": "The moon"}, extra_body=cut).choices
    assert short.text.startswith(" moon")
    assert short.logprobs is not None
    assert short.logprobs.text_offset == [0, 5]


def client_tokens(server: Running, text: str) -> list[int]:
    found: list[int] = server.users.post("/tokenize", json={"prompt": text}).json()["tokens"]
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_echo_without_an_answer(client: openai.OpenAI, stream: bool) -> None:
    options: Any = {"stream_options": {"include_usage": True}} if stream else {}
    parts: Any = client.completions.create(
        model="demo", prompt="The moon", echo=True, max_tokens=0, logprobs=1, n=2, stream=stream, **options
    )
    events = list(parts) if stream else [parts]
    choices = [choice for event in events for choice in event.choices]
    assert [(choice.text, choice.finish_reason) for choice in choices] == [("The moon", "length")] * 2
    assert [choice.logprobs.tokens for choice in choices] == [["The", " moon"]] * 2
    assert events[-1].usage.completion_tokens == 0


def test_a_seed_of_minus_one_is_none(client: openai.OpenAI) -> None:
    asked: Any = {"model": "demo", "prompt": PROMPT, "temperature": 1.5, "max_tokens": 8, "seed": -1}
    assert len({client.completions.create(**asked).choices[0].text for _ in range(4)}) > 1


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_log_probabilities_of_the_prompt(server: Running, client: openai.OpenAI, stream: bool) -> None:
    prompt = "The capital of France is Paris."
    asked: Any = {"model": "demo", "temperature": 0, "max_tokens": 3, "logprobs": 2, "echo": True}
    parts = client.completions.create(prompt=[prompt, "Another"], stream=stream, **asked)
    events = list(parts) if stream else [parts]
    choices = [choice for event in events for choice in event.choices if choice.index == 0]
    tokens = [token for choice in choices for token in choice.logprobs.tokens]
    values = [value for choice in choices for value in choice.logprobs.token_logprobs]
    top = [one for choice in choices for one in choice.logprobs.top_logprobs]
    offsets = [offset for choice in choices for offset in choice.logprobs.text_offset]
    text = "".join(choice.text for choice in choices)
    assert text.startswith(prompt)
    assert "".join(tokens) == text
    assert all(text[offset:].startswith(token) for offset, token in zip(offsets, tokens, strict=True))
    assert (values[0], top[0]) == (None, None)
    paris = tokens.index(" Paris")
    assert top[paris][" Paris"] == values[paris]
    assert top[-1][tokens[-1]] == values[-1] == max(top[-1].values()), "the last one is the model's own"
    assert all(value < 0 for value in values[1:])
    # Scored one token at a time, without echo: what the model says of the token that follows.
    alone = client.completions.create(
        model="demo", prompt=text[: offsets[paris]], max_tokens=1, temperature=0, logprobs=1
    )
    assert alone.choices[0].logprobs is not None
    assert alone.choices[0].logprobs.token_logprobs == pytest.approx([max(top[paris].values())], abs=1e-3)


def test_completions_stream_with_echo_and_stop(client: openai.OpenAI) -> None:
    asked: Any = {"model": "demo", "prompt": PROMPT, "temperature": 0, "max_tokens": 24, "echo": True}
    unstopped = client.completions.create(**asked).choices[0].text
    begin = len(PROMPT) + 9
    stop = unstopped[begin : begin + 4]
    whole = client.completions.create(**asked, stop=[stop])
    parts = list(client.completions.create(stream=True, **asked, stop=[stop]))
    text = "".join(choice.text for part in parts for choice in part.choices)
    assert text == whole.choices[0].text == unstopped[: unstopped.index(stop, len(PROMPT))]
    assert whole.choices[0].finish_reason == "stop"


def test_logprobs_of_completions_lie_where_the_text_does(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="demo", prompt=PROMPT, logprobs=2, **GREEDY)
    (choice,) = answer.choices
    found = choice.logprobs
    assert found is not None
    assert found.tokens is not None
    assert found.text_offset is not None
    assert "".join(found.tokens) == choice.text
    for token, offset in zip(found.tokens, found.text_offset, strict=True):
        assert choice.text[offset : offset + len(token)] == token


def test_parameters_reach_the_engine(client: openai.OpenAI) -> None:
    def text(**asked: Any) -> str:
        return client.completions.create(model="demo", prompt=PROMPT, max_tokens=6, **asked).choices[0].text

    plain = text(temperature=0)
    banned = text(temperature=0, logit_bias={str(_first_token(client)): -100})
    assert banned != plain
    assert text(seed=3, temperature=1.5) == text(seed=3, temperature=1.5)
    assert text(seed=3, temperature=1.5) != text(seed=4, temperature=1.5)
    longer = client.completions.create(
        model="demo", prompt=PROMPT, temperature=0, max_tokens=40, extra_body={"ignore_eos": True, "min_tokens": 40}
    )
    assert longer.usage is not None
    assert longer.usage.completion_tokens == 40


def _first_token(client: openai.OpenAI) -> int:
    answer = client.completions.create(
        model="demo", prompt=PROMPT, temperature=0, max_tokens=1, extra_body={"return_token_ids": True}
    )
    (token,) = answer.choices[0].model_extra["token_ids"]  # type: ignore[index]
    return int(token)


def test_embeddings(client: openai.OpenAI, llm: LLM) -> None:
    expected = llm.embed(["x", "Dear Sir"])
    answer = client.embeddings.create(model="demo", input=["x", "Dear Sir"], encoding_format="float")
    coded = client.embeddings.create(model="demo", input=["x", "Dear Sir"])  # base64, which the client decodes
    for one, other, wanted in zip(answer.data, coded.data, expected, strict=True):
        assert one.embedding == pytest.approx(wanted.outputs.embedding.tolist(), abs=1e-6)
        assert other.embedding == pytest.approx(one.embedding, abs=1e-6)


def test_models_and_tokens(server: Running, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").owned_by == "hardpoint"
    tokens = server.users.post("/tokenize", json={"prompt": PROMPT, "return_token_strs": True}).json()
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert server.users.post("/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": PROMPT}
    chat = server.users.post("/tokenize", json={"messages": MESSAGES}).json()
    assert chat["count"] > tokens["count"]


def test_many_asynchronous_streams_side_by_side(server: Running) -> None:
    async def one(client: openai.AsyncOpenAI, number: int) -> tuple[int, str]:
        parts = await client.completions.create(
            model="demo", prompt=f"{number}, ", temperature=0, max_tokens=8 + number % 5, stream=True
        )
        return number, "".join([choice.text async for part in parts for choice in part.choices])

    async def whole() -> dict[int, str]:
        async with openai.AsyncOpenAI(base_url=f"{server.server.url}/v1", api_key=KEY, max_retries=0) as client:
            return dict(await asyncio.gather(*(one(client, number) for number in range(48))))

    texts = asyncio.run(whole())
    alone = server.openai.completions.create(model="demo", prompt="7, ", temperature=0, max_tokens=10)
    assert texts[7] == alone.choices[0].text


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "param"),
    [
        ("completions", {"prompt": "x", "temprature": 1}, 400, "unknown_field", "temprature"),
        ("completions", {"prompt": "x", "temperature": "hot"}, 400, "invalid_value", "temperature"),
        ("completions", {"prompt": "x", "temperature": -1}, 400, "invalid_value", "temperature"),
        ("completions", {"prompt": "x", "max_tokens": -5}, 400, "invalid_value", "max_tokens"),
        ("completions", {"prompt": "x", "max_tokens": 0}, 400, "invalid_value", "max_tokens"),
        ("completions", {"prompt": "x", "n": 10**9}, 400, "invalid_value", None),
        ("completions", {"prompt": ["x"] * 5000}, 400, "invalid_value", None),
        ("completions", {"prompt": "x", "model": "\ud800"}, 404, "model_not_found", "model"),
        ("completions", {"prompt": "x", "logit_bias": {"\ud800": 1}}, 400, "invalid_value", "logit_bias"),
        (
            "chat/completions",
            {"messages": MESSAGES, "max_completion_tokens": 0},
            400,
            "invalid_value",
            "max_completion_tokens",
        ),
        ("responses", {"input": "x", "max_output_tokens": 0}, 400, "invalid_value", "max_output_tokens"),
        ("responses", {"input": "x", "metadata": {"a": "\ud800"}}, 400, "invalid_value", "metadata"),
        ("completions", {"prompt": "x", "logit_bias": {"one": 1}}, 400, "invalid_value", "logit_bias"),
        ("completions", {"prompt": "x", "bad_words": ["no"] * 1_000_000}, 400, "invalid_value", "bad_words"),
        ("completions", {"prompt": "x", "stop": ["no"] * 1_000_000}, 400, "invalid_value", "stop"),
        ("completions", {"prompt": [10**9]}, 400, "invalid_value", None),
        ("completions", {"prompt": []}, 400, "invalid_value", "prompt"),
        ("completions", {"prompt": "word " * 3000}, 400, "context_length_exceeded", None),
        ("completions", {"prompt": "x", "model": "other"}, 404, "model_not_found", "model"),
        ("completions", {"prompt": "\ud800"}, 400, "invalid_value", None),
        ("completions", {"prompt": "x", "stream_options": {}}, 400, "invalid_value", "stream_options"),
        ("chat/completions", {"messages": []}, 400, "invalid_value", None),
        ("chat/completions", {"messages": [{"content": "x"}]}, 400, "invalid_value", "messages"),
        ("chat/completions", {"messages": MESSAGES, "top_logprobs": 3}, 400, "invalid_value", "top_logprobs"),
        ("chat/completions", {"messages": MESSAGES, "tools": []}, 400, "invalid_value", "tools"),
        ("embeddings", {"input": ""}, 400, "invalid_value", None),
        ("embeddings", {"input": "x", "dimensions": 3}, 400, "invalid_value", "dimensions"),
        ("nothing", {}, 404, "unknown_path", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests_are_refused_in_openais_form(
    server: Running, path: str, body: dict[str, Any], status: int, code: str, param: str | None, stream: bool
) -> None:
    if stream and "completions" in path and "stream_options" not in body:
        body = body | {"stream": True}
    answer = server.users.post(
        f"/v1/{path}", content=json.dumps(body), headers={"Content-Type": "application/json", "X-Request-Id": "mine"}
    )
    assert answer.status_code == status, answer.text
    assert answer.headers["x-request-id"] == "mine"
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (code, param), error
    assert error["message"]


@pytest.mark.parametrize("body", [b"{", b'{"prompt": "\xff"}', b'{"prompt": ' + b"[" * 200_000])
def test_a_body_that_is_no_json(server: Running, body: bytes) -> None:
    answer = server.users.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_json"


def test_keys(server: Running) -> None:
    with pytest.raises(openai.AuthenticationError):
        server.openai.with_options(api_key="other").models.list()
    assert server.users.get("/health", headers={"Authorization": ""}).status_code == 200
    assert server.users.get("/metrics", headers={"Authorization": ""}).status_code == 401
