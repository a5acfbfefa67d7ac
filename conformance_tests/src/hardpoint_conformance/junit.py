"""A report as JUnit XML, for the tools of CI."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree

from hardpoint_conformance.levels import Level
from hardpoint_conformance.outcomes import Outcome

_AS_FAILURE = frozenset({Outcome.FAILED})
_AS_ERROR = frozenset({Outcome.ERROR, Outcome.CRASHED, Outcome.HUNG, Outcome.NOT_RUN})


def to_junit(report: Mapping[str, Any]) -> str:
    """Return JUnit XML: a suite for each level, a case for each test; what was not run or is waived is skipped, with its reason."""
    backend = report["backend"]["name"] + (" (simulated)" if report["simulated"] else "")
    root = ElementTree.Element("testsuites", name=f"hardpoint conformance: {backend}")
    for level in report["selection"]["levels"]:
        results = [result for result in report["results"] if result["level"] == level]
        outcomes = [Outcome(result["outcome"]) for result in results]
        failures = sum(outcome in _AS_FAILURE for outcome in outcomes)
        errors = sum(outcome in _AS_ERROR for outcome in outcomes)
        suite = ElementTree.SubElement(
            root,
            "testsuite",
            name=f"{Level(level)} {Level(level).title}",
            tests=str(len(results)),
            failures=str(failures),
            errors=str(errors),
            skipped=str(len(results) - failures - errors - outcomes.count(Outcome.PASSED)),
            time=f"{sum(result['seconds'] for result in results):.3f}",
            timestamp=report["started"],
        )
        for result in results:
            _case(suite, result, backend, report["rules"].get(result["clause"], ""))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _case(suite: ElementTree.Element, result: Mapping[str, Any], backend: str, rule: str) -> None:
    case = ElementTree.SubElement(
        suite,
        "testcase",
        name=result["id"],
        classname=f"{backend}.{Level(result['level'])}",
        time=f"{result['seconds']:.4f}",
    )
    outcome = Outcome(result["outcome"])
    if outcome is Outcome.PASSED:
        return
    tag = "failure" if outcome in _AS_FAILURE else "error" if outcome in _AS_ERROR else "skipped"
    text = _printable(result["message"])
    lines = text.strip().splitlines() or [outcome.value]
    first = next((line for line in lines if line.startswith("got: ")), lines[-1])
    node = ElementTree.SubElement(case, tag, message=f"{outcome}: {first}"[:500])
    if tag != "skipped":
        node.text = f"rule: {rule}\n{text}\n\nrepeat: {result['reproduction']}"


def _printable(text: str) -> str:
    """Return a text without the characters that XML cannot hold."""
    return "".join(c for c in text if c in "\t\n" or (c.isprintable() and c.isascii()) or ord(c) > 0x9F)
