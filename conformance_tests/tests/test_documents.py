"""The committed documents that are generated agree with the suite."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hardpoint_conformance.compare import backend_table, replaced
from hardpoint_conformance.mutants import mutants
from hardpoint_conformance.outcomes import Verdict
from hardpoint_conformance.report import read_report, verdict_of
from hardpoint_conformance.specification import all_clauses, to_markdown

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
REPORTS = sorted((DOCS / "reports").glob("*.json"))


def test_specification_is_the_suites() -> None:
    written = (DOCS / "spec.md").read_text("utf-8")
    assert written == to_markdown(all_clauses()), "run `hardpoint conformance list --markdown > docs/spec.md`"


def test_kill_matrix_has_every_mutant() -> None:
    rows = re.findall(r"^\| `(\w+)` \|.*?\| (\w+) \|", (DOCS / "kill-matrix.md").read_text("utf-8"), re.MULTILINE)
    assert {name for name, verdict in rows if verdict == "killed"} == {
        one.name for one in mutants() if not one.harmless
    }


def test_every_backend_of_the_tree_has_a_report() -> None:
    assert [file.stem for file in REPORTS] == ["ascend", "cpu", "cuda", "rocm", "triton_interpreter"]


@pytest.mark.parametrize("file", REPORTS, ids=lambda file: file.stem)
def test_committed_report_is_conformant(file: Path) -> None:
    report = read_report(file)
    assert report["backend"]["name"] == file.stem
    assert verdict_of(report) is (Verdict.SIMULATED if report["simulated"] else Verdict.CONFORMANT)


def test_table_of_the_readme_is_that_of_the_reports() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    table = backend_table([(file, read_report(file)) for file in REPORTS], ROOT)
    assert replaced(readme, table) == readme, "run `hardpoint conformance table docs/reports/*.json --write README.md`"
