"""Groups of tests in processes of their own: what crashes or hangs there is a result, and the tests after it are still run."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from hardpoint_conformance import crashes
from hardpoint_conformance.outcomes import Outcome
from hardpoint_conformance.processes import Process, Start, end_group, ended_how, environment, last_words, start
from hardpoint_conformance.report import SUITE, pytest_arguments

_POLL = 0.05
_START_LIMIT = 180.0
"""Seconds that a process may take before its first test and between tests (imports, fixtures, tear-down)."""

_DUMP = 1.0
"""Seconds that a hung process has for writing where it hangs."""

_MESSAGE_LIMIT = 6000

Entry = dict[str, Any]
Observer = Callable[[Entry], None]


class Interrupted(Exception):
    """The run was asked to stop."""


@dataclass
class _Death:
    """What a process left undone, and how it ended.

    Attributes:
        test: id of the test in the middle of which it ended; None between tests.
        hung: it was ended at the time limit.
        how: for a sentence that begins with "the process".
        where: the frames in which it was, and the last lines of standard error.
    """

    test: str | None
    hung: bool
    how: str
    where: str

    def told(self, when: str = "") -> str:
        """Return the message of a result: what was expected and found, and where to look."""
        frame = "the innermost frame below that is not the suite's"
        cause = f"a call that does not return, in {frame}" if self.hung else f"{frame}; without frames, an exit in it"
        return f"expected: the process goes on to the next test\ngot: {when}the process {self.how}\nlikely cause: {cause}{self.where}"


@dataclass
class GroupRunner:
    """Runs groups of tests against one backend.

    Attributes:
        options: of pytest, the same for every group (backend, device, seed, claims).
        time_limit: seconds for each test.
        variables: of the environment, besides this process's own.
        start: how the processes are started.
        stop: set to end everything.
        started: called with a test's id when it begins.
    """

    options: Sequence[str]
    scratch: Path
    time_limit: float
    variables: dict[str, str] = field(default_factory=dict)
    start: Start = start
    stop: threading.Event = field(default_factory=threading.Event)
    started: Callable[[str], None] = lambda test: None

    def run(self, name: str, tests: Sequence[Entry], done: Observer) -> None:
        """Run tests of one module in order, and call `done` with each one's result (outcome, message, seconds, seed, error_ratio).

        Raises:
            Interrupted: `stop` was set.
        """
        folder = self.scratch / name
        folder.mkdir(parents=True, exist_ok=True)
        pending = {test["id"]: test for test in tests}

        def finished(result: Entry) -> None:
            if pending.pop(result["id"], None) is not None:
                done(result)

        while pending:
            before = len(pending)
            death, held = self._launch(folder, list(pending.values()), finished)
            if held is not None and (death is None or death.test is not None):
                finished(held)
            if death is None:
                for test in list(pending):
                    finished(
                        _result(test, Outcome.ERROR, "pytest did not collect it in the process that was to run it")
                    )
                return
            outcome = Outcome.HUNG if death.hung else Outcome.CRASHED
            if death.test is not None:
                finished(_result(death.test, outcome, death.told()))
            elif held is not None:
                finished({**held, "outcome": outcome.value, "message": death.told("after this test ")})
            if len(pending) == before:
                for test in list(pending):
                    finished(_result(test, outcome, death.told("before its first test ")))

    def _launch(self, folder: Path, tests: Sequence[Entry], finished: Observer) -> tuple[_Death | None, Entry | None]:
        """Run one process; return how it died (None: it ended well) and the result of its last test, which is not yet told."""
        results, chosen = folder / "results.jsonl", folder / "tests.json"
        stderr, stdout = folder / "stderr.txt", folder / "stdout.txt"
        chosen.write_text(json.dumps([test["id"] for test in tests]))
        results.write_bytes(b"")
        module = str(SUITE / tests[0]["node"].partition("::")[0])
        options = ["-q", "--capture=no", "--tests", str(chosen), "--results", str(results), *self.options, module]
        for file in (stderr, stdout):
            file.write_bytes(b"")
        variables = environment(PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", **self.variables)
        process = self.start("pytest", pytest_arguments(*options), folder, stdout, stderr, variables)
        try:
            with results.open("rb") as stream:
                current, held, hung = self._watch(process, stream, finished)
        finally:
            end_group(process)
        code = process.returncode
        if not hung and current is None and code in (0, 1):
            return None, held
        limit = _START_LIMIT if current is None else self.time_limit
        how = ended_how(None if hung else code, limit)
        said, frames = crashes.split(stderr.read_text("utf-8", "replace"))
        words = last_words(said) or last_words(stdout.read_text("utf-8", "replace"))
        return _Death(current, hung, how, frames + (f"\nits last lines{words}" if words else "")), held

    def _watch(self, process: Process, stream: BinaryIO, finished: Observer) -> tuple[str | None, Entry | None, bool]:
        """Follow a process to its end; return the test it was in, the last result, and whether it hung.

        A result is told when the next test begins: until then the process can still die of it.
        """
        current: str | None = None
        held: Entry | None = None
        since, rest = time.monotonic(), b""
        while True:
            ended = process.poll() is not None
            rest += stream.read()
            *lines, rest = rest.split(b"\n")
            for line in lines:
                event, since = json.loads(line), time.monotonic()
                if event["event"] == "start":
                    if held is not None:
                        finished(held)
                    current, held = event["id"], None
                    self.started(event["id"])
                else:
                    current, held = None, event
            if ended:
                return current, held, False
            if self.stop.is_set():
                raise Interrupted
            limit = self.time_limit if current is not None else _START_LIMIT
            if time.monotonic() - since > limit:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGABRT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_DUMP)
                return current, held, True
            self.stop.wait(_POLL)


def _result(test: str, outcome: Outcome, message: str) -> Entry:
    return {"id": test, "outcome": outcome.value, "message": message, "seconds": 0.0, "seed": None, "error_ratio": None}


def shortened(message: str) -> str:
    """Return a message with its middle left out where it is long."""
    if len(message) <= _MESSAGE_LIMIT:
        return message
    half = _MESSAGE_LIMIT // 2
    return f"{message[:half]}\n[...]\n{message[-half:]}"
