"""The probe of the CANN runtime: what it makes of drivers that are missing, empty, failing or sound."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from hardpoint.interfaces.errors import BackendBroken, BackendUnavailable, DriverError
from hardpoint.plugins import BackendState, installed, resolve_backend
from hardpoint_ascend import capabilities, descriptor

DRIVER = """
#include <stddef.h>
#include <stdint.h>
int aclInit(const char *configuration) { return configuration != NULL; }
int aclrtGetDeviceCount(uint32_t *count) { *count = 1; return 0; }
int aclrtGetVersion(int32_t *major, int32_t *minor, int32_t *patch) { *major = 8; *minor = 2; *patch = 1; return 0; }
const char *aclrtGetSocName(void) { return "Test NPU"; }
"""


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def compile_library(source: str) -> None:
        library = tmp_path / "driver.so"
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)], input=source, text=True, check=True
        )
        monkeypatch.setenv(descriptor.DRIVER_VARIABLE, str(library))

    return compile_library


def test_missing_library_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(descriptor.DRIVER_VARIABLE, raising=False)
    monkeypatch.setattr(descriptor, "SONAMES", ("libhardpoint_test_no_such_driver.so",))
    found = descriptor.probe()
    assert (found.devices, found.reason) == ((), "no libhardpoint_test_no_such_driver.so is installed")


def test_device_is_listed_and_not_usable_without_torch_npu(build: Callable[[str], None]) -> None:
    build(DRIVER)
    found = descriptor.probe()
    (device,) = found.devices
    assert (device.name, device.torch_device, device.driver_version) == ("Test NPU", "npu:0", "8.2.1")
    assert device.total_memory == 0
    assert "torch_npu is not installed" in found.reason


def test_device_is_usable_with_torch_npu(build: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capabilities, "_has_torch_npu", lambda: True)
    build(DRIVER.replace("Test NPU", "Ascend910B3"))
    assert descriptor.probe().reason == ""
    build(DRIVER)
    assert "the device is Test NPU" in descriptor.probe().reason


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("return configuration != NULL;", "return 207004;", "no device found"),
        ("*count = 1; return 0;", "return 207004;", "no device found"),
        ("*count = 1;", "*count = 0;", "finds no device"),
    ],
)
def test_driver_without_a_device_is_unavailable(build: Callable[[str], None], old: str, new: str, reason: str) -> None:
    assert old in DRIVER
    build(DRIVER.replace(old, new))
    found = descriptor.probe()
    assert found.devices == ()
    assert reason in found.reason


@pytest.mark.parametrize("call", ["aclInit", "aclrtGetDeviceCount", "aclrtGetVersion"])
def test_failing_call_is_an_error_that_names_it(build: Callable[[str], None], call: str) -> None:
    build(DRIVER.replace(f"int {call}(", f"int {call}() {{ return 999; }}\nint unused_{call}("))
    with pytest.raises(DriverError) as caught:
        descriptor.probe()
    assert (caught.value.call, caught.value.code) == (call, 999)


@pytest.mark.parametrize("call", ["aclInit", "aclrtGetDeviceCount", "aclrtGetSocName"])
def test_missing_symbol_is_an_error_that_names_it(build: Callable[[str], None], call: str) -> None:
    build(DRIVER.replace(f"{call}(", f"renamed_{call}("))
    with pytest.raises(BackendBroken, match=f"has no function {call}$"):
        descriptor.probe()


def test_discovery_records_the_device_as_unavailable(build: Callable[[str], None]) -> None:
    build(DRIVER)
    (record,) = installed(refresh=True).records("ascend")
    assert record.state is BackendState.UNAVAILABLE
    assert [device.simulated for device in record.devices] == [False]
    with pytest.raises(BackendUnavailable, match="torch_npu is not installed"):
        resolve_backend("ascend")
