"""Where the HIP runtime and RCCL are: torch and ROCm's packages bring their own, beside which the system may have others."""

from __future__ import annotations

import os
from pathlib import Path

from hardpoint.interfaces.errors import BackendBroken
from hardpoint.memory.driver_library import bundled, mapped

DRIVER_VARIABLE = "HARDPOINT_ROCM_DRIVER"
SONAMES = ("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so")
"""The system's HIP runtime, best first."""

_RUNTIME = "libamdhip64.so"


def runtimes() -> tuple[str, ...]:
    """Return the HIP runtimes that are not the system's, by path: this process's, else torch's and those of ROCm's packages.

    With torch's first there is one in the process, whether torch is imported before the driver is opened or after.
    """
    return mapped(_RUNTIME) or bundled(_RUNTIME, "torch/lib", "_rocm_sdk_core/lib")


def runtime() -> str | None:
    """Return the HIP runtime to open, by path; None where the environment names it or the system has it."""
    return None if os.environ.get(DRIVER_VARIABLE) else next(iter(runtimes()), None)


def check_one_runtime() -> None:
    """Raise BackendBroken where two HIP runtimes are in this process: what one allocates the other does not know."""
    found = sorted({os.path.realpath(path) for path in mapped(_RUNTIME)})
    if len(found) > 1:
        raise BackendBroken(
            "the HIP runtime is loaded more than once",
            found=" and ".join(found),
            hint=f"Let LD_LIBRARY_PATH and {DRIVER_VARIABLE} lead to the one that torch has, or unset them",
        )


def has_rccl() -> bool:
    """Return whether RCCL is installed: with torch, in ROCm's packages, or in the system's ROCm."""
    name = "librccl.so"
    system = Path(os.environ.get("ROCM_PATH", "/opt/rocm"), "lib")
    return bool(bundled(name, "torch/lib", "_rocm_sdk_libraries*/lib") or list(system.glob(f"{name}*")))
