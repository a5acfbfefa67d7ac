"""Level 6: determinism and stress of a whole worker."""

from __future__ import annotations

import gc
import os
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from hardpoint.interfaces import SleepTier, WeightWrite
from hardpoint_conformance.clauses import clause, proves
from hardpoint_conformance.levels import Level
from hardpoint_conformance.plugin import Quality
from hardpoint_conformance.target import Target
from hardpoint_conformance.tiny_model import Model, shape_for, tiny_model
from hardpoint_conformance.worker_bench import (
    Served,
    WorkerBench,
    check_tokens,
    level_plan,
    random_prompts,
    running,
    sleep,
    wake,
)

_CYCLES = 20


@pytest.fixture
def model(target: Target) -> Model:
    """A tiny model that the claims cover."""
    return tiny_model(shape_for(target.claims))


def _logprobs(sequence: Served) -> list[tuple[list[int], list[float]]]:
    return [(found.token_ids.tolist(), found.logprobs.tolist()) for found in sequence.logprobs]


def _interleaved(
    bench: WorkerBench, prompts: list[list[int]], counts: list[int], rng: np.random.Generator, chunked: bool = True
) -> list[Served]:
    """Serve prompts with random arrivals and pauses, and with random chunks; return them in the order of `prompts`."""
    waiting = list(zip(prompts, counts, strict=True))
    served: list[tuple[Served, int]] = []
    running_: list[tuple[Served, int]] = []
    while waiting or running_:
        while waiting and len(running_) < 6 and rng.random() < 0.6:
            prompt, count = waiting.pop(0)
            running_.append((bench.begin(prompt, 3), count))
            served.append(running_[-1])
        work, left = {}, bench.config.max_num_batched_tokens
        for index in rng.permutation(len(running_)):
            sequence, _ = running_[index]
            count = min(sequence.pending, int(rng.integers(1, 40)), left) if chunked else sequence.pending
            if rng.random() < 0.8 and count <= left:
                work[sequence.seq_id] = count
                left -= count
        bench.step(work)
        for sequence, count in list(running_):
            if len(sequence.generated) >= count:
                bench.finish(sequence)
                running_.remove((sequence, count))
    return [sequence for sequence, _ in served]


@clause("stress.interleave.oracle@1", Level.STRESS, capability="attention.mixed_batch", facts="attention test N")
def test_random_interleaving(target: Target, model: Model, rng: np.random.Generator, quality: Quality) -> None:
    """However requests arrive, pause, are cut into chunks and share steps, each gets the oracle's tokens."""
    prompts = random_prompts(rng, model, [int(length) for length in rng.integers(1, 90, 12)])
    counts = [int(count) for count in rng.integers(1, 10, 12)]
    with running(target, model) as bench:
        check_tokens(model, _interleaved(bench, prompts, counts, rng), bench.info.dtype, quality)


@clause("determinism.worker.run-to-run@1", Level.STRESS, capability="determinism.run_to_run")
def test_the_same_steps_twice(target: Target, model: Model, rng: np.random.Generator, seed: int) -> None:
    """The same steps give the same log probabilities bit by bit, in the same worker and in another one."""
    prompts = random_prompts(rng, model, [1, 12, 33, 64])
    found = []
    for _ in range(2):
        with running(target, model) as bench:
            for _ in range(2):
                served = _interleaved(bench, prompts, [5, 5, 5, 5], np.random.default_rng(seed))
                found.append([_logprobs(sequence) for sequence in served])
    assert [other == found[0] for other in found[1:]] == [True] * (len(found) - 1), (
        "a run has other log probabilities than the first"
    )


@clause("determinism.worker.batch-invariant@1", Level.STRESS, capability="determinism.worker.batch_invariant")
def test_alone_and_in_company(target: Target, model: Model, rng: np.random.Generator) -> None:
    """A sequence's log probabilities are the same bit by bit alone, in a batch, and among others that come and go.

    Its own steps are the same each time: how its prompt is cut into chunks may change what rounding leaves.
    """
    prompts = random_prompts(rng, model, [1, 12, 33, 64, 90])
    with running(target, model) as bench:
        alone = [bench.generate([prompt], 5, logprobs=3)[0] for prompt in prompts]
        chunked = [bench.generate([prompt], 5, chunk=7, logprobs=3)[0] for prompt in prompts]
        ways = {
            "in a batch": (alone, bench.generate(prompts, 5, logprobs=3)),
            "in a batch of chunks": (chunked, bench.generate(prompts, 5, chunk=7, logprobs=3)),
            "among others": (alone, _interleaved(bench, prompts, [5] * len(prompts), rng, chunked=False)),
        }
    for way, (expected, served) in ways.items():
        for index, sequence in enumerate(served):
            assert _logprobs(sequence) == _logprobs(expected[index]), f"prompt {index} {way}"


