"""The choice of the instruction set."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hardpoint_cpu import _native

LEVELS = ["baseline", "avx2", "avx512", "avx512vnni", "avx512bf16", "amx"]


@pytest.fixture(autouse=True)
def _restore_isa():
    isa = _native.isa()
    yield
    _native.set_isa(isa)


def choose(value: str) -> subprocess.CompletedProcess[str]:
    code = "from hardpoint_cpu import _native; print(_native.isa())"
    environment = {**os.environ, "HARDPOINT_CPU_ISA": value}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, env=environment)


def test_available_levels_are_in_order_and_include_the_portable_one():
    available = _native.available_isas()
    assert available == [level for level in LEVELS if level in available]
    assert available[0] == "baseline"
    compiled = _native.compiled_isas()
    assert set(available) <= set(compiled)
    assert compiled == [level for level in LEVELS if level in compiled]


def test_fastest_level_is_the_default():
    best = _native.available_isas()[-1]
    slow_dot = best == "avx512bf16" and "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    assert choose("").stdout.strip() == ("avx512vnni" if slow_dot else best)


@pytest.mark.parametrize("level", LEVELS)
def test_environment_forces_a_level_or_fails(level):
    result = choose(level)
    if level in _native.available_isas():
        assert result.stdout.strip() == level
    else:
        assert result.returncode != 0
        assert "does not have; available: baseline" in result.stderr


@pytest.mark.skipif("amx" not in _native.available_isas(), reason="needs a processor and a system with AMX")
def test_without_the_systems_permission_for_tile_registers_the_level_below_amx_is_the_best():
    """Linux refuses it to a process with a thread whose alternate signal stack is too small for the registers."""
    code = (
        "import ctypes\n"
        "class Stack(ctypes.Structure):\n"
        "    _fields_ = [('sp', ctypes.c_void_p), ('flags', ctypes.c_int), ('size', ctypes.c_size_t)]\n"
        "memory = ctypes.create_string_buffer(8192)\n"
        "stack = Stack(ctypes.addressof(memory), 0, len(memory))\n"
        "assert ctypes.CDLL(None).sigaltstack(ctypes.byref(stack), None) == 0\n"
        "from hardpoint_cpu import _native\n"
        "print(_native.isa())"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert result.stdout.strip() == "avx512vnni", result.stderr  # processors with AMX are Intel's


def test_unknown_level_is_refused():
    result = choose("sse9")
    assert result.returncode != 0
    assert "unknown instruction set 'sse9'; known: baseline, avx2, avx512, avx512vnni, avx512bf16, amx" in result.stderr
    with pytest.raises(ValueError, match="sse9"):
        _native.set_isa("sse9")
    assert _native.isa() in _native.available_isas()
