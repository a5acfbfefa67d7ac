"""Values as messages: everything that the contract's calls take and return arrives as it was sent, and nothing else is accepted."""

from __future__ import annotations

import dataclasses
import pickle
from dataclasses import fields, replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays, scalar_dtypes

from hardpoint.executor.calls import CONFIG, SCHEMAS, from_message, to_message
from hardpoint.executor.failures import Failure, describe, rebuild
from hardpoint.executor.limits import RankLimits
from hardpoint.executor.messages import decode, encode
from hardpoint.executor.ranks import RankSpec
from hardpoint.executor.steps import StepDecoder, StepEncoder, decode_output, encode_output
from hardpoint.executor.weights import decode_weight, encode_weight
from hardpoint.interfaces import (
    WORKER_CALLS,
    AttentionLayer,
    AttentionPlan,
    AttentionRequest,
    DType,
    KVCacheSpec,
    LiveRanges,
    MemoryProfile,
    MemoryReport,
    MemoryStats,
    ModelInfo,
    Policy,
    SequenceSampling,
    SleepPlan,
    SleepTier,
    StepBatch,
    StepInput,
    StepOutput,
    TagStats,
    TokenLogprobs,
    WakePlan,
    WeightWrite,
    WorkerConfig,
    WorkerStatus,
    errors,
)
from hardpoint.interfaces.batch import in_groups
from hardpoint.interfaces.errors import (
    CapabilityRefused,
    ConfigError,
    CorruptWeights,
    DriverError,
    HardpointError,
    MalformedMessage,
    ModelNotFound,
    ParticipantError,
    WorkerError,
)


def joined(parts: Any) -> bytearray:
    return bytearray(b"".join(parts))


LAYER = AttentionLayer(num_heads=9, num_kv_heads=3, head_dim=64, scale=0.125, sliding_window=7, soft_cap=30.0)
MODEL = ModelInfo(
    architecture="A",
    dtype=DType.BFLOAT16,
    vocab_size=11,
    max_model_len=12,
    num_layers=13,
    weight_bytes=1 << 40,
    attention=AttentionPlan(
        AttentionRequest((LAYER, LAYER), DType.BFLOAT16, DType.FLOAT8_E4M3, None, 12),
        KVCacheSpec(2, 16, 3, 64, DType.BFLOAT16, ("kv", "head", "block", "token", "dim")),
        notes=("a", "b"),
    ),
    path="modules",
    is_generative=False,
)
REPORT = MemoryReport(
    1, 2, 3, {"total": 0.5}, 4, 5, {"nccl": 6}, {SleepTier.HOST: 7, SleepTier.SOURCE: 8}, 9, 10, False, frozenset({"x"})
)
PLAN = SleepPlan(
    policies={"weights": Policy.PRESERVE, "kv_cache": Policy.DISCARD},
    tags=frozenset({"weights"}),
    tier=SleepTier.DISK,
    keep=frozenset({"k"}),
    verify=True,
    live=(LiveRanges(1 << 40, [(0, 1)]),),
    live_blocks=[1, 5],
    host_budget=6,
    disk_directory="here",
    disk_budget=7,
)
EXAMPLES: dict[Any, Any] = {
    int: 7,
    str: "a",
    type(None): None,
    ModelInfo: MODEL,
    MemoryProfile: MemoryProfile(1, 2, 3, 4, 0.5, 6, 0.7, 0.8),
    MemoryReport: REPORT,
    WorkerStatus: WorkerStatus(MemoryStats({"t": TagStats(1, 2, 3, 4, 5)}, 6, frozenset({"t"})), frozenset({"a", "b"})),
}
ARGUMENTS: dict[str, list[tuple[Any, ...]]] = {
    "initialize_kv": [(5, 6)],
    "open_tiers": [(5, 0, None), (5, 6, "a/folder")],
    "begin": [(3, PLAN), (3, SleepPlan()), (4, WakePlan()), (4, WakePlan(frozenset({"a", "b"})))],
    "commit": [(4,)],
    "rollback": [(4,)],
    "load_adapter": [(7, "a/folder")],
    "unload_adapter": [(7,)],
    "start_trace": [("a/folder",)],
    "write_weights": [
        (WeightWrite.RELOAD,),
        (WeightWrite.RELOAD, (), "elsewhere"),
        (WeightWrite.UPDATE, iter(())),
        (WeightWrite.DECLARE,),
    ],
}


