"""Loads the simulated driver and the failing libraries, so that torch's binaries find them by name."""

from __future__ import annotations

import ctypes
from pathlib import Path

from hardpoint_simulators.libraries import library
from hardpoint_simulators.torch_libraries.builds import BUILDS, Build


def preload(build: Build, folder: Path) -> None:
    """Load everything that a build of torch is linked with; call it before torch is imported.

    The libraries are found by their sonames afterwards, so that no search path needs to be set.

    Args:
        folder: where `generate` put the libraries.

    Raises:
        FileNotFoundError: nothing was generated there.
        OSError: a library cannot be loaded.
    """
    generated = sorted(path for path in folder.glob("*.so*") if path.suffix != ".map")
    if not generated:
        raise FileNotFoundError(f"no generated libraries are in {folder}")
    for path in [*(library(vendor) for vendor in BUILDS[build].simulated), *generated]:
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
