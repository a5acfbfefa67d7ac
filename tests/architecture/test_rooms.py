"""Folders are rooms with a sign at the door, backends have the same files, and light modules stay light."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

PARTS = {"__init__.py", "allocator.py", "attention.py", "capabilities.py", "descriptor.py"}
"""Files that every backend has."""

VENDORS = ("ascend", "cuda", "rocm")

OWN = {
    "ascend": {
        "collectives.py",
        "graphs.py",
        "operators.py",
        "platform.py",
        "kernels.py",
        "reference_backend.py",
        "reference_operators.py",
        "simulated_graphs.py",
        "step.py",
        "test_attention.py",
        "test_conformance.py",
        "test_graphs.py",
        "test_kernels.py",
        "test_operators.py",
    },
    "cuda": {"collectives.py", "test_collectives.py"},
    "rocm": {"libraries.py"},
}
"""Files of a vendor's backend beside those of all: attention and kernels over the vendor's operators, and not over the core's kernels,
graphs of these, what torch has elsewhere for its devices; communicators that sleep; a runtime that torch may bring."""


def packages(root: Path) -> list[Path]:
    folders = [*root.glob("core/src/*"), *root.glob("backends/*/src/*"), *root.glob("conformance_tests/src/*")]
    found = {file.parent for folder in folders if folder.is_dir() for file in folder.rglob("*.py")}
    return sorted(folder for folder in found if "__pycache__" not in folder.parts)


def test_every_package_says_what_lives_there(root: Path) -> None:
    silent = []
    for folder in packages(root):
        door = folder / "__init__.py"
        docstring = ast.get_docstring(ast.parse(door.read_text("utf-8"))) if door.exists() else None
        if not docstring or len(docstring.split()) < 5:
            silent.append(str(folder.relative_to(root)))
    assert not silent, f"no __init__.py with a docstring that says what lives there: {silent}"


def test_every_module_has_a_docstring(root: Path) -> None:
    modules = [file for folder in packages(root) for file in sorted(folder.glob("*.py"))]
    silent = [
        str(file.relative_to(root)) for file in modules if not ast.get_docstring(ast.parse(file.read_text("utf-8")))
    ]
    assert not silent, silent


def test_every_backend_has_the_files_that_all_backends_have(root: Path) -> None:
    for folder in sorted((root / "backends").glob("*/src/hardpoint_*")):
        assert PARTS - {file.name for file in folder.glob("*.py")} == set(), folder.name


@pytest.mark.parametrize("folder", [".", "src/hardpoint_{name}", "native", "tests"])
def test_vendor_backends_have_the_same_files(folder: str, root: Path) -> None:
    contents = {
        name: sorted(
            file.name
            for file in (root / "backends" / name / folder.format(name=name)).iterdir()
            if file.is_file() and file.name not in OWN.get(name, ())
        )
        for name in VENDORS
    }
    first = contents[VENDORS[0]]
    assert contents == dict.fromkeys(VENDORS, first)


def test_extras_name_every_backend_of_the_tree(root: Path) -> None:
    import tomllib

    extras = tomllib.loads((root / "core" / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    for folder in sorted((root / "backends").iterdir()):
        if (folder / "pyproject.toml").exists():
            assert extras[folder.name][0].startswith(f"hardpoint-{folder.name}")


def test_distributions_have_one_version_and_need_one_another_in_the_same_minor_one(root: Path) -> None:
    folders = [file.parent for file in (*root.glob("*/pyproject.toml"), *root.glob("backends/*/pyproject.toml"))]
    texts = {folder.name: (folder / "pyproject.toml").read_text("utf-8") for folder in folders}
    (version,) = {re.search(r'^version = "(.*)"$', text, re.MULTILINE)[1] for text in texts.values()}  # type: ignore[index]
    minor = version.rpartition(".")[0]
    for name, text in texts.items():
        needed = re.findall(r'"hardpoint(?:-\w+)?(?:\[\w+\])?([~=<>!][^"]*)"', text)
        assert set(needed) <= {f"~={minor}.0"}, name
    assert f"## {version}" in (root / "CHANGELOG.md").read_text("utf-8")
    assert {(folder / "LICENSE").read_text("utf-8") for folder in folders} == {(root / "LICENSE").read_text("utf-8")}


def test_backends_of_the_tree_are_found_like_any_other(root: Path) -> None:
    listed = {entry.name: entry.value for entry in entry_points(group="hardpoint.backends")}
    for folder in sorted((root / "backends").iterdir()):
        if (folder / "pyproject.toml").exists():
            assert listed.get(folder.name) == f"hardpoint_{folder.name}.descriptor"


@pytest.mark.parametrize(
    "module", ["hardpoint", "hardpoint.interfaces", "hardpoint.plugins", "hardpoint.memory", "hardpoint.cli"]
)
def test_light_module_imports_no_torch(module: str) -> None:
    program = f"import sys, {module}; sys.exit(' '.join({{'torch', 'transformers'}} & set(sys.modules)) or None)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, f"{module} imports {ended.stderr.strip()}"
