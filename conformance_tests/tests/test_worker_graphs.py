"""The ready-made worker with captured steps gives the tokens of eager steps, and wrong graphs show in its tokens."""

from __future__ import annotations

import copy
import logging
import queue
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from conformance_tests.tests.recorded_graphs import (
    DeafRecorder,
    GraphedAttention,
    HostArguments,
    MixedAttention,
    Recorder,
    StaleAttention,
    UpdatedRecorder,
    graphed,
)
from hardpoint.interfaces import GRAPHS, KV_CACHE, WEIGHTS, GraphLevel, Policy, Pooling, SleepPlan
from hardpoint.interfaces.errors import CapabilityRefused, GraphCaptureFailed, WorkerError
from hardpoint_conformance.mutants.derived import derived
from hardpoint_conformance.target import Target
from hardpoint_conformance.tiny_model import Model, shape_for, tiny_model
from hardpoint_conformance.worker_bench import WorkerBench, config_for, running, sleep, wake
from hardpoint_cpu.attention import CpuAttention

StaleMixed: Any = derived(MixedAttention, {"prepare": CpuAttention.prepare})
"""Replays with the metadata of the capture."""
BOTH = pytest.mark.parametrize("attention", [GraphedAttention, MixedAttention], ids=["decodes", "mixed"])


class OldTokens(TorchFunctionMode):
    """Embeds the token of the captures, 0, whatever is asked for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.embedding:
            args = (torch.zeros_like(args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


class StaleInputs(Recorder):
    """Replays with the tokens of the capture."""

    def replay(self, key: int) -> None:
        with OldTokens():
            super().replay(key)


class Lazy(Recorder):
    """Leaves the outputs as they are when the same graph is replayed again."""

    _last = 0

    def replay(self, key: int) -> None:
        if key != self._last:
            super().replay(key)
        self._last = key


class Narrow(Recorder):
    """Has no room for four sequences."""

    resets = 0

    def capture(self, key: int, step: Any) -> None:
        if key == 4:
            raise RuntimeError("out of memory\nwith more lines")
        super().capture(key, step)

    def reset(self) -> None:
        super().reset()
        type(self).resets += 1


class PlainCopies(TorchDispatchMode):
    """Notes what torch does by its driver's own copies and fills on a device, which a graph holds as nodes of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name, tensors = func.name(), [one for one in (*args, result) if isinstance(one, torch.Tensor)]
        is_plain = len({(one.dtype, one.is_contiguous()) for one in tensors}) == 1 and tensors[0].is_contiguous()
        if name in ("aten::copy_", "aten::clone", "aten::_to_copy", "aten::zero_") and is_plain:
            self.found.add(f"{name} of {[list(one.shape) for one in tensors]}")
        return result


class Nodes(Recorder):
    """Captures no copies of the driver's."""

    found: ClassVar[set[str]] = set()

    def capture(self, key: int, step: Any) -> None:
        with PlainCopies() as copies:
            super().capture(key, step)
        self.found.update(copies.found)


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model(shape_for(graphed().claims))


@contextmanager
def serving(model: Model, target: Target | None = None, **changes: Any) -> Iterator[WorkerBench]:
    """A worker of the graphed backend over the modules, up to eight sequences in a step."""
    Recorder.replays.clear()
    with running(target or graphed(), model, **{"use_fused_decoder": False, "swapped": 512, **changes}) as bench:
        yield bench


def serve(bench: WorkerBench, model: Model) -> list[list[int]]:
    """Serve sequences that come, go, are preempted and swapped, in chunks and beside one another; return their tokens."""
    rng = np.random.default_rng(7)
    ended: list[list[int]] = []

    def begin(length: int, **sampling: Any) -> Any:
        return bench.begin(rng.integers(0, model.shape.vocab, length).tolist(), **sampling)

    def end(sequence: Any) -> None:
        ended.append(sequence.generated)
        bench.finish(sequence)

    first = [begin(length) for length in (3, 40, 17)]
    for _ in range(6):
        bench.step()
    late = begin(33, logprobs=2)
    bench.step({late.seq_id: 20} | {one.seq_id: 1 for one in first})  # a chunk beside decodes
    seeded = begin(5, temperature=0.8, seed=11)
    for _ in range(4):
        bench.step()
    end(first.pop(1))
    for _ in range(3):
        bench.step()
    # Preempted, and computed again in other blocks.
    bench.give_blocks(late)
    late.computed = 0
    more = [begin(length) for length in (1, 8, 9)]
    for _ in range(5):
        bench.step()
    # A sequence's blocks are moved; only the table tells the worker.
    moved = first[0]
    old = bench.give_blocks(moved)
    spare = begin(1)
    bench.take_blocks(spare, 1)
    bench.take_blocks(moved, len(old))
    bench.copies = [pair for pair in zip(old, moved.blocks, strict=True) if pair[0] != pair[1]]
    assert bench.copies
    bench.step({one.seq_id: one.pending for one in bench.sequences.values() if one is not spare})
    end(spare)
    for sequence in [*first, seeded]:
        end(sequence)
    for _ in range(4):
        bench.step()
    bench.sleep_and_wake(SleepPlan(policies={WEIGHTS: Policy.PRESERVE, KV_CACHE: Policy.DISCARD}))
    for _ in range(4):
        bench.step()
    for sequence in [late, *more]:
        end(sequence)
    return ended


