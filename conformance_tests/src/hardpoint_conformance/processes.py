"""Processes that may crash, hang, or leave children behind: each has a group of its own, which is gone in the end."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

_LAST_LINES = 15


class Process(Protocol):
    """What `subprocess.Popen` has of a process."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while the process runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status when the process has ended; raises subprocess.TimeoutExpired."""

    def send_signal(self, number: int) -> None:
        """Send a signal."""


class Start(Protocol):
    """How a process is started."""

    def __call__(
        self,
        module: str,
        arguments: Sequence[str],
        folder: Path,
        stdout: Path,
        stderr: Path,
        variables: Mapping[str, str],
    ) -> Process:
        """Run a module as `python -m` does, in `folder` and in a group of its own; its output goes to files, which are there."""


@dataclass(frozen=True)
class Ended:
    """How a process ended.

    Attributes:
        code: exit status; negative for a signal; None where it was ended at a time limit.
        stderr: all that it wrote there.
        limit: seconds that it had.
    """

    code: int | None
    stderr: str
    limit: float

    @property
    def how(self) -> str:
        """For a sentence that begins with "the process"."""
        return ended_how(self.code, self.limit)

    @property
    def last_words(self) -> str:
        """The last lines of its standard error after a colon; "" where there are none."""
        return last_words(self.stderr)


def ended_how(code: int | None, limit: float) -> str:
    """Return how a process ended, for a sentence that begins with "the process"."""
    if code is None:
        return f"did not end within {limit:g} s"
    if code >= 0:
        return f"ended with exit status {code}"
    try:
        return f"was ended by {signal.Signals(-code).name} ({signal.strsignal(-code)})"
    except ValueError:
        return f"was ended by signal {-code}"


def last_words(text: str) -> str:
    """Return the last lines of a text after a colon; "" where there are none."""
    lines = text.strip().splitlines()[-_LAST_LINES:]
    return ":\n" + "\n".join(lines) if lines else ""


@contextlib.contextmanager
def imports_kept() -> Iterator[None]:
    """A context for imports: nothing is collected meanwhile, and nothing that there is at its end later, which stays.

    A sixth of the time of imports is looking through them again and again; a collection in a fork would copy their pages, too. What comes
    later is looked through less often than by default.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)
        gc.enable()


def environment(**changes: str) -> dict[str, str]:
    """Return the environment for a process that runs elsewhere than here: paths absolute, pytest without the user's settings."""
    found = dict(os.environ)
    if "PYTHONPATH" in found:
        paths = found["PYTHONPATH"].split(os.pathsep)
        found["PYTHONPATH"] = os.pathsep.join(str(Path(path).absolute()) for path in paths)
    found.pop("PYTEST_ADDOPTS", None)
    found.pop("PYTEST_PLUGINS", None)
    return found | changes


def start(
    module: str, arguments: Sequence[str], folder: Path, stdout: Path, stderr: Path, variables: Mapping[str, str]
) -> Process:
    """Start a fresh process: see `Start`."""
    with stderr.open("wb") as errors, stdout.open("wb") as output:
        process: Process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            cwd=folder,
            env=variables,
            start_new_session=True,
        )
    return process


def end_group(process: Process) -> None:
    """End a process and all that it started (and that is still in its group), and wait for it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    # A fork may have been too young to have its group.
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)
    process.wait()


def run_process(
    module: str,
    arguments: Sequence[str],
    scratch: Path,
    time_limit: float,
    stdout: Path = Path(os.devnull),
    start: Start = start,
) -> Ended:
    """Run a module in `scratch` in a group of its own, to its end or the time limit; its output goes to files."""
    errors = scratch / "stderr.txt"
    for file in (errors, stdout):
        file.write_bytes(b"")
    process = start(module, arguments, scratch, stdout, errors, environment(PYTEST_DISABLE_PLUGIN_AUTOLOAD="1"))
    code: int | None
    try:
        code = process.wait(time_limit)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        end_group(process)
    return Ended(code, errors.read_text("utf-8", "replace"), time_limit)
