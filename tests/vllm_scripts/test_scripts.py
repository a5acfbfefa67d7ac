"""Scripts that import vllm run unchanged, or end with a typed error that says why not; and the blocks of docs/moving-from-vllm.md run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from .runs import DOCUMENT, ROOT, SCRIPTS, Run, document, run_scripts

BLOCKS = re.findall(
    r"^```(\w*)\n(.*?)^```$",
    (ROOT / "docs" / "moving-from-vllm.md").read_text("utf-8"),
    re.MULTILINE | re.DOTALL,
)
PYTHON = {f"block{number}": text for number, (kind, text) in enumerate(BLOCKS) if kind == "python"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """What became of the scripts, and of the document's blocks of Python."""
    folder = tmp_path_factory.mktemp("blocks")
    for name, text in PYTHON.items():
        (folder / f"{name}.py").write_text(text)
    return {run.name: run for run in run_scripts([*SCRIPTS, *sorted(folder.iterdir())])}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
@pytest.mark.timeout(600)  # the first one runs all
def test_a_script_runs_or_is_refused_with_a_reason(script: Path, runs: dict[str, Run]) -> None:
    run = runs[script.stem]
    assert run.verdict in ("works", "refused"), run.output


def test_the_table_says_what_the_scripts_found(runs: dict[str, Run]) -> None:
    found = document([runs[script.stem] for script in SCRIPTS])
    assert DOCUMENT.read_text("utf-8") == found, "write it with python -m tests.vllm_scripts"


@pytest.mark.parametrize("block", PYTHON)
def test_blocks_of_python_run(block: str, runs: dict[str, Run]) -> None:
    assert runs[block].verdict == "works", runs[block].output


def test_commands_run_on_the_scripts_beside_them(tmp_path: Path) -> None:
    assert {kind for kind, _ in BLOCKS} == {"python", "sh"}
    for kind, text in BLOCKS:
        name = re.match(r"# (\w+\.py)\n", text)
        if name is not None:
            (tmp_path / name[1]).write_text(text)
        for command in text.splitlines() if kind == "sh" else ():
            python, *arguments = command.split()
            assert python == "python"
            done = subprocess.run(
                [sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=240
            )
            assert done.returncode == 0, done.stderr
            assert "Paris" in done.stdout


def test_the_scripts_know_nothing_of_this_engine() -> None:
    knowing = [script.name for script in SCRIPTS if "hardpoint" in script.read_text("utf-8").lower()]
    assert knowing == []
    assert len(SCRIPTS) >= 60
