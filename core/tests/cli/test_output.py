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


@pytest.mark.parametrize(
    ("closed", "wanted"),
    [("<&-", (2, "", "standard input is empty")), (">&-", (0, "", "")), ("2>&-", (0, "hardpoint", ""))],
    ids=["input", "output", "error"],
)
def test_streams_that_are_closed_lead_nowhere(closed: str, wanted: tuple[int, str, str]) -> None:
    command = "generate demo" if closed == "<&-" else "--version"
    script = f'"{sys.executable}" -m hardpoint.cli {command} {closed}'
    result = subprocess.run(["sh", "-c", script], capture_output=True, text=True)
    code, out, err = wanted
    assert result.returncode == code, result.stderr
    assert out in result.stdout
    assert err in result.stderr if err else not result.stderr


def test_text_that_an_encoding_lacks_is_replaced_and_bytes_that_are_none_are_kept_apart() -> None:
    script = (
        "from hardpoint.cli import streams; import sys; streams.take(); print(ascii(sys.stdin.read()), 'caf\u00e9')"
    )
    result = subprocess.run(
        [sys.executable, "-c", script],
        input=b"a\xff",
        capture_output=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii:strict", "PYTHONUTF8": "1"},
    )
    assert (result.stdout, result.stderr) == (b"'a\\udcff' caf?\n", b"")
