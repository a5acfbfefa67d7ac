"""A reference FlashInfer in the place of the real one: simulated, nothing of FlashInfer's runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hardpoint_cuda.flashinfer import flashinfer_obstacle, trial

REFERENCE = Path(__file__).with_name("reference")

# The released package is not part of the development environment; `make test-flashinfer` fetches it.
collect_ignore = [] if os.environ.get("HARDPOINT_FLASHINFER_WHEEL") else ["test_released.py"]


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Install the reference FlashInfer, and make trials small."""
    monkeypatch.syspath_prepend(str(REFERENCE))
    monkeypatch.delenv("HARDPOINT_ATTENTION", raising=False)
    for name, number in {"SEQUENCES": 4, "CONTEXT": 40, "RUNS": 1}.items():
        monkeypatch.setattr(trial, name, number)
    flashinfer_obstacle.cache_clear()
    yield monkeypatch
    flashinfer_obstacle.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "flashinfer"]:
        del sys.modules[name]
