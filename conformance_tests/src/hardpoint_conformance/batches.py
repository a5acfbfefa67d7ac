"""Cases of paged attention and the bench that runs them: sequences, their places in a KV cache, and the batch of a step.

A `Case` is numbers only: whole sequences of queries, keys and values on the host. A `Placement` says which blocks hold which
sequence. An `AttentionBench` puts both on the target's device, runs steps over any positions of the sequences through the backend
(`prepare`, `write_kv`, `forward`), and brings the results back. What no sequence owns of the cache holds numbers too, as leftovers of
others.

    case = make_case(rng, layer(heads=4, kv_heads=2, head_dim=64), DType.BFLOAT16, [17, 40])
    bench = AttentionBench(target, case)
    spans = [Span(0, 16, 17), Span(1, 30, 40)]
    check(case, spans, bench.run(spans), quality)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pytest
import torch
from torch import Tensor

from hardpoint.interfaces import (
    AttentionBackend,
    AttentionFeature,
    AttentionLayer,
    AttentionPlan,
    AttentionRequest,
    Capabilities,
    DType,
    KVCacheSpec,
    Refusal,
    StepBatch,
)
from hardpoint_conformance.clauses import proves
from hardpoint_conformance.oracle import Expected, Numbers, expected, joined

if TYPE_CHECKING:
    from hardpoint.interfaces.batch import Int32Array, Int64Array
    from hardpoint_conformance.target import Target

GUARD_BYTES = 4096
"""Bytes with a pattern before and after each buffer that a backend writes to; keeps the alignment that an allocator gives."""
_GUARD = 0xA5
UNWRITTEN = 7.0
"""What outputs hold before a step."""
DTYPES = pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(dtype, id=dtype.value, marks=proves(f"attention.dtype.{dtype.value}"))
        for dtype in (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)
    ],
)
"""Parameter of tests that are run in each dtype of queries, and prove it."""
_AXES = ("kv", "block", "head", "token", "dim")


class _Notes(Protocol):
    def note(self, ratio: float) -> None: ...


@dataclass(frozen=True)
class Span:
    """Positions `begin` to `end` (excluded) of a sequence: the new tokens of one step."""

    seq: int
    begin: int
    end: int


@dataclass(frozen=True)
class Case:
    """What is computed for one layer, on the host.

    Attributes:
        q: of each sequence, [length, num_heads, head_dim] in dtype.
        k, v: of each sequence, [length, num_kv_heads, head_dim] in dtype, with values that kv_dtype holds exactly, divided by the
            layer's scales (powers of two) if it has any.
        sinks, alibi: float32[num_heads], where the layer has them.
    """

    layer: AttentionLayer
    dtype: DType
    kv_dtype: DType
    q: tuple[Tensor, ...]
    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]
    sinks: Tensor | None = None
    alibi: Tensor | None = None
    _known: dict[tuple[Span, tuple[int, ...]], Expected] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence."""
        return tuple(len(k) for k in self.k)

    def whole(self) -> list[Span]:
        """Return the spans that prefill every sequence in one piece."""
        return [Span(seq, 0, length) for seq, length in enumerate(self.lengths)]

    def last(self, queries: int = 1) -> list[Span]:
        """Return the spans of the last tokens of all sequences that are longer: with one token each, a step of decodes."""
        return [Span(seq, length - queries, length) for seq, length in enumerate(self.lengths) if length > queries]

    def steps(self, claims: Capabilities) -> list[list[Span]]:
        """Return one step of each kind that is claimed: prompts, decodes, chunks with context, and a mixture."""
        features = claims.attention.features
        if not self.layer.causal:
            return [self.whole()]
        found = [self.whole(), self.last()]
        if AttentionFeature.CHUNKED_PREFILL in features:
            found.append([Span(seq, n // 3, n) for seq, n in enumerate(self.lengths) if n > 2])
        if {AttentionFeature.CHUNKED_PREFILL, AttentionFeature.MIXED_BATCH} <= features:
            found.append([Span(seq, (n - 1, n // 2)[seq % 2], n) for seq, n in enumerate(self.lengths)])
        return [spans for spans in found if spans]

    def numbers(self, span: Span) -> Numbers:
        """Return what the oracle needs for a span."""
        q, k, v = self.q[span.seq][span.begin : span.end], self.k[span.seq][: span.end], self.v[span.seq][: span.end]
        return Numbers(self.layer, q, k, v, self.sinks, self.alibi)

    def expected(self, span: Span) -> Expected:
        """Return what a span's output must be, and how exactly; computed once, as long as nobody changes its sequence."""
        changes = tuple(x[span.seq]._version for x in (self.q, self.k, self.v))
        whole = self._known.get((Span(span.seq, 0, len(self.k[span.seq])), changes))
        if whole is not None:
            return whole.rows(span.begin, span.end)
        if (span, changes) not in self._known:
            self._known[span, changes] = expected(self.numbers(span), self.dtype.to_torch())
        return self._known[span, changes]


def layer(
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    *,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: bool = False,
    alibi: bool = False,
    causal: bool = True,
) -> AttentionLayer:
    """Return a layer; its scale is 1/sqrt(head_dim) unless given."""
    scale = scale or head_dim**-0.5
    return AttentionLayer(heads, kv_heads, head_dim, scale, window, soft_cap, sinks, alibi, causal=causal)


def plain_layer(claims: Capabilities, **features: Any) -> AttentionLayer:
    """Return a small layer within the claims: two KV heads with two query heads each, and a head dimension of 64, if possible."""
    attention = claims.attention
    group = next((group for group in (2, 1, *range(3, 129)) if group in attention.group_sizes), 2)
    head_dim = next((dim for dim in (64, 128, 32, *range(1, 1025)) if dim in attention.head_dims), 64)
    return layer(2 * group, 2, head_dim, **features)


def make_case(
    rng: np.random.Generator,
    layer: AttentionLayer,
    dtype: DType,
    lengths: Sequence[int],
    *,
    kv_dtype: DType | None = None,
) -> Case:
    """Return a case with random numbers.

    Queries are twice as large as keys: a peaky softmax shows a wrong mask, scale or order. Values have a mean that is not zero, so that
    a weight that is lost shows too.
    """
    kind = kv_dtype or dtype
    # Torch draws normal numbers in a third of numpy's time.
    generator = torch.Generator().manual_seed(int(rng.integers(1 << 63)))
    queries = torch.randn(sum(lengths), layer.num_heads, layer.head_dim, generator=generator).mul_(2)
    keys, values = torch.randn(2, sum(lengths), layer.num_kv_heads, layer.head_dim, generator=generator)
    parts = rounded(queries, dtype), rounded(keys, dtype, kind), rounded(values.add_(0.5), dtype, kind)
    q, k, v = (
        torch.split(part * scale, list(lengths))
        for part, scale in zip(parts, (1, layer.k_scale, layer.v_scale), strict=True)
    )
    sinks = torch.randn(layer.num_heads, generator=generator) + 1 if layer.sinks else None
    alibi = 2.0 ** -torch.arange(1, layer.num_heads + 1, dtype=torch.float32) if layer.alibi else None
    return Case(layer, dtype, kind, q, k, v, sinks, alibi)


def rounded(numbers: Tensor, dtype: DType, kv_dtype: DType | None = None) -> Tensor:
    """Return numbers in dtype; with a KV dtype, only such as it holds exactly (integers for int8, which has no scale here)."""
    tensor = numbers.to(dtype.to_torch())
    if kv_dtype is None or kv_dtype is dtype:
        return tensor
    if kv_dtype is DType.INT8:
        tensor = tensor.round()
    return tensor.to(kv_dtype.to_torch()).to(dtype.to_torch())


@dataclass(frozen=True)
class Placement:
    """Where sequences lie in a cache.

    Attributes:
        blocks: of each sequence, in the order of its tokens.
        num_blocks: of the cache.
        rows: of each sequence in the block table.
        table: int32[rows, blocks]; entries beyond a sequence's blocks are leftovers of others: valid blocks that are not its own.
    """

    blocks: tuple[tuple[int, ...], ...]
    num_blocks: int
    rows: tuple[int, ...]
    table: Int32Array

    def moved(self, to: np.ndarray[Any, Any]) -> Placement:
        """Return the same with each block b at `to[b]`."""
        blocks = tuple(tuple(int(to[block]) for block in owned) for owned in self.blocks)
        return replace(self, blocks=blocks, table=to[self.table].astype(np.int32))


def place(
    rng: np.random.Generator, lengths: Sequence[int], block_size: int, *, spare: int = 3, first: int = 0
) -> Placement:
    """Scatter sequences over a cache: their blocks are interleaved and in no order, their rows shuffled.

    Args:
        spare: blocks that nobody owns.
        first: lowest block that is given to a sequence.
    """
    counts = [-(-length // block_size) for length in lengths]
    free = list(rng.permutation(np.arange(first, first + sum(counts) + spare)))
    blocks = tuple(tuple(int(free.pop()) for _ in range(count)) for count in counts)
    return placed(rng, blocks, first + sum(counts) + spare)


def placed(rng: np.random.Generator, blocks: Sequence[Sequence[int]], num_blocks: int) -> Placement:
    """Return the placement of sequences in the given blocks: a table with more rows and columns than they need."""
    seqs = len(blocks)
    width = max((len(owned) for owned in blocks), default=0) + 2
    rows = rng.permutation(seqs + 2)[:seqs]
    table = rng.integers(0, num_blocks, (seqs + 2, width)).astype(np.int32)
    for row, owned in zip(rows, blocks, strict=True):
        table[row, : len(owned)] = owned
    return Placement(tuple(map(tuple, blocks)), num_blocks, tuple(map(int, rows)), table)


def request_of(
    layers: Sequence[AttentionLayer],
    dtype: DType,
    *,
    kv_dtype: DType | None = None,
    block_size: int | None = None,
    max_context: int = 128,
) -> AttentionRequest:
    """Return a request; the cache has the queries' dtype unless another is given."""
    return AttentionRequest(tuple(layers), dtype, kv_dtype or dtype, block_size, max_context)


def planned(attention: AttentionBackend, request: AttentionRequest) -> AttentionPlan:
    """Return a backend's plan for a request within its claims; asserts that it is not refused."""
    plan = attention.plan(request)
    assert not isinstance(plan, Refusal), f"a request within the claims was refused: {'; '.join(plan.reasons)}"
    return plan


class Buffer:
    """A tensor on the device between two guards, whose pattern shows writes out of bounds."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        size = int(np.prod(shape)) * dtype.itemsize
        self._bytes = torch.full((size + 2 * GUARD_BYTES,), _GUARD, dtype=torch.uint8, device=device)
        inner = self._bytes[GUARD_BYTES : GUARD_BYTES + size]
        self.tensor = inner.view(dtype).view(tuple(shape))

    def guards_intact(self) -> bool:
        """Return whether nothing was written beside the tensor."""
        host = self._bytes.cpu()
        return bool((host[:GUARD_BYTES] == _GUARD).all() and (host[-GUARD_BYTES:] == _GUARD).all())


@dataclass(frozen=True)
class Layout:
    """How a step's tensors are laid out, and what is added to its batch.

    Attributes:
        strided: queries, keys and values are slices of one fused buffer, outputs of a wider one; none begins at its start.
        padding_tokens: tokens at the end that belong to no sequence (slot -1); their inputs are `padding`.
        padding_seqs: sequences at the end that have no tokens and no context.
        padding: value of the inputs of padding tokens.
        order: of the spans in the batch; None for the order given. Decodes come before all others in any case.
        silent: spans whose keys and values are not to be written (slot -1), by index.
    """

    strided: bool = False
    padding_tokens: int = 0
    padding_seqs: int = 0
    padding: float = 1.0
    order: tuple[int, ...] | None = None
    silent: frozenset[int] = frozenset()


PLAIN = Layout()


@dataclass
class Step:
    """One step, laid out on the device.

    Attributes:
        order: of the spans in the batch.
        q, k, v, out: of each layer.
        buffers: that the outputs lie in.
    """

    batch: StepBatch
    order: list[int]
    q: list[Tensor] = field(default_factory=list)
    k: list[Tensor] = field(default_factory=list)
    v: list[Tensor] = field(default_factory=list)
    out: list[Tensor] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)

    def guards_intact(self) -> bool:
        """Return whether nothing was written beside the outputs."""
        return all(buffer.guards_intact() for buffer in self.buffers)


class AttentionBench:
    """A backend with a KV cache on its device.

    Args:
        cases: one for each layer; they have the same lengths, dtypes, KV heads and head dimension.
        block_size: tokens per block; None for the backend's choice.
        placement: of the sequences; scattered by `rng` if None.
        cache: the memory to use, in the plan's shape; None for a new one between guards.
    """

    def __init__(
        self,
        target: Target,
        *cases: Case,
        rng: np.random.Generator | None = None,
        block_size: int | None = None,
        placement: Placement | None = None,
        cache: Tensor | None = None,
    ) -> None:
        self.cases = cases
        self.device = torch.device(target.device.torch_device)
        self.attention = target.attention()
        request = request_of(
            [case.layer for case in cases],
            cases[0].dtype,
            kv_dtype=cases[0].kv_dtype,
            block_size=block_size,
            max_context=max(cases[0].lengths),
        )
        self.plan = planned(self.attention, request)
        self._rng = rng or np.random.default_rng(0)
        self.placement = placement or place(self._rng, cases[0].lengths, self.plan.block_size)
        self._guarded: Buffer | None = None
        if cache is None:
            shape = self.spec.shape(self.placement.num_blocks)
            self._guarded = Buffer(shape, self.spec.dtype.to_torch(), self.device)
            cache = self._guarded.tensor
        self.cache = cache

    @property
    def spec(self) -> KVCacheSpec:
        """The cache's shape."""
        return self.plan.kv_cache

    @cached_property
    def _canonical(self) -> tuple[int, ...]:
        return (0, *(1 + self.spec.axes.index(axis) for axis in _AXES))

    def canonical(self, cache: Tensor) -> Tensor:
        """Return a whole cache as [layer, kv, block, head, token, dim], a view."""
        return cache.permute(self._canonical)

    def image(self, held: Sequence[int]) -> Tensor:
        """Return a cache on the host that holds the first `held[s]` tokens of each sequence s, and other numbers elsewhere."""
        shape, dtype = self.spec.shape(self.placement.num_blocks), self.spec.dtype.to_torch()
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        # Whole numbers from -8 to 7: every type of a cache holds them.
        leftovers = self._rng.bit_generator.random_raw(-(-count // 8)).view(np.int8)[:count] >> 4
        # By way of float32: torch makes half precision of integers one by one.
        image = torch.from_numpy(leftovers.reshape(shape)).to(torch.float32).to(dtype)
        self._write(image, [Span(seq, 0, length) for seq, length in enumerate(held)])
        return image

    def written(self, image: Tensor, spans: Sequence[Span]) -> Tensor:
        """Return a cache's image after the keys and values of spans were written to it."""
        after = image.clone()
        self._write(after, spans)
        return after

    def _write(self, image: Tensor, spans: Sequence[Span]) -> None:
        spans = [span for span in spans if span.begin < span.end]
        if not spans:
            return
        slots = [self.slots(span.seq, span.begin, span.end) for span in spans]
        block, offset = (torch.from_numpy(np.concatenate(part)) for part in zip(*slots, strict=True))
        view = self.canonical(image)
        for index, case in enumerate(self.cases):
            for half, x, scale in ((0, case.k, case.layer.k_scale), (1, case.v, case.layer.v_scale)):
                stored = torch.cat([x[span.seq][span.begin : span.end] for span in spans])
                view[index, half, block, :, offset] = (stored if scale == 1 else stored / scale).to(image.dtype)

    def load(self, image: Tensor) -> None:
        """Put a cache's image onto the device."""
        self.cache.copy_(image)

    def slots(self, seq: int, begin: int, end: int) -> tuple[Int64Array, Int64Array]:
        """Return block and offset of each of a sequence's positions."""
        index, offset = np.divmod(np.arange(begin, end), self.plan.block_size)
        return np.array(self.placement.blocks[seq], np.int64)[index], offset

    def batch(self, spans: Sequence[Span], layout: Layout = PLAIN) -> tuple[StepBatch, list[int]]:
        """Return the batch of a step, and the order of the spans in it: decodes first."""
        order = sorted(layout.order or range(len(spans)), key=lambda i: not _is_decode(spans[i]))
        ordered = [spans[i] for i in order]
        queries = [span.end - span.begin for span in ordered]
        slots, padding = [], np.full(layout.padding_tokens, -1)
        for index, span in zip(order, ordered, strict=True):
            block, offset = self.slots(span.seq, span.begin, span.end)
            slot = block * self.plan.block_size + offset
            slots.append(np.full_like(slot, -1) if index in layout.silent else slot)
        positions = [np.arange(span.begin, span.end) for span in ordered]
        unused = sorted(set(range(len(self.placement.table))) - set(self.placement.rows))
        rows = [self.placement.rows[span.seq] for span in ordered] + [unused[0]] * layout.padding_seqs
        nothing, seqs = np.zeros((0, 2), np.int32), len(rows)
        batch = StepBatch(
            token_ids=np.zeros(sum(queries) + layout.padding_tokens, np.int64),
            positions=_joined([*positions, np.zeros(layout.padding_tokens)], np.int64),
            slot_mapping=_joined([*slots, padding], np.int32),
            query_start=np.cumsum([0, *queries, *[0] * layout.padding_seqs]).astype(np.int32),
            context_lens=np.array([span.end for span in ordered] + [0] * layout.padding_seqs, np.int32),
            block_table=self.placement.table.copy(),
            rows=np.array(rows, np.int32),
            seq_ids=np.arange(seqs, dtype=np.int64),
            num_decodes=sum(map(_is_decode, ordered)),
            sample_rows=np.arange(len(ordered), dtype=np.int32),
            sample_seq_ids=np.arange(len(ordered), dtype=np.int64),
            swap_out=nothing,
            swap_in=nothing,
            copies=nothing,
            preempted=np.zeros(0, np.int64),
        )
        return batch, order

    def step(self, spans: Sequence[Span], layout: Layout = PLAIN) -> Step:
        """Lay a step out on the device."""
        batch, order = self.batch(spans, layout)
        step = Step(batch, order)
        for case in self.cases:
            inputs = [
                self._rows([x[spans[i].seq][spans[i].begin : spans[i].end] for i in order], heads, case, layout)
                for x, heads in (
                    (case.q, case.layer.num_heads),
                    (case.k, case.layer.num_kv_heads),
                    (case.v, case.layer.num_kv_heads),
                )
            ]
            q, k, v = _fused(inputs, self.device) if layout.strided else [x.to(self.device) for x in inputs]
            step.q.append(q)
            step.k.append(k)
            step.v.append(v)
            step.out.append(self._out(step, len(q), case, layout))
        return step

    def _rows(self, parts: list[Tensor], heads: int, case: Case, layout: Layout) -> Tensor:
        if layout.padding_tokens or not parts:
            shape = (layout.padding_tokens, heads, case.layer.head_dim)
            parts = [*parts, torch.full(shape, layout.padding, dtype=case.dtype.to_torch())]
        return torch.cat(parts)

    def _out(self, step: Step, tokens: int, case: Case, layout: Layout) -> Tensor:
        heads, dim = case.layer.num_heads, case.layer.head_dim
        wide = heads + 3 if layout.strided else heads
        buffer = Buffer((tokens, wide, dim), case.dtype.to_torch(), self.device)
        buffer.tensor.fill_(UNWRITTEN)
        step.buffers.append(buffer)
        return buffer.tensor[:, 1 : 1 + heads] if layout.strided else buffer.tensor

    def write(self, step: Step, metadata: Any, layer: int = 0) -> None:
        """Write a step's keys and values of a layer."""
        self.attention.write_kv(layer, step.k[layer], step.v[layer], self.cache[layer], metadata)

    def forward(self, step: Step, metadata: Any, layer: int = 0) -> None:
        """Compute a step's attention in a layer."""
        case = self.cases[layer]
        sinks, alibi = (None if x is None else x.to(self.device) for x in (case.sinks, case.alibi))
        self.attention.forward(
            layer,
            step.q[layer],
            step.k[layer],
            step.v[layer],
            self.cache[layer] if case.layer.causal else self.cache,
            metadata,
            step.out[layer],
            sinks,
            alibi,
        )

    def execute(self, step: Step) -> None:
        """Run a step in all layers."""
        metadata = self.attention.prepare(self.plan, step.batch)
        for index, case in enumerate(self.cases):
            if case.layer.causal:
                self.write(step, metadata, index)
            self.forward(step, metadata, index)

    def outputs(self, step: Step, layer: int = 0) -> list[Tensor]:
        """Return a step's outputs on the host, one for each span in the order in which they were given."""
        host, starts = step.out[layer].cpu(), step.batch.query_start
        found = {span: host[starts[place] : starts[place + 1]] for place, span in enumerate(step.order)}
        return [found[index] for index in range(len(step.order))]

    def proceed(self, spans: Sequence[Span], layout: Layout = PLAIN) -> list[Tensor]:
        """Run a step over the cache as it is, and return the first layer's outputs."""
        step = self.step(spans, layout)
        self.execute(step)
        return self.outputs(step)

    def run(self, spans: Sequence[Span], layout: Layout = PLAIN) -> list[Tensor]:
        """Load the cache with what precedes the spans, run their step, and return the first layer's outputs."""
        self.load(self.image(self.before(spans)))
        return self.proceed(spans, layout)

    def before(self, spans: Sequence[Span]) -> list[int]:
        """Return how many tokens of each sequence precede the spans: what the cache must hold for their step."""
        held = {span.seq: span.begin for span in spans}
        return [held.get(seq, 0) for seq in range(len(self.placement.blocks))]

    def spare(self) -> list[int]:
        """Return the blocks that no sequence owns."""
        owned = {block for blocks in self.placement.blocks for block in blocks}
        return sorted(set(range(self.placement.num_blocks)) - owned)

    def guards_intact(self) -> bool:
        """Return whether nothing was written beside the cache."""
        return self._guarded is None or self._guarded.guards_intact()


def check(case: Case, spans: Sequence[Span], outs: Sequence[Tensor], quality: _Notes) -> None:
    """Assert that outputs keep to the oracle's bounds, and note the largest share of them."""
    wanted = [case.expected(span) for span in spans]
    assert [out.shape for out in outs] == [one.out.shape for one in wanted]
    worst = joined(wanted).ratio(torch.cat(list(outs)))
    quality.note(worst)
    if worst > 1:
        for span, out, expected_here in zip(spans, outs, wanted, strict=True):
            ratio = expected_here.ratio(out)
            context = f"{span.end - span.begin} queries over {span.end} keys, {case.layer}, {case.dtype}"
            assert ratio <= 1, f"the error is {ratio:.3g} times its bound: {context}"
    assert worst <= 1


def check_steps(
    target: Target, case: Case, rng: np.random.Generator, quality: _Notes, *, block_size: int | None = None
) -> None:
    """Run one step of each kind over a case, and assert that all keep to the oracle's bounds."""
    bench = AttentionBench(target, case, rng=rng, block_size=block_size)
    for spans in case.steps(target.claims):
        check(case, spans, bench.run(spans), quality)


class Sameness:
    """Whether two tensors are the same; where they are not, its text says by how much."""

    def __init__(self, difference: str) -> None:
        self._difference = difference

    def __bool__(self) -> bool:
        return not self._difference

    def __repr__(self) -> str:
        return self._difference or "the same bits"


def same_bits(one: Tensor, other: Tensor) -> Sameness:
    """Return whether two tensors are equal bit by bit; NaNs with the same bits are equal, zeros of different sign are not."""
    if one.shape != other.shape or one.dtype is not other.dtype:
        return Sameness(f"{one.dtype} of shape {tuple(one.shape)}, not {other.dtype} of shape {tuple(other.shape)}")
    flat = [tensor.cpu().contiguous().view(-1) for tensor in (one, other)]
    a, b = (tensor.view(torch.uint8) for tensor in flat)
    if torch.equal(a, b):
        return Sameness("")
    places = (a != b).view(-1, one.element_size()).any(dim=1).nonzero().flatten()
    first = int(places[0])
    at = ", ".join(str(int(index)) for index in np.unravel_index(first, tuple(one.shape)))
    values = " where it should be ".join(str(tensor[first].item()) for tensor in flat)
    return Sameness(f"{len(places)} of {len(flat[0])} elements differ, the first at [{at}]: {values}")


def synchronise(device: torch.device) -> None:
    """Wait for all work that was submitted to a device."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def dtypes_claimed(claims: Capabilities) -> list[DType]:
    """Return the claimed dtypes of queries, the most precise first."""
    return [d for d in (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16) if d in claims.attention.dtypes]


def _is_decode(span: Span) -> bool:
    return span.end - span.begin == 1 and span.begin > 0


def _fused(parts: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return tensors of the same tokens as slices of one buffer on the device, all with strides and offsets."""
    heads = [part.shape[1] for part in parts]
    tokens, _, dim = parts[0].shape
    whole = torch.full((tokens + 1, sum(heads) + 1, dim), UNWRITTEN, dtype=parts[0].dtype)
    whole[1:, 1:] = torch.cat(list(parts), 1)
    return list(torch.split(whole.to(device)[1:, 1:], heads, 1))


def _joined(parts: Sequence[np.ndarray[Any, Any]], dtype: type[np.generic]) -> np.ndarray[Any, Any]:
    return np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype)
