"""`hardpoint conformance`: run the suite against a backend, and read, check and compare its reports."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from hardpoint_conformance.levels import PROFILES, Level
from hardpoint_conformance.report import CollectionFailed, ReportError, read_report, verify, write_report
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
    from hardpoint_conformance.outcomes import Verdict
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
    try:
        with LiveProgress(_console(stderr=True)) as progress:
            made = run(settings, progress)
    except UsageError as error:
        raise typer.BadParameter(str(error)) from error
    except CollectionFailed as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    show_report(made, _console())
    if report is not None:
        typer.echo(f"report: {write_report(made, report)}")
    raise typer.Exit(exit_status(Verdict(made["verdict"]["outcome"]), made["verdict"]["reasons"]))


def _read(file: Path) -> dict[str, Any]:
    try:
        return read_report(file)
    except ReportError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


@app.command("verify")
def verify_command(
    file: _Report,
    conformant: Annotated[
        bool, typer.Option("--conformant", help="Also fail where the verdict is not 'conformant'.")
    ] = False,
) -> None:
    """Check a report without hardware: its digest, that it is complete, and that its verdict follows from its results.

    Exit codes: 0 whole, 1 not (each problem is named), 2 wrong options.
    """
    from hardpoint_conformance.console import verdict_line

    report = _read(file)
    problems = verify(report)
    for problem in problems:
        typer.echo(f"error: {problem}", err=True)
    if problems:
        raise typer.Exit(1)
    console = _console()
    console.print(f"{file}: whole; suite {report['suite']['version']}, {len(report['results'])} results", markup=False)
    console.print(verdict_line(report))
    if conformant and report["verdict"]["outcome"] != "conformant":
        raise typer.Exit(1)


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
