"""Mixtures of experts: the plain operator by its definition, checkpoints in both forms, updates, sources, and the sum over ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_parallel_loading import assert_close, logits_of_ranks
from test_rereading import PROMPT, NotingAllocator
from tiny_models import NATIVE, Runner, open_and_load, save_tiny, tiny_config
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from hardpoint.interfaces import Activation, DType, ExpertsRequest, Refusal
from hardpoint.interfaces.errors import CorruptWeights, ModelError, UnsupportedArchitecture
from hardpoint.layers.experts import TorchExperts
from hardpoint.models import open_model

KINDS = ["mixtral", "qwen2-moe", "qwen3-moe"]
ARCHITECTURES = {
    "mixtral": "MixtralForCausalLM",
    "qwen2-moe": "Qwen2MoeForCausalLM",
    "qwen3-moe": "Qwen3MoeForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
}


def experts_by_definition(
    request: ExpertsRequest, x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor, *biases: Tensor
) -> Tensor:
    """Return the weighted sum of each token's experts in float64."""
    shares = torch.softmax(logits.double(), -1)
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, row in enumerate(x.double()):
        chosen = sorted(range(request.num_experts), key=lambda e: (-float(logits[token, e]), e))[: request.top_k]
        total = float(shares[token, chosen].sum()) if request.renormalise else 1.0
        for expert in chosen:
            both = gate_up[expert].double() @ row
            if biases:
                both = both + biases[0][expert].double()
            gate, up = both.chunk(2)
            if request.activation is Activation.CLAMPED_SWIGLU:
                gate, up = gate.clamp(max=7), up.clamp(-7, 7)
                inner = (up + 1) * gate * torch.sigmoid(1.702 * gate)
            else:
                inner = functional.silu(gate) * up
            y = down[expert].double() @ inner
            out[token] += float(shares[token, expert]) / total * (y + biases[1][expert].double() if biases else y)
    return out


@pytest.mark.parametrize("tokens", [0, 1, 6, 150])
@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize(("count", "top_k"), [(1, 1), (6, 2), (40, 4)])
def test_the_plain_operator_is_the_weighted_sum_of_each_tokens_experts(
    count: int, top_k: int, renormalise: bool, tokens: int
) -> None:
    torch.manual_seed(0)
    request = ExpertsRequest(count, top_k, 24, 20, Activation.SILU, DType.FLOAT32, renormalise)
    weights = torch.randn(count, 40, 24) / 5, torch.randn(count, 24, 20) / 5
    # Many equal logits: of these the lower expert counts.
    x, logits = torch.randn(tokens, 24), torch.randint(-3, 4, (tokens, count)).float()
    exact = experts_by_definition(request, x, logits, *weights)
    torch.testing.assert_close(TorchExperts(request).run(x, logits, *weights).double(), exact, rtol=0, atol=1e-5)


def test_the_plain_operator_takes_biases_and_clamps() -> None:
    torch.manual_seed(0)
    request = ExpertsRequest(5, 2, 24, 20, Activation.CLAMPED_SWIGLU, DType.FLOAT32, True)
    tensors = torch.randn(5, 40, 24), torch.randn(5, 24, 20), torch.randn(5, 40), torch.randn(5, 24)
    x, logits = 3 * torch.randn(9, 24), torch.randn(9, 5)
    exact = experts_by_definition(request, x, logits, *tensors)
    found = TorchExperts(request).run(x, logits, *tensors)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-3)


def test_no_shape_of_the_plain_operator_depends_on_what_is_chosen() -> None:
    """Tensors without values have no numbers that the host could wait for."""
    request = ExpertsRequest(5, 2, 24, 20, Activation.SILU, DType.FLOAT32, True)
    with FakeTensorMode():
        weights = torch.empty(5, 40, 24), torch.empty(5, 24, 20)
        assert TorchExperts(request).run(torch.empty(9, 24), torch.empty(9, 5), *weights).shape == (9, 24)


