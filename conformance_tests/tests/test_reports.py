"""Reports: what a run writes, what `verify` finds out, waivers, and reports beside one another."""

from __future__ import annotations

import ast
import copy
import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from hardpoint_conformance.cli import app
from hardpoint_conformance.compare import BEGIN, END
from hardpoint_conformance.html import to_html
from hardpoint_conformance.levels import Level
from hardpoint_conformance.outcomes import OWN_ALLOCATOR, Verdict
from hardpoint_conformance.report import SUITE, digest_of, finish, list_sha256, read_report, verify
from hardpoint_conformance.runner import divided
from hardpoint_conformance.target import MUTANT_VARIABLE
from hardpoint_conformance.verdict import Standing, judge, standings
from hardpoint_conformance.waivers import apply_waivers, read_waivers

Report = dict[str, Any]

pytestmark = pytest.mark.usefixtures("collect_once", "one_fork_server")


def call(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a report on the CPU backend's packaging."""
    folder = tmp_path_factory.mktemp("report")
    code, output = call("run", "--backend", "cpu", "--level", "L0", "--report", folder)
    assert code == 0, output
    assert "conformant" in output
    return folder


@pytest.fixture
def report(folder: Path) -> Report:
    return read_report(folder / "report.json")


def edited(report: Report, edit: Callable[[Report], None]) -> Report:
    changed = copy.deepcopy(report)
    edit(changed)
    return changed


def with_digest(report: Report) -> Report:
    return report | {"digest": digest_of(report)}


def test_report_says_what_was_tested(report: Report) -> None:
    assert report["backend"]["distribution"] == "hardpoint-cpu"
    assert report["simulated"] is False
    assert report["verdict"] == {"outcome": "conformant", "reasons": [], "notes": []}
    assert len(report["results"]) > 12
    assert {result["outcome"] for result in report["results"]} == {"passed"}
    assert report["environment"]["packages"]["torch"]
    assert report["claims"]["attention"]["dtypes"]
    assert all(report["rules"][result["clause"]] for result in report["results"])


def test_other_forms_have_every_test(report: Report, folder: Path) -> None:
    cases = ElementTree.parse(folder / "report.xml").getroot().iter("testcase")
    assert [case.attrib["name"] for case in cases] == [result["id"] for result in report["results"]]
    page = (folder / "report.html").read_text()
    assert "Conformant" in page
    assert "<script" not in page
    assert "http" not in page


def test_whole_report_is_verified(folder: Path) -> None:
    code, output = call("verify", "--conformant", folder / "report.json")
    assert code == 0, output


EDITS: dict[str, tuple[Callable[[Report], None], str]] = {
    "result": (lambda r: r["results"][3].update(outcome="failed"), "something was edited"),
    "time": (lambda r: r.update(seconds=1.0), "something was edited"),
}
EDITS_WITH_DIGEST: dict[str, tuple[Callable[[Report], None], str]] = {
    "test-left-out": (lambda r: r["results"].pop(), "has no result for"),
    "test-added": (
        lambda r: r["results"].append(r["results"][0] | {"id": "pack.more@1"}),
        "that the suite's list has not",
    ),
    "test-twice": (lambda r: r["results"].append(r["results"][0]), "two results"),
    "test-of-less": (lambda r: r["results"][0].update(level=1), "another level"),
    "capability-added": (
        lambda r: r["claims"]["attention"]["kv_dtypes"]["float32"].append("int8"),
        "their hash differs",
    ),
    "capability-removed": (lambda r: r["claims"]["attention"].update(dtypes=[], kv_dtypes={}), "other needs"),
    "capability-unknown": (lambda r: r["claims"]["attention"]["features"].append("telepathy"), "cannot be"),
    "limit": (lambda r: r["claims"]["attention"].update(max_context=7), "their hash differs"),
    "verdict": (lambda r: r["results"][0].update(outcome="hung"), "its results say 'not conformant'"),
    "rule": (lambda r: r["rules"].update({"pack.import.light@1": "Anything goes."}), "texts of its rules"),
    "bound": (lambda r: r["results"][0].update(error_ratio=1.5), "1.5 times its bound"),
    "level": (lambda r: r["selection"].update(levels=[0, 1]), "has no result for"),
    "simulated": (lambda r: r.update(simulated=True), "whether it is simulated"),
    "version": (lambda r: r["suite"].update(version="0.0.9"), "suite version 0.0.9"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_edit_shows_in_the_digest(report: Report, edit: str) -> None:
    change, text = EDITS[edit]
    assert any(text in problem for problem in verify(edited(report, change)))


@pytest.mark.parametrize("edit", EDITS_WITH_DIGEST)
def test_edit_shows_where_the_digest_is_made_anew(report: Report, edit: str) -> None:
    change, text = EDITS_WITH_DIGEST[edit]
    problems = verify(with_digest(edited(report, change)))
    assert any(text in problem for problem in problems), problems
    assert not any("something was edited" in problem for problem in problems)


def test_list_edit_shows_where_all_hashes_are_made_anew(report: Report) -> None:
    def leave_out(changed: Report) -> None:
        changed["results"].pop()
        changed["suite"]["list_sha256"] = list_sha256(changed["results"], changed["claims"])

    assert any("has no result for" in problem for problem in verify(finish(edited(report, leave_out))))


def test_edited_file_fails_the_command(report: Report, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    file.write_text(json.dumps(report | {"started": "yesterday"}))
    code, output = call("verify", file)
    assert code == 1
    assert "edited" in output
    file.write_text(json.dumps({key: value for key, value in report.items() if key != "claims"}))
    code, output = call("verify", file)
    assert code == 1
    assert "has no claims" in output
    file.write_text("{")
    assert call("verify", file)[0] == 1


def result(clause: str, outcome: str, *, level: int = 2, capability: str = "", refusal: bool = False) -> Report:
    return {
        "id": clause,
        "clause": clause,
        "level": level,
        "capabilities": [capability] if capability else [],
        "refusal": refusal,
        "applies": outcome not in ("claimed", "not_claimed"),
        "outcome": outcome,
        "message": "",
    }


def judged(report: Report, *results: Report, levels: tuple[int, ...] = (2,), **changes: Any) -> tuple[Verdict, str]:
    selection = {"profile": None, "levels": list(levels), "clauses": [], "seed": 0, "explore": 0}
    made = report | {"results": list(results), "selection": selection} | changes
    judgement = judge(made)
    return judgement.verdict, "; ".join(judgement.reasons)


PASSED = result("attn.a@1", "passed", capability="attention")


def test_zero_tests_are_a_failure(report: Report) -> None:
    assert judged(report)[1].startswith("no test was run")
    verdict, reasons = judged(report, result("attn.a@1", "not_claimed", capability="attention.sinks"))
    assert (verdict, "no test was run" in reasons) == (Verdict.NOT_CONFORMANT, True)


@pytest.mark.parametrize("outcome", ["failed", "error", "crashed", "hung", "not_run"])
def test_one_failure_is_enough(report: Report, outcome: str) -> None:
    verdict, reasons = judged(report, PASSED, result("attn.b@1", outcome))
    assert verdict is Verdict.NOT_CONFORMANT
    assert "attn.b@1" in reasons


def test_claim_without_a_passed_test_is_not_proved(report: Report) -> None:
    skipped = result("attn.sinks@1", "not_testable", capability="attention.sinks")
    verdict, reasons = judged(report, PASSED, skipped)
    assert verdict is Verdict.NOT_CONFORMANT
    assert "'attention.sinks' is claimed, and no test that proves it" in reasons
    assert "attn.sinks@1 could not be tested in any case" in reasons


def test_what_is_not_claimed_must_be_refused(report: Report) -> None:
    none = edited(report, lambda r: r["claims"]["attention"]["features"].remove("sinks"))
    refused = result("attn.sinks.refused@1", "passed", capability="attention.sinks", refusal=True)
    assert judged(none, PASSED, refused) == (Verdict.CONFORMANT, "")
    verdict, reasons = judged(none, PASSED, refused | {"outcome": "not_testable"})
    assert verdict is Verdict.NOT_CONFORMANT
    assert "no test showed that it is refused cleanly" in reasons


def test_core_cannot_be_left_out(report: Report) -> None:
    none = edited(report, lambda r: r["claims"]["attention"].update(dtypes=[], kv_dtypes={}))
    verdict, reasons = judged(none, result("attn.b@1", "passed"))
    assert verdict is Verdict.NOT_CONFORMANT
    assert "cannot be left out" in reasons


def test_full_run_needs_a_proof_of_every_claim(report: Report) -> None:
    everything = [result(f"attn.l{level}@1", "passed", level=level, capability="attention") for level in range(7)]
    reasons = judged(report, *everything, levels=tuple(range(7)))[1]
    assert "'memory.elastic' is claimed" in reasons
    assert "'attention' is claimed" not in reasons


def test_simulation_is_never_more_than_that(report: Report) -> None:
    skipped = result("attn.b@1", "not_testable")
    assert judged(report, PASSED, simulated=True)[0] is Verdict.SIMULATED
    assert judged(report, PASSED, skipped, simulated=True)[0] is Verdict.SIMULATED
    assert judged(report, PASSED, skipped)[0] is Verdict.NOT_CONFORMANT
    assert judged(report, skipped, simulated=True)[0] is Verdict.NOT_CONFORMANT


def test_a_backend_without_a_driver_is_judged_by_its_allocator(report: Report) -> None:
    about_a_driver = result("driver.a@1", "not_testable", level=1) | {"message": OWN_ALLOCATOR}
    allocator = result("alloc.a@1", "passed", level=1)
    assert judged(report, PASSED, allocator, about_a_driver, levels=(1, 2)) == (Verdict.CONFORMANT, "")
    verdict, reasons = judged(report, PASSED, about_a_driver, levels=(1, 2))
    assert (verdict, "no test of level L1 could be run" in reasons) == (Verdict.NOT_CONFORMANT, True)


def test_standing_of_capabilities(report: Report) -> None:
    found = standings(report)
    assert found["attention"] is Standing.PROVED
    assert found["memory.elastic"] is Standing.OUT_OF_SCOPE


# Waivers

WAIVER = {"id": "attn.b@1", "reason": "the device rounds the other way", "until": "9.0"}


def waived(report: Report, outcome: str, waiver: dict[str, str] = WAIVER, *, level: int = 2) -> tuple[Verdict, str]:
    results = [PASSED, result("attn.b@1", outcome, level=level)]
    marked = apply_waivers(results, [waiver], report["backend"]["version"])
    return judged(report, *marked, levels=tuple({2, level}), waivers=[waiver])


def test_waived_failure_is_shown_in_the_verdict(report: Report) -> None:
    assert waived(report, "failed") == (Verdict.WITH_WAIVERS, "")
    assert waived(report, "failed", WAIVER | {"until": "0.1.0"})[0] is Verdict.NOT_CONFORMANT
    assert "is not needed" in waived(report, "passed")[1]


@pytest.mark.parametrize(("outcome", "level"), [("crashed", 2), ("hung", 2), ("failed", 0)])
def test_crash_and_packaging_cannot_be_waived(report: Report, outcome: str, level: int) -> None:
    verdict, reasons = waived(report, outcome, level=level)
    assert verdict is Verdict.NOT_CONFORMANT
    assert "what cannot be waived" in reasons


def test_waivers_are_read_from_toml_and_json(tmp_path: Path) -> None:
    toml = tmp_path / "waivers.toml"
    toml.write_text('[[waivers]]\nid = "attn.b@1"\nreason = "the device rounds the other way"\nuntil = "9.0"\n')
    assert read_waivers(toml) == [WAIVER]
    file = tmp_path / "waivers.json"
    for wrong in (
        {},
        {"waivers": [WAIVER, WAIVER]},
        {"waivers": [{"id": "a"}]},
        {"waivers": [WAIVER | {"until": "soon"}]},
    ):
        file.write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=r"waiver|until"):
            read_waivers(file)


def test_waiver_of_nothing_known_is_a_usage_error(tmp_path: Path) -> None:
    file = tmp_path / "waivers.json"
    file.write_text(json.dumps({"waivers": [WAIVER | {"id": "attn.no-such-rule@1"}]}))
    code, output = call("run", "--backend", "cpu", "--level", "L0", "--waivers", file)
    assert code == 2
    assert "attn.no-such-rule@1" in output


# The command line


@pytest.mark.parametrize(
    "arguments",
    [
        ["--backend", "nobody"],
        ["--backend", "cpu", "--level", "L7"],
        ["--backend", "cpu", "--level", "L0", "--profile", "full"],
        ["--backend", "cpu", "--profile", "everything"],
        ["--backend", "cpu", "--clause", "pack.import.light@1", "--level", "L0"],
        ["--backend", "cpu", "--clause", "pack.no-such-rule@1"],
        ["--backend", "cpu", "--device", "7"],
        ["--backend", "cpu", "--resume"],
        ["--backend", "cpu", "--simulated"],
        ["--backend", "cpu", "--waivers", "a-file-that-is-not-there.toml"],
        [],
    ],
    ids=" ".join,
)
def test_wrong_options_exit_with_2(arguments: list[str]) -> None:
    assert call("run", *arguments)[0] == 2


def test_list_has_every_clause_once() -> None:
    clauses = json.loads(call("list", "--json")[1])
    ids = [clause["id"] for clause in clauses]
    assert len(ids) == len(set(ids)) > 10
    assert all(clause["text"].endswith((".", ")")) for clause in clauses)
    text = call("list", "--markdown")[1]
    assert all(f"`{name}`" in text for name in ids)


def test_modules_are_named_after_the_level_of_their_clauses() -> None:
    for file in SUITE.glob("test_*.py"):
        module = import_module(f"hardpoint_conformance.suite.{file.stem}")
        marks = [mark for value in vars(module).values() for mark in getattr(value, "pytestmark", ())]
        levels = {mark.kwargs["clause"].level for mark in marks if mark.name == "conformance"}
        assert levels == {Level.of(file.name[5:7])}, file.name


def test_an_assertion_without_values_has_a_message() -> None:
    """A failure says what was found: by both sides of a comparison, by the arguments of a check, or else in words."""
    checks = ("same_bits", "isinstance")
    silent = [
        f"{file.name}:{node.lineno}"
        for file in SUITE.glob("test_*.py")
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.Assert) and node.msg is None and not isinstance(node.test, ast.Compare)
        if not (isinstance(node.test, ast.Call) and ast.unparse(node.test.func) in checks)
    ]
    assert silent == []


def test_run_is_resumed_from_what_was_finished(tmp_path: Path) -> None:
    clauses = ["--clause", "pack.name.agrees@1", "--clause", "pack.api.range@1"]
    assert call("run", "--backend", "cpu", *clauses, "--report", tmp_path)[0] == 0
    progress = tmp_path / "progress.jsonl"
    lines = progress.read_text().splitlines(keepends=True)
    marked = json.loads(lines[1])
    marked["told"]["seconds"] = 77.0
    progress.write_text(lines[0] + json.dumps(marked) + "\n" + lines[2][:10])
    code, output = call("run", "--backend", "cpu", *clauses, "--report", tmp_path, "--resume")
    assert (code, "2 tests, 1 to run" in output) == (0, True)
    report = read_report(tmp_path / "report.json")
    assert {r["id"]: r["seconds"] for r in report["results"]}[marked["id"]] == 77.0
    assert report["verdict"]["outcome"] == "partial"
    other_seed = call("run", "--backend", "cpu", *clauses, "--report", tmp_path, "--resume", "--seed", "1")
    assert "2 tests, 2 to run" in other_seed[1]


def test_reports_beside_one_another(report: Report, folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    failed = edited(report, lambda r: r["results"][0].update(outcome="crashed"))
    other.write_text(json.dumps(finish(failed | {"simulated": False})))
    files = [folder / "report.json", other]
    text = call("compare", *files, "--by", "clauses")[1]
    assert "crashed 1 of 1" in text
    assert "not conformant" in text
    page, table = tmp_path / "matrix.html", tmp_path / "matrix.md"
    assert call("compare", *files, "--html", page, "--markdown", table)[0] == 0
    assert "proved" in page.read_text()
    assert "| attention | proved | proved |" in table.read_text()
    assert call("compare", *files, "--by", "colour")[0] == 2


def test_table_of_backends_is_written_and_checked(folder: Path, tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"# Title\n\n{BEGIN}\n{END}\n\nrest\n")
    file = folder / "report.json"
    assert call("table", file, "--check", readme)[0] == 1
    assert call("table", file, "--write", readme)[0] == 0
    assert call("table", file, "--check", readme)[0] == 0
    text = readme.read_text()
    assert "| `cpu` | hardpoint-cpu" in text
    assert text.endswith(f"{END}\n\nrest\n")
    readme.write_text("no marks")
    assert call("table", file, "--write", readme)[0] == 2


def test_report_is_written_in_other_forms(folder: Path, tmp_path: Path) -> None:
    page, xml, text = tmp_path / "a.html", tmp_path / "a.xml", tmp_path / "a.md"
    file = folder / "report.json"
    assert call("report", file, "--html", page, "--junit", xml, "--markdown", text)[0] == 0
    assert page.read_text() == (folder / "report.html").read_text()
    assert xml.read_text() == (folder / "report.xml").read_text()
    assert text.read_text().startswith("# Conformance of cpu")
    assert "conformant" in call("report", file)[1]


def test_page_escapes_what_a_backend_says(report: Report) -> None:
    def spoil(changed: Report) -> None:
        changed["backend"]["vendor"] = "<script>alert(1)</script>"
        changed["results"][0].update(outcome="failed", message="<img src=x>\x00", error_ratio=40.0)

    page = to_html(finish(edited(report, spoil)))
    assert "<script>" not in page
    assert "<img" not in page
    assert "40" in page


# What failures say


def test_a_failure_says_rule_expected_got_cause_and_how_to_repeat_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MUTANT_VARIABLE, "out_of_memory_returns_handle")
    code, output = call("run", "--backend", "cpu", "--clause", "driver.memory.out-of-memory@1", "--report", tmp_path)
    lines = (
        "rule: Taking more memory than the device has ends with OUT_OF_MEMORY",
        "expected: an error, pytest.raises(DeviceOutOfMemory), of: handles += (driver.create(size)",
        "got: no error was raised (DeviceOutOfMemory was due) (and after it: DriverError: driver call release failed",
        "likely cause: Out of memory is answered with a handle of nothing, and OK; or ",
        "repeat: hardpoint conformance run --backend cpu --clause driver.memory.out-of-memory@1 --seed 0",
    )
    assert code == 1
    assert [line for line in lines if line not in output.replace("\n", "")] == []
    junit = (tmp_path / "report.xml").read_text()
    assert [line for line in lines if line not in junit] == []


def test_tests_that_look_at_free_memory_run_alone_on_an_accelerator() -> None:
    levels = {"test_l1_driver": 1, "test_l2_attention": 2, "test_l4_worker": 4}
    tests = [{"node": f"{module}.py::test_one", "level": level} for module, level in levels.items()]
    assert divided(tests, accelerator=True) == ([tests[0], tests[2]], [tests[1]])
    assert divided(tests, accelerator=False) == ([], tests)


@pytest.mark.parametrize("accelerator", [True, False])
def test_the_driver_is_tested_before_what_stands_on_it(accelerator: bool) -> None:
    modules = ("test_l0_packaging", "test_l1_allocator", "test_l1_driver", "test_l1_faults")
    tests = [{"node": f"{module}.py::test_one", "level": int(module[6])} for module in modules]
    alone, beside = divided(tests, accelerator=accelerator)
    order = [test["node"].partition(".")[0] for test in (alone or beside) if test["level"] == 1]
    assert order == ["test_l1_driver", "test_l1_allocator", "test_l1_faults"]
