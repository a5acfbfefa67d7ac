"""Parts of the kernels that the conformance suite sees only through attention's tolerances, and what it does not ask for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from hardpoint.interfaces import AttentionLayer, AttentionRequest, Device, DType, Refusal
from hardpoint.interfaces.errors import ConfigError, InvalidBatch
from hardpoint.triton import TritonAttention, kernels

DEVICE = Device("interpreted", 0, "interpreter", "cpu", simulated=True)
LAYER = AttentionLayer(4, 2, 64, 0.125)
REQUEST = AttentionRequest((LAYER,), DType.FLOAT16, DType.FLOAT16, 16, 512)


@triton.jit
def _decode_all(bits, out, COUNT: tl.constexpr):
    index = tl.arange(0, COUNT)
    tl.store(out + index, kernels._decode_e4m3(tl.load(bits + index), tl.float16).to(tl.float32))


@triton.jit
def _encode_all(numbers, out, COUNT: tl.constexpr):
    index = tl.arange(0, COUNT)
    tl.store(out + index, kernels._encode_e4m3(tl.load(numbers + index)))


@triton.jit
def _tanh_all(numbers, out, COUNT: tl.constexpr):
    index = tl.arange(0, COUNT)
    tl.store(out + index, kernels._tanh(tl.load(numbers + index)))


def test_every_e4m3_byte_is_decoded() -> None:
    bits = torch.arange(256, dtype=torch.int64).to(torch.uint8)
    out = torch.empty(256)
    _decode_all[(1,)](bits, out, COUNT=256)
    wanted = bits.view(torch.float8_e4m3fn).float() / 256
    assert torch.equal(out.nan_to_num(nan=99.0), wanted.nan_to_num(nan=99.0))
    assert torch.equal(out.signbit(), wanted.signbit())


def test_numbers_are_encoded_as_torch_does_and_saturate() -> None:
    held = torch.arange(256, dtype=torch.int64).to(torch.uint8).view(torch.float8_e4m3fn).float()
    held = held[held.isfinite()]
    middle = (held.sort().values[1:] + held.sort().values[:-1]) / 2
    rng = np.random.default_rng(0)
    spread = torch.from_numpy((rng.standard_normal(2000) * 2.0 ** rng.integers(-12, 8, 2000)).astype(np.float32))
    numbers = torch.cat([held, middle, middle * (1 + 1e-6), middle * (1 - 1e-6), spread.clamp(-448, 448)])
    numbers = torch.nn.functional.pad(numbers, (0, 4096 - len(numbers)))
    out = torch.empty(4096, dtype=torch.uint8)
    _encode_all[(1,)](numbers, out, COUNT=4096)
    assert torch.equal(out, numbers.to(torch.float8_e4m3fn).view(torch.uint8))
    beyond = torch.tensor([449.0, 1e9, float("inf"), -1e9, -float("inf"), float("nan"), 1e-30, -1e-30])
    out = torch.empty(8, dtype=torch.uint8)
    _encode_all[(1,)](beyond, out, COUNT=8)
    assert out.tolist() == [0x7E, 0x7E, 0x7E, 0xFE, 0xFE, 0x7F, 0x00, 0x80]


def test_tanh_is_exact_to_a_few_units_everywhere() -> None:
    size = torch.logspace(-9, 2, 2048, dtype=torch.float32)
    numbers = torch.cat([size, -size])
    out = torch.empty(4096)
    _tanh_all[(1,)](numbers, out, COUNT=4096)
    wanted = numbers.double().tanh()
    assert ((out.double() - wanted) / wanted).abs().max() < 1e-6


def test_copies_that_read_what_others_write_are_made_in_order() -> None:
    attention = TritonAttention(DEVICE)
    cache = torch.arange(5, dtype=torch.float16).view(1, 1, 5, 1, 1, 1).expand(2, 2, 5, 2, 16, 16).contiguous()
    attention.copy_blocks(cache, np.array([(0, 1), (1, 2), (3, 0)], np.int32))
    assert cache[0, 0, :, 0, 0, 0].tolist() == [3, 0, 0, 3, 4]
    assert torch.equal(cache[0, 0], cache[1, 1])


@pytest.mark.parametrize("pairs", [[(0, 5)], [(-1, 0)], [(0, 1), (5, 0)]])
def test_blocks_outside_of_a_cache_are_refused_and_nothing_is_copied(pairs: list[tuple[int, int]]) -> None:
    cache = torch.zeros(1, 2, 5, 2, 16, 16, dtype=torch.float16)
    cache[:, :, 0] = 1
    before = cache.clone()
    with pytest.raises(InvalidBatch, match="5 blocks"):
        TritonAttention(DEVICE).copy_blocks(cache, np.array(pairs, np.int32))
    assert torch.equal(cache, before)


def test_caches_of_different_shape_do_not_exchange_blocks() -> None:
    one, other = torch.zeros(1, 2, 5, 2, 16, 16), torch.zeros(1, 2, 5, 2, 32, 16)
    with pytest.raises(InvalidBatch, match="differ in the number of blocks only"):
        TritonAttention(DEVICE).swap_blocks(one, other, np.array([(0, 0)], np.int32))


def test_plans_name_their_kernels_and_the_reasons() -> None:
    plan = TritonAttention(DEVICE).plan(REQUEST)
    assert not isinstance(plan, Refusal)
    assert any("triton (Hardpoint's own kernels)" in note for note in plan.notes)
    assert any("interpreter" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("changed", "word"),
    [({"k_scale": 0.5}, "narrower dtype"), ({"v_scale": 0.0}, "not positive"), ({"head_dim": 72}, "72")],
)
def test_what_cannot_be_done_is_refused_with_reasons(changed: dict[str, float], word: str) -> None:
    answer = TritonAttention(DEVICE).plan(replace(REQUEST, layers=(replace(LAYER, **changed),)))
    assert isinstance(answer, Refusal)
    assert any(word in reason for reason in answer.reasons), answer.reasons


def test_other_kernels_in_the_environment_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARDPOINT_ATTENTION", "magic")
    with pytest.raises(ConfigError, match="magic"):
        TritonAttention(DEVICE)