@pytest.mark.parametrize("name", sorted(WORKER_CALLS - {"submit", "collect"}))
def test_every_call_of_the_contract_is_sent_and_answered(name: str) -> None:
    schema = SCHEMAS[name]
    for arguments in ARGUMENTS.get(name, [()]):
        weights = object()
        sent = schema.decode(joined(schema.encode(arguments)), weights=weights)  # type: ignore[arg-type]
        bound = schema.signature.bind(*arguments)
        bound.apply_defaults()
        expected = [
            weights if kind is None else value for value, kind in zip(bound.args, schema.arguments, strict=True)
        ]
        assert sent == expected
    result = EXAMPLES[schema.result]
    assert decode(joined(encode(result)), schema.result) == result


@pytest.mark.parametrize("name", sorted(WORKER_CALLS - {"submit", "collect"}))
def test_arguments_of_another_type_are_refused_before_the_worker_sees_them(name: str) -> None:
    with pytest.raises(MalformedMessage):
        SCHEMAS[name].decode(joined(encode([{"no": "such"}, 1.5, "x"])))


def test_a_plan_keeps_all_its_fields_and_calls_back() -> None:
    assert {f.name for f in fields(SleepPlan) if getattr(PLAN, f.name) == getattr(SleepPlan(), f.name)} == {"progress"}
    seen: list[Any] = []
    plan = replace(PLAN, progress=lambda *_: None)
    message = joined(SCHEMAS["begin"].encode((1, plan)))
    (_, sent) = SCHEMAS["begin"].decode(message, lambda *a: seen.append(a))
    sent.progress(1, 2)
    assert seen == [(1, 2)]
    assert replace(sent, progress=None) == PLAN


def test_a_configuration_arrives_with_its_plan() -> None:
    config = WorkerConfig("m", dtype=DType.FLOAT16, threads=3, init_method="tcp://h:1/g", prepare_sleep=PLAN, rank=1)
    assert from_message(decode(joined(encode(to_message(config))), CONFIG)) == config
    spec = RankSpec("acme", 2, config)
    assert RankSpec.decode(joined(spec.encode())) == spec


# Steps


def assert_equal(one: Any, other: Any) -> None:
    if isinstance(one, np.ndarray):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    elif dataclasses.is_dataclass(one):
        for f in fields(one):
            if f.name != "block_table":
                assert_equal(getattr(one, f.name), getattr(other, f.name))
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert_equal(value, other[key])
    else:
        assert one == other


def test_a_step_arrives_as_it_was_sent(step: Any) -> None:
    sampling = SequenceSampling(
        7,
        [1, 2, 3],
        1 << 62,
        0.5,
        logit_bias={3: -1.5},
        stop_token_ids=frozenset({9}),
        allowed_token_ids=(1, 2),
        logprobs=4,
    )
    sent = step([3, 1, 2], 40, new=(sampling, replace(sampling, prompt_token_ids=np.array([1, 2, 3]))))
    arrived = StepDecoder().decode(joined(StepEncoder().encode(sent)))
    assert_equal(replace(sent, new_sequences=(sampling, sampling)), arrived)


