"""Running the suite in forks of one process that has imported everything once.

The parent starts no device and no threads; every job is a process group of its own with a time limit, in a folder of its own, which is
removed with everything that the job left there.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hardpoint_conformance import plugin
from hardpoint_conformance.ranks import fork_server_here
from hardpoint_conformance.target import MUTANT_VARIABLE

if TYPE_CHECKING:
    from hardpoint_conformance.clauses import Clause

_NO_PLUGINS = "PYTEST_DISABLE_PLUGIN_AUTOLOAD"
_UNUSED = (
    *("cacheprovider", "terminalreporter", "logging"),
    # They look for what warnings, which are ignored, could be given of, by a garbage collection each.
    *("threadexception", "unraisableexception"),
    # Each fork would register them.
    *("debugging", "doctest", "junitxml", "legacypath", "pastebin", "recwarn", "setuponly", "setupplan", "stepwise"),
    *("subtests", "unittest"),
)
"""Plugins of pytest."""
_POLL_SECONDS = 0.01
_SUITE = Path(__file__).with_name("suite")


@dataclass(frozen=True)
class Case:
    """A test of the suite, as it was collected for the correct backend.

    Attributes:
        seeded: it has random inputs.
        applies: the correct backend's claims call for it; those of a mutant may call for others.
    """

    id: str
    clause: Clause
    file: str
    seeded: bool
    applies: bool = True


@dataclass(frozen=True)
class Job:
    """A run of some clauses.

    Attributes:
        name: unique.
        mutant: put in the backend's place; "" for none.
        first_failure: a clause that has failed once is not run further.
        seconds: time limit.
        tells_modules: what it imported beyond the parent is told.
    """

    name: str
    files: tuple[str, ...]
    clauses: tuple[str, ...]
    mutant: str = ""
    seed: int = 0
    first_failure: bool = False
    seconds: float = 60.0
    tells_modules: bool = False


@dataclass(frozen=True)
class Ended:
    """How a job ended.

    Attributes:
        results: the result of every test that ended, as the plugin writes them.
        running: the test that was running when the process died or was stopped; "" when it ended by itself.
        end: "" for an exit after the last test, else what happened.
        output: the last lines that it printed.
        modules: what it imported beyond the parent, where the job is to tell it.
    """

    job: Job
    results: tuple[dict[str, Any], ...]
    running: str
    end: str
    seconds: float
    output: str = ""
    modules: tuple[str, ...] = ()

    @property
    def failures(self) -> list[dict[str, Any]]:
        """Results that are not as they must be."""
        return [result for result in self.results if result["outcome"] in ("failed", "error")]

    @property
    def tests(self) -> int:
        """How many tests were run."""
        return sum(result["outcome"] != "skipped" for result in self.results)


def collect(backend: str) -> tuple[Case, ...]:
    """Import the suite in this process, which is what forks share, and return its tests.

    Raises:
        RuntimeError: the suite cannot be collected.
    """
    found = _Collection()
    with _quiet() as output, _working_directory(), _no_other_plugins():
        status = pytest.main([*_options(backend), "--collect-only", str(_SUITE)], plugins=[plugin, found])
        if status != pytest.ExitCode.OK:
            raise RuntimeError(f"the suite cannot be collected ({status!r}):\n{output.read_text()[-4000:]}")
    return tuple(found.cases)


def run_forked(jobs: Iterable[Job], backend: str, at_a_time: int) -> Iterator[Ended]:
    """Run jobs in forks of this process, some at a time; yield each when it has ended.

    When the caller stops, or an exception comes, what still runs is killed.
    """
    waiting, running = list(jobs)[::-1], dict[int, _Child]()
    with tempfile.TemporaryDirectory(prefix="hardpoint-selftest-") as folder:
        config = _configuration(backend, folder)
        try:
            while waiting or running:
                while waiting and len(running) < at_a_time:
                    child = _Child.start(waiting.pop(), config, Path(folder))
                    running[child.pid] = child
                ended = [child for child in running.values() if child.has_ended()]
                for child in ended:
                    del running[child.pid]
                    yield child.result()
                if not ended:
                    time.sleep(_POLL_SECONDS)
        finally:
            for child in running.values():
                child.kill()


@dataclass
class _Child:
    """One job's process."""

    job: Job
    pid: int
    folder: Path
    start_time: float
    status: int | None = None
    late: bool = False
    took: float = field(default=0.0)

    @classmethod
    def start(cls, job: Job, config: pytest.Config, folder: Path) -> _Child:
        own = folder / job.name
        own.mkdir()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            _run_job(job, config, own)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        return cls(job, pid, own, time.monotonic())

    def has_ended(self) -> bool:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = status
                self.took = time.monotonic() - self.start_time
                self._kill_group()
            elif time.monotonic() - self.start_time > self.job.seconds:
                self.late = True
                self.kill()
        return self.status is not None

    def kill(self) -> None:
        if self.status is None:
            self._kill_group()
            _, self.status = os.waitpid(self.pid, 0)
            self.took = time.monotonic() - self.start_time

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def result(self) -> Ended:
        lines = (self.folder / "results.jsonl").read_text().splitlines() if self._has("results.jsonl") else []
        events = [json.loads(line) for line in lines if line.endswith("}")]
        ended = {event["id"] for event in events if event["event"] == "end"}
        open_tests = [event["id"] for event in events if event["event"] == "start" and event["id"] not in ended]
        output = (self.folder / "output").read_text(errors="replace")[-4000:] if self._has("output") else ""
        end = self._end()
        results = tuple(event for event in events if event["event"] == "end")
        running = open_tests[-1] if open_tests and end else ""
        modules = (self.folder / "modules").read_text().split() if self._has("modules") else []
        shutil.rmtree(self.folder, ignore_errors=True)
        return Ended(self.job, results, running, end, self.took, output, tuple(modules))

    def _has(self, name: str) -> bool:
        return (self.folder / name).exists()

    def _end(self) -> str:
        assert self.status is not None
        if self.late:
            return f"stopped after {self.job.seconds:g} s"
        code = os.waitstatus_to_exitcode(self.status)
        if code < 0:
            return f"ended by {signal.Signals(-code).name}"
        return "" if code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) else f"exit status {code}"


