"""Every driver call of every operation of the memory engine fails once, and nothing is lost."""

from __future__ import annotations

import pytest

from hardpoint_conformance.fault_matrix import FaultTarget, run_target

from .targets import all_targets


@pytest.mark.timeout(300)
@pytest.mark.parametrize("target", all_targets(), ids=lambda target: target.name)
def test_any_failing_call_leaves_the_state_before_and_a_retry_works(target: FaultTarget) -> None:
    rows = list(run_target(target))
    failures = [f"{row.operation}: {row.call} {text}" for row in rows for text in row.failures]
    assert not failures
    assert sum(row.undone for row in rows) > 150