def test_an_output_arrives_as_it_was_sent() -> None:
    logprobs = TokenLogprobs(np.array([3, 1], np.int64), np.array([-0.5, -2.0], np.float32), 1)
    tokens = np.array([3, 4], np.int64)
    for sent in (
        StepOutput(tokens),
        StepOutput(np.empty(0, np.int64)),
        StepOutput(tokens, {1: logprobs}, {12: np.ones(7, np.float32)}),
        StepOutput(np.array([4, -1]), failed={1: "no token is left"}),
    ):
        message = joined(encode_output(sent))
        assert_equal(sent, decode_output(message))
        for damaged in (message[:-1], message[:7], message + b"x"):
            with pytest.raises(MalformedMessage):
                decode_output(damaged)


@settings(max_examples=50, deadline=None)
@given(data=st.data(), block_size=st.sampled_from([1, 4]))
def test_the_block_table_of_every_step_is_right_where_its_sequences_use_it(data: Any, block_size: int) -> None:
    """Whatever changes between steps: blocks appended, replaced, rows given to others, contexts that shrink, another table."""
    table = np.zeros((6, 8), np.int32)
    encoder, decoder = StepEncoder(), StepDecoder()
    encoder.block_size = block_size
    for _ in range(data.draw(st.integers(1, 6))):
        if data.draw(st.integers(0, 7)) == 0:
            table = np.zeros((6, 15 - table.shape[1]), np.int32)
        rows = data.draw(st.lists(st.integers(0, 5), unique=True, max_size=6))
        changes = st.tuples(st.integers(0, 5), st.integers(0, 7), st.integers(0, 99))
        for row, column, block in data.draw(st.lists(changes, max_size=12)):
            table[row, column % table.shape[1]] = block
        contexts = data.draw(
            st.lists(st.integers(1, table.shape[1] * block_size), min_size=len(rows), max_size=len(rows))
        )
        empty = np.empty(0, np.int64)
        short = np.empty(0, np.int32)
        pairs = np.empty((0, 2), np.int32)
        batch = StepBatch(
            empty, empty, short, short, np.array(contexts, np.int32), table, np.array(rows, np.int32), empty, 0, short,
            empty, pairs, pairs, pairs, empty,
        )  # fmt: skip
        message = joined(encoder.encode(StepInput(batch)))
        if not data.draw(st.booleans()):
            continue  # It never left, and nothing of it counts as sent.
        encoder.commit()
        arrived = decoder.decode(message).batch.block_table
        assert arrived.shape == table.shape
        for row, context in zip(rows, contexts, strict=True):
            used = -(-context // block_size)
            np.testing.assert_array_equal(arrived[row, :used], table[row, :used])


def test_a_step_of_unchanged_tables_sends_none_of_them(step: Any) -> None:
    encoder, one = StepEncoder(), step(list(range(32)), 32)
    first = len(joined(encoder.encode(one)))
    assert len(joined(encoder.encode(one))) == first, "it was not sent"
    encoder.commit()
    second = len(joined(encoder.encode(one)))
    assert second < 2500 < 8 * 32 * 30 < first


def test_slots_and_tables_of_every_kv_cache_group_arrive(step: Any) -> None:
    encoder, decoder = StepEncoder(), StepDecoder()
    for lengths in ([5, 9], [6, 10], [30]):
        sent = step(list(range(1, len(lengths) + 1)), max(lengths))
        sent = replace(sent, batch=in_groups(sent.batch, 3, 16))
        message = joined(encoder.encode(sent))
        encoder.commit()
        arrived = decoder.decode(message).batch
        assert len(arrived.more_groups) == 2
        for found, group in zip(arrived.by_group(), sent.batch.by_group(), strict=True):
            np.testing.assert_array_equal(found.slot_mapping, group.slot_mapping)
            for row, context in zip(group.rows, group.context_lens, strict=True):
                np.testing.assert_array_equal(found.block_table[row, :context], group.block_table[row, :context])


def test_a_group_that_is_cut_off_is_refused(step: Any) -> None:
    sent = step([1, 2], 4)
    message = joined(StepEncoder().encode(replace(sent, batch=in_groups(sent.batch, 2, 16))))
    with pytest.raises(MalformedMessage):
        StepDecoder().decode(message[:-8])


def test_arrays_of_another_type_are_refused(step: Any) -> None:
    good = step([1], 4)
    bad = replace(good, batch=replace(good.batch, slot_mapping=good.batch.slot_mapping.astype(np.int64)))
    with pytest.raises(MalformedMessage, match="arrays"):
        StepEncoder().encode(bad)


@pytest.mark.parametrize("change", [{"rows": [9999]}, {"rows": [-1]}, {"context_lens": [-1]}, {"context_lens": [4, 4]}])
def test_rows_that_the_table_has_not_are_refused(change: dict[str, list[int]], step: Any) -> None:
    good = step([1], 4)
    encoder, decoder = StepEncoder(), StepDecoder()
    wrong = {name: np.array(values, np.int32) for name, values in change.items()}
    with pytest.raises(MalformedMessage, match="block table"):
        encoder.encode(replace(good, batch=replace(good.batch, **wrong)))
    # What was refused counts as not sent.
    arrived = decoder.decode(joined(encoder.encode(good))).batch
    row, used = good.batch.rows[0], good.batch.context_lens[0]
    np.testing.assert_array_equal(arrived.block_table[row, :used], good.batch.block_table[row, :used])


def test_arrays_with_gaps_are_refused(step: Any) -> None:
    good = step([1, 2], 4)
    gaps = np.arange(2 * len(good.batch.token_ids), dtype=np.int64)[::2]
    with pytest.raises(MalformedMessage, match="dense"):
        StepEncoder().encode(replace(good, batch=replace(good.batch, token_ids=gaps)))


# Malformed messages


def test_a_message_at_any_address_is_understood(step: Any) -> None:
    sent = step([1, 2], 8)
    message = joined(StepEncoder().encode(sent))
    for offset in range(1, 9):
        shifted = memoryview(bytes(offset) + message)[offset:]
        assert_equal(sent, StepDecoder().decode(shifted))


@pytest.mark.parametrize(
    ("number", "value"),
    [(0, -1), (1, 1 << 40), (2, 1 << 62), (1, -1), (4, 1 << 61), (4, -1), (14, 1), (17, 1), (18, 1 << 30)],
)
def test_numbers_that_do_not_fit_together_are_refused(number: int, value: int, step: Any) -> None:
    message = joined(StepEncoder().encode(step([1, 2], 8)))
    message[8 * number : 8 * number + 8] = value.to_bytes(8, "little", signed=True)
    with pytest.raises(MalformedMessage, match="not understood"):
        StepDecoder().decode(message)


def test_a_place_outside_of_the_table_changes_nothing(step: Any) -> None:
    encoder, decoder = StepEncoder(), StepDecoder()
    one = StepInput(step([1, 2], 8).batch)
    table = decoder.decode(joined(encoder.encode(one))).batch.block_table
    encoder.commit()
    before = table.copy()
    one.batch.block_table[one.batch.rows[0], 0] += 1
    message = joined(encoder.encode(one))
    message[-8:-4] = (table.size).to_bytes(4, "little")
    with pytest.raises(MalformedMessage, match="place"):
        decoder.decode(message)
    np.testing.assert_array_equal(table, before)


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, 400), flipped=st.integers(0, 400), bit=st.integers(0, 7))
def test_a_damaged_step_is_a_typed_error_or_a_step(cut: int, flipped: int, bit: int, step: Any) -> None:
    """No damage leads to anything else than MalformedMessage, or a value of the declared type."""
    message = joined(StepEncoder().encode(step([1, 2], 8)))
    message[flipped % len(message)] ^= 1 << bit
    for damaged in (message, message[: cut % len(message)]):
        try:
            assert isinstance(StepDecoder().decode(damaged), StepInput)
        except MalformedMessage:
            continue


