"""Level 5: communication between ranks, and the clean refusal of more ranks than one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from hardpoint.interfaces import WakePlan, WeightWrite
from hardpoint.interfaces.errors import CapabilityRefused, ConfigError
from hardpoint_conformance.clauses import clause
from hardpoint_conformance.levels import Level
from hardpoint_conformance.plugin import Quality, target_of
from hardpoint_conformance.ranks import (
    SOUND,
    WORLD,
    RankResult,
    check_dead_rank,
    check_missing_rank,
    check_operation,
    make_for,
    missing_devices,
    run_ranks,
)
from hardpoint_conformance.target import Target
from hardpoint_conformance.tiny_model import shape_for, tiny_model
from hardpoint_conformance.worker_bench import (
    check_tokens,
    config_for,
    level_plan,
    random_prompts,
    refused_load,
    usual_dtype,
)
from hardpoint_conformance.worker_ranks import RankProcesses, running_ranks

_TIMEOUT = 3.0
_SPLITS = {"tensor": {"tensor_parallel_size": WORLD}, "pipeline": {"pipeline_parallel_size": WORLD}}
"""How two ranks share a model."""


@pytest.fixture(scope="module")
def two_ranks(request: pytest.FixtureRequest) -> dict[int, RankResult]:
    """What all operations gave in two processes."""
    target = target_of(request.config)
    _need_devices(target)
    return run_ranks(make_for(target), SOUND)


@pytest.fixture(scope="module")
def processes(request: pytest.FixtureRequest) -> Iterator[RankProcesses]:
    """Two processes for workers."""
    target = target_of(request.config)
    _need_devices(target)
    started = RankProcesses(target, WORLD)
    yield started
    started.close()


def _need_devices(target: Target) -> None:
    if reason := missing_devices(target):
        pytest.skip(f"not testable here: {reason}")


def _operations(prefix: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("operation", [name for name in SOUND if name.startswith(prefix)])


@_operations("all-reduce")
@clause("dist.all-reduce.exact@1", Level.DISTRIBUTED, capability="collectives", facts="6.3 collectives")
def test_all_reduce(two_ranks: dict[int, RankResult], operation: str) -> None:
    """all_reduce leaves the exact sum of integers on every rank, for each type and for sizes of no round number."""
    check_operation(two_ranks, operation)


@_operations("all-gather")
@clause("dist.all-gather.exact@1", Level.DISTRIBUTED, capability="collectives", facts="6.3 collectives")
def test_all_gather(two_ranks: dict[int, RankResult], operation: str) -> None:
    """all_gather joins all ranks' tensors along the axis, in the order of ranks, the same on every rank."""
    check_operation(two_ranks, operation)


@_operations("broadcast")
@clause("dist.broadcast.exact@1", Level.DISTRIBUTED, capability="collectives", facts="6.3 collectives")
def test_broadcast(two_ranks: dict[int, RankResult], operation: str) -> None:
    """broadcast gives every rank the tensor of the source, whichever rank that is."""
    check_operation(two_ranks, operation)


@_operations("send-receive")
@clause("dist.send-receive.exact@1", Level.DISTRIBUTED, capability="collectives", facts="6.3 collectives")
def test_send_and_receive(two_ranks: dict[int, RankResult], operation: str) -> None:
    """What one rank sends another receives, exactly, and a buffer that was sent can be written at once."""
    check_operation(two_ranks, operation)


@_operations("many")
@clause("dist.order.kept@1", Level.DISTRIBUTED, capability="collectives", facts="6.3 collectives")
def test_operations_in_turn(two_ranks: dict[int, RankResult], operation: str) -> None:
    """Operations in turn over one tensor each see what the one before left."""
    check_operation(two_ranks, operation)


@_operations("barrier")
@clause("dist.barrier.waits@1", Level.DISTRIBUTED, capability="collectives", facts="6.3 collectives")
def test_barrier(two_ranks: dict[int, RankResult], operation: str) -> None:
    """A barrier holds a rank until the last one comes."""
    check_operation(two_ranks, operation)


@clause("dist.stop.twice@1", Level.DISTRIBUTED, capability="collectives", facts="6.3 collectives")
def test_stop(two_ranks: dict[int, RankResult]) -> None:
    """A rank leaves the group once and twice without an error, and its process ends."""
    for result in two_ranks.values():
        assert {"stop", "stop again"} <= result.values.keys(), result.errors
        assert result.exit_code == 0


