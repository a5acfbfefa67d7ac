"""The engine over a device that is behind its queue: with steps in flight everything gives the tokens of one step at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from conformance_tests.tests.recorded_graphs import GraphedAttention, MixedAttention, Recorder, graphed
from hardpoint import LLM, SamplingParams
from hardpoint.interfaces import StepInput
from hardpoint.interfaces.errors import InvalidSamplingParams
from hardpoint.plugins import Resolved
from hardpoint.worker import StandardWorker
from hardpoint_conformance.mutants.asynchronous import asynchronous
from hardpoint_conformance.target import Target
from hardpoint_conformance.tiny_model import Model, shape_for, tiny_model


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model(shape_for(Target.find("cpu").claims))


@contextmanager
def engine(target: Target, model: Model, **settings: Any) -> Iterator[LLM]:
    """An engine with few blocks, so that sequences are preempted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "hardpoint.engine.startup.resolve_backend",
            lambda *args, **named: Resolved(target.descriptor, target.device),
        )
        values = {"block_size": 16, "num_device_blocks": 14, "max_num_seqs": 6, "max_model_len": 120} | settings
        llm = LLM(model.path, dtype="float32", tokenizer="demo", max_num_batched_tokens=64, **values)
    try:
        yield llm
    finally:
        llm.shutdown()


def odd_tokens(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Ban even tokens, and those that were generated."""
    logits[::2] = -torch.inf
    logits[token_ids] = -torch.inf
    return logits


REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.5, "seed": 1, "n": 2},
    {"temperature": 0.0, "presence_penalty": 1.5, "logprobs": 2},
    {"temperature": 1.0, "seed": 2, "min_tokens": 5, "stop_token_ids": list(range(0, 250, 9))},
    {"temperature": 1.0, "seed": 3, "logits_processors": [odd_tokens]},
    {"temperature": 0.0, "logits_processors": [odd_tokens]},
    {"temperature": 0.0, "stop_token_ids": list(range(0, 250, 20))},
    {"temperature": 1.0, "seed": 4, "n": 2, "ignore_eos": False, "structured_outputs": {"regex": "([a-y]{2} )*z"}},
]


def serve(llm: LLM, *, forgets: bool = True) -> list[Any]:
    """Return tokens and log probabilities of requests of all kinds, twice, beside embeddings.

    Args:
        forgets: the prefix cache is reset after each time.
    """
    params = [SamplingParams(**{"max_tokens": 30, "ignore_eos": True} | values) for values in REQUESTS]
    prompts = [
        {"prompt_token_ids": [(7 * i + j * j) % 250 + 1 for j in range(5 + 9 * i)]} for i in range(len(REQUESTS))
    ]
    found: list[Any] = []
    for _ in range(2):
        for output in llm.generate(prompts, params):
            found += [(list(one.token_ids), one.finish_reason) for one in output.outputs]
            if (logprobs := output.outputs[0].logprobs) is not None:
                found.append([[(token, value.logprob) for token, value in place.items()] for place in logprobs])
        found += [list(one.outputs.embedding) for one in llm.embed(prompts[:3])]
        if forgets:
            llm.reset_prefix_cache()
    return found


@pytest.fixture(scope="module")
def expected(model: Model) -> list[Any]:
    with engine(Target.find("cpu"), model) as llm:
        found = serve(llm)
        assert llm.stats().preemptions > 0
        return found


def test_tokens_are_those_of_one_step_at_a_time(model: Model, expected: list[Any]) -> None:
    planned_ahead = 0

    class Watching(StandardWorker):
        def submit(self, step: StepInput) -> None:
            nonlocal planned_ahead
            planned_ahead += int((step.batch.token_ids < 0).any())
            super().submit(step)

    target = asynchronous(Target.find("cpu")).with_descriptor(worker=lambda: Watching)
    with engine(target, model) as llm:
        assert serve(llm) == expected
    assert planned_ahead > 20


def test_prompts_that_come_back_from_the_tiers_give_the_same_tokens(model: Model, expected: list[Any]) -> None:
    target = asynchronous(Target.find("cpu"))
    with engine(target, model, kv_offload_gib=0.001) as llm:
        assert serve(llm, forgets=False) == expected
        stats = llm.stats()
        assert min(stats.preemptions, stats.offload_stores, stats.offload_host_hits) > 0
        assert stats.offload_failures == 0


def test_a_processor_bans_tokens(model: Model) -> None:
    with engine(Target.find("cpu"), model) as llm:
        (output,) = llm.generate(
            [{"prompt_token_ids": [5, 6]}],
            SamplingParams(temperature=0.0, max_tokens=20, logits_processors=[odd_tokens], ignore_eos=True),
        )
    tokens = list(output.outputs[0].token_ids)
    assert len(set(tokens)) == 20
    assert all(token % 2 for token in tokens)


@pytest.mark.parametrize("attention", [GraphedAttention, MixedAttention], ids=["decodes", "mixed"])
def test_captured_steps_with_steps_in_flight(model: Model, attention: Any) -> None:
    """A replay's inputs and its tokens in flight are put in on the device; graphs are replayed while steps are in flight."""
    with engine(graphed(), model, use_fused_decoder=False, enforce_eager=True) as llm:
        eager = serve(llm)
    Recorder.replays.clear()
    with engine(asynchronous(graphed(attention)), model, use_fused_decoder=False) as llm:
        assert serve(llm) == eager
    assert len(Recorder.replays) > 20
    assert any(key < 0 for key in Recorder.replays) is (attention is MixedAttention)


@pytest.mark.parametrize("setting", [{"engine_process": True}, {"executor": "multi_process"}], ids=str)
def test_processors_do_not_leave_the_process(model: Model, setting: dict[str, Any]) -> None:
    llm = LLM(model.path, backend="cpu", dtype="float32", skip_tokenizer_init=True, num_device_blocks=20, **setting)
    try:
        with pytest.raises(InvalidSamplingParams, match="logits_processors are functions of this process"):
            llm.generate([{"prompt_token_ids": [5, 6]}], SamplingParams(logits_processors=[odd_tokens]))
        assert llm.generate([{"prompt_token_ids": [5, 6]}], SamplingParams(max_tokens=1))
    finally:
        llm.shutdown()
