"""Compare our declarations of the vendors' libraries with the vendors' own headers, taken from public packages.

`make test-headers` runs it. Each backend's `native/api.hpp` is compiled against true headers by static assertions:
exported symbols, signatures, values, sizes and layouts. Then faults are seeded into copies of `api.hpp`, one at a time,
and each must fail to compile, so that a check that checks nothing is found. Packages are downloaded once into the
cache; only their headers are kept.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
COMPILE = ("-std=c++17", "-Wall", "-Wextra", "-Werror")


@dataclass(frozen=True)
class Headers:
    """One version of a vendor's headers.

    Attributes:
        vendor: the backend whose declarations are compared with them.
        packages: requirements of the package index that contain them.
        folders: include folders within the unpacked packages.
        version: what the headers themselves must say: major and minor.
    """

    vendor: str
    packages: tuple[str, ...]
    folders: tuple[str, ...]
    version: tuple[int, int]


@dataclass(frozen=True)
class Fault:
    """A mistake that the check must find: `old`, which occurs once in `api.hpp`, becomes `new`."""

    vendor: str
    kind: str
    old: str
    new: str


CUDA_13 = "nvidia/cu13/include"
HEADERS = (
    Headers("cuda", ("triton==3.6.0",), ("triton/backends/nvidia/include",), (12, 8)),
    Headers("cuda", ("nvidia-cuda-runtime-cu12==12.9.79",), ("nvidia/cuda_runtime/include",), (12, 9)),
    Headers("cuda", ("triton==3.9.0",), ("triton/backends/nvidia/include",), (13, 1)),
    Headers("cuda", ("nvidia-cuda-runtime==13.5.37", "nvidia-cuda-crt==13.5.37"), (CUDA_13,), (13, 5)),
    Headers("rocm", ("triton==3.9.0",), ("triton/backends/amd/include",), (7, 1)),
    Headers("ascend", ("torch-npu==2.13.0",), ("torch_npu/include/third_party/acl/inc",), (1, 17)),
)

FAULTS = (
    Fault("cuda", "symbol", '"cuMemcpyHtoDAsync_v2"', '"cuMemcpyHtoDAsync"'),
    Fault("cuda", "signature", "Result, void *, size_t, unsigned)", "Result, void *, int, unsigned)"),
    Fault("cuda", "number of arguments", "Address, size_t, size_t, Allocation,", "Address, size_t, Allocation,"),
    Fault("cuda", "value", "X(handle_fabric, 8,", "X(handle_fabric, 4,"),
    Fault("cuda", "layout", "unsigned char gpu_direct_rdma_capable;", "unsigned short gpu_direct_rdma_capable;"),
    Fault("rocm", "symbol", '"hipMemsetAsync"', '"hipMemsetAsync_v2"'),
    Fault("rocm", "signature", "Result, void *, int, size_t, Stream)", "Result, void *, int, unsigned, Stream)"),
    Fault("rocm", "value", "X(attribute_virtual_memory, 89,", "X(attribute_virtual_memory, 102,"),
    Fault("rocm", "layout", "int requested_handle_type;\n", "int64_t requested_handle_type;\n"),
    Fault("ascend", "symbol", '"aclrtMapMem"', '"aclrtMemMap"'),
    Fault("ascend", "signature", "Result, void *, uint64_t, uint32_t)", "Result, void *, uint32_t, uint32_t)"),
    Fault("ascend", "value", "X(hbm_memory_huge, 4,", "X(hbm_memory_huge, 2,"),
    Fault("ascend", "layout", "  uint32_t id;\n  int type;", "  int type;\n  uint32_t id;"),
)


class Packages:
    """Packages' headers in a cache folder, downloaded where they are missing: by an environment of its own if this one has no pip."""

    def __init__(self, cache: Path) -> None:
        self._cache = cache

    def unpacked(self, requirement: str) -> Path:
        """Return the folder with a package's headers; raises CalledProcessError when it cannot be downloaded."""
        target = self._cache / requirement.replace("==", "-")
        if not target.exists():
            print(f"downloading {requirement}", flush=True)
            partial = target.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            self._pip("download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(partial), requirement)
            (wheel,) = partial.glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(partial, [name for name in archive.namelist() if name.endswith((".h", ".hpp"))])
            wheel.unlink()
            partial.rename(target)
        return target

    def _pip(self, *arguments: str) -> None:
        python = Path(sys.executable)
        if importlib.util.find_spec("pip") is None:
            environment = self._cache / "environment"
            python = environment / "bin" / "python"
            if not (environment / "bin" / "pip").exists():
                venv.create(environment, with_pip=True, clear=True)
        subprocess.run([str(python), "-m", "pip", "--disable-pip-version-check", *arguments], check=True)


def options_for(headers: Headers, packages: Packages) -> list[str]:
    """Return the compiler's options that lead to a version of the headers, and say which one it must be."""
    unpacked = [packages.unpacked(package) for package in headers.packages]
    found = [root / folder for root in unpacked for folder in headers.folders if (root / folder).exists()]
    major, minor = headers.version
    return [f"-DMAJOR_VERSION={major}", f"-DMINOR_VERSION={minor}", *(f"-isystem{folder}" for folder in found)]


class Compiler:
    """A compiler that has read once what our declarations include, which takes it far longer than to compare them.

    Args:
        command: the compiler's.
        folder: where to put what it has read.
    """

    def __init__(self, command: str, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._command, self._included = [command, *COMPILE, f"-I{ROOT / 'core' / 'include'}"], folder / "included.hpp"
        self._included.write_text('#include "hardpoint/driver_support.hpp"\n', "utf-8")
        read = [*self._command, "-x", "c++-header", str(self._included), "-o", f"{self._included}.gch"]
        subprocess.run(read, check=True)

    def check(self, vendor: str, api: Path, options: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Compile a vendor's check with the `api.hpp` in folder `api`."""
        own = ["-include", str(self._included), f"-I{HERE}", f"-I{api}"]
        command = [*self._command, *own, *options, "-fsyntax-only", str(HERE / f"check_{vendor}.cpp")]
        return subprocess.run(command, capture_output=True, text=True, check=False)


def api_of(vendor: str) -> Path:
    """Return the folder of a backend's declarations."""
    return ROOT / "backends" / vendor / "native"


def check_declarations(packages: Packages, compiler: Compiler) -> Iterator[str]:
    """Compare with all headers, print each version, and yield what is wrong."""
    for headers in HEADERS:
        ended = compiler.check(headers.vendor, api_of(headers.vendor), options_for(headers, packages))
        version = ".".join(map(str, headers.version))
        label = f"{headers.vendor}: headers {version} ({', '.join(headers.packages)})"
        print(f"{label}: {'agree' if ended.returncode == 0 else 'DIFFER'}", flush=True)
        if ended.returncode:
            yield f"{label}:\n{ended.stderr}"


def check_faults(packages: Packages, cache: Path, compiler: Compiler) -> Iterator[str]:
    """Seed each fault, and yield those that the newest headers do not find."""
    newest = {headers.vendor: options_for(headers, packages) for headers in HEADERS}
    for number, fault in enumerate(FAULTS):
        source = (api_of(fault.vendor) / "api.hpp").read_text("utf-8")
        label = f"{fault.vendor}: seeded fault, {fault.kind}"
        if source.count(fault.old) != 1:
            yield f"{label}: {fault.old!r} occurs {source.count(fault.old)} times in api.hpp"
            continue
        folder = cache / "faults" / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "api.hpp").write_text(source.replace(fault.old, fault.new), "utf-8")
        ended = compiler.check(fault.vendor, folder, newest[fault.vendor])
        found = ended.returncode != 0 and "static assertion failed" in ended.stderr
        print(f"{label}: {'found' if found else 'NOT FOUND'}", flush=True)
        if not found:
            yield f"{label}: compiled, or failed for another reason:\n{ended.stderr}"


def main() -> int:
    """Run all checks; the exit status is 0 when all declarations agree and all seeded faults are found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cache", type=Path, default=ROOT / "build" / "headers", help="folder for downloads")
    parser.add_argument("--compiler", default="c++")
    arguments = parser.parse_args()
    packages = Packages(arguments.cache)
    compiler = Compiler(arguments.compiler, arguments.cache)
    problems = [
        *check_declarations(packages, compiler),
        *check_faults(packages, arguments.cache, compiler),
    ]
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"{len(HEADERS)} header versions, {len(FAULTS)} seeded faults, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
