"""Everything at once, at random: a short run of `chaos.py`."""

from __future__ import annotations

import pytest

from tests.server.chaos import chaos


@pytest.mark.timeout(900)
def test_load_sleeps_kills_and_aborts_at_once() -> None:
    outcome = chaos(seed=2, seconds=20)
    assert not outcome.wrong, str(outcome)
    # It was disturbed, and it served nevertheless.
    assert outcome.kills >= 1, str(outcome)
    assert outcome.requests["answered"] >= 50, str(outcome)
    assert outcome.operations["sleep"] >= 5, str(outcome)
    assert outcome.operations["wake"] >= 5, str(outcome)
    assert len(outcome.requests) >= 4, str(outcome)
