"""The steps of `make device-check` that need a device which computes: their code runs here on the CPU, with little work, so that it
stays right. The figures mean nothing and no bar is decided by them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.warm_processes import WarmPopen

ROOT = Path(__file__).parents[2]


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Import modules of `scripts` and `benchmarks`, which are found there alone, and forget them again."""
    for folder in (ROOT / "scripts", ROOT / "benchmarks", ROOT / "benchmarks" / "peers"):
        monkeypatch.syspath_prepend(str(folder))
    before = set(sys.modules)

    def get(name: str) -> ModuleType:
        return import_module(name)

    yield get
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(
            (str(ROOT / "scripts"), str(ROOT / "bench"))
        ):
            del sys.modules[name]


@pytest.fixture
def run(imported: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(subprocess, "Popen", WarmPopen)
    return imported("device_run").Run(sys.executable, tmp_path, "", quick=True)


@pytest.fixture
def cpu(imported: Any) -> Any:
    """The CPU, in the place of a device."""
    return imported("device_run").Finding("cpu", "", (), devices=("CPU",))


def verdicts(run: Any, kind: str) -> list[dict[str, Any]]:
    """Return the verdicts of a benchmark's report."""
    found: list[dict[str, Any]] = json.loads((run.out / f"cpu_{kind}.json").read_text("utf-8"))["verdicts"]
    return found


def test_engine_is_measured_beside_its_limits_and_transformers(imported: Any, run: Any, cpu: Any) -> None:
    imported("device_steps").check_engine(run, cpu)
    (step,) = run.steps
    assert (step.status, step.note) == ("passed", "0 of 0 bars met")
    whose = {verdict["reference_name"] for verdict in verdicts(run, "engine")}
    assert whose == {"roofline of copies", "matrix peak", "transformers"}
    for verdict in verdicts(run, "engine"):
        assert verdict["ours"] > 0
        assert verdict["reference"] > 0
        assert verdict["met"] is None
    systems = json.loads((run.out / "cpu_engine.json").read_text("utf-8"))["systems"]
    firsts = [[case["runs"][0]["first_tokens"] for case in answer["cases"].values()] for answer in systems.values()]
    same = sum(a == b for one, other in zip(*firsts, strict=True) for a, b in zip(one, other, strict=True))
    assert same >= 6, "of 7: Hardpoint and transformers run other models"


def test_attention_is_checked_and_measured_beside_torch(imported: Any, run: Any, cpu: Any) -> None:
    imported("device_steps").check_attention(run, cpu)
    (step,) = run.steps
    assert (step.status, step.note) == ("passed", "0 of 0 bars met")
    found = verdicts(run, "attention")
    assert {"copies", "matrix peak", "torch, gathering", "torch, gathered before"} == {
        v["reference_name"] for v in found
    }
    assert all(verdict["ours"] > 0 and verdict["reference"] > 0 for verdict in found)


def test_profile_names_functions_and_the_time_of_a_step(imported: Any, run: Any, cpu: Any) -> None:
    imported("device_steps").check_profile(run, cpu)
    (step,) = run.steps
    assert (step.status, step.note) == ("passed", "0 of 0 bars met")
    batches = json.loads((run.out / "cpu_profile.json").read_text("utf-8"))["batches"]
    assert set(batches) == {"1", "256"}
    for found in batches.values():
        assert all(seconds > 0 for seconds in found["step_seconds"])
        assert any("engine/core.py" in row["name"] and row["calls"] == 1.0 for row in found["functions"])


def test_engine_that_sleeps_must_give_the_same_tokens(imported: Any, run: Any, cpu: Any) -> None:
    imported("device_steps").check_sleep(run, cpu, 0.0625)
    (step,) = run.steps
    assert (step.status, step.note) == ("passed", "1 of 1 bars met")
    (verdict,) = [verdict for verdict in verdicts(run, "sleep") if verdict["met"] is not None]
    assert "equal tokens after a wake" in verdict["metric"]
    engine = json.loads((run.out / "cpu_sleep.json").read_text("utf-8"))["engine"]
    assert engine["distinct_tokens"] > 10
    judge = imported("sleep_device").engine_verdicts
    (*_, last) = judge(engine | {"same_tokens": [engine["tokens"], engine["tokens"] - 1]})
    assert last.met is False


def test_conformance_of_what_computes_is_counted(
    imported: Any, run: Any, cpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = imported("device_steps")
    monkeypatch.setattr(steps, "LEVELS", ("L0",))
    steps.check_conformance(run, cpu)
    (step,) = run.steps
    assert step.status == "passed"
    assert step.note.startswith("conformant: ")
    assert " passed" in step.note


def test_failed_conformance_names_what_failed(imported: Any) -> None:
    counted = imported("device_steps")._counted
    results = [{"id": f"test_{n}", "outcome": "failed" if n % 2 else "passed"} for n in range(30)]
    assert counted(results) == "15 failed, 15 passed (" + ", ".join(f"test_{n}" for n in range(1, 20, 2)) + " ...)"


def test_step_that_takes_too_long_is_ended_and_says_so(imported: Any, run: Any) -> None:
    status, text = run.execute(
        [sys.executable, "-c", "import time; print('on', flush=True); time.sleep(60)"], limit=5.0
    )
    assert status != 0
    assert text.splitlines() == ["on", "ended after 5 s"]


HANGS = """
import sys, time
sys.path.insert(0, sys.argv[2])
import device_job
device_job.GRACE_S = 0.5
class System:
    details = {}
    def __init__(self, options): pass
    def begin(self, prompts, length, output_tokens): pass
    def run(self, prompts, output_tokens):
        time.sleep(60 if len(prompts) == 2 else 0)
        return {"first_tokens": [0]}
device_job.main(System, [])
"""


def test_system_that_hangs_in_one_case_answers_with_those_before_it(run: Any, tmp_path: Path) -> None:
    cases = [{"name": str(n), "prompts": n, "length": 1, "output_tokens": 1} for n in (1, 2)]
    job = {"options": {}, "cases": cases, "repeats": 1, "vocab": 2, "deadline_s": 3.0}
    (tmp_path / "job.json").write_text(json.dumps(job), "utf-8")
    peers = str(ROOT / "benchmarks" / "peers")
    status, text = run.execute([sys.executable, "-c", HANGS, str(tmp_path / "job.json"), peers], limit=120.0)
    assert status == 0
    assert list(json.loads(text)["cases"]) == ["1"]


def test_nothing_is_computed_where_the_backend_says_why(imported: Any, run: Any) -> None:
    finding = imported("device_run").Finding("ascend", "", (), devices=("Ascend",))
    imported("device_steps").check_attention(run, finding)
    (step,) = run.steps
    assert step.status == "not run"
    assert step.note


def test_modules_that_an_engine_lacks_are_named(
    imported: Any, run: Any, cpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = imported("device_steps")
    monkeypatch.setattr(steps, "COMPUTING_MODULES", ("torch", "no_such_module"))
    steps.check_engine(run, cpu)
    (step,) = run.steps
    assert (step.status, step.note) == ("failed", f"{sys.executable} has no no_such_module")


def test_window_is_where_all_requests_decode_and_none_is_prefilled(imported: Any) -> None:
    emissions = [(1.0, 1), (2.0, 2), (3.0, 2), (4.0, 2), (5.0, 1)]
    found = imported("decode_window").window_of(emissions, first_token=2.0, first_end=4.0, start=0.5)
    assert found == {"prefill_s": 1.5, "whole_s": 4.5, "window_s": 2.0, "window_tokens": 4}


def test_model_is_of_the_published_size(imported: Any) -> None:
    model = imported("device_shapes").QWEN3_0_6B
    norms = model.layers * (2 * model.hidden + 2 * model.head_dim) + model.hidden
    # Qwen3-0.6B has 596,049,920 parameters, the tied head counted once.
    assert model.matrix_parameters + model.vocab * model.hidden + norms == 596_049_920
    assert model.decode_bytes(2, 10) == 2 * model.step_weight_bytes + 10 * 114_688
