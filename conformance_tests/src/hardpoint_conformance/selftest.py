"""The proof of the suite: every known-bad backend is found out by a clause meant for it, and a correct one never fails.

Three things are run on the CPU backend: a control (the clauses that are meant for mutants pass without one; a report of this suite on
this backend can stand for it), the mutants, and the tests with random inputs over many seeds, where no failure is allowed.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis.strategies import integers
from rich.console import Console

from hardpoint_conformance.fork_server import ForkServer, share
from hardpoint_conformance.forks import Case, Ended, Job, collect, run_forked
from hardpoint_conformance.kill_matrix import Finding, KillMatrix, Verdict, write_report
from hardpoint_conformance.mutants import Mutant, mutants, narrow
from hardpoint_conformance.outcomes import Outcome
from hardpoint_conformance.outcomes import Verdict as ReportVerdict
from hardpoint_conformance.processes import imports_kept
from hardpoint_conformance.ranks import import_for_ranks
from hardpoint_conformance.report import ReportError, read_report, verdict_of, verify

BACKEND = "cpu"
"""What the mutants are made of, and what must never fail."""

_REHEARSAL = ("worker.execute.empty@1",)
"""Clauses whose tests import what most forks would import, each for itself, many seconds long."""

_STARTS_PROGRAMS = "test_l6_memory"
"""In the name of the module whose tests start interpreters."""

_MUTANT_SECONDS = 120.0
_RUN_SECONDS = 240.0


def selftest(
    names: Sequence[str] | None = None,
    seeds: int = 20,
    jobs: int | None = None,
    report: Path | None = None,
    markdown: Path | None = None,
    control: Path | None = None,
) -> int:
    """Run the proof and print it; returns 0 when it holds, 1 when it does not.

    Args:
        names: the only mutants to run; None for all.
        seeds: of the tests with random inputs, on the correct backend; 0 for none.
        jobs: processes at a time; None for one on each usable core.
        report: folder for `selftest.json` and `selftest.html`.
        markdown: file for the matrix as markdown.
        control: report of a run on the correct backend; None to run the control.

    Raises:
        KeyError: no mutant has such a name.
        ReportError: the control is not what can stand for one.
        RuntimeError: the suite cannot be collected.
    """
    console = Console()
    chosen = _chosen(names)
    if any(mutant in narrow.OVER_THE_SCAFFOLD for mutant in chosen):
        if shutil.which(narrow.COMPILER):
            narrow.driver_file()  # once for all forks
        else:
            chosen = [mutant for mutant in chosen if mutant not in narrow.OVER_THE_SCAFFOLD]
            console.print(
                f"left out, for want of a compiler ({narrow.COMPILER}): right backends over the scaffold's driver"
            )
    # An end from outside must reach the forks, too: as an exception it leaves through `run_forked`, which kills them.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    start = time.monotonic()
    cores = len(os.sched_getaffinity(0))
    at_a_time = jobs or cores
    if "OMP_NUM_THREADS" not in os.environ:  # as the runner has it
        threads = max(1, cores // at_a_time)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # of processes that tests start
        torch.set_num_threads(threads)
    with imports_kept():
        _import_parts()
        everything = collect(BACKEND)
        cases = [case for case in everything if case.applies]
        _rehearse(cases)
        _read_constants()
    harmful = [mutant for mutant in chosen if not mutant.harmless]
    console.print(f"{len(harmful)} mutants, {len(cases)} tests of {len({case.clause.id for case in cases})} clauses")

    verdicts: list[Verdict] = []
    controls: list[Ended] = []
    seeded: list[Ended] = []
    reported = 0 if control is None else reported_control(control, chosen, cases)
    control_jobs = _control_jobs(chosen, cases) if control is None else ()
    planned = [*control_jobs, *_mutant_jobs(chosen, everything), *_seed_jobs(seeds, cases)]
    by_name = {mutant.name: mutant for mutant in chosen}
    with ForkServer(for_ranks=False, variables={}) as server:
        if any(_STARTS_PROGRAMS in file for job in planned for file in job.files):
            share(server)
        for ended in run_forked(planned, BACKEND, at_a_time):
            if ended.job.mutant:
                verdicts.append(verdict(by_name[ended.job.mutant], ended))
                _say(console, len(verdicts), len(chosen), verdicts[-1])
            else:
                (seeded if ended.job.name.startswith("seed") else controls).append(ended)
                for line in alarms([ended]):
                    console.print(f"[red]false alarm[/] {line}", highlight=False)
    verdicts += [
        Verdict(mutant, (), 0.0, "no clause meant for it is in the suite") for mutant in _unmeant(chosen, everything)
    ]
    order = [mutant.name for mutant in chosen]
    meant = {clause for mutant in chosen for clause in mutant.killed_by}
    matrix = KillMatrix(
        verdicts=tuple(sorted(verdicts, key=lambda one: order.index(one.mutant.name))),
        clauses=tuple(
            {case.clause.id: case.clause for case in everything if case.applies or case.clause.id in meant}.values()
        ),
        control_tests=reported + sum(ended.tests for ended in controls),
        seeds=len(seeded),
        seeded_tests=sum(ended.tests for ended in seeded),
        false_alarms=tuple(alarms([*controls, *seeded])),
        seconds=time.monotonic() - start,
    )
    console.print(matrix.table())
    for line in matrix.summary():
        console.print(line, highlight=False)
    if markdown is not None:
        markdown.parent.mkdir(parents=True, exist_ok=True)
        markdown.write_text(matrix.markdown(), "utf-8")
    if report is not None:
        write_report(matrix, report)
    return 0 if matrix.holds else 1


def reported_control(file: Path, chosen: Iterable[Mutant], cases: Sequence[Case]) -> int:
    """Return how many tests of the clauses that are meant for mutants passed in a report; raises ReportError unless all did.

    The report must be whole, of this suite and backend, and conformant.
    """
    report = read_report(file)
    problems = verify(report)
    if report["backend"]["name"] != BACKEND or verdict_of(report) is not ReportVerdict.CONFORMANT:
        problems.append(f"it says of {report['backend']['name']}: {verdict_of(report).value}")
    passed = Counter(result["clause"] for result in report["results"] if result["outcome"] == Outcome.PASSED)
    meant = dict.fromkeys(clause for mutant in chosen for clause in _present(mutant, cases))
    problems += [f"{clause} did not pass in it" for clause in meant if not passed[clause]]
    if problems:
        raise ReportError(f"{file} cannot stand for the control: {'; '.join(problems)}")
    return sum(passed[clause] for clause in meant)


def verdict(mutant: Mutant, ended: Ended) -> Verdict:
    """Return what became of a mutant, clause by clause.

    A process that dies or hangs proves the clause whose test was running then, and no other.
    """
    findings = []
    for clause in ended.job.clauses:
        results = [result for result in ended.results if result["clause"] == clause]
        failed = next((result for result in results if result["outcome"] in ("failed", "error")), None)
        if failed is not None:
            findings.append(Finding(clause, "killed", failed["id"], failed["message"]))
        elif ended.running.partition("[")[0] == clause:
            findings.append(Finding(clause, "crashed", ended.running, ended.end))
        elif any(result["outcome"] == "passed" for result in results):
            findings.append(Finding(clause, "survived"))
        else:
            findings.append(Finding(clause, "not run", message=ended.end or "none of its tests applies"))
    failure = f"{ended.end} outside of every test: {ended.output[-400:]}" if ended.end and not ended.running else ""
    return Verdict(mutant, tuple(findings), ended.seconds, failure)


def alarms(runs: Iterable[Ended]) -> Iterator[str]:
    """Yield what failed although the backend is correct, one line each."""
    for ended in runs:
        for failure in ended.failures:
            yield f"{failure['id']} (--seed {ended.job.seed}): {_last_line(failure['message'])}"
        if ended.end:
            yield f"{ended.running or ended.job.name} (--seed {ended.job.seed}): {ended.end}"


def _chosen(names: Sequence[str] | None) -> list[Mutant]:
    known = {mutant.name: mutant for mutant in mutants()}
    unknown = sorted(set(names or ()) - set(known))
    if unknown:
        raise KeyError(f"no mutant is named {', '.join(unknown)}")
    return [mutant for name, mutant in known.items() if names is None or name in names]


def _import_parts() -> None:
    """Import what every fork needs; starts no device."""
    from hardpoint_conformance.target import Target

    import_for_ranks()
    descriptor = Target.find(BACKEND).descriptor
    for part in (descriptor.allocator, descriptor.attention, descriptor.worker, descriptor.kernels):
        if part is not None:
            part()


def _rehearse(cases: Sequence[Case]) -> None:
    """Import what a first fork had to import: later forks have it then."""
    job = Job("rehearsal", _files(cases, _REHEARSAL), _REHEARSAL, tells_modules=True)
    for ended in run_forked([job] if job.files else [], BACKEND, 1):
        for name in ended.modules:
            # Some names in sys.modules are no modules of their own; what is missing a fork imports for itself.
            with contextlib.suppress(Exception):
                importlib.import_module(name)


def _read_constants() -> None:
    """Have Hypothesis read the modules' constants, among which it draws at times: most of a second, which later forks have spent."""
    settings(max_examples=100, database=None, derandomize=True)(given(integers())(lambda number: None))()