@pytest.mark.parametrize("value", [object(), {1: object()}, np.array([object()]), np.array(["text"]), print])
def test_what_is_no_value_is_not_sent(value: Any) -> None:
    with pytest.raises(MalformedMessage, match="cannot be sent"):
        encode(value)


@given(
    value=arrays(scalar_dtypes().filter(lambda dtype: dtype.kind in "biuf"), array_shapes(min_dims=0, min_side=0)),
    before=st.binary(max_size=70),
)
@settings(max_examples=60, deadline=None)
def test_arrays_arrive_with_their_type_and_shape(value: np.ndarray[Any, Any], before: bytes) -> None:
    first, arrived, turned = decode(joined(encode((before, value, value.T))), tuple[bytes, Any, Any])
    assert first == before
    assert (arrived.dtype, arrived.shape) == (value.dtype, value.shape)
    np.testing.assert_array_equal(arrived, value)
    np.testing.assert_array_equal(turned, value.T)


@pytest.mark.parametrize("name", ["(2,", "O", "V8", "<c16", "<M8[s]", "no such"])
def test_arrays_of_what_is_no_number_are_refused(name: str) -> None:
    description = msgspec.msgpack.encode((name, (1,)))
    extension = msgspec.msgpack.Ext(1, len(description).to_bytes(4, "little") + description + bytes(8))
    with pytest.raises(MalformedMessage, match="an array of"):
        decode(msgspec.msgpack.encode(extension), Any)


