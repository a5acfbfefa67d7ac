"""docs/adding-a-device.md, followed literally: every command of it runs, in order, where there is nothing of this repository.

Hardpoint's packages are the distributions that `make dist` built, which pip finds as it would find published ones. Takes a minute or two,
most of it for the suite. The demo model is installed nowhere: the suite runs it on the CPU backend (`make conformance-cpu`).
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hardpoint_conformance.outcomes import Outcome, Verdict
from tests.packages.bare_environment import DIST, OURS, ROOT, Environment

GUIDE = ROOT / "docs/adding-a-device.md"

SHORTENED = {"pytest -q hardpoint-acme/tests": "pytest -q --collect-only hardpoint-acme/tests"}
"""Commands of the guide that are not run as they stand: the suite has run by then."""


def commands() -> list[str]:
    """Return the commands of the guide."""
    blocks = re.findall(r"^```console\n(.*?)^```", GUIDE.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    return [line.removeprefix("$ ") for block in blocks for line in block.splitlines() if line.startswith("$ ")]


def test_guide_has_the_steps_in_order() -> None:
    steps = [
        "pip install",
        "conformance init",
        "--no-build-isolation",
        "doctor",
        "--level L0",
        "inference-core",
        "verify",
    ]
    text = "\n".join(commands())
    places = [text.find(step) for step in steps]
    assert -1 not in places
    assert places == sorted(places)
    assert re.findall(r"^### (L\d)", GUIDE.read_text("utf-8"), flags=re.MULTILINE) == ["L0", "L1", "L2", "L4"]
    assert SHORTENED.keys() <= set(commands())


@pytest.mark.timeout(1500)
def test_guide_works_to_the_letter(tmp_path: Path) -> None:
    environment = Environment(tmp_path, DIST)
    for command in commands():
        ended = environment.run(SHORTENED.get(command, command))
        assert ended.returncode == 0, f"$ {command}\n{ended.stdout}"

    report = json.loads((environment.work / "report/report.json").read_text("utf-8"))
    assert report["verdict"]["outcome"] == Verdict.SIMULATED
    assert report["backend"]["name"] == "acme"
    assert report["simulated"]
    outcomes = {
        result["clause"]: result["outcome"] for result in report["results"] if "tokens.demo" in result["clause"]
    }
    assert outcomes == dict.fromkeys(("tokens.demo.oracle@1", "tokens.demo.sleep@1"), Outcome.NOT_TESTABLE)
    others = {result["outcome"] for result in report["results"] if result["clause"] not in outcomes}
    assert others == {Outcome.PASSED, Outcome.CLAIMED, Outcome.NOT_CLAIMED}
    assert {result["level"] for result in report["results"]} == {0, 1, 2, 4}

    code = "import hardpoint, hardpoint_conformance as suite, json, sys; print(json.dumps([hardpoint.__file__, suite.__file__, sys.path]))"
    ours, suite, path = json.loads(environment.run(f"python -c '{code}'").stdout)
    assert Path(ours).is_relative_to(environment.root)
    assert Path(suite).is_relative_to(environment.root)
    assert not [entry for entry in path if Path(entry).is_relative_to(ROOT)]
    assert not [entry.name for entry in environment.packages.iterdir() if entry.name.startswith(OURS)]
