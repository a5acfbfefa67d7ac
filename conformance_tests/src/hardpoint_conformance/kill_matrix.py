"""The kill matrix: which clause finds which known-bad backend, and what no mutant proves; as table, markdown, JSON and HTML."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from hardpoint_conformance.clauses import Clause
from hardpoint_conformance.mutants import Mutant
from hardpoint_conformance.mutants.reasons import WITHOUT_A_MUTANT


@dataclass(frozen=True)
class Finding:
    """What one clause made of a mutant.

    Attributes:
        outcome: killed, crashed (the process died or hung in a test of this clause), survived, or not run.
        case: the test that failed first.
        message: how it failed.
    """

    clause: str
    outcome: str
    case: str = ""
    message: str = ""

    @property
    def kills(self) -> bool:
        """The clause found the fault."""
        return self.outcome in ("killed", "crashed")

    @property
    def reason(self) -> str:
        """The line of the message that says what was wrong."""
        lines = [line[1:].strip() for line in self.message.splitlines() if line.startswith("E ")]
        return (lines or self.message.splitlines() or [""])[0][:200]


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant.

    Attributes:
        failure: why the run itself says nothing; "".
    """

    mutant: Mutant
    findings: tuple[Finding, ...]
    seconds: float
    failure: str = ""

    @property
    def killer(self) -> Finding | None:
        """The first clause that found it."""
        return next((finding for finding in self.findings if finding.kills), None)

    @property
    def outcome(self) -> str:
        """Killed or survived; for a harmless mutant unharmed or accused."""
        if self.mutant.harmless:
            ran = any(finding.outcome == "survived" for finding in self.findings)
            return "unharmed" if ran and self.killer is None and not self.failure else "accused"
        return "killed" if self.killer else "survived"

    @property
    def as_it_must_be(self) -> bool:
        """A fault was found, and what is none was not."""
        return self.outcome in ("killed", "unharmed")


@dataclass(frozen=True)
class KillMatrix:
    """All of it.

    Attributes:
        clauses: of the suite, those that the backend's claims call for, and those meant for mutants with other claims.
        control_tests: tests of the clauses in the matrix that were run without a mutant.
        seeds, seeded_tests: how many seeds, and tests with random inputs in all, on the correct backend.
        false_alarms: what failed there, one line each.
    """

    verdicts: tuple[Verdict, ...]
    clauses: tuple[Clause, ...]
    control_tests: int
    seeds: int
    seeded_tests: int
    false_alarms: tuple[str, ...]
    seconds: float

    @property
    def survivors(self) -> tuple[Verdict, ...]:
        """Mutants that are not as they must be."""
        return tuple(verdict for verdict in self.verdicts if not verdict.as_it_must_be)

    @property
    def holds(self) -> bool:
        """Every mutant is killed, and there is no false alarm."""
        return not self.survivors and not self.false_alarms

    @property
    def proved(self) -> tuple[Clause, ...]:
        """The clauses that found at least one mutant."""
        found = {finding.clause for verdict in self.verdicts for finding in verdict.findings if finding.kills}
        return tuple(clause for clause in self.clauses if clause.id in found)

    @property
    def unproved(self) -> tuple[Clause, ...]:
        """The clauses that found none."""
        proved = set(self.proved)
        return tuple(clause for clause in self.clauses if clause not in proved)

    def summary(self) -> Iterator[str]:
        """Yield the result in lines."""
        faults = [verdict for verdict in self.verdicts if not verdict.mutant.harmless]
        killed = sum(verdict.outcome == "killed" for verdict in faults)
        yield f"{killed} of {len(faults)} known-bad backends are found by a clause meant for them."
        for verdict in self.survivors:
            detail = verdict.failure or ", ".join(f"{one.clause} {one.outcome}" for one in verdict.findings)
            yield f"{verdict.outcome.upper()}: {verdict.mutant.name}: {verdict.mutant.fault} ({detail})"
        yield (
            f"Without a fault: {len(self.false_alarms)} failures in {self.control_tests} tests of the control and "
            f"{self.seeded_tests} tests with random inputs over {self.seeds} seeds."
        )
        yield from (f"FALSE ALARM: {line}" for line in self.false_alarms)
        yield f"{len(self.proved)} of {len(self.clauses)} clauses are proved by at least one mutant."

    def table(self) -> Table:
        """Return the matrix for a terminal."""
        table = Table(title="Kill matrix", title_justify="left")
        for column in ("mutant", "verdict", "by"):
            table.add_column(column, overflow="fold")
        for verdict in self.verdicts:
            colour = "green" if verdict.as_it_must_be else "red"
            by = Text("\n".join(f"{_SIGNS[one.outcome]} {one.clause}" for one in verdict.findings))
            table.add_row(verdict.mutant.name, Text(verdict.outcome, style=colour), by)
        return table

    def markdown(self) -> str:
        """Return the matrix as a page of the documentation, without what changes from run to run."""
        faults = [verdict for verdict in self.verdicts if not verdict.mutant.harmless]
        killed = sum(verdict.outcome == "killed" for verdict in faults)
        lines = [
            "# Kill matrix",
            "",
            "Generated by `hardpoint conformance selftest --markdown docs/kill-matrix.md`. Each row is a correct backend with one fault;",
            "the suite is run against it, and a clause that is meant for the fault must fail. ✔ the clause found it, ✘ a process died",
            "or hung in its test, ○ it did not find it.",
            "",
            f"{killed} of {len(faults)} known-bad backends are found. Without a fault, {self.seeded_tests} tests with random inputs over "
            f"{self.seeds} seeds and {self.control_tests} tests of the control had {len(self.false_alarms)} failures.",
            "",
            "| Mutant | Fault | Verdict | Clauses |",
            "|---|---|---|---|",
        ]
        for verdict in self.verdicts:
            by = "<br>".join(f"{_SIGNS[one.outcome]} `{one.clause}`" for one in verdict.findings)
            lines.append(f"| `{verdict.mutant.name}` | {verdict.mutant.fault} | {verdict.outcome} | {by} |")
        lines += [
            "",
            "## Clauses without a mutant",
            "",
            f"{len(self.proved)} of {len(self.clauses)} clauses have found at least one mutant. Of the others no mutant shows that their "
            "tests can fail:",
            "",
            *(f"- `{clause.id}` ({clause.level}): {_reason(clause)}" for clause in self.unproved),
            "",
        ]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "schema": "hardpoint-conformance-selftest/1",
            "holds": self.holds,
            "seconds": round(self.seconds, 1),
            "control_tests": self.control_tests,
            "seeds": self.seeds,
            "seeded_tests": self.seeded_tests,
            "false_alarms": list(self.false_alarms),
            "mutants": [
                {
                    "name": verdict.mutant.name,
                    "fault": verdict.mutant.fault,
                    "verdict": verdict.outcome,
                    "harmless": verdict.mutant.harmless,
                    "seconds": round(verdict.seconds, 2),
                    "failure": verdict.failure,
                    "clauses": [
                        {"id": one.clause, "outcome": one.outcome, "case": one.case, "reason": one.reason}
                        for one in verdict.findings
                    ],
                }
                for verdict in self.verdicts
            ],
            "proved": [clause.id for clause in self.proved],
            "unproved": [clause.id for clause in self.unproved],
        }

    def html(self) -> str:
        """Return a page that needs nothing else."""
        rows = "\n".join(_row(verdict) for verdict in self.verdicts)
        summary = "".join(f"<li>{html.escape(line)}</li>" for line in self.summary())
        unproved = "".join(
            f"<li><code>{clause.id}</code> {html.escape(clause.text)}: {html.escape(_reason(clause))}</li>"
            for clause in self.unproved
        )
        state = "holds" if self.holds else "does not hold"
        return _PAGE.format(state=state, summary=summary, rows=rows, unproved=unproved)


