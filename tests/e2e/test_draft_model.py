"""A draft model's guesses change no token, and are right wherever its draws are the model's.

A model that guesses for itself is always right: by that, its keys and values are seen to be in place, in blocks of the prefix cache,
behind guesses that were all taken, after a preemption, and after a sleep. Another model of random weights is right as chance has it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from hardpoint import LLM, SamplingParams
from hardpoint.interfaces.errors import CapabilityRefused, ConfigError, WeightsMissing
from hardpoint_conformance.tiny_model import Model, tiny_model, write_checkpoint
from tests.e2e.conftest import SHALLOW
from tests.e2e.test_invariance import PROMPTS
from tests.e2e.test_speculation import ASKED, params, results

Make = Callable[..., AbstractContextManager[LLM]]

OTHER = replace(SHALLOW, layers=1, seed=SHALLOW.seed + 1)


def by(model: Model, **more: Any) -> dict[str, Any]:
    return {"method": "draft_model", "model": model.path, "num_speculative_tokens": 4, "adaptive": False} | more


def mixed(seeds: range, max_tokens: int = 40) -> list[SamplingParams]:
    return [params(temperature=0.8 * (seed % 2), seed=seed, max_tokens=max_tokens) for seed in seeds]


@pytest.fixture(scope="module")
def expected(make_shallow: Make) -> list[Any]:
    with make_shallow() as llm:
        return results(llm)


@pytest.mark.parametrize(
    ("guesser", "settings"),
    [
        pytest.param(SHALLOW, {}, id="itself"),
        pytest.param(OTHER, {}, id="another"),
        pytest.param(OTHER, {"use_fused_decoder": False}, id="modules"),
        pytest.param(OTHER, {"max_num_batched_tokens": 20, "max_num_seqs": 20}, id="chunks-within-20-tokens"),
        pytest.param(OTHER, {"block_size": 8, "num_device_blocks": 20, "max_model_len": 80}, id="preempted"),
        pytest.param(SHALLOW, {"engine_process": True, "executor": "multi_process"}, id="processes"),
        pytest.param(SHALLOW, {"tensor_parallel_size": 3, "dtype": "float32"}, id="ranks"),
        pytest.param(OTHER, {"tensor_parallel_size": 2, "dtype": "float32"}, id="another-over-ranks"),
    ],
)
def test_tokens_are_those_without(
    guesser: Any, settings: dict[str, Any], make_shallow: Make, expected: list[Any]
) -> None:
    with make_shallow(**settings, speculative_config=by(tiny_model(guesser))) as llm:
        assert results(llm) == expected
        stats = llm.stats()
        assert 0 < stats.accepted_tokens <= stats.draft_tokens
        assert guesser is OTHER or stats.accepted_tokens == stats.draft_tokens
        assert ("num_device_blocks" in settings) is (stats.preemptions > 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_seed_draws_the_same_tokens_through_swaps(dtype: str, make_shallow: Make) -> None:
    """The tokens that a model which guesses for itself draws are all guessed; a text needs a step for each five."""
    tight = {"block_size": 8, "num_device_blocks": 40, "max_model_len": 144, "preemption_mode": "swap"}
    found, steps = [], []
    for guesser in (None, OTHER, SHALLOW):
        speculation = None if guesser is None else by(tiny_model(guesser))
        with make_shallow(dtype=dtype, enable_prefix_caching=False, speculative_config=speculation, **tight) as llm:
            outputs = llm.generate(PROMPTS, mixed(range(len(PROMPTS))))
            found.append([list(one.outputs[0].token_ids) for one in outputs])
            stats = llm.stats()
            assert stats.preemptions > 0
            steps.append(stats.steps)
    assert found[0] == found[1] == found[2]
    assert stats.accepted_tokens == stats.draft_tokens
    assert steps[2] < steps[0] / 3


def test_what_it_did_not_compute_where_there_was_no_room_for_guesses_comes_later(make_shallow: Make) -> None:
    """As long as all sequences run, their tokens fill a step; the guesses that come then need the tokens of the steps before."""
    asked = [params(temperature=0.8 * (n % 2), seed=n, max_tokens=10 + 2 * n) for n in range(len(PROMPTS))]
    found = []
    for speculation in (None, by(tiny_model(SHALLOW))):
        with make_shallow(max_num_batched_tokens=20, max_num_seqs=20, speculative_config=speculation) as llm:
            found.append([list(one.outputs[0].token_ids) for one in llm.generate(PROMPTS, asked)])
            stats = llm.stats()
    assert found[0] == found[1]
    assert stats.accepted_tokens == stats.draft_tokens > 20


@pytest.mark.parametrize("settings", [{}, {"tensor_parallel_size": 2, "dtype": "float32"}], ids=["alone", "ranks"])
def test_its_memory_sleeps_and_wakes_with_the_model(
    settings: dict[str, Any], make_shallow: Make, shallow: Model
) -> None:
    with make_shallow(**settings) as llm:
        alone = llm.info
    asked = mixed(range(2), 24)
    with make_shallow(**settings, speculative_config=by(shallow)) as llm:
        assert llm.info.weight_bytes == 2 * alone.weight_bytes
        assert llm.info.kv_bytes == 2 * alone.kv_bytes

        def generate() -> list[list[int]]:
            before = llm.stats()
            outputs = llm.generate(PROMPTS[13:15], asked)
            after = llm.stats()
            drafted = after.draft_tokens - before.draft_tokens
            assert drafted == after.accepted_tokens - before.accepted_tokens > 0
            return [list(one.outputs[0].token_ids) for one in outputs]

        first = generate()
        assert generate() == first, "from the prefix cache"
        report = llm.sleep(level=1)
        assert report.memory is not None
        assert report.memory.unmapped >= llm.info.weight_bytes + llm.info.kv_bytes
        llm.wake_up()
        assert generate() == first
        llm.sleep(level=2)
        llm.wake_up()
        with pytest.raises(WeightsMissing):
            llm.generate(PROMPTS[13:15], asked)
        llm.update_weights(shallow.weights.items())
        assert generate() == first


def test_what_penalties_and_grammars_ask_for_is_done_without_guesses(make_shallow: Make, shallow: Model) -> None:
    with make_shallow(speculative_config=by(shallow)) as llm:
        llm.generate(PROMPTS[:1], params(repetition_penalty=1.2))
        assert llm.stats().draft_tokens == 0
        # What such a text has left in the prefix cache, others go on with.
        assert list(llm.generate(PROMPTS[:1], ASKED[0])[0].outputs[0].token_ids)
        assert llm.stats().accepted_tokens == llm.stats().draft_tokens > 0


def test_another_vocabulary_is_refused(make_shallow: Make, tmp_path: Path) -> None:
    more = replace(OTHER, vocab=SHALLOW.vocab + 64)
    with (
        pytest.raises(ConfigError, match=r"2112 tokens .* 2048"),
        make_shallow(speculative_config=by(tiny_model(more))),
    ):
        pass
    # As many tokens, of which two stand for other words.
    words = [f"w{number}" for number in range(OTHER.vocab)]
    models = []
    for name, order in (("own", words), ("other", [*words[:7], words[8], words[7], *words[9:]])):
        write_checkpoint(tmp_path / name, OTHER, tiny_model(OTHER).weights)
        tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(order)}, unk_token="w0"))
        tokenizer.save(str(tmp_path / name / "tokenizer.json"))
        (tmp_path / name / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
        models.append(str(tmp_path / name))
    with pytest.raises(ConfigError, match=r"'w7' is the token 7 .* and 8"):
        LLM(models[0], speculative_config={"model": models[1]})


@pytest.mark.parametrize(
    ("given", "error", "found"),
    [
        ({"method": "draft_model"}, ConfigError, "needs a model"),
        ({"method": "ngram", "model": "demo"}, ConfigError, "model"),
        ({"model": "demo", "prompt_lookup_max": 3}, ConfigError, "prompt_lookup"),
        ({"model": "demo", "num_speculative_tokens": 0}, ConfigError, "num_speculative_tokens"),
    ],
)
def test_impossible_settings_are_refused(given: Any, error: type[Exception], found: str) -> None:
    with pytest.raises(error, match=found):
        LLM("demo", speculative_config=given)


def test_pipeline_stages_are_refused(make_shallow: Make, shallow: Model) -> None:
    with (
        pytest.raises(CapabilityRefused, match="draft model"),
        make_shallow(pipeline_parallel_size=2, speculative_config=by(shallow)),
    ):
        pass
