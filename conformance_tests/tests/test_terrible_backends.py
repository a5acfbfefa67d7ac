"""Whatever a backend does, there is a report that says so, and exit status 1."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
from typer.testing import CliRunner

from hardpoint_conformance.cli import app

HOOK = """
import dataclasses, os, signal, time
import pluggy
from hardpoint.interfaces import AttentionFeature, BackendDescriptor, Capabilities, Device, ProbeResult
import hardpoint_cpu.descriptor as cpu

{before}

def probe():
{probe}
    return ProbeResult((Device("terrible", 0, "a device", "cpu"),))

def claims(device):
    claims = cpu.hardpoint_backend().capabilities(device)
{claims}
    return claims

def attention():
{attention}
    return cpu.hardpoint_backend().attention()

@pluggy.HookimplMarker("hardpoint")
def hardpoint_backend():
{hook}
    return dataclasses.replace(
        cpu.hardpoint_backend(), name="terrible", vendor="tests", probe=probe, capabilities=claims, attention=attention
    )
"""

Run = Callable[..., tuple[int, dict[str, Any], str]]

pytestmark = pytest.mark.usefixtures("collect_once", "one_fork_server")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the backend is installed, anew for each test."""
    return tmp_path_factory.mktemp("site")


@pytest.fixture
def run(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Install a backend made from the CPU's with faults, and run the suite against it: (exit status, report, output).

    The command runs in this process, in which nothing of a backend ever does: what ends the process ends the tests.
    """

    def install_and_run(*options: str, **faults: str) -> tuple[int, dict[str, Any], str]:
        info = site / "terrible-1.0.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: terrible\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[hardpoint.backends]\nterrible = terrible\n")
        parts = {name: indent(faults.get(name, "pass"), "    ") for name in ("probe", "claims", "attention", "hook")}
        (site / "terrible.py").write_text(HOOK.format(before=faults.get("before", ""), **parts))
        monkeypatch.syspath_prepend(site)
        monkeypatch.setenv("PYTHONPATH", str(site))
        monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # the file may change twice in a second
        command = ["run", "--backend", "terrible", "--report", str(tmp_path / "out"), *(options or ("--level", "L0"))]
        ended = CliRunner().invoke(app, command)
        file = tmp_path / "out" / "report.json"
        return ended.exit_code, json.loads(file.read_text()) if file.exists() else {}, ended.output

    return install_and_run


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ({"before": "import a_module_that_is_not_there"}, "a_module_that_is_not_there"),
        ({"before": "os._exit(0)"}, "ended with exit status 0"),
        ({"before": "os.kill(os.getpid(), signal.SIGSEGV)"}, "SIGSEGV"),
        ({"hook": "raise ValueError('hook is broken')"}, "hook is broken"),
        ({"probe": "os._exit(3)"}, "ended with exit status 3"),
        ({"probe": "import ctypes; ctypes.string_at(0)"}, "SIGSEGV"),
        ({"probe": "time.sleep(100)"}, "did not return within 10 s"),
        ({"claims": "raise RuntimeError('nothing to claim')"}, "nothing to claim"),
        ({"claims": "raise SystemExit(0)"}, "SystemExit"),
        ({"claims": "return {'dtypes': 'all'}"}, "not dict"),
        ({"claims": "return dataclasses.replace(claims, collectives=3)"}, "collectives must be a tuple"),
        (
            {
                "claims": "odd = dataclasses.replace(claims.attention, features=frozenset({'telepathy'}))\n"
                "return dataclasses.replace(claims, attention=odd)"
            },
            "'telepathy'",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value.replace(" ", "-"),
)
def test_backend_that_cannot_be_tested_gets_a_report(run: Run, fault: dict[str, str], text: str) -> None:
    code, report, _ = run(**fault)
    assert code == 1
    (result,) = report["results"]
    assert (result["id"], result["outcome"]) == ("pack.backend.found@1", "failed")
    assert text in result["message"]
    assert report["verdict"]["outcome"] == "not conformant"
    assert result["reproduction"] == "hardpoint conformance run --backend terrible --level L0"
    assert report["backend"]["distribution"] == "terrible"
    assert report["backend"]["version"] == "1.0"


@pytest.mark.parametrize(
    ("fault", "outcome", "text"),
    [
        ("import ctypes; ctypes.string_at(0)", "crashed", "SIGSEGV"),
        ("os.abort()", "crashed", "SIGABRT"),
        ("os._exit(0)", "crashed", "ended with exit status 0"),
        ("time.sleep(60)", "hung", "did not end within 5 s"),
        ("raise ValueError('no attention')", "failed", "no attention"),
    ],
    ids=lambda value: value.split("(")[0].split(" ")[0],
)
def test_crash_and_hang_are_results_and_the_tests_after_are_run(run: Run, fault: str, outcome: str, text: str) -> None:
    clauses = ("pack.name.agrees@1", "pack.contract.complete@1", "pack.claims.one-object@1", "pack.doctor.record@1")
    options = [word for name in clauses for word in ("--clause", name)]
    code, report, output = run(*options, "--time-limit", "5", attention=fault)
    results = {result["id"]: result for result in report["results"]}
    assert code == 1
    assert [results[name]["outcome"] for name in clauses] == ["passed", outcome, outcome, "passed"]
    message = results["pack.contract.complete@1"]["message"]
    assert text in message
    if outcome != "failed" and "_exit" not in fault:
        # The backend's line comes before the test's; what pytest and the interpreter have above it is left out.
        assert re.search(
            r'in Python, innermost first:\n(.*\n)*?  File ".*terrible\.py", .*\n(.*\n)*?  File ".*packaging\.py"',
            message,
        )
        assert "_pytest" not in message
    if "string_at" in fault:
        assert re.search(r"in C, innermost first:\n  \S+/libc\.so\.\d: ", message)
        assert "libpython" not in message
    if outcome == "failed":
        told = message.partition("\n\n")[0].splitlines()
        assert [line.partition(": ")[0] for line in told] == ["expected", "got", "raised in", "likely cause"]
        assert told[1] == "got: ValueError: no attention"
        assert "/terrible.py:" in told[2]
        assert all(line in output for line in told[:2])
        assert "rule: The descriptor's contract versions include the core's" in output
    reproduction = "hardpoint conformance run --backend terrible --clause pack.contract.complete@1 --seed 0"
    assert results["pack.contract.complete@1"]["reproduction"] == reproduction
    assert reproduction in output.replace("\n", "")


def test_children_of_a_hung_test_are_ended_too(run: Run, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    fault = (
        f"import subprocess\nopen({str(pid)!r}, 'w').write(str(subprocess.Popen(['sleep', '60']).pid))\ntime.sleep(60)"
    )
    code, report, _ = run("--clause", "pack.contract.complete@1", "--time-limit", "5", attention=fault)
    assert code == 1
    assert [result["outcome"] for result in report["results"]] == ["hung"]
    status = Path(f"/proc/{pid.read_text()}/status")
    assert not status.exists() or "zombie" in status.read_text()


def test_crash_at_the_end_of_the_process_is_a_result(run: Run) -> None:
    code, report, _ = run("--clause", "pack.name.agrees@1", before="import atexit\natexit.register(lambda: os.abort())")
    # The process that examines the backend ends without tear-down; the one that tests it does not.
    assert code == 1
    assert [result["outcome"] for result in report["results"]] == ["crashed"]
    assert "SIGABRT" in report["results"][0]["message"]
