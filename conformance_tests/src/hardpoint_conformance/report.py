"""The report of a run: plain data with a schema, hashes, and what anybody can check of it without the hardware."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from types import NoneType
from typing import Any

from hardpoint_conformance.levels import PROFILES, Level
from hardpoint_conformance.outcomes import Outcome, Verdict
from hardpoint_conformance.processes import Start, run_process, start
from hardpoint_conformance.verdict import Judgement, judge
from hardpoint_conformance.waivers import can_waive, expired, names

SCHEMA = 1
"""Version of the format; a change that old readers would misread has a new one. Described in docs/conformance.md."""

FILE = "report.json"

FOUND = "pack.backend.found@1"
"""The clause that fails where a backend cannot be tested at all."""

_TEXT, _NUMBER = (str,), (int, float)
_MAYBE_TEXT = (str, NoneType)
_OBJECT = (dict,)

_LISTED: dict[str, tuple[type, ...]] = {
    "id": _TEXT,
    "clause": _TEXT,
    "level": (int,),
    "capabilities": (list,),
    "refusal": (bool,),
    "applies": (bool,),
}
"""What the list of tests has of each test; a result has it too."""

_FIELDS: dict[str, dict[str, tuple[type, ...]]] = {
    "": {
        "schema": (int,),
        "suite": _OBJECT,
        "backend": _OBJECT,
        "device": (dict, NoneType),
        "simulated": (bool,),
        "unavailable": _TEXT,
        "claims": (dict, NoneType),
        "selection": _OBJECT,
        "rules": _OBJECT,
        "results": (list,),
        "waivers": (list,),
        "environment": _OBJECT,
        "git": (dict, NoneType),
        "started": _TEXT,
        "seconds": _NUMBER,
        "verdict": _OBJECT,
        "digest": _TEXT,
    },
    "suite": {"version": _TEXT, "core": _TEXT, "contract": (int,), "list_sha256": _TEXT},
    "backend": {
        "name": _TEXT,
        "vendor": _MAYBE_TEXT,
        "distribution": _MAYBE_TEXT,
        "version": _MAYBE_TEXT,
        "entry_point": _MAYBE_TEXT,
        "api": (list, NoneType),
        "accelerator": (bool, NoneType),
    },
    "device": {"name": _TEXT, "index": (int,), "driver_version": _TEXT, "total_memory": (int,), "simulated": (bool,)},
    "selection": {
        "profile": _MAYBE_TEXT,
        "levels": (list,),
        "clauses": (list,),
        "seed": (int,),
        "explore": (int,),
    },
    "environment": {"python": _TEXT, "platform": _TEXT, "cpu": _TEXT, "cpu_count": (int,), "packages": _OBJECT},
    "verdict": {"outcome": _TEXT, "reasons": (list,), "notes": (list,)},
}
"""Fields and types of the report and of its parts."""

_RESULT: dict[str, tuple[type, ...]] = {
    **_LISTED,
    "node": _TEXT,
    "outcome": _TEXT,
    "message": _TEXT,
    "seconds": _NUMBER,
    "seed": (int, NoneType),
    "error_ratio": (int, float, NoneType),
    "reproduction": _TEXT,
}
_WAIVER: dict[str, tuple[type, ...]] = {"id": _TEXT, "reason": _TEXT, "until": _TEXT}


class ReportError(ValueError):
    """A file is not a report that can be read."""


def suite_version() -> str:
    """Return the version of this suite."""
    return version("hardpoint-conformance")


def canonical(data: Any) -> bytes:
    """Return the one form of plain data that is hashed."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def list_sha256(tests: Iterable[Mapping[str, Any]], claims: Mapping[str, Any] | None) -> str:
    """Return the hash of a list of tests (or of results) and of the claims that it was collected for."""
    listed = [{key: test[key] for key in _LISTED} for test in tests]
    return hashlib.sha256(canonical({"claims": claims, "tests": listed})).hexdigest()


def digest_of(report: Mapping[str, Any]) -> str:
    """Return the digest of everything in a report but its digest."""
    return hashlib.sha256(canonical({key: value for key, value in report.items() if key != "digest"})).hexdigest()


def read_report(file: Path) -> dict[str, Any]:
    """Return a report; raises ReportError with what makes it unreadable."""
    try:
        data = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ReportError(f"{file} cannot be read: {error}") from error
    if isinstance(data, dict) and data.get("schema") not in (SCHEMA, None):
        raise ReportError(f"{file} has schema {data['schema']!r}; this suite, {suite_version()}, knows {SCHEMA}")
    problems = list(schema_problems(data))
    if problems:
        raise ReportError(f"{file} is not a report of schema {SCHEMA}: " + "; ".join(problems[:8]))
    found: dict[str, Any] = data
    return found


