"""Level 0: packaging and contract."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import EntryPoint
from typing import Any

from hardpoint.interfaces import (
    API_VERSION,
    AttentionCapabilities,
    AttentionFeature,
    BackendDescriptor,
    Capabilities,
    Determinism,
    Device,
    DType,
    GraphLevel,
    IntSet,
    MemoryCapabilities,
    ProbeResult,
    SleepTier,
    TorchPoolScope,
)
from hardpoint.plugins.classes import CONTRACTS, part_problems
from hardpoint_conformance.claims import members

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

_IMPORT = """
import json, pathlib, sys
from importlib.metadata import EntryPoint
EntryPoint(*sys.argv[1:4]).load()
if sys.argv[4:]:
    from hardpoint.plugins import discover
    (record,) = discover(entry_points=[EntryPoint(*sys.argv[1:4])])
    for device in record.devices:
        record.descriptor.capabilities(device)
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
    modules, memory_map = _in_fresh_interpreter(entry_point, f"importing {entry_point.value}", time_limit)
    problems = [f"it imports {name}" for name in HEAVY_MODULES if name in modules]
    problems += [f"it loads {name}" for name in DRIVER_LIBRARIES if name in memory_map]
    if problems:
        raise NotConformant(f"importing {entry_point.value}", problems)


def check_probe_is_light(entry_point: EntryPoint, time_limit: float = 60.0) -> None:
    """Probe a backend in a fresh interpreter and ask for its claims, and look at what came with it.

    Raises:
        NotConformant: it failed, or imported one of `HEAVY_MODULES`.
    """
    subject = f"the probe of {entry_point.name}"
    modules, _ = _in_fresh_interpreter(entry_point, subject, time_limit, "probe")
    problems = [f"it imports {name}" for name in HEAVY_MODULES if name in modules]
    if problems:
        raise NotConformant(subject, problems)


def _in_fresh_interpreter(
    entry_point: EntryPoint, subject: str, time_limit: float, *further: str
) -> tuple[list[str], str]:
    """Load an entry point in an interpreter of its own; return the names of imported modules, and the memory map."""
    command = [sys.executable, "-c", _IMPORT, entry_point.name, entry_point.value, entry_point.group, *further]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=time_limit, check=False
        )
    except subprocess.TimeoutExpired:
        raise NotConformant(subject, [f"it took longer than {time_limit:g} s"]) from None
    if ended.returncode:
        raise NotConformant(subject, [f"it failed with exit code {ended.returncode}: {ended.stderr.strip()}"])
    try:
        modules, memory_map = json.loads(ended.stdout)
    except ValueError:
        raise NotConformant(subject, [f"it printed to standard output: {ended.stdout[:200]!r}"]) from None
    return modules, memory_map


def consistency_problems(claims: Capabilities) -> list[str]:
    """Return where claims contradict one another; [] where they do not."""
    attention, memory = claims.attention, claims.memory
    problems = []
    if attention.dtypes != frozenset(attention.kv_dtypes):
        problems.append("the dtypes it claims and those it claims KV dtypes for differ")
    problems += [f"it claims no KV dtype for {dtype}" for dtype, kv in attention.kv_dtypes.items() if not kv]
    if attention.dtypes:
        if attention.default_block_size not in attention.block_sizes:
            problems.append(f"its default block size, {attention.default_block_size}, is not among those it claims")
        if attention.max_context < attention.default_block_size:
            problems.append(f"its longest context, {attention.max_context} tokens, is shorter than a block")
        for name, numbers in (("head dimension", attention.head_dims), ("group size", attention.group_sizes)):
            if not members(numbers, _LARGEST):
                problems.append(f"it claims no {name}")
        if 1 not in claims.tensor_parallel:
            problems.append("it does not claim to run on one device (tensor parallel 1)")
    elif attention.features or attention.max_context:
        problems.append("it claims attention features or a context, and no dtype")
    if 1 in memory.sleep_levels and not memory.tiers:
        problems.append("it claims level-1 sleep, and no tier for the bytes")
    if memory.tiers and 1 not in memory.sleep_levels:
        problems.append("it claims tiers for preserved bytes, and no level-1 sleep")
    if any(size >= 2 for size in members(claims.tensor_parallel, _LARGEST)) and not claims.collectives:
        problems.append("it claims tensor parallelism, and no collectives")
    return problems


_LARGEST = 4096
"""Where the search for a member of a set of sizes ends."""


def claims_problems(claims: object) -> list[str]:
    """Return what makes claims unreadable: other types than the contract's, or names that it does not know; [] when they are sound."""
    if type(claims) is not Capabilities:
        return [f"capabilities must be Capabilities, not {type(claims).__name__}"]
    attention: Any = claims.attention
    memory: Any = claims.memory
    parts = ((attention, AttentionCapabilities), (memory, MemoryCapabilities))
    if any(type(part) is not kind for part, kind in parts):
        return ["attention and memory must be AttentionCapabilities and MemoryCapabilities"]
    if not isinstance(attention.kv_dtypes, Mapping):
        return [f"attention.kv_dtypes must be a mapping, not {_kind(attention.kv_dtypes)}"]
    kv_dtypes: dict[str, tuple[type, type, Any]] = {
        f"attention.kv_dtypes[{key}]": (frozenset, DType, value) for key, value in attention.kv_dtypes.items()
    }
    sets: dict[str, tuple[type, type, Any]] = {
        "attention.dtypes": (frozenset, DType, attention.dtypes),
        "attention.kv_dtypes": (tuple, DType, tuple(attention.kv_dtypes)),
        **kv_dtypes,
        "attention.features": (frozenset, AttentionFeature, attention.features),
        "memory.sleep_levels": (frozenset, int, memory.sleep_levels),
        "memory.tiers": (frozenset, SleepTier, memory.tiers),
        "collectives": (tuple, str, claims.collectives),
        "notes": (tuple, str, claims.notes),
    }
    single: dict[str, tuple[type, Any]] = {
        "attention.default_block_size": (int, attention.default_block_size),
        "attention.max_context": (int, attention.max_context),
        "attention.max_cache_elements": (int, attention.max_cache_elements or 0),
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
        if not issubclass(type(values), collection):
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
    for part in CONTRACTS:
        problems += part_problems(descriptor, part, may_refuse=bool(result.reason))
    if problems:
        raise NotConformant(f"backend {descriptor.name}", problems)


def _claims(descriptor: BackendDescriptor, device: Device) -> Iterator[str]:
    claims: object = descriptor.capabilities(device)
    if not isinstance(claims, Capabilities):
        yield f"capabilities({device.index}) returned {type(claims).__name__}, not Capabilities"
        return
    yield from consistency_problems(claims)
    json.dumps(claims.to_json())
