"""The blocks of docs/integrations.md run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.tasks import write_task

BLOCKS = re.findall(
    r"^```(\w*)\n(.*?)^```$",
    (Path(__file__).parents[2] / "docs" / "integrations.md").read_text("utf-8"),
    re.MULTILINE | re.DOTALL,
)
pytestmark = pytest.mark.timeout(900)


def test_blocks_of_python_run(capsys: pytest.CaptureFixture[str]) -> None:
    """One after the other in this process: each has an engine of its own."""
    for kind, text in BLOCKS:
        if kind == "python":
            exec(compile(text, "docs/integrations.md", "exec"), {"__name__": "block"})
            assert any(word in capsys.readouterr().out for word in ("Paris", "Once", "time"))


def test_lm_evals_command_runs_on_a_task_of_ones_own(tmp_path: Path) -> None:
    write_task(tmp_path, "capitals")
    (command,) = [text for kind, text in BLOCKS if kind == "sh"]
    python, *arguments = command.split()
    assert python == "python"
    environment = os.environ | {"HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "acc_norm" in done.stdout
