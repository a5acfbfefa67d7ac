"""`hardpoint conformance`: run the suite against a backend, and read, check and compare its reports."""

from __future__ import annotations

import json
import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console

from hardpoint_conformance.fork_server import ForkServer
from hardpoint_conformance.levels import PROFILES, Level
from hardpoint_conformance.processes import Start, start
from hardpoint_conformance.report import CollectionFailed, ReportError, read_report, verdict_of, verify, write_report
from hardpoint_conformance.verdict import exit_status

app = typer.Typer(name="conformance", no_args_is_help=True, add_completion=False)


@app.callback()
def conformance() -> None:
    """Prove a backend with the conformance suite, and read, check and compare reports.

    Exit codes: 0 conformant, or a report that is whole; 1 not; 2 wrong options.
    """


def _console(*, stderr: bool = False) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else 140, highlight=False)


def _levels(texts: list[str], profile: str | None) -> tuple[str | None, tuple[Level, ...]]:
    if not texts:
        name = profile or "full"
        if name not in PROFILES:
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(PROFILES)}", param_hint="--profile")
        return name, PROFILES[name]
    if profile is not None:
        raise typer.BadParameter("give either levels or a profile", param_hint="--level")
    try:
        return None, tuple(sorted({Level.of(part) for text in texts for part in text.split(",")}))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--level") from error


def _simulate(backend: str) -> None:
    """Put the simulated driver in the place of the vendor's."""
    if find_spec("hardpoint_simulators") is None:
        raise typer.BadParameter("the package hardpoint-simulators is not installed", param_hint="--simulated")
    from hardpoint_simulators import library

    try:
        path = library(backend)  # type: ignore[arg-type]  # an unknown vendor is a ValueError
    except (ValueError, FileNotFoundError) as error:
        raise typer.BadParameter(str(error), param_hint="--simulated") from error
    os.environ[f"HARDPOINT_{backend.upper()}_DRIVER"] = str(path)


_Backend = Annotated[str, typer.Option(help="Name of the installed backend to test.")]
_Report = Annotated[Path, typer.Argument(help="A report.json.")]
_Reports = Annotated[list[Path], typer.Argument(help="Files report.json.")]


@app.command("run")
def run_command(
    backend: _Backend,
    level: Annotated[list[str] | None, typer.Option(help="L0 to L6; can be repeated.")] = None,
    profile: Annotated[str | None, typer.Option(help="memory, inference-core or full (the default).")] = None,
    device: Annotated[int, typer.Option(min=0, help="Index of the device.")] = 0,
    report: Annotated[Path | None, typer.Option(help="Folder for report.json, .xml and .html.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of all random inputs.")] = 0,
    explore: Annotated[int, typer.Option(min=0, help="Further seeds for each test with random inputs.")] = 0,
    clause: Annotated[
        list[str] | None, typer.Option(help="Run only this clause or test; can be repeated. No verdict then.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Groups side by side; 1 for accelerators, else 2, by default.")
    ] = None,
    time_limit: Annotated[float, typer.Option(min=0.1, help="Seconds for each test.")] = 120.0,
    resume: Annotated[bool, typer.Option("--resume", help="Keep what the report's folder has of this run.")] = False,
    waivers: Annotated[Path | None, typer.Option(help="TOML or JSON file with accepted failures.")] = None,
    simulated: Annotated[
        bool, typer.Option("--simulated", help="Use the vendor's simulated driver of hardpoint-simulators.")
    ] = False,
) -> None:
    """Run the suite against a backend and write a report.

    Exit codes: 0 conformant (with waivers, too), 1 not conformant, 2 wrong options or no such backend.
    """
    from hardpoint_conformance.console import LiveProgress, show_report
    from hardpoint_conformance.runner import Settings, UsageError, run
    from hardpoint_conformance.waivers import read_waivers

    if clause and (level or profile):
        raise typer.BadParameter(
            "clauses are chosen from all levels; leave out --level and --profile", param_hint="--clause"
        )
    if resume and report is None:
        raise typer.BadParameter("a run is resumed from its report's folder; give --report", param_hint="--resume")
    chosen_profile, levels = _levels(level or [], profile)
    try:
        accepted = [] if waivers is None else read_waivers(waivers)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{waivers}: {error}", param_hint="--waivers") from error
    if simulated:
        _simulate(backend)
    settings = Settings(
        backend=backend,
        device=device,
        profile=None if clause else chosen_profile,
        levels=levels,
        clauses=tuple(clause or ()),
        seed=seed,
        explore=explore,
        jobs=jobs,
        time_limit=time_limit,
        folder=report,
        resume=resume,
        waivers=accepted,
        simulated=simulated,
    )
    # Tests have sessions of their own: they are ended by this process, and so it must not end without a word.
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        with LiveProgress(_console(stderr=True)) as progress:
            made = run(settings, progress)
    except UsageError as error:
        raise typer.BadParameter(str(error)) from error
    except CollectionFailed as error:
        raise _failed(str(error)) from error
    finally:
        signal.signal(signal.SIGTERM, before)
    show_report(made, _console())
    if report is not None:
        typer.echo(f"report: {write_report(made, report)}")
    raise typer.Exit(exit_status(verdict_of(made), made["verdict"]["reasons"]))


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _read(file: Path) -> dict[str, Any]:
    try:
        return read_report(file)
    except ReportError as error:
        raise _failed(str(error)) from error