@clause("dist.start.missing-rank@1", Level.DISTRIBUTED, capability="collectives", facts="6.3 failing rank")
def test_a_missing_rank_is_reported(target: Target) -> None:
    """Where a rank never comes, start raises WorkerError within its timeout, and does not hang."""
    results = run_ranks(make_for(target), (), ranks=(0,), join_timeout=_TIMEOUT)
    check_missing_rank(results[0], _TIMEOUT)


@clause("dist.rank.dead@1", Level.DISTRIBUTED, capability="collectives", facts="6.3 failing rank")
def test_a_dead_rank_is_reported(target: Target) -> None:
    """An operation with a rank that died is an error on the ranks that are left, and does not hang."""
    results = run_ranks(make_for(target), ("death",), join_timeout=_TIMEOUT * 3, limit=_TIMEOUT * 10)
    check_dead_rank(results[0])


def _check_split(
    processes: RankProcesses, target: Target, split: str, rng: np.random.Generator, quality: Quality
) -> None:
    """Judge what two ranks write, of which one sequence needs logits and the others only the best token."""
    model, dtype = tiny_model(shape_for(target.claims)), usual_dtype(target.claims)
    with running_ranks(processes, target, model, **_SPLITS[split]) as (bench, _):
        prompts = random_prompts(rng, model, [1, 17, 45])
        plain = bench.generate(prompts, 6, chunk=16)
        mixed = [bench.begin(prompts[0], logprobs=2), bench.begin(prompts[1])]
        bench.run(mixed, 6)
    check_tokens(model, [*plain, *mixed], dtype, quality)


@clause("dist.tokens.tensor@1", Level.DISTRIBUTED, capability="tensor_parallel")
def test_tensor_parallel_tokens(
    processes: RankProcesses, target: Target, rng: np.random.Generator, quality: Quality
) -> None:
    """Two ranks that share each layer write the tokens, and give the log probabilities, of the oracle: in prefill, chunks and decode."""
    _check_split(processes, target, "tensor", rng, quality)


@clause("dist.tokens.pipeline@1", Level.DISTRIBUTED, capability="collectives")
def test_pipeline_parallel_tokens(
    processes: RankProcesses, target: Target, rng: np.random.Generator, quality: Quality
) -> None:
    """Two stages with half of the layers each write the tokens, and give the log probabilities, of the oracle."""
    _check_split(processes, target, "pipeline", rng, quality)


@pytest.mark.parametrize("split", _SPLITS)
@clause("dist.driver.samples@1", Level.DISTRIBUTED, capability="tensor_parallel")
def test_the_driver_alone_samples(
    processes: RankProcesses, target: Target, split: str, rng: np.random.Generator
) -> None:
    """A step's output is the driver rank's, the first of the last stage; that of every other rank is empty."""
    model = tiny_model(shape_for(target.claims))
    with running_ranks(processes, target, model, **_SPLITS[split]) as (bench, ranks):
        sequence = bench.begin(random_prompts(rng, model, [5])[0], logprobs=1)
        for _ in range(2):
            bench.step()
            for rank, output in enumerate(ranks.latest):
                mine = rank == bench.config.driver_rank
                assert len(output.token_ids) == len(output.logprobs) == (1 if mine else 0), f"rank {rank}: {output}"
        bench.finish(sequence)


@pytest.mark.parametrize("split", _SPLITS)
@clause("dist.weights.update@1", Level.DISTRIBUTED, capability="tensor_parallel")
def test_updated_weights(
    processes: RankProcesses, target: Target, split: str, rng: np.random.Generator, quality: Quality
) -> None:
    """Every rank takes its part of updated weights, which come as the whole tensors of the checkpoint, and none is missing then."""
    shape, dtype = shape_for(target.claims), usual_dtype(target.claims)
    model, other = tiny_model(shape), tiny_model(replace(shape, seed=1))
    with running_ranks(processes, target, model, **_SPLITS[split]) as (bench, ranks):
        assert ranks.update_weights_from(other.path) == len(other.weights)
        ranks.status()
        assert not any(status.missing_weights for status in ranks.latest), "updated weights are missing"
        sequences = bench.generate(random_prompts(rng, other, [3, 33]), 5)
    check_tokens(other, sequences, dtype, quality)


