"""What no file may say: devices in the core, registries' hosts and absolute paths anywhere."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest

DEVICE_WORDS = re.compile(
    r"(?<![A-Za-z])(?:cuda|hip|rocm|npu|ascend|cann|nvidia)s?(?![a-z])|(?<![A-Za-z])(?:cu|hip|acl|aclrt)(?=[A-Z][a-z])",
)
"""Names of devices as words, with underscores or digits beside them, and as prefixes of their libraries' functions."""

REGISTRIES = re.compile(
    r"pypi\.org|pythonhosted\.org|download\.pytorch\.org|anaconda\.org|registry\.npmjs\.org|crates\.io|docker\.io|ghcr\.io|quay\.io"
)
MACHINE_PATHS = re.compile(r"(?<![\w.$}~/-])/(?:work|tmp|root|home/\w+)(?![\w-])")

CORE_SUFFIXES = {".py", ".pyi", ".cpp", ".hpp", ".h", ".c", ".toml", ".txt", ".cmake", ".md"}
THIS_FILE = Path(__file__).name


def text_of(file: Path) -> str:
    """Return a file's text; empty for files that are not text."""
    try:
        return file.read_text("utf-8")
    except UnicodeDecodeError:
        return ""


def device_names(text: str) -> list[str]:
    """Return "line: text" of the lines that name a device."""
    lowered = ((line, DEVICE_WORDS.search(line) or DEVICE_WORDS.search(line.lower())) for line in text.splitlines())
    return [f"{number}: {line.strip()}" for number, (line, match) in enumerate(lowered, 1) if match]


def without_extras(pyproject: str) -> str:
    """Return a pyproject file without its extras: their names are those of the backends' distributions."""
    assert "optional-dependencies" in tomllib.loads(pyproject)["project"]
    return re.sub(r"^\[project\.optional-dependencies\]\n(?:[^\[\n][^\n]*\n)*", "", pyproject, flags=re.MULTILINE)


def test_core_names_no_device(files: list[Path], root: Path) -> None:
    core = root / "core"
    found = []
    for file in files:
        if not file.is_relative_to(core) or file.suffix not in CORE_SUFFIXES:
            continue
        text = text_of(file)
        if file == core / "pyproject.toml":
            text = without_extras(text)
        found += [f"{file.relative_to(root)}:{line}" for line in device_names(text)]
    assert not found, "the core names no device:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "text",
    ["torch.cuda.empty_cache()", "is_cuda = True", 'device == "NPU"', "hipMalloc(p)", "cuMemCreate(h)", "aclrtMalloc(p)",
     "a ROCm build", "CUDA_VISIBLE_DEVICES", "the Ascend backend", "cuda12", "NPUs"],
)  # fmt: skip
def test_device_name_is_recognised(text: str) -> None:
    assert device_names(f"first\n{text}\n") == [f"2: {text}"]


@pytest.mark.parametrize(
    "text", ["in ascending order", "input", "the descent", "shipped", "relationship", "scanned", "occupied"]
)
def test_ordinary_word_is_not_taken_for_a_device(text: str) -> None:
    assert device_names(text) == []


def test_only_the_extras_are_left_out_of_the_search() -> None:
    text = '[project]\nname = "x"\n[project.optional-dependencies]\ncuda = ["y"]\n\n[project.scripts]\nhip = "z"\n'
    assert device_names(without_extras(text)) == ['5: hip = "z"']


@pytest.mark.parametrize(
    ("kind", "pattern"), [("a package registry's host", REGISTRIES), ("a path of one machine", MACHINE_PATHS)]
)
def test_no_file_names(kind: str, pattern: re.Pattern[str], files: list[Path], root: Path) -> None:
    found = [
        f"{file.relative_to(root)}:{number}: {line.strip()[:120]}"
        for file in files
        if file.name != THIS_FILE
        for number, line in enumerate(text_of(file).splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found, f"no file names {kind}:\n" + "\n".join(found)


@pytest.mark.parametrize("path", ["/work/main", '"/tmp/x"', "cd /root", "=/home/someone/x", "(/work)"])
def test_machine_path_is_recognised(path: str) -> None:
    assert MACHINE_PATHS.search(path)


@pytest.mark.parametrize(
    "path", ["framework/main", "https://host/work/x", "$TMPDIR/tmp/x", "./tmp/x", "/proc/self", "/workers"]
)
def test_other_path_is_not_taken_for_a_machines(path: str) -> None:
    assert not MACHINE_PATHS.search(path)


def test_the_parts_of_make_test_and_those_that_take_long_have_every_test_once(root: Path, files: list[Path]) -> None:
    makefile = (root / "Makefile").read_text("utf-8").replace("\\\n", " ")
    parts = dict(re.findall(r"^TESTS_OF_(\w+) := (.*)$", makefile, flags=re.MULTILINE))
    (named,) = re.findall(r"^PARTS := (.*)$", makefile, flags=re.MULTILINE)
    assert sorted([*named.split(), "test-long"]) == sorted(f"test-{part}" for part in parts)
    assert {"lint", "typecheck", "test-long", *named.split()} <= set((root / ".ci" / "run").read_text("utf-8").split())
    settings = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))
    tests = [file.relative_to(root) for file in files if file.name.startswith("test_") and file.suffix == ".py"]
    run: Counter[Path] = Counter()
    long = parts["long"].split()
    for name, part in parts.items():
        left_out = [word.removeprefix("--ignore=") for word in part.split() if word.startswith("--ignore=")]
        left_out += long if name != "long" else []
        folders = [word for word in part.split() if not word.startswith("--ignore=")]
        run.update(test for test in tests if is_in(test, folders) and not is_in(test, left_out))
    assert run == Counter(test for test in tests if is_in(test, settings["tool"]["pytest"]["ini_options"]["testpaths"]))


def is_in(file: Path, folders: list[str]) -> bool:
    return any(file.is_relative_to(folder) for folder in folders)
