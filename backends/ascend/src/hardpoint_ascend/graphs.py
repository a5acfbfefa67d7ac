"""Device graphs of torch_npu, with the lengths of sequences written anew before each replay.

The attention operator takes lengths as numbers on the host, which a graph keeps as they were when it was captured. For some operators,
attention's among them, torch_npu records the calls while a graph is captured, and makes them again with other numbers to write these into
the graph (`NPUGraph.update`). Within the graph each such call waits for an event that an update sets, and clears it: a replay without
an update would wait for ever, and so would one whose events were set before the replay before it had cleared them.

Source: torch_npu 2.13 (`npu/graphs.py`, `npu/_npugraph_handlers`). No device has run this yet: attention plans graphs only where
`GRAPHS_VARIABLE` of `capabilities` asks for them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from hardpoint.interfaces import Device, DeviceAllocator
from hardpoint.interfaces.errors import BackendBroken, WorkerError
from hardpoint.worker import TorchGraphRunner
from hardpoint_ascend.capabilities import GRAPHS_VARIABLE
from hardpoint_ascend.operators import ATTEND, KV_LENGTHS


class AscendGraphRunner(TorchGraphRunner):
    """Graphs of torch_npu's `NPUGraph`."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._arguments: dict[int, Mapping[str, Any]] = {}
        self._update_stream: Any = None
        self._replayed: Any = None
        self._failure = ""

    def start(self, allocator: DeviceAllocator) -> None:
        """Take the graphs' memory from an allocator.

        Raises:
            CapabilityRefused: its pools are not torch's.
            BackendBroken: torch_npu cannot write lengths into the graphs of attention.
        """
        _check(self._torch())
        super().start(allocator)

    def capture(self, key: int, step: Callable[[], None]) -> None:
        """Run `step` once and record its device work under `key`; raises what `step` or torch_npu's capture raises."""
        super().capture(key, step)
        # Only now: torch_npu's context would leave the recording once more.
        self._graphs[key].auto_dispatch_capture = True

    def update(self, key: int, arguments: Mapping[str, Any]) -> None:
        """Keep what the operators take from the host in the replays of `key` that follow; raises KeyError."""
        if key not in self._graphs:
            raise KeyError(key)
        self._arguments[key] = arguments

    def replay(self, key: int) -> None:
        """Run the recorded work again, with the arguments of the last `update`, in the order of the current stream.

        The host waits for the replay before.

        Raises:
            KeyError: nothing was captured under `key`.
            WorkerError: torch_npu refused the arguments or the replay; no graph of the runner is replayed after that.
        """
        graph = self._graphs[key]
        if self._failure:
            raise _refused(self._failure)
        if self._replayed is not None:
            self._replayed.synchronize()
        try:
            graph.update(cpu_update_input=[dict(self._arguments.get(key, {}))])
            graph.replay()
        except RuntimeError as error:
            # Events are set that no replay has cleared: the next one would not wait for its own update.
            self._failure = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            raise _refused(self._failure) from error
        self._replayed = self._torch().current_stream(self._index).record_event()

    def reset(self) -> None:
        """Drop all graphs and their memory."""
        super().reset()
        self._arguments.clear()
        self._update_stream, self._replayed, self._failure = None, None, ""

    def _torch(self) -> Any:
        return import_module("torch_npu.npu")

    def _new_graph(self) -> Any:
        return self._torch().NPUGraph()

    def _record(self, graph: Any, step: Callable[[], None]) -> None:
        """Run a step while `graph` captures, and record the calls that updates make again.

        torch_npu's context does the same when it is told `auto_dispatch_capture=True`, but goes on recording, whatever the thread does
        next, where a capture fails.
        """
        mode = graph.graph_dispatch_mode
        # Of this device: torch_npu has one stream for all graphs of the process, on the device that was current first.
        self._update_stream = self._update_stream or self._torch().Stream(self._index)
        mode.update_stream = self._update_stream
        with mode:
            step()


def _refused(cause: str) -> WorkerError:
    return WorkerError(
        "torch_npu cannot replay a captured step with other lengths of sequences",
        found=cause,
        hint=f"Unset {GRAPHS_VARIABLE}, or use enforce_eager",
    )


def _check(module: Any) -> None:
    """Raise BackendBroken where torch_npu's graphs cannot take new lengths for attention.

    Args:
        module: torch_npu.npu.
    """
    reasons = [*_missing_update(module), *_missing_lengths(module)]
    if reasons:
        raise BackendBroken(
            f"decode steps as graphs were asked for, and torch_npu cannot write {KV_LENGTHS} into a captured {ATTEND.name}",
            found="; ".join(reasons),
            hint=f"Install torch_npu 2.13, or unset {GRAPHS_VARIABLE}",
        )


def _missing_update(module: Any) -> list[str]:
    update = getattr(getattr(module, "NPUGraph", None), "update", None)
    if update is None:
        return ["there is no NPUGraph.update"]
    signature = inspect.signature(update)
    return [] if "cpu_update_input" in signature.parameters else [f"NPUGraph.update takes {signature}"]


def _missing_lengths(module: Any) -> list[str]:
    """Return why torch_npu's list of updatable operators does not do; a call is recorded as the overload `out` of its operator."""
    try:
        handlers = import_module(f"{module.__name__}._npugraph_handlers.npugraph_handler")._NPU_GRAPH_OP_HANDLERS
    except (ImportError, AttributeError) as error:
        return [f"its list of updatable operators was not found ({error})"]
    name = ATTEND.name.partition("::")[2]
    if missing := [full for full in (f"{name}.default", f"{name}.out") if full not in handlers]:
        return [f"its updatable operators are {', '.join(sorted(handlers))}, without {' and '.join(missing)}"]
    keys = [key for _, _, key in handlers[f"{name}.out"].get_update_specs(f"{name}.out")]
    return [] if KV_LENGTHS in keys else [f"{name}.out takes updates of {', '.join(keys) or 'nothing'}"]
