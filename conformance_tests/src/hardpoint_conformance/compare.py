"""Several reports beside one another: a matrix of capabilities, clauses or levels, and the table of backends of a README."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from hardpoint_conformance.levels import Level
from hardpoint_conformance.outcomes import Outcome, Verdict
from hardpoint_conformance.verdict import Standing, standings

Report = Mapping[str, Any]

SUBJECTS = ("capabilities", "clauses", "levels")

BEGIN, END = "<!-- conformance: begin -->", "<!-- conformance: end -->"
"""Marks in a Markdown file between which the table of backends is written."""

_BAD = ("failed", "crashed", "hung", "error", "not run", "not conformant", "unproved", "not refused")
_WARN = ("waived", "not testable", Verdict.WITH_WAIVERS.value)
_NOTE = ("refused", Verdict.SIMULATED.value, Verdict.PARTIAL.value)
_GOOD = ("passed", "proved", Verdict.CONFORMANT.value)
"""How the texts of cells begin, by what they mean."""


@dataclass(frozen=True)
class Comparison:
    """Rows of texts under the names of reports.

    Attributes:
        subject: what a row is about, as the head of the first column.
    """

    subject: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def to_markdown(self) -> str:
        """Return a table in Markdown."""
        return markdown_table((self.subject, *self.columns), self.rows)

    def to_html(self) -> str:
        """Return a self-contained page."""
        from hardpoint_conformance.html import page

        head = "".join(f"<th>{escape(text)}</th>" for text in (self.subject, *self.columns))
        body = "".join(
            f"<tr><td><code>{escape(name)}</code></td>{''.join(_cell(text) for text in cells)}</tr>\n"
            for name, *cells in self.rows
        )
        table = f'<div class="scroll matrix"><table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>'
        return page(
            "Hardpoint conformance", f"<h1>Hardpoint conformance: {escape(self.subject)} of backends</h1>\n{table}"
        )


def _cell(text: str) -> str:
    if not text:
        return "<td></td>"
    kinds = {"bad": _BAD, "warn": _WARN, "note": _NOTE, "good": _GOOD}
    kind = next((kind for kind, beginnings in kinds.items() if text.startswith(beginnings)), "idle")
    return f'<td><span class="badge {kind}">{escape(text)}</span></td>'


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def names_of(reports: Sequence[Report]) -> tuple[str, ...]:
    """Return a name for each report: backend and version, with a number where several have the same."""
    names = [_name(report) for report in reports]
    return tuple(
        f"{name} #{names[: index + 1].count(name)}" if names.count(name) > 1 else name
        for index, name in enumerate(names)
    )


def _name(report: Report) -> str:
    backend = report["backend"]
    return " ".join(filter(None, (backend["name"], backend["version"], "(simulated)" if report["simulated"] else "")))


def compare(reports: Sequence[Report], subject: str) -> Comparison:
    """Return the matrix of reports by one of `SUBJECTS`; the first row is the verdict."""
    columns = {"capabilities": _capabilities, "clauses": _clauses, "levels": _levels}[subject]
    found = [columns(report) for report in reports]
    rows = dict.fromkeys(name for column in found for name in column)
    verdicts = ("verdict", *(report["verdict"]["outcome"] for report in reports))
    body = [(name, *(column.get(name, "") for column in found)) for name in rows]
    return Comparison(subject, names_of(reports), (verdicts, *body))


def _capabilities(report: Report) -> dict[str, str]:
    if report["claims"] is None:
        return {}
    return {
        name: "" if standing is Standing.OUT_OF_SCOPE else standing.value
        for name, standing in standings(report).items()
    }


def _clauses(report: Report) -> dict[str, str]:
    return _counted(report, lambda result: str(result["clause"]))


def _levels(report: Report) -> dict[str, str]:
    return _counted(report, lambda result: f"{Level(result['level'])} {Level(result['level']).title}")


def _counted(report: Report, key: Any) -> dict[str, str]:
    """Return for each key what its tests say, failures first."""
    outcomes: dict[str, Counter[Outcome]] = {}
    for result in report["results"]:
        outcomes.setdefault(key(result), Counter())[Outcome(result["outcome"])] += 1
    return {name: _summary(counts) for name, counts in outcomes.items()}


def _summary(counts: Counter[Outcome]) -> str:
    applying = sum(count for outcome, count in counts.items() if outcome.applies)
    if not applying:
        return next(iter(counts)).value.replace("_", " ")
    found = [outcome for outcome in _WORST_FIRST if counts[outcome]]
    return ", ".join(f"{outcome.value.replace('_', ' ')} {counts[outcome]}" for outcome in found) + f" of {applying}"


_WORST_FIRST = (
    Outcome.CRASHED,
    Outcome.HUNG,
    Outcome.FAILED,
    Outcome.ERROR,
    Outcome.NOT_RUN,
    Outcome.WAIVED,
    Outcome.PASSED,
    Outcome.NOT_TESTABLE,
)


def summary_markdown(report: Report) -> str:
    """Return a report's verdict, reasons, levels and failures in Markdown."""
    lines = [f"# Conformance of {names_of([report])[0]}: {report['verdict']['outcome']}", ""]
    lines += [f"- {reason}" for reason in report["verdict"]["reasons"]]
    levels = [(name, text) for name, text in _levels(report).items()]
    lines += ["", markdown_table(("level", "tests"), levels)]
    failed = [result for result in report["results"] if Outcome(result["outcome"]).is_failure]
    lines += [f"- {result['outcome']}: `{result['id']}`  \n  `{result['reproduction']}`" for result in failed]
    lines += [f"- waiver of `{w['id']}` until {w['until']}: {w['reason']}" for w in report["waivers"]]
    return "\n".join(lines).rstrip() + "\n"


# The table of backends


def backend_table(reports: Sequence[tuple[Path, Report]], folder: Path) -> str:
    """Return the table of backends in Markdown, in the order of their names; links are relative to `folder`."""
    rows = []
    for file, report in sorted(reports, key=lambda pair: (pair[1]["backend"]["name"], str(pair[0]))):
        counts = Counter(Outcome(result["outcome"]) for result in report["results"])
        untestable = counts[Outcome.NOT_TESTABLE]
        run = sum(count for outcome, count in counts.items() if outcome.applies) - untestable
        passed = f"{counts[Outcome.PASSED]} of {run}" + (f" ({untestable} not testable)" if untestable else "")
        device = "none" if report["device"] is None else report["device"]["name"]
        levels = report["selection"]["levels"]
        span = f"L{levels[0]} to L{levels[-1]}" if levels == list(range(levels[0], levels[-1] + 1)) else None
        shown = span or ", ".join(f"L{level}" for level in levels)
        link = Path(os.path.relpath(file, folder))
        rows.append(
            (
                f"`{report['backend']['name']}`",
                f"{report['backend']['distribution']} {report['backend']['version']}",
                "simulated driver" if report["simulated"] else device,
                f"{report['selection']['profile'] or 'levels'} ({shown})",
                passed,
                report["verdict"]["outcome"],
                f"[{file.name}]({link.as_posix()})",
            )
        )
    return markdown_table(("backend", "package", "device", "profile", "tests passed", "verdict", "report"), rows)


def replaced(text: str, table: str) -> str:
    """Return a Markdown text with a table between the marks; raises ValueError where the marks are not there once, in order."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in after:
        raise ValueError(f"it must hold {BEGIN} and after it {END}, once each")
    return f"{before}{BEGIN}\n{table}{END}{after}"
