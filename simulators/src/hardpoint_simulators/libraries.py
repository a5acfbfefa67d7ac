"""Where the simulated libraries are installed."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import hardpoint_simulators

Vendor = Literal["cuda", "rocm", "ascend", "cudart"]

_FILES: dict[str, str] = {
    "cuda": "libcuda.so.1",
    "rocm": "libamdhip64.so",
    "ascend": "libascendcl.so",
    "cudart": "libcudart.so.13",
}


def library(vendor: Vendor, *, minimal: bool = False) -> Path:
    """Return the path of a vendor's simulated library.

    Args:
        vendor: "cuda" and "cudart" are one simulated machine when both are loaded.
        minimal: for "ascend", the variant without the optional functions (granularity, access, pinning), as older CANN releases are.

    Raises:
        ValueError: unknown vendor, or one without a minimal variant.
        FileNotFoundError: the package was installed without its libraries.
    """
    if vendor not in _FILES or (minimal and vendor != "ascend"):
        raise ValueError(
            f"no simulated library for {vendor!r}{' (minimal)' if minimal else ''}; known: {sorted(_FILES)}"
        )
    # An editable install keeps the libraries in another folder than the sources; the package's path lists both.
    for folder in hardpoint_simulators.__path__:
        path = Path(folder) / "lib" / ("minimal" if minimal else "") / _FILES[vendor]
        if path.exists():
            return path
    raise FileNotFoundError(f"{_FILES[vendor]} is not installed with hardpoint-simulators; install the package again")
