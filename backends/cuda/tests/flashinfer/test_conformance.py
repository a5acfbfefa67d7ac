"""FlashInfer's adapter under the conformance suite, over a reference FlashInfer on the host: simulated, nothing of FlashInfer's runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import REFERENCE

CLAUSES = (
    "attn.batch.mixed@1",
    "attn.decode.single@1",
    "attn.feature.refused@1",
    "attn.features.combined@1",
    "attn.heads.dim@1",
    "attn.kv.scales@1",
    "attn.layers.differ@1",
    "attn.layout.strides@1",
    "attn.metadata.smaller@1",
    "attn.padding.sequences@1",
    "attn.prefill.chunk@1",
    "attn.softcap.saturated@1",
    "attn.window.one@1",
    "graph.capture.sizes@1",
    "graph.replay.metadata@1",
    "graph.replay.padded@1",
)
"""A part of levels 2, 3 and 6 that has every feature; `hardpoint conformance run` runs all of them on a device."""


@pytest.mark.timeout(600)
def test_adapter_conforms_over_a_reference_flashinfer(tmp_path: Path) -> None:
    info = tmp_path / "site" / "flashinfer_reference-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flashinfer-reference\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[hardpoint.backends]\nflashinfer_reference = reference_backend\n")
    paths = (info.parent, REFERENCE.parent, REFERENCE)
    command = [sys.executable, "-m", "hardpoint_conformance.cli", "run", "--backend", "flashinfer_reference"]
    ended = subprocess.run(
        [*command, "--report", str(tmp_path / "out"), *(word for clause in CLAUSES for word in ("--clause", clause))],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "HARDPOINT_ATTENTION": "flashinfer", "OMP_NUM_THREADS": "1"},
    )
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["simulated"]
    outcomes = {
        result["id"]: (result["clause"], result["outcome"]) for result in report["results"] if result["applies"]
    }
    assert {clause for clause, outcome in outcomes.values() if outcome == "passed"} == set(CLAUSES), ended.stdout
    assert {outcome for clause, outcome in outcomes.values() if clause in CLAUSES} == {"passed"}, ended.stdout
