"""The probe of the HIP runtime: what it makes of drivers that are missing, empty, failing or sound."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hardpoint.triton.build import TorchBuild
from hardpoint_rocm import capabilities, descriptor
from hardpoint_rocm.libraries import DRIVER_VARIABLE

from ...testing.probe_suite import Build, ProbeSuite

DRIVER = """
#include <string.h>
#include <stddef.h>
int hipGetDeviceCount(int *count) { *count = 1; return 0; }
int hipDriverGetVersion(int *version) { *version = 60342134; return 0; }
int hipDeviceGet(int *device, int index) { *device = 40 + index; return 0; }
int hipDeviceGetName(char *name, int size, int device) { strncpy(name, "Test GPU", size); return device != 40; }
int hipDeviceTotalMem(size_t *bytes, int device) { *bytes = 6UL << 30; return device != 40; }
int hipDeviceGetPCIBusId(char *bus, int size, int index) { strncpy(bus, "0000:01:00.0", size); return index != 0; }
int hipDeviceGetAttribute(int *value, int attribute, int index) { *value = attribute == 87 ? 64 : attribute == 89; return index != 0; }
"""


class TestRocmProbe(ProbeSuite):
    descriptor = descriptor
    source = DRIVER
    without_device = (
        ("*count = 1; return 0;", "return 100;", "no device found"),
        ("*count = 1;", "*count = 0;", "finds no device"),
    )
    failing = ("hipGetDeviceCount", "hipDriverGetVersion", "hipDeviceGetName", "hipDeviceTotalMem")
    needed = ("hipGetDeviceCount", "hipDeviceTotalMem")
    missing = "not built for ROCm"

    def test_device_is_listed_with_what_is_missing_to_compute_on_it(self, build: Build) -> None:
        build(DRIVER)
        found = descriptor.probe()
        (device,) = found.devices
        assert (device.name, device.torch_device, device.driver_version) == ("Test GPU", "cuda:0", "6.3")
        assert device.total_memory == 6 << 30
        assert device.properties["pci_bus"] == "0000:01:00.0"
        assert device.properties["wavefront"] == "64"
        assert found.reason.startswith("the installed torch is not built for ROCm")

    @pytest.mark.parametrize(
        ("lanes", "obstacle"),
        [(64, ""), (32, "the device has wavefronts of 32 lanes, and the kernels' tiles are made for 64")],
    )
    def test_device_that_cannot_compute_is_the_reason(
        self, build: Build, monkeypatch: pytest.MonkeyPatch, lanes: int, obstacle: str
    ) -> None:
        build(DRIVER.replace("? 64 :", f"? {lanes} :"))
        monkeypatch.setattr(TorchBuild, "requirements", lambda build: ())
        found = descriptor.probe()
        assert (len(found.devices), found.reason) == (1, obstacle)

    def test_device_without_virtual_memory_is_the_reason(self, build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
        build(DRIVER.replace("attribute == 89", "0"))
        monkeypatch.setattr(TorchBuild, "requirements", lambda build: ())
        found = descriptor.probe()
        assert len(found.devices) == 1
        assert "has no virtual memory management (ROCm 7.0 says so of some MI300X)" in found.reason


IN_PROCESS = """
import ctypes, sys
from hardpoint.interfaces.errors import BackendBroken, BackendUnavailable
from hardpoint_rocm import allocator, libraries
for path in sys.argv[1:]: ctypes.CDLL(path)
try: allocator.driver_table(0)
except BackendUnavailable as error: print(error.found)
try: libraries.check_one_runtime()
except BackendBroken as error: print(error)
"""


class TestRuntime:
    """Which HIP runtime is used where there are several."""

    @pytest.fixture
    def place(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
        """Put a HIP runtime, one that only a probe can use, into a folder of installed packages; returns its path."""
        monkeypatch.delenv(DRIVER_VARIABLE, raising=False)
        monkeypatch.setattr(descriptor, "SONAMES", ("libhardpoint_test_no_such_driver.so",))
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        built = tmp_path / "built.so"
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(built)], input=DRIVER, text=True, check=True
        )

        def put(name: str) -> str:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            return str(shutil.copy(built, tmp_path / name))

        return put

    def test_torchs_is_found_then_that_of_rocms_packages_then_the_systems(self, place: Callable[[str], str]) -> None:
        assert descriptor.probe().devices == ()
        for name in ("_rocm_sdk_core/lib/libamdhip64.so.7", "torch/lib/libamdhip64.so"):
            path = place(name)
            assert [device.properties["library"] for device in descriptor.probe().devices] == [path]

    def test_driver_opens_what_the_probe_opened_or_what_the_process_has(self, place: Callable[[str], str]) -> None:
        torchs, other = place("torch/lib/libamdhip64.so"), place("elsewhere/libamdhip64.so.7")
        assert self.printed() == [f"{torchs} lacks hipGetErrorName and 20 more required functions"]
        assert self.printed(other) == [f"{other} lacks hipGetErrorName and 20 more required functions"]

    def test_two_in_one_process_are_an_error_that_names_both(self, place: Callable[[str], str]) -> None:
        first, second = place("a/libamdhip64.so.6"), place("b/libamdhip64.so.7")
        _, problem = self.printed(first, second)
        assert f"the HIP runtime is loaded more than once: {first} and {second}" in problem

    def test_rccl_is_looked_for_where_the_runtime_is(
        self, place: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("ROCM_PATH", str(tmp_path / "rocm"))
        for name in (
            "torch/lib/librccl.so",
            "_rocm_sdk_libraries_gfx94X_dcgpu/lib/librccl.so.1",
            "rocm/lib/librccl.so",
        ):
            assert not capabilities.has_rccl()
            path = place(name)
            assert capabilities.has_rccl()
            Path(path).unlink()

    def printed(self, *loaded: str) -> list[str]:
        """Return what `IN_PROCESS` prints with these libraries loaded."""
        command = [sys.executable, "-c", IN_PROCESS, *loaded]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
