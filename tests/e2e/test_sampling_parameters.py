"""What sampling parameters do to a whole engine, beside what transformers or plain torch makes of the same logits."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from hardpoint import LLM, SamplingParams
from hardpoint.engine.async_llm import AsyncLLM
from hardpoint.engine.outputs import FlatLogprobs
from hardpoint.engine.sleep import EngineState
from hardpoint.interfaces.errors import (
    EmptyPrompt,
    EngineDead,
    HardpointError,
    InvalidRequest,
    InvalidSamplingParams,
    MemoryBusy,
    PromptTooLong,
)
from hardpoint.scheduler import SchedulerConfig
from hardpoint_conformance.tiny_model import Model
from tests.e2e.conftest import SHALLOW, Oracle
from tests.e2e.test_invariance import PROMPTS

Make = Callable[..., AbstractContextManager[LLM]]

PROMPT = PROMPTS[2]


@pytest.fixture(scope="module")
def oracle(shallow: Model) -> Oracle:
    return Oracle.of(shallow)


@pytest.fixture(scope="module")
def small(make_shallow: Make) -> Iterator[LLM]:
    with make_shallow() as llm:
        yield llm


# Functions that call the engine they run in


def _with_a_function(llm: LLM, params: SamplingParams, call: Callable[[], object]) -> tuple[list[Any], dict[str, Any]]:
    """Serve a request whose function makes a call for its third token, beside another; returns what the call gave, and the outputs."""
    gave: list[Any] = []

    def calling(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(token_ids) == 2:
            try:
                gave.append(call())
            except Exception as error:
                gave.append(error)
                raise
        return logits

    llm.engine.add_request("calls", PROMPT, params.clone(logits_processors=[calling]))
    llm.engine.add_request("beside", PROMPT, params)
    outputs: dict[str, Any] = {}
    while llm.engine.has_unfinished_requests():
        outputs |= {output.request_id: output.outputs[0] for output in llm.engine.step()}
    return gave, outputs


CALLS: dict[str, Callable[[LLM], object]] = {
    "generate": lambda llm: llm.generate(PROMPT, SamplingParams(max_tokens=2), use_tqdm=False),
    "stream": lambda llm: list(llm.stream(PROMPT, SamplingParams(max_tokens=2))),
    "embed": lambda llm: llm.embed(PROMPT, use_tqdm=False),
    "add_request": lambda llm: llm.engine.add_request("new", PROMPT, SamplingParams(max_tokens=2)),
    "step": lambda llm: llm.engine.step(),
    "pause": lambda llm: llm.pause(),
    "sleep": lambda llm: llm.sleep(),
    "sleep that waits": lambda llm: llm.sleep(mode="wait"),
    "wake_up": lambda llm: llm.wake_up(),
    "resume": lambda llm: llm.resume(),
    "update_weights": lambda llm: llm.update_weights([]),
    "reload_weights": lambda llm: llm.reload_weights(),
    "reset_prefix_cache": lambda llm: llm.reset_prefix_cache(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_function_that_changes_the_engine_it_runs_in_ends_its_request_alone(
    name: str, small: LLM, greedy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    params = greedy(6)
    expected = list(small.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].token_ids)
    (error,), outputs = _with_a_function(small, params, lambda: CALLS[name](small))
    assert isinstance(error, MemoryBusy)
    assert "cannot be changed from within a step" in str(error)
    assert outputs["calls"].finish_reason == "error"
    assert "raised MemoryBusy" in caplog.text
    assert list(outputs["beside"].token_ids) == expected
    assert small.sleep_status().state is EngineState.RUNNING
    assert list(small.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].token_ids) == expected
    assert small.stats().blocks_used == 0


def test_a_function_may_ask_how_the_engine_is_and_abort_requests(small: LLM, greedy: Any) -> None:
    params = greedy(6)
    expected = list(small.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].token_ids)

    def ask() -> int:
        assert small.sleep_status().state is EngineState.RUNNING
        assert small.engine.adapters() == []
        return small.stats().running

    (running,), outputs = _with_a_function(small, params, ask)
    assert running == 2
    assert [list(outputs[name].token_ids) for name in ("calls", "beside")] == [expected] * 2
    for gone, stays in (("calls", "beside"), ("beside", "calls")):
        _, outputs = _with_a_function(small, params, lambda gone=gone: small.engine.abort_request(gone))  # type: ignore[misc]
        assert outputs[gone].finish_reason is None
        assert list(outputs[stays].token_ids) == expected
    assert small.stats().blocks_used == 0


def test_a_function_may_shut_the_engine_down_which_ends_with_the_step(make_shallow: Make, greedy: Any) -> None:
    with make_shallow(num_device_blocks=16) as llm:
        _, outputs = _with_a_function(llm, greedy(6), llm.shutdown)
        assert all(output.finish_reason is None for output in outputs.values())
        with pytest.raises(EngineDead, match="shut down"):
            llm.generate(PROMPT)
    with make_shallow(num_device_blocks=16) as llm:

        def stop(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            llm.shutdown()
            return logits

        with pytest.raises(EngineDead, match="shut down"):
            llm.generate(PROMPT, greedy(6, logits_processors=[stop]), use_tqdm=False)


def test_a_function_in_the_loops_own_thread_does_not_wait_for_itself(shallow: Model, greedy: Any) -> None:
    asked: list[Any] = []

    async def body() -> list[Any]:
        llm = AsyncLLM(shallow.path, dtype="float32", backend="cpu", num_device_blocks=16, skip_tokenizer_init=True)

        async def generate() -> list[Any]:
            return [output async for output in llm.generate(PROMPT, greedy(2))]

        def calling(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            calls: list[Callable[[], Any]] = [llm.stats, llm.sleep, llm.resume, generate]
            if token_ids and len(token_ids) <= len(calls):
                try:
                    asked.append(asyncio.run(calls[len(token_ids) - 1]()))
                except HardpointError as error:
                    asked.append(type(error))
            return logits

        try:
            params = greedy(6, logits_processors=[calling])
            return [output async for output in llm.generate(PROMPT, params)]
        finally:
            await llm.close()

    outputs = asyncio.run(asyncio.wait_for(body(), 60))
    assert outputs[-1].outputs[0].finish_reason == "length"
    assert asked[0].running == 1
    assert asked[1:] == [MemoryBusy] * 3


# Words that must not come


def test_bad_words_do_not_come(llm: LLM) -> None:
    """Each is taken from the text before, so that it would come; what is left is the best of the rest at every step."""
    prompt = "The capital of France is"
    params = SamplingParams(temperature=0, max_tokens=12)
    (before,) = llm.generate(prompt, params)
    words = [before.outputs[0].text.split()[0].strip(".,"), before.outputs[0].text[:12]]
    (after,) = llm.generate(prompt, params.clone(bad_words=words))
    text = after.outputs[0].text
    assert text != before.outputs[0].text
    assert not any(word in text for word in words)


def test_bad_words_do_not_come_of_an_engine_process(shallow_llm: LLM, shallow_demo: str, make_engine: Any) -> None:
    prompt, params = "The capital of France is", SamplingParams(temperature=0, max_tokens=12)
    (before,) = shallow_llm.generate(prompt, params)
    word = max(re.findall(r"\w+", before.outputs[0].text), key=len)
    (after,) = shallow_llm.generate(prompt, params.clone(bad_words=[word]))
    assert word not in after.outputs[0].text
    with make_engine(shallow_demo, engine_process=True, num_device_blocks=32, max_model_len=128) as other:
        (again,) = other.generate(prompt, params.clone(bad_words=[word]))
    assert again.outputs[0].token_ids == after.outputs[0].token_ids


def test_bad_words_of_several_tokens_are_masked_at_their_last_one(llm: LLM) -> None:
    tokenizer: Any = llm.get_tokenizer()
    (before,) = llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=16))
    ids = list(before.outputs[0].token_ids)
    place = next(at for at in range(4, 12) if tokenizer.encode(tokenizer.decode(ids[at : at + 2])) == ids[at : at + 2])
    word = tokenizer.decode(ids[place : place + 2]).strip()
    (after,) = llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=16, bad_words=[word]))
    found = list(after.outputs[0].token_ids)
    assert found[: place + 1] == ids[: place + 1], "its first token may come"
    assert found[place + 1] != ids[place + 1]


def test_bad_words_need_a_tokenizer(small: LLM) -> None:
    with pytest.raises(InvalidSamplingParams, match="tokenizer"):
        small.generate(PROMPT, SamplingParams(bad_words=["no"]))


# Log probabilities


def test_logprobs_of_the_whole_vocabulary(small: LLM, oracle: Oracle, greedy: Any) -> None:
    (output,) = small.generate(PROMPT, greedy(3, logprobs=-1, prompt_logprobs=-1))
    token_ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    expected = oracle.logits(token_ids, 1).log_softmax(-1)
    assert output.prompt_logprobs is not None
    assert output.outputs[0].logprobs is not None
    for row, entry in zip(expected, [*output.prompt_logprobs[1:], *output.outputs[0].logprobs], strict=True):
        assert entry is not None
        assert sorted(entry) == list(range(SHALLOW.vocab))
        found = torch.tensor([entry[token].logprob for token in range(SHALLOW.vocab)])
        assert torch.allclose(found, row, atol=1e-4)
        assert math.isclose(float(found.double().exp().sum()), 1, abs_tol=1e-4)


def test_flat_logprobs_say_the_same(shallow_llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=2, prompt_logprobs=1)
    (plain,) = shallow_llm.generate("Water boils at", params)
    (flat,) = shallow_llm.generate("Water boils at", params.clone(flat_logprobs=True))
    assert isinstance(flat.outputs[0].logprobs, FlatLogprobs)
    assert isinstance(flat.prompt_logprobs, FlatLogprobs)
    assert list(flat.outputs[0].logprobs) == plain.outputs[0].logprobs
    assert plain.prompt_logprobs is not None
    assert list(flat.prompt_logprobs) == [{}, *plain.prompt_logprobs[1:]]
    assert list(flat.prompt_logprobs[2:]) == plain.prompt_logprobs[2:]


def processed(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Temperature, min_p, top_k and top_p on one row, each on what the one before left."""
    row = (logits / temperature).double()
    row = row.masked_fill(row.softmax(-1) < min_p * row.softmax(-1).max(), -torch.inf)
    row = row.masked_fill(row < row.topk(top_k).values[-1], -torch.inf)
    falling, order = row.sort(descending=True)
    before = falling.softmax(-1).cumsum(-1) - falling.softmax(-1)
    return row.index_fill(0, order[before >= top_p], -torch.inf)


