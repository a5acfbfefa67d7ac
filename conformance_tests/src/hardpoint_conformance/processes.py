"""Processes that may crash, hang, or leave children behind: each has a group of its own, which is gone in the end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_LAST_LINES = 15


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


def environment(**changes: str) -> dict[str, str]:
    """Return the environment for a process that runs elsewhere than here: paths absolute, pytest without the user's settings."""
    found = dict(os.environ)
    if "PYTHONPATH" in found:
        paths = found["PYTHONPATH"].split(os.pathsep)
        found["PYTHONPATH"] = os.pathsep.join(str(Path(path).absolute()) for path in paths)
    found.pop("PYTEST_ADDOPTS", None)
    found.pop("PYTEST_PLUGINS", None)
    return found | changes


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started (and that is still in its group), and wait for it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_process(command: Sequence[str], scratch: Path, time_limit: float, stdout: Path | None = None) -> Ended:
    """Run a command in `scratch` in a group of its own, to its end or the time limit; its output goes to files."""
    errors = scratch / "stderr.txt"
    with errors.open("wb") as stderr, (stdout or Path(os.devnull)).open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=stderr,
            cwd=scratch,
            env=environment(PYTEST_DISABLE_PLUGIN_AUTOLOAD="1"),
            start_new_session=True,
        )
        code: int | None
        try:
            code = process.wait(time_limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_group(process)
    return Ended(code, errors.read_text("utf-8", "replace"), time_limit)
