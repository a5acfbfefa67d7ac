"""A backend's classes compared with the contract.

They are imported for it, and import what they need (torch, kernels): `faulty_classes` does it in a process of its own, so that whoever asks
imports nothing, and what ends that process is an answer too.
"""

from __future__ import annotations

import gc
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial

from hardpoint.interfaces import (
    AttentionBackend,
    BackendDescriptor,
    Collectives,
    Contract,
    DeviceAllocator,
    GraphRunner,
    KernelSet,
    Platform,
    Worker,
)
from hardpoint.interfaces.errors import CapabilityRefused, ContractError
from hardpoint.plugins.guard import BackendCodeFailed, call_backend
from hardpoint.plugins.loader import installed
from hardpoint.plugins.record import BackendRecord, BackendState

CONTRACTS: dict[str, type[Contract]] = {
    "allocator": DeviceAllocator,
    "attention": AttentionBackend,
    "worker": Worker,
    "platform": Platform,
    "kernels": KernelSet,
    "graph_runner": GraphRunner,
    "collectives": Collectives,
}
"""The contract of each part that a descriptor's factories give."""

TIME_LIMIT = 60.0
"""Seconds that a factory may take: it imports torch, most often."""


def part_problems(descriptor: BackendDescriptor, part: str, *, may_refuse: bool) -> Iterator[str]:
    """Yield what is wrong with the class that a part's factory gives; nothing for a part that is not there.

    Args:
        part: one of `CONTRACTS`.
        may_refuse: the factory may raise CapabilityRefused, because the backend cannot be used here.
    """
    factory: Callable[[], type[Contract]] | None = getattr(descriptor, part)
    contract = CONTRACTS[part]
    if factory is None:
        return
    try:
        made = factory()
    except CapabilityRefused as refusal:
        if not may_refuse:
            yield f"{part} is refused although its devices can be used ({refusal})"
        return
    except ContractError as error:
        yield f"{part}: {error}"
        return
    if not (inspect.isclass(made) and issubclass(made, contract)):
        yield f"{part} gives {made!r}, which does not derive from {contract.__name__}"
    elif inspect.isabstract(made):
        missing = ", ".join(sorted(made.__abstractmethods__))
        yield f"{part} gives {made.__name__}, which leaves out {missing}"


def faulty_classes(record: BackendRecord, time_limit: float = TIME_LIMIT) -> tuple[str, ...]:
    """Return what is wrong with the classes of a backend, one sentence each, found out in a process of its own."""
    command = [sys.executable, "-m", __name__, record.name, str(time_limit)]
    try:
        ended = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=len(CONTRACTS) * time_limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return (f"the process that imported its classes did not end within {len(CONTRACTS) * time_limit:g} s",)
    if ended.returncode or not ended.stdout:
        last = ended.stderr.strip().splitlines()[-1:]
        return (": ".join([f"the process that imported its classes ended with status {ended.returncode}", *last]),)
    problems: list[str] = json.loads(ended.stdout)
    return tuple(problems)


def _problems(name: str, time_limit: float) -> Iterator[str]:
    for record in installed().records(name):
        for part in CONTRACTS if record.descriptor is not None else ():
            try:
                yield from call_backend(f"its {part}", partial(_of_part, record, part), time_limit)
            except BackendCodeFailed as failure:
                # What cannot be used here may lack what its classes import.
                if record.state is BackendState.OK:
                    yield failure.reason


def _of_part(record: BackendRecord, part: str) -> list[str]:
    assert record.descriptor is not None
    return list(part_problems(record.descriptor, part, may_refuse=record.state is BackendState.UNAVAILABLE))


def _main(name: str, time_limit: str) -> None:
    gc.disable()  # what is imported stays to the end
    # Libraries print on standard output as they like: the answer goes to a copy of it, and everything else to standard error.
    reply = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    json.dump(list(_problems(name, float(time_limit))), reply)
    reply.flush()
    os._exit(0)


if __name__ == "__main__":
    _main(*sys.argv[1:])