@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"])
def test_modes_of_logprobs(mode: str, make_shallow: Make, oracle: Oracle) -> None:
    parameters: Any = {"temperature": 0.7, "top_k": 30, "top_p": 0.9, "min_p": 0.05}
    params = SamplingParams(max_tokens=4, seed=3, logprobs=40, ignore_eos=True, **parameters)
    greedy = SamplingParams(
        max_tokens=4, temperature=0, logprobs=40, ignore_eos=True, allowed_token_ids=range(100, 200)
    )
    with make_shallow(logprobs_mode=mode) as llm:
        drawn, best = llm.generate([PROMPT, PROMPT], [params, greedy])
    for output in (drawn, best):
        token_ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        rows = oracle.logits(token_ids, len(output.prompt_token_ids))
        if mode.startswith("processed") and output is drawn:
            rows = torch.stack([processed(row, **parameters) for row in rows])
        elif mode.startswith("processed"):
            masked = torch.full_like(rows, -torch.inf)
            masked[:, 100:200] = rows[:, 100:200]
            rows = masked
        if mode.endswith("logprobs"):
            rows = rows.log_softmax(-1)
        assert output.outputs[0].logprobs is not None
        for token, entry, row in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, rows, strict=True):
            assert next(iter(entry)) == token
            assert math.isfinite(entry[token].logprob)
            finite = {one: shown.logprob for one, shown in entry.items() if math.isfinite(shown.logprob)}
            assert finite == pytest.approx({one: float(row[one]) for one in finite}, abs=1e-3)
            assert all(row[one] == -torch.inf for one in entry if one not in finite)
            assert len(finite) == min(len(entry), int(row.isfinite().sum()))


