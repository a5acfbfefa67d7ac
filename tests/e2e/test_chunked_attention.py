"""Llama 4's layers see the keys of their own chunk: transformers' tokens, over chunks' borders, in less memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hardpoint import LLM, LLMEngine, SamplingParams
from hardpoint.engine.config import EngineConfig
from hardpoint.interfaces.errors import CapabilityRefused

CONTEXT, CHUNK, BLOCK, LENGTH = 256, 32, 8, 40
SHAPE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 40,
    "intermediate_size_mlp": 80,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "num_local_experts": 4,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": CHUNK,
    # So that queries without positions grow within a few tokens.
    "floor_scale": 16,
    "attn_scale": 0.5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_SETTINGS: dict[str, Any] = {
    "backend": "cpu",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "block_size": BLOCK,
    "num_device_blocks": 600,
    "max_model_len": CONTEXT,
    "max_num_seqs": 16,
}
_PARAMS = {"temperature": 0.0, "max_tokens": LENGTH, "ignore_eos": True}


def _prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    shared = rng.integers(3, 128, 70).tolist()
    # Decodes begin before a border, on it and behind it.
    alone = [rng.integers(3, 128, size).tolist() for size in (1, 31, 32, 33, 100)]
    return [*alone, [*shared, 5], [*shared, 9, 4]]


@pytest.fixture(scope="module")
def model_and_tokens(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[list[int]]]:
    """A seeded model, and what transformers generates for each prompt."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder: Path = tmp_path_factory.mktemp("llama4")
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama4_text", **SHAPE)
    made = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    made.save_pretrained(folder)
    with LLM(str(folder), **_SETTINGS) as llm:
        guesses = [tokens for (tokens,) in _generated(llm)]
    tokens = [_greedy(made, *given) for given in zip(_prompts(), guesses, strict=True)]
    assert len({tuple(one) for one in tokens}) == len(tokens), "the model tells its prompts apart"
    return str(folder), tokens


@torch.no_grad()
def _greedy(model: Any, prompt: list[int], guess: list[int]) -> list[int]:
    """Return the tokens that a model generates: it is run once for a right guess, and once more for each token that is wrong."""
    found = list(guess)
    while True:
        inputs = torch.tensor([prompt + found[:-1]])
        chosen = model(input_ids=inputs, use_cache=False).logits[0, len(prompt) - 1 :].argmax(-1).tolist()
        if chosen == found:
            return found
        wrong = next(at for at, (one, other) in enumerate(zip(chosen, found, strict=True)) if one != other)
        found[wrong] = chosen[wrong]


def _generated(llm: LLM, **sampling: Any) -> list[list[list[int]]]:
    given: Any = [{"prompt_token_ids": tokens} for tokens in _prompts()]
    outputs = llm.generate(given, SamplingParams(**_PARAMS, **sampling))
    return [[list(fork.token_ids) for fork in output.outputs] for output in outputs]


@pytest.mark.parametrize(
    ("settings", "forks"),
    [
        ({}, 1),
        ({"max_num_batched_tokens": 19}, 2),
        ({"num_device_blocks": 110, "max_num_seqs": 5}, 1),
        ({"executor": "multi_process", "tensor_parallel_size": 2}, 1),
    ],
    ids=["together", "pieces and forks", "few blocks", "two ranks"],
)
def test_tokens_are_transformers(
    model_and_tokens: tuple[str, list[list[int]]], settings: dict[str, Any], forks: int
) -> None:
    model, expected = model_and_tokens
    with LLM(model, **_SETTINGS | settings) as llm:
        assert _generated(llm, n=forks) == [[tokens] * forks for tokens in expected]
        assert _generated(llm, n=forks) == [[tokens] * forks for tokens in expected], "from the prefix cache"


def test_a_context_within_one_chunk_needs_no_groups(model_and_tokens: tuple[str, list[list[int]]]) -> None:
    model, expected = model_and_tokens
    with LLM(model, **_SETTINGS | {"max_model_len": CHUNK, "disable_hybrid_kv_cache_manager": True}) as llm:
        given: Any = [{"prompt_token_ids": _prompts()[0]}]
        output = llm.generate(given, SamplingParams(**_PARAMS | {"max_tokens": 20}))[0].outputs[0]
        assert list(output.token_ids) == expected[0][:20]


def test_one_block_table_for_all_layers_is_refused(model_and_tokens: tuple[str, list[list[int]]]) -> None:
    with pytest.raises(CapabilityRefused, match="attend in chunks"):
        LLM(model_and_tokens[0], **_SETTINGS, disable_hybrid_kv_cache_manager=True)


def test_a_sequence_gives_back_the_blocks_of_past_chunks(model_and_tokens: tuple[str, list[list[int]]]) -> None:
    engine = LLMEngine(EngineConfig(model=model_and_tokens[0], **_SETTINGS, enable_prefix_caching=False))
    try:
        params = SamplingParams(max_tokens=100, ignore_eos=True)
        engine.add_request("0", {"prompt_token_ids": _prompts()[4]}, params)
        used = []
        while engine.has_unfinished_requests():
            engine.step()
            used.append(engine.stats().blocks_used)
    finally:
        engine.shutdown()
    # One layer of five keeps all keys; the others keep those of a chunk, and are in groups of one.
    assert len(used) > 50
    assert max(used[3:]) <= CONTEXT // BLOCK + 4 * (CHUNK // BLOCK + 2)
