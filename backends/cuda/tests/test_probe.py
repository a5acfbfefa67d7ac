"""The probe of the CUDA driver: what it makes of drivers that are missing, empty, failing or sound."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from hardpoint.interfaces.errors import BackendBroken, BackendUnavailable, DriverError
from hardpoint.plugins import BackendState, installed, resolve_backend
from hardpoint_cuda import capabilities, descriptor

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


def test_device_is_listed_with_what_is_missing_to_compute_on_it(build: Callable[[str], None]) -> None:
    build(DRIVER)
    found = descriptor.probe()
    (device,) = found.devices
    assert (device.name, device.torch_device, device.driver_version) == ("Test GPU", "cuda:0", "13.1")
    assert device.total_memory == 6 << 30
    assert device.properties["pci_bus"] == "0000:01:00.0"
    assert device.properties["compute_capability"] == "9.0"
    assert found.reason.startswith("the installed torch is not built for CUDA")


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("return flags;", "return 100;", "no device found"),
        ("return flags;", "return 34;", "a stub library and not a driver"),
        ("*count = 1;", "*count = 0;", "finds no device"),
    ],
)
def test_driver_without_a_device_is_unavailable(build: Callable[[str], None], old: str, new: str, reason: str) -> None:
    assert old in DRIVER
    build(DRIVER.replace(old, new))
    found = descriptor.probe()
    assert found.devices == ()
    assert reason in found.reason


@pytest.mark.parametrize(
    "call", ["cuInit", "cuDriverGetVersion", "cuDeviceGetCount", "cuDeviceGetName", "cuDeviceTotalMem_v2"]
)
def test_failing_call_is_an_error_that_names_it(build: Callable[[str], None], call: str) -> None:
    build(DRIVER.replace(f"int {call}(", f"int {call}() {{ return 999; }}\nint unused_{call}("))
    with pytest.raises(DriverError) as caught:
        descriptor.probe()
    assert (caught.value.call, caught.value.code) == (call, 999)


@pytest.mark.parametrize("call", ["cuInit", "cuDeviceGetCount", "cuDeviceTotalMem_v2"])
def test_missing_symbol_is_an_error_that_names_it(build: Callable[[str], None], call: str) -> None:
    build(DRIVER.replace(f"{call}(", f"renamed_{call}("))
    with pytest.raises(BackendBroken, match=f"has no function {call}$"):
        descriptor.probe()


def test_discovery_records_the_device_as_unavailable(build: Callable[[str], None]) -> None:
    build(DRIVER)
    (record,) = installed(refresh=True).records("cuda")
    assert record.state is BackendState.UNAVAILABLE
    assert [device.simulated for device in record.devices] == [False]
    with pytest.raises(BackendUnavailable, match="not built for CUDA"):
        resolve_backend("cuda")


@pytest.mark.parametrize(
    ("major", "reason"), [(9, ""), (7, "the device has compute capability 7.0, and Triton's kernels need 8.0")]
)
def test_device_that_cannot_compute_is_the_reason(
    build: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, major: int, reason: str
) -> None:
    build(DRIVER.replace("attribute == 75 ? 9 : 0", f"attribute == 75 ? {major} : 0"))
    monkeypatch.setattr(capabilities, "requirements", tuple)
    found = descriptor.probe()
    assert (len(found.devices), found.reason) == (1, reason)
