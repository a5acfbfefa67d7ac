"""The progress bar says how far a run is and how fast, on a terminal, and is silent elsewhere."""

from __future__ import annotations

import pytest
from rich.console import Console

from hardpoint.engine.info import StepTotals
from hardpoint.engine.progress import StepProgress

TOTALS = StepTotals(prefill_tokens=1000, prefill_seconds=0.5, decode_tokens=300, decode_seconds=2.0)


def _run(count: int) -> None:
    with StepProgress(count) as progress:
        progress.update(1, StepTotals())
        progress.update(count - 1, TOTALS)


def test_a_terminal_shows_requests_and_both_rates(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Console, "is_terminal", property(lambda self: True))
    monkeypatch.setenv("COLUMNS", "120")
    _run(4)
    shown = capsys.readouterr().err
    assert "4/4" in shown
    assert "prefill 2,000 tok/s, decode 150 tok/s" in shown


def test_elsewhere_nothing_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    _run(3)
    captured = capsys.readouterr()
    assert captured.err == captured.out == ""