def test_a_row_of_nan_stays_alone() -> None:
    torch.manual_seed(0)
    request = ExpertsRequest(4, 2, 24, 20, Activation.SILU, DType.FLOAT32, True)
    weights = torch.randn(4, 40, 24), torch.randn(4, 24, 20)
    x, logits = torch.randn(5, 24), torch.randn(5, 4)
    good = TorchExperts(request).run(x, logits, *weights)
    x[1] = logits[1] = float("nan")
    found = TorchExperts(request).run(x, logits, *weights)
    assert found[1].isnan().all()
    torch.testing.assert_close(found[[0, 2, 3, 4]], good[[0, 2, 3, 4]])


@pytest.fixture
def both_forms(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, Path]:
    """One model with a tensor for each of every expert, and with the experts of a layer stacked."""
    kind, options = NATIVE[request.param]
    save_tiny(tmp_path / "single", tiny_config(kind, **options))
    save_tiny(tmp_path / "stacked", tiny_config(kind, **options), save_original_format=False)
    single, stacked = (load_file(tmp_path / form / "model.safetensors").keys() for form in ("single", "stacked"))
    assert any(".experts.0." in name for name in single)
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in stacked)
    return tmp_path / "single", tmp_path / "stacked"


def logits_of(folder: Path, **options: Any) -> Tensor:
    _, model, plan, attention = open_and_load(folder, **options)
    return Runner(model, plan, attention).step([(0, PROMPT)])


in_both_forms = pytest.mark.parametrize("both_forms", KINDS, indirect=True)


@in_both_forms
def test_a_checkpoint_with_stacked_experts_is_the_same_model(both_forms: tuple[Path, Path]) -> None:
    single, stacked = both_forms
    assert torch.equal(logits_of(stacked), logits_of(single))


@in_both_forms
def test_updates_in_either_form_give_the_other_model(both_forms: tuple[Path, Path]) -> None:
    for folder in both_forms:
        _, model, plan, attention = open_and_load(both_forms[0], load_format="dummy", seed=3)
        written: set[str] = set()
        model.update_weights(load_file(folder / "model.safetensors").items(), written)
        assert written == model.weight_names()
        assert torch.equal(Runner(model, plan, attention).step([(0, PROMPT)]), logits_of(both_forms[0]))


@in_both_forms
def test_experts_are_read_again_from_their_places_in_either_form(both_forms: tuple[Path, Path]) -> None:
    for folder in both_forms:
        allocator = NotingAllocator()
        source, model, plan, attention = open_and_load(folder, allocator=allocator)
        before = Runner(model, plan, attention).step([(0, PROMPT)])
        model.declare_sources(allocator, source)
        # Every parameter lies in the file as it is in memory, so that nothing is left to a callback.
        assert not any(callable(declared) for _, declared in allocator.sources)
        allocator.vendor_lose_and_restore()
        assert torch.equal(Runner(model, plan, attention).step([(0, PROMPT)]), before)


@pytest.mark.parametrize("both_forms", ["mixtral"], indirect=True)
def test_a_reload_takes_the_other_form(both_forms: tuple[Path, Path]) -> None:
    source, _, _, _ = open_and_load(both_forms[1])
    _, model, plan, attention = open_and_load(both_forms[0], load_format="dummy")
    model.reload(source)
    assert torch.equal(Runner(model, plan, attention).step([(0, PROMPT)]), logits_of(both_forms[0]))


@pytest.mark.parametrize("both_forms", ["qwen3-moe"], indirect=True)
def test_stacked_experts_of_another_number_are_refused_by_name(both_forms: tuple[Path, Path]) -> None:
    file = both_forms[1] / "model.safetensors"
    weights = load_file(file)
    name = "model.layers.1.mlp.experts.down_proj"
    weights[name] = weights[name][:-1].clone()
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(CorruptWeights, match=r"experts\.down_proj"):
        open_and_load(both_forms[1])
    _, model, _, _ = open_and_load(both_forms[0])
    with pytest.raises(CorruptWeights, match=r"experts\.down_proj"):
        model.update_weights([(name, weights[name])])


