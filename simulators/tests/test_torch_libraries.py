"""The generated libraries that stand for what is not simulated: read from real binaries, complete, and failing."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

from hardpoint_simulators.torch_libraries import GenerationFailed, generate, preload
from hardpoint_simulators.torch_libraries.builds import BUILDS, TorchBuild
from hardpoint_simulators.torch_libraries.elf import Import, SharedLibrary, read_library
from hardpoint_simulators.torch_libraries.generate import GAPS, plan


def compile_library(folder: Path, name: str, source: str, *options: str) -> Path:
    output = folder / name
    command = ["cc", "-shared", "-fPIC", "-nostdlib", f"-Wl,-soname,{name}", "-o", str(output), "-x", "c", "-"]
    subprocess.run([*command, "-x", "none", *options], input=source, text=True, check=True)
    return output


@pytest.fixture
def vendor_library(tmp_path: Path) -> Path:
    """A library with versioned functions, as the vendors' are."""
    script = tmp_path / "vendor.map"
    script.write_text("libvendor.so.1 { global: vendorRun; vendorGetErrorString; };\n")
    source = "int vendorRun(void) { return 0; }\nconst char *vendorGetErrorString(void) { return 0; }\n"
    return compile_library(tmp_path, "libvendor.so.1", source, f"-Wl,--version-script={script}")


@pytest.fixture
def framework(tmp_path: Path, vendor_library: Path) -> Path:
    """A library that is linked with it, imports a function that no library is named for, and has a weak import."""
    source = """
int vendorRun(void); const char *vendorGetErrorString(void); int othersRun(void);
__attribute__((weak)) int perhaps(void);
static int own(void) { return 1; }
int frameworkRun(void) { return vendorRun() + !vendorGetErrorString() + othersRun() + (perhaps ? perhaps() : own()); }
"""
    return compile_library(tmp_path, "libframework.so", source, str(vendor_library))


def test_imports_exports_and_versions_are_read(framework: Path, vendor_library: Path) -> None:
    found = read_library(framework)
    assert found.soname == "libframework.so"
    assert found.needed == ("libvendor.so.1",)
    assert found.imports == {
        Import("vendorRun", "libvendor.so.1"),
        Import("vendorGetErrorString", "libvendor.so.1"),
        Import("othersRun"),
    }
    assert "frameworkRun" in found.exports
    assert "own" not in found.exports
    assert found.versions == {"libvendor.so.1": frozenset({"libvendor.so.1"})}
    assert {"vendorRun", "vendorGetErrorString"} <= read_library(vendor_library).exports


def test_what_is_not_a_library_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.so").write_text("not a library")
    with pytest.raises(ValueError, match="ELF"):
        read_library(tmp_path / "text.so")


def planned(framework: Path, simulated: list[SharedLibrary]) -> dict[str, dict[str, set[str]]]:
    build = TorchBuild(binaries=(), mark="", simulated=())
    found = plan(build, {"libframework.so": read_library(framework)}, {}, simulated)
    return {one.soname: one.versions for one in found}


def test_every_missing_function_is_planned_in_the_library_that_is_to_have_it(framework: Path) -> None:
    assert planned(framework, []) == {
        GAPS: {"": {"othersRun"}},
        "libvendor.so.1": {"libvendor.so.1": {"vendorRun", "vendorGetErrorString"}},
    }


def test_what_a_simulated_library_lacks_is_a_gap_with_its_version(framework: Path) -> None:
    simulated = SharedLibrary("libvendor.so.1", (), frozenset(), frozenset({"vendorRun"}), {})
    assert planned(framework, [simulated]) == {GAPS: {"": {"othersRun"}, "libvendor.so.1": {"vendorGetErrorString"}}}


def test_generated_functions_fail_and_the_framework_loads_with_them(
    tmp_path: Path, framework: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages, libraries = tmp_path / "packages", tmp_path / "libraries"
    packages.mkdir()
    framework.rename(packages / framework.name)
    build = TorchBuild(binaries=("*.so",), mark=framework.name, simulated=(), codes={"vendor": 801})
    monkeypatch.setitem(BUILDS, "cuda", build)
    generated = generate("cuda", libraries, [str(tmp_path / "nothing"), str(packages)])
    assert {path.name for path in generated} == {GAPS, "libvendor.so.1"}
    (tmp_path / "libvendor.so.1").unlink()
    preload("cuda", libraries)
    vendor, gaps = ctypes.CDLL("libvendor.so.1"), ctypes.CDLL(str(libraries / GAPS))
    vendor.vendorGetErrorString.restype = ctypes.c_char_p
    assert vendor.vendorRun() == 801
    assert vendor.vendorGetErrorString() == b"vendorGetErrorString: not simulated"
    assert gaps.othersRun() == 1
    assert ctypes.CDLL(str(packages / framework.name)).frameworkRun() == 801 + 0 + 1 + 1


def test_build_that_is_not_installed_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(GenerationFailed, match=r"libtorch_npu\.so is not found"):
        generate("ascend", tmp_path / "libraries", [str(tmp_path)])


def test_nothing_generated_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no generated libraries"):
        preload("cuda", tmp_path)