def _reason(clause: Clause) -> str:
    return WITHOUT_A_MUTANT.get(clause.id, "its mutants were not run, or not found by it")


def write_report(matrix: KillMatrix, folder: Path) -> None:
    """Write `selftest.json` and `selftest.html`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "selftest.json").write_text(json.dumps(matrix.to_json(), indent=2, ensure_ascii=False) + "\n", "utf-8")
    (folder / "selftest.html").write_text(matrix.html(), "utf-8")


_SIGNS = {"killed": "✔", "crashed": "✘", "survived": "○", "not run": "–"}


def _row(verdict: Verdict) -> str:
    clauses = "".join(
        f"<li><b>{_SIGNS[one.outcome]}</b> <code>{html.escape(one.case or one.clause)}</code> "
        f"<small>{html.escape(one.reason)}</small></li>"
        for one in verdict.findings
    )
    state = "good" if verdict.as_it_must_be else "bad"
    return (
        f'<tr class="{state}"><td><code>{verdict.mutant.name}</code><br>{html.escape(verdict.mutant.fault)}</td>'
        f"<td>{verdict.outcome}</td><td><ul>{clauses}</ul>{html.escape(verdict.failure)}</td></tr>"
    )


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Kill matrix: the suite's proof {state}</title>
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem; color: #1b1f24; }}
table {{ border-collapse: collapse; width: 100%; }}
th, td {{ border-bottom: 1px solid #d0d7de; padding: .45rem .6rem; text-align: left; vertical-align: top; }}
ul {{ margin: 0; padding-left: 1.1rem; }} td ul {{ list-style: none; padding: 0; }}
code {{ font-size: .9em; overflow-wrap: anywhere; }} small {{ color: #57606a; overflow-wrap: anywhere; }}
.good td:nth-child(2) {{ color: #1a7f37; }} .bad {{ background: #ffebe9; }} .bad td:nth-child(2) {{ color: #cf222e; }}
@media (max-width: 45rem) {{ table, tbody, tr, td {{ display: block; }} thead {{ display: none; }} td {{ border: 0; padding: .2rem 0; }}
tr {{ border-bottom: 1px solid #d0d7de; padding: .6rem 0; display: block; }} }}
</style></head><body>
<h1>The suite's proof {state}</h1>
<ul>{summary}</ul>
<table><thead><tr><th>Mutant</th><th>Verdict</th><th>Clauses meant for it</th></tr></thead><tbody>
{rows}
</tbody></table>
<h2>Clauses that have found no mutant</h2>
<ul>{unproved}</ul>
</body></html>
"""
