"""Captured steps with prompts: the launches of one empty step, made again after `prepare`, compute any step of its size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from hardpoint.interfaces import AttentionLayer, AttentionPlan, AttentionRequest, Device, DType, StepBatch, mixed_seqs
from hardpoint.triton import TritonAttention
from hardpoint.triton.step import MAX_PROMPTS

DEVICE = Device("interpreted", 0, "interpreter", "cpu", simulated=True)
BLOCK_SIZE, BLOCKS, SEQS, MOST = 16, 400, 5, 700
GUARD = 3

# The result of a tile without queries is a division by zero, which nobody stores.
pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|invalid value) encountered:RuntimeWarning")


@dataclass
class Work:
    """A step's batch, inputs and output; rows of inputs and output before and after it are guards."""

    batch: StepBatch
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor


class Bench:
    """Attention over one cache, with the launches of captured steps."""

    def __init__(self, layer: AttentionLayer, sizes: tuple[int, ...], seqs: int = SEQS, graphs: bool = True) -> None:
        self.layer, self.seqs = layer, seqs
        self.attention = TritonAttention(DEVICE)
        plan = self.attention.plan(AttentionRequest((layer,), DType.FLOAT32, DType.FLOAT32, BLOCK_SIZE, MOST))
        assert isinstance(plan, AttentionPlan)
        self.plan = plan
        generator = torch.Generator().manual_seed(1)
        self.cache = torch.randn(plan.kv_cache.shape(BLOCKS), generator=generator)
        self.sinks = torch.ones(layer.num_heads) if layer.sinks else None
        self.captured: dict[int, tuple[Work, Any]] = {}
        if graphs:
            self.attention.begin_capture(plan, seqs)
            self.attention.begin_mixed_capture(plan, seqs, sizes)
            for size in reversed(sizes):
                work = self.work(self.padded([], [], size, np.zeros((seqs, 4), np.int32)))
                self.captured[size] = work, self.attention.prepare(plan, work.batch)
                self.compute(*self.captured[size])
            self.attention.end_capture()

    def work(self, batch: StepBatch, seed: int = 0) -> Work:
        generator, tokens = torch.Generator().manual_seed(seed), batch.num_tokens
        heads, kv_heads, dim = self.layer.num_heads, self.layer.num_kv_heads, self.layer.head_dim
        # What is read beside the rows of a step is no number.
        fused = torch.full((tokens + 2 * GUARD, heads + 2 * kv_heads, dim), float("nan"))
        fused[GUARD:-GUARD] = torch.randn(tokens, heads + 2 * kv_heads, dim, generator=generator)
        out = torch.full((tokens + 2 * GUARD, heads, dim), 7.0)
        q, k, v = fused[GUARD:-GUARD].split([heads, kv_heads, kv_heads], 1)
        return Work(batch, q, k, v, out)

    def compute(self, work: Work, metadata: Any) -> None:
        self.attention.write_kv(0, work.k, work.v, self.cache[0], metadata)
        out = work.out[GUARD:-GUARD]
        self.attention.forward(0, work.q, work.k, work.v, self.cache[0], metadata, out, self.sinks)

    def eager(self, batch: StepBatch, seed: int) -> torch.Tensor:
        work = self.work(batch, seed)
        self.compute(work, self.attention.prepare(self.plan, batch))
        return work.out[GUARD:-GUARD]

    def replay(self, batch: StepBatch, size: int, seed: int, given: Work) -> torch.Tensor:
        """Return the output of the captured step of `size` tokens for a padded batch, with the inputs of an eager one."""
        work, metadata = self.captured[size]
        tokens = given.batch.num_tokens
        for place, values in ((work.q, given.q), (work.k, given.k), (work.v, given.v)):
            place.fill_(float("nan"))
            place[:tokens] = values
        work.out.fill_(7.0)
        self.attention.prepare(self.plan, batch)
        self.compute(work, metadata)
        assert bool((work.out[:GUARD] == 7.0).all() and (work.out[GUARD + tokens :] == 7.0).all()), "padding is written"
        return work.out[GUARD : GUARD + tokens]

    def padded(self, queries: list[int], contexts: list[int], size: int, table: Any) -> StepBatch:
        return step(queries, contexts, table, size, mixed_seqs(self.seqs, size))


