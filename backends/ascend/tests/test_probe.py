"""The probe of the CANN runtime: what it makes of drivers that are missing, empty, failing or sound."""

from __future__ import annotations

import pytest

from hardpoint_ascend import capabilities, descriptor
from hardpoint_simulators import library

from ...testing.probe_suite import Build, ProbeSuite

DRIVER = """
#include <stddef.h>
#include <stdint.h>
int aclInit(const char *configuration) { return configuration != NULL; }
int aclrtGetDeviceCount(uint32_t *count) { *count = 1; return 0; }
int aclrtGetVersion(int32_t *major, int32_t *minor, int32_t *patch) { *major = 8; *minor = 2; *patch = 1; return 0; }
const char *aclrtGetSocName(void) { return "Test NPU"; }
int aclsysGetCANNVersion(int package, char version[512]) { version[0] = '9'; version[1] = 0; return package; }
"""


class TestAscendProbe(ProbeSuite):
    descriptor = descriptor
    source = DRIVER
    without_device = (
        ("return configuration != NULL;", "return 207004;", "no device found"),
        ("*count = 1; return 0;", "return 207004;", "no device found"),
        ("*count = 1;", "*count = 0;", "finds no device"),
    )
    failing = ("aclInit", "aclrtGetDeviceCount", "aclrtGetVersion")
    needed = ("aclInit", "aclrtGetDeviceCount", "aclrtGetSocName")
    missing = "torch_npu is not installed"

    def test_device_is_listed_and_not_usable_without_torch_npu(self, build: Build) -> None:
        build(DRIVER)
        found = descriptor.probe()
        (device,) = found.devices
        assert (device.name, device.torch_device, device.driver_version) == ("Test NPU", "npu:0", "8.2.1")
        assert device.total_memory == 0
        assert "torch_npu is not installed" in found.reason

    def test_device_is_usable_with_torch_npu(self, build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(capabilities, "_has_torch_npu", lambda: True)
        build(DRIVER.replace("Test NPU", "Ascend910B3"))
        assert descriptor.probe().reason == ""
        build(DRIVER)
        assert "the device is Test NPU" in descriptor.probe().reason

    def test_cann_8_is_named_as_too_old(self, build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(capabilities, "_has_torch_npu", lambda: True)
        build(DRIVER.replace("Test NPU", "Ascend910B3").replace("'9'", "'8'"))
        assert descriptor.probe().reason == (
            "CANN 8 is installed, and the torch_npu of torch 2.11 and later needs CANN 9"
        )

    def test_versions_of_cann_are_those_of_the_simulated_runtime(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(descriptor.DRIVER_VARIABLE, str(library("ascend")))
        for number, version in (("0", "9.1.0"), ("8050", "8.5.0")):
            monkeypatch.setenv("HARDPOINT_SIM_VERSION", number)
            assert descriptor.probe().devices[0].properties["cann"] == version
