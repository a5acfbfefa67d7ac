"""A backend for the conformance suite: Ascend's attention over reference operators, with memory and worker of a host. Simulated.

Where graphs are asked for, it has Ascend's, over simulated ones of torch_npu.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pluggy

import hardpoint_ascend.descriptor as ascend
import hardpoint_cpu.descriptor as cpu
from hardpoint.interfaces import BackendDescriptor, Capabilities, Device, ProbeResult
from hardpoint_ascend import capabilities as ascend_capabilities

if TYPE_CHECKING:
    from hardpoint.interfaces import DeviceAllocator
    from hardpoint_ascend.attention import AscendAttention
    from hardpoint_ascend.graphs import AscendGraphRunner
    from hardpoint_ascend.kernels import AscendKernels

NAME = "ascend_reference"


def probe() -> ProbeResult:
    name = "Ascend910B of reference operators on the host"
    return ProbeResult((Device(NAME, 0, name, "cpu", simulated=True),))


def capabilities(device: Device) -> Capabilities:
    """Claim Ascend's attention and the host's memory."""
    host = cpu.hardpoint_backend().capabilities(device)
    return dataclasses.replace(ascend.hardpoint_backend().capabilities(device), memory=host.memory)


def attention() -> type[AscendAttention]:
    from .reference_operators import register

    register()
    return ascend.hardpoint_backend().attention()  # type: ignore[return-value]


def kernels() -> type[AscendKernels]:
    from .reference_operators import register

    register()
    return ascend.hardpoint_backend().kernels()  # type: ignore[misc, return-value]


def allocator() -> type[DeviceAllocator]:
    if not ascend_capabilities.graphs_wanted():
        return cpu.hardpoint_backend().allocator()
    from .simulated_graphs import SimulatedAllocator

    return SimulatedAllocator


def graph_runner() -> type[AscendGraphRunner]:
    from .simulated_graphs import install

    install()
    return ascend.hardpoint_backend().graph_runner()  # type: ignore[misc, return-value]


def descriptor() -> BackendDescriptor:
    """Return the descriptor, whose parts need torch_npu or something in its place."""
    return BackendDescriptor(
        name=NAME,
        vendor="tests",
        api=(1, 1),
        probe=probe,
        capabilities=capabilities,
        allocator=allocator,
        attention=attention,
        worker=cpu.hardpoint_backend().worker,
        kernels=kernels,
        graph_runner=graph_runner,
        accelerator=False,
    )


@pluggy.HookimplMarker("hardpoint")
def hardpoint_backend() -> BackendDescriptor:
    # The operators take torch_npu's place.
    ascend_capabilities.requirements = lambda: ()
    return descriptor()
