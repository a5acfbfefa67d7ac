"""The choice of the instruction set."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hardpoint_cpu import _native

LEVELS = ["baseline", "avx2", "avx512", "avx512bf16"]


@pytest.fixture(autouse=True)
def _restore_isa():
    isa = _native.isa()
    yield
    _native.set_isa(isa)


def choose(value: str) -> subprocess.CompletedProcess[str]:
    code = "from hardpoint_cpu import _native; print(_native.isa())"
    environment = {**os.environ, "HARDPOINT_CPU_ISA": value}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)


def test_available_levels_are_in_order_and_include_the_portable_one():
    available = _native.available_isas()
    assert available == [level for level in LEVELS if level in available]
    assert available[0] == "baseline"


def test_best_level_is_the_default():
    assert choose("").stdout.strip() == _native.available_isas()[-1]


@pytest.mark.parametrize("level", LEVELS)
def test_environment_forces_a_level_or_fails(level):
    result = choose(level)
    if level in _native.available_isas():
        assert result.stdout.strip() == level
    else:
        assert result.returncode != 0
        assert "does not have; available: baseline" in result.stderr


def test_unknown_level_is_refused():
    result = choose("sse9")
    assert result.returncode != 0
    assert "unknown instruction set 'sse9'; known: baseline, avx2, avx512, avx512bf16" in result.stderr
    with pytest.raises(ValueError, match="sse9"):
        _native.set_isa("sse9")
    assert _native.isa() in _native.available_isas()