def schema_problems(data: object) -> Iterator[str]:
    """Yield what a report lacks, has too much, or has with another type."""
    if not isinstance(data, dict):
        yield "it is not an object"
        return
    for part, fields in _FIELDS.items():
        value = data.get(part) if part else data
        if isinstance(value, dict):
            yield from _field_problems(value, fields, part or "report")
    for name, fields in (("results", _RESULT), ("waivers", _WAIVER)):
        entries = data.get(name)
        for number, entry in enumerate(entries if isinstance(entries, list) else ()):
            if isinstance(entry, dict):
                extra = {"waived_outcome": _TEXT, "waiver": _TEXT} if entry.get("outcome") == Outcome.WAIVED else {}
                yield from _field_problems(entry, fields | extra, f"{name}[{number}]")
                if name == "results" and entry.get("outcome") not in list(Outcome):
                    yield f"{name}[{number}].outcome is {entry.get('outcome')!r}"
            else:
                yield f"{name}[{number}] is not an object"


def _field_problems(value: Mapping[str, Any], fields: Mapping[str, tuple[type, ...]], where: str) -> Iterator[str]:
    for name, kinds in fields.items():
        if name not in value:
            yield f"{where} has no {name}"
        elif type(value[name]) not in kinds:
            yield f"{where}.{name} is {type(value[name]).__name__}"
    for name in value.keys() - fields.keys():
        yield f"{where} has an unknown field {name}"


def write_report(report: Mapping[str, Any], folder: Path) -> Path:
    """Write a report as JSON, JUnit XML and HTML into a folder; return the JSON file."""
    from hardpoint_conformance.html import to_html
    from hardpoint_conformance.junit import to_junit

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.xml").write_text(to_junit(report), "utf-8")
    (folder / "report.html").write_text(to_html(report), "utf-8")
    file = folder / FILE
    file.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", "utf-8")
    return file


# Collection


class CollectionFailed(RuntimeError):
    """The suite's tests could not be listed: a defect of the suite or of its installation."""


SUITE = Path(__file__).with_name("suite")


def pytest_arguments(*options: str) -> list[str]:
    """Return the arguments that run pytest over the suite, without the settings and plugins of wherever it is called."""
    ini = ["-c", str(SUITE / "pytest.ini"), "--rootdir", str(SUITE)]
    return ["-p", "hardpoint_conformance.plugin", "-p", "no:cacheprovider", "-p", "no:logging", *ini, *options]


def modules_for(levels: Iterable[int], clauses: Iterable[str]) -> list[Path]:
    """Return the modules that have all tests of some levels, or of some clauses or tests: importing all of them takes seconds."""
    modules = sorted(SUITE.glob("test_*.py"))
    ids = {name.partition("[")[0] for name in clauses}
    if not ids:
        wanted = tuple(f"test_l{int(level)}_" for level in levels)
        return [module for module in modules if module.name.startswith(wanted)]
    texts = {module: module.read_text("utf-8") for module in modules}
    if not all(any(f'"{name}"' in text for text in texts.values()) for name in ids):
        return modules
    return [module for module, text in texts.items() if any(f'"{name}"' in text for name in ids)]


def collect(
    claims: Mapping[str, Any],
    scratch: Path,
    modules: Sequence[Path] = (SUITE,),
    *,
    explore: int = 0,
    time_limit: float = 180.0,
    start: Start = start,
) -> list[dict[str, Any]]:
    """Return the list of the tests in some modules for a backend's claims, in order; none of the backend's code runs.

    Raises:
        CollectionFailed: with what pytest said.
    """
    claims_file, listing = scratch / "claims.json", scratch / "listing.json"
    claims_file.write_text(json.dumps(claims))
    listing.unlink(missing_ok=True)
    options = ["--collect-only", "-q", "--claims", str(claims_file), "--listing", str(listing)]
    options += ["--explore", str(explore), *map(str, modules)]
    output = scratch / "collection.txt"
    ended = run_process("pytest", pytest_arguments(*options), scratch, time_limit, output, start)
    if ended.code not in (0, 5) or not listing.exists():
        said = output.read_text("utf-8", "replace")[-3000:]
        raise CollectionFailed(f"the process that collects the tests {ended.how}: {said}{ended.stderr}")
    tests: list[dict[str, Any]] = json.loads(listing.read_text())
    return sorted(tests, key=lambda test: test["level"])


def select(tests: Iterable[Mapping[str, Any]], levels: Iterable[int], clauses: Iterable[str]) -> list[dict[str, Any]]:
    """Return the tests of some levels, and where clauses (or single tests) are named, of these only."""
    wanted, chosen = frozenset(levels), frozenset(clauses)
    return [
        dict(test)
        for test in tests
        if test["level"] in wanted and (not chosen or test["id"] in chosen or test["clause"] in chosen)
    ]


# Verification


