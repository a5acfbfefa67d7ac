"""Level 4: the worker's life cycle, its steps, its refusals, its weights and its sleep."""

from __future__ import annotations

import gc
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hardpoint.interfaces import (
    KV_CACHE,
    WEIGHTS,
    Capabilities,
    DType,
    EmbeddedTokens,
    EmbeddingKind,
    EmbeddingSource,
    Pooling,
    SleepTier,
    StepInput,
    StepOutput,
    WeightWrite,
)
from hardpoint.interfaces.batch import FloatArray
from hardpoint.interfaces.errors import (
    CapabilityRefused,
    ConfigError,
    CorruptWeights,
    DeviceOutOfMemory,
    HardpointError,
    MemoryAsleep,
    ModelError,
    ModelNotFound,
    NothingToCollect,
    UnknownTag,
    UnsupportedArchitecture,
    WeightsMissing,
    WorkerError,
)
from hardpoint_conformance.clauses import clause, over, proves
from hardpoint_conformance.levels import Level
from hardpoint_conformance.plugin import Quality
from hardpoint_conformance.reference import FACTOR, hidden_states, judge
from hardpoint_conformance.target import Target
from hardpoint_conformance.tiny_model import Model, shape_for, tiny_model, write_checkpoint
from hardpoint_conformance.worker_bench import (
    Parts,
    Served,
    WorkerBench,
    check_tokens,
    config_for,
    level_plan,
    random_prompts,
    refused_load,
    running,
    sleep,
    usual_dtype,
    wake,
    watched,
)

PROMPT = (5, 99, 42, 7, 81, 3, 200, 18, 18, 64, 150, 11, 0, 255, 31, 77, 90, 4, 120, 33)


@pytest.fixture
def model(target: Target) -> Model:
    """A tiny model that the claims cover."""
    return tiny_model(shape_for(target.claims))


@pytest.fixture
def other_model(target: Target) -> Model:
    """Other weights of the same shape."""
    return tiny_model(shape_for(target.claims, seed=1))


@pytest.fixture
def bench(target: Target, model: Model) -> Iterator[WorkerBench]:
    """A worker that is ready, with swap space."""
    with running(target, model, swapped=160) as bench:
        yield bench


@pytest.fixture
def parts(target: Target) -> Parts:
    """The target, with notes of what its workers make."""
    return watched(target)


def _serves(bench: WorkerBench, model: Model, quality: Quality, count: int = 4) -> None:
    """Check that the worker gives the oracle's tokens of a model."""
    (sequence,) = bench.generate([PROMPT], count, logprobs=2)
    check_tokens(model, [sequence], bench.info.dtype, quality)


def _pairs_of(model: Model) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor.clone()) for name, tensor in model.weights.items()]


# Life cycle


@clause("worker.construct.no-device@1", Level.WORKER, facts="6.3 worker")
def test_constructor_touches_nothing(parts: Parts, model: Model) -> None:
    """A worker's constructor touches neither the device nor the model: it makes no part, and a model that is not there is no error."""
    worker = parts.target.worker(config_for(parts.target.claims, replace(model, path="/nowhere/at/all")))
    assert parts.made == []
    worker.shutdown()


@clause("worker.lifecycle.parts@1", Level.WORKER, facts="6.3 worker")
def test_parts_come_from_the_context(parts: Parts, model: Model, quality: Quality) -> None:
    """A worker makes its allocator and its attention once, in start, from the descriptor in its context."""
    worker = parts.target.worker(config_for(parts.target.claims, model))
    try:
        worker.start()
        assert sorted(set(parts.made) & {"allocator", "attention"}) == ["allocator", "attention"]
        worker.load()
        assert parts.made.count("allocator") == parts.made.count("attention") == 1
        assert parts.allocators[0].stats().tags[WEIGHTS].allocated > 0, "the weights are in the allocator's memory"
        assert worker.status().memory.tags == parts.allocators[0].stats().tags
    finally:
        worker.shutdown()


@pytest.mark.parametrize("call", ["load", "profile", "initialize_kv", "warm_up", "submit", "collect", "begin"])
@clause("worker.lifecycle.order@1", Level.WORKER, facts="6.3 worker")
def test_a_call_before_its_time(target: Target, model: Model, call: str, quality: Quality) -> None:
    """A call before those that it builds on is a typed error, and the worker can still be started in the right order."""
    config = config_for(target.claims, model)
    worker = target.worker(config)
    arguments: dict[str, tuple[Any, ...]] = {
        "initialize_kv": (4, 0),
        "submit": (_one_step(target, model),),
        "begin": (1, level_plan(1, target.tier)),
    }
    try:
        with pytest.raises(HardpointError):
            getattr(worker, call)(*arguments.get(call, ()))
        _serves(WorkerBench(worker, config), model, quality, count=2)
    finally:
        worker.shutdown()


def _one_step(target: Target, model: Model) -> StepInput:
    with running(target, model) as bench:
        sequence = bench.begin(PROMPT)
        return bench.input_of([(sequence, len(PROMPT))])


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@clause("worker.load.model-info@1", Level.WORKER)
def test_model_info(target: Target, tied: bool) -> None:
    """What load says of the model is true of it: its sizes, its type, its context, and the bytes of its weights."""
    model = tiny_model(shape_for(target.claims, tied=tied))
    with running(target, model, max_model_len=100) as bench:
        info, shape = bench.info, model.shape
        assert (info.architecture, info.vocab_size, info.num_layers) == ("LlamaForCausalLM", shape.vocab, shape.layers)
        assert (info.dtype, info.max_model_len, info.is_generative) == (usual_dtype(target.claims), 100, True)
        elements = sum(tensor.numel() for tensor in model.weights.values())
        assert info.weight_bytes >= elements * info.dtype.itemsize
        assert info.weight_bytes <= bench.worker.status().memory.tags[WEIGHTS].allocated
        cache = info.attention.kv_cache
        assert (cache.num_layers, cache.num_kv_heads, cache.head_dim) == (shape.layers, shape.kv_heads, shape.head_dim)
        assert info.attention.block_size in target.claims.attention.block_sizes


@clause("worker.load.dummy@1", Level.WORKER)
def test_dummy_weights(target: Target, model: Model) -> None:
    """Dummy weights depend on the seed alone: the same seed gives the same log probabilities in another worker, another seed others."""
    found = []
    for seed in (1, 1, 2):
        with running(target, model, load_format="dummy", seed=seed) as bench:
            (sequence,) = bench.generate([PROMPT], 1, logprobs=8)
            found.append(dict(zip(sequence.logprobs[0].token_ids.tolist(), sequence.logprobs[0].logprobs, strict=True)))
    assert found[0].keys() == found[1].keys()
    assert max(abs(found[0][token] - found[1][token]) for token in found[0]) < 1e-2
    assert found[0].keys() != found[2].keys()


# Profile and sizes


@clause("worker.profile.within-total@1", Level.WORKER, facts="6.3 worker")
def test_profile_is_within_the_device(bench: WorkerBench) -> None:
    """The profile counts the weights as used, its peak is no less than what is in use after it, and all is within the device's memory."""
    profile = bench.profile
    assert 0 < profile.used <= profile.total
    assert profile.used >= bench.info.weight_bytes
    assert 0 <= profile.current <= profile.peak <= profile.total
    assert 0 <= profile.graphs <= profile.total
    assert profile.kv_bytes <= profile.total - profile.used
    assert profile.seconds_per_token > 0
    assert profile.seconds_per_swapped_block >= 0


