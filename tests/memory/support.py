"""What the tests of the memory engine share: programs run in a process of their own."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


PRELUDE = """
import gc, os, signal, sys, threading, time
from hardpoint.interfaces import FileExtent, Policy, SleepPlan, SleepTier
from hardpoint.interfaces.errors import *
from hardpoint.memory import VirtualPool
from hardpoint_cpu.driver import DriverFaults, driver_table
"""

# A child leaves the loop after its program, and ends as an interpreter does.
FORKS = """
import json
for line in sys.stdin:
    source, sys.argv[1:], environment, outputs = json.loads(line)
    child = os.fork()
    if child == 0:
        for number, path in enumerate(outputs, 1):
            os.dup2(os.open(path, os.O_WRONLY), number)
        os.environ.clear()
        os.environ.update(environment)
        exec(source)
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    os._exit(0)
"""


@cache
def forking(prelude: str) -> subprocess.Popen[str]:
    """Return an interpreter that has run the prelude, and of which programs are forks, until this process ends."""
    command = [sys.executable, "-c", prelude + FORKS]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    atexit.register(process.communicate)
    return process


def run_program(program: str, *arguments: object, prelude: str = PRELUDE) -> subprocess.CompletedProcess[str]:
    """Run a program in an interpreter of its own, whose imports (the prelude) are made once; `arguments` are its sys.argv[1:]."""
    forks = forking(prelude)
    with tempfile.NamedTemporaryFile("r") as output, tempfile.NamedTemporaryFile("r") as errors:
        source, words = textwrap.dedent(program), [str(argument) for argument in arguments]
        assert forks.stdin is not None
        assert forks.stdout is not None
        print(json.dumps([source, words, dict(os.environ), [output.name, errors.name]]), file=forks.stdin, flush=True)
        status = int(forks.stdout.readline())
        return subprocess.CompletedProcess(program, status, output.read(), errors.read())


def runs_cleanly(program: str, *arguments: object, prelude: str = PRELUDE) -> str:
    """Run a program, assert that it ends with status 0 and writes no error; return its output."""
    ended = run_program(program, *arguments, prelude=prelude)
    assert (ended.returncode, ended.stderr) == (0, ""), f"status {ended.returncode}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout
