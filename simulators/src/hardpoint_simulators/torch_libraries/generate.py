"""Generates the libraries that an installed build of torch is linked with and that are not simulated: every function fails.

python -m hardpoint_simulators.torch_libraries cuda <site-packages> <folder for the libraries>
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hardpoint_simulators.libraries import Vendor, library
from hardpoint_simulators.torch_libraries.builds import BUILDS, Build, TorchBuild
from hardpoint_simulators.torch_libraries.elf import Import, SharedLibrary, read_library

GAPS = "libhardpoint_gaps.so"
"""Holds the functions that no library is named for, and those that the simulated libraries lack."""

DEFAULT_CODE = 1

_SYSTEM = re.compile(r"^(lib(c|m|dl|rt|pthread|util|stdc\+\+|gcc_s|gomp|z)\.so|ld-linux)")
_RETURNS_TEXT = re.compile(
    r"(GetError(String|Name)|GetLastErrorString|LastError|GetStatusString|GetStatusName|RecentErrMsg)$"
)


class GenerationFailed(Exception):
    """The libraries could not be generated; says what was missing."""


@dataclass
class FailingLibrary:
    """One library to generate.

    Attributes:
        versions: its functions by the version of their symbols; "" for symbols without one.
        links: the simulated library that it is linked with.
    """

    soname: str
    versions: dict[str, set[str]] = field(default_factory=dict)
    links: Vendor | None = None

    def add(self, name: str, version: str) -> None:
        """Add a function."""
        self.versions.setdefault(version, set()).add(name)

    def source(self, codes: Mapping[str, int]) -> str:
        """Return the library in C."""
        names = sorted(set().union(*self.versions.values()))
        return "".join(_function(name, codes) for name in names)

    def version_script(self) -> str:
        """Return the linker's version script; "" when no symbol has a version."""
        nodes = [
            f"{version} {{ global: {' '.join(f'{name};' for name in sorted(names))} }};\n"
            for version, names in sorted(self.versions.items())
            if version
        ]
        return "".join(nodes)


def generate(build: Build, folder: Path, search_path: Sequence[str] | None = None) -> list[Path]:
    """Generate the failing libraries of an installed build of torch, and return them in the order of loading.

    Args:
        folder: where the libraries go; made when it does not exist.
        search_path: folders in which packages are installed, first come first served; None for this interpreter's.

    Raises:
        GenerationFailed: the build is not installed there, or no C compiler is.
    """
    description = BUILDS[build]
    folders = [Path(entry) for entry in (sys.path if search_path is None else search_path) if entry]
    binaries = _read(folders, description.binaries, description.left_out)
    if description.mark not in binaries:
        raise GenerationFailed(f"no {build} build of torch is installed: {description.mark} is not found")
    companions = _read(folders, description.companions, frozenset())
    simulated = [read_library(library(vendor)) for vendor in description.simulated]
    planned = plan(description, binaries, companions, simulated)
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob("*.so*"):
        stale.unlink()
    return [_compile(one, folder, description.codes) for one in planned]


def plan(
    build: TorchBuild,
    binaries: Mapping[str, SharedLibrary],
    companions: Mapping[str, SharedLibrary],
    simulated: Iterable[SharedLibrary],
) -> list[FailingLibrary]:
    """Return the libraries that are missing, with the functions that are imported from them."""
    simulations = {one.soname: one for one in simulated}
    there = {**companions, **binaries}
    provided = frozenset[str]().union(*(one.exports for one in [*there.values(), *simulations.values()]))
    wanted_libraries = frozenset[str]().union(*(set(one.needed) | set(one.versions) for one in binaries.values()))
    missing = sorted(
        name for name in wanted_libraries if name not in there and name not in simulations and not _SYSTEM.match(name)
    )
    system = [ctypes.CDLL(None), *(ctypes.CDLL(name) for name in wanted_libraries if _SYSTEM.match(name))]
    failing = {soname: FailingLibrary(soname, links=build.links.get(soname)) for soname in missing}
    gaps = FailingLibrary(GAPS)
    for binary in binaries.values():
        for wanted in binary.imports:
            if wanted.name in provided or any(hasattr(one, wanted.name) for one in system):
                continue
            home = _home(wanted, binary)
            if home == "" or home in simulations:
                gaps.add(wanted.name, wanted.version)
            elif home in failing:
                failing[home].add(wanted.name, wanted.version)
        for soname, versions in binary.versions.items():
            for version in versions if soname in failing else ():
                failing[soname].versions.setdefault(version, set())
    return [gaps, *failing.values()]


def _home(wanted: Import, binary: SharedLibrary) -> str:
    """Return the library that a symbol is wanted from; "" when any may have it."""
    if not wanted.version:
        return ""
    return next(soname for soname, versions in binary.versions.items() if wanted.version in versions)


def _read(folders: Sequence[Path], patterns: Iterable[str], left_out: frozenset[str]) -> dict[str, SharedLibrary]:
    paths = [path for pattern in patterns for path in _first_found(folders, pattern)]
    return {path.name: read_library(path) for path in paths if path.name not in left_out}


def _first_found(folders: Sequence[Path], pattern: str) -> list[Path]:
    return next((found for folder in folders if (found := sorted(folder.glob(pattern)))), [])


def _function(name: str, codes: Mapping[str, int]) -> str:
    if _RETURNS_TEXT.search(name):
        return f'const char *{name}(void) {{ return "{name}: not simulated"; }}\n'
    code = next((code for prefix, code in codes.items() if name.startswith(prefix)), DEFAULT_CODE)
    return f"long {name}(void) {{ return {code}; }}\n"


def _compile(failing: FailingLibrary, folder: Path, codes: Mapping[str, int]) -> Path:
    output = folder / failing.soname
    command = [
        "cc",
        "-shared",
        "-fPIC",
        "-O1",
        "-w",
        f"-Wl,-soname,{failing.soname}",
        "-o",
        str(output),
        "-x",
        "c",
        "-",
    ]
    script = failing.version_script()
    if script:
        versions = folder / f"{failing.soname}.map"
        versions.write_text(script)
        command.append(f"-Wl,--version-script={versions}")
    if failing.links:
        command += ["-x", "none", "-Wl,--no-as-needed", str(library(failing.links))]
    try:
        subprocess.run(command, input=failing.source(codes), text=True, check=True, capture_output=True)
    except FileNotFoundError as error:
        raise GenerationFailed("no C compiler (cc) is installed") from error
    except subprocess.CalledProcessError as error:
        raise GenerationFailed(f"{failing.soname} cannot be compiled: {error.stderr}") from error
    return output
