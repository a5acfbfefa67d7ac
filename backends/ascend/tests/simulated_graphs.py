"""torch_npu's graphs in plain torch on the CPU, for tests: simulated.

A capture records every operator call with the tensors and numbers of the capture; a replay makes the calls again, into the same outputs.
Attention's calls are recorded as torch_npu 2.13 records them (`npu/graphs.py`): each waits for an event, which an update sets and the call
clears. What would hang or corrupt a device is an error here: a replay without an update, an update while a replay may still run, and a
capture that waits for the device.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hardpoint.interfaces import Device, DType, Policy
from hardpoint.memory import TorchPoolAllocator, TorchPoolFunctions, factory_call_pool
from hardpoint_ascend.operators import ATTEND, KV_LENGTHS
from hardpoint_cpu.capabilities import capabilities
from hardpoint_cpu.driver import driver_table

MODULE = "torch_npu.npu"
HANDLERS = f"{MODULE}._npugraph_handlers.npugraph_handler"
OPERATOR = ATTEND.name.partition("::")[2]


class WouldHang(RuntimeError):
    """A device would wait for ever, or compute with what is not there yet."""


@dataclass
class Launch:
    """A recorded call.

    Attributes:
        results: tensors that the call returned when it was captured.
        waits: for an event, which an update sets.
    """

    operator: Any
    args: Any
    kwargs: dict[str, Any]
    results: list[Tensor]
    waits: bool = False
    is_event_set: bool = False

    def run(self) -> None:
        if self.waits and not self.is_event_set:
            raise WouldHang(f"{self.operator.__name__} waits for an update, and there was none since the replay before")
        self.is_event_set = False
        found = _tensors(self.operator(*self.args, **self.kwargs))
        for place, result in zip(self.results, found, strict=True):
            if place.data_ptr() != result.data_ptr():
                place.copy_(result)


class Mode(TorchDispatchMode):
    """Calls of operators, none of which is compiled: for a mode that is kept away from its compiler torch imports that, for a second."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class Recording(Mode):
    """Records all calls into a graph, whose results are put into the graph's pool."""

    def __init__(self, graph: NPUGraph, pool: GraphPool) -> None:
        super().__init__()
        self._graph, self._pool = graph, pool

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise WouldHang("a capture cannot wait for the device")
        frozen_args, frozen_kwargs = _mapped(_frozen, (args, kwargs or {}))
        given = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
        made = func(*args, **(kwargs or {}))
        result = _mapped(lambda one: self._pool.moved(one) if _is_new(one, given) else one, made)
        self._graph.launches.append(Launch(func, frozen_args, frozen_kwargs, _tensors(result)))
        return result


class Updatable(Mode):
    """Notes the calls whose arguments updates change, as torch_npu's mode of the same place does."""

    def __init__(self, graph: NPUGraph) -> None:
        super().__init__()
        self._graph = graph
        self.update_stream: Any = None
        self.graph_dispatch_records: list[Launch] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.__name__ in sys.modules[HANDLERS]._NPU_GRAPH_OP_HANDLERS:
            launch = self._graph.launches[-1]
            launch.waits = True
            self.graph_dispatch_records.append(launch)
        return result


class NPUGraph:
    """What torch_npu's has that is used.

    Attributes:
        running: the graph of the last replay, until somebody waited for it.
        replays: of all graphs.
    """

    running: ClassVar[NPUGraph | None] = None
    replays: ClassVar[int] = 0

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.graph_dispatch_mode = Updatable(self)
        self.auto_dispatch_capture = False

    def update(self, cpu_update_input: list[dict[str, Any]]) -> None:
        if not self.auto_dispatch_capture:
            raise RuntimeError("the graph was not captured for updates")
        if NPUGraph.running is not None:
            raise WouldHang("an update while a replay may run: its events would be cleared")
        records = self.graph_dispatch_mode.graph_dispatch_records
        given = cpu_update_input * len(records) if len(cpu_update_input) == 1 else cpu_update_input
        for launch, arguments in zip(records, given, strict=True):
            launch.kwargs.update({name: value for name, value in arguments.items() if name in launch.kwargs})
            launch.is_event_set = True

    def replay(self) -> None:
        for launch in self.launches:
            launch.run()
        NPUGraph.running = self
        NPUGraph.replays += 1

    def reset(self) -> None:
        self.launches.clear()
        self.graph_dispatch_mode.graph_dispatch_records.clear()


