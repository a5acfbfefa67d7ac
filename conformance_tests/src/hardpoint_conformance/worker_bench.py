"""A worker driven through its contract alone: what the engine does with it, built by hand."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType

import numpy as np
import pytest
from torch import Tensor

from hardpoint.interfaces import (
    DEFAULT,
    KV_CACHE,
    WEIGHTS,
    Capabilities,
    DeviceAllocator,
    DType,
    MemoryChange,
    MemoryReport,
    ModelInfo,
    Policy,
    Pooling,
    SequencePooling,
    SequenceSampling,
    SleepPlan,
    SleepTier,
    StepBatch,
    StepInput,
    StepOutput,
    TokenLogprobs,
    WakePlan,
    Worker,
    WorkerConfig,
)
from hardpoint.interfaces.errors import HardpointError, WorkerError
from hardpoint_conformance.reference import judge_texts
from hardpoint_conformance.target import Target
from hardpoint_conformance.tiny_model import Model

if TYPE_CHECKING:
    from hardpoint_conformance.plugin import Quality

FLOATS = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)
MAX_SEQS = 8
MAX_TOKENS = 256
_MIN_BLOCKS = 16
_TOKENS = 2048
_DECIDED = 0.2
_IN_FLIGHT = -1


@dataclass
class Served:
    """One sequence that is served.

    Attributes:
        tokens: the prompt, and what was generated.
        wanted: number of best log probabilities asked for; None for none.
        sampling: parameters of `SequenceSampling` other than those of greedy sampling.
        pooling: of an embedding request, which is not sampled.
        computed: tokens whose keys and values are in the cache.
        blocks: device blocks, in order.
        logprobs: of generated tokens, where they were asked for.
    """

    seq_id: int
    prompt_len: int
    tokens: list[int]
    row: int
    wanted: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    pooling: Pooling | None = None
    computed: int = 0
    sampled: bool = False
    blocks: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def pending(self) -> int:
        """Tokens that are known and not computed."""
        return len(self.tokens) - self.computed

    @property
    def generated(self) -> list[int]:
        """The tokens after the prompt."""
        return self.tokens[self.prompt_len :]


def usual_dtype(claims: Capabilities) -> DType:
    """Return the element type that cases are run in which are not about types: the one whose results say most."""
    return next(dtype for dtype in FLOATS if dtype in claims.attention.dtypes)


def config_for(claims: Capabilities, model: Model, **changes: Any) -> WorkerConfig:
    """Return the configuration of a small worker for a model."""
    config = WorkerConfig(
        model=model.path,
        dtype=usual_dtype(claims),
        max_num_batched_tokens=MAX_TOKENS,
        max_num_seqs=MAX_SEQS,
        max_model_len=min(model.shape.max_len, 160),
        swap_space=1 << 20,
        threads=1,
    )
    return replace(config, **changes)


def level_plan(level: int, tier: SleepTier, directory: str | None = None, **parts: Any) -> SleepPlan:
    """Return the plan of a sleep level: 1 preserves the weights, 2 discards them; the KV cache is discarded."""
    weights = Policy.PRESERVE if level == 1 else Policy.DISCARD
    policies = {WEIGHTS: weights, KV_CACHE: Policy.DISCARD}
    return SleepPlan(policies=policies, tier=tier, disk_directory=directory, **parts)


_numbers = itertools.count(1000)
"""Of transactions whose number does not matter: above those that tests give, and growing for every worker of the process."""


def sleep(worker: Worker, plan: SleepPlan, number: int | None = None) -> MemoryReport:
    """Put a worker to sleep."""
    return _changed(worker, plan, number)


def wake(worker: Worker, tags: Iterable[str] | None = None, number: int | None = None) -> MemoryReport:
    """Wake a worker; None for all tags."""
    return _changed(worker, WakePlan(None if tags is None else frozenset(tags)), number)


def _changed(worker: Worker, change: MemoryChange, number: int | None) -> MemoryReport:
    number = next(_numbers) if number is None else number
    worker.begin(number, change)
    return worker.commit(number)


class WorkerBench:
    """A worker with a model and a KV cache of `blocks` blocks, by default enough, and the sequences that it serves.

    Its swap space holds `swapped` tokens. A sequence's blocks are taken in a shuffled order, so that neither neighbours in a table
    nor tables of neighbours are in order. What a step's arrays hold is overwritten as soon as the step is done.
    """

    def __init__(self, worker: Worker, config: WorkerConfig, blocks: int | None = None, swapped: int = 0) -> None:
        self.worker, self.config = worker, config
        worker.start()
        self.info: ModelInfo = worker.load()
        self.profile = worker.profile()
        self.block_size = self.info.attention.block_size
        blocks = blocks or max(_MIN_BLOCKS, _TOKENS // self.block_size)
        self.host_blocks = -(-swapped // self.block_size)
        worker.initialize_kv(blocks, self.host_blocks)
        worker.warm_up()
        self.sequences: dict[int, Served] = {}
        self._free = [int(block) for block in np.random.default_rng(blocks).permutation(blocks)]
        self._free_rows = list(range(config.max_num_seqs))[::-1]
        width = -(-self.info.max_model_len // self.block_size)
        self._table = np.zeros((config.max_num_seqs, width), np.int32)
        self.next_id = 1
        self._finished: list[int] = []
        self._in_flight: deque[tuple[StepBatch, list[tuple[Served, int]]]] = deque()
        self.swap_out: list[tuple[int, int]] = []
        self.swap_in: list[tuple[int, int]] = []
        self.copies: list[tuple[int, int]] = []

    # Sequences

    def begin(
        self, prompt: Sequence[int], logprobs: int | None = None, pooling: Pooling | None = None, **sampling: Any
    ) -> Served:
        """Return a new sequence, of which nothing is computed."""
        row = self._free_rows.pop()
        sequence = Served(self.next_id, len(prompt), list(prompt), row, logprobs, sampling, pooling)
        self.next_id += 1
        self.sequences[sequence.seq_id] = sequence
        return sequence

    def take_blocks(self, sequence: Served, count: int) -> None:
        """Give a sequence blocks until it has `count`."""
        while len(sequence.blocks) < count:
            sequence.blocks.append(self._free.pop())
        self._table[sequence.row, : len(sequence.blocks)] = sequence.blocks

    def give_blocks(self, sequence: Served) -> list[int]:
        """Take a sequence's blocks away, to be the next that are taken; return them."""
        blocks, sequence.blocks = sequence.blocks, []
        self._free += blocks[::-1]
        return blocks

    def finish(self, sequence: Served) -> None:
        """End a sequence; the worker hears of it with the next step."""
        self.give_blocks(sequence)
        self._free_rows.append(sequence.row)
        del self.sequences[sequence.seq_id]
        if sequence.sampled or sequence.pooling is not None:
            self._finished.append(sequence.seq_id)

    def forget_kv(self) -> None:
        """Have all that was computed computed again, for a cache that was discarded."""
        for sequence in self.sequences.values():
            sequence.computed = 0

    # Steps

    def step(self, work: Mapping[int, int] | None = None) -> StepOutput:
        """Compute tokens of sequences, by id: as many as are given, else all pending ones of all sequences.

        A sequence of which nothing is pending after the step is sampled, and its token appended. Raises WorkerError where a sample
        has no token.
        """
        if work is None:
            work = {seq_id: sequence.pending for seq_id, sequence in self.sequences.items()}
        parts = [(self.sequences[seq_id], count) for seq_id, count in work.items() if count]
        parts.sort(key=lambda part: not (part[0].computed and part[1] == 1))
        step = self.input_of(parts)
        output = self.compute(step)
        if output.failed:
            raise WorkerError(
                "a step sampled no token for some of its sequences", found="; ".join(output.failed.values())
            )
        for sequence, count in parts:
            sequence.computed += count
        for index, seq_id in enumerate(step.batch.sample_seq_ids.tolist()):
            sequence = self.sequences[seq_id]
            sequence.tokens.append(int(output.token_ids[index]))
            sequence.sampled = True
            if sequence.wanted is not None:
                sequence.logprobs.append(output.logprobs[index])
        assert len(output.token_ids) == len(step.batch.sample_rows), "one token for each sample"
        _overwrite(step.batch)
        return output

    def verify(self, sequence: Served, guesses: Sequence[int], others: Sequence[Served] = ()) -> list[int]:
        """Compute a sequence's last token with guesses at those that follow, beside the last tokens of others; return what counts of it.

        That are the samples up to the first that is not what was guessed at its place; they are appended to the sequence, and each of the
        others is given its own.
        """
        assert all(one.pending == 1 and one.computed for one in (sequence, *others))
        first, count = len(others), 1 + len(guesses)
        sequence.tokens += guesses
        step = self.input_of([*((one, 1) for one in others), (sequence, count)])
        del sequence.tokens[len(sequence.tokens) - len(guesses) :]
        samples = [*range(first), *[first] * count]
        owners = [*others, *[sequence] * count]
        at = [*(len(one.generated) for one in others), *(len(sequence.generated) + place for place in range(count))]
        batch = replace(
            step.batch,
            sample_rows=np.asarray(samples, np.int32),
            sample_seq_ids=np.asarray([one.seq_id for one in owners], np.int64),
            sample_state_rows=np.asarray([one.row for one in owners], np.int32),
            sample_positions=np.asarray(at, np.int32),
            sample_tokens=np.arange(first + count, dtype=np.int32),
        )
        found: list[int] = self.compute(replace(step, batch=batch)).token_ids.tolist()
        _overwrite(batch)
        for one, token in zip(others, found, strict=False):
            one.tokens.append(token)
            one.computed += 1
        drawn = found[first:]
        right = next(
            (i for i, (guess, token) in enumerate(zip(guesses, drawn, strict=False)) if guess != token), count - 1
        )
        sequence.tokens += drawn[: right + 1]
        sequence.computed += right + 1
        return drawn[: right + 1]

    def compute(self, step: StepInput) -> StepOutput:
        """Have the worker compute a step that was built by hand; return its output."""
        self.worker.submit(step)
        return self.worker.collect()

    def submit(self, work: Mapping[int, int] | None = None) -> None:
        """Submit a step as `step` would, whose tokens are taken by `collect`; until then they are known as -1."""
        if work is None:
            work = {seq_id: sequence.pending for seq_id, sequence in self.sequences.items()}
        parts = [(self.sequences[seq_id], count) for seq_id, count in work.items() if count]
        parts.sort(key=lambda part: not (part[0].computed and part[1] == 1))
        step = self.input_of(parts)
        self.worker.submit(step)
        for sequence, count in parts:
            sequence.computed += count
        sampled = [self.sequences[seq_id] for seq_id in step.batch.sample_seq_ids.tolist()]
        self._in_flight.append((step.batch, [(sequence, len(sequence.tokens)) for sequence in sampled]))
        for sequence in sampled:
            sequence.tokens.append(_IN_FLIGHT)
            sequence.sampled = True

    def collect(self) -> StepOutput:
        """Collect the oldest step, and give its sequences their tokens; its arrays are overwritten, whatever becomes of it."""
        batch, samples = self._in_flight.popleft()
        try:
            output = self.worker.collect()
        finally:
            _overwrite(batch)
        if output.failed:
            raise WorkerError(
                "a step sampled no token for some of its sequences", found="; ".join(output.failed.values())
            )
        for index, (sequence, place) in enumerate(samples):
            sequence.tokens[place] = int(output.token_ids[index])
            if sequence.wanted is not None:
                sequence.logprobs.append(output.logprobs[index])
        return output

    def collect_all(self) -> None:
        """Collect all steps in flight."""
        while self._in_flight:
            self.collect()

    def run_ahead(self, sequences: Sequence[Served], count: int, *, chunk: int = MAX_TOKENS) -> None:
        """Step until `count` tokens are generated of each of these sequences, with as many steps in flight as the worker takes."""
        while any(len(sequence.generated) < count for sequence in sequences):
            self.submit({s.seq_id: min(s.pending, chunk) for s in sequences if len(s.generated) < count})
            if len(self._in_flight) > self.info.steps_in_flight:
                self.collect()

    def generate(
        self, prompts: Sequence[Sequence[int]], count: int, *, chunk: int = MAX_TOKENS, logprobs: int | None = None
    ) -> list[Served]:
        """Return sequences of `prompts` that were served together, with `count` tokens generated, and are finished."""
        sequences = [self.begin(prompt, logprobs) for prompt in prompts]
        self.run(sequences, count, chunk=chunk)
        for sequence in sequences:
            self.finish(sequence)
        return sequences

    def run(self, sequences: Sequence[Served], count: int, *, chunk: int = MAX_TOKENS) -> None:
        """Step until `count` tokens are generated of each of these sequences."""
        while any(len(sequence.generated) < count for sequence in sequences):
            work, left = {}, self.config.max_num_batched_tokens
            for sequence in sequences:
                if len(sequence.generated) < count:
                    work[sequence.seq_id] = min(sequence.pending, chunk, left)
                    left -= work[sequence.seq_id]
            self.step(work)

    def input_of(self, parts: Sequence[tuple[Served, int]]) -> StepInput:
        """Return the step that computes the given numbers of further tokens of these sequences, with the moves that are waiting."""
        size = self.block_size
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for sequence, count in parts:
            end = sequence.computed + count
            self.take_blocks(sequence, -(-end // size))
            token_ids += sequence.tokens[sequence.computed : end]
            positions += range(sequence.computed, end)
            slots += [sequence.blocks[at // size] * size + at % size for at in range(sequence.computed, end)]
        sampled = [i for i, (sequence, count) in enumerate(parts) if count == sequence.pending and not sequence.pooling]
        new = [parts[index][0] for index in sampled if not parts[index][0].sampled]
        batch = StepBatch(
            token_ids=np.asarray(token_ids, np.int64),
            positions=np.asarray(positions, np.int64),
            slot_mapping=np.asarray(slots, np.int32),
            query_start=np.cumsum([0, *(count for _, count in parts)]).astype(np.int32),
            context_lens=np.asarray([sequence.computed + count for sequence, count in parts], np.int32),
            block_table=self._table,
            rows=np.asarray([sequence.row for sequence, _ in parts], np.int32),
            seq_ids=np.asarray([sequence.seq_id for sequence, _ in parts], np.int64),
            num_decodes=sum(count == 1 and sequence.computed > 0 for sequence, count in parts),
            sample_rows=np.asarray(sampled, np.int32),
            sample_seq_ids=np.asarray([parts[index][0].seq_id for index in sampled], np.int64),
            swap_out=_pairs(self.swap_out),
            swap_in=_pairs(self.swap_in),
            copies=_pairs(self.copies),
            preempted=np.empty(0, np.int64),
            state_rows=np.asarray([sequence.row for sequence, _ in parts], np.int32),
            sample_state_rows=np.asarray([parts[index][0].row for index in sampled], np.int32),
            sample_positions=np.asarray([len(parts[index][0].generated) for index in sampled], np.int32),
        )
        finished, self._finished = tuple(self._finished), []
        self.swap_out, self.swap_in, self.copies = [], [], []
        pooled = {s.seq_id: SequencePooling(s.pooling, s.prompt_len) for s, _ in parts if s.pooling is not None}
        return StepInput(batch, tuple(_sampling(sequence) for sequence in new), finished, pooled)

    # Sleep

    def sleep_and_wake(self, plan: SleepPlan) -> None:
        """Sleep as planned, wake everything, and have discarded keys and values computed again."""
        sleep(self.worker, plan)
        wake(self.worker)
        if plan.live_blocks is None:
            self.forget_kv()


def _sampling(sequence: Served) -> SequenceSampling:
    prompt = tuple(sequence.tokens[: sequence.prompt_len])
    parameters = {"seed": 0, "temperature": 0.0, **sequence.sampling}
    return SequenceSampling(sequence.seq_id, prompt, logprobs=sequence.wanted, state_row=sequence.row, **parameters)


def _pairs(pairs: Sequence[tuple[int, int]]) -> Any:
    return np.asarray(pairs, np.int32).reshape(-1, 2)


def _overwrite(batch: StepBatch) -> None:
    """Fill the arrays of a step that is done with numbers that would be felt, as the next step would."""
    for array in (batch.token_ids, batch.positions, batch.slot_mapping, batch.query_start, batch.context_lens):
        array.fill(1)
    for array in (batch.rows, batch.seq_ids, batch.sample_rows, batch.sample_seq_ids, batch.sample_state_rows):
        array.fill(0)


@contextmanager
def running(
    target: Target, model: Model, *, blocks: int | None = None, swapped: int = 0, **changes: Any
) -> Iterator[WorkerBench]:
    """Return a worker of the target that is ready to serve a model; it is shut down at the end."""
    config = config_for(target.claims, model, **changes)
    worker = target.worker(config)
    try:
        yield WorkerBench(worker, config, blocks, swapped)
    finally:
        worker.shutdown()


def refused_load(
    target: Target, config: WorkerConfig, errors: type[HardpointError] | tuple[type[HardpointError], ...]
) -> Any:
    """Check that a worker refuses to start or to load with one of these errors, before any device memory is taken; return the error."""
    worker = target.worker(config)
    before: list[int] = []

    def load() -> None:
        worker.start()
        before.append(worker.status().memory.peak_allocated)
        worker.load()

    try:
        with pytest.raises(errors) as caught:
            load()
        assert all(worker.status().memory.peak_allocated == peak for peak in before), (
            "memory was taken before the refusal"
        )
    finally:
        worker.shutdown()
    return caught.value


def random_prompts(rng: np.random.Generator, model: Model, lengths: Sequence[int]) -> list[list[int]]:
    """Return prompts of random tokens."""
    return [rng.integers(0, model.shape.vocab, length).tolist() for length in lengths]


def edge_lengths(bench: WorkerBench, count: int) -> list[int]:
    """Return lengths of prompts around the borders of blocks that leave room for `count` tokens."""
    size, longest = bench.block_size, bench.info.max_model_len - count
    return [length for length in (1, size - 1, size, size + 1, 2 * size + 1) if 0 < length <= longest]


def check_tokens(model: Model, sequences: Sequence[Served], dtype: DType, quality: Quality) -> None:
    """Judge generated tokens, and log probabilities where there are any, by the oracle.

    In all, the oracle must decide a fifth of the tokens at least: where it allows almost any token, nothing is proved.
    """
    judged = judge_texts(model, [(sequence.tokens, sequence.prompt_len) for sequence in sequences], dtype)
    for sequence, judgement in zip(sequences, judged, strict=True):
        quality.note(judgement.check())
        if sequence.wanted is not None:
            quality.note(judgement.check_logprobs(sequence.logprobs))
    decided = sum(judgement.decided * len(judgement.tokens) for judgement in judged)
    assert decided >= _DECIDED * sum(len(judgement.tokens) for judgement in judged), "the case proves too little"


@dataclass
class Parts:
    """A target that notes which parts its workers make.

    Attributes:
        allocators: in the order in which they were made.
        made: names of all parts made.
        caches: KV caches that the allocators handed out; those of workers' profiles, which are gone, among them.
    """

    target: Target
    allocators: list[DeviceAllocator] = field(default_factory=list)
    made: list[str] = field(default_factory=list)
    caches: list[ReferenceType[Tensor]] = field(default_factory=list)


def watched(target: Target) -> Parts:
    """Return the target with factories that note what they are asked for."""
    found = Parts(target)
    descriptor = target.descriptor

    def noting(part: str) -> Any:
        inner = getattr(descriptor, part)

        def make(*args: Any) -> Any:
            made = inner()(*args)
            found.made.append(part)
            if part == "allocator":
                found.allocators.append(made)
                made.empty = _noting_caches(made.empty, found.caches)
            return made

        return None if inner is None else lambda: make

    parts = {part: noting(part) for part in ("allocator", "attention", "kernels", "graph_runner", "collectives")}
    found.target = target.with_descriptor(**parts)
    return found


def _noting_caches(empty: Callable[..., Tensor], caches: list[ReferenceType[Tensor]]) -> Callable[..., Tensor]:
    def noting(shape: Sequence[int], dtype: DType, tag: str = DEFAULT, *more: Any, **named: Any) -> Tensor:
        tensor = empty(shape, dtype, tag, *more, **named)
        if tag == KV_CACHE:
            caches.append(ReferenceType(tensor))
        return tensor

    return noting
