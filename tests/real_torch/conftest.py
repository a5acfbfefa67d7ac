"""Real builds of torch over simulated drivers: everything here is simulated but torch, its bindings, and our own code.

The tests run in an environment with a vendor's build of torch (`make test-torch`), which names it in HARDPOINT_REAL_TORCH and the
folder of the generated libraries in HARDPOINT_TORCH_LIBRARIES. Elsewhere they are not collected, nor is what is another build's alone.
"""

from __future__ import annotations

import gc
import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hardpoint.interfaces import BackendDescriptor, Device

if TYPE_CHECKING:
    from hardpoint.interfaces import DeviceAllocator
    from hardpoint_simulators import Simulator

BUILD = os.environ.get("HARDPOINT_REAL_TORCH", "")
LIBRARIES = os.environ.get("HARDPOINT_TORCH_LIBRARIES", "")

collect_ignore_glob = [f"test_{build}.py" for build in ("cuda", "ascend") if build != BUILD] if BUILD else ["test_*.py"]

SETTINGS = {"HARDPOINT_SIM_DEVICES": "2", "HARDPOINT_SIM_CAPACITY": str(1 << 30)}
QUESTIONS = ("aclrtGetDevice: no context is current", "aclrtGetCurrentContext: no context is current")
"""What the simulator notes when a thread without a context asks for it, which torch_npu and our driver may."""

START = """
import gc
gc.disable()  # what is imported stays: to go through it again and again takes a fifth of the time
from pathlib import Path
from hardpoint_simulators.torch_libraries import preload
preload({build!r}, Path({libraries!r}))
import os, sys, threading, torch
from hardpoint.interfaces import Device, DType, Policy, SleepPlan, SleepTier
from hardpoint_{backend}.descriptor import hardpoint_backend
from hardpoint_simulators import Simulator
simulator = Simulator({backend!r})
DEVICE = Device({backend!r}, 0, "simulated", "{torch_type}:0", simulated=True)
gc.enable()
"""
"""How a process begins that uses torch over a simulated driver."""

STATUSES = """
import os
statuses = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
"""
"""What it does before, to tell by its standard output how forks end; imports may print."""

FORKS = """
import json
gc.freeze()  # what is imported: a garbage collection in a fork neither goes through it nor copies its pages
for line in sys.stdin:
    asked = json.loads(line)
    child = os.fork()
    if child == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=statuses, flush=True)
else:
    sys.exit()
for descriptor, name in enumerate(("stdout", "stderr"), 1):
    os.dup2(os.open(os.path.join(asked["output"], name), os.O_WRONLY | os.O_CREAT), descriptor)
os.chdir(asked["folder"])
os.environ.update(asked["environment"])
exec(asked["code"])
"""
"""How it goes on to do so in forks, each of which ends as an interpreter does: importing torch takes seconds.

Both builds read the settings of their allocators and queues where a device is first used, which is in a fork.
"""

CHILD_SECONDS = 240.0

EXPANDABLE = "max_split_size_mb:64, expandable_segments : True"
"""Settings of torch's allocator."""


def pytest_configure() -> None:
    """Load the simulated driver before any test module imports torch."""
    if not BUILD:
        return
    gc.disable()  # to the end of pytest's collection, as in START
    from hardpoint_simulators.torch_libraries import preload

    os.environ.update({name: value for name, value in SETTINGS.items() if name not in os.environ})
    preload(BUILD, Path(LIBRARIES))  # type: ignore[arg-type]


def pytest_collection_finish() -> None:
    """Leave what is imported out of garbage collection, which most tests ask for, to see memory given back."""
    gc.freeze()
    gc.enable()


