"""Level 4: a model's tokens against the oracle of the whole model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hardpoint.interfaces import KV_CACHE, Capabilities, DType, Policy, SleepPlan, SleepTier, WeightWrite
from hardpoint_conformance.claims import members
from hardpoint_conformance.clauses import clause, over, proves
from hardpoint_conformance.levels import Level
from hardpoint_conformance.plugin import Quality, target_of
from hardpoint_conformance.reference import judge
from hardpoint_conformance.target import Target
from hardpoint_conformance.tiny_model import (
    DEMO_PROMPT,
    Model,
    demo_file,
    nearest,
    read_demo,
    shape_for,
    tiny_model,
)
from hardpoint_conformance.worker_bench import (
    FLOATS,
    WorkerBench,
    check_tokens,
    edge_lengths,
    level_plan,
    random_prompts,
    running,
    sleep,
    usual_dtype,
    wake,
)

DTYPES = pytest.mark.parametrize(
    "dtype", [pytest.param(dtype, id=str(dtype), marks=proves(f"attention.dtype.{dtype}")) for dtype in FLOATS]
)
DECODERS = pytest.mark.parametrize("fused", [pytest.param(True, id="usual"), pytest.param(False, id="unfused")])
TIERS = pytest.mark.parametrize(
    "tier", [pytest.param(tier, id=tier.value, marks=proves(f"memory.tier.{tier.value}")) for tier in SleepTier]
)


def _few_head_dims(claims: Capabilities) -> list[int]:
    even = [size for size in members(claims.attention.head_dims, 256) if size % 2 == 0]
    wanted = (
        (even[0], nearest(claims.attention.head_dims, 64), nearest(claims.attention.head_dims, 128)) if even else ()
    )
    return sorted({size for size in wanted if size % 2 == 0})


def _few_groups(claims: Capabilities) -> list[int]:
    groups = members(claims.attention.group_sizes, 128)
    return [group for group in (1, 2, 3, 4, 7, 8) if group in groups] or list(groups[:1])


def _few_block_sizes(claims: Capabilities) -> list[int]:
    sizes = (1, 2, 4, 8, 16, 32, 64, 128, 256, claims.attention.default_block_size)
    return sorted({size for size in sizes if size in claims.attention.block_sizes})


# Steps


@DTYPES
@DECODERS
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@clause("tokens.prefill.oracle@1", Level.WORKER, facts="6.3 end-to-end")
def test_prefill_tokens(
    target: Target, dtype: DType, fused: bool, tied: bool, rng: np.random.Generator, quality: Quality
) -> None:
    """The first tokens after prompts of any length are the oracle's, in every claimed type, with and without fused decoder."""
    model = tiny_model(shape_for(target.claims, tied=tied))
    with running(target, model, dtype=dtype, use_fused_decoder=fused) as bench:
        lengths = [*edge_lengths(bench, 2), *(2, 3, 5, 9, 17, 23, 40, 61)]
        sequences = [bench.generate([prompt], 2)[0] for prompt in random_prompts(rng, model, lengths)]
    check_tokens(model, sequences, dtype, quality)


@pytest.mark.parametrize("chunk", [1, 5, 16])
@clause("tokens.chunked.oracle@1", Level.WORKER, capability="attention.chunked_prefill", facts="attention test A2, N")
def test_chunked_prefill_tokens(target: Target, chunk: int, rng: np.random.Generator, quality: Quality) -> None:
    """A prompt that is computed in chunks of any size gives the oracle's tokens."""
    model, dtype = tiny_model(shape_for(target.claims)), usual_dtype(target.claims)
    with running(target, model) as bench:
        prompts = random_prompts(rng, model, edge_lengths(bench, 4)[1:])
        sequences = bench.generate(prompts, 4, chunk=chunk, logprobs=2)
    check_tokens(model, sequences, dtype, quality)


