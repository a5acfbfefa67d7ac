"""The backend's descriptor: found through the entry point `triton_interpreter`, imported without torch and without triton."""

from __future__ import annotations

import importlib.util
import os
import platform
from dataclasses import replace
from typing import TYPE_CHECKING

import pluggy

from hardpoint.interfaces import (
    BackendDescriptor,
    Capabilities,
    Determinism,
    Device,
    GraphLevel,
    IntSet,
    MemoryCapabilities,
    ProbeResult,
    SleepTier,
    TorchPoolScope,
)
from hardpoint.interfaces.errors import CapabilityRefused
from hardpoint.triton import triton_attention_capabilities
from hardpoint.triton.choice import attention_choice

if TYPE_CHECKING:
    from hardpoint.interfaces import Worker
    from hardpoint.triton import TritonAttention
    from hardpoint_simulators.triton_interpreter.graphs import RecordedCalls
    from hardpoint_simulators.triton_interpreter.kernels import InterpretedKernels
    from hardpoint_simulators.triton_interpreter.memory import HostMemory

BUDGET = 256 << 20
"""Bytes of the device's memory: the interpreter copies the whole of a cache onto itself at every launch."""
MAX_CONTEXT = 4096

hookimpl = pluggy.HookimplMarker("hardpoint")


def probe() -> ProbeResult:
    """Say whether Triton interprets kernels in this process."""
    missing = [name for name in ("triton", "hardpoint_cpu") if importlib.util.find_spec(name) is None]
    if missing:
        return ProbeResult(reason=f"not installed: {', '.join(missing)}")
    if os.environ.get("TRITON_INTERPRET") != "1":
        return ProbeResult(
            reason="TRITON_INTERPRET=1 is not set, so that Triton would compile its kernels for a device"
        )
    device = Device(
        backend="triton_interpreter",
        index=0,
        name="Triton's interpreter",
        torch_device="cpu",
        total_memory=BUDGET,
        driver_version=f"{platform.system()} {platform.release()}",
        simulated=True,
    )
    return ProbeResult((device,))


def capabilities(device: Device) -> Capabilities:
    """Return the kernels' claims, for fewer sizes than they have: a program takes milliseconds for each tile."""
    return Capabilities(
        attention=replace(
            triton_attention_capabilities(GraphLevel.MIXED),
            head_dims=IntSet.of(16, 64, 80, 256),
            block_sizes=IntSet.of(16, 64),
            default_block_size=16,
            group_sizes=IntSet.of(1, 2, 3, 8),
            max_context=MAX_CONTEXT,
        ),
        memory=MemoryCapabilities(
            sleep_levels=frozenset({0, 1, 2}),
            tiers=frozenset(SleepTier),
            elastic=True,
            torch_pool=TorchPoolScope.FACTORY_CALLS,
        ),
        determinism=Determinism.RUN_TO_RUN,
        notes=(f"attention: {attention_choice()}",),
    )


def _allocator() -> type[HostMemory]:
    from hardpoint_simulators.triton_interpreter.memory import HostMemory

    return HostMemory


def _attention() -> type[TritonAttention]:
    from hardpoint_simulators.triton_interpreter.attention import InterpretedAttention

    return InterpretedAttention


def _kernels() -> type[InterpretedKernels]:
    from hardpoint_simulators.triton_interpreter.kernels import InterpretedKernels

    return InterpretedKernels


def _graph_runner() -> type[RecordedCalls]:
    from hardpoint_simulators.triton_interpreter.graphs import RecordedCalls

    return RecordedCalls


def _worker() -> type[Worker]:
    raise CapabilityRefused(
        "the worker of backend 'triton_interpreter' was asked for",
        ["it interprets the kernels of attention and runs no model; `--backend cpu` does"],
    )


@hookimpl
def hardpoint_backend() -> BackendDescriptor:
    """Return the descriptor."""
    return BackendDescriptor(
        name="triton_interpreter",
        vendor="Hardpoint",
        api=(1, 1),
        probe=probe,
        capabilities=capabilities,
        allocator=_allocator,
        attention=_attention,
        worker=_worker,
        kernels=_kernels,
        graph_runner=_graph_runner,
        priority=-100,
        install_hint="Install triton and set TRITON_INTERPRET=1 (`make conformance-triton` does both)",
    )
