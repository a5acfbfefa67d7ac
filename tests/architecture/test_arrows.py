"""Dependencies between packages run one way (docs/architecture.md): every import is compared with the table of allowed ones."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

CORE = Path(__file__).parents[2] / "core" / "src" / "hardpoint"

FACADE = "hardpoint"
"""The names that `hardpoint` itself exports."""

PARTS = frozenset(
    {"validation", "memory", "plugins", "scheduler", "sampling", "layers", "weights", "models", "worker", "executor"}
)

ALLOWED: dict[str, frozenset[str]] = {
    "interfaces": frozenset(),
    "validation": frozenset({"interfaces"}),
    "plugins": frozenset({"interfaces"}),
    "memory": frozenset({"interfaces", "_native"}),
    "scheduler": frozenset({"interfaces", "validation", "_native"}),
    "sampling": frozenset({"interfaces", "validation", "_native"}),
    "quantization": frozenset({"interfaces", "_native"}),
    "layers": frozenset({"interfaces", "quantization"}),
    "weights": frozenset({"interfaces", "layers", "_native"}),
    "models": frozenset({"interfaces", "validation", "layers", "quantization", "weights"}),
    "worker": frozenset({"interfaces", "memory", "layers", "models", "sampling", "_native"}),
    "executor": frozenset({"interfaces", "validation", "plugins", "worker", "_native"}),
    "triton": frozenset({"interfaces", "memory", "worker"}),
    "engine": PARTS | {"interfaces"},
    "server": frozenset({FACADE, "interfaces", "validation", "engine", "executor", "sampling", "weights"}),
    "compat": frozenset({FACADE, "interfaces", "validation", "engine", "models", "sampling"}),
    "bench": frozenset({"interfaces", "validation"}),
    "cli": frozenset(
        {FACADE, "interfaces", "validation", "engine", "plugins", "sampling", "models", "server", "bench"}
    ),
    FACADE: PARTS | {"interfaces", "engine"},
}
"""For each package of `hardpoint`, the others that it may import; `FACADE` is `hardpoint/__init__.py`."""

FOR_BACKENDS = frozenset({"interfaces", "memory", "triton", "worker", "layers", "models", "quantization"})
"""What a backend may import of the core; layers and models are what a fused program recognises."""

FOR_SUITE = FOR_BACKENDS | {"plugins", "sampling"}
"""What the conformance suite may import of the core; the definition of sampling is over its parameters."""


def imports(file: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, absolute dotted name) of everything that a file imports, wherever in it and for whatever purpose.

    `from a.b import c` yields `a.b.c`, since c may be a module.
    """
    for node in ast.walk(ast.parse(file.read_text("utf-8"), str(file))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: imports are absolute"
            yield from ((node.lineno, f"{node.module}.{name.name}") for name in node.names)


def target(name: str) -> str | None:
    """Return which package of `hardpoint` an imported name belongs to; None for names of other distributions."""
    top, *rest = name.split(".")
    if top != "hardpoint":
        return None
    return rest[0] if rest and rest[0] in ALLOWED.keys() | {"_native"} else FACADE


def violations(files: list[Path], allowed: frozenset[str], own: str, root: Path) -> list[str]:
    """Return "file:line imports name" of every import from a package that is neither `own` nor in `allowed`."""
    found = []
    for file in sorted(files):
        for line, name in imports(file):
            goal = target(name)
            if goal is not None and goal != own and goal not in allowed:
                found.append(f"{file.relative_to(root)}:{line} imports {name}")
    return sorted(set(found))


def test_every_package_has_its_line_in_the_table() -> None:
    packages = {path.name for path in CORE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert packages <= set(ALLOWED), "add the package to ALLOWED, with what it may import"
    assert [file.name for file in CORE.glob("*.py")] == ["__init__.py"], "modules live in packages"


@pytest.mark.parametrize(
    "package", sorted(package for package in ALLOWED if package == FACADE or (CORE / package).is_dir())
)
def test_package_imports_only_what_it_may(package: str, root: Path) -> None:
    files = [CORE / "__init__.py"] if package == FACADE else list((CORE / package).rglob("*.py"))
    found = violations(files, ALLOWED[package], package, root)
    assert not found, f"hardpoint.{package} may import {sorted(ALLOWED[package])}:\n" + "\n".join(found)


def test_nothing_imports_the_command_line_or_the_server() -> None:
    importers = {(package, one) for package, allowed in ALLOWED.items() for one in {"cli", "server"} & allowed}
    assert importers == {("cli", "server")}


def test_table_has_no_cycle() -> None:
    remaining = {package: set(allowed) - {package, "_native"} for package, allowed in ALLOWED.items()}
    while remaining:
        free = {package for package, needs in remaining.items() if not needs & remaining.keys()}
        assert free, f"these packages depend on one another: {sorted(remaining)}"
        remaining = {package: needs for package, needs in remaining.items() if package not in free}


@pytest.mark.parametrize("folder", ["backends", "conformance_tests"])
def test_backends_and_suite_import_the_contract_and_no_deeper(folder: str, root: Path) -> None:
    allowed = FOR_SUITE if folder == "conformance_tests" else FOR_BACKENDS
    files = [file for file in (root / folder).rglob("src/**/*.py") if "build" not in file.parts]
    assert files
    found = violations(files, allowed, "", root)
    assert not found, f"{folder} may import {sorted(allowed)} of hardpoint:\n" + "\n".join(found)


def test_backends_do_not_import_one_another(root: Path) -> None:
    found = []
    for file in sorted((root / "backends").glob("*/src/**/*.py")):
        own = f"hardpoint_{file.relative_to(root / 'backends').parts[0]}"
        found += [
            f"{file.relative_to(root)}:{line} imports {name}"
            for line, name in imports(file)
            if name.startswith("hardpoint_") and name.split(".")[0] != own
        ]
    assert not found, "\n".join(found)


def test_core_imports_no_backend(root: Path) -> None:
    found = [
        f"{file.relative_to(root)}:{line} imports {name}"
        for file in sorted(CORE.rglob("*.py"))
        for line, name in imports(file)
        if name.startswith("hardpoint_")
    ]
    assert not found, "\n".join(found)


def test_scan_sees_imports_wherever_they_stand(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        "from typing import TYPE_CHECKING\nimport hardpoint.engine.llm\nif TYPE_CHECKING:\n    from hardpoint import cli\n"
        "def late():\n    from hardpoint.server.api import app\nfrom hardpoint import LLM\n"
    )
    found = violations([file], frozenset({"scheduler"}), "scheduler", tmp_path)
    assert found == [
        "module.py:2 imports hardpoint.engine.llm",
        "module.py:4 imports hardpoint.cli",
        "module.py:6 imports hardpoint.server.api.app",
        "module.py:7 imports hardpoint.LLM",
    ]
