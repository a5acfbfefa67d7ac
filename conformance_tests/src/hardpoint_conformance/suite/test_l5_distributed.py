"""Level 5: communication between ranks, and the clean refusal of more ranks than one."""

from __future__ import annotations

import pytest

from hardpoint.interfaces.errors import CapabilityRefused, ConfigError
from hardpoint_conformance.clauses import clause
from hardpoint_conformance.levels import Level
from hardpoint_conformance.plugin import target_of
from hardpoint_conformance.ranks import (
    SOUND,
    WORLD,
    RankResult,
    check_dead_rank,
    check_missing_rank,
    check_operation,
    make_for,
    run_ranks,
)
from hardpoint_conformance.target import Target
from hardpoint_conformance.tiny_model import shape_for, tiny_model
from hardpoint_conformance.worker_bench import config_for, refused_load

_TIMEOUT = 3.0


@pytest.fixture(scope="module")
def two_ranks(request: pytest.FixtureRequest) -> dict[int, RankResult]:
    """What all operations gave in two processes."""
    return run_ranks(make_for(target_of(request.config)), SOUND)


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


@clause("dist.collectives.absent@1", Level.DISTRIBUTED, capability="collectives", refusal=True)
def test_no_collectives(target: Target) -> None:
    """A backend that claims no collectives has none, and claims no more ranks than one."""
    assert target.descriptor.make("collectives", target.device) is None
    assert not [size for size in range(2, 65) if size in target.claims.tensor_parallel]


@pytest.mark.parametrize("rank", range(WORLD))
@clause("dist.world-size.refused@1", Level.DISTRIBUTED, capability="tensor_parallel", refusal=True)
def test_more_ranks_are_refused(target: Target, rank: int) -> None:
    """A worker that is one of two ranks is refused with a typed error before its weights are loaded, and never runs alone."""
    model = tiny_model(shape_for(target.claims))
    config = config_for(target.claims, model, rank=rank, world_size=WORLD)
    error = refused_load(target, config, (ConfigError, CapabilityRefused))
    assert f"{WORLD}" in str(error), "the error says what was asked"
