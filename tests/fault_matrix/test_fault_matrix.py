"""Driver calls of every operation of the memory engine fail, and system calls below the CPU's driver; nothing is lost."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from hardpoint_conformance.fault_matrix import OPERATIONS, FaultTarget, Row, run_target

from .system_calls import run_system_calls
from .targets import CpuTarget, all_targets


def check(rows: Iterable[Row], *, undone: int) -> None:
    """Assert that nothing was wrong in any case, and that so many ended with a typed error at least."""
    rows = list(rows)
    assert [f"{row.operation}: {row.call} {text}" for row in rows for text in row.failures] == []
    assert sum(row.undone for row in rows) > undone


# The CPU's driver has the same cases in the conformance suite: alloc.fault.any-call@1.
VENDORS = [target for target in all_targets() if not isinstance(target, CpuTarget)]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("target", VENDORS, ids=lambda target: target.name)
def test_any_failing_call_leaves_the_state_before_and_a_retry_works(target: FaultTarget) -> None:
    check(run_target(target), undone=150)


# All operations, all pairs, and the pairs of the other drivers: `make fault-matrix`.
DIFFERENT = ("grow", "shrink", "sleep to disk", "wake of one tag", "rollback of a sleep")
"""Operations that undo in different ways."""


@pytest.mark.timeout(900)
def test_a_call_that_fails_while_a_failure_is_undone_loses_nothing() -> None:
    operations = tuple(operation for operation in OPERATIONS if operation.name in DIFFERENT)
    check(run_target(CpuTarget(), operations, pairs=2), undone=100)


@pytest.mark.timeout(900)
def test_any_failing_system_call_leaves_the_state_before_and_a_retry_works() -> None:
    check(run_system_calls(["allocate", *DIFFERENT, "wake from disk"]), undone=100)


@pytest.mark.timeout(900)
def test_a_system_call_that_fails_while_a_failure_is_undone_loses_nothing() -> None:
    check(run_system_calls(["sleep to disk"], pairs=5), undone=50)
