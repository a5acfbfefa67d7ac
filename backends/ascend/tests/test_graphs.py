"""Decode steps as graphs, over simulated graphs of torch_npu and reference operators: simulated, nothing of the vendor's runs."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from conformance_tests.tests.test_worker_graphs import serve, serving
from hardpoint import LLM, SamplingParams
from hardpoint.interfaces import GRAPHS, AttentionLayer, AttentionRequest, DType, SleepPlan
from hardpoint.interfaces.errors import BackendBroken, GraphCaptureFailed, InvalidBatch, WorkerError
from hardpoint.plugins import Resolved
from hardpoint.worker.step_graphs import PaddedStep
from hardpoint_ascend import capabilities
from hardpoint_ascend.attention import AscendAttention
from hardpoint_ascend.capabilities import GRAPHS_VARIABLE
from hardpoint_ascend.graphs import AscendGraphRunner
from hardpoint_conformance.target import Target
from hardpoint_conformance.tiny_model import Model, shape_for, tiny_model
from hardpoint_conformance.worker_bench import sleep, wake

from . import simulated_graphs as simulated
from .reference_backend import descriptor
from .reference_operators import DEVICE, register
from .simulated_graphs import NPUGraph
from .test_attention import batch_of, plan_of


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    """Ascend's attention and graphs, simulated, with graphs asked for."""
    with pytest.MonkeyPatch.context() as patch:
        for name, module in simulated.modules().items():
            patch.setitem(sys.modules, name, module)
        patch.setattr(capabilities, "requirements", tuple)
        patch.setenv(GRAPHS_VARIABLE, "1")
        backend = descriptor()
        yield Target(backend, DEVICE, backend.capabilities(DEVICE), Target.find("cpu").record)


@pytest.fixture(scope="module")
def model(target: Target) -> Model:
    return tiny_model(shape_for(target.claims))


@pytest.fixture(scope="module")
def eager(target: Target, model: Model) -> list[list[int]]:
    with serving(model, target, enforce_eager=True) as bench:
        return serve(bench, model)


@pytest.fixture(autouse=True)
def no_replays() -> None:
    NPUGraph.running, NPUGraph.replays = None, 0


def with_runner(target: Target, runner: type[AscendGraphRunner]) -> Target:
    return target.with_descriptor(graph_runner=lambda: runner)


def test_tokens_are_those_of_eager_steps(target: Target, model: Model, eager: list[list[int]]) -> None:
    assert NPUGraph.replays == 0
    with serving(model, target) as bench:
        assert serve(bench, model) == eager
    assert NPUGraph.replays > 10


class Forgetful(AscendGraphRunner):
    """Replays with the lengths of the capture."""

    def update(self, key: int, arguments: Mapping[str, Any]) -> None:
        super().update(key, {})


class Silent(AscendGraphRunner):
    """Replays without an update."""

    def replay(self, key: int) -> None:
        self._graphs[key].replay()


class Hasty(AscendGraphRunner):
    """Does not wait for the replay before."""

    def replay(self, key: int) -> None:
        self._replayed = None
        super().replay(key)


class Unrecorded(AscendGraphRunner):
    """Captures attention's calls as those of any other operator."""

    def _record(self, graph: Any, step: Callable[[], None]) -> None:
        step()


@pytest.mark.parametrize("runner", [Forgetful, Unrecorded])
def test_lengths_of_the_capture_show_in_the_tokens(
    target: Target, model: Model, eager: list[list[int]], runner: type[AscendGraphRunner]
) -> None:
    with serving(model, with_runner(target, runner)) as bench:
        assert serve(bench, model) != eager


@pytest.mark.parametrize(("runner", "fault"), [(Silent, "waits for an update"), (Hasty, "a replay may run")])
def test_what_would_hang_a_device_is_found(
    target: Target, model: Model, runner: type[AscendGraphRunner], fault: str
) -> None:
    with serving(model, with_runner(target, runner)) as bench, pytest.raises((RuntimeError, WorkerError), match=fault):
        serve(bench, model)


def test_graphs_memory_sleeps_under_its_tag(target: Target, model: Model) -> None:
    with serving(model, target) as bench:
        held = bench.worker.status().memory.tags[GRAPHS]
        assert held.mapped > 0
        sleep(bench.worker, SleepPlan())
        assert bench.worker.status().memory.tags[GRAPHS].mapped == 0
        wake(bench.worker)
        assert bench.worker.status().memory.tags[GRAPHS] == held


@contextmanager
def engine(monkeypatch: pytest.MonkeyPatch, target: Target, model: Model, **settings: Any) -> Iterator[LLM]:
    monkeypatch.setattr(
        "hardpoint.engine.startup.resolve_backend", lambda *args, **named: Resolved(target.descriptor, target.device)
    )
    llm = LLM(
        model.path,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        use_fused_decoder=False,
        block_size=128,
        num_device_blocks=10,
        max_num_seqs=6,
        max_model_len=480,
        enable_sleep_mode=True,
        **settings,
    )
    try:
        yield llm
    finally:
        llm.shutdown()


