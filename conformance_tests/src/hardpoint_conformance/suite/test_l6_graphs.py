"""Level 6: steps captured into device graphs and replayed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from hardpoint.interfaces import (
    KV_CACHE,
    Capabilities,
    Determinism,
    DType,
    GraphLevel,
    GraphRunner,
    Refusal,
    SleepPlan,
    mixed_seqs,
)
from hardpoint.memory import TensorAllocator
from hardpoint_conformance.batches import (
    AttentionBench,
    Case,
    Layout,
    Span,
    Step,
    check,
    dtypes_claimed,
    make_case,
    plain_layer,
    request_of,
    same_bits,
    synchronise,
)
from hardpoint_conformance.clauses import clause, proves
from hardpoint_conformance.levels import Level
from hardpoint_conformance.plugin import Quality
from hardpoint_conformance.target import Target

LEVEL = Level.STRESS
LENGTHS = (40, 75, 9, 130)
_GRAPHS = "attention.graphs"
_MIXED = "attention.graphs.mixed"


class Captured:
    """Attention, captured for several numbers of sequences with a token each, and of tokens, and replayed over one cache.

    Attributes:
        allocator: whose memory the cache is in.

    Args:
        sizes: numbers of sequences to capture, the largest first.
        num_tokens: numbers of tokens to capture of steps with prompts, rising.
    """

    def __init__(
        self,
        target: Target,
        claims: Capabilities,
        rng: np.random.Generator,
        sizes: Sequence[int] = (len(LENGTHS),),
        num_tokens: Sequence[int] = (),
    ) -> None:
        self.case: Case = make_case(rng, plain_layer(claims), dtypes_claimed(claims)[0], LENGTHS)
        self.allocator: TensorAllocator = target.allocator()
        self.runner: GraphRunner = target.descriptor.make("graph_runner", target.device)
        self.runner.start(self.allocator)
        plain = AttentionBench(target, self.case, rng=rng)
        assert plain.plan.graph_level is not GraphLevel.NONE, "graphs are claimed and not planned"
        cache = self.allocator.empty(plain.spec.shape(plain.placement.num_blocks), plain.spec.dtype, KV_CACHE)
        self.bench = AttentionBench(target, self.case, rng=rng, placement=plain.placement, cache=cache)
        self._steps: dict[int, Step] = {}
        attention = self.bench.attention
        attention.begin_capture(self.bench.plan, max(sizes))
        if num_tokens:
            assert plain.plan.graph_level >= GraphLevel.MIXED, (
                "graphs of steps with prompts are claimed and not planned"
            )
            attention.begin_mixed_capture(self.bench.plan, len(LENGTHS), num_tokens)
        self.load(self.early())
        # As the engine does, which has no requests then.
        for tokens in reversed(num_tokens):
            self._capture(-tokens, self.padded([], tokens))
        for size in sizes:
            self._capture(size, self.bench.step(self.early()[:size]))
        attention.end_capture()

    def _capture(self, key: int, step: Step) -> None:
        self._steps[key] = step
        metadata = self.bench.attention.prepare(self.bench.plan, step.batch)

        def run() -> None:
            self.bench.write(step, metadata)
            self.bench.forward(step, metadata)

        self.runner.capture(key, run)

    def padded(self, spans: Sequence[Span], tokens: int) -> Step:
        """Return a step of so many tokens with prompts, as it is captured and replayed."""
        behind = tokens - sum(span.end - span.begin for span in spans)
        empty = mixed_seqs(len(LENGTHS), tokens) - len(spans)
        return self.bench.step(spans, Layout(padding_tokens=behind, padding_seqs=empty))

    def early(self) -> list[Span]:
        """Return decodes near the beginning of each sequence."""
        return [Span(seq, 3 + seq, 4 + seq) for seq in range(len(LENGTHS))]

    def late(self) -> list[Span]:
        """Return decodes at the end of each sequence."""
        return self.case.last()

    def load(self, spans: Sequence[Span]) -> None:
        """Put what precedes these spans into the cache."""
        self.bench.load(self.bench.image(self.bench.before(spans)))

    def replay(self, spans: Sequence[Span], size: int = len(LENGTHS)) -> list[Tensor]:
        """Replay the graph of `size` sequences for these spans, the rest of it padding; return their outputs."""
        padding = size - len(spans)
        return self._replay(size, self.bench.step(spans, Layout(padding_tokens=padding, padding_seqs=padding)))

    def replay_mixed(self, spans: Sequence[Span], tokens: int) -> list[Tensor]:
        """Replay the graph of `tokens` tokens for these spans, the rest of it padding; return their outputs."""
        return self._replay(-tokens, self.padded(spans, tokens))

    def _replay(self, key: int, step: Step) -> list[Tensor]:
        captured = self._steps[key]
        for place, values in ((captured.q, step.q), (captured.k, step.k), (captured.v, step.v)):
            place[0].copy_(values[0])
        captured.out[0].fill_(float("nan"))
        attention, plan = self.bench.attention, self.bench.plan
        num_blocks = self.bench.placement.num_blocks
        assert attention.can_replay(plan, step.batch, step.batch.num_seqs, num_blocks), (
            f"graphs are claimed and {'plain decodes' if key > 0 else 'steps with prompts'} not replayed"
        )
        arguments = attention.host_arguments(attention.prepare(plan, step.batch))
        if arguments is not None:
            self.runner.update(key, arguments)
        self.runner.replay(key)
        synchronise(self.bench.device)
        assert captured.guards_intact(), "a replay wrote beside its outputs"
        host, starts = captured.out[0].cpu(), step.batch.query_start
        found = {span: host[starts[place] : starts[place + 1]] for place, span in enumerate(step.order)}
        return [found[index] for index in range(len(step.order))]

    def check(self, spans: Sequence[Span], quality: Quality, size: int = len(LENGTHS)) -> None:
        """Load what precedes the spans, replay, and compare with the oracle."""
        self.load(spans)
        check(self.case, spans, self.replay(spans, size), quality)

    def check_mixed(self, spans: Sequence[Span], quality: Quality, tokens: int) -> None:
        """Load what precedes the spans, replay a step with prompts, and compare with the oracle."""
        self.load(spans)
        check(self.case, spans, self.replay_mixed(spans, tokens), quality)

    def close(self) -> None:
        """Drop graphs and memory."""
        self.runner.reset()
        del self.bench
        self.allocator.close()


@pytest.fixture
def graphs(target: Target, claims: Capabilities, rng: np.random.Generator) -> Iterator[Captured]:
    """A captured step."""
    captured = Captured(target, claims, rng)
    yield captured
    captured.close()


TOKENS = 96


@pytest.fixture
def mixed(target: Target, claims: Capabilities, rng: np.random.Generator) -> Iterator[Captured]:
    """A captured step with prompts."""
    captured = Captured(target, claims, rng, num_tokens=(TOKENS,))
    yield captured
    captured.close()


MIXES: dict[str, list[Span]] = {
    "prompts": [Span(0, 0, 40), Span(2, 0, 9)],
    "one": [Span(1, 0, 75)],
    "chunks": [Span(0, 20, 40), Span(3, 100, 130), Span(1, 0, 30)],
    "mixed": [Span(0, 39, 40), Span(1, 20, 75), Span(3, 129, 130), Span(2, 0, 9)],
    "token": [Span(3, 90, 91), Span(0, 0, 1)],
    "full": [Span(3, 39, 130), Span(0, 39, 40), Span(2, 5, 8), Span(1, 74, 75)],
    "decodes": [Span(seq, length - 1, length) for seq, length in enumerate(LENGTHS)],
}
"""Steps of up to `TOKENS` tokens: prompts, chunks behind what is there, decodes, and mixtures; one fills its graph."""


@clause("graph.replay.inputs@1", LEVEL, capability=_GRAPHS, facts="attention test P")
def test_replay_reads_the_inputs_of_now(graphs: Captured, quality: Quality) -> None:
    """A replay computes from what is at the addresses of the capture now: queries, keys, values and cache."""
    graphs.check(graphs.early(), quality)
    for tensors in (graphs.case.q, graphs.case.k, graphs.case.v):
        for tensor in tensors:
            tensor.copy_(tensor.roll(1, 0))
    graphs.check(graphs.early(), quality)


@clause("graph.replay.metadata@1", LEVEL, capability=_GRAPHS, facts="attention test P")
def test_replay_takes_the_metadata_of_now(graphs: Captured, quality: Quality) -> None:
    """After `prepare` of another batch a replay uses its context lengths, its slots and its rows, not those of the capture."""
    for spans in (graphs.late(), graphs.early(), graphs.late()[::-1]):
        graphs.check(spans, quality)


@pytest.mark.parametrize("live", [1, 2, 3])
@clause("graph.replay.padded@1", LEVEL, capability=_GRAPHS, facts="attention test P, attention test J")
def test_replay_of_a_smaller_batch(graphs: Captured, live: int, quality: Quality) -> None:
    """A replay with fewer sequences than were captured, the rest padding, is right and writes nothing for the padding."""
    spans = graphs.late()[:live]
    graphs.load(spans)
    before = graphs.bench.cache.cpu().clone()
    check(graphs.case, spans, graphs.replay(spans), quality)
    after = graphs.bench.cache.cpu()
    for span in spans:
        for cache in (before, after):
            block, offset = graphs.bench.slots(span.seq, span.begin, span.end)
            graphs.bench.canonical(cache)[:, :, block, :, offset] = 0
    assert torch.equal(before, after), "the padding was written to the cache"


@clause("graph.capture.sizes@1", LEVEL, capability=_GRAPHS, facts="attention test P")
def test_graphs_of_several_sizes(
    target: Target, claims: Capabilities, rng: np.random.Generator, quality: Quality
) -> None:
    """Graphs of several sizes, captured the largest first, are each right whatever was replayed before."""
    captured = Captured(target, claims, rng, sizes=(4, 2, 1))
    try:
        for size in (1, 4, 2, 1):
            captured.check(captured.late()[:size], quality, size)
    finally:
        captured.close()


@clause("graph.replay.no-allocation@1", LEVEL, capability=_GRAPHS, facts="attention test P")
def test_replay_allocates_nothing(graphs: Captured, quality: Quality) -> None:
    """Replays take no memory: neither the allocator's books nor the graphs' own bytes change."""
    graphs.check(graphs.late(), quality)
    books, held = graphs.allocator.stats(), graphs.runner.resident_bytes()
    assert held >= 0
    on_device = _allocated(graphs.bench.device)
    for _ in range(5):
        graphs.runner.replay(len(LENGTHS))
    synchronise(graphs.bench.device)
    assert graphs.allocator.stats() == books
    assert graphs.runner.resident_bytes() == held
    assert _allocated(graphs.bench.device) == on_device


def _allocated(device: torch.device) -> int:
    """Return the bytes that torch allocated on an accelerator; 0 where it keeps no account."""
    return 0 if device.type == "cpu" else int(torch.accelerator.memory_allocated(device))


@clause("graph.replay.after-sleep@1", LEVEL, capability=_GRAPHS, facts="allocator fact 7, attention test P")
@proves("memory.sleep.1")
def test_replay_after_sleep_and_wake(graphs: Captured, quality: Quality) -> None:
    """A graph that was captured before a sleep replays after wake over the restored cache, and over what is written to it then."""
    spans = graphs.late()
    graphs.load(spans)
    graphs.allocator.sleep(SleepPlan())
    graphs.allocator.wake()
    check(graphs.case, spans, graphs.replay(spans), quality)
    graphs.check(graphs.early(), quality)


@clause("graph.reset@1", LEVEL, capability=_GRAPHS)
def test_unknown_graphs(graphs: Captured, quality: Quality) -> None:
    """A replay of what was not captured is a KeyError; reset drops all graphs, and their memory."""
    with pytest.raises(KeyError):
        graphs.runner.replay(len(LENGTHS) + 1)
    graphs.check(graphs.late(), quality)
    graphs.runner.reset()
    assert graphs.runner.resident_bytes() == 0
    with pytest.raises(KeyError):
        graphs.runner.replay(len(LENGTHS))


@clause("graph.mixed.replay@1", LEVEL, capability=_MIXED, facts="attention test P")
def test_replay_of_steps_with_prompts(mixed: Captured, quality: Quality) -> None:
    """A step with prompts that was captured without any sequence is replayed for prompts, chunks of them behind what is in the cache,
    decodes and mixtures, each with its own lengths, slots and rows."""
    for spans in (*MIXES.values(), *list(MIXES.values())[::-1]):
        mixed.check_mixed(spans, quality, TOKENS)


@pytest.mark.parametrize("mix", ["one", "mixed", "token", "full"])
@clause("graph.mixed.padded@1", LEVEL, capability=_MIXED, facts="attention test P, attention test J")
def test_padding_of_steps_with_prompts(mixed: Captured, mix: str, quality: Quality) -> None:
    """A replay of a step with prompts writes the keys and values of its tokens, and nothing for padding."""
    spans = MIXES[mix]
    image = mixed.bench.image(mixed.bench.before(spans))
    mixed.bench.load(image)
    check(mixed.case, spans, mixed.replay_mixed(spans, TOKENS), quality)
    found = same_bits(mixed.bench.cache.cpu(), mixed.bench.written(image, spans))
    assert found, f"the cache is not what the step writes: {found!r}"


@clause("graph.mixed.sizes@1", LEVEL, capability=_MIXED, facts="attention test P")
def test_graphs_with_prompts_beside_those_of_decodes(
    target: Target, claims: Capabilities, rng: np.random.Generator, quality: Quality
) -> None:
    """Graphs of several numbers of tokens, and of decodes alone beside them, are each right whatever was replayed before, also where a
    step of decodes has as many tokens as one with prompts."""
    captured = Captured(target, claims, rng, sizes=(4, 2, 1), num_tokens=(2, 4, 16, TOKENS))
    chunk = [Span(3, 60, 61), Span(0, 1, 3), Span(1, 74, 75)]
    try:
        for _ in range(2):
            captured.check_mixed(MIXES["mixed"], quality, TOKENS)
            captured.check_mixed(chunk, quality, 4)
            captured.check(captured.late(), quality, 4)
            captured.check_mixed(chunk[1:2], quality, 2)
            captured.check(captured.late()[:2], quality, 2)
            captured.check_mixed(chunk, quality, 16)
            captured.check(captured.early()[:1], quality, 1)
    finally:
        captured.close()


@clause("graph.mixed.same-bits@1", LEVEL, capability=_MIXED, facts="attention test P")
def test_replays_with_prompts_have_the_bits_of_eager_steps(mixed: Captured, claims: Capabilities) -> None:
    """Where results do not depend on the batch, a replay of a step with prompts has the bits of the same step without padding."""
    for name, spans in MIXES.items():
        mixed.load(spans)
        wanted = mixed.bench.proceed(spans)
        mixed.load(spans)
        for one, other in zip(mixed.replay_mixed(spans, TOKENS), wanted, strict=True):
            if claims.attention.determinism >= Determinism.BATCH_INVARIANT:
                found = same_bits(one, other)
                assert found, f"{name}: {found!r}"


@clause("graph.unclaimed.none@1", LEVEL, capability=_GRAPHS, refusal=True)
def test_no_graphs_where_none_are_claimed(target: Target, claims: Capabilities) -> None:
    """Where graphs are not claimed, no plan offers them: the engine never captures a step that cannot be."""
    attention = target.attention()
    for dtype in dtypes_claimed(claims):
        plan = attention.plan(request_of([plain_layer(claims)], DType(dtype)))
        assert not isinstance(plan, Refusal), f"what is claimed is refused: {plan}"
        assert plan.graph_level is GraphLevel.NONE
    assert claims.attention.graph_level is attention.capabilities().graph_level