def verify(report: Mapping[str, Any], start: Start = start) -> list[str]:
    """Return what is wrong with a report, one sentence each; [] when it is whole, and its verdict follows from its results.

    Needs no hardware and no backend. A digest shows damage and careless edits; it is no signature.

    Args:
        start: the process that lists the suite's tests.
    """
    problems = []
    if digest_of(report) != report["digest"]:
        problems.append("the digest does not agree with the contents: something was edited")
    suite, selection = report["suite"], report["selection"]
    if suite["version"] != suite_version():
        problems.append(
            f"it is a report of suite version {suite['version']}, and this is {suite_version()}: "
            "the list of tests can only be checked with that version"
        )
        return problems
    if list_sha256(report["results"], report["claims"]) != suite["list_sha256"]:
        problems.append("the list of tests or the claims are not those of the run: their hash differs")
    problems += _selection_problems(selection)
    problems += _list_problems(report, start)
    for result in report["results"]:
        problems += _result_problems(result, report)
    device = report["device"]
    if device is not None and device["simulated"] != report["simulated"]:
        problems.append("the device and the report do not agree on whether it is simulated")
    try:
        judgement = judge(report)
    except (KeyError, ValueError, TypeError) as error:
        return [*problems, f"what the backend claims cannot be read: {error!r}"]
    if report["verdict"] != _stated(judgement):
        stated, found = report["verdict"]["outcome"], judgement.verdict.value
        problems.append(
            f"its verdict is '{stated}', and its results say '{found}'"
            if stated != found
            else "its reasons or notes are not those that its results give"
        )
    return problems


def _selection_problems(selection: Mapping[str, Any]) -> Iterator[str]:
    profile, levels = selection["profile"], selection["levels"]
    if not set(levels) <= set(map(int, Level)):
        yield f"there are no such levels: {levels}"
    elif profile is not None and (profile not in PROFILES or levels != list(map(int, PROFILES[profile]))):
        yield f"the levels {levels} are not those of the profile '{profile}'"


def _list_problems(report: Mapping[str, Any], start: Start) -> Iterator[str]:
    results, selection = report["results"], report["selection"]
    if report["claims"] is None:
        if len(results) != 1 or results[0]["id"] != FOUND or not Outcome(results[0]["outcome"]).is_failure:
            yield "without claims a report can only say that the backend cannot be tested"
        return
    with tempfile.TemporaryDirectory(prefix="hardpoint-") as scratch:
        try:
            modules = modules_for(selection["levels"], selection["clauses"])
            everything = collect(report["claims"], Path(scratch), modules, explore=selection["explore"], start=start)
        except CollectionFailed as error:
            yield f"the list of tests cannot be made for these claims: {error}"
            return
    tests = select(everything, selection["levels"], selection["clauses"])
    listed = {test["id"]: {key: test[key] for key in _LISTED} for test in tests}
    reported = {result["id"]: {key: result[key] for key in _LISTED} for result in results}
    if {test["clause"]: test["rule"] for test in tests} != report["rules"]:
        yield "the texts of its rules are not those of this suite"
    if len(reported) < len(results):
        yield "a test has two results"
    for text, ids in (
        ("has no result for", [name for name in listed if name not in reported]),
        ("has results that the suite's list has not:", [name for name in reported if name not in listed]),
        (
            "has another level, other capabilities or other needs than the suite's list for",
            _differing(listed, reported),
        ),
    ):
        if ids:
            more = f" and {len(ids) - 5} more" if len(ids) > 5 else ""
            yield f"it {text} {', '.join(ids[:5])}{more}"


def _differing(listed: Mapping[str, Any], reported: Mapping[str, Any]) -> list[str]:
    return [name for name, test in listed.items() if name in reported and reported[name] != test]


def _result_problems(result: Mapping[str, Any], report: Mapping[str, Any]) -> Iterator[str]:
    outcome = Outcome(result["outcome"])
    skipped = Outcome.CLAIMED if result["refusal"] else Outcome.NOT_CLAIMED
    if not result["applies"] and outcome is not skipped:
        yield f"{result['id']} does not apply to these claims, and its result is '{outcome}'"
    if result["applies"] and not outcome.applies:
        yield f"{result['id']} applies to these claims, and its result is '{outcome}'"
    ratio = result["error_ratio"]
    if outcome is Outcome.PASSED and ratio is not None and not ratio <= 1:
        yield f"{result['id']} passed with an error of {ratio:g} times its bound"
    if outcome is Outcome.WAIVED:
        waiver = next((w for w in report["waivers"] if w["id"] == result["waiver"] and names(w, result)), None)
        if waiver is None or expired(waiver, report["backend"]["version"]):
            yield f"{result['id']} is waived, and no waiver says so"
        elif not can_waive(result["waived_outcome"], result["level"]):
            yield f"{result['id']} is waived, and cannot be"


def finish(report: dict[str, Any]) -> dict[str, Any]:
    """Return a report with its verdict and its digest."""
    report = report | {"verdict": _stated(judge(report))}
    return report | {"digest": digest_of(report)}


def _stated(judgement: Judgement) -> dict[str, Any]:
    return {"outcome": judgement.verdict.value, "reasons": judgement.reasons, "notes": judgement.notes}


def verdict_of(report: Mapping[str, Any]) -> Verdict:
    """Return the verdict that a report states."""
    return Verdict(report["verdict"]["outcome"])
