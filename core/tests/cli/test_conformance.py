"""`hardpoint conformance` is the suite's, where that is installed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from hardpoint.cli import conformance


def test_suite_that_is_not_installed_is_one_clear_error(
    hp: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conformance, "find_spec", lambda name: None)
    result = hp("conformance", "list")
    assert result.code == 1
    assert "the conformance suite is not installed" in result.err
    assert "pip install hardpoint-conformance" in result.err


def test_commands_of_the_suite_are_mounted(hp: Callable[..., Any]) -> None:
    pytest.importorskip("hardpoint_conformance")
    assert hp("conformance", "run", "--backend", "nobody", "--level", "L9").code == 2
    shown = hp("conformance", "--help").out
    assert all(name in shown for name in ("list", "run", "report", "verify", "compare", "table", "selftest", "init"))


def test_no_other_command_imports_the_suite() -> None:
    code = (
        "import sys; from hardpoint.cli import main\n"
        "try: main(['doctor', '--json'])\n"
        "finally: print('hardpoint_conformance' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=240)
    assert ended.stdout.rstrip().endswith("False"), ended.stdout + ended.stderr
