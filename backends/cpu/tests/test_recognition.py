"""The fused decoder takes the models whose modules it knows exactly, and no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hardpoint.interfaces import Refusal
from hardpoint.layers import LMHead, ModelContext, RMSNorm
from hardpoint.models.config import ModelConfig
from hardpoint.models.decoder import CausalLM
from hardpoint.models.llama import Llama, LlamaLayer
from hardpoint.models.registry import family_of
from hardpoint_cpu.recognition import Recognised, recognise

VALUES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}


def build(family: type[CausalLM], **values: Any) -> CausalLM:
    config = ModelConfig(f"{family.__name__}ForCausalLM", family.complete({**VALUES, **values}))
    assert not family.refusals(config)
    return family(config, ModelContext(torch.float32))


class OwnLayer(LlamaLayer):
    def forward(self, stream: Tensor, branch: Tensor | None, step: Any) -> Tensor:
        return super().forward(stream, branch, step) * 0.5


class OwnEquation(Llama):
    layer = OwnLayer


class OwnNorm(RMSNorm):
    pass


class OtherNorms(Llama):
    def norm(self, config: ModelConfig, context: ModelContext) -> RMSNorm:
        return OwnNorm(config.hidden_size, config.norm_eps, context)


class OwnLogits(Llama):
    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden) * 2


class DividedLogits(Llama):
    def head(self, config: ModelConfig, context: ModelContext, tied: Any) -> LMHead:
        return LMHead(config.vocab_size, config.hidden_size, context, tied=tied, divisor=2.0)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2", "Qwen3", "Phi3", "Gemma", "Gemma2", "Gemma3"])
def test_every_parameter_of_a_known_family_has_its_place(name: str) -> None:
    family = family_of(f"{name}ForCausalLM")
    assert family is not None
    model = build(family)
    found = recognise(model)
    assert isinstance(found, Recognised), found
    parameters = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    shapes = found.spec.weight_shapes()
    assert {parameter: shapes[weight] for parameter, weight in found.names.items()} == parameters
    assert sorted(found.names.values()) == sorted(shapes)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: build(OwnEquation), "equation of OwnLayer"),
        (lambda: build(OtherNorms), "final norm is OwnNorm"),
        (lambda: build(OwnLogits), "its logits in a way of its own"),
        (lambda: build(DividedLogits), "logits are divided"),
        (lambda: build(family_of("Olmo2ForCausalLM")), "equation of Olmo2Layer"),
        (lambda: build(family_of("GraniteForCausalLM")), "equation of GraniteLayer"),
        (lambda: nn.Linear(2, 2), "Linear is no decoder"),
    ],
)
def test_what_is_not_known_exactly_is_refused(model: Any, reason: str) -> None:
    found = recognise(model())
    assert isinstance(found, Refusal)
    assert reason in "; ".join(found.reasons)


def test_layers_that_differ_are_refused() -> None:
    model = build(Llama)
    model.model.layers["1"].input_layernorm.eps = 1e-3
    found = recognise(model)
    assert isinstance(found, Refusal)
    assert found.reasons == ("its layers have different epsilons of norms",)