@pytest.mark.parametrize("split", _SPLITS)
@clause("dist.sleep.tokens@1", Level.DISTRIBUTED, capability="tensor_parallel", facts="allocator fact 2")
def test_ranks_sleep_and_wake(
    processes: RankProcesses, target: Target, split: str, rng: np.random.Generator, quality: Quality
) -> None:
    """Ranks that slept and woke write the tokens of the oracle: with their weights preserved, and with weights reloaded."""
    levels = sorted({1, 2} & target.claims.memory.sleep_levels)
    if not levels:
        pytest.skip("not testable here: the backend claims no sleep")
    model, dtype = tiny_model(shape_for(target.claims)), usual_dtype(target.claims)
    with running_ranks(processes, target, model, **_SPLITS[split]) as (bench, _):
        sequences = [bench.begin(prompt, 2) for prompt in random_prompts(rng, model, [3, 33])]
        bench.run(sequences, 2)
        for count, level in enumerate(levels):
            bench.sleep_and_wake(level_plan(level, target.tier))
            if level == 2:
                assert bench.worker.write_weights(WeightWrite.RELOAD) == len(model.weights)
            bench.run(sequences, 4 + 2 * count)
    check_tokens(model, sequences, dtype, quality)


@pytest.mark.parametrize("split", _SPLITS)
@clause("dist.sleep.rollback@1", Level.DISTRIBUTED, capability="tensor_parallel")
def test_a_sleep_of_ranks_rolled_back(
    processes: RankProcesses, target: Target, split: str, rng: np.random.Generator, quality: Quality
) -> None:
    """A sleep that was prepared on all ranks and rolled back leaves everything as it was, the KV cache included; one that is committed
    on all ranks is undone by a wake in two phases."""
    if 1 not in target.claims.memory.sleep_levels:
        pytest.skip("not testable here: the backend claims no sleep of level 1")
    model, dtype = tiny_model(shape_for(target.claims)), usual_dtype(target.claims)
    with running_ranks(processes, target, model, **_SPLITS[split]) as (bench, ranks):
        sequences = [bench.begin(prompt, 2) for prompt in random_prompts(rng, model, [3, 33])]
        bench.run(sequences, 2)
        ranks.begin(1, level_plan(1, target.tier))
        ranks.rollback(1)
        bench.run(sequences, 4)
        ranks.begin(2, level_plan(1, target.tier))
        ranks.commit(2)
        ranks.begin(3, WakePlan())
        ranks.commit(3)
        bench.forget_kv()
        bench.run(sequences, 6)
    check_tokens(model, sequences, dtype, quality)


@clause("dist.world-size.reasons@1", Level.DISTRIBUTED, capability="tensor_parallel")
def test_impossible_numbers_of_ranks_are_refused(target: Target) -> None:
    """A number of ranks that the backend does not claim, that the model's heads or layers do not divide into, or that rank and sizes
    contradict, is refused with the reasons before any other rank is waited for."""
    model = tiny_model(shape_for(target.claims))
    address = "tcp://127.0.0.1:9/nobody"
    heads, layers = model.shape.heads, model.shape.layers
    unclaimed = next((size for size in range(2, 4096) if size not in target.claims.tensor_parallel), None)
    too_many = [{"tensor_parallel_size": size} for size in (unclaimed, 2 * heads + 1) if size is not None]
    for sizes in (*too_many, {"pipeline_parallel_size": layers + 1}):
        (size,) = sizes.values()
        config = config_for(target.claims, model, world_size=size, init_method=address, **sizes)
        error = refused_load(target, config, CapabilityRefused)
        assert str(size) in str(error), "the error says what was asked"
        assert error.reasons, "refused without a reason"
    for wrong in ({"rank": WORLD}, {"world_size": WORLD + 1}, {"init_method": ""}):
        sound = {"world_size": WORLD, "tensor_parallel_size": WORLD, "init_method": address}
        refused_load(target, config_for(target.claims, model, **{**sound, **wrong}), ConfigError)


@clause("dist.collectives.absent@1", Level.DISTRIBUTED, capability="collectives", refusal=True)
def test_no_collectives(target: Target) -> None:
    """A backend that claims no collectives has none, and claims no more ranks than one."""
    assert target.descriptor.make("collectives", target.device) is None
    assert [size for size in range(2, 65) if size in target.claims.tensor_parallel] == []


@pytest.mark.parametrize("rank", range(WORLD))
@clause("dist.world-size.refused@1", Level.DISTRIBUTED, capability="tensor_parallel", refusal=True)
def test_more_ranks_are_refused(target: Target, rank: int) -> None:
    """A worker that is one of two ranks is refused with a typed error before its weights are loaded, and never runs alone."""
    model = tiny_model(shape_for(target.claims))
    sizes = {"world_size": WORLD, "tensor_parallel_size": WORLD, "init_method": "tcp://127.0.0.1:9/nobody"}
    config = config_for(target.claims, model, rank=rank, **sizes)
    error = refused_load(target, config, (ConfigError, CapabilityRefused))
    assert f"{WORLD}" in str(error), "the error says what was asked"
