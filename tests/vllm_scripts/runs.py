"""What becomes of the scripts, and the document that says so."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .models import snapshots

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.py"))
DOCUMENT = ROOT / "docs" / "vllm-features.md"

_HEAD = """\
# What of vLLM's public interface works here

Each line is a script in the shape of those that vLLM's users write, run with `vllm` answered by `hardpoint.compat.vllm` on the CPU backend,
with the demo model or tiny random ones. A feature *works* where the script ran to its end and found what it expects. It is *refused* where
the script ended with a typed error, which the right column quotes. [Moving from vLLM](moving-from-vllm.md) says how to begin.

`python -m tests.vllm_scripts` writes this page; a test compares it with what the scripts do.
"""


@dataclass(frozen=True)
class Run:
    """What became of a script.

    Attributes:
        title: of the feature: its docstring.
        verdict: "works", "refused" with one of our errors, or "failed".
        said: the error's text.
        output: all that it printed.
        cpu_seconds: that it took, without the imports that were there before it.
    """

    name: str
    title: str
    verdict: str
    said: str
    output: str
    cpu_seconds: float


def run_scripts(scripts: Sequence[Path] = SCRIPTS) -> list[Run]:
    """Run scripts one after the other, each in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        cache, reports = Path(folder) / "cache", Path(folder) / "reports"
        reports.mkdir()
        variables = {
            "HF_HUB_CACHE": str(cache),
            "HF_HUB_OFFLINE": "1",
            "HARDPOINT_BACKEND": "cpu",
            "PYTHONPATH": "",
            "OMP_WAIT_POLICY": "passive",  # as ranks have it, which are forks of what reads it
        }
        subprocess.run(
            [sys.executable, "-m", "tests.vllm_scripts.warm", str(reports), *map(str, scripts)],
            env=os.environ | variables,
            cwd=ROOT,
            check=True,
            timeout=600,
        )
        return [_read(script, reports / f"{script.stem}.json", snapshots(cache)) for script in scripts]


def _read(script: Path, report: Path, places: dict[str, str]) -> Run:
    found = json.loads(report.read_text("utf-8"))
    kinds, said = found["kinds"], found["said"]
    for place, name in places.items():
        said = said.replace(place, name)
    ours = {"HardpointError", "ModuleRefused"} & set(kinds)
    verdict = "works" if not kinds else "refused" if ours else "failed"
    title = ast.get_docstring(ast.parse(script.read_text("utf-8"))) or ""
    return Run(script.stem, title, verdict, said, found["output"], found["cpu_seconds"])


def document(runs: Sequence[Run]) -> str:
    """Return docs/vllm-features.md."""
    works = [f"| {run.title} | `{run.name}.py` |" for run in runs if run.verdict == "works"]
    refused = [f"| {run.title} | `{run.name}.py` | {_cell(run.said)} |" for run in runs if run.verdict == "refused"]
    return "\n".join(
        [
            _HEAD,
            f"## Works ({len(works)})\n",
            "| feature | script |\n|---|---|",
            *sorted(works),
            f"\n## Refused ({len(refused)})\n",
            "| feature | script | what is said |\n|---|---|---|",
            *sorted(refused),
            "",
        ]
    )


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
