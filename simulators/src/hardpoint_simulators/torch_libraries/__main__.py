"""The command line of `generate`."""

from __future__ import annotations

import argparse
from pathlib import Path

from hardpoint_simulators.torch_libraries.builds import BUILDS
from hardpoint_simulators.torch_libraries.generate import generate


def _main() -> None:
    parser = argparse.ArgumentParser(description="Generate the failing libraries of the installed build of torch.")
    parser.add_argument("build", choices=sorted(BUILDS))
    parser.add_argument("folder", type=Path, help="where the libraries go")
    arguments = parser.parse_args()
    generate(arguments.build, arguments.folder)


if __name__ == "__main__":
    _main()
