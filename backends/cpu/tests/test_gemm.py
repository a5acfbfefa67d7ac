"""Packed weights and linear layers of the native module, in every instruction set, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hardpoint_cpu import _native

CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
DTYPES = list(CODES)
STORE, ADD_RESIDUAL, SILU_MUL, GELU_TANH_MUL, ARG_MAX = range(5)
SHAPES = [(1, 1), (16, 2), (17, 33), (48, 64), (100, 7), (130, 129), (321, 40)]
ROW_COUNTS = [1, 2, 3, 5, 8, 9, 12, 13, 31, 70]


pytestmark = pytest.mark.usefixtures("isa")


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def pack(weight: Tensor) -> Tensor:
    """Pack [n, k] into memory full of NaN: nothing that packing leaves alone may reach a result."""
    n, k = weight.shape
    code = CODES[weight.dtype]
    tiles = torch.full((_native.packed_bytes(n, k, code),), 0xFF, dtype=torch.uint8)
    _native.pack_weight(weight.data_ptr(), weight.stride(0), n, k, code, 0, 0, 1, tiles.data_ptr())
    return tiles


def pack_pair(gate: Tensor, up: Tensor) -> tuple[Tensor, int]:
    """Pack gate and up [n, k] as a gated pair; returns the tiles and the number of stored columns."""
    n, k = gate.shape
    code, stored = CODES[gate.dtype], 2 * 16 * -(-n // 16)
    tiles = torch.full((_native.packed_bytes(stored, k, code),), 0xFF, dtype=torch.uint8)
    for first_tile, half in enumerate((gate, up)):
        _native.pack_weight(half.data_ptr(), half.stride(0), n, k, code, 0, first_tile, 2, tiles.data_ptr())
    return tiles, stored


def linear(
    x: Tensor,
    tiles: Tensor,
    n: int,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    epilogue: int = STORE,
    soft_cap: float = 0.0,
    arg_max: Tensor | None = None,
    workspace: Tensor | None = None,
    blocks: int = -1,
) -> Tensor:
    rows, k = x.shape
    code = CODES[x.dtype]
    workspace = measured_workspace(x, blocks) if workspace is None else workspace
    _native.linear(
        (tiles.data_ptr(), n, k, code, blocks),
        x.data_ptr(),
        x.stride(0),
        rows,
        0 if bias is None else bias.data_ptr(),
        epilogue,
        soft_cap,
        out.data_ptr(),
        out.stride(0) if out.ndim == 2 else 0,
        CODES[out.dtype],
        out.shape[1] if out.ndim == 2 else 0,
        0 if arg_max is None else arg_max.data_ptr(),
        workspace.data_ptr(),
        workspace.numel(),
    )
    return out


def measured_workspace(x: Tensor, blocks: int = -1) -> Tensor:
    return torch.full(
        (_native.linear_workspace_bytes(*x.shape, CODES[x.dtype], blocks != -1),), 0xFF, dtype=torch.uint8
    )


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return x Wᵀ + b in float64 and the error bound of a float32 sum of k terms in any order, (k + 1) · 2⁻²³ · Σ |x w|."""
    exact, size = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    return exact, (x.shape[1] + 1) * 2.0**-23 * size + 1e-30


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_linear_agrees_with_float64_within_the_bound_of_a_float32_sum(n: int, k: int, dtype: torch.dtype) -> None:
    weight, bias = random(n, k, dtype=dtype), random(n, dtype=torch.float32, seed=1)
    tiles = pack(weight)
    x = random(70, k, dtype=dtype, seed=2)
    for rows in ROW_COUNTS:
        for b in (None, bias):
            exact, bound = product(x[:rows], weight, b)
            out = linear(x[:rows], tiles, n, torch.full((rows, n), float("nan")), bias=b)
            assert ((out - exact).abs() <= bound).all(), f"{rows} rows"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), [(17, 33), (321, 40), (64, 576)])