@pytest.fixture(scope="module")
def eager(model: Model) -> list[list[int]]:
    with serving(model, enforce_eager=True) as bench:
        tokens = serve(bench, model)
    assert not Recorder.replays
    return tokens


def test_graphs_give_the_tokens_of_eager_steps(model: Model, eager: list[list[int]]) -> None:
    with serving(model) as bench:
        assert serve(bench, model) == eager
    assert set(Recorder.replays) >= {4, 8}


def test_graphs_of_steps_with_prompts_give_the_tokens_of_eager_steps(model: Model, eager: list[list[int]]) -> None:
    steps = 0

    class Counting(MixedAttention):  # type: ignore[misc, valid-type]
        def prepare(self, plan: Any, batch: Any) -> Any:
            nonlocal steps
            steps += 1
            return super().prepare(plan, batch)

    with serving(model, graphed(Counting)) as bench:
        steps = 0
        assert serve(bench, model) == eager
    assert set(Recorder.replays) >= {4, 8, -32, -64, -128}
    assert steps == len(Recorder.replays), "every step is replayed"


@BOTH
def test_captured_steps_compute_by_kernels_alone(model: Model, attention: Any) -> None:
    """Kernels find what they read by address, whatever is mapped there; nobody has shown that of a driver's copies in a graph."""
    Nodes.found.clear()
    with serving(model, graphed(attention, Nodes)) as bench:
        bench.begin([1, 2, 3])
        bench.step()
        bench.step()
    assert Recorder.replays
    assert Nodes.found == set()


@pytest.mark.parametrize(
    "parts",
    [
        {"attention": StaleAttention},
        {"attention": StaleMixed},
        {"runner": StaleInputs},
        {"attention": MixedAttention, "runner": StaleInputs},
        {"runner": Lazy},
    ],
    ids=["metadata", "mixed-metadata", "inputs", "mixed-inputs", "outputs"],
)
def test_stale_graphs_show_in_the_tokens(model: Model, eager: list[list[int]], parts: dict[str, type]) -> None:
    with serving(model, graphed(**parts)) as bench:
        try:
            found = serve(bench, model)
        except WorkerError:  # what lies in blocks that nobody wrote may be no number
            return
        assert found != eager


def test_steps_beyond_the_largest_graph_and_with_prompts_run_eagerly(model: Model) -> None:
    with serving(model) as bench:
        sequences = [bench.begin([1 + index, 2]) for index in range(3)]
        bench.step()
        assert not Recorder.replays
        bench.step()
        bench.step({sequence.seq_id: 1 for sequence in sequences[:1]})
        assert Recorder.replays == [4, 1]


def test_steps_with_prompts_replay_the_next_larger_graph(model: Model) -> None:
    with serving(model, graphed(MixedAttention), max_num_batched_tokens=48) as bench:
        sequences = [bench.begin([1 + index, 2]) for index in range(3)]
        bench.step()
        bench.step()
        late = bench.begin([3] * 60)
        bench.step({late.seq_id: 45} | {sequence.seq_id: 1 for sequence in sequences})
        bench.step({late.seq_id: 14})  # nothing is sampled
        bench.step()
        assert Recorder.replays == [-16, 4, -48, -16, 4]


def test_steps_whose_hidden_states_are_all_wanted_run_eagerly(model: Model) -> None:
    prompt = [*range(30)]
    with serving(model, enforce_eager=True) as bench:
        bench.begin(prompt, pooling=Pooling.MEAN)
        (wanted,) = bench.step().embeddings.values()
    with serving(model, graphed(MixedAttention)) as bench:
        bench.begin(prompt, pooling=Pooling.MEAN)
        (found,) = bench.step().embeddings.values()
        assert not Recorder.replays
        bench.begin(prompt[:3], pooling=Pooling.MEAN)
        bench.step()
        assert Recorder.replays == [-16]
    assert np.array_equal(found, wanted)


