"""The contract changes only together with its version: the code is compared with the recorded snapshot."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest

from hardpoint.interfaces import API_VERSION
from hardpoint.interfaces.snapshot import difference, main, snapshot, to_text

RECORDED = Path(__file__).parent / "contract_snapshot.json"
CHANGELOG = Path(__file__).parents[3] / "docs" / "contract-changelog.md"


def test_contract_is_the_recorded_one() -> None:
    recorded = json.loads(RECORDED.read_text("utf-8"))
    changes = difference(recorded, snapshot())
    if changes and recorded["api_version"] == API_VERSION:
        pytest.fail(
            f"the contract changed and API_VERSION is still {API_VERSION}. Raise it in hardpoint/interfaces/backend.py, record it "
            f"with `python -m hardpoint.interfaces.snapshot --write {RECORDED.name}`, and say what changed in "
            f"{CHANGELOG.name}:\n{changes}",
            pytrace=False,
        )
    assert not changes, f"record version {API_VERSION}: python -m hardpoint.interfaces.snapshot --write {RECORDED.name}"


def test_changelog_tells_of_this_version() -> None:
    headings = [line for line in CHANGELOG.read_text("utf-8").splitlines() if line.startswith("## ")]
    assert headings[0] == f"## Version {API_VERSION}"


def test_difference_names_the_contract_and_what_changed() -> None:
    old = snapshot()
    new = copy.deepcopy(old)
    new["exports"]["Worker"]["profile"] = "(self, tokens: 'int') -> 'MemoryProfile'"
    changes = difference(old, new).splitlines()
    assert [line.strip() for line in changes if line.startswith("+ ")] == [
        "+      \"profile\": \"(self, tokens: 'int') -> 'MemoryProfile'\","
    ]
    assert difference(old, copy.deepcopy(old)) == ""


def test_snapshot_does_not_depend_on_the_run() -> None:
    command = [sys.executable, "-m", "hardpoint.interfaces.snapshot"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed == to_text(snapshot())


def test_changed_contract_is_not_written_under_the_same_version(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "snapshot.json"
    older = snapshot()
    del older["exports"]["Worker"]["profile"]
    file.write_text(to_text(older), "utf-8")
    assert main(["--write", str(file)]) == 1
    assert json.loads(file.read_text("utf-8")) == older
    assert "profile" in capsys.readouterr().out
    assert main(["--write", str(file), "--same-version"]) == 0
    assert main(["--compare", str(file)]) == 0


def test_new_version_is_written(tmp_path: Path) -> None:
    file = tmp_path / "snapshot.json"
    file.write_text(to_text(snapshot() | {"api_version": API_VERSION - 1}), "utf-8")
    assert main(["--compare", str(file)]) == 1
    assert main(["--write", str(file)]) == 0
    assert json.loads(file.read_text("utf-8")) == json.loads(to_text(snapshot()))
