"""Every example runs and prints text."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.warm_processes import run_warm

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))
ARGUMENTS = {"rlhf_loop": ["--rounds", "2", "--tokens", "6", "--model", "{shallow}"]}
"""Which make an example shorter."""


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(example: Path, shallow_demo: str) -> None:
    arguments = [argument.format(shallow=shallow_demo) for argument in ARGUMENTS.get(example.stem, [])]
    command = [sys.executable, "-P", str(example), *arguments]
    done = run_warm(command, timeout=240)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) > 10
