"""Tiers below the prefix cache: prompts that the device had to forget are found again, with the same logits to the bit."""

from __future__ import annotations

import errno
import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hardpoint import LLM, SamplingParams
from hardpoint.interfaces.errors import CapabilityRefused, ConfigError
from hardpoint.worker.kv_tiers import KVTiers
from hardpoint_conformance.tiny_model import Model, Shape, tiny_model

Make = Callable[..., Any]

SETTINGS = {"max_model_len": 320, "num_device_blocks": 14, "block_size": 32, "max_num_seqs": 4}
"""The device has room for one prompt at a time."""
LENGTH = 300
CACHED = 288
PARAMS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=4)
PROMPTS = [{"prompt_token_ids": np.random.default_rng(i).integers(0, 2000, LENGTH).tolist()} for i in range(3)]


def serve(llm: LLM, prompts: list[Any] = PROMPTS) -> tuple[list[Any], list[int | None]]:
    """Serve prompts one by one; returns tokens with log probabilities, and how many tokens of each prompt were cached."""
    answers, cached = [], []
    for prompt in prompts:
        (output,) = llm.generate([prompt], PARAMS, use_tqdm=False)
        (one,) = output.outputs
        places = [[(token, value.logprob) for token, value in place.items()] for place in one.logprobs or ()]
        answers.append((list(one.token_ids), places))
        cached.append(output.num_cached_tokens)
    return answers, cached


@pytest.fixture(scope="module")
def expected(make_shallow: Make) -> list[Any]:
    """Answers of an engine without tiers, which computes every prompt each time."""
    with make_shallow(**SETTINGS) as llm:
        answers, cached = serve(llm)
        assert (answers, cached) == serve(llm)
        assert cached == [0, 0, 0]
        return answers


def test_evicted_prompts_are_found_until_what_they_were_computed_with_changes(
    make_shallow: Make, shallow: Model, expected: list[Any]
) -> None:
    found, computed = (expected, [CACHED] * 3), (expected, [0] * 3)
    with make_shallow(**SETTINGS, kv_offload_gib=0.02) as llm:
        assert serve(llm) == computed
        assert serve(llm) == found
        stats = llm.stats()
        assert stats.offload_host_bytes == stats.offload_host_blocks * (llm.info.kv_bytes // llm.info.num_device_blocks)
        assert (stats.offload_host_hits, stats.offload_disk_hits, stats.offload_failures) == (27, 0, 0)
        assert stats.offload_queries == 54
        assert stats.offload_seconds > 0
        assert any(m.name == "hardpoint:kv_offload_host_hits" and m.value == 27 for m in llm.get_metrics())
        # What the device has when it goes to sleep is kept too.
        for settings in ({"level": 1}, {"level": 2, "tags": {"kv_cache"}}, {"level": 1, "kv": "preserve"}):
            llm.sleep(**settings)
            llm.wake_up()
            assert serve(llm) == found
        # Salts stay apart, and a reset forgets them all.
        salted = [prompt | {"cache_salt": "of a tenant"} for prompt in PROMPTS]
        assert serve(llm, salted) == computed
        assert serve(llm, salted) == found
        llm.reset_prefix_cache()
        assert serve(llm) == computed
        assert serve(llm, salted) == computed
        assert serve(llm) == found
        # Other weights, and the first ones again.
        name = "model.layers.0.mlp.down_proj.weight"
        llm.update_weights([(name, shallow.weights[name] * 2)])
        others, cached = serve(llm)
        assert cached == [0, 0, 0]
        assert others != expected
        llm.sleep(level=2)
        llm.wake_up()
        llm.reload_weights()
        assert serve(llm) == computed
        assert serve(llm) == found


def test_what_the_host_evicts_is_found_on_disk_and_nothing_is_left_there(
    make_shallow: Make, expected: list[Any], tmp_path: Path
) -> None:
    folder = tmp_path / "tiers"
    disk = {"kv_offload_disk_gib": 0.02, "kv_offload_path": str(folder)}
    # The host has room for two prompts.
    with make_shallow(**SETTINGS, kv_offload_gib=0.0018, **disk) as llm:
        assert serve(llm) == (expected, [0] * 3)
        assert serve(llm) == (expected, [CACHED] * 3)
        stats = llm.stats()
        assert stats.offload_disk_blocks > 0
        assert stats.offload_disk_hits > 0
        assert (stats.offload_failures, stats.offload_io_errors) == (0, 0)
        assert folder.stat().st_mode & 0o777 == 0o700
        # No name by which anybody could open it.
        assert os.listdir(folder) == []
    assert os.listdir(folder) == []


def _damage(llm: LLM) -> int:
    """Change a byte in every block of the host's tier; returns how many there are."""
    tiers = [one for one in gc.get_objects() if isinstance(one, KVTiers)]
    for one in tiers:
        one.host[:, 77] ^= 1
    return len(tiers)


def test_damaged_blocks_are_computed_again(make_shallow: Make, expected: list[Any]) -> None:
    with make_shallow(**SETTINGS, kv_offload_gib=0.02) as llm:
        serve(llm)
        assert _damage(llm) > 0
        # What was on the device is good: the third prompt, and the beginning of the second.
        assert serve(llm) == (expected, [0, 128, CACHED])
        stats = llm.stats()
        assert stats.offload_checksum_failures == stats.offload_failures == 14
        assert serve(llm) == (expected, [CACHED] * 3)


@pytest.mark.parametrize("fault", ["full", "short", "unreadable", "damaged"])
def test_a_disk_that_fails_costs_time_only(
    make_shallow: Make, expected: list[Any], tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, read = os.pwrite, os.preadv
    calls = []

    def pwrite(file: int, block: bytes, offset: int) -> int:
        calls.append(offset)
        if fault == "full" and len(calls) > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, block[:100] if fault == "short" else block, offset)

    def preadv(file: int, to: list[Any], offset: int) -> int:
        if fault == "unreadable":
            raise OSError(errno.EIO, "Input/output error")
        count = read(file, to, offset)
        if fault == "damaged":
            to[0][5] ^= 1
        return count

    disk = {"kv_offload_disk_gib": 0.02, "kv_offload_path": str(tmp_path)}
    with make_shallow(**SETTINGS, kv_offload_gib=0.0018, **disk) as llm:
        monkeypatch.setattr(os, "pwrite", pwrite)
        monkeypatch.setattr(os, "preadv", preadv)
        # Blocks are written behind the steps, and reports of it come with later steps.
        for _ in range(200):
            answers, _ = serve(llm)
            assert answers == expected
            stats = llm.stats()
            seen = stats.offload_checksum_failures if fault == "damaged" else stats.offload_io_errors
            if seen and (fault not in ("full", "short") or stats.offload_disk_blocks <= 3):
                break
            time.sleep(0.02)
        else:
            pytest.fail(f"the fault is not seen: {stats}")


def test_forks_beams_preemptions_and_a_process_of_its_own(make_shallow: Make) -> None:
    params = [
        SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True),
    ]
    prompts = [{"prompt_token_ids": one["prompt_token_ids"][:100]} for one in PROMPTS]
    more = SETTINGS | {"max_num_seqs": 8, "preemption_mode": "recompute"}

    def outputs(llm: LLM) -> list[Any]:
        return [
            [list(one.token_ids) for one in output.outputs] for output in llm.generate(prompts, params, use_tqdm=False)
        ]

    with make_shallow(**more | {"num_device_blocks": 100}) as llm:
        wanted = outputs(llm)
    with make_shallow(**more, kv_offload_gib=0.02, engine_process=True) as llm:
        for _ in range(2):
            assert outputs(llm) == wanted
        stats = llm.stats()
        assert stats.preemptions > 0
        assert stats.offload_host_hits > 0


