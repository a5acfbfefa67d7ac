"""`hardpoint conformance init`: what it writes, and what it refuses. That the result works is shown in tests/packages."""

from __future__ import annotations

import ast
import io
import re
import shutil
import subprocess
import tokenize
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hardpoint.interfaces.errors import ConfigError
from hardpoint.memory import include_dir
from hardpoint_conformance.cli import app
from hardpoint_conformance.scaffold import create

PARTS = ("__init__", "descriptor", "capabilities", "allocator", "attention")

FILES = {
    *(f"src/hardpoint_orbit/{part}.py" for part in PARTS),
    "src/hardpoint_orbit/py.typed",
    "native/driver.cpp",
    "CMakeLists.txt",
    "pyproject.toml",
    "README.md",
    "tests/test_conformance.py",
    ".github/workflows/conformance.yml",
    ".gitignore",
}

LINE_LIMIT = 200

NO_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    return create("orbit", tmp_path / "hardpoint-orbit")


def python_lines(source: str) -> int:
    """Return the number of lines with code: blank ones, comments and docstrings are none."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            lines.difference_update(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return len(lines)


def c_lines(source: str) -> int:
    """Return the number of lines with code: blank ones and comments are none."""
    return sum(bool(line.strip()) for line in re.sub(r"/\*.*?\*/|//[^\n]*", "", source, flags=re.DOTALL).splitlines())


def test_counting_of_lines() -> None:
    assert python_lines('"""Text\n\nmore."""\n\nx = [\n    1,  # one\n]\n# only a comment\n') == 3
    assert c_lines("/* text\n * more */\n\nint x; /* x */\nint y;  // y\n// more\n") == 2


def test_every_file_is_there(written: Path) -> None:
    assert {str(file.relative_to(written)) for file in written.rglob("*") if file.is_file()} == FILES


def test_template_name_is_gone(written: Path) -> None:
    for file in written.rglob("*"):
        assert "acme" not in str(file.relative_to(written)).lower()
        assert file.is_dir() or "acme" not in file.read_text("utf-8").lower()


def test_name_of_several_words(tmp_path: Path) -> None:
    descriptor = create("big_orbit", tmp_path / "new" / "folder") / "src/hardpoint_big_orbit/descriptor.py"
    assert "BigOrbitAllocator" in descriptor.read_text("utf-8")
    assert 'name="big_orbit"' in descriptor.read_text("utf-8")


def test_vendor_writes_few_lines(written: Path) -> None:
    python = sum(python_lines(file.read_text("utf-8")) for file in (written / "src").rglob("*.py"))
    assert python + c_lines((written / "native/driver.cpp").read_text("utf-8")) <= LINE_LIMIT


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_driver_compiles_without_warnings(written: Path, tmp_path: Path) -> None:
    flags = ["-std=c++17", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror"]
    command = [
        "c++",
        *flags,
        "-I",
        str(include_dir()),
        str(written / "native/driver.cpp"),
        "-o",
        str(tmp_path / "x.so"),
    ]
    subprocess.run(command, check=True, timeout=240)


@pytest.mark.parametrize(
    "name", ["", "Orbit", "or-bit", "or bit", "9lives", "_orbit", "orbit_", "or__bit", "class", "ö", "../x"]
)
def test_impossible_name_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lower-case identifier"):
        create(name, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_name_of_an_installed_backend_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is installed"):
        create("cpu", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_empty_folder_is_used(tmp_path: Path) -> None:
    assert create("orbit", tmp_path) == tmp_path
    assert (tmp_path / "pyproject.toml").exists()


def test_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(ConfigError, match="not an empty folder"):
        create("orbit", tmp_path)
    with pytest.raises(ConfigError, match="not an empty folder"):
        create("orbit", tmp_path / "mine")
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]


def test_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="cannot be written"):
        create("orbit", tmp_path / "file" / "new")


def test_command_writes_or_says_what_is_wrong(tmp_path: Path) -> None:
    runner = CliRunner()
    folder = tmp_path / "new"
    written = runner.invoke(app, ["init", "orbit", "--path", str(folder)])
    assert written.exit_code == 0
    assert str(folder) in written.output
    refused = runner.invoke(app, ["init", "orbit", "--path", str(folder)])
    assert refused.exit_code == 2
    assert "not an empty folder" in " ".join(refused.output.replace("│", " ").split())
