"""The experts of a mixture in Triton's interpreter, against their definition in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hardpoint.interfaces import Activation, Device, DType, ExpertsProgram, ExpertsRequest
from hardpoint.triton import TritonKernels

DEVICE = Device("any", 0, "the host", "cpu")
# Of the largest output; the interpreter cuts bfloat16 off where devices round it, three times on the way.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2**-5}


class Case:
    """Random experts and tokens. Rows of logits are permutations of numbers that differ."""

    def __init__(
        self, tokens: int, dtype: torch.dtype = torch.float32, *, biased: bool = False, **changes: Any
    ) -> None:
        generator = torch.Generator().manual_seed(tokens)

        def numbers(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        settings: dict[str, Any] = {
            "num_experts": 6,
            "top_k": 2,
            "hidden_size": 40,
            "intermediate_size": 24,
            "activation": Activation.SILU,
            "dtype": DType.of(dtype),
            "renormalise": True,
        }
        self.request = asked = ExpertsRequest(**(settings | changes))
        experts, hidden, inner = asked.num_experts, asked.hidden_size, asked.intermediate_size
        self.x = (2 * numbers(tokens, hidden)).to(dtype)
        order = torch.stack([torch.randperm(experts, generator=generator) for _ in range(max(1, tokens))])[:tokens]
        self.logits = (order.double() / 4 - 1).to(dtype)
        self.gate_up = (numbers(experts, 2 * inner, hidden) / hidden**0.5).to(dtype)
        self.down = (numbers(experts, hidden, inner) / inner**0.5).to(dtype)
        self.biases = (numbers(experts, 2 * inner).to(dtype), numbers(experts, hidden).to(dtype)) if biased else ()

    def run(self, tokens: slice = slice(None)) -> Tensor:
        program = TritonKernels(DEVICE).plan_experts(self.request)
        assert isinstance(program, ExpertsProgram)
        return program.run(self.x[tokens], self.logits[tokens], self.gate_up, self.down, *self.biases)

    def expected(self) -> Tensor:
        asked = self.request
        shares, chosen = torch.softmax(self.logits.double(), -1).topk(asked.top_k, -1)
        if asked.renormalise:
            shares = shares / shares.sum(-1, keepdim=True)
        out = torch.zeros(self.x.shape, dtype=torch.float64)
        for token, row in enumerate(self.x.double()):
            for share, expert in zip(shares[token], chosen[token].tolist(), strict=True):
                both = self.gate_up[expert].double() @ row
                if self.biases:
                    both = both + self.biases[0][expert].double()
                y = self.down[expert].double() @ gated(*both.chunk(2), asked.activation)
                out[token] += share * (y + self.biases[1][expert].double() if self.biases else y)
        return out

    def check(self) -> None:
        found, expected = self.run(), self.expected()
        assert found.dtype is self.x.dtype
        assert (found.double() - expected).abs().max() <= TOLERANCES[found.dtype] * expected.abs().max()


def gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    if activation is Activation.CLAMPED_SWIGLU:
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)
    if activation is Activation.SILU:
        return functional.silu(gate) * up
    return functional.gelu(gate, approximate="tanh" if activation is Activation.GELU_TANH else "none") * up


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("tokens", [1, 7, 50])
def test_output_is_the_weighted_sum_of_each_tokens_experts(tokens: int, dtype: torch.dtype) -> None:
    Case(tokens, dtype).check()


@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
def test_activations_and_biases(activation: Activation, biased: bool) -> None:
    Case(5, activation=activation, biased=biased).check()


@pytest.mark.parametrize(
    "changes",
    [
        {"num_experts": 1, "top_k": 1},
        {"num_experts": 70, "top_k": 8, "renormalise": False},
        {"num_experts": 3, "top_k": 3, "hidden_size": 130, "intermediate_size": 33},
    ],
)
def test_shapes_that_fill_no_tile(changes: dict[str, Any]) -> None:
    Case(9, **changes).check()


def test_one_expert_may_get_all_tokens() -> None:
    case = Case(50)
    case.logits[:, 4], case.logits[:, 1] = 9.0, 8.0
    case.check()


def test_a_token_has_the_same_bits_in_other_batches_of_the_same_tiles() -> None:
    case = Case(12)
    whole = case.run()
    for tokens in (slice(0, 1), slice(3, 9), slice(11, 12)):
        assert torch.equal(case.run(tokens), whole[tokens])


def test_of_equal_logits_the_lower_expert_is_chosen() -> None:
    case = Case(1)
    case.logits = torch.tensor([[0.0, 2.0, 2.0, 2.0, -1.0, 0.0]])
    chosen = case.run()
    case.logits = torch.tensor([[0.0, 2.0, 2.0, -9.0, -9.0, -9.0]])
    assert torch.equal(chosen, case.run())


def test_a_row_of_nan_stays_alone() -> None:
    case = Case(6)
    good = case.run()
    case.x[2] = case.logits[2] = float("nan")
    found = case.run()
    assert found[2].isnan().all()
    others = [0, 1, 3, 4, 5]
    assert torch.equal(found[others], good[others])


def test_no_tokens_are_no_launch() -> None:
    assert Case(0).run().shape == (0, 40)
