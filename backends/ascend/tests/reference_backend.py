"""A backend for the conformance suite: Ascend's attention over reference operators, with memory and worker of a host. Simulated."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pluggy

import hardpoint_ascend.capabilities
import hardpoint_ascend.descriptor as ascend
import hardpoint_cpu.descriptor as cpu
from hardpoint.interfaces import BackendDescriptor, Capabilities, Device, ProbeResult

if TYPE_CHECKING:
    from hardpoint_ascend.attention import AscendAttention

NAME = "ascend_reference"

# The operators take torch_npu's place.
hardpoint_ascend.capabilities.requirements = lambda: ()


def probe() -> ProbeResult:
    name = "Ascend910B of reference operators on the host"
    return ProbeResult((Device(NAME, 0, name, "cpu", simulated=True),))


def capabilities(device: Device) -> Capabilities:
    """Claim Ascend's attention and the host's memory."""
    host = cpu.hardpoint_backend().capabilities(device)
    return dataclasses.replace(ascend.hardpoint_backend().capabilities(device), memory=host.memory)


def attention() -> type[AscendAttention]:
    from reference_operators import register

    register()
    return ascend.hardpoint_backend().attention()  # type: ignore[return-value]


@pluggy.HookimplMarker("hardpoint")
def hardpoint_backend() -> BackendDescriptor:
    host = cpu.hardpoint_backend()
    return BackendDescriptor(
        name=NAME,
        vendor="tests",
        api=(2, 2),
        probe=probe,
        capabilities=capabilities,
        allocator=host.allocator,
        attention=attention,
        worker=host.worker,
        accelerator=False,
    )
