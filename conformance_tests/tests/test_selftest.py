"""The proof of the suite: faults are found, what is none is not accused, and the forks leave nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hardpoint_conformance.clauses import Clause
from hardpoint_conformance.forks import Case, Ended, Job, collect
from hardpoint_conformance.kill_matrix import Finding, KillMatrix, Verdict
from hardpoint_conformance.levels import Level
from hardpoint_conformance.mutants import Mutant, mutant_named, mutants
from hardpoint_conformance.mutants.reasons import WITHOUT_A_MUTANT
from hardpoint_conformance.report import ReportError, read_report
from hardpoint_conformance.selftest import alarms, reported_control, verdict

RUN = """
import json, sys
from pathlib import Path
from hardpoint_conformance.selftest import selftest
names, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
code = selftest(names, seeds=0, jobs=2, report=folder / "report", markdown=folder / "matrix.md")
import torch
(folder / "threads").write_text(str(torch.get_num_threads()))
sys.exit(code)
"""
MUTANT = Mutant("one_key_more", "It sees one key more.", ("attn.a.b@1", "attn.a.c@1"), lambda target: target)
CLAUSES = tuple(Clause(id, Level.ATTENTION_CORE, "A rule.") for id in ("attn.a.b@1", "attn.a.c@1", "attn.a.d@1"))


def run(tmp_path: Path, *names: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Run the proof with some mutants in a process of its own; return how it ended, and its report."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    ended = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(names), str(tmp_path)],
        capture_output=True,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        | {"TMPDIR": str(temporary), "CI": "true"},
        timeout=240,
        check=False,
    )
    report = tmp_path / "report" / "selftest.json"
    return ended, json.loads(report.read_text()) if report.exists() else {}


def test_faults_are_found_and_the_forks_leave_nothing(tmp_path: Path) -> None:
    ended, report = run(tmp_path, "window_ignored", "later_contract_only", "fill_sets_half")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert {one["name"]: one["verdict"] for one in report["mutants"]} == {
        "window_ignored": "killed",
        "later_contract_only": "killed",
        "fill_sets_half": "killed",
    }
    # Megabytes that differ are told in a line, on a CI system too.
    assert all("stopped after" not in clause["reason"] for one in report["mutants"] for clause in one["clauses"])
    assert report["holds"]
    assert "| `window_ignored` |" in (tmp_path / "matrix.md").read_text()
    # Threads of two forks would spin while they wait for one that has no core.
    assert int((tmp_path / "threads").read_text()) == max(1, len(os.sched_getaffinity(0)) // 2)
    # torch makes the folder of its compiler when parts of it are imported.
    assert not [left.name for left in (tmp_path / "temporary").iterdir() if not left.name.startswith("torchinductor")]


def test_a_second_correct_backend_is_not_accused(tmp_path: Path) -> None:
    """One whose memory never sleeps: of the mutants without a fault the one with the fewest clauses (`make selftest` runs all)."""
    ended, report = run(tmp_path, "memory_that_never_sleeps")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert [one["verdict"] for one in report["mutants"]] == ["unharmed"]


def test_every_mutant_is_named_once_and_meant_for_clauses() -> None:
    names = [mutant.name for mutant in mutants()]
    assert len(names) == len(set(names))
    assert sum(not mutant.harmless for mutant in mutants()) >= 45
    assert all(mutant.killed_by for mutant in mutants())
    assert mutant_named("window_ignored").name == "window_ignored"
    with pytest.raises(KeyError):
        mutant_named("no_such_mutant")


def test_clauses_that_the_correct_backend_does_not_call_for_are_shown_to_pass_by_another() -> None:
    applying = {case.clause.id for case in collect("cpu") if case.applies}
    shown = {clause for mutant in mutants() if mutant.harmless for clause in mutant.killed_by}
    meant = {clause for mutant in mutants() for clause in mutant.killed_by}
    assert {"alloc.transaction.refused@1", "graph.replay.metadata@1"} <= meant - applying
    assert meant - applying <= shown


def test_every_clause_has_a_mutant_or_a_reason() -> None:
    clauses = {case.clause.id for case in collect("cpu")}
    meant = {clause for mutant in mutants() if not mutant.harmless for clause in mutant.killed_by}
    assert WITHOUT_A_MUTANT.keys() == clauses - meant
    assert meant <= clauses


def result(clause: str, outcome: str) -> dict[str, Any]:
    return {"id": f"{clause}[x]", "clause": clause, "outcome": outcome, "message": "E   AssertionError: 1 != 2"}


def ended(*results: dict[str, Any], running: str = "", end: str = "") -> Ended:
    return Ended(Job("one_key_more", (), MUTANT.killed_by, "one_key_more"), results, running, end, 1.0)


def test_a_mutant_that_no_clause_finds_survives() -> None:
    found = verdict(MUTANT, ended(result("attn.a.b@1", "passed"), result("attn.a.c@1", "skipped")))
    assert [one.outcome for one in found.findings] == ["survived", "not run"]
    assert found.outcome == "survived"
    assert not matrix(found).holds
    assert any("SURVIVED: one_key_more" in line for line in matrix(found).summary())


def test_a_crash_counts_for_the_clause_whose_test_was_running() -> None:
    crash = f"ended by {signal.SIGSEGV.name}"
    found = verdict(MUTANT, ended(result("attn.a.b@1", "passed"), running="attn.a.c@1[x]", end=crash))
    assert [one.outcome for one in found.findings] == ["survived", "crashed"]
    assert found.outcome == "killed"
    assert verdict(MUTANT, ended(end=crash)).outcome == "survived"


def test_a_failure_without_a_fault_is_a_false_alarm() -> None:
    run = ended(result("attn.a.b@1", "failed"), end="stopped after 60 s")
    assert list(alarms([run])) == [
        "attn.a.b@1[x] (--seed 0): AssertionError: 1 != 2",
        "one_key_more (--seed 0): stopped after 60 s",
    ]


REPORTS = Path(__file__).parents[2] / "docs" / "reports"
WINDOW = mutant_named("window_ignored")


def cases_of(*clauses: str) -> list[Case]:
    return [Case(f"{id}[x]", Clause(id, Level.ATTENTION_CORE, "A rule."), "test_x.py", False) for id in clauses]


@pytest.mark.usefixtures("collect_once")
def test_a_report_of_the_correct_backend_stands_for_the_control() -> None:
    results = read_report(REPORTS / "cpu.json")["results"]
    meant = [one for one in results if one["clause"] in WINDOW.killed_by and one["outcome"] == "passed"]
    assert reported_control(REPORTS / "cpu.json", [WINDOW], cases_of(*WINDOW.killed_by)) == len(meant) > 0


@pytest.mark.usefixtures("collect_once")
def test_no_other_report_stands_for_the_control(tmp_path: Path) -> None:
    cases = cases_of(*WINDOW.killed_by)
    with pytest.raises(ReportError, match=r"it says of cuda: .*did not pass in it"):
        reported_control(REPORTS / "cuda.json", [WINDOW], cases)
    edited = read_report(REPORTS / "cpu.json")
    next(one for one in edited["results"] if one["clause"] == WINDOW.killed_by[0])["outcome"] = "failed"
    (tmp_path / "report.json").write_text(json.dumps(edited), "utf-8")
    with pytest.raises(ReportError, match="cannot stand for the control"):
        reported_control(tmp_path / "report.json", [WINDOW], cases)
    with pytest.raises(ReportError, match=r"attn\.a\.b@1 did not pass"):
        reported_control(REPORTS / "cpu.json", [MUTANT], cases_of("attn.a.b@1"))


def test_the_matrix_names_the_clauses_that_nothing_proves() -> None:
    killed = Verdict(MUTANT, (Finding("attn.a.b@1", "killed", "attn.a.b@1[x]"), Finding("attn.a.c@1", "survived")), 1.0)
    found = matrix(killed)
    assert found.holds
    assert [clause.id for clause in found.proved] == ["attn.a.b@1"]
    assert [clause.id for clause in found.unproved] == ["attn.a.c@1", "attn.a.d@1"]
    assert "- `attn.a.d@1` (L2): " in found.markdown()
    assert "attn.a.d@1" in found.html()


def matrix(*verdicts: Verdict) -> KillMatrix:
    return KillMatrix(verdicts, CLAUSES, control_tests=1, seeds=0, seeded_tests=0, false_alarms=(), seconds=1.0)
