"""The verdict: what the results of a run say of the backend, recomputed by whoever reads a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from hardpoint_conformance.claims import CLAIMS, claimed, from_json
from hardpoint_conformance.levels import Level
from hardpoint_conformance.outcomes import OWN_ALLOCATOR, Outcome, Verdict
from hardpoint_conformance.waivers import expired

CORE = "attention"
"""What a backend cannot leave out in a run with the levels that need it."""

CORE_LEVELS = frozenset({Level.ATTENTION_CORE, Level.WORKER})


class Standing(StrEnum):
    """What a run shows of one capability.

    PROVED: claimed, and all that was to be run passed. FAILED: claimed, and something failed. WAIVED: claimed, and what failed is waived.
    UNPROVED: claimed, and nothing that proves it was run and passed. REFUSED: not claimed, and its refusal passed. NOT_REFUSED: not
    claimed, and the clauses that are to prove a clean refusal did not pass. NOT_CLAIMED: not claimed, and no clause asks for its refusal.
    NOT_TESTABLE: claimed, and on a simulated driver nothing that proves it could be run. OUT_OF_SCOPE: no test of the levels that
    were run is about it.
    """

    PROVED = "proved"
    FAILED = "failed"
    WAIVED = "waived"
    UNPROVED = "unproved"
    REFUSED = "refused"
    NOT_REFUSED = "not refused"
    NOT_CLAIMED = "not claimed"
    NOT_TESTABLE = "not testable"
    OUT_OF_SCOPE = "out of scope"


class Judgement(NamedTuple):
    """A verdict, the reasons against conformance, and what it does not cover, one sentence each."""

    verdict: Verdict
    reasons: list[str]
    notes: list[str]


def judge(report: Mapping[str, Any]) -> Judgement:
    """Return what a report's results say; a pure function of them, of the claims, the waivers and the levels."""
    results: Sequence[Mapping[str, Any]] = report["results"]
    untestable, of_a_driver = _untestable(results)
    reasons = [*_unconditional(results), *_waivers(report)]
    notes: list[str] = []
    if report["selection"]["clauses"]:
        return Judgement(Verdict.NOT_CONFORMANT if reasons else Verdict.PARTIAL, reasons, notes)
    if report["simulated"]:
        if untestable:
            notes.append(f"not shown on a simulated driver: {len(untestable)} clauses ({', '.join(untestable)})")
    else:
        reasons += [f"{clause} could not be tested in any case" for clause in untestable]
    if of_a_driver:
        notes.append(f"not called for, since the backend has no memory driver: {len(of_a_driver)} clauses")
    some = sum(result["outcome"] == Outcome.NOT_TESTABLE for result in results)
    if some:
        notes.append(f"{_tests(some)} not testable here, each shown with its reason")
    if report["claims"] is None:
        reasons.append("what the backend claims is not known")
    else:
        reasons += _capabilities(report)
    if reasons:
        return Judgement(Verdict.NOT_CONFORMANT, reasons, notes)
    if any(result["outcome"] == Outcome.WAIVED for result in results):
        return Judgement(Verdict.WITH_WAIVERS, reasons, notes)
    return Judgement(Verdict.SIMULATED if report["simulated"] else Verdict.CONFORMANT, reasons, notes)


