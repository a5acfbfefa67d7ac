"""Level 3: what some models need of attention: each feature is correct where it is claimed, and refused where it is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hardpoint.interfaces import (
    AttentionBackend,
    AttentionFeature,
    AttentionLayer,
    AttentionPlan,
    AttentionRequest,
    Capabilities,
    DType,
    Refusal,
)
from hardpoint.interfaces.errors import CapabilityRefused
from hardpoint_conformance.batches import (
    DTYPES,
    AttentionBench,
    Layout,
    Span,
    check,
    check_steps,
    dtypes_claimed,
    make_case,
    plain_layer,
    request_of,
    same_bits,
)
from hardpoint_conformance.clauses import clause, proves
from hardpoint_conformance.levels import Level
from hardpoint_conformance.plugin import Quality
from hardpoint_conformance.target import Target

LEVEL = Level.ATTENTION_EXTENDED
LAYER_FEATURES: dict[AttentionFeature, dict[str, Any]] = {
    AttentionFeature.SLIDING_WINDOW: {"window": 21},
    AttentionFeature.SOFT_CAP: {"soft_cap": 4.0},
    AttentionFeature.SINKS: {"sinks": True},
    AttentionFeature.ALIBI: {"alibi": True},
}
"""How a layer asks for each feature that a layer can have."""
REFUSED_LAYERS = {**LAYER_FEATURES, AttentionFeature.BIDIRECTIONAL: {"causal": False}}
"""How a layer asks for each feature that may be refused."""
NARROW = [
    pytest.param(kind, id=kind.value, marks=proves(f"attention.kv_dtype.{kind.value}"))
    for kind in (DType.FLOAT8_E4M3, DType.FLOAT8_E5M2, DType.INT8)
]


def feature_cases(*features: AttentionFeature) -> object:
    """Return a parameter for features, each case of which proves its own."""
    marks = [proves(f"attention.{feature.value}") for feature in features]
    return pytest.param(features, id="+".join(feature.value for feature in features), marks=marks)


def layer_with(claims: Capabilities, features: tuple[AttentionFeature, ...]) -> AttentionLayer:
    """Return a small layer with features."""
    numbers: dict[str, Any] = {}
    for feature in features:
        numbers |= REFUSED_LAYERS[feature]
    return plain_layer(claims, **numbers)


# Sliding window: the number of visible keys, the query's own included


@clause("attn.window.edge@1", LEVEL, capability="attention.sliding_window", facts="attention test D")
@DTYPES
@pytest.mark.parametrize("window", [2, 16, 33, 128])
def test_window_edges(
    target: Target, claims: Capabilities, rng: np.random.Generator, quality: Quality, dtype: DType, window: int
) -> None:
    """With a sliding window of w a query at position p sees exactly the w keys at p - w + 1 to p, its own included: contexts of w - 1, w,
    w + 1 and several windows."""
    lengths = [max(1, window - 1), window, window + 1, 2 * window + 3]
    case = make_case(rng, plain_layer(claims, window=window), dtype, lengths)
    # The two keys at the edge, on either side of it, decide the result.
    for k, v in zip(case.k, case.v, strict=True):
        if len(k) >= window:
            v[len(v) - window] = 30.0
        if len(k) > window:
            v[len(v) - window - 1] = -30.0
    check_steps(target, case, rng, quality)


@clause("attn.window.one@1", LEVEL, capability="attention.sliding_window", facts="attention test D")
@DTYPES
def test_window_of_one(
    target: Target, claims: Capabilities, rng: np.random.Generator, quality: Quality, dtype: DType
) -> None:
    """With a window of one a query sees its own key alone: the output is the value at its position."""
    case = make_case(rng, plain_layer(claims, window=1), dtype, [1, 2, 40])
    check_steps(target, case, rng, quality)


@clause("attn.window.wide@1", LEVEL, capability="attention.sliding_window", facts="attention test D")
@DTYPES
def test_wide_window(
    target: Target, claims: Capabilities, rng: np.random.Generator, quality: Quality, dtype: DType
) -> None:
    """A window that is wider than the context hides nothing."""
    case = make_case(rng, plain_layer(claims, window=1000), dtype, [1, 50, 130])
    check_steps(target, case, rng, quality)


@clause("attn.window.long@1", LEVEL, capability="attention.sliding_window", facts="attention test D")
@DTYPES
def test_window_in_a_long_context(
    target: Target, claims: Capabilities, rng: np.random.Generator, quality: Quality, dtype: DType
) -> None:
    """A window far behind which many blocks lie shows its keys alone, even where all others would outweigh them."""
    window = 100
    case = make_case(rng, plain_layer(claims, window=window), dtype, [1000])
    length = case.lengths[0]
    # Keys before every window of the queries below: alike to all queries and with large values.
    case.v[0][: length - 30 - window] = 100.0
    case.k[0][: length - 30 - window] *= 4.0
    bench = AttentionBench(target, case, rng=rng)
    check(case, case.last(), bench.run(case.last()), quality)
    if target.claims_to("attention.chunked_prefill"):
        check(case, case.last(30), bench.run(case.last(30)), quality)


# Soft cap, sinks, ALiBi


@clause("attn.softcap.value@1", LEVEL, capability="attention.soft_cap", facts="attention test E")
@DTYPES
@pytest.mark.parametrize("cap", [0.5, 5.0, 50.0])
def test_soft_cap(
    target: Target, claims: Capabilities, rng: np.random.Generator, quality: Quality, dtype: DType, cap: float
) -> None:
    """A soft cap replaces each scaled logit by `cap * tanh(logit / cap)` before the mask and the softmax, at logits below, about and
    above the cap."""
    numbers = plain_layer(claims, soft_cap=cap)
    case = make_case(rng, replace(numbers, scale=numbers.scale * min(cap, 8.0)), dtype, [7, 60])
    check_steps(target, case, rng, quality)


@clause("attn.softcap.saturated@1", LEVEL, capability="attention.soft_cap", facts="attention test E")
@DTYPES
def test_saturated_soft_cap(
    target: Target, claims: Capabilities, rng: np.random.Generator, quality: Quality, dtype: DType
) -> None:
    """Logits far beyond the cap are all the cap: they neither overflow nor differ."""
    case = make_case(rng, plain_layer(claims, soft_cap=2.0, scale=32.0), dtype, [5, 50])
    check_steps(target, case, rng, quality)


@clause("attn.sinks.value@1", LEVEL, capability="attention.sinks", facts="attention test E")
@DTYPES
def test_sinks(target: Target, claims: Capabilities, rng: np.random.Generator, quality: Quality, dtype: DType) -> None:
    """A sink adds `exp(sink)` of its head to the softmax's denominator and nothing to the output, unscaled and uncapped."""
    case = make_case(rng, plain_layer(claims, sinks=True), dtype, [1, 9, 80])
    check_steps(target, case, rng, quality)


