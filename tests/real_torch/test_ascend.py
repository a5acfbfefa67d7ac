"""What only Ascend's torch has: operators with schemas, process groups of HCCL; on the real torch_npu over the simulated driver."""

from __future__ import annotations

import inspect
import subprocess
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hardpoint.interfaces import AttentionLayer, AttentionPlan, AttentionRequest, DType, StepBatch
from hardpoint.interfaces.errors import BackendBroken, WorkerError
from hardpoint_ascend.graphs import AscendGraphRunner, _check
from hardpoint_ascend.operators import KV_LENGTHS, OPERATORS, Operator

from .conftest import EXPANDABLE

REQUEST = AttentionRequest((AttentionLayer(16, 8, 128, 0.1),), DType.BFLOAT16, DType.BFLOAT16, None, 4096)


@pytest.fixture(params=range(5), ids=["attend", "write", "norm", "rotate", "swiglu"])
def operator(request: pytest.FixtureRequest, machine: Any) -> Operator:
    return OPERATORS[request.param]


def test_table_has_every_operator() -> None:
    assert len(OPERATORS) == 5


def test_schemas_are_those_of_the_installed_torch_npu(operator: Operator) -> None:
    import torch_npu

    assert torch_npu.__version__.startswith("2.13")
    assert operator.bind()._schema == operator.installed()


def test_other_schemas_than_the_installed_ones_are_refused(operator: Operator) -> None:
    for wrong in (
        replace(operator, signature=operator.signature.replace("(Tensor ", "(Tensor other_", 1)),
        replace(operator, signature=operator.signature.replace("(", "(Tensor extra, ", 1)),
        replace(operator, name=f"{operator.name}_of_another_version"),
    ):
        with pytest.raises(BackendBroken, match=wrong.name) as caught:
            wrong.bind()
        assert f"Expected: {wrong.schema}" in str(caught.value)


def test_attention_binds_the_real_operators_and_plans(machine: Any) -> None:
    attention = machine.descriptor.make("attention", machine.devices[0])
    plan = attention.plan(REQUEST)
    assert isinstance(plan, AttentionPlan)
    assert plan.kv_cache.shape(3) == (1, 2, 3, 128, 8, 128)


# Graphs: torch_npu's own Python runs, and nothing that would capture or compute.


def test_graphs_of_torch_npu_have_what_captures_and_updates_need(machine: Any) -> None:
    module = machine.torch
    assert "auto_dispatch_capture" in inspect.signature(module.graph).parameters
    assert list(inspect.signature(module.NPUGraph.update).parameters) == ["self", "cpu_update_input"]
    graph = module.NPUGraph()
    assert graph.auto_dispatch_capture is False
    assert isinstance(graph.graph_dispatch_mode, torch.utils._python_dispatch.TorchDispatchMode)
    assert hasattr(graph.graph_dispatch_mode, "update_stream")
    _check(module)


def test_attention_is_among_the_operators_that_updates_change(machine: Any) -> None:
    from torch_npu.npu._npugraph_handlers import npugraph_handler

    handlers = npugraph_handler._NPU_GRAPH_OP_HANDLERS
    name = OPERATORS[0].name.partition("::")[2]
    for overload in ("default", "out"):
        handler = handlers[f"{name}.{overload}"]
        assert ("arg", 8, KV_LENGTHS) in handler.get_update_specs(f"{name}.{overload}")
    assert "npu_scatter_pa_kv_cache.default" not in handlers, "its slots lie on the device"


