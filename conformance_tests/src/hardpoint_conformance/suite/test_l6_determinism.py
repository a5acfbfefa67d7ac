"""Level 6: what repeats bit by bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hardpoint.interfaces import Capabilities, DType
from hardpoint_conformance.batches import DTYPES, AttentionBench, Case, Span, check, make_case, plain_layer, same_bits
from hardpoint_conformance.clauses import clause, proves
from hardpoint_conformance.levels import Level
from hardpoint_conformance.plugin import Quality
from hardpoint_conformance.target import Target

LEVEL = Level.STRESS
LENGTHS = (37, 70, 1, 140, 64)
LONG = (1020, 700, 5, 1, 64, 90)
REPEATS = 5


@clause("determinism.run.repeat@1", LEVEL, capability="determinism.run_to_run")
@DTYPES
def test_same_run(
    target: Target, claims: Capabilities, rng: np.random.Generator, quality: Quality, dtype: DType
) -> None:
    """The same step over the same cache gives the same bits every time."""
    case = make_case(rng, plain_layer(claims), dtype, LONG)
    bench = AttentionBench(target, case, rng=rng)
    short = [spans[-2:] for spans in case.steps(claims)]
    for spans in (case.last(), *short):
        first = bench.run(spans)
        check(case, spans, first, quality)
        for _ in range(REPEATS):
            for again, out in zip(bench.proceed(spans), first, strict=True):
                assert same_bits(again, out)


@clause("determinism.run.instances@1", LEVEL, capability="determinism.run_to_run")
@DTYPES
def test_other_instance(
    target: Target, claims: Capabilities, rng: np.random.Generator, quality: Quality, dtype: DType
) -> None:
    """Another attention object of the same device, which has run other steps before, gives the same bits."""
    case = make_case(rng, plain_layer(claims), dtype, LENGTHS)
    one = AttentionBench(target, case, rng=rng)
    other = AttentionBench(target, case, rng=rng, placement=one.placement)
    other.run(case.last(3))
    for spans in case.steps(claims):
        outs = one.run(spans)
        check(case, spans, outs, quality)
        for again, out in zip(other.run(spans), outs, strict=True):
            assert same_bits(again, out)


@clause("determinism.batch.invariant@1", LEVEL, capability="determinism.batch_invariant", facts="attention test N")
@DTYPES
@pytest.mark.parametrize("step", ["decode", "prefill"])
def test_batch_invariance(
    target: Target, claims: Capabilities, rng: np.random.Generator, quality: Quality, dtype: DType, step: str
) -> None:
    """A sequence has the same bits alone, in a batch with others, and among copies of itself."""
    case = make_case(rng, plain_layer(claims), dtype, LONG if step == "decode" else LENGTHS)
    bench = AttentionBench(target, case, rng=rng)
    spans = case.last() if step == "decode" else case.whole()
    together = bench.run(spans)
    check(case, spans, together, quality)
    for span, out in zip(spans, together, strict=True):
        assert same_bits(bench.run([span])[0], out)
    copies = _copies(case, spans[-2].seq, 9)
    many = AttentionBench(target, copies, rng=rng)
    outs = many.run(copies.last() if step == "decode" else copies.whole())
    for out in outs:
        assert same_bits(out, together[-2])


def _copies(case: Case, seq: int, count: int) -> Case:
    return replace(case, q=(case.q[seq],) * count, k=(case.k[seq],) * count, v=(case.v[seq],) * count)


@clause("determinism.batch.chunks@1", LEVEL, capability="determinism.batch_invariant", facts="attention test N")
@proves("attention.mixed_batch")
@DTYPES
def test_decode_among_prompts(
    target: Target, claims: Capabilities, rng: np.random.Generator, quality: Quality, dtype: DType
) -> None:
    """A decode has the same bits beside prompts as alone."""
    case = make_case(rng, plain_layer(claims), dtype, [300, 90, 40])
    bench = AttentionBench(target, case, rng=rng)
    alone = bench.run([Span(0, 299, 300)])
    spans = [Span(0, 299, 300), Span(1, 0, 90), Span(2, 0, 40)]
    together = bench.run(spans)
    check(case, spans, together, quality)
    assert same_bits(alone[0], together[0])


@clause("determinism.batch.tolerance@1", LEVEL, capability="attention", facts="attention test N")
@DTYPES
def test_batch_tolerance(
    target: Target, claims: Capabilities, rng: np.random.Generator, quality: Quality, dtype: DType
) -> None:
    """A sequence keeps to the oracle's bound alone and in batches of any size, whatever the backend claims of its determinism."""
    case = make_case(rng, plain_layer(claims), dtype, [260] * 12)
    bench = AttentionBench(target, case, rng=rng)
    for count in (1, 2, 7, 12):
        check(case, case.last()[:count], bench.run(case.last()[:count]), quality)