def test_a_row_has_the_same_bits_in_every_batch_and_with_every_number_of_threads(
    n: int, k: int, dtype: torch.dtype
) -> None:
    tiles = pack(random(n, k, dtype=dtype))
    x = random(150, k, dtype=dtype, seed=1)
    _native.set_num_threads(1)
    whole = linear(x, tiles, n, torch.empty(150, n))
    for threads in (1, 2, 3):
        _native.set_num_threads(threads)
        for rows in (1, 4, 11, 16, 25, 33, 60, 150):
            part = linear(x[-rows:], tiles, n, torch.empty(rows, n))
            assert torch.equal(part, whole[-rows:]), f"{rows} rows, {threads} threads"


@pytest.mark.parametrize("exponents", [range(40, 70), range(256)], ids=["tiny", "any"])
def test_a_row_of_tiny_and_of_any_bfloat16_numbers_has_the_same_bits_in_every_batch(exponents: range) -> None:
    """Sums and operands among the subnormal numbers, infinities and NaNs too: few rows may be multiplied by other instructions."""
    n, k = 321, 40
    generator = torch.Generator().manual_seed(3)

    def numbers(rows: int) -> Tensor:
        exponent = torch.randint(exponents.start, exponents.stop, (rows, k), generator=generator) << 7
        exponent[torch.rand(rows, k, generator=generator) < 0.1] = 0
        rest = torch.randint(0, 1 << 16, (rows, k), generator=generator) & 0x807F
        return (exponent | rest).to(torch.uint16).view(torch.bfloat16)

    tiles, x = pack(numbers(n)), numbers(60)
    whole = linear(x, tiles, n, torch.empty(60, n))
    assert exponents.stop == 256 or (whole != 0).any()
    for rows in (1, 2, 3, 8, 20):
        part = linear(x[-rows:], tiles, n, torch.empty(rows, n))
        same = (part.view(torch.int32) == whole[-rows:].view(torch.int32)) | (part.isnan() & whole[-rows:].isnan())
        assert same.all(), f"{rows} rows"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_output_in_the_models_dtype_is_the_rounded_float32_output_and_keeps_to_its_rows(dtype: torch.dtype) -> None:
    n, k = 37, 21
    tiles = pack(random(n, k, dtype=dtype))
    x = random(9, k + 5, dtype=dtype, seed=1)[:, :k]
    wide = linear(x, tiles, n, torch.empty(9, n))
    buffer = torch.full((9, n + 11), 7.0, dtype=dtype)
    out = linear(x, tiles, n, buffer[:, :n])
    assert torch.equal(out, wide.to(dtype))
    assert (buffer[:, n:] == 7.0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [10, 32, 74])
def test_what_lies_beside_the_rows_reaches_no_result(k: int, dtype: torch.dtype) -> None:
    n = 40
    tiles = pack(random(n, k, dtype=dtype))
    buffer = torch.full((60, k + 32), float("nan"), dtype=dtype)
    for rows in (1, 18, 50):
        x = buffer[:rows, :k]
        x[:] = random(rows, k, dtype=dtype, seed=rows)
        assert torch.equal(linear(x, tiles, n, torch.empty(rows, n)), linear(x.clone(), tiles, n, torch.empty(rows, n)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 6, 40])
def test_residual_is_added_in_float32(rows: int, dtype: torch.dtype) -> None:
    n, k = 35, 24
    weight, bias = random(n, k, dtype=dtype), random(n, dtype=torch.float32, seed=3)
    x, residual = random(rows, k, dtype=dtype, seed=1), random(rows, n, dtype=torch.float32, seed=2)
    exact, bound = product(x, weight, bias)
    out = linear(x, pack(weight), n, residual.clone(), bias=bias, epilogue=ADD_RESIDUAL)
    assert ((out - (exact + residual)).abs() <= bound + 2.0**-23 * (exact.abs() + residual.abs())).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("epilogue", [SILU_MUL, GELU_TANH_MUL], ids=["silu", "gelu_tanh"])
