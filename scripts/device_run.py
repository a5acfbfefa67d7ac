"""What a run of `device_check.py` keeps: where things go, how commands are run, what was found and what was done."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "device-check"
STEP_SECONDS, GRACE_SECONDS = 300.0, 20.0
TAIL = 40
"""Lines of a failed check's output that are printed; the log has all."""

NO_TIME = "no time was left"


@dataclass(frozen=True)
class Finding:
    """What a vendor's driver says of its devices.

    Attributes:
        devices: their names.
        reason: why there are none.
        broken: something is there that cannot be used: no reason to say that there is nothing.
        variable, sonames: where the driver was looked for.
        library: the driver that was found.
    """

    backend: str
    variable: str
    sonames: tuple[str, ...]
    devices: tuple[str, ...] = ()
    reason: str = ""
    broken: bool = False
    library: str = ""
    driver_version: str = ""
    simulated: bool = False


@dataclass
class Step:
    """One check.

    Attributes:
        status: "passed", "failed", or "not run" with the reason in `note`.
        report: name of the file with the details.
    """

    name: str
    status: str
    note: str = ""
    report: str = ""
    command: str = ""
    seconds: float = 0.0


@dataclass
class Run:
    """The state of one run: where things go, and what was done.

    Attributes:
        python: interpreter with which the checks run.
        label: put before the names of reports: "simulated_" where the driver is a simulation.
        quick: benchmarks run little, and their figures mean nothing.
        end: when the run must have ended, by the monotonic clock.
        environment: of the processes that are started.
    """

    python: str
    out: Path
    label: str
    quick: bool = False
    end: float = float("inf")
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    steps: list[Step] = field(default_factory=list)

    @property
    def left(self) -> float:
        """Seconds until the run must have ended."""
        return self.end - time.monotonic()

    def execute(
        self,
        command: Sequence[str],
        output: Path | None = None,
        settings: Mapping[str, str] | None = None,
        limit: float = STEP_SECONDS,
    ) -> tuple[int, str]:
        """Run a command in the checkout; returns its status and output, which also goes to the log.

        Args:
            output: file for standard output alone.
            settings: environment variables beside those of the run.
            limit: seconds after which it is asked to end, and soon after killed; less where the run has less left.
        """
        say("$ " + shlex.join(command))
        limit = min(limit, self.left)
        try:
            started = subprocess.Popen(
                command,
                cwd=ROOT,
                env=self.environment | dict(settings or {}),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT if output is None else subprocess.PIPE,
                text=True,
                errors="replace",
            )
        except OSError as error:
            self._log(command, str(error))
            return -1, str(error)
        with started:
            stdout, stderr = _wait(started, limit)
        if output is not None:
            output.write_text(stdout, encoding="utf-8")
        text = stdout if output is None else stderr
        self._log(command, text)
        return started.returncode, text

    def path(self, report: str) -> str:
        """Return a report's path, relative to the checkout where it lies in it."""
        path = self.out / report
        return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)

    def add(self, step: Step) -> Step:
        """Keep a step and print how it ended."""
        self.steps.append(step)
        say(f"  {step.status}: {step.name}{f' ({step.note})' if step.note else ''}")
        return step

    def _log(self, command: Sequence[str], text: str) -> None:
        with (self.out / f"{self.label}log.txt").open("a", encoding="utf-8") as log:
            log.write(f"$ {shlex.join(command)}\n{text}\n")


def say(text: str) -> None:
    """Print at once, so that a run that is cut off shows how far it came."""
    print(text, flush=True)


def last_line(text: str) -> str:
    """Return the last line that says something."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no output")


def timed(
    run: Run,
    name: str,
    command: Sequence[str],
    report: str,
    output: Path | None = None,
    *,
    show: bool = False,
    settings: Mapping[str, str] | None = None,
    limit: float = STEP_SECONDS,
) -> Step:
    """Run a check's command; returns the step, passed where its status is zero. The caller completes and adds it.

    Args:
        report: file that the command writes; an old one is removed.
        show: print the end of the output where the command passes, too.
        limit: seconds that it may take.
    """
    (run.out / report).unlink(missing_ok=True)
    start = time.perf_counter()
    status, text = run.execute(command, output, settings, limit)
    if (show or status) and text.strip():
        say("\n".join(text.rstrip().splitlines()[-TAIL:]))
    seconds = round(time.perf_counter() - start, 1)
    if status:
        return Step(name, "failed", last_line(text), report, shlex.join(command), seconds)
    return Step(name, "passed", "", report, shlex.join(command), seconds)


def _wait(process: subprocess.Popen[str], limit: float) -> tuple[str, str]:
    """Return what a process writes until it ends, and stop it after `limit` seconds, politely, since it may have children."""
    try:
        stdout, stderr = process.communicate(timeout=max(limit, 0.0))
        return stdout, stderr or ""
    except subprocess.TimeoutExpired:
        process.terminate()
    how = "ended"
    try:
        stdout, stderr = process.communicate(timeout=GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        how = "killed"
        process.kill()
        stdout, stderr = process.communicate()
    words = f"{how} after {limit:.0f} s"
    return f"{stdout.rstrip()}\n{words}", f"{(stderr or '').rstrip()}\n{words}"
