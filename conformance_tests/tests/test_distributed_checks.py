"""The suite's tests of collectives pass a right implementation, and find the faults of a wrong one."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from hardpoint_conformance.ranks import SOUND, check_dead_rank, check_missing_rank, check_operation, run_ranks


@pytest.fixture
def collectives(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module with collectives over gloo, as other processes can import it too."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return importlib.import_module("gloo_collectives")


def test_right_collectives_pass(collectives: Any) -> None:
    results = run_ranks(collectives.gloo, SOUND)
    for name in SOUND:
        check_operation(results, name)
    assert all({"stop", "stop again"} <= result.values.keys() for result in results.values())
    assert [result.exit_code for result in results.values()] == [0, 0]


def test_wrong_collectives_are_found(collectives: Any) -> None:
    wrong = ("all-reduce-float32", "all-reduce-large", "all-gather-1", "broadcast-1", "barrier")
    results = run_ranks(collectives.faulty, (*wrong, "all-gather-0", "broadcast-0"))
    for name in wrong:
        with pytest.raises(AssertionError):
            check_operation(results, name)
    for name in ("all-gather-0", "broadcast-0"):
        check_operation(results, name)


def test_a_rank_that_never_comes_and_one_that_dies(collectives: Any) -> None:
    missing = run_ranks(collectives.gloo, (), ranks=(0,), join_timeout=2.0)
    check_missing_rank(missing[0], 2.0)
    dead = run_ranks(collectives.gloo, ("death",), join_timeout=60.0)
    check_dead_rank(dead[0])
    assert dead[1].exit_code == 7
