"""What a run says while it goes, and what a report says on a terminal."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from hardpoint_conformance.examine import Examination
from hardpoint_conformance.levels import Level
from hardpoint_conformance.outcomes import Outcome, Verdict
from hardpoint_conformance.report import verdict_of

_STYLES = {
    Verdict.CONFORMANT: "bold green",
    Verdict.SIMULATED: "bold cyan",
    Verdict.WITH_WAIVERS: "bold yellow",
    Verdict.NOT_CONFORMANT: "bold red",
    Verdict.PARTIAL: "bold cyan",
}


class LiveProgress:
    """Counts, level and remaining time: a bar on a terminal, a line for each level and each failure elsewhere.

    Args:
        console: where to; standard error, most often.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed}/{task.total}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
        )
        self._bar = Progress(*columns, console=console, transient=True) if console.is_terminal else None
        self._counts: Counter[Outcome] = Counter()
        self._left: Counter[int] = Counter()
        self._total = self._done = 0
        self._start = time.monotonic()

    def __enter__(self) -> LiveProgress:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, examination: Examination, tests: Sequence[Mapping[str, Any]], kept: int) -> None:
        """Say what will be run."""
        backend, device = examination.backend, examination.device
        where = "" if device is None else f" on {device['name']}" + (" (simulated)" if device["simulated"] else "")
        self._console.print(Text(f"{backend['name']}{where}: {len(tests)} tests, {len(tests) - kept} to run"))
        if examination.unavailable:
            self._console.print(Text(f"it cannot compute here: {examination.unavailable}", "yellow"))
        self._total, self._start = len(tests) - kept, time.monotonic()
        if self._bar is not None:
            self._bar.add_task("starting", total=self._total, left="")
            self._bar.start()

    def result(self, result: Mapping[str, Any]) -> None:
        """Count a result; show it where it is a failure."""
        outcome = Outcome(result["outcome"])
        self._counts[outcome] += 1
        self._done += 1
        if outcome.is_failure:
            self._console.print(Text.assemble((f"{outcome} ", "bold red"), result["id"], f": {_summary(result)}"))
        failed = sum(count for found, count in self._counts.items() if found.is_failure)
        passed = self._counts[Outcome.PASSED]
        left = (time.monotonic() - self._start) / self._done * (self._total - self._done)
        level = Level(result["level"])
        if self._bar is not None:
            colour = "red" if failed else "green"
            text = f"{level}  [green]{passed} passed[/green]  [{colour}]{failed} failed[/{colour}]"
            self._bar.update(self._bar.task_ids[0], advance=1, description=text, left=f"about {left:.0f} s left")
        elif self._done == self._total or self._done % 50 == 0:
            self._console.print(
                Text(
                    f"{level}: {self._done}/{self._total} done, {passed} passed, {failed} failed, about {left:.0f} s left"
                )
            )


def _head(result: Mapping[str, Any]) -> list[str]:
    """Return the lines of a failure's message that come before its traceback."""
    return str(result["message"]).strip().partition("\n\n")[0].splitlines()


def _summary(result: Mapping[str, Any]) -> str:
    """Return the line of a failure's message that says most: what was found, else the first one."""
    lines = _head(result)
    found = [line.removeprefix("got: ") for line in lines if line.startswith("got: ")]
    return (found or lines or [""])[0][:300]


def show_report(report: Mapping[str, Any], console: Console) -> None:
    """Print levels with counts, failures with reproduction, waivers and the verdict."""
    outcomes = (Outcome.PASSED, Outcome.WAIVED, Outcome.NOT_TESTABLE, Outcome.NOT_CLAIMED)
    table = Table("level", "tests", "passed", "failed", "waived", "not testable", "not called for", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for level in report["selection"]["levels"]:
        counts = Counter(Outcome(r["outcome"]) for r in report["results"] if r["level"] == level)
        failed = sum(count for outcome, count in counts.items() if outcome.is_failure or outcome is Outcome.NOT_RUN)
        passed, waived, untestable, unclaimed = (counts[outcome] for outcome in outcomes)
        numbers = (counts.total(), passed, failed, waived, untestable, unclaimed + counts[Outcome.CLAIMED])
        table.add_row(f"{Level(level)} {Level(level).title}", *map(str, numbers))
    console.print(table)
    for result in report["results"]:
        outcome = Outcome(result["outcome"])
        if outcome.is_failure:
            console.print(Text.assemble((f"{outcome} ", "bold red"), result["id"]))
            rule, repeat = report["rules"].get(result["clause"], ""), result["reproduction"]
            for line in (f"rule: {rule}", *_head(result), f"repeat: {repeat}"):
                console.print(Text("  " + line), soft_wrap=True)
    skipped: dict[str, list[str]] = {}
    for result in report["results"]:
        if result["outcome"] == Outcome.NOT_TESTABLE:
            skipped.setdefault(result["message"], []).append(result["id"])
    for message, ids in skipped.items():
        console.print(Text.assemble(("not testable ", "bold yellow"), f"{len(ids)} tests: {message}"))
    for waiver in report["waivers"]:
        console.print(
            Text.assemble(("waiver ", "bold yellow"), f"{waiver['id']} until {waiver['until']}: {waiver['reason']}")
        )
    for note in report["verdict"]["notes"]:
        console.print(Text(f"note: {note}"))
    for reason in report["verdict"]["reasons"]:
        console.print(Text(f"- {reason}"))
    console.print(verdict_line(report))


def verdict_line(report: Mapping[str, Any]) -> Text:
    """Return backend, device, what was run, and the verdict."""
    verdict, selection, device = verdict_of(report), report["selection"], report["device"]
    levels = ", ".join(f"L{level}" for level in selection["levels"])
    what = "chosen clauses" if selection["clauses"] else selection["profile"] or levels
    where = "" if device is None else f" on {device['name']}"
    simulated = ", simulated" if report["simulated"] else ""
    return Text.assemble(f"{report['backend']['name']}{where}{simulated} ({what}): ", (verdict.value, _STYLES[verdict]))
