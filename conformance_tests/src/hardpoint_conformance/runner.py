"""A run of the suite: the backend is examined, its tests are collected, run in processes of their own, and reported."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

from hardpoint.interfaces import API_VERSION
from hardpoint_conformance.environment import environment_of, git_state
from hardpoint_conformance.examine import Examination, examine
from hardpoint_conformance.fork_server import ForkServer
from hardpoint_conformance.groups import GroupRunner, shortened
from hardpoint_conformance.levels import PROFILES, Level
from hardpoint_conformance.outcomes import Outcome
from hardpoint_conformance.processes import Start, start
from hardpoint_conformance.report import (
    FOUND,
    SCHEMA,
    CollectionFailed,
    canonical,
    collect,
    finish,
    list_sha256,
    modules_for,
    select,
    suite_version,
)
from hardpoint_conformance.waivers import apply_waivers, unknown

_COUNT_MEMORY = ("test_l1", "test_l4_worker", "test_l6_memory")
"""How the names of modules begin whose tests look at how much of the device's memory is free."""

_FIRST = "test_l1_driver"
"""How the name of the module begins that is run before others of its level: what it finds makes all of them fail."""

PROGRESS = "progress.jsonl"
"""File in the report's folder from which a run is resumed."""


class UsageError(ValueError):
    """The run was asked for wrongly: nothing is said of the backend."""


@dataclass(frozen=True)
class Settings:
    """What to run.

    Attributes:
        profile: name of the set of levels; None where single levels were asked for.
        clauses: ids of the only clauses or tests to run; the run is partial then.
        jobs: groups of tests side by side; None for one, or two for a backend that is no accelerator. On an accelerator those that
            look at how much of its memory is free run alone.
        time_limit: seconds for each test.
        folder: where the report goes, and where progress is kept; None for neither.
        resume: keep the results that the folder has, if they are of the same backend, tests and seed.
        simulated: the vendor's driver is the simulated one.
    """

    backend: str
    device: int = 0
    profile: str | None = "full"
    levels: tuple[Level, ...] = PROFILES["full"]
    clauses: tuple[str, ...] = ()
    seed: int = 0
    explore: int = 0
    jobs: int | None = None
    time_limit: float = 120.0
    folder: Path | None = None
    resume: bool = False
    waivers: Sequence[Mapping[str, str]] = field(default_factory=tuple)
    simulated: bool = False


class Progress(Protocol):
    """Who is told how a run goes; calls come from several threads, one at a time."""

    def begin(self, examination: Examination, tests: Sequence[Mapping[str, Any]], kept: int) -> None:
        """The tests that will be run are known; `kept` results are there already."""

    def result(self, result: Mapping[str, Any]) -> None:
        """A test has its result."""


def run(settings: Settings, progress: Progress) -> dict[str, Any]:
    """Run the suite and return the report (see `report`); whatever the backend does is a result.

    Raises:
        UsageError: no such backend, device, clause or waived test.
        CollectionFailed: the suite itself is at fault.
        KeyboardInterrupt: the user stopped it; what was finished can be resumed.
    """
    started, clock = datetime.now(UTC), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hardpoint-conformance-") as name:
        scratch = Path(name)
        examination = examine(settings.backend, settings.device, scratch)
        if examination.usage:
            raise UsageError(examination.problem)
        jobs = settings.jobs or (1 if examination.backend["accelerator"] else 2)
        with _process_starter(settings, examination, jobs) as start:
            everything = []
            if not examination.problem:
                assert examination.claims is not None
                try:
                    modules = _modules(settings)
                    everything = collect(examination.claims, scratch, modules, explore=settings.explore, start=start)
                except CollectionFailed:
                    if not examination.contradictions:
                        raise
                    problem = "no tests can be made for what it claims: " + "; ".join(examination.contradictions)
                    examination = replace(examination, claims=None, problem=problem)
            if examination.problem:
                tests = [_found_test()]
                results = [_failed_examination(tests[0], examination.problem, settings)]
                progress.begin(examination, tests, 0)
                progress.result(results[0])
            else:
                tests = _chosen(everything, settings)
                runner = _group_runner(settings, examination, scratch, jobs, start)
                results = _results(settings, examination, tests, runner, jobs, progress)
    results = apply_waivers(results, settings.waivers, examination.backend["version"])
    return finish(
        {
            "schema": SCHEMA,
            "suite": _suite(tests, examination),
            "backend": examination.backend,
            "device": examination.device,
            "simulated": bool(examination.device and examination.device["simulated"]),
            "unavailable": examination.unavailable,
            "claims": examination.claims,
            "selection": {
                "profile": settings.profile,
                "levels": [int(level) for level in settings.levels],
                "clauses": list(settings.clauses),
                "seed": settings.seed,
                "explore": settings.explore,
            },
            "rules": {test["clause"]: test["rule"] for test in tests},
            "results": results,
            "waivers": [dict(waiver) for waiver in settings.waivers],
            "environment": environment_of(),
            "git": git_state(examination.backend["entry_point"]),
            "started": started.isoformat(timespec="seconds"),
            "seconds": round(time.monotonic() - clock, 3),
        }
    )


