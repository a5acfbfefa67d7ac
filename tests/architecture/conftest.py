"""Files of the repository, as the architecture tests see them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    """The folder of the workspace."""
    return ROOT


@pytest.fixture(scope="session")
def files() -> list[Path]:
    """All files that are part of the repository (tracked, or new and not ignored), in sorted order.

    In an unpacked archive without git's data, all files outside of hidden folders.
    """
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        found = {ROOT / name for name in listed.stdout.split("\0") if name}
        return sorted(file for file in found if file.is_file())
    walked: list[Path] = []
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in ("build", "__pycache__")]
        walked += [Path(folder) / name for name in names]
    return sorted(walked)