@pytest.mark.parametrize("columns", [1, 16, 50])
def test_gated_pair_is_activation_of_gate_times_up(columns: int, epilogue: int, dtype: torch.dtype) -> None:
    k = 40
    gate, up = random(columns, k, dtype=dtype), random(columns, k, dtype=dtype, seed=1)
    tiles, stored = pack_pair(gate, up)
    for rows in (1, 7, 30):
        x = random(rows, k, dtype=dtype, seed=2)
        (g, g_bound), (u, u_bound) = product(x, gate), product(x, up)
        act = torch.nn.functional.silu(g) if epilogue == SILU_MUL else torch.nn.functional.gelu(g, approximate="tanh")
        out = linear(x, tiles, stored, torch.full((rows, columns), float("nan")), epilogue=epilogue)
        # The activations' slopes stay below 1.13; their own error is a few units in the last place of gate.
        bound = (1.13 * g_bound + 2.0**-20 * g.abs()) * u.abs() + act.abs() * u_bound + 1e-6 * (act * u).abs() + 1e-30
        assert ((out - act * u).abs() <= bound).all(), f"{rows} rows"
        rounded = linear(x, tiles, stored, torch.empty(rows, columns, dtype=dtype), epilogue=epilogue).double()
        # For bf16 the exponential is a shorter polynomial.
        bound += (torch.finfo(dtype).eps / 2 + (1e-5 if dtype is torch.bfloat16 else 0)) * (act * u).abs() + 1e-7
        assert ((rounded - act * u).abs() <= bound).all(), f"{rows} rows of {dtype}"


@pytest.mark.parametrize("rows", [1, 8, 20])
@pytest.mark.parametrize("threads", [1, 2])
def test_arg_max_is_the_lowest_column_of_the_greatest_value(rows: int, threads: int) -> None:
    _native.set_num_threads(threads)
    n, k = 333, 32
    weight = random(n, k, dtype=torch.float32)
    weight[300] = weight[20]
    weight[19] = weight[310]
    weight[5] = weight[200] = 3 * weight[40]
    x = torch.cat((weight[[20, 310, 40]], random(17, k, dtype=torch.float32, seed=1)))[:rows]
    tiles = pack(weight)
    logits = linear(x, tiles, n, torch.empty(rows, n))
    chosen = torch.full((rows,), -1, dtype=torch.int64)
    linear(x, tiles, n, torch.empty(0), epilogue=ARG_MAX, arg_max=chosen)
    assert chosen.tolist() == [int((row == row.max()).nonzero()[0]) for row in logits]


def test_arg_max_of_negative_infinities_and_nans_is_a_column() -> None:
    weight = torch.full((40, 4), 1.0)
    x = torch.tensor([[float("-inf")] * 4, [float("nan")] * 4])
    chosen = torch.full((2,), -1, dtype=torch.int64)
    linear(x, pack(weight), 40, torch.empty(0), epilogue=ARG_MAX, arg_max=chosen)
    assert chosen.tolist() == [0, 0]


def test_arg_max_passes_over_nans() -> None:
    weight, x = random(150, 8, dtype=torch.float32), random(3, 8, dtype=torch.float32, seed=1)
    weight[[0, 16, 63, 70, 149]] = float("nan")
    tiles = pack(weight)
    logits = linear(x, tiles, 150, torch.empty(3, 150))
    chosen = torch.full((3,), -1, dtype=torch.int64)
    linear(x, tiles, 150, torch.empty(0), epilogue=ARG_MAX, arg_max=chosen)
    assert chosen.tolist() == logits.nan_to_num(float("-inf")).argmax(-1).tolist()


def test_soft_cap_bounds_the_output() -> None:
    weight, x = random(50, 30, dtype=torch.float32), random(6, 30, dtype=torch.float32, seed=1)
    exact, bound = product(x, weight)
    out = linear(x, pack(weight), 50, torch.empty(6, 50), soft_cap=3.0)
    assert ((out - 3 * torch.tanh(exact / 3)).abs() <= bound + 1e-6).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), [*SHAPES, (200, 64)])