def random_steps(bench: WorkerBench, model: Model, seed: int) -> list[list[int]]:
    """Serve sequences that come, are computed in chunks of any size, beside one another, preempted and ended, all by chance.

    What is done depends on the seed and the sequences' lengths alone, not on their tokens.
    """
    rng = np.random.default_rng(seed)
    served: list[Any] = []
    for _ in range(40):
        if len(bench.sequences) < MOST and rng.random() < 0.5:
            sampled = {"temperature": 0.9, "seed": int(rng.integers(99))} if rng.random() < 0.5 else {}
            prompt = rng.integers(0, model.shape.vocab, int(rng.integers(1, 70))).tolist()
            served.append(bench.begin(prompt, **sampled))
        running = list(bench.sequences.values())
        for sequence in running:
            if rng.random() < 0.05:
                bench.give_blocks(sequence)
                sequence.computed = 0
            elif len(sequence.tokens) > 110:
                bench.finish(sequence)
        work, left = {}, bench.config.max_num_batched_tokens
        for sequence in bench.sequences.values():
            most = min(sequence.pending, left)
            count = most if rng.random() < 0.6 else int(rng.integers(0, most + 1))
            work[sequence.seq_id], left = count, left - count
        if any(work.values()):
            bench.step(work)
    return [one.generated for one in served]


MOST = 7


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("window", [None, 24], ids=["whole", "window"])
def test_random_schedules_give_the_tokens_of_eager_steps(seed: int, window: int | None) -> None:
    model = tiny_model(shape_for(graphed().claims, window=window))
    with serving(model, enforce_eager=True) as bench:
        expected = random_steps(bench, model, seed)
    assert sum(map(len, expected)) > 60
    with serving(model, graphed(MixedAttention), max_num_batched_tokens=256) as bench:
        assert random_steps(bench, model, seed) == expected
    assert sum(key < 0 for key in Recorder.replays) > 10


def test_steps_that_verify_drafted_tokens_are_replayed(model: Model) -> None:
    with serving(model) as bench:
        prompt, other = [5, 2, 7, 2], [3, 3, 8]
        wanted = bench.generate([prompt], 8)[0].generated
        alone = bench.generate([other], 4)[0].generated
        sequence, beside = bench.begin(prompt), bench.begin(other)
        bench.step()
        Recorder.replays.clear()
        assert bench.verify(sequence, [*wanted[1:4], (wanted[4] + 1) % model.shape.vocab], [beside]) == wanted[1:5]
        assert bench.verify(sequence, wanted[5:7], [beside]) == wanted[5:8]
        # One token of the other sequence, and one with four and two guesses, in the next larger graphs.
        assert list(Recorder.replays) == [8, 4]
        assert beside.generated == alone[:3]


def test_runner_gets_what_operators_take_from_the_host_before_each_replay(model: Model) -> None:
    def tokens(**parts: type) -> list[list[int]]:
        with serving(model, graphed(**parts)) as bench:
            return [one.generated for one in bench.generate([[5, 6, 7], [8, 9]], 6)]

    expected = tokens()
    assert tokens(attention=HostArguments, runner=UpdatedRecorder) == expected
    with suppress(WorkerError):  # what lies in blocks that nobody wrote may be no number
        assert tokens(attention=HostArguments, runner=DeafRecorder) != expected
    with pytest.raises(CapabilityRefused, match="Recorder cannot write them into a graph"):
        tokens(attention=HostArguments)


class Choosy(GraphedAttention):
    """Replays steps of one size, and those of up to 20 tokens a sequence."""

    def can_replay(self, plan: Any, batch: Any, num_seqs: int, num_blocks: int) -> bool:
        assert num_blocks > 0
        return num_seqs == 4 and bool((batch.context_lens <= 20).all())


def test_steps_that_attention_cannot_replay_run_eagerly(
    model: Model, eager: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "hardpoint"), serving(model, graphed(attention=Choosy)) as bench:
        assert "captured decode steps of 4 sequences" in caplog.text
        assert "steps of more than 4 sequences run without graphs" in caplog.text
        bench.generate([[5, 6, 7], [8, 9]], 4)
        assert set(Recorder.replays) == {4}
        Recorder.replays.clear()
        bench.generate([[*range(20)]], 4)
        assert not Recorder.replays
        assert serve(bench, model) == eager


def test_attention_that_can_replay_no_step_is_an_error(model: Model) -> None:
    class Never(GraphedAttention):
        def can_replay(self, plan: Any, batch: Any, num_seqs: int, num_blocks: int) -> bool:
            return False

    with (
        pytest.raises(GraphCaptureFailed, match="no decode step can be captured") as caught,
        serving(model, graphed(attention=Never)),
    ):
        pass
    assert "enforce_eager" in str(caught.value)