def test_an_fp8_cache_is_kept_as_it_is(make_shallow: Make) -> None:
    settings = SETTINGS | {"kv_dtype": "fp8"}
    with make_shallow(**settings) as llm:
        wanted, _ = serve(llm)
    with make_shallow(**settings, kv_offload_gib=0.02) as llm:
        assert serve(llm) == (wanted, [0] * 3)
        assert serve(llm) == (wanted, [CACHED] * 3)


def test_a_draft_models_keys_come_back_too(make_shallow: Make, shallow: Model, expected: list[Any]) -> None:
    """A model that guesses for itself is always right, as long as it has its own keys and values."""
    speculation = {"method": "draft_model", "model": shallow.path, "num_speculative_tokens": 2, "adaptive": False}
    with make_shallow(**SETTINGS, kv_offload_gib=0.02, speculative_config=speculation) as llm:
        for cached in (0, CACHED):
            answers, found = serve(llm)
            assert [tokens for tokens, _ in answers] == [tokens for tokens, _ in expected]
            assert found == [cached] * 3
        stats = llm.stats()
        assert stats.accepted_tokens == stats.draft_tokens > 0


def test_what_cannot_be_is_refused(make_shallow: Make, tmp_path: Path) -> None:
    for settings, words in (
        ({"kv_offload_disk_gib": 1, "kv_offload_path": "x"}, "without kv_offload_gib"),
        ({"kv_offload_gib": 1, "kv_offload_disk_gib": 1}, "need a folder and a size"),
        ({"kv_offload_gib": 1, "kv_offload_path": "x"}, "need a folder and a size"),
        ({"kv_offload_gib": 1, "enable_prefix_caching": False}, "prefix cache"),
        ({"kv_offload_gib": 1e-6}, "no room for one"),
    ):
        with pytest.raises(ConfigError, match=words), make_shallow(**settings):
            pass
    file = tmp_path / "file"
    file.touch()
    disk = {"kv_offload_gib": 0.01, "kv_offload_disk_gib": 0.01, "kv_offload_path": str(file / "below")}
    with pytest.raises(ConfigError, match="cannot hold KV blocks"), make_shallow(**disk):
        pass
    windowed = tiny_model(Shape(hidden=64, intermediate=64, layers=2, heads=2, kv_heads=1, vocab=256, window=64))
    with pytest.raises(CapabilityRefused, match="windows"):
        LLM(windowed.path, backend="cpu", skip_tokenizer_init=True, kv_offload_gib=0.01)
