"""The README's tables of models and weight formats are those that the code makes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def status(root: Path, file: Path) -> int:
    command = [sys.executable, str(root / "scripts" / "format_table.py"), "--check", str(file)]
    return subprocess.run(command, cwd=root, check=False, stderr=subprocess.PIPE).returncode


def test_the_tables_are_current(root: Path, tmp_path: Path) -> None:
    assert status(root, root / "README.md") == 0
    text = (root / "README.md").read_text("utf-8")
    stale = tmp_path / "README.md"
    stale.write_text(text.replace("`LlamaForCausalLM`, ", "", 1), "utf-8")
    assert status(root, stale) == 1