def _files(cases: Iterable[Case], clauses: Iterable[str]) -> tuple[str, ...]:
    wanted = set(clauses)
    return tuple(dict.fromkeys(case.file for case in cases if case.clause.id in wanted))


def _present(mutant: Mutant, cases: Iterable[Case]) -> tuple[str, ...]:
    """Return the clauses to run for a mutant that are in the suite."""
    there = {case.clause.id for case in cases}
    return tuple(clause for clause in mutant.killed_by if clause in there)


def _unmeant(chosen: Iterable[Mutant], cases: Iterable[Case]) -> list[Mutant]:
    cases = list(cases)
    return [mutant for mutant in chosen if not _present(mutant, cases)]


def _mutant_jobs(chosen: Iterable[Mutant], cases: Sequence[Case]) -> Iterator[Job]:
    for mutant in chosen:
        clauses = _present(mutant, cases)
        if clauses:
            yield Job(
                mutant.name, _files(cases, clauses), clauses, mutant.name, first_failure=True, seconds=_MUTANT_SECONDS
            )


def _control_jobs(chosen: Iterable[Mutant], cases: Sequence[Case]) -> Iterator[Job]:
    meant = dict.fromkeys(clause for mutant in chosen for clause in _present(mutant, cases))
    for file in _files(cases, meant):
        here = {case.clause.id for case in cases if case.file == file}
        clauses = tuple(clause for clause in meant if clause in here)
        yield Job(f"control-{Path(file).stem}", (file,), clauses, seconds=_RUN_SECONDS)


def _seed_jobs(seeds: int, cases: Sequence[Case]) -> Iterator[Job]:
    clauses = tuple(dict.fromkeys(case.clause.id for case in cases if case.seeded))
    if clauses:
        for seed in range(1, seeds + 1):
            yield Job(f"seed-{seed}", _files(cases, clauses), clauses, seed=seed, seconds=_RUN_SECONDS)


def _say(console: Console, done: int, total: int, found: Verdict) -> None:
    colour = {"killed": "green", "unharmed": "green"}.get(found.outcome, "red")
    by = f" by {found.killer.case}" if found.killer else ""
    line = f"[dim]{done}/{total}[/] {found.mutant.name} [{colour}]{found.outcome}[/]{by} [dim]{found.seconds:.1f} s[/]"
    console.print(line.replace("[core", r"\[core"), highlight=False, markup=True)


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.startswith("E ")] or text.splitlines() or [""]
    return lines[0].removeprefix("E").strip()[:200]
