"""`make device-check` where there is no device, and where what is there is not one. Whole runs are for `DEVICE_CHECK=--simulated`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hardpoint_simulators import library

SCRIPT = Path(__file__).parents[2] / "scripts" / "device_check.py"


def run(out: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the check of CUDA devices in a clean environment."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HARDPOINT_")}
    return subprocess.run(
        [sys.executable, str(SCRIPT), "--backend", "cuda", *arguments],
        env=clean | {"OUT": str(out)} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_a_device_it_explains_itself_and_claims_nothing(tmp_path: Path) -> None:
    ended = run(tmp_path)
    if "looked for" not in ended.stdout:
        pytest.skip("this machine has a CUDA driver")
    assert (ended.returncode, ended.stderr) == (0, "")
    for text in (
        "nothing was checked",
        "$HARDPOINT_CUDA_DRIVER",
        "libcuda.so.1",
        "tests/device",
        "sleep_device.py",
        "device_engine.py",
    ):
        assert text in ended.stdout
    assert "passed" not in ended.stdout
    assert list(tmp_path.iterdir()) == []


def test_driver_without_a_device_is_told_apart_from_no_driver(tmp_path: Path) -> None:
    ended = run(tmp_path, HARDPOINT_CUDA_DRIVER=str(library("cuda")), HARDPOINT_SIM_DEVICES="0")
    assert ended.returncode == 0
    assert "no CUDA-capable device" in ended.stdout


def test_driver_that_cannot_be_used_is_a_failure(tmp_path: Path) -> None:
    broken = tmp_path / "libcuda.so.1"
    broken.write_text("no library")
    ended = run(tmp_path, HARDPOINT_CUDA_DRIVER=str(broken))
    assert ended.returncode == 1
    assert "is there and cannot be used" in ended.stdout
    assert json.loads((tmp_path / "summary.json").read_text("utf-8"))["passed"] is False


def test_simulated_driver_is_not_taken_for_a_device(tmp_path: Path) -> None:
    ended = run(tmp_path, HARDPOINT_CUDA_DRIVER=str(library("cuda")))
    assert ended.returncode == 1
    assert "simulation" in ended.stdout
    assert list(tmp_path.iterdir()) == []


def test_interpreter_without_what_the_checks_need_is_named(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    bare.chmod(0o755)
    ended = run(tmp_path, "--simulated", "--python", str(bare))
    assert ended.returncode == 1
    assert f"{bare} has no pluggy, pytest" in ended.stdout
    summary = json.loads((tmp_path / "simulated_summary.json").read_text("utf-8"))
    assert (summary["simulated"], summary["passed"]) == (True, False)


def test_step_without_time_is_not_run_and_the_run_does_not_pass(tmp_path: Path) -> None:
    ended = run(tmp_path, "--simulated", "--only", "misuse", "--seconds", "15")
    assert ended.returncode == 1
    summary = json.loads((tmp_path / "simulated_summary.json").read_text("utf-8"))
    assert [(step["name"], step["status"], step["note"]) for step in summary["steps"][1:]] == [
        ("misuse", "not run", "no time was left")
    ]
    assert summary["passed"] is False


def test_unknown_step_is_refused_with_those_that_there_are(tmp_path: Path) -> None:
    ended = run(tmp_path, "--only", "doctor,everything")
    assert ended.returncode == 1
    assert "no step is called everything; steps: doctor, tests," in ended.stderr