@pytest.mark.parametrize(("shape", "size"), [((2,), 8), ((-1,), 8), ((1 << 62, 4), 0), ((), 7)])
def test_arrays_with_other_bytes_than_their_shape_has_are_refused(shape: tuple[int, ...], size: int) -> None:
    description = msgspec.msgpack.encode(("<i8", shape))
    extension = msgspec.msgpack.Ext(1, len(description).to_bytes(4, "little") + description + bytes(size))
    with pytest.raises(MalformedMessage, match="an array of"):
        decode(msgspec.msgpack.encode(extension), Any)


# Weights


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4),
        torch.randn(4, 6).t(),
        torch.randn(8)[::2],
        torch.tensor(2.5),
        torch.empty(0, 3),
        torch.randn(5).bfloat16(),
        torch.randn(5).to(torch.float8_e4m3fn),
        torch.nn.Parameter(torch.randn(2)),
    ],
    ids=str,
)
def test_a_weight_arrives_as_it_was_sent(tensor: torch.Tensor) -> None:
    name, arrived = decode_weight(joined(encode_weight(("a.b", tensor))))
    assert (name, arrived.dtype, arrived.shape) == ("a.b", tensor.dtype, tensor.shape)
    assert torch.equal(arrived.float(), tensor.detach().float())


def test_a_damaged_weight_is_a_typed_error() -> None:
    message = joined(encode_weight(("a.b", torch.ones(3))))
    for damaged in (message[:-1], message + b"x", message[:9], message[:5], b"\xff" * 8 + message[8:]):
        with pytest.raises(MalformedMessage):
            decode_weight(damaged)


@pytest.mark.parametrize("dtype", ["(", "f8,,", "O", "<U3", "V8", "<M8[s]", "", "\0", "float64"])
def test_an_array_of_no_number_is_not_understood(dtype: str) -> None:
    """Some of these names are errors of syntax where numpy reads them."""
    description = msgspec.msgpack.encode((dtype, [1]))
    content = b"".join([len(description).to_bytes(4, "little"), description, bytes(8)])
    with pytest.raises(MalformedMessage, match="an array of"):
        decode(msgspec.msgpack.encode(msgspec.msgpack.Ext(1, content)), np.ndarray)


@pytest.mark.parametrize("shape", [[-1], [0, 2**62], [0, 2**63], [2**63, 2**63], [0] * 100])
def test_an_array_of_an_impossible_shape_is_not_understood(shape: list[int]) -> None:
    description = msgspec.msgpack.encode(("<f8", shape))
    content = len(description).to_bytes(4, "little") + description
    with pytest.raises(MalformedMessage, match="not understood"):
        decode(msgspec.msgpack.encode(msgspec.msgpack.Ext(1, content)), np.ndarray)


