"""The simulated CUDA runtime: the same machine as the driver's, and no success for what cannot be computed."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hardpoint_simulators import Simulator, library

from .drivers import Cuda, G
from .test_contexts import in_thread

NOT_SUPPORTED = 801


class Runtime:
    """The runtime's functions, by name."""

    def __init__(self, driver: Cuda) -> None:
        self.driver = driver
        self.simulator = Simulator("cudart")
        self.library = ctypes.CDLL(str(library("cudart")))

    def call(self, name: str, *arguments: Any) -> int:
        wide = (ctypes.c_uint64(value & (1 << 64) - 1) if isinstance(value, int) else value for value in arguments)
        return int(self.library[name](*wide))

    def make(self, name: str, *arguments: Any) -> tuple[int, int]:
        out = ctypes.c_uint64()
        code = self.call(name, ctypes.byref(out), *arguments)
        return code, out.value

    def text(self, name: str, code: int) -> str:
        function = self.library[name]
        function.restype = ctypes.c_char_p
        return bytes(function(code)).decode()


@pytest.fixture
def runtime(cuda: Cuda) -> Iterator[Runtime]:
    opened = Runtime(cuda)
    opened.call("cudaGetLastError")
    yield opened
    cuda.use(0)


def test_runtime_and_driver_are_one_machine(runtime: Runtime) -> None:
    code, address = runtime.make("cudaMalloc", 100)
    assert code == 0
    assert runtime.driver.simulator.stats().allocations == runtime.simulator.stats().allocations == 1
    assert runtime.driver.write(address, b"through the driver") == 0
    buffer = ctypes.create_string_buffer(18)
    assert runtime.call("cudaMemcpy", buffer, address, 18, 2) == 0
    assert buffer.raw == b"through the driver"
    assert runtime.call("cudaFree", address) == 0
    assert runtime.simulator.used() == 0


def test_runtime_reaches_mapped_memory_and_not_unmapped(runtime: Runtime) -> None:
    address, _ = runtime.driver.block()
    buffer = ctypes.create_string_buffer(8)
    assert runtime.call("cudaMemset", address, 7, 8) == 0
    assert runtime.call("cudaMemcpy", buffer, address, 8, 2) == 0
    assert buffer.raw == b"\x07" * 8
    runtime.driver.unmap(address, G)
    assert runtime.call("cudaMemcpy", buffer, address, 8, 2) == 700
    assert runtime.call("cudaPeekAtLastError") == runtime.call("cudaGetLastError") == 700
    assert runtime.call("cudaGetLastError") == 0
    assert runtime.text("cudaGetErrorName", 700) == "cudaErrorIllegalAddress"
    assert runtime.text("cudaGetErrorString", 700) == "an illegal memory access was encountered"


@pytest.mark.parametrize(
    "name",
    [
        "cudaLaunchKernel",
        "__cudaLaunchKernel",
        "cudaLaunchKernelExC",
        "cudaMallocAsync",
        "__cudaGetKernel",
    ],
)
def test_what_would_compute_fails_and_sets_the_last_error(runtime: Runtime, name: str) -> None:
    assert runtime.call(name) == NOT_SUPPORTED
    assert runtime.call("cudaGetLastError") == NOT_SUPPORTED


def test_runtime_calls_are_counted_and_made_to_fail_by_their_own_names(runtime: Runtime) -> None:
    runtime.simulator.fail("cudaMalloc", code=2)
    assert runtime.make("cudaMalloc", 100)[0] == 2
    assert runtime.simulator.stats().allocations == 0
    assert runtime.make("cudaMalloc", 100)[0] == 0
    assert runtime.simulator.calls()["cudaMalloc"] == 2


def test_driver_failure_becomes_the_runtimes(runtime: Runtime) -> None:
    runtime.simulator.capacity = G
    assert runtime.make("cudaMalloc", 2 * G)[0] == 2
    assert runtime.text("cudaGetErrorName", 2) == "cudaErrorMemoryAllocation"


def test_thread_without_a_context_gets_the_primary_one(runtime: Runtime) -> None:
    assert in_thread(lambda: runtime.make("cudaMalloc", 100)[0]) == 0
    assert in_thread(lambda: runtime.make("cudaGetDevice")) == (0, 0)


def test_device_is_a_threads_own(runtime: Runtime) -> None:
    runtime.simulator.set("devices", 2)
    assert runtime.make("cudaGetDeviceCount") == (0, 2)
    assert runtime.call("cudaSetDevice", 1) == 0
    assert runtime.make("cudaGetDevice") == (0, 1)
    assert runtime.driver.make("cuCtxGetDevice") == (0, 1)
    assert in_thread(lambda: runtime.make("cudaGetDevice")) == (0, 0)
    assert runtime.make("cudaMalloc", 100)[0] == 0
    assert (runtime.simulator.used(0), runtime.simulator.used(1)) == (0, G)
    assert runtime.call("cudaSetDevice", 2) == 101


