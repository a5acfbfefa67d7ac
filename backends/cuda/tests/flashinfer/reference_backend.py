"""A backend for the conformance suite: FlashInfer's adapter over a reference FlashInfer, with the host's memory and worker. Simulated.

`HARDPOINT_ATTENTION` is that of a user: `flashinfer` for what FlashInfer claims alone.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import plain_base
import pluggy

import hardpoint_cpu.descriptor as cpu
import hardpoint_cuda.descriptor as cuda
from hardpoint.interfaces import BackendDescriptor, Capabilities, Device, GraphRunner, ProbeResult
from hardpoint.triton.build import TorchBuild

if TYPE_CHECKING:
    from hardpoint.interfaces import AttentionBackend

NAME = "flashinfer_reference"

# The reference takes FlashInfer's place, and plain attention Triton's.
TorchBuild.requirements = lambda self: ()


def probe() -> ProbeResult:
    return ProbeResult((Device(NAME, 0, "reference FlashInfer on the host", "cpu", simulated=True),))


def capabilities(device: Device) -> Capabilities:
    """Claim the adapter's attention, with the heads that are soon computed, and the host's memory."""
    host = cpu.hardpoint_backend().capabilities(device)
    found = cuda.hardpoint_backend().capabilities(device)
    attention = dataclasses.replace(found.attention, max_context=4096)
    return dataclasses.replace(found, attention=attention, memory=host.memory)


def attention() -> type[AttentionBackend]:
    from hardpoint_cuda.flashinfer import trial, wrappers
    from hardpoint_cuda.flashinfer.attention import FlashInferAttention

    # Little work; and a workspace that is too small for captured steps, which ask for more.
    trial.SEQUENCES, trial.CONTEXT, trial.RUNS = 4, 40, 1
    wrappers.WORKSPACE = 1 << 16

    class Adapter(FlashInferAttention):
        def __init__(self, device: Device) -> None:
            super().__init__(device, plain_base.PlainBase(capabilities(device).attention), is_named=True)

    return Adapter


def graph_runner() -> type[GraphRunner]:
    from hardpoint_simulators.triton_interpreter.graphs import RecordedCalls

    return RecordedCalls


@pluggy.HookimplMarker("hardpoint")
def hardpoint_backend() -> BackendDescriptor:
    host = cpu.hardpoint_backend()
    return BackendDescriptor(
        name=NAME,
        vendor="tests",
        api=(1, 1),
        probe=probe,
        capabilities=capabilities,
        allocator=host.allocator,
        attention=attention,
        worker=host.worker,
        graph_runner=graph_runner,
        accelerator=False,
    )