def step(queries: list[int], contexts: list[int], table: Any, tokens: int = 0, seqs: int = 0) -> StepBatch:
    """Return the step of sequences in the rows of a table, from the first, padded to so many tokens and sequences."""
    tokens, seqs = max(tokens, sum(queries)), max(seqs, len(queries))
    positions = np.concatenate(
        [np.arange(c - q, c) for q, c in zip(queries, contexts, strict=True)] or [np.zeros(0, int)]
    )
    owner = np.repeat(np.arange(len(queries)), queries)
    slots = table[owner, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    behind, nothing = tokens - sum(queries), np.zeros((0, 2), np.int32)
    empty = [0] * (seqs - len(queries))
    return StepBatch(
        token_ids=np.zeros(tokens, np.int64),
        positions=np.concatenate((positions, np.zeros(behind))).astype(np.int64),
        slot_mapping=np.concatenate((slots, np.full(behind, -1))).astype(np.int32),
        query_start=np.cumsum([0, *queries, *empty]).astype(np.int32),
        context_lens=np.array([*contexts, *empty], np.int32),
        block_table=table,
        rows=np.array([*range(len(queries)), *empty], np.int32),
        seq_ids=np.arange(seqs, dtype=np.int64),
        num_decodes=next(
            (i for i, (q, c) in enumerate(zip(queries, contexts, strict=True)) if q != 1 or c < 2), len(queries)
        ),
        sample_rows=np.zeros(0, np.int32),
        sample_seq_ids=np.zeros(0, np.int64),
        swap_out=nothing,
        swap_in=nothing,
        copies=nothing,
        preempted=np.zeros(0, np.int64),
    )


LAYERS = {
    "plain": AttentionLayer(4, 2, 16, 0.25),
    "window": AttentionLayer(4, 2, 16, 0.25, sliding_window=300),
    "sinks": AttentionLayer(6, 2, 16, 0.25, sinks=True),
}
STEPS = [
    ([1, 1, 30], [650, 40, 30]),  # decodes, of which one is split, and a prompt
    ([20, 10], [600, 10]),  # the last chunk of a long prompt, whose context is long enough to be split
    ([1, 1, 1], [700, 300, 2]),
    ([1, 1, 1, 1, 60], [2, 16, 17, 513, 64]),  # as many sequences and tokens as there are
    ([1], [1]),  # a prompt of one token
    ([3, 1], [640, 1]),
]


def random_step(rng: Any) -> tuple[list[int], list[int]]:
    """Return queries and contexts of decodes, then of prompts and chunks of them, of up to 64 tokens."""
    decodes = int(rng.integers(0, SEQS + 1))
    queries = [1] * decodes
    for _ in range(int(rng.integers(decodes == 0, SEQS - decodes + 1))):
        queries.append(int(rng.integers(1, 13)))
    before = [
        int(rng.choice([0, 1, 15, 255, 256, 600]) if at >= decodes else rng.integers(1, MOST))
        for at in range(len(queries))
    ]
    return queries, [q + b for q, b in zip(queries, before, strict=True)]


@pytest.mark.parametrize("name", LAYERS)
def test_a_captured_step_computes_any_step_with_prompts_bit_by_bit(name: str) -> None:
    rng = np.random.default_rng(0)
    captured, plain = (Bench(LAYERS[name], (16, 64), graphs=graphs) for graphs in (True, False))
    for number, (queries, contexts) in enumerate([*STEPS, *STEPS[::-1], *(random_step(rng) for _ in range(12))]):
        blocks = -(-max(contexts) // BLOCK_SIZE)
        table = rng.permutation(BLOCKS)[: len(queries) * blocks].reshape(len(queries), blocks).astype(np.int32)
        size = 16 if sum(queries) <= 16 else 64
        captured.cache.copy_(plain.cache)
        batch = step(queries, contexts, table)
        wanted = plain.eager(batch, number)
        padded = captured.padded(queries, contexts, size, table)
        found = captured.replay(padded, size, number, captured.work(batch, number))
        assert torch.equal(found, wanted), (queries, contexts)
        assert torch.equal(captured.cache, plain.cache), (queries, contexts)


def test_steps_that_fill_all_tiles_are_computed_whole() -> None:
    """As many prompts as there is room for, each of which leaves a tile unfilled."""
    sizes, seqs = (160,), MAX_PROMPTS + 2
    captured, plain = (Bench(LAYERS["plain"], sizes, seqs, graphs) for graphs in (True, False))
    queries = [1, 1, *[2] * (MAX_PROMPTS - 1), 96]
    contexts = [100, 30, *[5] * (MAX_PROMPTS - 1), 96]
    table = np.random.default_rng(2).permutation(BLOCKS)[: len(queries) * 7].reshape(-1, 7).astype(np.int32)
    batch = step(queries, contexts, table)
    assert captured.attention.can_replay(captured.plan, batch, seqs, BLOCKS)
    wanted = plain.eager(batch, 1)
    found = captured.replay(captured.padded(queries, contexts, 160, table), 160, 1, captured.work(batch, 1))
    assert torch.equal(found, wanted)


def test_steps_with_more_prompts_are_not_replayed() -> None:
    bench = Bench(LAYERS["plain"], (), 40, graphs=False)
    table = np.arange(40, dtype=np.int32)[:, None]
    for prompts, expected in ((MAX_PROMPTS, True), (MAX_PROMPTS + 1, False)):
        batch = step([1, *[2] * prompts], [5, *[2] * prompts], table)
        assert bench.attention.can_replay(bench.plan, batch, 40, BLOCKS) is expected
    # Padding is none.
    empty = step([1], [5], table, tokens=40, seqs=41)
    assert bench.attention.can_replay(bench.plan, empty, 40, BLOCKS)