@pytest.mark.parametrize("item", [3, ("a",), (1, torch.ones(1)), ("a", 1), ("a", torch.ones(1, dtype=torch.complex64))])
def test_what_is_no_weight_is_refused(item: Any) -> None:
    with pytest.raises(CorruptWeights):
        encode_weight(item)


# Errors


def _examples() -> list[Exception]:
    plain = [
        value("a problem", found="what", hint="do this")
        for name, value in sorted(vars(errors).items())
        if isinstance(value, type)
        and issubclass(value, HardpointError)
        and value not in (CapabilityRefused, DriverError)
        if value is not HardpointError
    ]
    failed = ParticipantError.of("sampler", "prepare_sleep", ValueError("x"))
    return [*plain, CapabilityRefused("p", ["one", "two"], hint="h"), DriverError("call", 3, "text"), failed, KeyError("k"),
            ZeroDivisionError(), FileNotFoundError(2, "gone", "name"), UnicodeDecodeError("utf-8", b"x", 0, 1, "bad")]  # fmt: skip


@pytest.mark.parametrize("error", _examples(), ids=lambda error: type(error).__name__)
def test_an_error_is_raised_again_as_it_was(error: Exception) -> None:
    try:
        raise error
    except Exception as caught:
        again = rebuild(decode(joined(encode(describe(caught))), Failure), "rank 1 of 2")
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert {name: value for name, value in vars(again).items() if name != "__notes__"} == vars(error)
    assert again.__notes__[0].startswith("Raised by rank 1 of 2:\nTraceback")
    assert "raise error" in again.__notes__[0]
    if isinstance(error, HardpointError):
        assert str(pickle.loads(pickle.dumps(error))) == str(error)


class _Special(ModelNotFound):
    """A class that the other side does not know, of a kind that it knows."""


class _Foreign(Exception):
    """A class that the other side does not know at all."""


def test_an_error_of_an_unknown_class_is_one_of_the_nearest_known_base() -> None:
    again = rebuild(describe(_Special("no model", found="x")), "rank 0")
    assert type(again) is ModelNotFound
    assert isinstance(again, FileNotFoundError)
    again = rebuild(describe(_Foreign("strange")), "rank 0")
    assert type(again) is WorkerError
    assert "_Foreign" in str(again)
    assert "strange" in str(again)


class _Wordless(ValueError):
    """An error that cannot say what it is."""

    def __str__(self) -> str:
        raise RuntimeError("nothing to say")


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (
            FileNotFoundError(2, "gone", "a\udcff"),
            FileNotFoundError,
            "[Errno 2] gone: 'a\\\\udcff'",
        ),  # a file's name that is no UTF-8
        (ValueError("\udcff"), ValueError, "\\udcff"),
        (ValueError(1 << 80), ValueError, str(1 << 80)),
        (_Wordless(), ValueError, ""),
    ],
    ids=["name", "text", "number", "wordless"],
)
def test_an_error_that_no_message_takes_as_it_is_arrives_all_the_same(
    error: Exception, kind: type[Exception], text: str
) -> None:
    """Whoever asked the other process would wait for it without end."""
    again = rebuild(decode(joined(encode(describe(error))), Failure), "rank 0")
    assert (type(again), str(again)) == (kind, text)


# Limits


def test_limits_cover_calls_of_the_contract() -> None:
    from hardpoint.executor import limits

    assert set(limits._KINDS) <= WORKER_CALLS
    assert RankLimits(load=1.5).of("warm_up") == 1.5
    assert RankLimits.parse({"sleep": 2}).of("begin") == 2
    with pytest.raises(ConfigError, match="'nap' is not a time limit"):
        RankLimits.parse({"nap": 2})
    with pytest.raises(ConfigError, match=r"rank_limits\.step"):
        RankLimits(step=0)