def _suite(tests: Sequence[Mapping[str, Any]], examination: Examination) -> dict[str, Any]:
    from importlib.metadata import version

    return {
        "version": suite_version(),
        "core": version("hardpoint"),
        "contract": API_VERSION,
        "list_sha256": list_sha256(tests, examination.claims),
    }


def _modules(settings: Settings) -> list[Path]:
    """Return the modules to collect: all of them for waivers, whose ids are checked."""
    levels = tuple(Level) if settings.waivers else settings.levels
    return modules_for(levels, () if settings.waivers else settings.clauses)


def _found_test() -> dict[str, Any]:
    """Return the one test of a backend that cannot be tested, as the suite's list has it."""
    return {
        "id": FOUND,
        "clause": FOUND,
        "rule": "The backend is found, and its import, hook, probe and claims end without an error.",
        "level": int(Level.PACKAGING),
        "node": "examination",
        "capabilities": [],
        "refusal": False,
        "applies": True,
    }


def _failed_examination(test: Mapping[str, Any], problem: str, settings: Settings) -> dict[str, Any]:
    doctor = shlex.join(["hardpoint", "doctor", "--backend", settings.backend])
    message = f"expected: its import, hook, probe and claims end without an error\ngot: {problem}\nlikely cause: see `{doctor}`"
    told = {"outcome": Outcome.FAILED.value, "message": message, "seconds": 0.0, "seed": None, "error_ratio": None}
    return _result(test, told, shlex.join([*_command(settings), "--level", "L0"]))


def _chosen(everything: Sequence[Mapping[str, Any]], settings: Settings) -> list[dict[str, Any]]:
    known = {name for test in everything for name in (test["id"], test["clause"])}
    for wanted in settings.clauses:
        if wanted not in known:
            raise UsageError(
                f"the suite has no clause or test {wanted!r} for this backend (see `hardpoint conformance list`)"
            )
    for waived in unknown(settings.waivers, everything):
        raise UsageError(f"a waiver names {waived!r}, which is no clause and no test of the suite")
    return select(everything, settings.levels, settings.clauses)


def _results(
    settings: Settings,
    examination: Examination,
    tests: list[dict[str, Any]],
    runner: GroupRunner,
    jobs: int,
    progress: Progress,
) -> list[dict[str, Any]]:
    """Run tests and return a result for each, in their order."""
    found: dict[str, dict[str, Any]] = {}
    for test in tests:
        if not test["applies"]:
            found[test["id"]] = _not_called_for(test)
    with _journal(settings, examination, tests) as journal:
        found |= journal.kept
        pending = [test for test in tests if test["id"] not in found]
        progress.begin(examination, tests, len(found))
        lock = threading.Lock()  # guards found, the journal and the progress

        def done(result: dict[str, Any]) -> None:
            outcome = Outcome.NOT_TESTABLE if result["outcome"] == "skipped" else Outcome(result["outcome"])
            ratio = result["error_ratio"]
            told = {
                "outcome": outcome.value,
                "message": shortened(result["message"]),
                "seconds": result["seconds"],
                "seed": result["seed"],
                "error_ratio": None if ratio is None or not math.isfinite(ratio) else ratio,
            }
            with lock:
                found[result["id"]] = told
                journal.write(result["id"], told)
                progress.result({**by_id[result["id"]], **told})

        by_id = {test["id"]: test for test in tests}
        alone, beside = divided(pending, accelerator=examination.backend["accelerator"])
        _run_groups(runner, alone, 1, done)
        _run_groups(runner, beside, jobs, done)
    return [_result(test, found[test["id"]], reproduction(test["id"], settings)) for test in tests]


def _result(test: Mapping[str, Any], told: Mapping[str, Any], reproduction: str) -> dict[str, Any]:
    listed = {name: value for name, value in test.items() if name != "rule"}
    return {**listed, **told, "reproduction": reproduction}


def _not_called_for(test: Mapping[str, Any]) -> dict[str, Any]:
    outcome = Outcome.CLAIMED if test["refusal"] else Outcome.NOT_CLAIMED
    names = ", ".join(test["capabilities"])
    message = f"claimed: {names}" if test["refusal"] else f"not claimed: {names}"
    return {"outcome": outcome.value, "message": message, "seconds": 0.0, "seed": None, "error_ratio": None}


