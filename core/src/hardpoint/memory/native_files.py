"""The native files of installed packages: the core's C headers, backends' driver libraries, and where in them a process crashed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from hardpoint import _native
from hardpoint.interfaces.errors import BackendBroken


def include_dir() -> Path:
    """Return the folder to compile drivers with: `#include "hardpoint/driver.h"`; raises FileNotFoundError."""
    core = find_spec("hardpoint")
    for folder in (core and core.submodule_search_locations) or ():
        if (Path(folder) / "include" / "hardpoint" / "driver.h").exists():
            return Path(folder) / "include"
    raise FileNotFoundError("hardpoint is installed without its C headers")


def driver_file(package: str) -> Path:
    """Return the library `_driver` of a backend's package; raises BackendBroken when it was not built.

    The import system is asked, because an editable install keeps native files elsewhere than sources. Nothing is loaded.
    """
    found = find_spec(f"{package}._driver")
    if found is None or found.origin is None:
        raise BackendBroken(
            f"the memory driver of {package} was asked for",
            found="the package has no library _driver",
            hint="Build and install the package again",
        )
    return Path(found.origin)


def write_crash_frames(descriptor: int) -> bool:
    """Let a fatal signal write the C frames of its thread to an open file from now on, before the process ends as it would have.

    A line has the file, and the function where its name is exported, or else the offset in the file, for `addr2line`. Whoever handled the
    signals before (`faulthandler`) has its turn after it.

    Returns:
        False where the system's C library has no backtraces.
    """
    return _native.write_crash_frames(descriptor)