def test_device_properties_have_the_true_layout(runtime: Runtime) -> None:
    properties = ctypes.create_string_buffer(1008 + 16)
    ctypes.memset(ctypes.addressof(properties) + 1008, 0xEE, 16)
    assert runtime.call("cudaGetDeviceProperties", properties, 0) == 0
    integers = {"major": 360, "minor": 364, "multiProcessorCount": 384, "warpSize": 308, "l2CacheSize": 596}
    found = {name: int.from_bytes(properties.raw[at : at + 4], "little") for name, at in integers.items()}
    assert found == {"major": 9, "minor": 0, "multiProcessorCount": 132, "warpSize": 32, "l2CacheSize": 50 << 20}
    assert properties.raw.startswith(b"Simulated CUDA device\0")
    assert int.from_bytes(properties.raw[288:296], "little") == runtime.simulator.capacity
    assert properties.raw[1008:] == b"\xee" * 16
    assert runtime.call("cudaGetDeviceProperties", properties, 5) == 101


class PointerAttributes(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("device", ctypes.c_int),
        ("device_pointer", ctypes.c_void_p),
        ("host_pointer", ctypes.c_void_p),
        ("reserved", ctypes.c_long * 8),
    )


def test_pointers_tell_where_they_point(runtime: Runtime) -> None:
    address, _ = runtime.driver.block()
    pinned, buffer = runtime.driver.pinned(4096), ctypes.create_string_buffer(8)
    attributes = PointerAttributes()
    for pointer, kind in ((address, 2), (pinned, 1), (ctypes.addressof(buffer), 0)):
        assert runtime.call("cudaPointerGetAttributes", ctypes.byref(attributes), pointer) == 0
        assert attributes.type == kind
    assert runtime.call("cudaGetLastError") == 0


def test_streams_and_events_work_and_nothing_is_captured(runtime: Runtime) -> None:
    runtime.simulator.set("deferred", 1)
    address, _ = runtime.driver.block()
    _, stream = runtime.make("cudaStreamCreateWithFlags", 1)
    _, event = runtime.make("cudaEventCreateWithFlags", 2)
    assert runtime.call("cudaMemsetAsync", address, 5, 16, stream) == 0
    assert runtime.call("cudaEventRecord", event, stream) == 0
    assert runtime.call("cudaEventQuery", event) == 600
    assert runtime.call("cudaEventQuery", event) == 0
    status = ctypes.c_int(9)
    assert runtime.call("cudaStreamIsCapturing", stream, ctypes.byref(status)) == 0
    assert status.value == 0
    assert runtime.driver.read(address, 16) == (0, b"\x05" * 16)
    assert runtime.call("cudaStreamDestroy", stream) == runtime.call("cudaEventDestroy", event) == 0


def test_rows_are_copied_with_their_pitches(runtime: Runtime) -> None:
    address, _ = runtime.driver.block()
    _, stream = runtime.make("cudaStreamCreate")
    source = ctypes.create_string_buffer(b"abcXdefX", 8)
    assert runtime.call("cudaMemcpy2DAsync", address, 3, source, 4, 3, 2, 1, stream) == 0
    assert runtime.call("cudaStreamSynchronize", stream) == 0
    assert runtime.driver.read(address, 6) == (0, b"abcdef")


def test_wrong_direction_is_refused(runtime: Runtime) -> None:
    buffer = ctypes.create_string_buffer(8)
    assert runtime.call("cudaMemcpy", buffer, ctypes.addressof(buffer), 8, 9) == 21


def test_driver_functions_are_found_by_name(runtime: Runtime) -> None:
    function, status = ctypes.c_void_p(), ctypes.c_int(9)
    found = (ctypes.byref(function), 13000, 0, ctypes.byref(status))
    for name in (b"cuMemCreate", b"cuMemGetInfo", b"cuGetErrorString"):
        assert runtime.call("cudaGetDriverEntryPointByVersion", name, *found) == 0
        assert (bool(function.value), status.value) == (True, 0)
    assert runtime.call("cudaGetDriverEntryPointByVersion", b"cuNoSuchFunction", *found) == NOT_SUPPORTED
    assert status.value == 1


@pytest.mark.parametrize("order", [("cuda", "cudart"), ("cudart", "cuda")])
def test_order_of_loading_does_not_matter(order: tuple[str, str]) -> None:
    script = """
import ctypes, sys
from hardpoint_simulators import library
opened = {name: ctypes.CDLL(str(library(name))) for name in sys.argv[1:]}
driver, runtime = opened["cuda"], opened["cudart"]
pointer = ctypes.c_void_p()
assert runtime.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(100)) == 0
context = ctypes.c_void_p()
assert driver.cuCtxGetCurrent(ctypes.byref(context)) == 0 and context.value
assert driver.cuMemFree_v2(pointer) == 0
assert runtime.cudaFree(pointer) == 1
"""
    done = subprocess.run([sys.executable, "-c", script, *order], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_real_driver_on_the_library_path_is_not_taken_by_the_runtime(tmp_path: Path) -> None:
    other = tmp_path / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "/dev/null", "-o", str(other)], check=True)
    script = "import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).cudaGetDeviceCount(ctypes.byref(ctypes.c_int())))"
    command = [sys.executable, "-c", script, str(library("cudart"))]
    environment = os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