@pytest.mark.parametrize(
    ("kind", "setting"),
    [("qwen2-moe", "norm_topk_prob"), ("qwen3-moe", "norm_topk_prob")]
    + [(kind, "num_experts_per_tok") for kind in KINDS],
)
def test_a_model_that_routes_otherwise_is_another_model(kind: str, setting: str, tmp_path: Path) -> None:
    model_type, options = NATIVE[kind]
    save_tiny(tmp_path / "one", tiny_config(model_type, **options))
    other: Any = not options.get("norm_topk_prob", False) if setting == "norm_topk_prob" else 3
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    tiny_config(model_type, **{**options, setting: other}).save_pretrained(tmp_path / "other")
    one, _, _, _ = open_and_load(tmp_path / "one")
    described = [source.describe(DType.FLOAT32) for source in (one, open_and_load(tmp_path / "other")[0])]
    assert not described[0].computes_the_same(described[1])


@pytest.mark.parametrize("kind", [*KINDS, "gpt-oss"])
def test_ranks_take_their_parts_of_whole_experts(kind: str, tmp_path: Path) -> None:
    model_type, options = NATIVE[kind]
    for seed in range(2):
        save_tiny(tmp_path / str(seed), tiny_config(model_type, **options), seed=seed)
    weights = load_file(tmp_path / "1" / "model.safetensors")

    def update(model: Any, allocator: NotingAllocator, source: Any) -> None:
        written: set[str] = set()
        assert model.update_weights(weights.items(), written) == len(weights)
        assert written == model.weight_names()

    assert_close(logits_of_ranks(tmp_path / "0", update), logits_of(tmp_path / "1"))

    def restore(model: Any, allocator: NotingAllocator, source: Any) -> None:
        model.declare_sources(allocator, source)
        allocator.vendor_lose_and_restore()

    assert_close(logits_of_ranks(tmp_path / "0", restore), logits_of(tmp_path / "0"))


@pytest.mark.parametrize("kind", [*KINDS, "gpt-oss"])
@pytest.mark.parametrize(
    ("setting", "value"),
    [("num_experts_per_tok", 99), ("num_experts_per_tok", 0), ("num_experts", -1), ("mlp_only_layers", "all")],
)
def test_impossible_settings_are_model_errors(kind: str, setting: str, value: object, tmp_path: Path) -> None:
    if setting == "mlp_only_layers" and not kind.startswith("qwen"):
        setting, value = "num_experts_per_tok", "two"
    model_type, options = NATIVE[kind]
    tiny_config(model_type, **options).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    if setting == "num_experts" and setting not in config:
        setting = "num_local_experts"
    config |= {setting: value, "architectures": [ARCHITECTURES[kind]]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=setting.replace("num_local_experts", "experts is -1")):
        open_model(str(tmp_path), load_format="dummy").describe(DType.FLOAT32)


def test_gpt_oss_with_packed_weights_is_refused_with_the_reason(tmp_path: Path) -> None:
    kind, options = NATIVE["gpt-oss"]
    save_tiny(tmp_path, tiny_config(kind, **options))
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedArchitecture, match="mxfp4"):
        open_model(str(tmp_path))


def test_an_activation_with_other_constants_is_not_the_cores(tmp_path: Path) -> None:
    kind, options = NATIVE["gpt-oss"]
    save_tiny(tmp_path, tiny_config(kind, **options, swiglu_limit=3.0))
    described = open_model(str(tmp_path)).describe(DType.FLOAT32)
    assert isinstance(described, Refusal)
    assert "swiglu_limit 3.0" in described.reasons[0]


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_stays_close_to_float32(kind: str, tmp_path: Path) -> None:
    model_type, options = NATIVE[kind]
    # All experts, so that rounding chooses no other ones.
    reference = save_tiny(tmp_path, tiny_config(model_type, **{**options, "num_experts_per_tok": 4}))
    ids = torch.tensor([list(range(3, 23))])
    _, model, plan, attention = open_and_load(tmp_path, dtype=DType.BFLOAT16)
    logits = Runner(model, plan, attention).step([(0, ids[0].tolist())])
    with torch.no_grad():
        exact = reference(input_ids=ids).logits[0, -1]
        rounded = reference.bfloat16()(input_ids=ids).logits[0, -1].float()
    assert (logits[0] - exact).abs().mean() < 1.5 * (rounded - exact).abs().mean()