@clause("attn.sinks.range@1", LEVEL, capability="attention.sinks", facts="attention test E")
@DTYPES
@pytest.mark.parametrize("sink", [-1e4, -20.0, 12.0, 30.0])
def test_sink_range(
    target: Target, claims: Capabilities, rng: np.random.Generator, quality: Quality, dtype: DType, sink: float
) -> None:
    """A sink far below all logits changes nothing; one above them takes the weight, and nothing overflows."""
    case = make_case(rng, plain_layer(claims, sinks=True), dtype, [3, 70])
    case = replace(case, sinks=torch.full((case.layer.num_heads,), sink))
    check_steps(target, case, rng, quality)


@clause("attn.alibi.value@1", LEVEL, capability="attention.alibi", facts="attention test E")
@DTYPES
def test_alibi(target: Target, claims: Capabilities, rng: np.random.Generator, quality: Quality, dtype: DType) -> None:
    """ALiBi adds `slope * (key position - query position)` of the head to each scaled logit, by positions in the sequence and not in
    the chunk."""
    case = make_case(rng, plain_layer(claims, alibi=True), dtype, [1, 9, 80, 300])
    check_steps(target, case, rng, quality)


@clause("attn.features.combined@1", LEVEL, facts="attention test D, attention test E")
@DTYPES
@pytest.mark.parametrize(
    "features",
    [
        feature_cases(AttentionFeature.SLIDING_WINDOW, AttentionFeature.SOFT_CAP),
        feature_cases(AttentionFeature.SLIDING_WINDOW, AttentionFeature.SINKS),
        feature_cases(AttentionFeature.SLIDING_WINDOW, AttentionFeature.ALIBI),
        feature_cases(AttentionFeature.SOFT_CAP, AttentionFeature.SINKS),
        feature_cases(AttentionFeature.SOFT_CAP, AttentionFeature.ALIBI),
        feature_cases(AttentionFeature.SINKS, AttentionFeature.ALIBI),
        feature_cases(*LAYER_FEATURES),
    ],
)
def test_combined_features(
    target: Target,
    claims: Capabilities,
    rng: np.random.Generator,
    quality: Quality,
    dtype: DType,
    features: tuple[AttentionFeature, ...],
) -> None:
    """Features of one layer act together: scale, soft cap, ALiBi, mask and window, then a softmax with the sink."""
    case = make_case(rng, layer_with(claims, features), dtype, [6, 21, 22, 95])
    check_steps(target, case, rng, quality)


