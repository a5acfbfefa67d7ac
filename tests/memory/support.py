"""What the tests of the memory engine share: programs run in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]


PRELUDE = """
import gc, os, signal, sys, threading, time
from hardpoint.interfaces import FileExtent, Policy, SleepPlan, SleepTier
from hardpoint.interfaces.errors import *
from hardpoint.memory import VirtualPool
from hardpoint_cpu.driver import DriverFaults, driver_table
"""


def run_program(
    program: str, *arguments: object, prelude: str = PRELUDE, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a program in a new interpreter; `arguments` are its sys.argv[1:]."""
    source = prelude + textwrap.dedent(program)
    command = [sys.executable, "-c", source, *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=240, env=os.environ | environment, cwd=ROOT, check=False
    )


def runs_cleanly(program: str, *arguments: object, **environment: str) -> str:
    """Run a program, assert that it ends with status 0 and writes no error; return its output."""
    ended = run_program(program, *arguments, **environment)
    assert (ended.returncode, ended.stderr) == (0, ""), f"status {ended.returncode}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout
