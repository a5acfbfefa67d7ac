"""A device's memory as its driver reports it, asked in a process of its own.

Only a started device tells, and starting one has lasting effects: memory of its own stays taken, forked children can no longer use it.
So a short-lived interpreter makes the backend's allocator, asks it, and ends. It is started only on request.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from dataclasses import asdict
from typing import Any

from hardpoint.interfaces import BackendDescriptor, Device, DeviceAllocator, MemoryInfo
from hardpoint.plugins.guard import BackendCodeFailed, call_backend
from hardpoint.plugins.loader import installed
from hardpoint.plugins.record import BackendRecord

TIME_LIMIT = 60.0
"""Seconds until a device must have started and answered."""


def device_memory(
    record: BackendRecord, device: Device, time_limit: float = TIME_LIMIT
) -> tuple[MemoryInfo | None, str]:
    """Return the memory of one of a record's devices, and why it could not be found out where that is None."""
    command = [sys.executable, "-m", __name__, record.name, str(device.index)]
    try:
        # The answer may have to wait for the child's own limit.
        ended = subprocess.run(
            [*command, str(time_limit)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=2 * time_limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None, f"the process that started the device did not end within {2 * time_limit:g} s"
    if ended.returncode or not ended.stdout:
        last = ended.stderr.strip().splitlines()[-1:]
        return None, ": ".join([f"the process that started the device ended with status {ended.returncode}", *last])
    answer: dict[str, Any] = json.loads(ended.stdout)
    if "error" in answer:
        return None, answer["error"]
    return MemoryInfo(answer["free"], answer["total"], tuple(answer["quirks"])), ""


def ask(name: str, index: int, time_limit: float) -> dict[str, Any]:
    """Start a device in this process and return its memory as plain data, or the error."""
    for record in installed().records(name):
        if record.descriptor is not None and index < len(record.devices):
            return _ask(record.descriptor, record.devices[index], time_limit)
    return {"error": f"backend '{name}' has no device {index}"}


def _ask(descriptor: BackendDescriptor, device: Device, time_limit: float) -> dict[str, Any]:
    def memory() -> MemoryInfo:
        allocator: DeviceAllocator = descriptor.make("allocator", device)
        return allocator.memory_info()

    try:
        return asdict(call_backend("its allocator", memory, time_limit))
    except BackendCodeFailed as failure:
        return {"error": failure.reason}


def _main(name: str, index: str, time_limit: str) -> None:
    gc.disable()  # what is imported stays to the end
    # Drivers print on standard output as they like: the answer goes to a copy of it, and everything else to standard error.
    reply = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    json.dump(ask(name, int(index), float(time_limit)), reply)
    reply.flush()
    # Drivers' destructors run in no known order and are of no use to a process that only asked a question.
    os._exit(0)


if __name__ == "__main__":
    _main(*sys.argv[1:])