def test_capture_that_the_driver_cannot_do_leaves_no_mode_in_force(
    run_child: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """In a process of its own: after it, torch_npu asks the runtime about captures at every copy of pinned memory."""
    ended = run_child(
        """
from hardpoint_ascend.graphs import AscendGraphRunner
allocator = hardpoint_backend().make("allocator", DEVICE)
runner = AscendGraphRunner(DEVICE)
runner.start(allocator)
try:
    runner.capture(1, lambda: None)
except RuntimeError as error:
    assert "Failed to find function aclmdlRICaptureBegin" in str(error), error
else:
    raise AssertionError("something was captured")
assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
runner.reset()
assert runner.resident_bytes() == 0
allocator.close()
print("left as it was")
"""
    )
    assert ended.returncode == 0, ended.stderr
    assert "left as it was" in ended.stdout


class Group:
    """Stands in for what captures, updates and replays on a device, and notes what torch_npu asks of it."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **named: self.asked.append(name)

    def taken(self) -> list[str]:
        """Return what was asked since the last time."""
        taken, self.asked = self.asked, []
        return taken


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    """Torch_npu's recording and updating, without a device's graph under it."""
    import torch_npu.npu.graphs as module

    group = Group()
    for name in ("graph_task_group_begin", "graph_task_group_end", "graph_task_update_begin", "graph_task_update_end"):
        monkeypatch.setattr(module, name, getattr(group, name))
    for name in ("capture_begin", "capture_end", "replay", "reset"):
        monkeypatch.setattr(module.NPUGraph, name, getattr(group, name))
    monkeypatch.setattr(torch.npu, "ExternalEvent", lambda: group)
    return group


def decodes(contexts: list[int]) -> StepBatch:
    """Return a step of sequences with one token each, in blocks of their own."""
    seqs, nothing = len(contexts), np.zeros((0, 2), np.int32)
    lengths = np.array(contexts, np.int32)
    return StepBatch(
        token_ids=np.zeros(seqs, np.int64),
        positions=lengths.astype(np.int64) - 1,
        slot_mapping=np.arange(seqs, dtype=np.int32) * 128,
        query_start=np.arange(seqs + 1, dtype=np.int32),
        context_lens=lengths,
        block_table=np.arange(seqs, dtype=np.int32)[:, None],
        rows=np.arange(seqs, dtype=np.int32),
        seq_ids=np.arange(seqs),
        num_decodes=seqs,
        sample_rows=np.zeros(0, np.int32),
        sample_seq_ids=np.zeros(0, np.int64),
        swap_out=nothing,
        swap_in=nothing,
        copies=nothing,
        preempted=np.zeros(0, np.int64),
    )


def test_torch_npu_records_attentions_calls_and_makes_them_again_with_new_lengths(
    machine: Any, allocator: Any, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch_npu.npu._npugraph_handlers.npugraph_handler import _NPU_GRAPH_OP_HANDLERS

    attention = machine.descriptor.make("attention", machine.devices[0])
    plan = attention.plan(REQUEST)
    name, made = OPERATORS[0].name.partition("::")[2], []

    def operator(*args: Any, **kwargs: Any) -> None:
        made.append(kwargs)

    # Takes the place of the overload that torch_npu records, which would compute.
    operator.__name__ = f"{name}.out"
    operator._schema = OPERATORS[0].schema  # type: ignore[attr-defined]

    def prepare_capture(func: Any, args: Any, kwargs: Any) -> Any:
        return operator, args, {**kwargs, "out": [torch.empty_like(args[0]), None]}

    monkeypatch.setattr(_NPU_GRAPH_OP_HANDLERS[f"{name}.default"], "prepare_capture", prepare_capture)
    # It computes, which no simulated driver does; backends/ascend/tests/test_graphs.py has it.
    monkeypatch.setattr(attention, "_check_padding", lambda spec: None)
    attention.begin_capture(plan, 2)
    step = attention.prepare(plan, decodes([5, 9]))
    device = machine.devices[0].torch_device
    cache = torch.empty(plan.kv_cache.shape(4), dtype=torch.bfloat16, device=device)[0]
    q, out = (torch.empty(2, 16, 128, dtype=torch.bfloat16, device=device) for _ in range(2))
    k = torch.empty(2, 8, 128, dtype=torch.bfloat16, device=device)
    turns = iter(["before the capture, where it would compute", "captured"])

    def run() -> None:
        if next(turns) == "captured":
            attention.forward(0, q, k, k, cache, step, out)

    runner = AscendGraphRunner(machine.devices[0])
    runner.start(allocator)
    runner.capture(2, run)
    assert group.taken() == [
        "capture_begin",
        "wait",
        "reset",
        "graph_task_group_begin",
        "graph_task_group_end",
        "capture_end",
    ]
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    new = attention.prepare(plan, decodes([7, 100]))
    runner.update(2, attention.host_arguments(new))
    for _ in range(2):
        runner.replay(2)
        assert group.taken() == ["graph_task_update_begin", "graph_task_update_end", "record", "replay"]
    assert [call[KV_LENGTHS] for call in made] == [[5, 9], [7, 100], [7, 100]]
    first, again, _ = made
    assert first.keys() == again.keys()
    numbers = first.keys() - {"block_table", "atten_mask", "out"}
    assert {argument for argument in numbers if first[argument] != again[argument]} == {KV_LENGTHS}
    assert again["block_table"].data_ptr() == first["block_table"].data_ptr() == new.block_table.data_ptr()
    runner.reset()


def test_ranks_cannot_be_joined_over_a_simulated_driver(machine: Any, unused_port: int) -> None:
    collectives = machine.descriptor.make("collectives", machine.devices[0])
    with pytest.raises(WorkerError, match=r"rank 0 of 1 cannot join the others.*Failed to find function acl"):
        collectives.start(0, 1, f"tcp://127.0.0.1:{unused_port}/alone", timeout=10.0)
    with pytest.raises(WorkerError, match="Call start first"):
        collectives.all_reduce(torch.empty(4))
    collectives.stop()


# Settings of torch's allocator, each in a process of its own

ENTER_A_POOL = """
from hardpoint.interfaces.errors import CapabilityRefused
allocator = hardpoint_backend().make("allocator", DEVICE)
try:
    with allocator.pool("weights"):
        print("entered")
except CapabilityRefused as error:
    print(error)
"""


def test_settings_call_for_expandable_segments_is_refused(machine: Any, run_child: Any) -> None:
    set_by_a_call = """
torch.empty(1, device=DEVICE.torch_device)
torch.npu.memory._set_allocator_settings("expandable_segments:True")
"""
    ended = run_child(set_by_a_call + ENTER_A_POOL)
    assert ended.returncode == 0, ended.stderr
    assert "set by a call: expandable_segments:True" in ended.stdout
    assert f"Set {machine.settings[0]} to expandable_segments:False" in ended.stdout


def test_environment_with_expandable_segments_is_refused(machine: Any, run_child: Any) -> None:
    for variable in machine.settings:
        ended = run_child(ENTER_A_POOL, **{variable: EXPANDABLE})
        assert ended.returncode == 0, ended.stderr
        assert f"{variable}={EXPANDABLE}" in ended.stdout
        assert f"Set {variable} to expandable_segments:False" in ended.stdout
