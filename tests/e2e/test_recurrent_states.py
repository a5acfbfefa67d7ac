"""Sequences with recurrent states: transformers' tokens, whatever becomes of a sequence between its first token and its last."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hardpoint import LLM, BeamSearchParams, LLMEngine, SamplingParams
from hardpoint.engine.config import EngineConfig
from hardpoint.interfaces.errors import CapabilityRefused

CONTEXT = 256
SHAPE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
LENGTH = 24
_SETTINGS: dict[str, Any] = {
    "backend": "cpu",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "block_size": 8,
    "num_device_blocks": 400,
    "max_model_len": CONTEXT,
    "max_num_seqs": 16,
}
_PARAMS = {"temperature": 0.0, "max_tokens": LENGTH, "ignore_eos": True}


def _prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    shared = rng.integers(3, 128, 70).tolist()
    alone = [rng.integers(3, 128, size).tolist() for size in (1, 2, 17, 90)]
    return [*alone, [*shared, 5, 9], shared + [7] * 20, shared[:40]]


@pytest.fixture(scope="module")
def model_and_tokens(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[list[int]]]:
    """A seeded model, and what transformers generates for each prompt."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder: Path = tmp_path_factory.mktemp("qwen3_next")
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_next", **SHAPE), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    made.save_pretrained(folder)
    tokens = []
    for prompt in _prompts():
        ids = torch.tensor([prompt])
        found = made.generate(ids, max_new_tokens=LENGTH, min_new_tokens=LENGTH, do_sample=False, eos_token_id=None)
        tokens.append(found[0, len(prompt) :].tolist())
    assert len({tuple(one) for one in tokens}) == len(tokens), "the model tells its prompts apart"
    return str(folder), tokens


def _generated(llm: LLM, **sampling: Any) -> list[list[list[int]]]:
    given: Any = [{"prompt_token_ids": tokens} for tokens in _prompts()]
    outputs = llm.generate(given, SamplingParams(**_PARAMS, **sampling))
    return [[list(fork.token_ids) for fork in output.outputs] for output in outputs]


@pytest.mark.parametrize(
    ("settings", "forks"),
    [
        ({}, 1),
        ({}, 3),
        ({"max_num_batched_tokens": 19, "max_num_seqs": 19}, 2),
        ({"max_num_seqs": 2}, 1),
        ({"executor": "multi_process", "tensor_parallel_size": 2}, 2),
    ],
    ids=["together", "forks", "chunks", "two rows", "two ranks"],
)
def test_tokens_are_transformers(
    model_and_tokens: tuple[str, list[list[int]]], settings: dict[str, Any], forks: int
) -> None:
    model, expected = model_and_tokens
    with LLM(model, **_SETTINGS | settings) as llm:
        assert _generated(llm, n=forks) == [[tokens] * forks for tokens in expected]
        assert llm.stats().prefix_hits == 0


def test_beams_have_the_states_of_what_they_are_made_of(model_and_tokens: tuple[str, list[list[int]]]) -> None:
    """A beam's log probabilities, one step after the other, are those of its tokens as one prompt."""
    model, _ = model_and_tokens
    with LLM(model, **_SETTINGS) as llm:
        prompts: Any = [{"prompt_token_ids": tokens} for tokens in _prompts()[2:5]]
        found = llm.beam_search(prompts, BeamSearchParams(beam_width=4, max_tokens=10, ignore_eos=True))
        for prompt, output in zip(prompts, found, strict=True):
            length = len(prompt["prompt_token_ids"])
            beams: Any = [{"prompt_token_ids": list(one.tokens)} for one in output.sequences]
            scored = llm.generate(beams, SamplingParams(max_tokens=1, prompt_logprobs=0))
            for beam, given, one in zip(output.sequences, beams, scored, strict=True):
                assert one.prompt_logprobs is not None
                values = zip(given["prompt_token_ids"], one.prompt_logprobs, strict=True)
                total = sum(position[token].logprob for token, position in list(values)[length:])
                assert beam.cum_logprob == pytest.approx(total, abs=1e-3)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preempted_sequences_are_computed_again(model_and_tokens: tuple[str, list[list[int]]], mode: Any) -> None:
    model, expected = model_and_tokens
    with LLM(model, **_SETTINGS | {"num_device_blocks": 34, "preemption_mode": mode, "swap_space": 1}) as llm:
        assert _generated(llm) == [[tokens] for tokens in expected]
        assert llm.stats().preemptions > 0
        assert llm.info.num_host_blocks == 0


@pytest.mark.parametrize("kv", ["discard", "preserve"])
def test_a_sleep_in_the_middle_changes_no_token(model_and_tokens: tuple[str, list[list[int]]], kv: Any) -> None:
    model, expected = model_and_tokens
    engine = LLMEngine(EngineConfig(model=model, **_SETTINGS))
    try:
        for number, tokens in enumerate(_prompts()):
            engine.add_request(str(number), {"prompt_token_ids": tokens}, SamplingParams(**_PARAMS))
        for _ in range(8):
            engine.step()
        engine.sleep(level=1, mode="keep", kv=kv)
        engine.wake_up()
        found = {}
        while engine.has_unfinished_requests():
            found |= {output.request_id: output for output in engine.step() if output.finished}
        assert [list(found[str(number)].outputs[0].token_ids) for number in range(len(expected))] == expected
    finally:
        engine.shutdown()


def test_what_does_not_go_with_states_is_said_or_refused(
    model_and_tokens: tuple[str, list[list[int]]], caplog: pytest.LogCaptureFixture
) -> None:
    model, _ = model_and_tokens
    with caplog.at_level(logging.INFO, logger="hardpoint"), LLM(model, **_SETTINGS):
        assert "prefixes are not cached, and nothing is swapped" in caplog.text
    with pytest.raises(CapabilityRefused, match="one stage only"):
        LLM(model, **_SETTINGS, pipeline_parallel_size=2)