def _held(bench: WorkerBench) -> dict[str, tuple[int, int, int, int]]:
    stats = bench.worker.status().memory
    return {tag: (s.allocated, s.mapped, s.backed_up, s.allocations) for tag, s in stats.tags.items()}


def _open_files() -> dict[str, str]:
    """Return what each descriptor of the process leads to."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the one by which the folder is read
            found[entry.name] = os.readlink(entry)
    return found


def _check_open_files(before: dict[str, str]) -> None:
    """Fail where more are open, not for a moment only: a thread that begins reads from the system how many processors there are."""
    after = _open_files()
    for _ in range(20):
        if len(after) <= len(before):
            return
        time.sleep(0.05)
        after = _open_files()
    new = [file for number, file in after.items() if before.get(number) != file]
    raise AssertionError(f"open files grew from {len(before)} to {len(after)}, new are {new}")


@pytest.mark.parametrize(
    "tier", [pytest.param(tier, id=tier.value, marks=proves(f"memory.tier.{tier.value}")) for tier in SleepTier]
)
@clause("stress.sleep.cycles@1", Level.STRESS, capability="memory.sleep.1", facts="allocator fact 1, allocator fact 25")
def test_many_sleeps(
    target: Target, model: Model, tier: SleepTier, rng: np.random.Generator, tmp_path: Path, quality: Quality
) -> None:
    """Twenty cycles of sleep and wake in the middle of a sequence leave its tokens the oracle's, and nothing grows."""
    with running(target, model) as bench:
        (prompt,) = random_prompts(rng, model, [30])
        sequence = bench.begin(prompt, 2)
        held: dict[str, tuple[int, int, int, int]] = {}
        files: dict[str, str] = {}
        for cycle in range(_CYCLES):
            bench.run([sequence], cycle + 1)
            bench.sleep_and_wake(level_plan(1, tier, str(tmp_path)))
            if cycle == 2:
                held, files = _held(bench), _open_files()
        gc.collect()
        assert _held(bench) == held, "the books grew"
        _check_open_files(files)
        bench.run([sequence], _CYCLES + 1)
        check_tokens(model, [sequence], bench.info.dtype, quality)


@clause(
    "stress.sleep.mixed-cycles@1",
    Level.STRESS,
    capability="memory.sleep.2",
    facts="allocator fact 10, allocator fact 26",
)
def test_levels_tags_and_updates_at_random(
    target: Target, model: Model, rng: np.random.Generator, tmp_path: Path, quality: Quality
) -> None:
    """Sleeps of both levels and of single tags, updates and reloads in random order never show weights other than the last written."""
    other = tiny_model(shape_for(target.claims, seed=1))
    tiers = sorted(target.claims.memory.tiers - {SleepTier.SOURCE}, key=lambda tier: tier.value)
    with running(target, model) as bench:
        current = model
        for _ in range(12):
            action = int(rng.integers(5))
            if action == 0:
                bench.sleep_and_wake(level_plan(1, tiers[int(rng.integers(len(tiers)))], str(tmp_path)))
            elif action == 1:
                bench.sleep_and_wake(level_plan(2, target.tier))
                bench.worker.write_weights(WeightWrite.RELOAD, model=current.path)
            elif action == 2:
                current = other if current is model else model
                bench.worker.write_weights(
                    WeightWrite.UPDATE, [(name, tensor.clone()) for name, tensor in current.weights.items()]
                )
            elif action == 3:
                current = other if current is model else model
                bench.worker.write_weights(WeightWrite.RELOAD, model=current.path)
            else:
                sleep(bench.worker, level_plan(1, target.tier))
                wake(bench.worker, ["weights"])
                bench.worker.write_weights(
                    WeightWrite.UPDATE, [(name, tensor.clone()) for name, tensor in current.weights.items()]
                )
                wake(bench.worker)
            served = bench.generate(random_prompts(rng, model, [20]), 2, logprobs=2)
            check_tokens(current, served, bench.info.dtype, quality)


@clause("stress.worker.restarts@1", Level.STRESS, facts="allocator fact 25, 6.3 worker")
def test_many_workers(target: Target, model: Model, quality: Quality) -> None:
    """Eight workers one after the other in one process serve alike and leave no open file behind."""
    files: dict[str, str] = {}
    for round_ in range(8):
        with running(target, model) as bench:
            served = bench.generate([range(3, 12)], 2, logprobs=2)
            check_tokens(model, served, bench.info.dtype, quality)
        del bench
        if round_ == 2:
            gc.collect()
            files = _open_files()
    gc.collect()
    _check_open_files(files)