def test_packing_is_exactly_reversible(n: int, k: int, dtype: torch.dtype) -> None:
    weight = random(n, k + 3, dtype=dtype)[:, :k]
    tiles, out = pack(weight), torch.empty(n, k, dtype=dtype)
    _native.unpack_weight(tiles.data_ptr(), n, k, CODES[dtype], 0, 0, 1, out.data_ptr(), k)
    assert torch.equal(out, weight)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_packed_one_after_the_other_equal_the_stacked_weight(dtype: torch.dtype) -> None:
    parts = [random(n, 19, dtype=dtype, seed=n) for n in (5, 30, 16, 1)]
    stacked = torch.cat(parts)
    code, n = CODES[dtype], len(stacked)
    tiles = torch.empty(_native.packed_bytes(n, 19, code), dtype=torch.uint8)
    first = 0
    for part in parts:
        _native.pack_weight(part.data_ptr(), 19, len(part), 19, code, first, 0, 1, tiles.data_ptr())
        first += len(part)
    out = torch.empty_like(stacked)
    _native.unpack_weight(tiles.data_ptr(), n, 19, code, 0, 0, 1, out.data_ptr(), 19)
    assert torch.equal(out, stacked)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [1, 7, 64, 300])
def test_gathered_rows_are_the_weights_rows_times_the_scale(k: int, dtype: torch.dtype) -> None:
    weight = random(50, k, dtype=dtype)
    tiles = pack(weight)
    ids = torch.tensor([0, 49, 17, 17, 15, 16])
    for scale in (1.0, 2.5):
        out = torch.full((6, k + 2), 7.0)
        _native.gather_rows(
            (tiles.data_ptr(), 50, k, CODES[dtype], -1), ids.data_ptr(), 6, scale, out.data_ptr(), k + 2
        )
        assert torch.equal(out[:, :k], weight[ids].float() * scale)
        assert (out[:, k:] == 7.0).all()


def test_a_workspace_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a workspace of"):
        _native.linear((0, 16, 8, 1, -1), 0, 8, 4, 0, STORE, 0.0, 0, 16, 0, 16, 0, 0, 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_workspace_for_fewer_threads_than_the_pool_has_by_now_serves_as_many(dtype: torch.dtype) -> None:
    """Another engine may set the size of the process's pool. Bytes after the workspace show a thread that has no part of it."""
    threads = _native.num_threads()
    weight, x = random(500, 40, dtype=dtype), random(3, 40, dtype=dtype, seed=1)
    measured = measured_workspace(x)
    room = torch.full((20 * len(measured),), 0x5A, dtype=torch.uint8)
    tiles, best = pack(weight), torch.full((3,), -1)
    linear(x, tiles, 500, torch.empty(0), epilogue=ARG_MAX, arg_max=best)
    try:
        _native.set_num_threads(2 * threads + 30)
        for _ in range(20):
            found = torch.full((3,), -1)
            linear(x, tiles, 500, torch.empty(0), epilogue=ARG_MAX, arg_max=found, workspace=room[: len(measured)])
            assert torch.equal(found, best)
    finally:
        _native.set_num_threads(threads)
    assert bool((room[len(measured) :] == 0x5A).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_infinities_and_nans_stay_in_their_row_and_column(dtype: torch.dtype) -> None:
    weight, x = random(40, 20, dtype=dtype), random(10, 20, dtype=dtype, seed=1)
    clean = linear(x, pack(weight), 40, torch.empty(10, 40))
    x[3, 4], weight[21, 0] = float("inf"), float("nan")
    out = linear(x, pack(weight), 40, torch.empty(10, 40))
    assert out[:, 21].isnan().all()
    assert not out[3].isfinite().any()
    rows, columns = [r for r in range(10) if r != 3], [c for c in range(40) if c != 21]
    assert torch.equal(out[rows][:, columns], clean[rows][:, columns])
