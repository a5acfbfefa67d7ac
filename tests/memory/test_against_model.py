"""Random sequences of everything that a pool can do, against a model of its books in Python (facts 24 and 26).

`HARDPOINT_MODEL_EXAMPLES` is how many sequences each driver gets; the default is for every day.
"""

from __future__ import annotations

import os

import pytest

from hardpoint_conformance.fault_matrix import FaultTarget
from hardpoint_conformance.memory_model import run_model

EXAMPLES = int(os.environ.get("HARDPOINT_MODEL_EXAMPLES", "12"))


@pytest.mark.timeout(max(120, EXAMPLES))
def test_any_sequence_does_what_the_model_says(target: FaultTarget) -> None:
    run_model(target, EXAMPLES)
