"""Hardpoint for an interpreter in which it is not installed: built with CMake into a folder, without a network."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from device_run import ROOT, WORK, Run, Step, last_line

MODULES = ("pluggy", "pytest", "hypothesis", "packaging", "rich", "typer")
BUILD_MODULES = ("pybind11",)


def missing(python: str, modules: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return the modules that an interpreter cannot find."""
    program = "import importlib.util as u, sys; print(*[m for m in sys.argv[1:] if u.find_spec(m) is None])"
    ended = subprocess.run(
        [python, "-c", program, *modules], env=dict(environment), cwd="/", capture_output=True, text=True, check=False
    )
    return ended.stdout.split() if ended.returncode == 0 else list(modules)


def build(run: Run, backends: Sequence[str]) -> bool:
    """Make Hardpoint importable by the run's interpreter: as it is installed, or else built into build/device-check/site."""
    start = time.perf_counter()
    packages = [
        "hardpoint",
        *(f"hardpoint_{backend}" for backend in backends),
        "hardpoint_conformance",
        "hardpoint_simulators",
    ]
    lacking = missing(run.python, MODULES, run.environment)
    if lacking:
        note = f"{run.python} has no {', '.join(lacking)}: `make install` makes an environment; docs/device-check.md"
        run.add(Step("build", "failed", note))
        return False
    if not missing(run.python, packages, run.environment):
        run.add(Step("build", "passed", f"installed in {run.python} already"))
        return True
    if lacking := missing(run.python, BUILD_MODULES, run.environment):
        run.add(Step("build", "failed", f"Hardpoint is not installed, and {run.python} has no {', '.join(lacking)}"))
        return False
    site = WORK / "site"
    shutil.rmtree(site, ignore_errors=True)
    run.environment["PYTHONPATH"] = os.pathsep.join([str(site), *filter(None, [run.environment.get("PYTHONPATH", "")])])
    folders = ["core", *(f"backends/{backend}" for backend in backends), "conformance_tests", "simulators"]
    for folder in folders:
        if not build_package(run, ROOT / folder, site):
            return False
    seconds = time.perf_counter() - start
    run.add(Step("build", "passed", "built with CMake, used from build/device-check/site", seconds=seconds))
    return True


def build_package(run: Run, folder: Path, site: Path) -> bool:
    """Put one of our packages into `site`: sources, native parts, and the metadata by which backends are found."""
    project = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["project"]
    for package in (folder / "src").iterdir():
        shutil.copytree(package, site / package.name, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    metadata = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n", "utf-8"
    )
    lines = [
        line
        for group, entries in project.get("entry-points", {}).items()
        for line in (f"[{group}]", *(f"{name} = {target}" for name, target in entries.items()))
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n", "utf-8")

    if not (folder / "CMakeLists.txt").is_file():
        return True
    target = WORK / "cmake" / folder.name
    configure = ["cmake", "-S", str(folder), "-B", str(target), "-DCMAKE_BUILD_TYPE=Release"]
    configure += [f"-DPython_EXECUTABLE={run.python}", f"-Dpybind11_DIR={pybind11(run)}"]
    configure += ["-G", "Ninja"] if shutil.which("ninja") else []
    jobs = str(min(os.cpu_count() or 1, 16))
    for command in (
        configure,
        ["cmake", "--build", str(target), "-j", jobs],
        ["cmake", "--install", str(target), "--prefix", str(site)],
    ):
        status, text = run.execute(command)
        if status:
            run.add(Step(f"build of {project['name']}", "failed", last_line(text), f"{run.label}log.txt"))
            return False
    return True


def pybind11(run: Run) -> str:
    """Return the folder of pybind11's CMake files."""
    command = [run.python, "-m", "pybind11", "--cmakedir"]
    return subprocess.run(command, env=run.environment, capture_output=True, text=True, check=False).stdout.strip()