@clause("worker.profile.monotone@1", Level.WORKER, facts="6.3 worker")
def test_profile_grows_with_the_step(target: Target, model: Model) -> None:
    """A worker whose largest step has more tokens leaves no more memory for the KV cache, and one with more samples leaves less."""
    taken = []
    # The first of all workers also pays for what a process does once.
    for tokens, seqs in ((16, 1), (16, 1), (8192, 1), (8192, 4096)):
        with running(target, model, max_num_batched_tokens=tokens, max_num_seqs=seqs) as bench:
            taken.append(bench.profile.used + bench.profile.peak - bench.profile.current)
    _, small, long, wide = taken
    assert small <= long
    # Each of the samples has a row of logits, of two bytes at least.
    assert wide - long >= 2 * 4000 * model.shape.vocab


@pytest.mark.parametrize("share", [0.25, 0.5])
@clause("worker.profile.utilization@1", Level.WORKER, facts="6.3 worker")
def test_utilization_as_asked(target: Target, model: Model, share: float) -> None:
    """The KV cache gets the asked share of the device's memory, less what is used and what the largest step and captured
    steps take, as far as attention can address it."""
    with running(target, model, memory_utilization=share) as bench:
        profile, elements = bench.profile, target.claims.attention.max_cache_elements
        assert profile.utilization == share
        spec = bench.info.attention.kv_cache
        addressable = None if elements is None else 2 * spec.num_layers * elements * spec.dtype.itemsize
        assert profile.kv_limit == addressable, "no further limit where a share was asked for"
        left = int(profile.total * share) - profile.used - (profile.peak - profile.current) - profile.graphs
        assert profile.kv_bytes == (left if addressable is None else min(left, addressable))


@pytest.mark.parametrize("blocks", [1, 7, 64])
@clause("worker.kv.books@1", Level.WORKER, facts="allocator fact 24")
def test_cache_takes_what_its_blocks_take(target: Target, model: Model, blocks: int) -> None:
    """A KV cache of n blocks takes n times the plan's bytes of a block."""
    with running(target, model, blocks=blocks) as bench:
        stats = bench.worker.status().memory
        assert stats.tags[KV_CACHE].allocated == blocks * bench.info.attention.kv_cache.block_bytes


