"""Where the output goes wrong: a full disk is said in one line, and a reader who has enough is no error to speak of."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

COMMAND = [sys.executable, "-m", "hardpoint.cli"]


@pytest.mark.parametrize("command", ["models", "models --json", "--version", "--help"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_cannot_be_written_is_one_line(command: str, unbuffered: str) -> None:
    with open("/dev/full", "wb") as full:
        result = subprocess.run(
            [*COMMAND, *command.split()],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        )
    assert (result.returncode, result.stderr) == (1, "error: the output cannot be written: No space left on device\n")


def test_a_reader_that_leaves_is_told_nothing() -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        result = subprocess.run([*COMMAND, "models"], stdout=write, stderr=subprocess.PIPE, text=True)
    finally:
        os.close(write)
    assert (result.returncode, result.stderr) == (1, "")