@app.command("verify")
def verify_command(
    files: _Reports,
    conformant: Annotated[
        bool, typer.Option("--conformant", help="Also fail where it is not conformant, waivers or simulation apart.")
    ] = False,
) -> None:
    """Check reports without hardware: their digests, that they are complete, and that their verdicts follow from their results.

    Exit codes: 0 all are whole, 1 one is not (each problem is named), 2 wrong options.
    """
    # The tests of several reports are listed by forks of a process that has imported the suite. For one or two, fresh processes are faster.
    with ForkServer(for_ranks=False, variables={}) as server:
        in_order = [_is_in_order(file, conformant, server.start if len(files) > 2 else start) for file in files]
    if not all(in_order):
        raise typer.Exit(1)


def _is_in_order(file: Path, conformant: bool, start: Start) -> bool:
    from hardpoint_conformance.console import verdict_line
    from hardpoint_conformance.outcomes import Verdict

    report = _read(file)
    problems = verify(report, start)
    for problem in problems:
        typer.echo(f"error: {file}: {problem}", err=True)
    if problems:
        return False
    console = _console()
    console.print(f"{file}: whole; suite {report['suite']['version']}, {len(report['results'])} results", markup=False)
    console.print(verdict_line(report))
    return not conformant or verdict_of(report) not in (Verdict.NOT_CONFORMANT, Verdict.PARTIAL)


@app.command("list")
def list_command(
    level: Annotated[list[str] | None, typer.Option(help="L0 to L6; can be repeated.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the specification, docs/spec.md.")] = False,
) -> None:
    """Show the clauses of the specification by level."""
    from hardpoint_conformance.specification import all_clauses, to_json, to_markdown, to_text

    if as_json and markdown:
        raise typer.BadParameter("choose one of --json and --markdown")
    _, levels = _levels(level or [], None)
    try:
        clauses = [clause for clause in all_clauses() if clause.level in levels]
    except CollectionFailed as error:
        raise _failed(str(error)) from error
    if as_json:
        typer.echo(json.dumps(to_json(clauses), indent=1))
    else:
        typer.echo(to_markdown(clauses) if markdown else to_text(clauses), nl=False)


def _failed(text: str) -> typer.Exit:
    typer.echo(f"error: {text}", err=True)
    return typer.Exit(1)


@app.command("report")
def report_command(
    file: _Report,
    html: Annotated[Path | None, typer.Option(help="Write the page here.")] = None,
    junit: Annotated[Path | None, typer.Option(help="Write JUnit XML here.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write a summary in Markdown here.")] = None,
) -> None:
    """Show a report, or write it in another form. Exit codes: 0 done, 1 the file is no report, 2 wrong options."""
    from hardpoint_conformance.compare import summary_markdown
    from hardpoint_conformance.console import show_report
    from hardpoint_conformance.html import to_html
    from hardpoint_conformance.junit import to_junit

    report = _read(file)
    for target, make in ((html, to_html), (junit, to_junit), (markdown, summary_markdown)):
        if target is not None:
            target.write_text(make(report), "utf-8")
    if not (html or junit or markdown):
        show_report(report, _console())