def _unconditional(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    counts = Counter(Outcome(result["outcome"]) for result in results)
    if not counts[Outcome.PASSED] + counts[Outcome.WAIVED] + sum(n for o, n in counts.items() if o.is_failure):
        yield "no test was run"
    for outcome in (Outcome.FAILED, Outcome.ERROR, Outcome.CRASHED, Outcome.HUNG, Outcome.NOT_RUN):
        if counts[outcome]:
            found = dict.fromkeys(result["clause"] for result in results if result["outcome"] == outcome)
            shown = ", ".join(list(found)[:8]) + (f" and {len(found) - 8} more" if len(found) > 8 else "")
            label = {
                Outcome.ERROR: "ended with an error outside of the test itself",
                Outcome.NOT_RUN: "not run",
            }.get(outcome, outcome.value)
            yield f"{_tests(counts[outcome])} {label} ({shown})"


def _tests(count: int) -> str:
    return "1 test" if count == 1 else f"{count} tests"


def _waivers(report: Mapping[str, Any]) -> Iterator[str]:
    listed = {name for result in report["results"] for name in (result["id"], result["clause"])}
    used = {result["waiver"] for result in report["results"] if result["outcome"] == Outcome.WAIVED}
    for waiver in report["waivers"]:
        if expired(waiver, report["backend"]["version"]):
            yield f"the waiver of {waiver['id']} ended with version {waiver['until']}"
        elif waiver["id"] in listed and waiver["id"] not in used:
            yield f"the waiver of {waiver['id']} is not needed, or is for what cannot be waived"


def _untestable(results: Iterable[Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """Return the clauses that apply, and of which no case could be run; those apart that are about a driver which is not there."""
    found: dict[str, set[tuple[Outcome, bool]]] = {}
    for result in results:
        outcome = Outcome(result["outcome"])
        if outcome.applies:
            found.setdefault(result["clause"], set()).add((outcome, result["message"] == OWN_ALLOCATOR))
    none = {
        clause: about for clause, about in found.items() if {outcome for outcome, _ in about} == {Outcome.NOT_TESTABLE}
    }
    of_a_driver = [clause for clause, about in none.items() if about == {(Outcome.NOT_TESTABLE, True)}]
    return [clause for clause in none if clause not in of_a_driver], of_a_driver


def _capabilities(report: Mapping[str, Any]) -> Iterator[str]:
    levels = {Level(level) for level in report["selection"]["levels"]}
    there = {Level(result["level"]) for result in report["results"]}
    yield from (f"the suite has no test of level {level}" for level in sorted(levels - there))
    yield from (
        f"no test of level {level} could be run"
        for level in sorted(there)
        if {Outcome(r["outcome"]) for r in report["results"] if r["level"] == level and r["applies"]}
        == {Outcome.NOT_TESTABLE}
    )
    found = standings(report)
    if levels & CORE_LEVELS and not claimed(CORE, from_json(report["claims"])):
        yield f"'{CORE}' is the core, which cannot be left out, and is not claimed"
    for capability, standing in found.items():
        if standing is Standing.UNPROVED:
            yield f"'{capability}' is claimed, and no test that proves it was run and passed"
        elif standing is Standing.NOT_REFUSED:
            yield f"'{capability}' is not claimed, and no test showed that it is refused cleanly"


def standings(report: Mapping[str, Any]) -> dict[str, Standing]:
    """Return what a report shows of every capability, by name."""
    claims = from_json(report["claims"])
    return {name: _standing(name, claimed(name, claims), report) for name in CLAIMS}


def _standing(name: str, is_claimed: bool, report: Mapping[str, Any]) -> Standing:
    is_full = len(report["selection"]["levels"]) == len(Level)
    about = [r for r in report["results"] if name in r["capabilities"] and r["refusal"] != is_claimed]
    outcomes = {outcome for result in about if (outcome := Outcome(result["outcome"])).applies}
    if not is_claimed:
        if not about:
            return Standing.NOT_CLAIMED if is_full else Standing.OUT_OF_SCOPE
        return Standing.REFUSED if Outcome.PASSED in outcomes else Standing.NOT_REFUSED
    if not about and not is_full:
        return Standing.OUT_OF_SCOPE
    if any(outcome.is_failure for outcome in outcomes):
        return Standing.FAILED
    if Outcome.WAIVED in outcomes:
        return Standing.WAIVED
    if outcomes == {Outcome.NOT_TESTABLE} and report["simulated"]:
        return Standing.NOT_TESTABLE
    return Standing.PROVED if Outcome.PASSED in outcomes else Standing.UNPROVED


def exit_status(verdict: Verdict, reasons: Sequence[str]) -> int:
    """Return what `run` ends with: 0 for a conformant backend, with waivers too, and for chosen clauses that all pass."""
    return 1 if reasons or verdict is Verdict.NOT_CONFORMANT else 0