# Batches and layers


@clause("attn.batch.mixed@1", LEVEL, capability="attention.mixed_batch", facts="attention test A4")
@DTYPES
def test_mixed_batch(
    target: Target, claims: Capabilities, rng: np.random.Generator, quality: Quality, dtype: DType
) -> None:
    """Decodes and prompts, and chunks with context where they are claimed, in one step each give what the oracle gives for them."""
    case = make_case(rng, plain_layer(claims), dtype, [40, 33, 1, 300, 90, 17])
    spans = [Span(0, 39, 40), Span(1, 0, 33), Span(2, 0, 1), Span(3, 299, 300)]
    if target.claims_to("attention.chunked_prefill"):
        spans += [Span(4, 50, 90), Span(5, 15, 17)]
    check(case, spans, AttentionBench(target, case, rng=rng).run(spans), quality)


@clause("attn.batch.mixed-features@1", LEVEL, capability="attention.mixed_batch", facts="attention test A4")
@pytest.mark.parametrize("features", [feature_cases(feature) for feature in LAYER_FEATURES])
def test_mixed_batch_with_features(
    target: Target,
    claims: Capabilities,
    rng: np.random.Generator,
    quality: Quality,
    features: tuple[AttentionFeature, ...],
) -> None:
    """A layer's features hold for the decodes of a mixed batch and for its prompts."""
    for dtype in dtypes_claimed(claims):
        case = make_case(rng, layer_with(claims, features), dtype, [40, 33, 1, 300])
        spans = [Span(0, 39, 40), Span(1, 0, 33), Span(2, 0, 1), Span(3, 299, 300)]
        check(case, spans, AttentionBench(target, case, rng=rng).run(spans), quality)


@clause("attn.layers.differ@1", LEVEL, facts="attention test D, attention test E")
@pytest.mark.parametrize("features", [feature_cases(feature) for feature in LAYER_FEATURES])
def test_layers_differ(
    target: Target,
    claims: Capabilities,
    rng: np.random.Generator,
    quality: Quality,
    features: tuple[AttentionFeature, ...],
) -> None:
    """Layers of one plan that differ, as in models that alternate windows, each keep to their own numbers within one step."""
    plain = plain_layer(claims)
    kinds = [layer_with(claims, features), plain, replace(plain, scale=plain.scale / 2), layer_with(claims, features)]
    dtype = dtypes_claimed(claims)[0]
    cases = [make_case(rng, kind, dtype, [50, 64]) for kind in kinds]
    bench = AttentionBench(target, *cases, rng=rng)
    for spans in cases[0].steps(claims):
        bench.load(bench.image(bench.before(spans)))
        step = bench.step(spans)
        bench.execute(step)
        for index, case in enumerate(cases):
            check(case, spans, bench.outputs(step, index), quality)


# Attention to both sides, of whole sequences without a cache


@clause("attn.bidirectional.whole@1", LEVEL, capability="attention.bidirectional")
@DTYPES
def test_both_sides(
    target: Target, claims: Capabilities, rng: np.random.Generator, quality: Quality, dtype: DType
) -> None:
    """In a layer that is not causal every query of a sequence sees all of its keys, those after it too, and none of another sequence's:
    sequences of one token and of many in one step."""
    case = make_case(rng, plain_layer(claims, causal=False), dtype, [1, 300, 2, 17, 64, 65])
    for k, v in zip(case.k, case.v, strict=True):
        # The last key decides the results of all queries of its sequence, and would those of others.
        v[-1] = 20.0
        k[-1] = k[-1].abs()
    check_steps(target, case, rng, quality)