@app.command("compare")
def compare_command(
    files: _Reports,
    by: Annotated[str, typer.Option(help="capabilities, clauses or levels.")] = "capabilities",
    html: Annotated[Path | None, typer.Option(help="Write a page here.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write a table in Markdown here.")] = None,
) -> None:
    """Show several reports beside one another. Exit codes: 0 done, 1 a file is no report, 2 wrong options."""
    from rich.table import Table

    from hardpoint_conformance.compare import SUBJECTS, compare

    if by not in SUBJECTS:
        raise typer.BadParameter(f"{by!r} is not one of {', '.join(SUBJECTS)}", param_hint="--by")
    matrix = compare([_read(file) for file in files], by)
    if html is not None:
        html.write_text(matrix.to_html(), "utf-8")
    if markdown is not None:
        markdown.write_text(matrix.to_markdown(), "utf-8")
    if html is None and markdown is None:
        table = Table(matrix.subject, *matrix.columns, box=None)
        for row in matrix.rows:
            table.add_row(*row)
        _console().print(table, markup=False)


@app.command("table")
def table_command(
    files: _Reports,
    write: Annotated[Path | None, typer.Option(help="Put the table between the marks in this Markdown file.")] = None,
    check: Annotated[Path | None, typer.Option(help="Fail unless this Markdown file has the table.")] = None,
) -> None:
    """Print the table of backends of a README from reports. Exit codes: 0 done, 1 the file differs, 2 wrong options."""
    from hardpoint_conformance.compare import backend_table, replaced

    if write and check:
        raise typer.BadParameter("choose one of --write and --check")
    file = write or check
    table = backend_table([(name, _read(name)) for name in files], Path.cwd() if file is None else file.parent)
    if file is None:
        typer.echo(table, nl=False)
        return
    try:
        before = file.read_text("utf-8")
        after = replaced(before, table)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{file}: {error}") from error
    if write is not None:
        write.write_text(after, "utf-8")
    elif before != after:
        raise _failed(f"the table of backends in {file} is not that of the reports; write it with --write {file}")


@app.command("selftest")
def selftest_command(
    mutant: Annotated[list[str] | None, typer.Option(help="Only this known-bad backend; can be repeated.")] = None,
    seeds: Annotated[int, typer.Option(min=0, help="Seeds with which the correct backend must pass.")] = 20,
    jobs: Annotated[int | None, typer.Option(min=1, help="Known-bad backends side by side.")] = None,
    report: Annotated[Path | None, typer.Option(help="Folder for selftest.json and selftest.html.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the kill matrix in Markdown here.")] = None,
    control: Annotated[
        Path | None,
        typer.Option(help="Report of this suite on the correct backend, taken as the control instead of a run."),
    ] = None,
) -> None:
    """Prove the suite itself: every known-bad backend must be caught by a clause meant for it, and the correct one pass."""
    from hardpoint_conformance.selftest import selftest

    try:
        raise typer.Exit(selftest(mutant, seeds, jobs, report, markdown, control))
    except ReportError as error:
        raise typer.BadParameter(str(error), param_hint="--control") from error
    except KeyError as error:
        raise typer.BadParameter(f"there is no known-bad backend {error}", param_hint="--mutant") from error


@app.command("init")
def init_command(
    name: Annotated[str, typer.Argument(help="Of the new backend: a lower-case identifier.")],
    path: Annotated[Path | None, typer.Option(help="Folder to write; hardpoint-NAME by default.")] = None,
) -> None:
    """Write a new backend: a package for a pretend device, which passes the profile inference-core as it is.

    Exit codes: 0 written, 2 an impossible name, or a folder that cannot be used.
    """
    from hardpoint.interfaces.errors import ConfigError
    from hardpoint_conformance.scaffold import create

    try:
        written = create(name, Path(f"hardpoint-{name}") if path is None else path)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(f"written: {written}")
    typer.echo(f"next: pip install --no-build-isolation {written}; its README.md has what follows")


def main() -> None:
    """Run the command line on its own, as `hardpoint-conformance`."""
    app(prog_name="hardpoint-conformance")


if __name__ == "__main__":
    main()