def _run_job(job: Job, config: pytest.Config, folder: Path) -> None:
    """Be the child: run pytest, and leave without what the parent would do at its exit."""
    status, imported = 70, set(sys.modules) if job.tells_modules else set()
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for stream, target in enumerate((nothing, output, output)):
            os.dup2(target, stream)
        # The parent's own streams may be objects of a terminal or of a test that must not be shared.
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
        os.chdir(folder)
        (folder / "sleep").mkdir()
        os.environ |= {"TMPDIR": str(folder), "HARDPOINT_SLEEP_DIR": str(folder / "sleep")}
        tempfile.tempdir = str(folder)
        os.environ.pop(MUTANT_VARIABLE, None)
        if job.mutant:
            os.environ[MUTANT_VARIABLE] = job.mutant
        if any(clause.startswith("dist.") for clause in job.clauses):
            fork_server_here()
        config.option.seed, config.option.clauses = job.seed, ",".join(job.clauses)
        config.option.results, config.args = Path("results.jsonl"), list(job.files)
        if job.first_failure:
            config.pluginmanager.register(_FirstFailure())
        config.pluginmanager.getplugin("capturemanager").start_global_capturing()  # it ended with the parent's `main`
        status = int(config.hook.pytest_cmdline_main(config=config))
        if job.tells_modules:
            (folder / "modules").write_text("\n".join(sorted(set(sys.modules) - imported)))
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _options(backend: str) -> Sequence[str]:
    quiet = ["-q", "--no-header", *(f"-pno:{name}" for name in _UNUSED)]
    # Of a failure its error is told, and not the lines that led to it, which are found by parsing their files.
    quiet += ["--tb=line", "-W", "ignore"]
    own = ["-c", os.devnull, f"--rootdir={_SUITE}", f"--confcutdir={_SUITE}"]
    return [*quiet, *own, f"--backend={backend}"]


def _configuration(backend: str, folder: str) -> pytest.Config:
    """Return pytest's configuration, with which a fork goes on: to make it takes a third of the time of a fork that runs one quick test.

    Args:
        folder: what pytest is called in, where it finds no configuration; a fork comes back to it at its end.
    """
    made = _Configuration()
    with contextlib.chdir(folder), _no_other_plugins():
        pytest.main([*_options(backend), "--capture=no"], plugins=[plugin, made])
    assert made.config is not None
    return made.config


class _Configuration:
    """Keeps pytest's configuration, and has nothing done with it."""

    def __init__(self) -> None:
        self.config: pytest.Config | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> pytest.ExitCode | None:
        if self.config is not None:
            return None
        self.config = config
        return pytest.ExitCode.OK


class _Collection:
    """Notes the tests, and which apply."""

    def __init__(self) -> None:
        self.cases: list[Case] = []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        for item in items:
            clause = plugin.clause_of(item)
            if clause is not None:
                seeded = "seed" in getattr(item, "fixturenames", ())
                applies = plugin.applies(item, clause, plugin.claims_of(config))
                self.cases.append(Case(plugin.test_id(item, clause), clause, str(item.path), seeded, applies))


class _FirstFailure:
    """Leaves the rest of a clause out once it has failed."""

    def __init__(self) -> None:
        self._failed: set[str] = set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        clause = plugin.clause_of(item)
        if clause is not None and clause.id in self._failed:
            pytest.skip("its clause has failed")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Any:
        report = yield
        clause = plugin.clause_of(item)
        if report.failed and clause is not None:
            self._failed.add(clause.id)
        return report


@contextlib.contextmanager
def _quiet() -> Iterator[Path]:
    """Send what is printed to a file; yields its path."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "output"
        with file.open("w") as stream, contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
            yield file


@contextlib.contextmanager
def _no_other_plugins() -> Iterator[None]:
    """Keep plugins that happen to be installed out: they take time, and their options are not the suite's."""
    before = os.environ.get(_NO_PLUGINS)
    os.environ[_NO_PLUGINS] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NO_PLUGINS]
        else:
            os.environ[_NO_PLUGINS] = before


@contextlib.contextmanager
def _working_directory() -> Iterator[None]:
    """Work in a folder that is removed again, where pytest finds no configuration and leaves nothing."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)