def test_nothing_is_captured_where_the_plan_offers_no_graphs(model: Model) -> None:
    target = graphed()
    attention = target.descriptor.attention()

    class Plain(attention):  # type: ignore[misc, valid-type]
        def plan(self, request: Any) -> Any:
            return replace(super().plan(request), graph_level=GraphLevel.NONE)

    with serving(model, target.with_descriptor(attention=lambda: Plain)) as bench:
        bench.generate([[1, 2, 3]], 3)
    assert not Recorder.replays


def test_failed_capture_names_the_size_and_leaves_nothing(model: Model) -> None:
    target = graphed(runner=Narrow)
    with (
        pytest.raises(GraphCaptureFailed, match=r"step of 4 sequences.*out of memory(?!\n)") as caught,
        serving(model, target),
    ):
        pass
    assert "enforce_eager" in str(caught.value)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert Narrow.resets == 1
    with serving(model, target, enforce_eager=True) as bench:
        bench.generate([[1, 2, 3]], 3)


def test_a_way_that_cannot_be_captured_is_said(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "hardpoint"), serving(model, use_fused_decoder=True) as bench:
        bench.generate([[1, 2, 3]], 3)
    assert not Recorder.replays
    assert "run without graphs: its way to run (fused) cannot be captured" in caplog.text


class Roomy(GraphedAttention):  # type: ignore[misc, valid-type]
    """Has arrays at fixed addresses for captured steps."""

    arrays: ClassVar[list[torch.Tensor]] = []

    def begin_capture(self, plan: Any, max_num_seqs: int) -> None:
        super().begin_capture(plan, max_num_seqs)
        self.arrays[:] = [torch.zeros(4 << 20, dtype=torch.uint8)]


def test_attentions_arrays_for_captured_steps_sleep_with_the_graphs(model: Model) -> None:
    with serving(model) as bench:
        without = bench.worker.status().memory.tags[GRAPHS].mapped
    with serving(model, graphed(Roomy)) as bench:
        assert bench.worker.status().memory.tags[GRAPHS].mapped >= without + (4 << 20)
        sleep(bench.worker, SleepPlan())
        assert bench.worker.status().memory.tags[GRAPHS].mapped == 0
        wake(bench.worker)
        Roomy.arrays.clear()


def test_graphs_memory_sleeps_and_what_they_hold_is_reported(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hardpoint"), serving(model) as bench:
        assert "captured decode steps of 1, 2, 4, 8 sequences" in caplog.text
        assert bench.worker.status().memory.tags[GRAPHS].mapped > 0
        report = sleep(bench.worker, SleepPlan())
        assert report.residual[GRAPHS] == 400  # what the recorder says of four graphs
        assert bench.worker.status().memory.tags[GRAPHS].mapped == 0
        wake(bench.worker)


def test_a_cache_of_another_size_is_captured_anew(model: Model) -> None:
    with serving(model) as bench:
        before = bench.generate([[5, 6, 7], [8, 9]], 4)
        bench.worker.initialize_kv(64, 0)
        bench.worker.warm_up()
        again = bench.generate([[5, 6, 7], [8, 9]], 4)
        assert [one.generated for one in again] == [one.generated for one in before]


@BOTH
def test_ranks_replay_together(model: Model, eager: list[list[int]], attention: Any) -> None:
    """Two ranks share the layers: sums over ranks are within what is captured, and every rank has its part of the head."""
    target = graphed(attention)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}/graphs"
    ranks = [
        config_for(
            target.claims,
            model,
            use_fused_decoder=False,
            rank=rank,
            world_size=2,
            tensor_parallel_size=2,
            init_method=address,
        )
        for rank in range(2)
    ]
    calls: queue.Queue[tuple[str, tuple[Any, ...]] | None] = queue.Queue()
    driver, other = (target.worker(config) for config in ranks)

    class Both:
        """Calls the driver, and the other rank in its own thread."""

        def __getattr__(self, name: str) -> Any:
            def call(*arguments: Any) -> Any:
                calls.put((name, copy.deepcopy(arguments)))
                return getattr(driver, name)(*arguments)

            return call

    def follow() -> None:
        while (call := calls.get()) is not None:
            getattr(other, call[0])(*call[1])

    Recorder.replays.clear()
    with ThreadPoolExecutor(1) as threads:
        followed = threads.submit(follow)
        try:
            bench = WorkerBench(Both(), ranks[0], swapped=512)  # type: ignore[arg-type]
            assert serve(bench, model) == eager
        finally:
            calls.put(None)
            followed.result(240)
            driver.shutdown()
            other.shutdown()
    assert Recorder.replays.count(4) >= 2
    assert all(Recorder.replays.count(size) % 2 == 0 for size in Recorder.replays)
    assert (min(Recorder.replays) < 0) is (attention is MixedAttention)
