"""Where a run took place, for its report; nothing that names a machine or a person."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGES = ("hardpoint", "torch", "transformers", "numpy", "pytest", "hypothesis")


def environment_of() -> dict[str, Any]:
    """Return Python, platform, processor, and the versions of the packages that matter."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cpu_count": os.cpu_count() or 0,
        "packages": versions,
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def git_state(entry_point: str | None) -> dict[str, Any] | None:
    """Return commit of the checkouts that suite and backend come from, and whether they have changes; None without checkouts."""
    folders = {"suite": Path(__file__).parent}
    module = (entry_point or "").partition(":")[0].partition(".")[0]
    try:
        spec = find_spec(module) if module else None
    except (ImportError, ValueError):
        spec = None
    if spec is not None and spec.origin:
        folders["backend"] = Path(spec.origin).parent
    found = {name: state for name, folder in folders.items() if (state := _state(folder)) is not None}
    return found or None


def _state(folder: Path) -> dict[str, Any] | None:
    if "site-packages" in folder.parts:
        return None
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return None
    return {"commit": commit, "dirty": bool(_git(folder, "status", "--porcelain", "--", "."))}


def _git(folder: Path, *arguments: str) -> str:
    try:
        ended = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ended.stdout.strip() if ended.returncode == 0 else ""
