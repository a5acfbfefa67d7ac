"""The probe of the CUDA driver: what it makes of drivers that are missing, empty, failing or sound."""

from __future__ import annotations

import pytest

from hardpoint.triton.build import TorchBuild
from hardpoint_cuda import capabilities, descriptor
from hardpoint_simulators import library

from ...testing.probe_suite import Build, ProbeSuite

DRIVER = """
#include <string.h>
#include <stddef.h>
int cuInit(unsigned flags) { return flags; }
int cuDriverGetVersion(int *version) { *version = 13010; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device, int index) { *device = 40 + index; return 0; }
int cuDeviceGetName(char *name, int size, int device) { strncpy(name, "Test GPU", size); return device != 40; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = 6UL << 30; return device != 40; }
int cuDeviceGetPCIBusId(char *bus, int size, int device) { strncpy(bus, "0000:01:00.0", size); return device != 40; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = attribute == 75 ? 9 : 0; return device != 40; }
"""


class TestCudaProbe(ProbeSuite):
    descriptor = descriptor
    source = DRIVER
    without_device = (
        ("return flags;", "return 100;", "no device found"),
        ("return flags;", "return 34;", "a stub library and not a driver"),
        ("*count = 1;", "*count = 0;", "finds no device"),
    )
    failing = ("cuInit", "cuDriverGetVersion", "cuDeviceGetCount", "cuDeviceGetName", "cuDeviceTotalMem_v2")
    needed = ("cuInit", "cuDeviceGetCount", "cuDeviceTotalMem_v2")
    missing = "not built for CUDA"

    def test_device_is_listed_with_what_is_missing_to_compute_on_it(self, build: Build) -> None:
        build(DRIVER)
        found = descriptor.probe()
        (device,) = found.devices
        assert (device.name, device.torch_device, device.driver_version) == ("Test GPU", "cuda:0", "13.1")
        assert device.total_memory == 6 << 30
        assert device.properties["pci_bus"] == "0000:01:00.0"
        assert device.properties["compute_capability"] == "9.0"
        assert found.reason.startswith("the installed torch is not built for CUDA")

    @pytest.mark.parametrize(
        ("toolkit", "driver", "obstacle"),
        [
            ((13, 0), 12080, "the driver supports CUDA up to 12.8, and torch is built for CUDA 13.0"),
            ((13, 1), 13000, ""),
            ((12, 8), 13000, ""),
            ((), 12080, ""),
        ],
    )
    def test_driver_older_than_torchs_toolkit_is_the_reason(
        self, monkeypatch: pytest.MonkeyPatch, toolkit: tuple[int, ...], driver: int, obstacle: str
    ) -> None:
        monkeypatch.setenv(descriptor.DRIVER_VARIABLE, str(library("cuda")))
        monkeypatch.setenv("HARDPOINT_SIM_VERSION", str(driver))
        monkeypatch.setattr(TorchBuild, "requirements", lambda build: ())
        monkeypatch.setattr(capabilities, "torch_platform_version", lambda name: toolkit)
        found = descriptor.probe()
        assert len(found.devices) == 1
        assert found.reason.startswith(obstacle)
        assert bool(found.reason) is bool(obstacle)

    @pytest.mark.parametrize(
        ("major", "obstacle"), [(9, ""), (7, "the device has compute capability 7.0, and Triton's kernels need 8.0")]
    )
    def test_device_that_cannot_compute_is_the_reason(
        self, build: Build, monkeypatch: pytest.MonkeyPatch, major: int, obstacle: str
    ) -> None:
        build(DRIVER.replace("attribute == 75 ? 9 : 0", f"attribute == 75 ? {major} : 0"))
        monkeypatch.setattr(TorchBuild, "requirements", lambda build: ())
        found = descriptor.probe()
        assert (len(found.devices), found.reason) == (1, obstacle)
