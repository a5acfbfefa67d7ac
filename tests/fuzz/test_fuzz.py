"""Hostile input of every kind ends in a right answer or one typed error; and what fails is reported with what repeats it.

In processes of their own, forks of one from before all tests: what those have left in this one (threads, free memory) would be inherited.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.warm_processes import run_warm

CASES = 2000
ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.timeout(900)


KINDS = ("models", "configurations", "requests")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run Python, with torch and the engine imported, so that it finds the repository's modules."""
    return run_warm([sys.executable, "-P", *command], env=os.environ | {"PYTHONPATH": str(ROOT)})


@pytest.fixture(scope="module")
def fuzzed() -> subprocess.CompletedProcess[str]:
    """All kinds from one process, whose imports take as long as a thousand cases; each batch of cases is a fork of it."""
    return run("-m", "tests.fuzz", ",".join(KINDS), "0", str(CASES))


@pytest.mark.parametrize("kind", KINDS)
def test_hostile_input_is_refused_with_a_typed_error_or_answered(
    kind: str, fuzzed: subprocess.CompletedProcess[str]
) -> None:
    (said,) = re.findall(rf"^{kind}: (.*); 0 failures$", fuzzed.stdout, re.MULTILINE) or [""]
    assert fuzzed.returncode == 0, fuzzed.stdout + fuzzed.stderr
    assert said, fuzzed.stdout + fuzzed.stderr
    counts = {name: int(number) for name, number in re.findall(r"(\w+) (\d+)[, ]", said)}
    assert sum(counts.values()) == CASES
    assert counts["right"] > CASES // 20
    assert len(counts) > 5


TRIAL = r"""
import os, re, time
import torch
from hardpoint.interfaces.errors import ConfigError
from tests.fuzz import batches

batches.SECONDS, batches.PATIENCE, batches.GROWTH_MIB = 0.2, 5, 32
def burn():
    # On a machine with much else to do this takes several times as long, and must end before the patience does.
    end = time.process_time() + 0.4
    while time.process_time() < end:
        pass

deeds = {
    1: os.abort,
    3: lambda: time.sleep(60),
    5: lambda: torch.ones(16 << 20),
    6: lambda: [][0],
    7: lambda: os._exit(0),
    8: burn,
}

def case(seed, folder):
    if seed not in deeds:
        raise ConfigError("refused")
    deeds[seed]()

outcome = batches.run("trial", lambda own: case, 0, 9)
assert outcome.counts == {"ConfigError": 3}, outcome.counts
took_memory, took_time = r"it took (6\d|[7-9]\d|1\d\d) MiB", r"and (0\.[4-9]|[1-9]\.\d) s of the processor"
expected = ["signal 6", "Timeout", took_memory, "IndexError", "exit code 0", took_time]
for seed, failure, text in zip(deeds, outcome.failures, expected, strict=True):
    assert failure.startswith(f"python -m tests.fuzz trial {seed}\n"), failure
    assert re.search(text, failure), failure
"""


def test_what_a_case_does_to_its_process_is_reported_with_its_seed(tmp_path: Path) -> None:
    trial = tmp_path / "trial.py"
    trial.write_text(TRIAL)
    done = run(str(trial))
    assert done.returncode == 0, done.stderr