@clause("worker.kv.too-large@1", Level.WORKER, facts="allocator fact 22")
def test_cache_larger_than_the_device(target: Target, model: Model) -> None:
    """A KV cache larger than the device is DeviceOutOfMemory, or refused where attention cannot address it; nothing of it stays behind, and
    a smaller one can be had."""
    limited = target.claims.attention.max_cache_elements is not None
    config = config_for(target.claims, model)
    worker = target.worker(config)
    try:
        worker.start()
        info = worker.load()
        total = worker.profile().total
        before = worker.status().memory.allocated
        with pytest.raises((DeviceOutOfMemory, CapabilityRefused) if limited else DeviceOutOfMemory):
            worker.initialize_kv(8 * total // info.attention.kv_cache.block_bytes + 1, 0)
        assert worker.status().memory.allocated == before
        worker.initialize_kv(4, 0)
        worker.warm_up()
        assert worker.status().memory.tags[KV_CACHE].allocated == 4 * info.attention.kv_cache.block_bytes
    finally:
        worker.shutdown()


# Steps


@clause("worker.execute.empty@1", Level.WORKER, facts="6.3 worker")
def test_step_without_sequences(bench: WorkerBench, model: Model, quality: Quality) -> None:
    """A step of no sequences gives no tokens and changes nothing."""
    output = bench.step({})
    assert output.token_ids.shape == (0,)
    assert output.token_ids.dtype == np.int64
    assert len(output.logprobs) == 0
    assert len(output.embeddings) == 0
    sequence = bench.begin(PROMPT, 2)
    bench.run([sequence], 2)
    bench.step({})
    bench.run([sequence], 4)
    check_tokens(model, [sequence], bench.info.dtype, quality)


@clause("worker.execute.samples@1", Level.WORKER)
def test_one_token_for_each_sample(
    bench: WorkerBench, model: Model, rng: np.random.Generator, quality: Quality
) -> None:
    """A step gives one int64 token for each of its samples, in their order, and none for chunks that do not end their prompt."""
    first, second, third = (bench.begin(prompt, 2) for prompt in random_prompts(rng, model, [12, 30, 5]))
    output = bench.step({first.seq_id: 12, second.seq_id: 20, third.seq_id: 5})
    assert output.token_ids.dtype == np.int64
    assert output.token_ids.tolist() == [*first.generated, *third.generated]
    assert sorted(output.logprobs) == [0, 1]
    output = bench.step({second.seq_id: 4})
    assert len(output.token_ids) == 0
    assert len(output.logprobs) == 0
    bench.run([first, second, third], 3)
    check_tokens(model, [first, second, third], bench.info.dtype, quality)


@clause("worker.execute.forks@1", Level.WORKER)
def test_forks_sample_the_same_row(bench: WorkerBench, model: Model, quality: Quality) -> None:
    """A prompt that ends with n forks is computed once and sampled n times."""
    parent = bench.begin(PROMPT)
    step = bench.input_of([(parent, len(PROMPT))])
    sampling = step.new_sequences[0]
    forks = np.asarray([parent.seq_id, 1001, 1002], np.int64)
    rows = np.arange(3, dtype=np.int32)
    batch = replace(
        step.batch, sample_rows=0 * rows, sample_seq_ids=forks, sample_state_rows=rows, sample_positions=0 * rows
    )
    new = tuple(replace(sampling, seq_id=int(seq_id), state_row=row) for row, seq_id in enumerate(forks))
    output = bench.compute(replace(step, batch=batch, new_sequences=new))
    assert len(output.token_ids) == 3
    assert len(set(output.token_ids.tolist())) == 1
    quality.note(judge(model, [*PROMPT, int(output.token_ids[0])], len(PROMPT), bench.info.dtype).check())


@clause("worker.execute.abort@1", Level.WORKER, facts="6.3 worker")
def test_abort_in_the_middle(bench: WorkerBench, model: Model, rng: np.random.Generator, quality: Quality) -> None:
    """Sequences that end in the middle, computed or half computed, leave the others as they are; their blocks serve new ones."""
    stays, goes, half = (bench.begin(prompt, 2) for prompt in random_prompts(rng, model, [40, 33, 60]))
    bench.step({stays.seq_id: 40, goes.seq_id: 33, half.seq_id: 20})
    bench.run([stays, goes], 3)
    bench.finish(goes)
    bench.finish(half)
    bench.run([stays], 5)
    late = [bench.begin(prompt, 2) for prompt in random_prompts(rng, model, [70, 9])]
    bench.run([stays, *late], 8)
    check_tokens(model, [stays, *late], bench.info.dtype, quality)


@clause("worker.execute.id-reuse@1", Level.WORKER)
def test_finished_sequences_are_forgotten(bench: WorkerBench, model: Model, quality: Quality) -> None:
    """Once a worker was told that a sequence is finished, the same id is a new sequence, sampled as that one asks."""
    first = bench.begin(PROMPT, temperature=3.0, seed=7, allowed_token_ids=(3, 4))
    bench.run([first], 3)
    bench.finish(first)
    half = bench.begin(PROMPT, pooling=Pooling.MEAN)
    bench.step({half.seq_id: 9})
    bench.finish(half)
    bench.step({})
    for seq_id in (first.seq_id, half.seq_id):
        bench.next_id = seq_id
        again = bench.begin(PROMPT, 2)
        bench.run([again], 4)
        check_tokens(model, [again], bench.info.dtype, quality)


@clause("worker.execute.failure@1", Level.WORKER, facts="6.3 failing rank")
def test_a_failing_step_is_reported(target: Target, model: Model, quality: Quality) -> None:
    """An error inside a step comes out of its collect, and the next step works."""
    fault = _Fault()
    with running(fault.put_into(target), model) as bench:
        sequence = bench.begin(PROMPT, 2)
        bench.run([sequence], 2)
        fault.on = True
        bench.worker.submit(bench.input_of([(sequence, 1)]))
        with pytest.raises(Exception, match=_Fault.TEXT):
            bench.worker.collect()
        fault.on = False
        bench.run([sequence], 5)
        check_tokens(model, [sequence], bench.info.dtype, quality)


@clause("worker.steps.order@1", Level.WORKER)
def test_steps_are_collected_in_the_order_of_their_submission(
    bench: WorkerBench, model: Model, rng: np.random.Generator
) -> None:
    """As many steps as the model's info says may be in flight; one more is refused, and the outputs come in order, each once."""
    prompts = random_prompts(rng, model, [13] * (bench.info.steps_in_flight + 2))
    expected = [bench.generate([prompt], 1)[0].tokens[-1] for prompt in prompts]
    steps = [bench.input_of([(bench.begin(prompt), len(prompt))]) for prompt in prompts]
    for step in steps[:-1]:
        bench.worker.submit(step)
    with pytest.raises(WorkerError):
        bench.worker.submit(steps[-1])
    assert [bench.worker.collect().token_ids.tolist() for _ in steps[:-1]] == [[token] for token in expected[:-1]]
    with pytest.raises(NothingToCollect):
        bench.worker.collect()
    assert bench.compute(steps[-1]).token_ids.tolist() == [expected[-1]]


def _sampled_otherwise(bench: WorkerBench, prompts: list[list[int]]) -> list[Served]:
    """Begin a sequence of each prompt: greedy, with log probabilities, drawn, and with penalties that count what was generated."""
    ways: list[dict[str, Any]] = [
        {},
        {"logprobs": 2},
        {"temperature": 2.0, "seed": 5},
        {"presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"temperature": 1.0, "seed": 9, "repetition_penalty": 1.3},
    ]
    return [bench.begin(prompt, **way) for prompt, way in zip(prompts, itertools.cycle(ways), strict=False)]


@clause("worker.steps.overlap@1", Level.WORKER)
def test_steps_in_flight_give_the_same_tokens(bench: WorkerBench, model: Model, rng: np.random.Generator) -> None:
    """A token of -1 is the one that a step in flight samples for its sequence: with as many steps in flight as may be, all tokens are
    those of one step at a time, for decodes, chunked prompts beside them, and rows that had other sequences before."""
    prompts, late = random_prompts(rng, model, [9, 40, 3, 21, 17]), random_prompts(rng, model, [30])
    found: list[list[list[int]]] = []
    for run in (bench.run, bench.run_ahead):
        sequences = _sampled_otherwise(bench, prompts)
        run(sequences, 6, chunk=13)
        joined = [*sequences[1:], bench.begin(late[0], temperature=1.5, seed=2)]
        bench.collect_all()
        bench.finish(sequences[0])
        run(joined, 12, chunk=11)
        bench.collect_all()
        found.append([sequence.generated for sequence in (*sequences, joined[-1])])
        wanted = [0 if one.wanted is None else len(one.generated) for one in joined]
        assert [len(one.logprobs) for one in joined] == wanted
        for sequence in joined:
            bench.finish(sequence)
    assert found[1] == found[0]


@clause("worker.steps.moves@1", Level.WORKER)
def test_moves_follow_the_steps_in_flight(
    bench: WorkerBench, model: Model, rng: np.random.Generator, quality: Quality
) -> None:
    """A step's moves take what the steps before it write: blocks that a step in flight fills are copied, and swapped out and in."""
    first, second = (bench.begin(prompt, 2) for prompt in random_prompts(rng, model, [29, 35]))
    copy = bench.begin(first.tokens, 2)
    bench.submit({first.seq_id: 29, second.seq_id: 35})
    if not bench.info.steps_in_flight:
        bench.collect()
    # While the prompts are computed: one is copied, and the other saved, and restored in other blocks.
    bench.take_blocks(copy, len(first.blocks))
    bench.copies = list(zip(first.blocks, copy.blocks, strict=True))
    saved = bench.give_blocks(second)
    places = range(bench.host_blocks)[::-1]
    bench.swap_out = list(zip(saved, places, strict=False))
    bench.take_blocks(bench.begin([1]), 1)
    bench.take_blocks(second, len(saved))
    bench.swap_in = list(zip(places, second.blocks, strict=False))
    copy.computed = 28
    bench.submit({copy.seq_id: 1})
    bench.collect_all()
    bench.run_ahead([first, second, copy], 6)
    bench.collect_all()
    check_tokens(model, [first, second, copy], bench.info.dtype, quality)


@clause("worker.steps.failure@1", Level.WORKER)
def test_a_step_fails_among_others(target: Target, model: Model, rng: np.random.Generator, quality: Quality) -> None:
    """A step that fails among others in flight fails alone: its error comes out of its own collect, and the others give their tokens."""
    fault = _Fault()
    with running(fault.put_into(target), model) as bench:
        depth = bench.info.steps_in_flight
        sequences = [bench.begin(prompt, 2) for prompt in random_prompts(rng, model, [12, 23, 9])]
        lost = bench.begin(PROMPT)
        bench.submit({sequences[0].seq_id: 12})
        if not depth:
            bench.collect()
        fault.on = True
        bench.submit({lost.seq_id: len(PROMPT)})
        fault.on = False
        if depth:
            bench.collect()
        if depth > 1:
            bench.submit({sequences[1].seq_id: 23})
        with pytest.raises(Exception, match=_Fault.TEXT):
            bench.collect()
        bench.collect_all()
        bench.finish(lost)
        bench.run_ahead(sequences, 5)
        bench.collect_all()
        check_tokens(model, sequences, bench.info.dtype, quality)


@clause("worker.steps.sleep@1", Level.WORKER, capability="memory.sleep.1")
def test_sleep_with_a_step_in_flight(target: Target, bench: WorkerBench, model: Model, quality: Quality) -> None:
    """A sleep waits for the steps in flight; their outputs are collected after it as before, asleep or awake."""
    sequence = bench.begin(PROMPT, 2)
    bench.submit()
    sleep(bench.worker, level_plan(1, target.tier))
    bench.collect_all()
    wake(bench.worker)
    bench.forget_kv()
    bench.run([sequence], 5)
    check_tokens(model, [sequence], bench.info.dtype, quality)


class _Fault:
    """Makes a target's attention fail in `prepare` while it is on."""

    TEXT = "a fault of the device, put in by the conformance suite"

    def __init__(self) -> None:
        self.on = False

    def put_into(self, target: Target) -> Target:
        """Return the target with this fault."""
        inner = target.descriptor.attention

        def make(device: Any) -> Any:
            attention = inner()(device)  # type: ignore[call-arg]
            prepare = attention.prepare

            def failing(*args: Any, **kwargs: Any) -> Any:
                if self.on:
                    raise RuntimeError(self.TEXT)
                return prepare(*args, **kwargs)

            attention.prepare = failing  # type: ignore[method-assign]
            return attention

        return target.with_descriptor(attention=lambda: make)


# Sampling and embeddings


def _sampled(bench: WorkerBench, count: int = 6, **sampling: Any) -> list[int]:
    sequence = bench.begin(PROMPT, **sampling)
    bench.run([sequence], count)
    bench.finish(sequence)
    return sequence.generated


@clause("worker.sampling.limits@1", Level.WORKER)
def test_limits_of_what_is_sampled(bench: WorkerBench) -> None:
    """Only allowed tokens are sampled, a large enough bias decides, and stop tokens are masked until there are enough tokens."""
    allowed = (3, 70, 141)
    assert set(_sampled(bench, allowed_token_ids=allowed)) <= set(allowed)
    assert set(_sampled(bench, allowed_token_ids=allowed, temperature=3.0, seed=4)) <= set(allowed)
    assert _sampled(bench, count=3, logit_bias={77: 1e4}) == [77] * 3
    stop, *_ = _sampled(bench, count=1)
    held_back = _sampled(bench, count=4, stop_token_ids=frozenset({stop}), min_tokens=3, logit_bias={stop: 1e4})
    assert stop not in held_back[:3]
    assert held_back[3] == stop


@clause("worker.sampling.seeded@1", Level.WORKER)
def test_draws_depend_on_their_seed(bench: WorkerBench, rng: np.random.Generator, model: Model) -> None:
    """Drawn tokens depend on the sequence's seed and nothing else: not on its id, its company, or how often it was drawn before."""
    first = _sampled(bench, temperature=2.0, seed=11)
    assert _sampled(bench, temperature=2.0, seed=11) == first
    company = [bench.begin(prompt, temperature=1.0, seed=3) for prompt in random_prompts(rng, model, [7, 30])]
    sequence = bench.begin(PROMPT, temperature=2.0, seed=11)
    bench.run([*company, sequence], 6)
    assert sequence.generated == first
    others = {tuple(_sampled(bench, temperature=2.0, seed=seed)) for seed in range(20, 26)}
    assert len(others) > 3, "other seeds draw other tokens"


@pytest.mark.parametrize("sampling", [{}, {"temperature": 2.0, "seed": 11}], ids=["greedy", "drawn"])
@clause("worker.drafts.verified@1", Level.WORKER)
def test_drafted_tokens_are_verified(
    bench: WorkerBench, rng: np.random.Generator, model: Model, sampling: dict[str, Any]
) -> None:
    """Each token of a sequence that has drafted ones is sampled as if all before it were right: what comes up to the first wrong guess, and
    at its place, are the tokens of one step each, greedy or drawn with a seed; one more comes after guesses that were all right. So
    drawn ones have the model's distribution. Wrong guesses leave nothing behind, and other sequences of the step do not feel them."""
    wanted = _sampled(bench, 10, **sampling)
    sequence = bench.begin(PROMPT, **sampling)
    other = bench.begin(random_prompts(rng, model, [7])[0], temperature=1.0, seed=3)
    alone = bench.begin(other.tokens, temperature=1.0, seed=3)
    bench.run([alone], 5)
    bench.run([sequence, other], 1)
    wrong = [(token + 1) % model.shape.vocab for token in wanted]
    assert bench.verify(sequence, wanted[1:4], [other]) == wanted[1:5]
    assert bench.verify(sequence, [wanted[5], wrong[6], wanted[7]], [other]) == wanted[5:7]
    assert bench.verify(sequence, wrong[7:9], [other]) == wanted[7:8]
    bench.run([sequence], 10)
    assert sequence.generated == wanted
    assert other.generated == alone.generated[:4]


@clause("worker.sampling.top-k@1", Level.WORKER)
def test_top_k(bench: WorkerBench, model: Model, quality: Quality) -> None:
    """With top_k of 1 a drawn token is the oracle's, at any temperature; with 4 it is one of the oracle's best four."""
    greedy = bench.begin(PROMPT, temperature=5.0, top_k=1, seed=1)
    bench.run([greedy], 4)
    check_tokens(model, [greedy], bench.info.dtype, quality)
    drawn = [bench.begin(PROMPT, temperature=5.0, top_k=4, seed=seed) for seed in range(6)]
    bench.run(drawn, 3)
    for sequence in drawn:
        judged = judge(model, sequence.tokens, sequence.prompt_len, bench.info.dtype)
        fourth = judged.exact.topk(4, dim=-1).values[:, 3]
        chosen = judged.exact.gather(1, judged.tokens[:, None])[:, 0]
        late = (fourth - chosen > 2 * judged.margin).nonzero().flatten().tolist()
        assert late == [], "tokens at these places are not among the likeliest four"
    assert len({tuple(sequence.tokens) for sequence in drawn}) > 1, "at a temperature of 5 not all draws are the same"


@pytest.mark.parametrize("chunk", [256, 7])
@pytest.mark.parametrize("pooling", list(Pooling), ids=str)
@clause("worker.execute.pooling@1", Level.WORKER)
def test_embeddings(bench: WorkerBench, model: Model, pooling: Pooling, chunk: int, quality: Quality) -> None:
    """An embedding request's prompt, whole or in chunks, gives its pooled hidden states once, with the step that ends it, and no token."""
    dtype = bench.info.dtype.to_torch()
    exact, plain = hidden_states(model, PROMPT, torch.float64, dtype)
    rows = {Pooling.LAST: exact[-1], Pooling.CLS: exact[0], Pooling.MEAN: exact.mean(dim=0), Pooling.ALL: exact}
    sequence = bench.begin(PROMPT, pooling=pooling)
    found: dict[int, FloatArray] = {}
    while sequence.pending:
        assert not found, "before the prompt ends there is no embedding"
        output = bench.step({sequence.seq_id: min(chunk, sequence.pending)})
        assert len(output.token_ids) == 0
        found = dict(output.embeddings)
    assert found.keys() == {sequence.seq_id}
    embedding = found[sequence.seq_id]
    assert embedding.dtype == np.float32
    assert embedding.shape == tuple(rows[pooling].shape)
    error = float((torch.from_numpy(embedding).double() - rows[pooling]).abs().max())
    bound = FACTOR * float((plain - exact).abs().max())
    quality.note(error / bound)
    assert error <= bound


@clause("worker.execute.embedded@1", Level.WORKER)
def test_given_embeddings(bench: WorkerBench, model: Model, quality: Quality) -> None:
    """Tokens whose embeddings are given are computed with those in the place of their ids', in a step that mixes both and in later ones.

    A source comes with one step, serves it and the next, and is forgotten when that is said, and when weights are written.
    """
    if EmbeddingKind.ROWS not in bench.info.embedding_kinds:
        pytest.skip("not testable here: the worker takes no embeddings")
    first, end, split = 3, len(PROMPT) - 2, len(PROMPT) // 2
    rows = model.weights["model.embed_tokens.weight"][torch.tensor(PROMPT[first:end])].float().numpy()
    source = EmbeddingSource(EmbeddingKind.ROWS, end - first, {"rows": rows})
    # The ids there say something else.
    shown = [*PROMPT[:first], *([PROMPT[0]] * (end - first)), *PROMPT[end:]]

    def computed(sequence: Served, count: int, **given: Any) -> StepOutput:
        start = sequence.computed
        begin, stop = max(first, start), min(end, start + count)
        tokens = EmbeddedTokens(begin - start, stop - begin, 7, begin - first)
        step = replace(bench.input_of([(sequence, count)]), embedded=(tokens,), **given)
        sequence.computed += count
        return bench.compute(step)

    exact, plain = hidden_states(model, PROMPT, torch.float64, bench.info.dtype.to_torch())
    sequence = bench.begin(shown, pooling=Pooling.ALL)
    computed(sequence, split, new_sources={7: source})
    output = computed(sequence, len(PROMPT) - split)
    error = float((torch.from_numpy(output.embeddings[sequence.seq_id]).double() - exact).abs().max())
    bound = FACTOR * float((plain - exact).abs().max())
    quality.note(error / bound)
    assert error <= bound
    dropped = bench.begin(shown, pooling=Pooling.ALL)
    with pytest.raises(HardpointError):
        computed(dropped, len(PROMPT), dropped_sources=(7,))
    again = bench.begin(shown, pooling=Pooling.ALL)
    computed(again, len(PROMPT), new_sources={7: source})
    bench.worker.write_weights(WeightWrite.UPDATE, _pairs_of(model))
    written = bench.begin(shown, pooling=Pooling.ALL)
    with pytest.raises(HardpointError):
        computed(written, len(PROMPT))


# Blocks


def _overwrite_blocks(bench: WorkerBench, model: Model, rng: np.random.Generator) -> None:
    """Serve others in all blocks that are free."""
    bench.generate(random_prompts(rng, model, [100, 100]), 2)


@clause("worker.kv.poison@1", Level.WORKER, facts="attention test I")
def test_unused_blocks_do_not_matter(parts: Parts, model: Model, rng: np.random.Generator, quality: Quality) -> None:
    """Whatever the KV cache held before, NaN included, has no influence on tokens and log probabilities."""
    with running(parts.target, model) as bench:
        (cache,) = [tensor for noted in parts.caches if (tensor := noted()) is not None]
        cache.fill_(float("nan"))
        del cache
        sequences = bench.generate(random_prompts(rng, model, [1, 23, bench.block_size, 50]), 5, logprobs=2)
        check_tokens(model, sequences, bench.info.dtype, quality)


@clause("worker.kv.swap@1", Level.WORKER)
def test_swapped_blocks_come_back(bench: WorkerBench, model: Model, rng: np.random.Generator, quality: Quality) -> None:
    """A sequence whose blocks went to the host and came back to other blocks goes on with the oracle's tokens."""
    (prompt,) = random_prompts(rng, model, [70])
    sequence = bench.begin(prompt, 2)
    bench.run([sequence], 3)
    blocks = bench.give_blocks(sequence)
    places = range(bench.host_blocks)[::-1]
    bench.swap_out = list(zip(blocks, places, strict=False))
    _overwrite_blocks(bench, model, rng)
    bench.take_blocks(bench.begin([1]), 1)
    bench.take_blocks(sequence, len(blocks))
    bench.swap_in = list(zip(places, sequence.blocks, strict=False))
    bench.run([sequence], 6)
    check_tokens(model, [sequence], bench.info.dtype, quality)


@clause("worker.kv.copy@1", Level.WORKER)
def test_copied_blocks_serve(bench: WorkerBench, model: Model, rng: np.random.Generator, quality: Quality) -> None:
    """A sequence over copies of another's blocks goes on with the oracle's tokens when the other's are overwritten."""
    (prompt,) = random_prompts(rng, model, [50])
    first, second = bench.begin(prompt, 2), bench.begin(prompt, 2)
    bench.run([first], 1)
    bench.take_blocks(second, len(first.blocks))
    bench.copies = list(zip(first.blocks, second.blocks, strict=True))
    second.computed = len(prompt) - 1
    bench.run([second], 1)
    bench.finish(first)
    _overwrite_blocks(bench, model, rng)
    bench.run([second], 5)
    check_tokens(model, [second], bench.info.dtype, quality)


@clause("worker.kv.moves-in-order@1", Level.WORKER)
def test_moves_are_made_in_order(bench: WorkerBench, model: Model, rng: np.random.Generator, quality: Quality) -> None:
    """Within a step, blocks are swapped out, then in, then copied, and all before the step's tokens are computed.

    One device block is saved, filled from the host and copied from in the same step, and its first owner still finds what was saved.
    """
    length = min(bench.block_size, 20)
    a, b, c = (bench.begin(prompt, 2) for prompt in random_prompts(rng, model, [length, length, length]))
    c.tokens[:] = b.tokens
    bench.run([a, b], 1)
    for sequence in (a, b):
        del sequence.tokens[length:]
        sequence.logprobs.clear()
        sequence.computed = length - 1
    (block_a,), (block_b,) = a.blocks[:1], b.blocks[:1]
    bench.swap_out = [(block_b, 0)]
    bench.step({})
    bench.take_blocks(c, 1)
    # The block of a goes to the host, that of b comes into it, and is copied to the one of c.
    bench.swap_out, bench.swap_in, bench.copies = [(block_a, 1)], [(0, block_a)], [(block_a, c.blocks[0])]
    c.computed = length - 1
    bench.run([c], 1)
    bench.swap_in = [(1, block_a)]
    bench.run([a, b, c], 4)
    check_tokens(model, [a, b, c], bench.info.dtype, quality)


# Refusals


@clause("worker.refuse.model@1", Level.WORKER, facts="6.3 worker")
def test_unknown_models_are_refused(target: Target, model: Model, tmp_path: Path) -> None:
    """A model that is not there, or whose architecture nobody knows, is refused with a typed error before memory is taken."""
    config = config_for(target.claims, model)
    refused_load(target, replace(config, model=str(tmp_path / "nothing")), ModelNotFound)
    folder = tmp_path / "unknown"
    write_checkpoint(folder, model.shape, model.weights)
    strange = model.shape.config | {"architectures": ["NobodyForCausalLM"], "model_type": "nobody"}
    (folder / "config.json").write_text(json.dumps(strange))
    error = refused_load(target, replace(config, model=str(folder)), UnsupportedArchitecture)
    assert "NobodyForCausalLM" in str(error), "the error names what was found"


def _check_reasons(error: CapabilityRefused, *words: str) -> None:
    assert error.reasons, "a refusal has reasons"
    assert any(all(word in reason for word in words) for reason in error.reasons), f"{words} in {error.reasons}"


@over(
    dtype=lambda claims: [
        dtype
        for dtype in (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16, DType.FLOAT8_E4M3, DType.INT8, DType.INT64)
        if dtype not in claims.attention.dtypes
    ]
)
@clause("worker.refuse.dtype@1", Level.WORKER, facts="6.3 worker")
def test_unclaimed_types_are_refused(target: Target, model: Model, dtype: DType) -> None:
    """A type of weights and activations that is not claimed is refused with reasons before the weights are loaded."""
    config = config_for(target.claims, model, dtype=dtype)
    _check_reasons(refused_load(target, config, CapabilityRefused), dtype)


@over(
    kv_dtype=lambda claims: [
        dtype
        for dtype in (DType.FLOAT8_E4M3, DType.FLOAT8_E5M2, DType.INT8, DType.INT64)
        if not any(dtype in kept for kept in claims.attention.kv_dtypes.values())
    ]
)
@clause("worker.refuse.kv-dtype@1", Level.WORKER)
def test_unclaimed_cache_types_are_refused(target: Target, model: Model, kv_dtype: DType) -> None:
    """A type of the KV cache that is not claimed is refused with reasons before the weights are loaded."""
    config = config_for(target.claims, model, kv_dtype=kv_dtype)
    _check_reasons(refused_load(target, config, CapabilityRefused), kv_dtype)


@over(block_size=lambda claims: [size for size in (0, 3, 7, 24, 1000) if size not in claims.attention.block_sizes])
@clause("worker.refuse.block-size@1", Level.WORKER, facts="6.3 worker")
def test_unclaimed_block_sizes_are_refused(target: Target, model: Model, block_size: int) -> None:
    """A block size that is not claimed is refused with reasons before the weights are loaded, and never replaced by another."""
    config = config_for(target.claims, model, block_size=block_size)
    _check_reasons(refused_load(target, config, CapabilityRefused), str(block_size))


def _unclaimed_head_dims(claims: Capabilities) -> list[int]:
    return [size for size in (10, 12, 36, 100, 264, 1024) if size not in claims.attention.head_dims][:3]


@over(head_dim=_unclaimed_head_dims)
@clause("worker.refuse.head-dim@1", Level.WORKER)
def test_unclaimed_head_dims_are_refused(target: Target, head_dim: int | None) -> None:
    """A model whose heads have a size that is not claimed is refused with reasons before the weights are loaded."""
    if head_dim is None:
        return  # the claims cover every size that is tried
    model = tiny_model(shape_for(target.claims, head_dim=head_dim))
    _check_reasons(refused_load(target, config_for(target.claims, model), CapabilityRefused), str(head_dim))


@clause("worker.refuse.window@1", Level.WORKER, capability="attention.sliding_window", refusal=True)
def test_windows_are_refused(target: Target) -> None:
    """A model with a sliding window is refused with reasons where windows are not claimed; it is never run without one."""
    model = tiny_model(shape_for(target.claims, window=7))
    _check_reasons(refused_load(target, config_for(target.claims, model), CapabilityRefused), "sliding_window")


@clause("worker.refuse.context@1", Level.WORKER)
def test_contexts_beyond_the_model_are_refused(target: Target, model: Model) -> None:
    """A context longer than the model's is refused before the weights are loaded."""
    config = config_for(target.claims, model, max_model_len=model.shape.max_len + 1)
    error = refused_load(target, config, (ConfigError, CapabilityRefused))
    assert str(model.shape.max_len) in str(error), "the error says what is possible"


# Weights


def _truncated(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size * 2 // 3])


def _with_bad_header(file: Path) -> None:
    file.write_bytes(b"\xff" * 64 + file.read_bytes()[64:])


def _emptied(file: Path) -> None:
    file.write_bytes(b"")


def _without_a_tensor(file: Path) -> None:
    _resave(file, lambda weights: weights.pop("model.layers.1.mlp.down_proj.weight"))


def _with_a_wrong_shape(file: Path) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    _resave(file, lambda weights: weights.update({name: weights[name][:-1].clone()}))


def _resave(file: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    from safetensors.torch import load, save_file

    weights = load(file.read_bytes())
    change(weights)
    save_file(weights, str(file), metadata={"format": "pt"})


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(_truncated, id="truncated"),
        pytest.param(_with_bad_header, id="header"),
        pytest.param(_emptied, id="empty"),
        pytest.param(_without_a_tensor, id="missing-tensor"),
        pytest.param(_with_a_wrong_shape, id="shape"),
    ],
)
@clause("worker.weights.corrupt@1", Level.WORKER)
def test_corrupt_weights(target: Target, model: Model, damage: Callable[[Path], None], tmp_path: Path) -> None:
    """Weights that are cut off, damaged, or not those of the configuration are CorruptWeights, and no memory of them stays."""
    folder = tmp_path / "model"
    write_checkpoint(folder, model.shape, model.weights)
    damage(folder / "model.safetensors")
    worker = target.worker(config_for(target.claims, replace(model, path=str(folder))))
    try:
        worker.start()
        with pytest.raises(CorruptWeights):
            worker.load()
        gc.collect()
        assert worker.status().memory.allocated == 0
    finally:
        worker.shutdown()


@clause("worker.weights.update@1", Level.WORKER)
def test_updated_weights_serve(bench: WorkerBench, model: Model, other_model: Model, quality: Quality) -> None:
    """Weights that are replaced in place give the tokens of the new ones, and the number of those used is returned."""
    _serves(bench, model, quality)
    assert bench.worker.write_weights(WeightWrite.UPDATE, _pairs_of(other_model)) == len(other_model.weights)
    _serves(bench, other_model, quality)
    name = "model.norm.weight"
    changed = Model(model.shape, "", dict(other_model.weights) | {name: model.weights[name] * 2})
    assert bench.worker.write_weights(WeightWrite.UPDATE, [(name, changed.weights[name])]) == 1
    _serves(bench, changed, quality)


@clause("worker.weights.reload@1", Level.WORKER)
def test_reloaded_weights_serve(bench: WorkerBench, model: Model, other_model: Model, quality: Quality) -> None:
    """A reload from another checkpoint of the same model serves that one, and a further reload reads it again."""
    assert bench.worker.write_weights(WeightWrite.RELOAD, model=other_model.path) == len(model.weights)
    _serves(bench, other_model, quality)
    bench.worker.write_weights(WeightWrite.UPDATE, _pairs_of(model))
    _serves(bench, model, quality)
    assert bench.worker.write_weights(WeightWrite.RELOAD) == len(model.weights)
    _serves(bench, other_model, quality)


@clause("worker.weights.reload-refused@1", Level.WORKER)
def test_reload_of_another_model_is_refused(
    target: Target, bench: WorkerBench, model: Model, tmp_path: Path, quality: Quality
) -> None:
    """A reload from a checkpoint that is not there or of another shape is a typed error, and the weights stay as they were."""
    wider = tiny_model(shape_for(target.claims, intermediate=128))
    for path, error in ((wider.path, ModelError), (str(tmp_path / "nothing"), ModelNotFound)):
        with pytest.raises(error):
            bench.worker.write_weights(WeightWrite.RELOAD, model=path)
        assert bench.worker.status().missing_weights == frozenset()
    _serves(bench, model, quality)


def _unknown_name(model: Model) -> tuple[str, torch.Tensor]:
    return "model.layers.99.nobody.weight", torch.zeros(2, 2)


def _wrong_shape(model: Model) -> tuple[str, torch.Tensor]:
    return "model.norm.weight", torch.zeros(model.shape.hidden + 1)


@pytest.mark.parametrize(
    "bad", [pytest.param(_unknown_name, id="unknown-name"), pytest.param(_wrong_shape, id="wrong-shape")]
)
@clause("worker.weights.update-refused@1", Level.WORKER)
def test_wrong_update_is_refused(
    bench: WorkerBench, model: Model, bad: Callable[[Model], tuple[str, torch.Tensor]], quality: Quality
) -> None:
    """An update that begins with a tensor that is not the model's is CorruptWeights, and the weights stay as they were."""
    with pytest.raises(CorruptWeights):
        bench.worker.write_weights(WeightWrite.UPDATE, [bad(model)])
    assert bench.worker.status().missing_weights == frozenset()
    _serves(bench, model, quality)


@clause("worker.weights.update-failure@1", Level.WORKER, facts="allocator fact 43")
def test_update_that_breaks_off(bench: WorkerBench, model: Model, other_model: Model, quality: Quality) -> None:
    """When an update fails after its first tensor, its error comes out and all weights are missing until they are loaded again."""

    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield from _pairs_of(other_model)[:3]
        raise ConnectionError("the sender is gone")

    with pytest.raises(ConnectionError, match="the sender is gone"):
        bench.worker.write_weights(WeightWrite.UPDATE, failing())
    assert bench.worker.status().missing_weights == set(model.weights)
    sequence = bench.begin(PROMPT, 2)
    with pytest.raises(WeightsMissing):
        bench.step()
    bench.worker.write_weights(WeightWrite.RELOAD)
    bench.run([sequence], 3)
    check_tokens(model, [sequence], bench.info.dtype, quality)


# Several workers, and the end of one


@clause("worker.shutdown.gives-back@1", Level.WORKER, facts="6.3 worker")
def test_shutdown_gives_everything_back(target: Target, parts: Parts, model: Model) -> None:
    """After shutdown nothing of the allocator's memory is handed out or mapped, also where it was asleep."""
    for asleep in (False, *([True] if 1 in parts.target.claims.memory.sleep_levels else [])):
        with running(parts.target, model, swapped=40) as bench:
            bench.begin(PROMPT)
            bench.step()
            if asleep:
                sleep(bench.worker, level_plan(1, target.tier))
        del bench
        gc.collect()
        (allocator,) = parts.allocators
        stats = allocator.stats()
        assert stats.allocated == 0, "bytes are still handed out"
        assert sum(tag.mapped for tag in stats.tags.values()) == 0, "memory is still mapped"
        assert sum(tag.backed_up for tag in stats.tags.values()) == 0, "backups are still held"
        parts.allocators.clear()


@pytest.mark.parametrize("state", ["made", "started", "loaded", "served", "failed"])
@clause("worker.shutdown.twice@1", Level.WORKER, facts="6.3 worker")
def test_shutdown_in_any_state(target: Target, model: Model, state: str) -> None:
    """Shutdown is callable in any state and idempotent."""
    config = config_for(target.claims, model)
    worker = target.worker(replace(config, model="/nowhere/at/all") if state == "failed" else config)
    if state == "served":
        WorkerBench(worker, config).generate([PROMPT], 1)
    elif state != "made":
        worker.start()
        if state == "loaded":
            worker.load()
        elif state == "failed":
            with pytest.raises(ModelNotFound):
                worker.load()
    worker.shutdown()
    worker.shutdown()


@clause("worker.process.second@1", Level.WORKER, facts="6.3 worker")
def test_a_second_worker_in_the_process(target: Target, model: Model, other_model: Model, quality: Quality) -> None:
    """After one worker's shutdown another one in the same process serves its own model."""
    for each in (model, other_model, model):
        with running(target, each) as bench:
            _serves(bench, each, quality)


@clause("worker.process.side-by-side@1", Level.WORKER, facts="allocator fact 40")
def test_two_workers_side_by_side(
    target: Target, model: Model, other_model: Model, rng: np.random.Generator, quality: Quality
) -> None:
    """Two workers in one process that step in turns serve each their own model, and one's sleep or end leaves the other as it is."""
    with running(target, model) as first:
        (prompt,) = random_prompts(rng, model, [37])
        ours = first.begin(prompt, 2)
        with running(target, other_model) as second:
            theirs = second.begin(prompt, 2)
            for count in (1, 2, 3):
                first.run([ours], count)
                second.run([theirs], count)
            if 1 in target.claims.memory.sleep_levels:
                sleep(first.worker, level_plan(1, target.tier))
                second.run([theirs], 5)
                assert second.worker.status().memory.asleep == frozenset()
                wake(first.worker)
                first.forget_kv()
            first.run([ours], 5)
            second.run([theirs], 6)
        first.run([ours], 7)
        check_tokens(model, [ours], first.info.dtype, quality)
        check_tokens(other_model, [theirs], first.info.dtype, quality)


# Sleep


@pytest.mark.parametrize("tags", [(WEIGHTS,), (KV_CACHE,), (WEIGHTS, KV_CACHE)], ids=["weights", "kv", "both"])
@clause("worker.sleep.asleep@1", Level.WORKER, capability="memory.sleep.1", facts="allocator fact 47")
def test_nothing_runs_while_asleep(
    target: Target, bench: WorkerBench, model: Model, tags: tuple[str, ...], quality: Quality
) -> None:
    """While weights or KV cache are asleep a step is MemoryAsleep; while the weights are, so is every way to write them."""
    sequence = bench.begin(PROMPT, 2)
    bench.run([sequence], 2)
    sleep(bench.worker, replace(level_plan(1, target.tier), tags=frozenset(tags)))
    worker = bench.worker
    assert worker.status().memory.asleep == set(tags)
    writers: list[Callable[[], object]] = [
        lambda: worker.write_weights(WeightWrite.UPDATE, _pairs_of(model)),
        lambda: worker.write_weights(WeightWrite.RELOAD),
        lambda: worker.write_weights(WeightWrite.DECLARE),
    ]
    for call in [bench.step, *(writers if WEIGHTS in tags else [])]:
        with pytest.raises(MemoryAsleep):
            call()
    wake(worker)
    bench.forget_kv()
    bench.run([sequence], 5)
    check_tokens(model, [sequence], bench.info.dtype, quality)


@clause("worker.sleep.books@1", Level.WORKER, capability="memory.sleep.1", facts="allocator fact 1, allocator fact 24")
def test_books_around_a_sleep(target: Target, bench: WorkerBench) -> None:
    """A sleep gives back what weights and KV cache had mapped, and wake takes the same again; the reports agree with the books."""
    before = bench.worker.status().memory
    slept = sleep(bench.worker, level_plan(1, target.tier))
    during = bench.worker.status().memory
    assert during.asleep >= {WEIGHTS, KV_CACHE}
    assert during.tags[WEIGHTS].mapped == during.tags[KV_CACHE].mapped == 0
    gone = sum(before.tags[tag].mapped - during.tags[tag].mapped for tag in before.tags)
    assert slept.unmapped == gone > 0
    assert slept.preserved + slept.skipped >= before.tags[WEIGHTS].allocated
    assert slept.discarded >= before.tags[KV_CACHE].allocated
    assert slept.still_asleep == during.asleep
    woken = wake(bench.worker)
    after = bench.worker.status().memory
    assert woken.unmapped == gone
    assert woken.still_asleep == after.asleep == frozenset()
    for tag, books in before.tags.items():
        assert (after.tags[tag].allocated, after.tags[tag].mapped) == (books.allocated, books.mapped), tag


@clause(
    "worker.sleep.addresses@1", Level.WORKER, capability="memory.sleep.1", facts="allocator fact 1, allocator fact 42"
)
def test_the_cache_stays_where_it_is(target: Target, parts: Parts, model: Model, quality: Quality) -> None:
    """After sleep and wake the worker's KV cache is at the same address, with the live blocks' bytes, and no other one is made."""
    with running(parts.target, model) as bench:
        sequence = bench.begin(PROMPT, 2)
        bench.run([sequence], 3)
        (cache,) = [tensor for noted in parts.caches if (tensor := noted()) is not None]
        address, made = cache.data_ptr(), len(parts.caches)
        axis = bench.info.attention.kv_cache.axes.index("block") + 1
        live = torch.tensor(sequence.blocks, device=cache.device)
        before = cache.index_select(axis, live).cpu()
        sleep(bench.worker, level_plan(1, target.tier, live_blocks=sequence.blocks))
        wake(bench.worker)
        assert cache.data_ptr() == address
        assert len(parts.caches) == made
        held = cache.index_select(axis, live).cpu()
        assert torch.equal(held.view(torch.uint8), before.view(torch.uint8)), "live blocks have other bytes than before"
        cache.zero_()
        bench.forget_kv()
        bench.run([sequence], 5)
        assert int(cache.index_select(axis, live).count_nonzero()) > 0, "the worker uses another cache"
        check_tokens(model, [sequence], bench.info.dtype, quality)
        del cache


@clause("worker.sleep.repeated@1", Level.WORKER, capability="memory.sleep.1", facts="allocator fact 9")
def test_repeated_sleep_and_wake(target: Target, bench: WorkerBench, model: Model, quality: Quality) -> None:
    """A second sleep and a second wake do nothing, and their reports say so."""
    sleep(bench.worker, level_plan(1, target.tier))
    again = sleep(bench.worker, level_plan(1, target.tier))
    assert (again.preserved, again.discarded, again.unmapped) == (0, 0, 0)
    wake(bench.worker)
    idle = wake(bench.worker)
    assert (idle.preserved, idle.unmapped) == (0, 0)
    _serves(bench, model, quality)


@clause("worker.sleep.unknown-tag@1", Level.WORKER, capability="memory.sleep.1", facts="allocator fact 12")
def test_unknown_tags(target: Target, bench: WorkerBench, model: Model, quality: Quality) -> None:
    """A sleep or wake that names an unknown tag is UnknownTag, and nothing is done, not even for the tags that are known."""
    with pytest.raises(UnknownTag):
        sleep(bench.worker, replace(level_plan(1, target.tier), tags=frozenset({WEIGHTS, "nobody"})))
    assert bench.worker.status().memory.asleep == frozenset()
    sleep(bench.worker, level_plan(1, target.tier))
    asleep = bench.worker.status().memory.asleep
    with pytest.raises(UnknownTag):
        wake(bench.worker, [WEIGHTS, "nobody"])
    assert bench.worker.status().memory.asleep == asleep
    wake(bench.worker)
    _serves(bench, model, quality)


@clause("worker.sleep.partial-wake@1", Level.WORKER, capability="memory.sleep.1", facts="allocator fact 11")
def test_partial_wake(target: Target, bench: WorkerBench, model: Model, other_model: Model, quality: Quality) -> None:
    """The weights can be woken alone and written while the KV cache is still asleep; the new ones serve when it is woken too."""
    sleep(bench.worker, level_plan(1, target.tier))
    report = wake(bench.worker, [WEIGHTS])
    assert KV_CACHE in report.still_asleep
    assert WEIGHTS not in report.still_asleep
    assert bench.worker.status().memory.tags[KV_CACHE].mapped == 0
    bench.worker.write_weights(WeightWrite.UPDATE, _pairs_of(other_model))
    wake(bench.worker)
    _serves(bench, other_model, quality)


@clause("worker.sleep.level2-missing@1", Level.WORKER, capability="memory.sleep.2", facts="allocator fact 43")
def test_discarded_weights_never_serve(target: Target, bench: WorkerBench, model: Model) -> None:
    """After a sleep of level 2 all weights are missing and a step is WeightsMissing, awake or not."""
    bench.begin(PROMPT)
    sleep(bench.worker, level_plan(2, target.tier))
    assert bench.worker.status().missing_weights == set(model.weights)
    with pytest.raises((MemoryAsleep, WeightsMissing)):
        bench.step()
    wake(bench.worker)
    assert bench.worker.status().missing_weights == set(model.weights)
    with pytest.raises(WeightsMissing):
        bench.step()


@pytest.mark.parametrize("way", ["reload", "update", "update-in-two", "declare"])
@clause("worker.sleep.level2-return@1", Level.WORKER, capability="memory.sleep.2", facts="allocator fact 43")
def test_ways_back_from_level_2(
    target: Target, bench: WorkerBench, model: Model, other_model: Model, way: str, quality: Quality
) -> None:
    """After level 2, a reload, an update with all weights, or a declaration makes the worker serve again; a part of them does not."""
    sleep(bench.worker, level_plan(2, target.tier))
    wake(bench.worker)
    if way == "reload":
        bench.worker.write_weights(WeightWrite.RELOAD)
    elif way == "declare":
        bench.worker.write_weights(WeightWrite.DECLARE)
        assert bench.worker.status().missing_weights == frozenset()
        # The content is undefined: that the step is taken is all that can be asked for.
        assert len(bench.generate([PROMPT], 1)[0].generated) == 1
        bench.worker.write_weights(WeightWrite.RELOAD)
    else:
        pairs = _pairs_of(other_model)
        if way == "update-in-two":
            bench.worker.write_weights(WeightWrite.UPDATE, pairs[:5])
            assert bench.worker.status().missing_weights == {name for name, _ in pairs[5:]}
            waiting = bench.begin(PROMPT)
            with pytest.raises(WeightsMissing):
                bench.step()
            bench.finish(waiting)
            pairs = pairs[5:]
        bench.worker.write_weights(WeightWrite.UPDATE, pairs)
    assert bench.worker.status().missing_weights == frozenset()
    _serves(bench, other_model if way.startswith("update") else model, quality)


@pytest.mark.parametrize(
    "tier", [pytest.param(tier, id=tier.value, marks=proves(f"memory.tier.{tier.value}")) for tier in SleepTier]
)
@clause("worker.sleep.update-survives@1", Level.WORKER, capability="memory.sleep.1", facts="allocator fact 8")
def test_updates_survive_the_next_sleep(
    target: Target,
    bench: WorkerBench,
    model: Model,
    other_model: Model,
    tier: SleepTier,
    tmp_path: Path,
    quality: Quality,
) -> None:
    """Weights that were updated between two sleeps are the new ones after the second: no kept backup and no source hides a write."""
    sleep(bench.worker, level_plan(1, tier, str(tmp_path)))
    wake(bench.worker)
    _serves(bench, model, quality)
    bench.worker.write_weights(WeightWrite.UPDATE, _pairs_of(other_model))
    # What was updated is in no checkpoint, so its source cannot be asked for until it is loaded again.
    sleep(bench.worker, level_plan(1, target.tier if tier is SleepTier.SOURCE else tier, str(tmp_path)))
    wake(bench.worker)
    _serves(bench, other_model, quality)


@clause("worker.sleep.source-void@1", Level.WORKER, capability="memory.tier.source", facts="allocator fact 8")
def test_updated_weights_have_no_source(bench: WorkerBench, other_model: Model, model: Model, quality: Quality) -> None:
    """A sleep to the tier source is refused with reasons for updated weights, and possible again after a reload."""
    plan = level_plan(1, SleepTier.SOURCE)
    bench.worker.write_weights(WeightWrite.UPDATE, _pairs_of(other_model))
    with pytest.raises(CapabilityRefused) as caught:
        sleep(bench.worker, plan)
    assert caught.value.reasons, "refused without a reason"
    assert bench.worker.status().memory.asleep == frozenset()
    _serves(bench, other_model, quality)
    bench.worker.write_weights(WeightWrite.RELOAD, model=other_model.path)
    sleep(bench.worker, plan)
    wake(bench.worker)
    _serves(bench, other_model, quality)


@clause("worker.sleep.backup-clean@1", Level.WORKER, capability="memory.sleep.1", facts="allocator fact 8")
def test_clean_backups_are_not_copied_again(target: Target, bench: WorkerBench, model: Model, quality: Quality) -> None:
    """A second sleep of weights that nobody wrote may keep the first one's backup; with `verify` it is compared, and holds."""
    sleep(bench.worker, level_plan(1, target.tier))
    wake(bench.worker)
    bench.generate([PROMPT], 2)
    report = sleep(bench.worker, level_plan(1, target.tier, verify=True))
    weights = bench.worker.status().memory.tags[WEIGHTS]
    assert report.preserved + report.skipped >= weights.allocated
    wake(bench.worker)
    _serves(bench, model, quality)


@pytest.mark.parametrize("level", [pytest.param(level, marks=proves(f"memory.sleep.{level}")) for level in (1, 2)])
@clause("worker.sleep.level-refused@1", Level.WORKER, refusal=True)
def test_unclaimed_levels_are_refused(
    target: Target, bench: WorkerBench, model: Model, level: int, quality: Quality
) -> None:
    """A sleep of a level that is not claimed is a typed error, nothing is put to sleep, and the worker goes on."""
    with pytest.raises(HardpointError):
        sleep(bench.worker, level_plan(level, target.tier))
    assert bench.worker.status().memory.asleep == frozenset()
    _serves(bench, model, quality)


@pytest.mark.parametrize(
    "tier", [pytest.param(tier, id=tier.value, marks=proves(f"memory.tier.{tier.value}")) for tier in SleepTier]
)
@clause("worker.sleep.tier-refused@1", Level.WORKER, refusal=True)
def test_unclaimed_tiers_are_refused(
    bench: WorkerBench, model: Model, tier: SleepTier, tmp_path: Path, quality: Quality
) -> None:
    """A sleep to a tier that is not claimed is a typed error, nothing is put to sleep, and the worker goes on."""
    with pytest.raises(HardpointError):
        sleep(bench.worker, level_plan(1, tier, str(tmp_path)))
    assert bench.worker.status().memory.asleep == frozenset()
    _serves(bench, model, quality)
