"""The backend that interprets Triton's kernels: it says why it cannot be used, and is chosen by nobody who did not name it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hardpoint.interfaces import Device, GraphLevel
from hardpoint.interfaces.errors import CapabilityRefused
from hardpoint_simulators.triton_interpreter import descriptor

DEVICE = Device("triton_interpreter", 0, "Triton's interpreter", "cpu", simulated=True)


def without(*missing: str) -> object:
    return lambda name: None if name in missing else object()


def test_unavailable_where_kernels_would_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", without())
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    result = descriptor.probe()
    assert not result.devices
    assert "TRITON_INTERPRET=1 is not set" in result.reason


def test_unavailable_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", without("triton"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert descriptor.probe().reason == "not installed: triton"


def test_its_device_is_simulated_and_names_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", without())
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.delenv("HARDPOINT_ATTENTION", raising=False)
    (device,) = descriptor.probe().devices
    assert device.simulated
    assert descriptor.capabilities(device).notes == ("attention: triton (Hardpoint's own kernels)",)


def test_it_is_the_last_choice_and_has_no_worker() -> None:
    found = descriptor.hardpoint_backend()
    assert found.priority < 0
    with pytest.raises(CapabilityRefused, match="runs no model"):
        found.worker()


def test_claims_are_a_part_of_the_kernels_own() -> None:
    from hardpoint.triton import triton_attention_capabilities

    small, whole = descriptor.capabilities(DEVICE).attention, triton_attention_capabilities(GraphLevel.MIXED)
    assert (small.dtypes, small.kv_dtypes, small.features) == (whole.dtypes, whole.kv_dtypes, whole.features)
    for name in ("head_dims", "block_sizes", "group_sizes"):
        assert all(number in getattr(whole, name) for number in getattr(small, name).values), name
    assert small.max_context <= whole.max_context


def test_its_descriptor_imports_neither_torch_nor_triton() -> None:
    module = "hardpoint_simulators.triton_interpreter.descriptor"
    program = f"import sys, {module}; sys.exit(' '.join({{'torch', 'triton'}} & set(sys.modules)) or None)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
