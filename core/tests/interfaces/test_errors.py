"""Errors that tell of other errors."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hardpoint.interfaces.errors import HardpointError, OutputFailed, ParticipantError, WorkerError


class Speechless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    "told",
    [
        WorkerError.of,
        OutputFailed.after,
        lambda cause: ParticipantError.of("cache", "before_sleep", cause),
    ],
)
def test_a_cause_whose_text_cannot_be_made_is_told_all_the_same(told: Callable[[Exception], HardpointError]) -> None:
    """Whoever waits would otherwise get that error, and the engine would never forget the request."""
    assert "Speechless, whose text cannot be made (RuntimeError)" in str(told(Speechless()))