# Prompts


def test_a_prompt_is_cut_to_its_last_tokens(small: LLM, greedy: Any) -> None:
    ids = PROMPTS[13]["prompt_token_ids"]
    (cut,) = small.generate({"prompt_token_ids": ids}, greedy(4, truncate_prompt_tokens=7))
    (alone,) = small.generate({"prompt_token_ids": ids[-7:]}, greedy(4))
    assert cut.prompt_token_ids == ids[-7:]
    assert cut.outputs[0].token_ids == alone.outputs[0].token_ids
    long = {"prompt_token_ids": [5] * 2000}
    with pytest.raises(PromptTooLong):
        small.generate(long, greedy(1))
    assert len(small.generate(long, greedy(1, truncate_prompt_tokens=-1))[0].prompt_token_ids) == SHALLOW.max_len - 1
    with pytest.raises(EmptyPrompt):
        small.generate(long, greedy(1, truncate_prompt_tokens=0))


def test_chat_takes_tools_template_variables_and_a_message_to_go_on_with(shallow_llm: LLM, greedy: Any) -> None:
    tokenizer: Any = shallow_llm.get_tokenizer()
    messages: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "you"}]}
    ]
    plain: list[Any] = [{"role": "user", "content": "Hi\nyou"}]
    begun = [*plain, {"role": "assistant", "content": "Hello, I"}]
    template = (
        "{{ tools | length if tools else 0 }}{{ mood }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]

    def prompt(conversation: Any, **how: Any) -> str | None:
        return shallow_llm.chat(conversation, greedy(1), **how)[0].prompt

    assert prompt(messages) == tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
    written = prompt(plain, chat_template=template, tools=tools, chat_template_kwargs={"mood": "!"})
    assert written == "1!<user>Hi\nyou"
    go_on = {"continue_final_message": True, "add_generation_prompt": False}
    assert prompt(begun, **go_on) == tokenizer.apply_chat_template(begun, tokenize=False, continue_final_message=True)
    with pytest.raises(InvalidRequest, match="add_generation_prompt=False"):
        prompt(begun, continue_final_message=True)


def test_with_the_policy_shortest_a_short_prompt_is_served_before_a_long_one(
    make_shallow: Make, greedy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrival = SchedulerConfig.arrival
    # As if all had come at the same moment.
    monkeypatch.setattr(SchedulerConfig, "arrival", lambda self, num_tokens, _: arrival(self, num_tokens, 0.0))
    with make_shallow(scheduling_policy="shortest", max_num_seqs=1) as llm:
        prompts = [{"prompt_token_ids": [5] * length} for length in (60, 2, 20)]
        firsts = [output.metrics.first_token_time for output in llm.generate(prompts, greedy(1))]
    assert firsts[1] < firsts[2] < firsts[0]


def test_priority_decides_who_is_served_first(make_shallow: Make, greedy: Any) -> None:
    with make_shallow(scheduling_policy="priority", max_num_seqs=1) as llm:
        outputs = llm.generate(PROMPTS[:3], greedy(3), priority=[2, 1, 0])
        firsts = [output.metrics.first_token_time for output in outputs if output.metrics is not None]
        assert firsts == sorted(firsts, key=lambda time: -(time or 0))


def test_a_priority_that_the_engine_would_not_heed_is_refused(small: LLM, greedy: Any) -> None:
    small.generate(PROMPTS[:1], greedy(1), priority=[0])
    with pytest.raises(InvalidRequest, match=r"priority=3 with scheduling_policy='fcfs'.*Leave the priority out"):
        small.generate(PROMPTS[:2], greedy(1), priority=[0, 3])
    assert not small.engine.has_unfinished_requests()