@contextlib.contextmanager
def _process_starter(settings: Settings, examination: Examination, jobs: int) -> Iterator[Start]:
    """Yield how to start the run's processes: as forks, which saves most of their time, but on a device afresh.

    Whether a vendor's libraries bear a fork before their first use is not asked of them.
    """
    simulated = bool(examination.device and examination.device["simulated"])
    if examination.backend["accelerator"] and not simulated:
        yield start
        return
    for_ranks = any(module.name >= "test_l4" for module in _modules(settings))
    with ForkServer(for_ranks=for_ranks, variables=_variables(jobs)) as server:
        yield server.start


def _variables(jobs: int) -> dict[str, str]:
    threads = max(1, (os.cpu_count() or 1) // jobs)
    return {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(threads)}


def _group_runner(settings: Settings, examination: Examination, scratch: Path, jobs: int, start: Start) -> GroupRunner:
    claims = scratch / "claims.json"
    claims.write_text(json.dumps(examination.claims))
    options = ["--backend", settings.backend, "--device", str(settings.device), "--seed", str(settings.seed)]
    options += ["--explore", str(settings.explore), "--claims", str(claims)]
    return GroupRunner(options, scratch, settings.time_limit, _variables(jobs), start=start)


def divided(tests: Sequence[dict[str, Any]], *, accelerator: bool) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the tests that no other may run beside, and the rest, both in the order in which they are run."""
    parts: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
    for test in sorted(tests, key=lambda test: (test["level"], not test["node"].startswith(_FIRST))):
        parts[not (accelerator and test["node"].startswith(_COUNT_MEMORY))].append(test)
    return parts


def _run_groups(runner: GroupRunner, tests: Sequence[dict[str, Any]], jobs: int, done: Any) -> None:
    groups = [(module, list(group)) for module, group in groupby(tests, lambda test: test["node"].partition("::")[0])]
    with ThreadPoolExecutor(jobs) as pool:
        futures = [
            pool.submit(runner.run, f"{number:03}-{Path(module).stem}", group, done)
            for number, (module, group) in enumerate(groups)
        ]
        try:
            for future in futures:
                future.result()
        except BaseException:
            runner.stop.set()
            for future in futures:
                future.cancel()
            raise


def reproduction(test: str, settings: Settings) -> str:
    """Return the command that runs one test again as it was."""
    words = [*_command(settings), "--clause", test, "--seed", str(settings.seed)]
    return shlex.join(words + (["--explore", str(settings.explore)] if settings.explore else []))


def _command(settings: Settings) -> list[str]:
    words = ["hardpoint", "conformance", "run", "--backend", settings.backend]
    if settings.device:
        words += ["--device", str(settings.device)]
    return [*words, "--simulated"] if settings.simulated else words


# Resuming


class _Journal:
    """The results of a run as they come, in a file that a later run can begin from."""

    def __init__(
        self, file: Path | None, header: dict[str, Any], tests: Sequence[Mapping[str, Any]], resume: bool
    ) -> None:
        self.kept: dict[str, dict[str, Any]] = {}
        self._stream = None
        if file is None:
            return
        if resume and file.exists():
            known = {test["id"] for test in tests}
            self.kept = {name: told for name, told in _read(file, header).items() if name in known}
        file.parent.mkdir(parents=True, exist_ok=True)
        self._stream = file.open("w", encoding="utf-8")
        self._line(header)
        for name, told in self.kept.items():
            self.write(name, told)

    def write(self, test: str, told: Mapping[str, Any]) -> None:
        """Note a result."""
        self._line({"id": test, "told": told})

    def _line(self, data: Mapping[str, Any]) -> None:
        if self._stream is not None:
            self._stream.write(json.dumps(data) + "\n")
            self._stream.flush()

    def close(self) -> None:
        """Close the file."""
        if self._stream is not None:
            self._stream.close()


def _read(file: Path, header: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the results of a file with the same header; {} when it is another run's."""
    found: dict[str, dict[str, Any]] = {}
    with file.open(encoding="utf-8") as stream:
        for number, line in enumerate(stream):
            try:
                data = json.loads(line)
            except ValueError:  # the last line of a run that was killed
                break
            if number == 0:
                if data != header:
                    return {}
            else:
                found[data["id"]] = data["told"]
    return found


@contextlib.contextmanager
def _journal(settings: Settings, examination: Examination, tests: Sequence[Mapping[str, Any]]) -> Iterator[_Journal]:
    about = {
        "suite": _suite(tests, examination),
        "backend": examination.backend,
        "device": examination.device,
        "packages": environment_of()["packages"],
        "seed": settings.seed,
        "explore": settings.explore,
    }
    header: dict[str, Any] = json.loads(canonical(about))
    file = None if settings.folder is None else settings.folder / PROGRESS
    journal = _Journal(file, header, tests, settings.resume)
    try:
        yield journal
    finally:
        journal.close()
