"""Beam search finds what a plain search over transformers' logits finds, however its beams are scheduled."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from hardpoint import LLM, AsyncLLM, BeamSearchOutput, BeamSearchParams, RequestOutput
from hardpoint.engine.request import Recipient
from hardpoint.interfaces.errors import InvalidRequest, InvalidSamplingParams, RequestNeverFits
from hardpoint_conformance.tiny_model import Model
from tests.e2e.conftest import Oracle, engine
from tests.e2e.test_invariance import PROMPTS

Make = Callable[..., AbstractContextManager[LLM]]

WIDTH, LENGTH = 4, 12
FOUND = [PROMPTS[index] for index in (0, 3, 9, 13)]


@pytest.fixture(scope="module")
def oracle(shallow: Model) -> Oracle:
    return Oracle.of(shallow)


def plain_search(
    oracle: Oracle, prompt: list[int], ends: set[int], length_penalty: float = 1.0, max_tokens: int = LENGTH
) -> list[tuple[list[int], float]]:
    """The rules of vLLM's beam search in plain torch: (tokens, cumulative log probability) of the best beams."""
    beams, completed = [(prompt, 0.0)], []

    def score(beam: tuple[list[int], float]) -> float:
        length = len(beam[0]) - (beam[0][-1] in ends)
        return beam[1] / length**length_penalty

    for _ in range(max_tokens):
        following = []
        with torch.inference_mode():
            logits = oracle.model(torch.tensor([tokens for tokens, _ in beams])).logits[:, -1].float()
        for (tokens, total), row in zip(beams, logits.log_softmax(-1), strict=True):
            best = row.topk(2 * WIDTH)
            for token, value in zip(best.indices.tolist(), best.values.tolist(), strict=True):
                beam = ([*tokens, token], total + value)
                (completed if token in ends else following).append(beam)
        beams = sorted(following, key=score, reverse=True)[:WIDTH]
    return sorted([*completed, *beams], key=score, reverse=True)[:WIDTH]


def check(outputs: list[BeamSearchOutput], expected: list[list[tuple[list[int], float]]]) -> None:
    for output, beams in zip(outputs, expected, strict=True):
        assert [list(one.tokens) for one in output.sequences] == [tokens for tokens, _ in beams]
        for one, (_, total) in zip(output.sequences, beams, strict=True):
            assert abs(one.cum_logprob - total) < 1e-3
            added = sum(next(iter(entry.values())).logprob for entry in one.logprobs)
            assert abs(one.cum_logprob - added) < 1e-4


@pytest.fixture(scope="module")
def expected(oracle: Oracle) -> list[list[tuple[list[int], float]]]:
    return [plain_search(oracle, prompt["prompt_token_ids"], set()) for prompt in FOUND]


PARAMS = BeamSearchParams(beam_width=WIDTH, max_tokens=LENGTH, ignore_eos=True)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="whole"),
        pytest.param({"block_size": 8, "max_num_batched_tokens": 8, "max_num_seqs": 8}, id="chunks-of-8-tokens"),
        pytest.param({"enable_prefix_caching": False, "use_fused_decoder": False}, id="modules"),
    ],
)
def test_beams_equal_a_plain_search(settings: dict[str, Any], make_shallow: Make, expected: Any) -> None:
    with make_shallow(**settings) as llm:
        check(llm.beam_search(FOUND, PARAMS), expected)
        stats = llm.stats()
        assert stats.blocks_used == 0
        assert stats.running == stats.waiting == 0


def test_beams_equal_those_of_transformers(make_shallow: Make, oracle: Oracle, expected: Any) -> None:
    """Without end-of-text tokens the rules are the same."""
    ids = FOUND[2]["prompt_token_ids"]
    config = GenerationConfig(
        num_beams=WIDTH, num_return_sequences=WIDTH, max_new_tokens=LENGTH, do_sample=False, pad_token_id=0
    )
    found = oracle.model.generate(torch.tensor([ids]), generation_config=config, eos_token_id=None)
    assert found.tolist() == [tokens for tokens, _ in expected[2]]


def test_preempted_beams_are_the_same(make_shallow: Make, greedy: Any, expected: Any) -> None:
    """They share a pool that does not hold them all, among others that come and go."""
    with make_shallow(block_size=8, num_device_blocks=24, max_model_len=64, max_num_seqs=16) as llm:
        for number, prompt in enumerate(FOUND):
            llm.engine.add_request(f"beside-{number}", prompt, greedy(20))
        check(llm.beam_search(FOUND, PARAMS), expected)
        assert llm.stats().preemptions > 0


