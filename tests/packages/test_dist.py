"""Wheels and sdists in bare environments: a prompt is answered, each extra says what it lacks, upgrades, uninstalling."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.packages.bare_environment import DIST, ROOT, Environment

EXTRAS = {"cuda": "libcuda.so.1", "rocm": "libamdhip64.so", "ascend": "libascendcl.so"}
"""By extra: the library whose absence `hardpoint doctor` must name."""
FOLDERS = [
    project.parent for project in sorted(ROOT.glob("*/pyproject.toml")) + sorted(ROOT.glob("backends/*/pyproject.toml"))
]

QUESTION = "Name the capital of France."
"""Of its answer each token stands nearly a nat before the next best, and so no processor's rounding decides what is read."""

pytestmark = pytest.mark.timeout(600)


def succeed(environment: Environment, command: str) -> str:
    """Run a command and return what it wrote."""
    ended = environment.run(command)
    assert ended.returncode == 0, f"$ {command}\n{ended.stdout}"
    return ended.stdout


def versions(environment: Environment) -> dict[str, str]:
    """Return the versions of our distributions."""
    listed = json.loads(succeed(environment, "pip list --format json"))
    return {one["name"]: one["version"] for one in listed if one["name"].startswith("hardpoint")}


def reversioned(wheel: Path, version: str, folder: Path) -> Path:
    """Write a copy of a wheel with another version, and return it."""
    before = wheel.name.split("-")[1]
    copy = folder / wheel.name.replace(f"-{before}-", f"-{version}-")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(copy, "w") as new:
        for item in old.infolist():
            data = old.read(item)
            name = item.filename.replace(f"-{before}.dist-info/", f"-{version}.dist-info/")
            if name.endswith(".dist-info/METADATA"):
                data = data.replace(f"\nVersion: {before}\n".encode(), f"\nVersion: {version}\n".encode())
            elif name.endswith(".dist-info/RECORD"):
                lines = data.decode().replace(f"-{before}.dist-info/", f"-{version}.dist-info/").splitlines()
                data = "".join(f"{line}\n" for line in lines if "METADATA" not in line).encode()
                data += f"{name.removesuffix('RECORD')}METADATA,,\n".encode()
            new.writestr(name, data)
    return copy


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with `hardpoint[cpu]`, and the demo model's package without its own requirements; later tests add to it."""
    environment = Environment(tmp_path_factory.mktemp("bare"), DIST, with_demo=True)
    succeed(environment, 'pip install "hardpoint[cpu]"')
    return environment


def test_every_distribution_has_an_sdist_and_a_wheel_with_the_licence() -> None:
    wheels, sdists = sorted(DIST.glob("*.whl")), sorted(DIST.glob("*.tar.gz"))
    assert len(wheels) == len(sdists) == len(FOLDERS)
    text = (ROOT / "LICENSE").read_bytes()
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/licenses/LICENSE"))
            assert archive.read(name) == text, wheel
    for sdist in sdists:
        with tarfile.open(sdist) as archive:
            assert not [member.name for member in archive if not (member.isfile() or member.isdir())], sdist
            member = archive.extractfile(f"{sdist.name.removesuffix('.tar.gz')}/LICENSE")
            assert member is not None
            assert member.read() == text, sdist


def test_the_wheel_has_the_files_of_the_web_page() -> None:
    with zipfile.ZipFile(next(DIST.glob("hardpoint-0*.whl"))) as archive:
        assert {f"hardpoint/server/page.{suffix}" for suffix in ("html", "css", "js")} <= set(archive.namelist())


@pytest.mark.skipif(platform.machine() != "x86_64", reason="elsewhere there is one level")
def test_the_wheel_has_kernels_for_every_instruction_set(environment: Environment) -> None:
    told = succeed(environment, "python -c 'from hardpoint_cpu import _native; print(*_native.compiled_isas())'")
    assert told.split() == ["baseline", "avx2", "avx512", "avx512vnni", "avx512bf16", "amx"]


def test_a_prompt_is_answered_without_the_source_tree(environment: Environment) -> None:
    told = json.loads(
        succeed(
            environment,
            "hardpoint generate --model demo --num-blocks 64 --max-model-len 256 --temperature 0 --max-tokens 12 --json "
            f'--prompt "{QUESTION}" 2>/dev/null',
        )
    )
    assert "Paris" in told["outputs"][0]["completions"][0]["text"]
    code = "import hardpoint, hardpoint_cpu, sys; print(*sys.path, hardpoint.__file__, hardpoint_cpu.__file__, sep=chr(10))"
    *path, core, backend = succeed(environment, f"python -c '{code}'").splitlines()
    assert Path(core).is_relative_to(environment.root)
    assert Path(backend).is_relative_to(environment.root)
    assert not [entry for entry in path if Path(entry).is_relative_to(ROOT)]


def test_each_extra_without_its_hardware_says_what_it_lacks(environment: Environment) -> None:
    for extra, library in EXTRAS.items():
        succeed(environment, f'pip install "hardpoint[{extra}]"')
        succeed(environment, f"python -c 'import hardpoint_{extra}'")
        told = environment.run("hardpoint doctor").stdout
        assert any(library in line and "no " in line for line in told.splitlines()), told
    assert "not installed" in environment.run("hardpoint conformance list").stdout
    succeed(environment, 'pip install "hardpoint[conformance]"')
    assert "alloc.address.stable@1" in succeed(environment, "hardpoint conformance list --level L1")


def test_an_upgrade_takes_core_and_backend_and_no_other_minor_version_fits(
    environment: Environment, tmp_path: Path
) -> None:
    version = versions(environment)["hardpoint"]
    major, minor, patch = map(int, version.split("."))
    next_patch, next_minor = f"{major}.{minor}.{patch + 1}", f"{major}.{minor + 1}.0"
    (core,), (backend,) = DIST.glob("hardpoint-*.whl"), DIST.glob("hardpoint_cpu-*.whl")
    for wheel in (core, backend):
        reversioned(wheel, next_patch, tmp_path)
    succeed(environment, f"pip install --upgrade --find-links {tmp_path} hardpoint hardpoint-cpu")
    found = versions(environment)
    assert (found["hardpoint"], found["hardpoint-cpu"]) == (next_patch, next_patch)
    assert succeed(environment, "hardpoint --version") == f"hardpoint {next_patch}\n"
    assert not [line for line in environment.run("pip check").stdout.splitlines() if line.startswith("hardpoint")]

    reversioned(core, next_minor, tmp_path)
    refused = environment.run(f"pip install --find-links {tmp_path} hardpoint=={next_minor} hardpoint-cpu")
    assert refused.returncode != 0
    assert "ResolutionImpossible" in refused.stdout


def test_uninstalling_leaves_nothing(environment: Environment) -> None:
    ours = " ".join(versions(environment))
    succeed(environment, f"pip uninstall -y {ours}")
    assert not environment.added()


def test_an_sdist_asks_for_the_core(tmp_path: Path) -> None:
    """Where it is installed the sdist builds: `make sanitize` installs the backend from it."""
    (sdist,) = DIST.glob("hardpoint_cpu-*.tar.gz")
    subprocess.run(["tar", "-xzf", str(sdist), "-C", str(tmp_path)], check=True)
    folder = tmp_path / sdist.name.removesuffix(".tar.gz")
    asked = "from scikit_build_core.build import get_requires_for_build_wheel as ask; print(*ask())"
    required = subprocess.run(
        [sys.executable, "-c", asked], cwd=folder, capture_output=True, text=True, check=True
    ).stdout
    assert "hardpoint~=" in required, "an isolated build gets the core"