@DTYPES
@DECODERS
@clause("tokens.decode.oracle@1", Level.WORKER, facts="attention test A3, C")
def test_decode_tokens(target: Target, dtype: DType, fused: bool, rng: np.random.Generator, quality: Quality) -> None:
    """Tokens decoded one by one are the oracle's, also where a sequence goes on into its next block."""
    model = tiny_model(shape_for(target.claims))
    with running(target, model, dtype=dtype, use_fused_decoder=fused) as bench:
        longest = bench.info.max_model_len
        count = min(bench.block_size + 3, 40, max(longest - bench.block_size, 20))
        edge = min(bench.block_size, longest - count)
        prompts = random_prompts(rng, model, [max(edge - count // 2, 1), edge])
        sequences = bench.generate(prompts, count)
    check_tokens(model, sequences, dtype, quality)


@DECODERS
@clause("tokens.batch.oracle@1", Level.WORKER, facts="attention test N")
def test_batch_of_different_lengths(target: Target, fused: bool, rng: np.random.Generator, quality: Quality) -> None:
    """Sequences of different lengths in one batch each get the tokens that the oracle gives them alone."""
    model, dtype = tiny_model(shape_for(target.claims)), usual_dtype(target.claims)
    with running(target, model, use_fused_decoder=fused) as bench:
        prompts = random_prompts(rng, model, [1, 2, 50, 7, 33, 64, 16])
        sequences = bench.generate(prompts, 6, logprobs=2)
    check_tokens(model, sequences, dtype, quality)


@DECODERS
@clause("tokens.mixed.oracle@1", Level.WORKER, capability="attention.mixed_batch", facts="attention test A4")
def test_prefill_joins_decode(target: Target, fused: bool, rng: np.random.Generator, quality: Quality) -> None:
    """Decodes, prefill chunks and whole prompts in one step each get the oracle's tokens."""
    model, dtype = tiny_model(shape_for(target.claims)), usual_dtype(target.claims)
    with running(target, model, use_fused_decoder=fused) as bench:
        first, second, third, fourth = random_prompts(rng, model, [9, 37, 20, 1])
        decoding = [bench.begin(first, 2)]
        bench.step()
        chunked = bench.begin(second, 2)
        for _ in range(3):
            bench.step({chunked.seq_id: 10, decoding[0].seq_id: 1})
        later = [bench.begin(third, 2), bench.begin(fourth, 2)]
        sequences = [*decoding, chunked, *later]
        for _ in range(6):
            bench.step()
    check_tokens(model, sequences, dtype, quality)


@over(block_size=_few_block_sizes)
@clause("tokens.block-size.oracle@1", Level.WORKER, facts="attention test C")
def test_block_sizes(target: Target, block_size: int, rng: np.random.Generator, quality: Quality) -> None:
    """Every claimed block size is taken as asked, and gives the oracle's tokens."""
    model, dtype = tiny_model(shape_for(target.claims)), usual_dtype(target.claims)
    with running(target, model, block_size=block_size) as bench:
        assert bench.block_size == block_size
        prompts = random_prompts(rng, model, edge_lengths(bench, 4)[-2:])
        sequences = bench.generate(prompts, 4, logprobs=2)
    check_tokens(model, sequences, dtype, quality)


@over(head_dim=_few_head_dims)
@clause("tokens.head-dim.oracle@1", Level.WORKER, facts="attention test B")
def test_head_dims(target: Target, head_dim: int, rng: np.random.Generator, quality: Quality) -> None:
    """Models with small and large heads give the oracle's tokens."""
    model, dtype = tiny_model(shape_for(target.claims, head_dim=head_dim)), usual_dtype(target.claims)
    with running(target, model) as bench:
        sequences = bench.generate(random_prompts(rng, model, [5, 41]), 5, logprobs=2)
    check_tokens(model, sequences, dtype, quality)


@over(group=_few_groups)
@clause("tokens.groups.oracle@1", Level.WORKER, facts="attention test B")
def test_group_sizes(target: Target, group: int, rng: np.random.Generator, quality: Quality) -> None:
    """Models with one and with several query heads per KV head give the oracle's tokens."""
    model = tiny_model(shape_for(target.claims, heads=2 * group, kv_heads=2))
    with running(target, model) as bench:
        sequences = bench.generate(random_prompts(rng, model, [6, 38]), 5, logprobs=2)
    check_tokens(model, sequences, usual_dtype(target.claims), quality)


@pytest.mark.parametrize("window", [1, 7, 32, 33])
@DECODERS
@clause("tokens.window.oracle@1", Level.WORKER, capability="attention.sliding_window", facts="attention test D")
def test_sliding_window(target: Target, window: int, fused: bool, rng: np.random.Generator, quality: Quality) -> None:
    """A model whose layers see a window of keys gives the oracle's tokens in prefill, chunks and decode."""
    model, dtype = tiny_model(shape_for(target.claims, window=window)), usual_dtype(target.claims)
    with running(target, model, use_fused_decoder=fused) as bench:
        prompts = random_prompts(rng, model, [window, window + 1, 70])
        sequences = bench.generate(prompts, 4, logprobs=2) + bench.generate(prompts, 3, chunk=11, logprobs=2)
    check_tokens(model, sequences, dtype, quality)


@DTYPES
@clause("tokens.logprobs.oracle@1", Level.WORKER)
def test_log_probabilities(target: Target, dtype: DType, rng: np.random.Generator, quality: Quality) -> None:
    """Log probabilities are the oracle's within the error of the case's type, best first, the sampled token's before them."""
    model = tiny_model(shape_for(target.claims))
    with running(target, model, dtype=dtype) as bench:
        sequences = bench.generate(random_prompts(rng, model, [4, 35, 62]), 6, logprobs=5)
    for found in (found for sequence in sequences for found in sequence.logprobs):
        assert found.rank == 1, "a greedy token is the most probable one"
        assert len(found.token_ids) == len(found.logprobs) == 6
        assert list(found.logprobs[1:]) == sorted(found.logprobs[1:], reverse=True)
        assert found.logprobs[0] == found.logprobs[1]
        assert len(set(found.token_ids[1:].tolist())) == 5
    check_tokens(model, sequences, dtype, quality)


@clause("tokens.position.last@1", Level.WORKER, facts="attention test C")
def test_last_position(target: Target, rng: np.random.Generator, quality: Quality) -> None:
    """A sequence can be as long as the worker's longest context, and its last token is the oracle's."""
    model, dtype = tiny_model(shape_for(target.claims)), usual_dtype(target.claims)
    with running(target, model) as bench:
        prompts = random_prompts(rng, model, [bench.info.max_model_len, bench.info.max_model_len - 2])
        sequences = [bench.generate([prompts[0]], 1, logprobs=2)[0], bench.generate([prompts[1]], 3, logprobs=2)[0]]
    check_tokens(model, sequences, dtype, quality)


# Sleep


@TIERS
@DECODERS
@clause("tokens.sleep.level1@1", Level.WORKER, capability="memory.sleep.1", facts="allocator fact 2, allocator fact 8b")
def test_level_1_in_the_middle(
    target: Target, tier: SleepTier, fused: bool, rng: np.random.Generator, tmp_path: Path, quality: Quality
) -> None:
    """A sleep of level 1 in the middle of sequences, to each claimed tier, does not change the tokens."""
    model, dtype = tiny_model(shape_for(target.claims)), usual_dtype(target.claims)
    with running(target, model, use_fused_decoder=fused) as bench:
        sequences = [bench.begin(prompt, 2) for prompt in random_prompts(rng, model, [3, 45])]
        for count in (3, 6):
            bench.run(sequences, count)
            bench.sleep_and_wake(level_plan(1, tier, str(tmp_path)))
        bench.run(sequences, 9)
    check_tokens(model, sequences, dtype, quality)


@DECODERS
@clause("tokens.sleep.level2-reload@1", Level.WORKER, capability="memory.sleep.2", facts="allocator fact 43")
def test_level_2_and_reload(target: Target, fused: bool, rng: np.random.Generator, quality: Quality) -> None:
    """After a sleep of level 2 and a reload of the weights the tokens are the oracle's again."""
    model, dtype = tiny_model(shape_for(target.claims)), usual_dtype(target.claims)
    with running(target, model, use_fused_decoder=fused) as bench:
        sequences = [bench.begin(prompt, 2) for prompt in random_prompts(rng, model, [3, 45])]
        bench.run(sequences, 3)
        bench.sleep_and_wake(level_plan(2, target.tier))
        assert bench.worker.write_weights(WeightWrite.RELOAD) == len(model.weights)
        bench.run(sequences, 6)
    check_tokens(model, sequences, dtype, quality)


@clause("tokens.sleep.kv-recompute@1", Level.WORKER, capability="memory.sleep.1", facts="allocator fact 42")
def test_cache_discarded_and_computed_again(target: Target, rng: np.random.Generator, quality: Quality) -> None:
    """Where only the KV cache slept and was discarded, computing it again gives the oracle's tokens; the weights stayed awake."""
    model, dtype = tiny_model(shape_for(target.claims)), usual_dtype(target.claims)
    plan = SleepPlan(policies={KV_CACHE: Policy.DISCARD}, tags=frozenset({KV_CACHE}), tier=target.tier)
    with running(target, model) as bench:
        sequences = [bench.begin(prompt, 2) for prompt in random_prompts(rng, model, [3, 45])]
        bench.run(sequences, 3)
        sleep(bench.worker, plan)
        assert bench.worker.status().memory.asleep == {KV_CACHE}
        wake(bench.worker, [KV_CACHE])
        bench.forget_kv()
        bench.run(sequences, 6)
    check_tokens(model, sequences, dtype, quality)


@TIERS
@clause("tokens.sleep.kv-live@1", Level.WORKER, capability="memory.sleep.1", facts="allocator fact 42")
def test_live_blocks_are_preserved(
    target: Target, tier: SleepTier, rng: np.random.Generator, tmp_path: Path, quality: Quality
) -> None:
    """Live KV blocks that a sleep preserves hold the keys and values of their sequences after wake: nothing is computed again."""
    model, dtype = tiny_model(shape_for(target.claims)), usual_dtype(target.claims)
    with running(target, model) as bench:
        sequences = [bench.begin(prompt, 2) for prompt in random_prompts(rng, model, [3, 45, 70])]
        bench.run(sequences, 3)
        live = sorted(block for sequence in sequences for block in sequence.blocks)
        report = sleep(bench.worker, level_plan(1, tier, str(tmp_path), live_blocks=live))
        assert report.preserved >= len(live) * bench.info.attention.kv_cache.block_bytes
        wake(bench.worker)
        bench.run(sequences, 6)
    check_tokens(model, sequences, dtype, quality)


# The demo model


@pytest.fixture(scope="module")
def demo(request: pytest.FixtureRequest) -> Iterator[tuple[WorkerBench, Model]]:
    """A worker with the demo model, loaded once."""
    file = demo_file()
    if file is None:
        pytest.skip("not testable here: the demo model is not installed")
    target = target_of(request.config)
    model = read_demo(file)
    with running(target, model, threads=None) as bench:
        yield bench, model


@clause("tokens.demo.oracle@1", Level.WORKER, facts="6.3 end-to-end")
def test_demo_model(demo: tuple[WorkerBench, Model], target: Target, quality: Quality) -> None:
    """The demo model, a trained one, continues a prompt as the oracle does."""
    bench, model = demo
    check_tokens(model, bench.generate([DEMO_PROMPT], 12), usual_dtype(target.claims), quality)


@clause("tokens.demo.sleep@1", Level.WORKER, capability="memory.sleep.1", facts="allocator fact 2")
def test_demo_model_sleeps(demo: tuple[WorkerBench, Model], target: Target) -> None:
    """The demo model's tokens are the same when it sleeps and wakes in their middle."""
    bench, model = demo
    (expected,) = bench.generate([DEMO_PROMPT], 12)
    sequence = bench.begin(DEMO_PROMPT)
    bench.run([sequence], 6)
    bench.sleep_and_wake(level_plan(1, target.tier))
    bench.run([sequence], 12)
    bench.finish(sequence)
    if sequence.tokens != expected.tokens:
        # Keys and values were computed again in another order, which may change what rounding decides.
        judge(model, sequence.tokens, sequence.prompt_len, usual_dtype(target.claims)).check()
