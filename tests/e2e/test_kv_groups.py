"""Layers of unlike windows have block tables of their own: the same tokens as with one table, in less memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conformance_tests.tests.recorded_graphs import MixedAttention, Recorder, graphed
from hardpoint import LLM, LLMEngine, SamplingParams
from hardpoint.engine.config import EngineConfig
from hardpoint.interfaces.errors import CapabilityRefused
from hardpoint.plugins import Resolved

WINDOW, CONTEXT, BLOCK = 16, 256, 8
SHAPE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "sliding_window": WINDOW,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FIVE_TO_ONE = [*["sliding_attention"] * 5, "full_attention", *["sliding_attention"] * 2]
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "gemma3_text": ({"num_hidden_layers": 8, "layer_types": FIVE_TO_ONE, "query_pre_attn_scalar": 24}, 8),
    "gpt_oss": ({"num_hidden_layers": 4, "num_local_experts": 4, "num_experts_per_tok": 2}, 2),
    "mistral": ({"num_hidden_layers": 2}, 1),
}
"""By model type: its own settings, and how many KV cache groups it has."""


@pytest.fixture(scope="module", params=list(MODELS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(kind: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    from transformers import AutoConfig, AutoModelForCausalLM

    folder: Path = tmp_path_factory.mktemp(kind)
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SHAPE, **MODELS[kind][0]), dtype=torch.float32)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0.0, 0.15 if parameter.ndim > 1 else 0.05)
    made.save_pretrained(folder)
    return str(folder)


_SETTINGS: dict[str, Any] = {
    "backend": "cpu",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "block_size": BLOCK,
    "num_device_blocks": 800,
    "max_model_len": CONTEXT,
}


def _engine(model: str, **settings: Any) -> LLM:
    return LLM(model, **(_SETTINGS | settings))


def _prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    shared = rng.integers(3, 128, 60).tolist()
    return [
        *[shared[:cut] + rng.integers(3, 128, size).tolist() for cut, size in ((60, 5), (60, 40), (33, 9), (0, 120))],
        *[rng.integers(3, 128, size).tolist() for size in (1, 15, 16, 17, 90, 150)],
    ]


def _tokens(llm: LLM, **sampling: Any) -> list[list[list[int]]]:
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, **sampling)
    given: Any = [{"prompt_token_ids": tokens} for tokens in _prompts()]
    return [[list(fork.token_ids) for fork in output.outputs] for output in llm.generate(given, params)]


@pytest.fixture(scope="module")
def expected(model: str) -> list[list[list[int]]]:
    with _engine(model, disable_hybrid_kv_cache_manager=True) as llm:
        tokens = _tokens(llm)
    assert len({tuple(fork) for output in tokens for fork in output}) > 5, "the model tells its prompts apart"
    return tokens


def test_guesses_change_no_token(model: str, expected: list[list[list[int]]]) -> None:
    """A draft model needs all keys: it is refused where blocks outside of windows are given back."""
    lookup = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3, "adaptive": False}
    with _engine(model, speculative_config=lookup) as llm:
        assert _tokens(llm) == expected
        assert llm.stats().accepted_tokens > 0
    itself = {"model": model, "num_speculative_tokens": 3, "adaptive": False}
    with pytest.raises(CapabilityRefused, match="windows"):
        _engine(model, speculative_config=itself)
    with _engine(model, speculative_config=itself, disable_hybrid_kv_cache_manager=True) as llm:
        assert _tokens(llm) == expected
        assert llm.stats().accepted_tokens == llm.stats().draft_tokens > 0


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_fused_decoder": False},
        {"block_size": 16},
        {"max_num_batched_tokens": 20, "max_num_seqs": 20},
        {"enable_prefix_caching": False},
    ],
    ids=lambda settings: ",".join(f"{name}={value}" for name, value in settings.items()) or "groups",
)
def test_tokens_are_those_of_one_block_table(model: str, expected: Any, settings: dict[str, Any]) -> None:
    with _engine(model, **settings) as llm:
        assert _tokens(llm) == expected
        assert _tokens(llm) == expected, "with a prefix cache that the first round filled"


@pytest.mark.parametrize("kind", ["gpt_oss"], indirect=True)  # one model with several groups is enough
def test_captured_steps_have_the_blocks_of_every_group(
    model: str, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = graphed(MixedAttention)
    monkeypatch.setattr(
        "hardpoint.engine.startup.resolve_backend", lambda *args, **named: Resolved(target.descriptor, target.device)
    )
    Recorder.replays.clear()
    with _engine(model, use_fused_decoder=False, max_num_batched_tokens=64, max_num_seqs=6) as llm:
        assert _tokens(llm) == expected
    assert min(Recorder.replays) == -64
    assert max(Recorder.replays) > 0


def test_ranks_are_told_the_blocks_of_every_group(model: str, expected: Any) -> None:
    with _engine(model, executor="multi_process", tensor_parallel_size=2) as llm:
        assert _tokens(llm) == expected
        assert _tokens(llm) == expected


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_tokens_survive_preemption(model: str, kind: str, mode: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    given: Any = [{"prompt_token_ids": tokens[:20]} for tokens in _prompts()] * 2

    def tokens(**settings: Any) -> tuple[list[list[int]], int]:
        with _engine(model, **settings) as llm:
            return [
                list(output.outputs[0].token_ids) for output in llm.generate(given, params)
            ], llm.stats().preemptions

    expected, _ = tokens(disable_hybrid_kv_cache_manager=True)
    found, preemptions = tokens(num_device_blocks=MODELS[kind][1] * (CONTEXT // BLOCK), preemption_mode=mode)
    assert found == expected
    assert preemptions > 0


def test_forks_copy_what_they_write_in_every_group(model: str, expected: Any) -> None:
    with _engine(model) as llm:
        assert _tokens(llm, n=3) == [forks * 3 for forks in expected]


@pytest.mark.parametrize("kv", ["preserve", "discard"])
def test_a_sleep_in_the_middle_changes_no_token(model: str, expected: Any, kv: str) -> None:
    engine = LLMEngine(EngineConfig(model=model, **_SETTINGS))
    try:
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        for number, tokens in enumerate(_prompts()):
            engine.add_request(str(number), {"prompt_token_ids": tokens}, params)
        found: dict[str, list[int]] = {}
        for step in range(100):
            if step == 20:
                engine.sleep(mode="keep", kv=kv)
                engine.wake_up()
            for output in engine.step():
                found[output.request_id] = list(output.outputs[0].token_ids)
        assert not engine.has_unfinished_requests()
    finally:
        engine.shutdown()
    assert [[found[str(number)]] for number in range(len(expected))] == expected


def test_a_long_sequence_keeps_its_window_in_sliding_groups(model: str, kind: str) -> None:
    groups = MODELS[kind][1]
    full = 0 if kind == "mistral" else 1
    engine = LLMEngine(EngineConfig(model=model, **_SETTINGS, enable_prefix_caching=False))
    try:
        params = SamplingParams(max_tokens=80, ignore_eos=True)
        engine.add_request("0", {"prompt_token_ids": _prompts()[-1]}, params)
        used = []
        while engine.has_unfinished_requests():
            engine.step()
            used.append(engine.stats().blocks_used)
    finally:
        engine.shutdown()
    assert len(used) > 50
    assert max(used[3:]) <= full * (CONTEXT // BLOCK) + (groups - full) * (WINDOW // BLOCK + 2)
