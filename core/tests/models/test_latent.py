"""DeepSeek's checkpoints and routing beyond what all families' tests show."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import NATIVE, Runner, open_and_load, save_tiny, tiny_config

from hardpoint.interfaces.errors import CorruptWeights, UnsupportedArchitecture
from hardpoint.layers import GroupedRouter, ModelContext, Routing
from hardpoint.models import open_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind, options = NATIVE["deepseek-v3"]
    folder = tmp_path_factory.mktemp("deepseek")
    save_tiny(folder, tiny_config(kind, **options, num_nextn_predict_layers=1))
    return folder


def with_tensor(folder: Path, copy: Path, name: str) -> Path:
    """Return a copy of the model with one tensor more."""
    copy.mkdir()
    (copy / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file({**load_file(folder / "model.safetensors"), name: torch.ones(3)}, copy / "model.safetensors")
    return copy


def test_the_layer_that_predicts_further_tokens_is_passed_over(folder: Path, tmp_path: Path) -> None:
    logits = [
        Runner(model, plan, attention).step([(0, [5, 9, 70])])
        for model_folder in (folder, with_tensor(folder, tmp_path / "more", "model.layers.3.eh_proj.weight"))
        for _, model, plan, attention in [open_and_load(model_folder)]
    ]
    assert torch.equal(*logits)
    with pytest.raises(CorruptWeights, match=r"model\.layers\.4\.eh_proj"):
        open_and_load(with_tensor(folder, tmp_path / "other", "model.layers.4.eh_proj.weight"))


@pytest.mark.parametrize(
    ("kind", "change", "reason"),
    [
        ("deepseek-v3", {"n_group": 3}, "8 experts do not form 3 groups"),
        ("deepseek-v3", {"n_group": 4, "topk_group": 5}, "8 experts do not form 4 groups of which"),
        ("deepseek-v3", {"n_group": 8}, "its 8 groups of 1 expert are chosen by the best 2 of each"),
        ("deepseek-v3", {"topk_group": 1}, "more experts than its 1 best groups have, which are 2"),
        # All groups count, or the best one of each.
        ("deepseek-v3", {"n_group": 8, "topk_group": 8}, None),
        ("deepseek-v2", {"n_group": 8}, None),
    ],
)
def test_groups_that_cannot_be_chosen_from_are_refused_when_the_model_is_opened(
    kind: str, change: dict[str, int], reason: str | None, tmp_path: Path
) -> None:
    model_type, options = NATIVE[kind]
    tiny_config(model_type, **options).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    architecture = "DeepseekV3ForCausalLM" if kind == "deepseek-v3" else "DeepseekV2ForCausalLM"
    (tmp_path / "config.json").write_text(json.dumps(config | change | {"architectures": [architecture]}))
    if reason is None:
        _, model, plan, attention = open_and_load(tmp_path, load_format="dummy")
        assert Runner(model, plan, attention).step([(0, [5, 9, 70])]).isfinite().all()
    else:
        with pytest.raises(UnsupportedArchitecture, match=reason):
            open_model(str(tmp_path), load_format="dummy").attention_layers()


def test_published_checkpoints_in_blocks_of_fp8_are_expanded(folder: Path, tmp_path: Path) -> None:
    """Every matrix of the layers in blocks of 16 x 32, which divide no matrix evenly, against the dense model that they mean."""
    (high, wide), tensors, meant = (16, 32), {}, {}
    for name, values in load_file(folder / "model.safetensors").items():
        tensors[name] = meant[name] = values
        if values.ndim != 2 or "layers" not in name or "mlp.gate.weight" in name:
            continue
        rows, columns = values.shape
        scales = torch.rand(-(-rows // high), -(-columns // wide)) + 0.5
        tensors[name] = values.to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scales
        spread = scales.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
        meant[name] = tensors[name].float() * spread
    quantised = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [high, wide],
        "activation_scheme": "dynamic",
    }
    logits = []
    for case, stored, config in (("fp8", tensors, {"quantization_config": quantised}), ("dense", meant, {})):
        copy = shutil.copytree(folder, tmp_path / case)
        written = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps({**written, **config}))
        save_file(stored, copy / "model.safetensors")
        _, model, plan, attention = open_and_load(copy)
        logits.append(Runner(model, plan, attention).step([(0, [5, 9, 70])]))
    assert torch.equal(*logits)


@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize("renormalise", [False, True])
def test_the_softmax_of_a_routers_logits_times_its_sums_are_the_weights_of_the_best_groups_experts(
    sigmoid: bool, renormalise: bool
) -> None:
    torch.manual_seed(0)
    routing = Routing(8, 3, 4, 2, sigmoid=sigmoid, correction=True, renormalise=renormalise, scale=2.5)
    router = GroupedRouter(routing, 12, ModelContext(torch.float32)).to_empty(device="cpu")
    router.weight.copy_(torch.randn(8, 12))
    bias = torch.randn(8) / 4
    router.get_parameter("e_score_correction_bias").copy_(bias)
    x = torch.randn(9, 12)
    logits, sums = router(x)
    for token, found in enumerate((logits.softmax(-1) * sums).double()):
        raw = (router.weight @ x[token]).double()
        scores = raw.sigmoid() if sigmoid else raw.softmax(-1)
        biased = (scores + bias).tolist()
        pairs = [sorted(biased[first : first + 2], reverse=True) for first in range(0, 8, 2)]
        best = sorted(range(4), key=lambda group: -sum(pairs[group][: 2 if sigmoid else 1]))[:2]
        chosen = sorted((expert for expert in range(8) if expert // 2 in best), key=lambda e: -biased[e])[:3]
        weights = torch.zeros(8, dtype=torch.float64)
        weights[chosen] = scores[chosen]
        if renormalise:
            weights /= weights.sum()
        torch.testing.assert_close(found, weights * 2.5, rtol=0, atol=1e-6)
