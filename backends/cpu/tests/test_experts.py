"""The native experts, in every instruction set, against float64 and against themselves in other batches."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from hardpoint_cpu import _native

CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
DTYPES = list(CODES)
SILU, GELU_TANH, CLAMPED_SWIGLU = 2, 3, 5
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}


pytestmark = pytest.mark.usefixtures("isa")


@dataclass
class Experts:
    """Random experts: gate, up [E, I, H] and down [E, H, I], plain and packed."""

    gate: Tensor
    up: Tensor
    down: Tensor
    activation: int = SILU
    biases: tuple[Tensor, Tensor, Tensor] | None = None

    @staticmethod
    def random(
        count: int, hidden: int, inner: int, dtype: torch.dtype, *, activation: int = SILU, biased: bool = False
    ) -> Experts:
        generator = torch.Generator().manual_seed(count + hidden)

        def numbers(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        gate, up = (numbers(count, inner, hidden) / hidden**0.5 for _ in range(2))
        down = numbers(count, hidden, inner) / inner**0.5
        biases = None
        if biased:
            biases = numbers(count, inner).to(dtype), numbers(count, inner).to(dtype), numbers(count, hidden).to(dtype)
        return Experts(gate.to(dtype), up.to(dtype), down.to(dtype), activation, biases)

    def run(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Run the native operator over packed copies in memory full of NaN."""
        count, inner, hidden = self.gate.shape
        code, columns = CODES[x.dtype], _native.gated_columns(inner)
        gate_up_bytes, down_bytes = (
            _native.packed_bytes(columns, hidden, code),
            _native.packed_bytes(hidden, inner, code),
        )
        gate_up = torch.full((count, gate_up_bytes), 0xFF, dtype=torch.uint8)
        down = torch.full((count, down_bytes), 0xFF, dtype=torch.uint8)
        for e in range(count):
            for tile, half in enumerate((self.gate, self.up)):
                _native.pack_weight(half[e].data_ptr(), hidden, inner, hidden, code, 0, tile, 2, gate_up[e].data_ptr())
            _native.pack_weight(self.down[e].data_ptr(), inner, hidden, inner, code, 0, 0, 1, down[e].data_ptr())
        gate_up_bias = down_bias = None
        if self.biases is not None:
            gate_up_bias, down_bias = torch.cat(self.biases[:2], dim=1), self.biases[2]
        tokens, top_k = experts.shape
        size = _native.experts_workspace_bytes(
            tokens=tokens, top_k=top_k, num_experts=count, hidden=hidden, intermediate=inner
        )
        workspace = torch.full((size,), 0xFF, dtype=torch.uint8)
        out = torch.full((tokens, hidden), float("nan"), dtype=x.dtype)
        _native.experts(
            dtype=code,
            num_experts=count,
            hidden=hidden,
            intermediate=inner,
            activation=self.activation,
            gate_up=gate_up.data_ptr(),
            down=down.data_ptr(),
            gate_up_bias=0 if gate_up_bias is None else gate_up_bias.data_ptr(),
            down_bias=0 if down_bias is None else down_bias.data_ptr(),
            x=x.data_ptr(),
            x_stride=x.stride(0),
            tokens=tokens,
            top_k=top_k,
            experts=experts.data_ptr(),
            weights=weights.data_ptr(),
            out=out.data_ptr(),
            out_stride=hidden,
            workspace=workspace.data_ptr(),
            workspace_bytes=size,
        )
        return out

    def expected(self, x: Tensor, experts: Tensor, weights: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
        """Return the same by definition, computed in `dtype`."""
        out = torch.zeros(x.shape, dtype=dtype)
        for t, row in enumerate(x.to(dtype)):
            for e, weight in zip(experts[t].tolist(), weights[t].to(dtype), strict=True):
                gate, up = self.gate[e].to(dtype) @ row, self.up[e].to(dtype) @ row
                if self.biases is not None:
                    gate, up = gate + self.biases[0][e].to(dtype), up + self.biases[1][e].to(dtype)
                y = self.down[e].to(dtype) @ self._gated(gate, up)
                out[t] += weight * (y if self.biases is None else y + self.biases[2][e].to(dtype))
        return out

    def _gated(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.activation == CLAMPED_SWIGLU:
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
            return (up + 1) * gate * torch.sigmoid(1.702 * gate)
        if self.activation == SILU:
            return torch.nn.functional.silu(gate) * up
        return torch.nn.functional.gelu(gate, approximate="tanh") * up


def routed(tokens: int, count: int, top_k: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return (experts, weights) of tokens, the experts of a token all different."""
    generator = torch.Generator().manual_seed(seed)
    experts = torch.stack([torch.randperm(count, generator=generator)[:top_k] for _ in range(tokens)])
    return experts.to(torch.int32), torch.rand((tokens, top_k), generator=generator)


def rows(tokens: int, hidden: int, dtype: torch.dtype) -> Tensor:
    return torch.randn((tokens, hidden), generator=torch.Generator().manual_seed(7)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("count", "hidden", "inner", "top_k"), [(4, 64, 48, 2), (8, 33, 17, 3), (1, 40, 16, 1), (60, 96, 7, 4)]
)
@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_output_is_the_weighted_sum_of_each_tokens_experts(
    count: int, hidden: int, inner: int, top_k: int, tokens: int, dtype: torch.dtype
) -> None:
    experts = Experts.random(count, hidden, inner, dtype)
    x, (chosen, weights) = rows(tokens, hidden, dtype), routed(tokens, count, top_k)
    exact = experts.expected(x, chosen, weights)
    plain = (experts.expected(x, chosen, weights, dtype).double() - exact).abs().max()
    error = (experts.run(x, chosen, weights).double() - exact).abs().max()
    assert error <= 2 * plain + 4 * ROUNDING[dtype] * exact.abs().max()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", [GELU_TANH, CLAMPED_SWIGLU], ids=["gelu_tanh", "clamped_swiglu"])
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
def test_activations_and_biases(activation: int, biased: bool, dtype: torch.dtype) -> None:
    experts = Experts.random(5, 36, 20, dtype, activation=activation, biased=biased)
    # Large rows, so that the clamped activation is clamped.
    x, (chosen, weights) = 6 * rows(9, 36, dtype), routed(9, 5, 2)
    exact = experts.expected(x, chosen, weights)
    plain = (experts.expected(x, chosen, weights, dtype).double() - exact).abs().max()
    error = (experts.run(x, chosen, weights).double() - exact).abs().max()
    assert error <= 2 * plain + 4 * ROUNDING[dtype] * exact.abs().max()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_token_has_the_same_bits_in_every_batch_and_with_every_number_of_threads(dtype: torch.dtype) -> None:
    # More rows than are under way at a time, so that the batch is also cut.
    count, hidden, inner, top_k, tokens = 6, 40, 50, 5, 1800
    experts = Experts.random(count, hidden, inner, dtype)
    x, (chosen, weights) = rows(tokens, hidden, dtype), routed(tokens, count, top_k)
    _native.set_num_threads(1)
    whole = experts.run(x, chosen, weights)
    for threads in (1, 3):
        _native.set_num_threads(threads)
        for first, end in ((0, 1), (1799, 1800), (3, 14), (100, 400), (0, tokens)):
            part = experts.run(x[first:end], chosen[first:end].contiguous(), weights[first:end].contiguous())
            assert torch.equal(part, whole[first:end]), f"tokens {first} to {end}, {threads} threads"


def test_one_expert_may_get_all_tokens_and_a_token_one_expert_twice() -> None:
    experts = Experts.random(7, 32, 24, torch.float32)
    x = rows(40, 32, torch.float32)
    chosen, weights = torch.full((40, 2), 6, dtype=torch.int32), torch.full((40, 2), 0.5)
    exact = experts.expected(x, chosen, weights)
    assert (experts.run(x, chosen, weights) - exact).abs().max() < 1e-5


def test_a_row_of_nan_stays_alone() -> None:
    experts = Experts.random(3, 32, 24, torch.float32)
    x, (chosen, weights) = rows(6, 32, torch.float32), routed(6, 3, 2)
    good = experts.run(x, chosen, weights)
    x[2] = float("nan")
    out = experts.run(x, chosen, weights)
    assert out[2].isnan().all()
    assert torch.equal(out[[0, 1, 3, 4, 5]], good[[0, 1, 3, 4, 5]])


@pytest.mark.parametrize("expert", [-1, 3])
def test_an_expert_that_does_not_exist_is_an_error_before_any_work(expert: int) -> None:
    experts = Experts.random(3, 32, 24, torch.float32)
    with pytest.raises(IndexError, match=f"expert {expert} is not one of 3"):
        experts.run(rows(2, 32, torch.float32), torch.tensor([[0], [expert]], dtype=torch.int32), torch.ones(2, 1))


def route(logits: Tensor, top_k: int, *, renormalise: bool) -> tuple[Tensor, Tensor]:
    experts = torch.full((len(logits), top_k), -1, dtype=torch.int32)
    weights = torch.full((len(logits), top_k), float("nan"))
    _native.route(
        logits.data_ptr(),
        logits.stride(0),
        *logits.shape,
        CODES[logits.dtype],
        top_k,
        renormalise,
        experts.data_ptr(),
        weights.data_ptr(),
    )
    return experts, weights


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("count", "top_k"), [(1, 1), (8, 2), (60, 4), (129, 8), (5, 5)])
@pytest.mark.parametrize("renormalise", [False, True])
def test_routing_is_softmax_and_the_greatest(count: int, top_k: int, renormalise: bool, dtype: torch.dtype) -> None:
    # All values of a row differ, so that the order is one.
    logits = torch.stack([torch.randperm(count, generator=torch.Generator().manual_seed(i)) for i in range(300)])
    logits = (logits.double() / 8 - 3).to(dtype)
    values, chosen = torch.softmax(logits.double(), -1).topk(top_k, -1)
    if renormalise:
        values = values / values.sum(-1, keepdim=True)
    experts, weights = route(logits, top_k, renormalise=renormalise)
    assert torch.equal(experts.long(), chosen)
    assert (weights - values).abs().max() < 1e-6
    alone, alone_weights = route(logits[17:18], top_k, renormalise=renormalise)
    assert torch.equal(alone, experts[17:18])
    assert torch.equal(alone_weights, weights[17:18])


def test_of_equal_logits_the_lower_expert_is_chosen() -> None:
    experts, weights = route(torch.tensor([[0.0, 2.0, 2.0, 2.0, -1.0]]), 2, renormalise=True)
    assert experts.tolist() == [[1, 2]]
    assert weights.tolist() == [[0.5, 0.5]]


def test_routing_of_infinities_and_nan_names_experts_that_exist() -> None:
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor(
        [[nan, nan, nan, nan], [-inf, nan, 1.0, -inf], [-inf, -inf, -inf, -inf], [nan, 3.0, inf, 1.0]]
    )
    experts, weights = route(logits, 3, renormalise=False)
    assert experts[0].tolist() == [0, 1, 2]
    assert experts[1].tolist() == [2, 0, 3]
    assert experts[2].tolist() == [0, 1, 2]
    assert experts[3].tolist() == [2, 1, 3]
    assert weights[[0, 1, 3]].isnan().any(dim=1).all()
