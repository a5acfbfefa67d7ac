"""The probe of the CUDA driver: what it makes of drivers that are missing, empty, failing or sound."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from hardpoint.interfaces import (
    AttentionLayer,
    AttentionRequest,
    Device,
    DeviceAllocator,
    DType,
    GraphLevel,
    IntSet,
    TorchPoolScope,
)
from hardpoint.interfaces.errors import BackendBroken, BackendUnavailable, CapabilityRefused, DriverError
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


DEVICE = Device("cuda", 0, "any", "any")
REQUEST = AttentionRequest((AttentionLayer(8, 8, 64, 0.125),), DType.BFLOAT16, DType.BFLOAT16, 16, 4096)


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


def test_memory_works_without_torchs_build_and_every_other_part_is_refused() -> None:
    backend = descriptor.hardpoint_backend()
    claims = backend.capabilities(DEVICE)
    assert claims.explain(REQUEST)
    assert claims.memory.sleep_levels == {0, 1, 2}
    assert claims.memory.torch_pool is TorchPoolScope.NONE
    assert "no attention: the installed torch is not built for CUDA" in claims.notes
    assert (claims.tensor_parallel, claims.collectives) == (IntSet(), ())
    assert issubclass(backend.allocator(), DeviceAllocator)
    for part in (backend.attention, backend.worker):
        with pytest.raises(CapabilityRefused, match=r"not built for CUDA.*Install torch's build for CUDA"):
            part()


def test_everything_is_claimed_where_nothing_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = descriptor.hardpoint_backend()
    monkeypatch.setattr(capabilities, "requirements", tuple)
    claims = backend.capabilities(DEVICE)
    assert claims.explain(REQUEST) == ()
    assert claims.attention.graph_level is GraphLevel.UNIFORM_DECODE
    assert (claims.collectives, 2 in claims.tensor_parallel) == ((), False)
    monkeypatch.setattr(capabilities, "has_nccl", lambda: True)
    claims = backend.capabilities(DEVICE)
    assert (claims.collectives, 8 in claims.tensor_parallel, 9 in claims.tensor_parallel) == (("nccl",), True, False)
    assert any("not verified on hardware" in note for note in claims.notes)


@pytest.mark.parametrize(("found", "usable"), [("9.0", True), ("8.0", True), ("7.5", False), ("10.0", True)])
def test_attention_needs_what_the_compiler_supports(
    build: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, found: str, usable: bool
) -> None:
    major, minor = found.split(".")
    build(DRIVER.replace("attribute == 75 ? 9 : 0", f"attribute == 75 ? {major} : {minor}"))
    monkeypatch.setattr(capabilities, "requirements", tuple)
    probed = descriptor.probe()
    claims = capabilities.capabilities(probed.devices[0])
    expected = "" if usable else "the device has compute capability 7.5, and Triton's kernels need 8.0"
    assert probed.reason == expected
    assert bool(claims.explain(REQUEST)) is not usable
    assert (f"no attention: {expected}" in claims.notes) is not usable