class Npu(ModuleType):
    """torch_npu's module for the device."""

    NPUGraph = NPUGraph

    def Stream(self, index: int) -> Any:
        return SimpleNamespace(index=index, wait_stream=lambda other: None, record_event=self._event)

    def current_stream(self, index: int) -> Any:
        return self.Stream(index)

    def stream(self, stream: Any) -> Any:
        return nullcontext()

    def is_initialized(self) -> bool:
        return True

    def empty_cache(self) -> None:
        """The allocator of the CPU keeps nothing back."""

    def synchronize(self, index: int = 0) -> None:
        NPUGraph.running = None

    def _event(self) -> Any:
        return SimpleNamespace(synchronize=self.synchronize)

    @contextmanager
    def graph(
        self,
        graph: NPUGraph,
        *,
        pool: GraphPool,
        stream: Any,
        auto_dispatch_capture: bool = False,
        capture_error_mode: str = "global",
    ) -> Iterator[None]:
        """As torch_npu's: the recording is entered and left as the graph says at that time, and not left where a capture fails."""
        graph.auto_dispatch_capture = auto_dispatch_capture
        with Recording(graph, pool):
            if graph.auto_dispatch_capture:
                graph.graph_dispatch_mode.__enter__()
            yield
            if graph.auto_dispatch_capture:
                graph.graph_dispatch_mode.__exit__(None, None, None)


@dataclass
class GraphPool:
    """Memory with a tag, in which the results of captured calls stay; it is its own id."""

    allocator: SimulatedAllocator
    tag: str
    tensors: list[Tensor] = field(default_factory=list)

    @property
    def id(self) -> GraphPool:
        return self

    def moved(self, tensor: Tensor) -> Tensor:
        if not tensor.numel():
            return tensor
        place = self.allocator.empty(tuple(tensor.shape), DType.of(tensor.dtype), self.tag)
        self.tensors.append(place)
        return place.copy_(tensor)

    def allocating(self) -> Any:
        return nullcontext()

    def capturing(self) -> Any:
        return nullcontext()

    def mapped_bytes(self) -> int:
        is_asleep = self.tag in self.allocator.stats().asleep
        return 0 if is_asleep else sum(tensor.nbytes for tensor in self.tensors)

    def close(self) -> None:
        self.tensors.clear()


class SimulatedAllocator(TorchPoolAllocator):
    """The host's memory, with pools for graphs."""

    def __init__(self, device: Device) -> None:
        functions = TorchPoolFunctions.of_module(MODULE, backend="none", pluggable_allocator="none", check=lambda: None)
        super().__init__(
            driver_table(device.index),
            device=device.index,
            torch_device=device.torch_device,
            capabilities=capabilities(device).memory,
            functions=functions,
        )

    def pool(self, tag: str, policy: Policy = Policy.PRESERVE) -> Any:
        return factory_call_pool(self, tag, policy)

    def graph_pool(self, tag: str) -> Any:
        return GraphPool(self, tag)


def modules() -> dict[str, ModuleType]:
    """Return what takes the place of torch_npu's modules in `sys.modules`, by name."""
    NPUGraph.running, NPUGraph.replays = None, 0
    handlers = ModuleType(HANDLERS)
    handler = SimpleNamespace(get_update_specs=lambda name: [("arg", 7, "actual_seq_qlen"), ("arg", 8, KV_LENGTHS)])
    handlers._NPU_GRAPH_OP_HANDLERS = {f"{OPERATOR}.default": handler, f"{OPERATOR}.out": handler}  # type: ignore[attr-defined]
    return {MODULE: Npu(MODULE), HANDLERS: handlers}


def install() -> None:
    """Put `modules` in their places, once in a process without torch_npu."""
    for name, module in modules().items():
        sys.modules.setdefault(name, module)


def _tensors(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _mapped(lambda leaf: found.append(leaf) if isinstance(leaf, Tensor) else None, tree)
    return found


def _mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return what the function makes of each leaf, in the same lists, tuples and dictionaries; torch's own takes five times as long."""
    if isinstance(tree, list | tuple):
        made = [_mapped(function, one) for one in tree]
        return tuple(made) if type(tree) is tuple else type(tree)(made)
    if isinstance(tree, dict):
        return {name: _mapped(function, one) for name, one in tree.items()}
    return function(tree)


def _frozen(leaf: Any) -> Any:
    return leaf if isinstance(leaf, Tensor) else copy.deepcopy(leaf)


def _is_new(leaf: Any, given: set[int]) -> bool:
    return isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in given
