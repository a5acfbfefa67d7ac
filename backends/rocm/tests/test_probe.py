"""The probe of the HIP runtime: what it makes of drivers that are missing, empty, failing or sound."""

from __future__ import annotations

import pytest

from hardpoint_rocm import capabilities, descriptor

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
int hipDeviceGetAttribute(int *value, int attribute, int index) { *value = attribute == 87 ? 64 : 0; return index != 0; }
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
        build(DRIVER.replace("? 64 : 0", f"? {lanes} : 0"))
        monkeypatch.setattr(capabilities, "requirements", tuple)
        found = descriptor.probe()
        assert (len(found.devices), found.reason) == (1, obstacle)
