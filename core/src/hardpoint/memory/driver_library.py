"""A vendor's driver library, opened at run time: no SDK is needed to build, and a simulated driver takes the same way in.

This module uses the standard library alone, because it is also the main program of the process in which
`hardpoint.memory.driver_probe` asks a driver for its devices; it cannot count on `hardpoint` being importable there.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

SIMULATION_SYMBOL = "hardpoint_simulated_driver"
"""A library that exports this symbol is a simulation."""


class LibraryMissing(OSError):
    """None of the usual libraries is installed."""


class LibraryUnusable(OSError):
    """A library is there, or was asked for by path, and cannot be used."""


class CallFailed(Exception):
    """A driver call returned an error.

    Attributes:
        call: name of the vendor's function.
        status: what it returned.
    """

    def __init__(self, call: str, status: int) -> None:
        super().__init__(f"{call} returned {status}")
        self.call, self.status = call, status


def mapped(name: str) -> tuple[str, ...]:
    """Return the libraries of this process whose file names begin with `name`, by path; simulations are left out."""
    paths: dict[str, None] = {}
    with suppress(OSError), open("/proc/self/maps", errors="surrogateescape") as lines:
        paths = dict.fromkeys(
            fields[5].rstrip("\n")
            for fields in (line.split(maxsplit=5) for line in lines)
            if len(fields) == 6 and os.path.basename(fields[5]).startswith(name)
        )
    found = []
    for path in paths:
        with suppress(OSError):
            if not hasattr(ctypes.CDLL(path, os.RTLD_NOLOAD | os.RTLD_NOW), SIMULATION_SYMBOL):
                found.append(path)
    return tuple(found)


def bundled(name: str, *folders: str) -> tuple[str, ...]:
    """Return the libraries whose file names begin with `name` in folders of installed packages, by path, in the folders' order.

    Args:
        folders: as in "torch/lib", patterns too.
    """
    found = (
        str(file.resolve())
        for folder in folders
        for entry in sys.path
        for file in sorted(Path(entry).glob(f"{folder}/{name}*"))
    )
    return tuple(dict.fromkeys(found))


class DriverLibrary:
    """An opened library whose functions return an integer status, zero for success.

    Attributes:
        path: as it was given to the dynamic linker.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._library = ctypes.CDLL(path)

    @classmethod
    def open(cls, variable: str, sonames: Sequence[str]) -> DriverLibrary:
        """Open the library that an environment variable gives the path of, or else the first of `sonames` that is installed.

        Raises:
            LibraryMissing: none is installed.
            LibraryUnusable: the path given, or an installed library, cannot be loaded.
        """
        path = os.environ.get(variable)
        if path:
            try:
                return cls(path)
            except OSError as error:
                raise LibraryUnusable(f"{variable} names a library that cannot be loaded ({error})") from error
        for soname in sonames:
            try:
                return cls(soname)
            except OSError as error:
                # The linker reports a library that is not installed under its own name; a missing dependency of an
                # installed one is reported under the dependency's name.
                if not str(error).startswith(f"{soname}: cannot open shared object file"):
                    raise LibraryUnusable(f"{soname} cannot be loaded ({error})") from error
        raise LibraryMissing(f"no {' or '.join(sonames)} is installed")

    @property
    def simulated(self) -> bool:
        """The library is a simulation."""
        return self.has(SIMULATION_SYMBOL)

    def has(self, name: str) -> bool:
        """Return whether the library exports a function."""
        return hasattr(self._library, name)

    def function(self, name: str, restype: Any = ctypes.c_int) -> Callable[..., Any]:
        """Return a function that gives its result as it is; raises LibraryUnusable when the library does not export it."""
        try:
            function = self._library[name]
        except AttributeError:
            raise LibraryUnusable(f"{self.path} has no function {name}") from None
        function.restype = restype
        found: Callable[..., Any] = function
        return found

    def call(self, name: str, *arguments: Any, allowed: Sequence[int] = ()) -> int:
        """Call a function and return its status; raises CallFailed unless it is zero or one of `allowed`."""
        status: int = self.function(name)(*arguments)
        if status and status not in allowed:
            raise CallFailed(name, status)
        return status


def answer(script: str, variable: str, sonames: Sequence[str]) -> dict[str, Any]:
    """Open the library, let the backend's script take the inventory, and return the outcome as plain data.

    Args:
        script: file with `inventory(library)`, which returns {"devices": [{"name", "total_memory", "properties"}, ...],
            "driver_version": text, "reason": why there are no devices}, and `describe(library, status)`, the vendor's text.
    """
    try:
        library = DriverLibrary.open(variable, sonames)
    except LibraryMissing as error:
        return {"devices": [], "reason": str(error)}
    except LibraryUnusable as error:
        return {"unusable": str(error)}
    backend = runpy.run_path(script)
    try:
        found: dict[str, Any] = backend["inventory"](library)
    except LibraryUnusable as error:
        return {"unusable": str(error)}
    except CallFailed as error:
        return {"call": error.call, "status": error.status, "text": backend["describe"](library, error.status)}
    return found | {"library": library.path, "simulated": library.simulated}


def _main(script: str, variable: str, *sonames: str) -> None:
    # Drivers print on standard output as they like: the answer goes to a copy of it, and everything else to standard error.
    reply = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    json.dump(answer(script, variable, sonames), reply)
    reply.flush()
    # The driver's destructors run in no known order and are of no use to a process that only asked a question.
    os._exit(0)


if __name__ == "__main__":
    _main(*sys.argv[1:])