@dataclass(frozen=True)
class Machine:
    """A simulated machine and the torch on it.

    Attributes:
        backend: name of our backend.
        torch_type: what torch calls the device.
        create: the vendor's function that takes device memory.
        out_of_memory: the vendor's code for it.
        settings: the environment variables of torch's allocator settings.
        descriptor: our backend's.
        devices: as our backend's probe found them.
    """

    backend: str
    torch_type: str
    create: str
    out_of_memory: int
    settings: tuple[str, ...]
    simulator: Simulator
    descriptor: BackendDescriptor
    devices: tuple[Device, ...]

    @property
    def torch(self) -> Any:
        """Torch's module for the device."""
        import torch

        return getattr(torch, self.torch_type)

    def allocator(self, index: int = 0) -> DeviceAllocator:
        """Return our allocator for a device, made as the engine makes it."""
        allocator: DeviceAllocator = self.descriptor.make("allocator", self.devices[index])
        return allocator

    def used(self, index: int = 0) -> int:
        """Return the bytes in use on a device, as the simulator counts them."""
        return self.simulator.used(index)

    def broken_rules(self) -> list[str]:
        """Return the rules of the driver that were broken so far."""
        return [rule for rule in self.simulator.violations() if rule not in QUESTIONS]

    def fail_create(self, times: int) -> None:
        """Let the next creations of device memory fail for want of memory; negative: all."""
        self.simulator.fail(self.create, code=self.out_of_memory, times=times)


_VENDORS: dict[str, dict[str, Any]] = {
    "cuda": {
        "torch_type": "cuda",
        "create": "cuMemCreate",
        "out_of_memory": 2,
        "settings": ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
    },
    "ascend": {
        "torch_type": "npu",
        "create": "aclrtMallocPhysical",
        "out_of_memory": 207001,
        "settings": ("PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
    },
}


@pytest.fixture(scope="session")
def machine() -> Machine:
    """The machine, which lives as long as the process."""
    from importlib import import_module

    from hardpoint_simulators import Simulator

    simulator = Simulator(BUILD)  # type: ignore[arg-type]
    os.environ[f"HARDPOINT_{BUILD.upper()}_DRIVER"] = str(simulator.path)
    descriptor = import_module(f"hardpoint_{BUILD}.descriptor")
    return Machine(
        BUILD,
        simulator=simulator,
        descriptor=descriptor.hardpoint_backend(),
        devices=descriptor.probe().devices,
        **_VENDORS[BUILD],
    )


@pytest.fixture
def allocator(machine: Machine) -> Iterator[DeviceAllocator]:
    """Our allocator for the first device; what a test leaves is given back, and the driver's rules were kept."""
    gc.collect()
    gc.freeze()  # what was imported since
    machine.torch.empty_cache()
    broken_before = len(machine.broken_rules())
    made = machine.allocator()
    yield made
    machine.simulator.clear_faults()
    made.wake()
    made.close()
    gc.collect()
    machine.torch.empty_cache()
    assert machine.broken_rules()[broken_before:] == []


@pytest.fixture
def tolerant_allocator(machine: Machine) -> Iterator[DeviceAllocator]:
    """As `allocator`, for tests that break the driver's rules on purpose, through torch."""
    made = machine.allocator()
    yield made
    made.wake()
    made.close()


@pytest.fixture(scope="session")
def imported(machine: Machine) -> Iterator[subprocess.Popen[str]]:
    """A process that has imported torch, has not touched a device, and forks for each line that it reads."""
    start = START.format(build=BUILD, libraries=LIBRARIES, backend=machine.backend, torch_type=machine.torch_type)
    with subprocess.Popen(
        [sys.executable, "-c", STATUSES + start + FORKS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture
def run_child(
    imported: subprocess.Popen[str], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run code in a process of its own on a machine of its own, in an environment of its own, and return how it ended.

    It is a fork of `imported`, and ends as an interpreter does.
    """
    assert imported.stdin is not None
    assert imported.stdout is not None
    requests, statuses = imported.stdin, imported.stdout

    def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
        output = tmp_path_factory.mktemp("output")
        asked = {"code": code, "folder": str(tmp_path), "environment": environment, "output": str(output)}
        print(json.dumps(asked), file=requests, flush=True)
        if not select.select([statuses], [], [], CHILD_SECONDS)[0]:
            imported.kill()
            raise subprocess.TimeoutExpired(code, CHILD_SECONDS)
        status = int(statuses.readline())
        stdout, stderr = ((output / name).read_text() for name in ("stdout", "stderr"))
        return subprocess.CompletedProcess(code, status, stdout, stderr)

    return run


@pytest.fixture
def unused_port() -> int:
    """A port of this machine where ranks can meet."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