@clause("attn.bidirectional.window@1", LEVEL, capability="attention.bidirectional")
@DTYPES
@pytest.mark.parametrize(
    "window",
    [pytest.param(window, marks=proves("attention.sliding_window")) for window in (1, 2, 33, 128, 1000)],
)
def test_window_on_both_sides(
    target: Target, claims: Capabilities, rng: np.random.Generator, quality: Quality, dtype: DType, window: int
) -> None:
    """In a layer that is not causal a window of w shows a query at position p the keys at p - w + 1 to p + w - 1, as far as the sequence
    goes: w - 1 on each side, and its own."""
    # One query has both edges of a window only in a sequence of twice its size, for the widest five times as many numbers to judge.
    has_both_edges = window < 1000
    lengths = [window, 2 * window + 3] if has_both_edges else [window + 3]
    case = make_case(rng, plain_layer(claims, window=window, causal=False), dtype, [*lengths, 5, 300])
    for v in case.v:
        # For these queries the two keys at each edge, on either side of it, decide the result.
        for query in [len(v) // 2] if has_both_edges else [0, len(v) - 1]:
            for place, value in ((window - 1, 30.0), (window, -30.0)):
                v[[at for at in (query - place, query + place) if 0 <= at < len(v)]] = value
    check_steps(target, case, rng, quality)


@clause("attn.bidirectional.batch@1", LEVEL, capability="attention.bidirectional")
def test_both_sides_in_layouts(
    target: Target, claims: Capabilities, rng: np.random.Generator, quality: Quality
) -> None:
    """In a step of sequences that see both sides, queries, keys and values may be slices of one buffer, and tokens and sequences of
    padding, whatever they hold, influence no result; what lies beside the outputs stays as it is."""
    for dtype in dtypes_claimed(claims):
        case = make_case(rng, plain_layer(claims, causal=False), dtype, [40, 3, 90])
        bench = AttentionBench(target, case, rng=rng)
        layout = Layout(strided=True, padding_tokens=3, padding_seqs=1, padding=float("nan"), order=(2, 0, 1))
        step = bench.step(case.whole(), layout)
        bench.execute(step)
        check(case, case.whole(), bench.outputs(step), quality)
        assert step.guards_intact(), "something was written beside the outputs"


@clause("attn.bidirectional.apart@1", LEVEL, capability="attention.bidirectional")
def test_causal_and_bidirectional_layers_are_planned_apart(
    target: Target, claims: Capabilities, attention: AttentionBackend
) -> None:
    """A plan of layers that see both sides has a cache without layers; with causal layers among them it is refused, as is a cache of
    another dtype."""
    dtype = dtypes_claimed(claims)[0]
    both = plain_layer(claims, causal=False)
    plan = attention.plan(request_of([both, both], dtype))
    assert isinstance(plan, AttentionPlan), f"a claimed request was refused: {plan}"
    assert plan.kv_cache.num_layers == 0
    assert isinstance(attention.plan(request_of([both, plain_layer(claims)], dtype)), Refusal)
    narrow = next(kind for kind in DType if kind is not dtype)
    assert isinstance(attention.plan(request_of([both], dtype, kv_dtype=narrow)), Refusal)


# KV dtypes


@clause("attn.kv.narrow@1", LEVEL, facts="attention test F")
@pytest.mark.parametrize("kv_dtype", NARROW)
def test_narrow_cache(
    target: Target, claims: Capabilities, rng: np.random.Generator, quality: Quality, kv_dtype: DType
) -> None:
    """A cache of a narrower dtype holds what that dtype can represent exactly, and attention over it is that of the numbers held."""
    for dtype in dtypes_claimed(claims):
        if kv_dtype not in claims.attention.kv_dtypes[dtype]:
            continue
        case = make_case(rng, plain_layer(claims), dtype, [1, 20, 75], kv_dtype=kv_dtype)
        bench = AttentionBench(target, case, rng=rng)
        assert bench.spec.dtype is kv_dtype
        for spans in case.steps(claims):
            check(case, spans, bench.run(spans), quality)
        bench.load(image := bench.image([0] * len(case.lengths)))
        bench.proceed(case.whole())
        assert same_bits(bench.cache, bench.written(image, case.whole()))


@clause("attn.kv.scales@1", LEVEL, capability="attention.fp8_kv_scales", facts="attention test F")
@pytest.mark.parametrize("scales", [(0.25, 1024.0), (32.0, 2.0**-9)], ids=["large-values", "small-values"])
def test_scaled_cache(
    target: Target, claims: Capabilities, rng: np.random.Generator, quality: Quality, scales: tuple[float, float]
) -> None:
    """A layer with scales has keys and values divided by them in its cache, of the narrower dtype, and attends over what the cache holds
    times them: also values that the dtype alone could not hold. Layers of one plan have their own."""
    k_scale, v_scale = scales
    for dtype in dtypes_claimed(claims):
        for kv_dtype in claims.attention.kv_dtypes[dtype] - {dtype}:
            plain = plain_layer(claims)
            kinds = [replace(plain, k_scale=k_scale, v_scale=v_scale), plain, replace(plain, v_scale=v_scale)]
            cases = [make_case(rng, kind, dtype, [1, 20, 75], kv_dtype=kv_dtype) for kind in kinds]
            bench = AttentionBench(target, *cases, rng=rng)
            for spans in cases[0].steps(claims):
                bench.load(before := bench.image(bench.before(spans)))
                step = bench.step(spans)
                bench.execute(step)
                assert same_bits(bench.cache, bench.written(before, spans))
                for index, case in enumerate(cases):
                    check(case, spans, bench.outputs(step, index), quality)


# Refusals


def _answer(target: Target, request: AttentionRequest) -> AttentionPlan | Refusal:
    try:
        attention = target.attention()
    except CapabilityRefused as refused:
        return Refusal(refused.reasons)
    return attention.plan(request)


def _assert_refused(target: Target, request: AttentionRequest, word: str) -> None:
    """Assert that a request is refused with a reason that names what is not claimed; having no attention is a reason for everything."""
    answer = _answer(target, request)
    assert isinstance(answer, Refusal), f"what is not claimed was planned: {word}"
    assert answer.reasons, "refused without a reason"
    if target.claims_to("attention"):
        assert any(word in reason for reason in answer.reasons), f"no reason names {word}: {answer.reasons}"


def _dtypes(claims: Capabilities) -> list[DType]:
    return dtypes_claimed(claims) or [DType.FLOAT32]


@clause("attn.feature.refused@1", LEVEL, refusal=True, facts="attention test E")
@pytest.mark.parametrize("features", [feature_cases(feature) for feature in AttentionFeature])
def test_unclaimed_feature(target: Target, claims: Capabilities, features: tuple[AttentionFeature, ...]) -> None:
    """A feature that is not claimed is refused by `plan`, with a reason that names it, whether a layer needs it or the engine does; it
    is never ignored."""
    (feature,) = features
    plain = request_of([plain_layer(claims)], _dtypes(claims)[0])
    _assert_refused(target, replace(plain, features=frozenset(features)), feature.value)
    if feature in REFUSED_LAYERS:
        _assert_refused(target, replace(plain, layers=(layer_with(claims, features),)), feature.value)


@clause("attn.dtype.refused@1", LEVEL, refusal=True, facts="attention test F")
@DTYPES
def test_unclaimed_dtype(target: Target, claims: Capabilities, dtype: DType) -> None:
    """A dtype of queries that is not claimed is refused by `plan`, with a reason that names it."""
    _assert_refused(target, request_of([plain_layer(claims)], dtype), dtype.value)


@clause("attn.kv-dtype.refused@1", LEVEL, refusal=True, facts="attention test F")
@pytest.mark.parametrize("kv_dtype", NARROW)
def test_unclaimed_kv_dtype(target: Target, claims: Capabilities, kv_dtype: DType) -> None:
    """A dtype of the cache that is not claimed is refused by `plan`, with a reason that names it."""
    for dtype in _dtypes(claims):
        _assert_refused(target, request_of([plain_layer(claims)], dtype, kv_dtype=kv_dtype), kv_dtype.value)


@clause("attn.kv-dtype.pairs@1", LEVEL, capability="attention", facts="attention test F")
def test_pairs_of_dtypes(attention: AttentionBackend, claims: Capabilities) -> None:
    """Every pair of a claimed dtype of queries and a dtype of the cache is planned where it is claimed, and refused where it is not."""
    for dtype in dtypes_claimed(claims):
        for kv_dtype in DType:
            answer = attention.plan(request_of([plain_layer(claims)], dtype, kv_dtype=kv_dtype))
            wanted = kv_dtype in claims.attention.kv_dtypes[dtype]
            assert isinstance(answer, AttentionPlan if wanted else Refusal), (
                f"{dtype} with a cache of {kv_dtype}: {answer}"
            )
