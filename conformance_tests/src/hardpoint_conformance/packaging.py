"""Level 0: packaging and contract."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import EntryPoint
from typing import Any

from hardpoint.interfaces import (
    API_VERSION,
    AttentionBackend,
    AttentionCapabilities,
    AttentionFeature,
    BackendDescriptor,
    Capabilities,
    Collectives,
    Contract,
    Determinism,
    Device,
    DeviceAllocator,
    DType,
    GraphLevel,
    GraphRunner,
    IntSet,
    KernelSet,
    MemoryCapabilities,
    ProbeResult,
    SleepTier,
    TorchPoolScope,
    Worker,
)
from hardpoint.interfaces.errors import CapabilityRefused

HEAVY_MODULES = ("torch", "transformers", "triton", "torch_npu", "jax", "tensorflow")
"""What importing a descriptor must not import."""

DRIVER_LIBRARIES = (
    "libcuda.so",
    "libcudart.so",
    "libamdhip64.so",
    "libhsa-runtime64.so",
    "libascendcl.so",
    "libze_loader.so",
)
"""What importing a descriptor must not load (looked for in the process's memory map, on Linux)."""

CONTRACTS: dict[str, type[Contract]] = {
    "allocator": DeviceAllocator,
    "attention": AttentionBackend,
    "worker": Worker,
    "kernels": KernelSet,
    "graph_runner": GraphRunner,
    "collectives": Collectives,
}
"""The contract of each part that a descriptor's factories give."""

_IMPORT = """
import json, pathlib, sys
from importlib.metadata import EntryPoint
EntryPoint(*sys.argv[1:]).load()
maps = pathlib.Path("/proc/self/maps")
json.dump([sorted(sys.modules), maps.read_text() if maps.exists() else ""], sys.stdout)
"""


class NotConformant(AssertionError):
    """A backend does not keep to what is checked.

    Attributes:
        problems: one sentence each.
    """

    def __init__(self, subject: str, problems: list[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(f"{subject}: " + "; ".join(problems))


def check_descriptor_imports_light(entry_point: EntryPoint, time_limit: float = 60.0) -> None:
    """Import what an entry point names in a fresh interpreter, and look at what came with it.

    Args:
        time_limit: seconds for the interpreter.

    Raises:
        NotConformant: the import failed, or imported one of `HEAVY_MODULES`, or loaded one of `DRIVER_LIBRARIES`.
    """
    subject = f"importing {entry_point.value}"
    command = [sys.executable, "-c", _IMPORT, entry_point.name, entry_point.value, entry_point.group]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=time_limit, check=False
        )
    except subprocess.TimeoutExpired:
        raise NotConformant(subject, [f"it took longer than {time_limit:g} s"]) from None
    if ended.returncode:
        raise NotConformant(subject, [f"it failed with exit code {ended.returncode}: {ended.stderr.strip()}"])
    modules, memory_map = json.loads(ended.stdout)
    problems = [f"it imports {name}" for name in HEAVY_MODULES if name in modules]
    problems += [f"it loads {name}" for name in DRIVER_LIBRARIES if name in memory_map]
    if problems:
        raise NotConformant(subject, problems)


def claims_problems(claims: object) -> list[str]:
    """Return what makes claims unreadable: other types than the contract's, or names that it does not know; [] when they are sound."""
    if type(claims) is not Capabilities:
        return [f"capabilities must be Capabilities, not {type(claims).__name__}"]
    attention, memory = claims.attention, claims.memory
    if type(attention) is not AttentionCapabilities or type(memory) is not MemoryCapabilities:
        return ["attention and memory must be AttentionCapabilities and MemoryCapabilities"]
    if not isinstance(attention.kv_dtypes, Mapping):
        return [f"attention.kv_dtypes must be a mapping, not {_kind(attention.kv_dtypes)}"]
    kv_dtypes = {f"attention.kv_dtypes[{key}]": (frozenset, DType, value) for key, value in attention.kv_dtypes.items()}
    sets: dict[str, tuple[type, type, Any]] = {
        "attention.dtypes": (frozenset, DType, attention.dtypes),
        "attention.kv_dtypes": (tuple, DType, tuple(attention.kv_dtypes)),
        **kv_dtypes,
        "attention.features": (frozenset, AttentionFeature, attention.features),
        "memory.sleep_levels": (frozenset, int, memory.sleep_levels),
        "memory.tiers": (frozenset, SleepTier, memory.tiers),
        "quantisation": (frozenset, str, claims.quantisation),
        "collectives": (tuple, str, claims.collectives),
    }
    single: dict[str, tuple[type, Any]] = {
        "attention.default_block_size": (int, attention.default_block_size),
        "attention.max_context": (int, attention.max_context),
        "attention.graph_level": (GraphLevel, attention.graph_level),
        "attention.determinism": (Determinism, attention.determinism),
        "memory.elastic": (bool, memory.elastic),
        "memory.torch_pool": (TorchPoolScope, memory.torch_pool),
        "attention.head_dims": (IntSet, attention.head_dims),
        "attention.block_sizes": (IntSet, attention.block_sizes),
        "attention.group_sizes": (IntSet, attention.group_sizes),
        "tensor_parallel": (IntSet, claims.tensor_parallel),
    }
    problems: list[str] = []
    for name, (collection, kind, values) in sets.items():
        if not isinstance(values, collection):
            problems.append(f"{name} must be a {collection.__name__}, not {_kind(values)}")
        else:
            problems += _unknown(name, kind, values)
    for name, (kind, value) in single.items():
        problems += _unknown(name, kind, (value,))
        if kind is IntSet and type(value) is IntSet:
            limits = [limit for limit in (value.minimum, value.maximum) if limit is not None]
            problems += _unknown(name, int, (*value.values, *limits, value.multiple_of))
    if not problems and not memory.sleep_levels <= {0, 1, 2}:
        problems.append(f"memory.sleep_levels holds {sorted(memory.sleep_levels)}; the contract knows 0, 1 and 2")
    return problems


def _kind(value: object) -> str:
    return type(value).__name__


def _unknown(name: str, kind: type, values: Iterable[object]) -> Iterator[str]:
    unknown = sorted(repr(value) for value in values if type(value) is not kind)
    if unknown:
        yield f"{name} holds {', '.join(unknown)}, which is no {kind.__name__} of the contract"


def check_contract(descriptor: BackendDescriptor) -> None:
    """Check what a descriptor describes: probe, claims and the classes of its parts. Starts no device.

    Where the probe says that the backend can be used, every part must be there; where it cannot, a part may be refused with
    CapabilityRefused, and nothing else.

    Raises:
        NotConformant: with everything that was found.
    """
    problems: list[str] = []
    low, high = descriptor.api
    if not low <= API_VERSION <= high:
        problems.append(f"its contract versions, {low} to {high}, do not include {API_VERSION}")
    result: object = descriptor.probe()
    if not isinstance(result, ProbeResult):
        raise NotConformant(f"backend {descriptor.name}", [*problems, f"its probe returned {type(result).__name__}"])
    for device in result.devices:
        problems += _claims(descriptor, device)
    for part, contract in CONTRACTS.items():
        factory: Callable[[], type[Contract]] | None = getattr(descriptor, part)
        if factory is not None:
            problems += _part(part, factory, contract, may_refuse=bool(result.reason))
    if problems:
        raise NotConformant(f"backend {descriptor.name}", problems)


def _claims(descriptor: BackendDescriptor, device: Device) -> Iterator[str]:
    claims: object = descriptor.capabilities(device)
    if not isinstance(claims, Capabilities):
        yield f"capabilities({device.index}) returned {type(claims).__name__}, not Capabilities"
        return
    attention = claims.attention
    if attention.dtypes != frozenset(attention.kv_dtypes):
        yield "the dtypes it claims and those it claims KV dtypes for differ"
    if attention.dtypes and attention.default_block_size not in attention.block_sizes:
        yield f"its default block size, {attention.default_block_size}, is not among those it claims"
    json.dumps(claims.to_json())


def _part(
    part: str, factory: Callable[[], type[Contract]], contract: type[Contract], *, may_refuse: bool
) -> Iterator[str]:
    try:
        made = factory()
    except CapabilityRefused as refusal:
        if not may_refuse:
            yield f"{part} is refused although its devices can be used ({refusal})"
        return
    if not (inspect.isclass(made) and issubclass(made, contract)):
        yield f"{part} gives {made!r}, which does not derive from {contract.__name__}"
    elif inspect.isabstract(made):
        missing = ", ".join(sorted(made.__abstractmethods__))
        yield f"{part} gives {made.__name__}, which leaves out {missing}"
