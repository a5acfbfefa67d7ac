"""Run one measurement in a process and environment of its own, and never leave it behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from report import REPOSITORY

_STDERR_LINES = 6
_GRACE_S = 5.0


class ChildFailed(Exception):
    """A measurement process gave no answer; the message says why and ends with the end of its stderr."""


def run_script(
    python: str | os.PathLike[str],
    script: str | os.PathLike[str],
    arguments: Sequence[str] = (),
    *,
    environment: Mapping[str, str] | None = None,
    timeout_s: float,
) -> dict[str, Any]:
    """Run a Python script and return the JSON object on the last line of its stdout.

    The process leads a group of its own, which is ended with it, on time-out and on Ctrl-C: engines have workers.

    Args:
        environment: variables set on top of this process's own.
        timeout_s: seconds until the process is ended.

    Raises:
        ChildFailed: it could not start, took too long, failed, or answered something else.
    """
    name = Path(script).name
    # Files and not pipes: a worker that outlives its parent would keep a pipe open.
    with _text_file() as stdout, _text_file() as stderr:
        try:
            process = subprocess.Popen(
                [str(python), str(script), *arguments],
                env={**os.environ, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        except OSError as error:
            raise ChildFailed(f"{name} could not be started with {python}: {error}") from None
        try:
            process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise ChildFailed(f"{name} took longer than {timeout_s:.0f} s{_end_of(stderr)}") from None
        finally:
            _end_group(process)
        if process.returncode != 0:
            raise ChildFailed(f"{name} ended with status {process.returncode}{_end_of(stderr)}")
        stdout.seek(0)
        try:
            answer = json.loads(stdout.read().strip().rpartition("\n")[2])
        except json.JSONDecodeError:
            answer = None
        if not isinstance(answer, dict):
            raise ChildFailed(f"{name} gave no JSON object on the last line of its stdout{_end_of(stderr)}")
        return answer


def _end_group(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(timeout=_GRACE_S)
        except subprocess.TimeoutExpired:
            continue


def _text_file() -> IO[str]:
    return tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")


def _end_of(stderr: IO[str]) -> str:
    stderr.seek(0)
    lines = [line.replace(f"{REPOSITORY}/", "").rstrip()[:300] for line in stderr if line.strip()]
    return "".join(f"\n    {line}" for line in lines[-_STDERR_LINES:])