def test_sequences_that_share_too_many_blocks_run_eagerly(
    target: Target, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Six sequences have three blocks each, of which two are the same, in a cache of ten."""
    model = tiny_model(shape_for(target.claims, max_len=512))
    shared = [1 + index % 50 for index in range(256)]
    prompts = [{"prompt_token_ids": [*shared, 60 + index]} for index in range(6)]
    sampling = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    tokens, replays = [], []
    for enforce_eager in (True, False):
        with engine(monkeypatch, target, model, enforce_eager=enforce_eager) as llm:
            llm.generate(prompts[:1], sampling)
            replays.append(NPUGraph.replays)
            served = llm.generate(prompts, sampling)
            replays.append(NPUGraph.replays)
            llm.sleep(level=1)
            llm.wake_up()
            served += llm.generate(prompts[:2], sampling)
            replays.append(NPUGraph.replays)
            tokens.append([list(output.outputs[0].token_ids) for output in served])
    assert tokens[0] == tokens[1]
    assert replays[:3] == [0, 0, 0]
    alone, together, two = replays[3:]
    assert 0 < alone == together < two, "one and two sequences were replayed, and six with the same beginning were not"


def test_sizes_that_a_cache_has_no_blocks_for_are_not_captured(
    target: Target, model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "hardpoint"), serving(model, target) as bench:
        assert "captured decode steps of 1, 2, 4, 8 sequences" in caplog.text
        caplog.clear()
        bench.worker.initialize_kv(3, 0)
        bench.worker.warm_up()
        assert "captured decode steps of 1, 2 sequences" in caplog.text
        assert "steps of more than 2 sequences run without graphs" in caplog.text


@pytest.fixture
def attention(target: Target) -> AscendAttention:
    register()
    return AscendAttention(DEVICE)


def padded(batch: Any, size: int) -> Any:
    nothing = np.zeros(size, np.int64)
    return PaddedStep(nothing, nothing.copy(), batch.block_table.shape).fill(replace(batch, num_decodes=batch.num_seqs))


def test_captured_steps_lie_where_they_were_and_padding_is_of_one_key(attention: AscendAttention) -> None:
    plan = plan_of(attention)
    attention.begin_capture(plan, 4)
    first = attention.prepare(plan, padded(batch_of([1, 1], [9, 140], [[3, 0], [1, 5]]), 4))
    assert first.slots.tolist() == [3 * 128 + 8, 5 * 128 + 11, -1, -1]
    assert first.block_table[:, :3].tolist() == [[3, 0, 0], [1, 5, 0], [0, 0, 0], [0, 0, 0]]
    assert attention.host_arguments(first) == {"actual_seq_kvlen": [9, 140, 1, 1]}
    second = attention.prepare(plan, padded(batch_of([1], [200], [[7, 2]]), 4))
    assert attention.host_arguments(second) == {"actual_seq_kvlen": [200, 1, 1, 1]}
    assert (first.slots.data_ptr(), first.block_table.data_ptr()) == (
        second.slots.data_ptr(),
        second.block_table.data_ptr(),
    )
    assert first.block_table.tolist() == second.block_table.tolist()
    (call,) = second.calls(8)
    assert (call.query_ends, call.context_lens) == ([1, 2, 3, 4], [200, 1, 1, 1])


def before_the_cache(key: Any, value: Any, keys: Any, values: Any, slots: Any, **named: Any) -> None:
    """Write as an operator without a look at negative slots: -1 is the place before the cache."""
    for rows, cache in ((key, keys), (value, values)):
        row = cache[0, 0].numel()
        flat = torch.as_strided(cache, (cache.shape[1] + 1, row), (row, 1), cache.storage_offset() - row)
        flat[1 + slots.long()] = rows.flatten(1)


def to_the_last_slot(key: Any, value: Any, keys: Any, values: Any, slots: Any, **named: Any) -> None:
    """Write as torch indexes: -1 is the last slot."""
    for rows, cache in ((key, keys), (value, values)):
        cache.flatten(0, 1)[slots.long()] = rows


def nothing_after(key: Any, value: Any, keys: Any, values: Any, slots: Any, **named: Any) -> None:
    """Stop at the first negative slot."""


@pytest.mark.parametrize(
    ("write", "found"),
    [
        (before_the_cache, r"\[\(0, 127\), \(1, 0\)\]"),
        (to_the_last_slot, r"\[\(1, 0\), \(1, 127\)\]"),
        (nothing_after, r"\(block, token\): \[\]"),
    ],
)
def test_nothing_is_captured_where_the_operator_does_not_pass_over_padding(
    attention: AscendAttention, monkeypatch: pytest.MonkeyPatch, write: Callable[..., None], found: str
) -> None:
    monkeypatch.setattr(attention, "_write", write)
    with pytest.raises(GraphCaptureFailed, match=found) as caught:
        attention.begin_capture(plan_of(attention), 4)
    assert f"Unset {GRAPHS_VARIABLE}" in str(caught.value)


def test_steps_with_prompts_and_of_more_sequences_do_not_touch_what_captured_steps_read(
    attention: AscendAttention,
) -> None:
    plan = plan_of(attention)
    attention.begin_capture(plan, 2)
    static = attention.prepare(plan, batch_of([1, 1], [9, 140], [[3, 0], [1, 5]]))
    slots = static.slots.tolist()
    for batch in (
        batch_of([1, 3], [5, 3], [[0], [2]]),
        batch_of([1, 1, 1], [5, 3, 2], [[0], [2], [4]]),
        padded(batch_of([1], [5], [[6]]), 3),
    ):
        step = attention.prepare(plan, batch)
        assert step.slots.data_ptr() != static.slots.data_ptr()
        assert -1 not in step.slots.tolist()
    assert static.slots.tolist() == slots


def test_context_beyond_the_plans_is_refused_in_a_captured_step(attention: AscendAttention) -> None:
    plan = plan_of(attention)
    attention.begin_capture(plan, 2)
    with pytest.raises(InvalidBatch, match="a context has up to 1024 tokens: one of 1100"):
        attention.prepare(plan, batch_of([1], [1100], [list(range(9))]))


@pytest.mark.parametrize(("num_seqs", "num_blocks", "can"), [(2, 5, True), (2, 4, False), (4, 7, True), (4, 6, False)])
def test_a_replay_takes_a_block_for_each_sequence_of_padding(
    attention: AscendAttention, num_seqs: int, num_blocks: int, can: bool
) -> None:
    batch = batch_of([1, 1], [300, 140], [[0, 1, 2], [0, 3, 0]])
    assert attention.can_replay(plan_of(attention), batch, num_seqs, num_blocks) is can


def test_graphs_are_planned_where_they_are_asked_for(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    request = AttentionRequest((AttentionLayer(4, 2, 64, 0.125),), DType.BFLOAT16, DType.BFLOAT16, None, 512)
    for asked, level in (("1", "UNIFORM_DECODE"), ("0", "NONE"), ("", "NONE")):
        monkeypatch.setenv(GRAPHS_VARIABLE, asked)
        found = target.attention()
        assert found.capabilities().graph_level.name == level
        assert found.plan(request).graph_level.name == level  # type: ignore[union-attr]


class Other:
    """An NPUGraph of another version."""

    def update(self, inputs: Any) -> None:
        """Take nothing by the name that is expected."""


def handlers(entries: Mapping[str, list[Any]]) -> ModuleType:
    module = ModuleType(simulated.HANDLERS)
    module._NPU_GRAPH_OP_HANDLERS = {  # type: ignore[attr-defined]
        name: SimpleNamespace(get_update_specs=lambda _, specs=specs: specs) for name, specs in entries.items()
    }
    return module


KNOWN = {f"{simulated.OPERATOR}.{overload}": [("arg", 7, "actual_seq_qlen")] for overload in ("default", "out")}


@pytest.mark.parametrize(
    ("graph", "registry", "found"),
    [
        (None, None, "there is no NPUGraph.update"),
        (Other, None, r"NPUGraph.update takes \(self, inputs"),
        (NPUGraph, ModuleType("none"), "its list of updatable operators was not found"),
        (
            NPUGraph,
            handlers({"npu_fused_infer_attention_score.out": []}),
            "its updatable operators are npu_fused_infer_attention_score.out, without npu_fused_infer_attention_score_v2.default and",
        ),
        (NPUGraph, handlers(KNOWN), "npu_fused_infer_attention_score_v2.out takes updates of actual_seq_qlen"),
    ],
)
def test_torch_npu_without_what_is_needed_is_an_error_that_says_what_was_found(
    target: Target, monkeypatch: pytest.MonkeyPatch, graph: Any, registry: ModuleType | None, found: str
) -> None:
    monkeypatch.setattr(simulated.Npu, "NPUGraph", graph)
    if registry is not None:
        monkeypatch.setitem(sys.modules, simulated.HANDLERS, registry)
    runner = target.descriptor.make("graph_runner", DEVICE)
    with pytest.raises(BackendBroken, match=found) as caught:
        runner.start(target.allocator())
    assert "actual_seq_kvlen" in str(caught.value)
    assert f"unset {GRAPHS_VARIABLE}" in str(caught.value)


@pytest.mark.parametrize("refused", ["update", "replay"])
def test_what_torch_npu_refuses_ends_all_replays(target: Target, monkeypatch: pytest.MonkeyPatch, refused: str) -> None:
    runner, allocator = target.descriptor.make("graph_runner", DEVICE), target.allocator()
    runner.start(allocator)
    runner.capture(1, lambda: None)
    with pytest.raises(KeyError):
        runner.update(2, {})
    runner.update(1, {"actual_seq_kvlen": [3]})
    runner.replay(1)

    def refuse(self: NPUGraph, **arguments: Any) -> None:
        raise RuntimeError("the first error\nits details")

    with monkeypatch.context() as patch:
        patch.setattr(NPUGraph, refused, refuse)
        with pytest.raises(WorkerError, match=r"the first error\. Unset"):
            runner.replay(1)
    with pytest.raises(WorkerError, match="the first error"):
        runner.replay(1)
    assert NPUGraph.replays == 1
    runner.reset()
    runner.capture(1, lambda: None)
    runner.replay(1)
    runner.reset()
    allocator.close()