def test_a_sleep_in_the_middle_changes_nothing(make_shallow: Make, expected: Any) -> None:
    with make_shallow() as llm:
        found: list[Any] = []
        recipient = Recipient(lambda make: found.append(make()), found.append)
        llm.engine.submit_beam_search("search", FOUND[2], PARAMS, recipient).result()
        for _ in range(5):
            llm.engine.step()
        llm.sleep(level=1, mode="keep")
        llm.wake_up()
        while llm.engine.has_unfinished_requests():
            llm.engine.step()
        (output,) = found
        assert [list(one.token_ids) for one in output.outputs] == [
            tokens[len(FOUND[2]["prompt_token_ids"]) :] for tokens, _ in expected[2]
        ]


@pytest.fixture(scope="module")
def ending(shallow: Model, expected: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, set[int]]]:
    """The model with end-of-text tokens that its beams come upon."""
    ends = {tokens[-place] for beams in expected[:2] for place, (tokens, _) in zip((4, 7), beams, strict=False)}
    folder = tmp_path_factory.mktemp("ending") / "model"
    shutil.copytree(shallow.path, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": sorted(ends)}))
    with engine(str(folder), skip_tokenizer_init=True) as llm:
        yield llm, ends


@pytest.mark.parametrize("length_penalty", [1.0, 0.0, -1.0, 2.5])
def test_end_of_text_completes_beams(length_penalty: float, ending: tuple[LLM, set[int]], oracle: Oracle) -> None:
    llm, ends = ending
    assert len(ends) == WIDTH, "more would need more candidates than vLLM takes"
    params = BeamSearchParams(beam_width=WIDTH, max_tokens=LENGTH, length_penalty=length_penalty)
    outputs = llm.beam_search(FOUND[:2], params)
    check(outputs, [plain_search(oracle, one["prompt_token_ids"], ends, length_penalty) for one in FOUND[:2]])
    reasons = {one.finish_reason for output in outputs for one in output.sequences}
    assert ("stop" in reasons) == (length_penalty <= 1)
    assert all(
        (one.finish_reason == "stop") == (one.tokens[-1] in ends) and one.stop_reason in (None, one.tokens[-1])
        for output in outputs
        for one in output.sequences
    )


def test_a_search_that_is_decided_ends_early(ending: tuple[LLM, set[int]]) -> None:
    llm, _ = ending
    params = BeamSearchParams(beam_width=WIDTH, max_tokens=400, length_penalty=0.0)
    before = llm.stats().steps
    llm.beam_search(FOUND[0], params)
    assert llm.stats().steps - before < 300


def test_the_asynchronous_interface_leaves_the_end_out(ending: tuple[LLM, set[int]]) -> None:
    llm, ends = ending
    params = BeamSearchParams(beam_width=WIDTH, max_tokens=LENGTH)
    (whole,) = llm.beam_search(FOUND[0], params)
    settings = {"dtype": "float32", "backend": "cpu", "max_model_len": 256, "num_device_blocks": 64}

    async def search() -> list[RequestOutput]:
        name = llm.info.model
        async with await AsyncLLM.create(name, skip_tokenizer_init=True, engine_process=True, **settings) as made:
            return [output async for output in made.generate(FOUND[0], params)]

    (output,) = asyncio.run(search())
    prompt = FOUND[0]["prompt_token_ids"]
    without = [[token for token in one.tokens[len(prompt) :] if token not in ends] for one in whole.sequences]
    assert [list(one.token_ids) for one in output.outputs] == without
    assert [one.finish_reason for one in output.outputs] == [one.finish_reason for one in whole.sequences]


def test_what_cannot_be_searched_is_refused(ending: tuple[LLM, set[int]]) -> None:
    llm, _ = ending
    with pytest.raises(InvalidSamplingParams, match="257 beams"):
        llm.beam_search(FOUND[0], BeamSearchParams(beam_width=257, max_tokens=4))
    with pytest.raises(InvalidSamplingParams, match="beam_width"):
        BeamSearchParams(beam_width=0, max_tokens=4)
    with pytest.raises(InvalidRequest, match="BeamSearchParams"):
        llm.beam_search(FOUND[0], {"beam_width": 4})  # type: ignore[arg-type]
    long = {"prompt_token_ids": [5] * 1000}
    with pytest.raises(RequestNeverFits, match="beams"):
        llm.beam_search([FOUND[0], long], BeamSearchParams(beam_width=100, max_tokens=4))
    assert llm.stats().blocks_used == 0
