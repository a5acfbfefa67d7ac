"""Ascend's attention under the conformance suite, over reference operators on the host: simulated, nothing of the vendor's runs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hardpoint_conformance.cli import app
from tests.fork_servers import shared_fork_servers

ROOT = Path(__file__).parents[3]
GRAPHS = (
    "graph.replay.inputs@1",
    "graph.replay.metadata@1",
    "graph.replay.padded@1",
    "graph.capture.sizes@1",
    "graph.replay.no-allocation@1",
    "graph.replay.after-sleep@1",
    "graph.reset@1",
)
NO_GRAPHS = "graph.unclaimed.none@1"
WORKER = (
    "tokens.chunked.oracle@1",
    "tokens.decode.oracle@1",
    "tokens.mixed.oracle@1",
    "tokens.window.oracle@1",
    "worker.kv.too-large@1",
    "worker.profile.utilization@1",
)

pytestmark = pytest.mark.timeout(600)

Run = Callable[..., tuple[int, dict[str, Any], str]]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the backend over reference operators is installed; the runs have their processes from one server."""
    site = tmp_path_factory.mktemp("site")
    info = site / "ascend_reference-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ascend-reference\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[hardpoint.backends]\nascend_reference = backends.ascend.tests.reference_backend\n"
    )
    with shared_fork_servers():
        yield site


@pytest.fixture
def run(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the suite against the backend: (exit status, report, output). Nothing of a backend runs in this process."""

    def run_suite(*options: str, **environment: str) -> tuple[int, dict[str, Any], str]:
        monkeypatch.syspath_prepend(site)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), str(ROOT)]))
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        command = ["run", "--backend", "ascend_reference", "--report", str(tmp_path / "out"), *options]
        ended = CliRunner().invoke(app, command)
        file = tmp_path / "out" / "report.json"
        return ended.exit_code, json.loads(file.read_text()) if file.exists() else {}, ended.output

    return run_suite


def passed(report: dict[str, Any]) -> set[str]:
    """Return the clauses of which a test ran and none failed."""
    ran = [result for result in report["results"] if result["applies"] and result["outcome"] != "not_run"]
    failed = {result["clause"] for result in ran if result["outcome"] != "passed"}
    return {result["clause"] for result in ran} - failed


def test_attention_conforms_over_reference_operators(run: Run) -> None:
    status, report, output = run("--level", "L2", "--level", "L3")
    assert status == 0, output
    assert report["simulated"]
    assert "conformant on a simulated driver" in output
    # Not an empty success: what is claimed was proved.
    assert passed(report) >= {
        "attn.decode.single@1",
        "attn.prefill.chunk@1",
        "attn.heads.group@1",
        "attn.kv.no-slot@1",
        "attn.kv.swap@1",
        "attn.window.edge@1",
        "attn.poison.tail@1",
        "attn.offset.large@1",
    }


@pytest.mark.parametrize(
    ("graphs", "level", "clauses"),
    [("0", "none", (*WORKER, NO_GRAPHS)), ("1", "uniform_decode", (*WORKER, *GRAPHS))],
    ids=["without graphs", "with simulated graphs"],
)
def test_model_runs_in_a_worker_over_reference_operators(
    run: Run, graphs: str, level: str, clauses: tuple[str, ...]
) -> None:
    options = [option for clause in clauses for option in ("--clause", clause)]
    status, report, output = run(*options, HARDPOINT_ASCEND_GRAPHS=graphs)
    assert status == 0, output
    assert report["claims"]["attention"]["graph_level"] == level
    assert passed(report) == set(clauses), output
