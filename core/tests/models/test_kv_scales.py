"""Scales of an fp8 KV cache: read from checkpoints, given to attention, and fixed while a model is loaded."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from kv_scale_models import ATTENTION, SCALES, scale_checkpoint
from safetensors.torch import load_file
from tiny_models import FIRST, SECOND, Runner, decode_two, open_and_load, save_tiny, tiny_config

from hardpoint.interfaces import DType
from hardpoint.interfaces.errors import ConfigError, CorruptWeights, ModelError, UnsupportedArchitecture
from hardpoint.models import ParallelRank, RunnableModel, attention_layers, open_model

FP8 = DType.FLOAT8_E4M3
SCHEME = {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False, "symmetric": True}
COMPRESSED = {"quant_method": "compressed-tensors", "config_groups": {}, "format": "dense", "kv_cache_scheme": SCHEME}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    save_tiny(folder, tiny_config("llama"))
    return folder


ALONE = ParallelRank()


def layers(folder: Path, place: ParallelRank = ALONE, kv_dtype: DType | None = FP8) -> list[tuple[float, float]]:
    """Return the scales that a rank's layers are planned with."""
    found = attention_layers(open_model(str(folder)), DType.BFLOAT16, place, kv_dtype)
    return [(layer.k_scale, layer.v_scale) for layer in found]


def loaded(folder: Path, kv_dtype: DType = FP8) -> tuple[RunnableModel, Runner]:
    _, model, plan, attention = open_and_load(folder, dtype=DType.BFLOAT16, kv_dtype=kv_dtype)
    return model, Runner(model, plan, attention)


def decoded(folder: Path, kv_dtype: DType = FP8) -> list[tuple[list[int], torch.Tensor]]:
    return decode_two(loaded(folder, kv_dtype)[1], FIRST, SECOND, 4)


def assert_same(found: Sequence[tuple[list[int], torch.Tensor]], expected: Sequence[Any]) -> None:
    for (tokens, logits), (wanted, exact) in zip(found, expected, strict=True):
        assert tokens == wanted
        assert torch.equal(logits, exact)


@pytest.mark.parametrize(
    "names",
    [
        ATTENTION,
        ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
        ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
        ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
        ("self_attn.qkv_proj.k_scale", "self_attn.qkv_proj.v_scale"),
        ("self_attn.kv_scale",),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("shape", [(), (1,)], ids=["scalar", "vector of one"])
def test_scales_are_read_by_every_name_in_use(
    names: tuple[str, ...], shape: tuple[int, ...], plain: Path, tmp_path: Path
) -> None:
    folder = scale_checkpoint(plain, tmp_path / "scaled", names, shape=shape)
    expected = [(v, v) for _, v in SCALES] if len(names) == 1 else list(SCALES)
    assert layers(folder) == expected


@pytest.mark.parametrize(("kind", "path"), [("llama", "modules"), ("olmo", "transformers")])
def test_a_model_computes_with_its_scales(kind: str, path: str, tmp_path: Path) -> None:
    save_tiny(tmp_path / "plain", tiny_config(kind))
    folder = scale_checkpoint(tmp_path / "plain", tmp_path / "scaled", quantization=COMPRESSED)
    assert loaded(folder)[0].path == path
    assert_same(decoded(folder), decoded(tmp_path / "plain"))


def test_a_cache_without_its_scales_saturates(plain: Path, tmp_path: Path) -> None:
    lost = decoded(scale_checkpoint(plain, tmp_path / "without", ()))
    assert not torch.allclose(lost[0][1], decoded(plain)[0][1], atol=0.1)


def test_a_cache_in_the_model_dtype_takes_no_scales(plain: Path, tmp_path: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.k_scale"] = torch.tensor([math.nan])
        tensors["model.layers.0.self_attn.q_scale"] = torch.ones(1)
        del tensors["model.layers.1.self_attn.v_scale"]

    folder = scale_checkpoint(plain, tmp_path / "scaled", change=spoil)
    assert layers(folder, kv_dtype=None) == [(1.0, 1.0)] * 3
    assert_same(decoded(folder, DType.BFLOAT16), decoded(plain, DType.BFLOAT16))


def test_without_scales_they_are_one_and_a_line_says_so(plain: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "hardpoint"):
        assert layers(plain) == [(1.0, 1.0)] * 3
        assert len(layers(plain, ParallelRank(tensor_rank=1, tensor_size=2))) == 3
    assert [record.getMessage() for record in caplog.records] == [
        f"the KV cache is float8_e4m3fn, and {plain} has no scales for it: they are 1.0"
    ]


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        (ParallelRank(tensor_rank=1, tensor_size=2), SCALES),
        (ParallelRank(stage=0, stages=2), SCALES[:2]),
        (ParallelRank(tensor_rank=1, tensor_size=2, stage=1, stages=2), SCALES[2:]),
    ],
)
def test_ranks_get_the_scales_of_their_own_layers(
    place: ParallelRank, expected: tuple[tuple[float, float], ...], plain: Path, tmp_path: Path
) -> None:
    assert layers(scale_checkpoint(plain, tmp_path / "scaled"), place) == list(expected)


def _set(name: str, value: torch.Tensor | None) -> Callable[[dict[str, torch.Tensor]], object]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        if value is None:
            del tensors[f"model.layers.{name}"]
        else:
            tensors[f"model.layers.{name}"] = value

    return change


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (_set("1.self_attn.k_scale", torch.tensor([0.0])), r"layers\.1\.self_attn\.k_scale is 0\.0, not a positive"),
        (_set("2.self_attn.v_scale", torch.tensor(-2.0)), r"layers\.2\.self_attn\.v_scale is -2\.0, not a positive"),
        (_set("0.self_attn.k_scale", torch.tensor([math.nan])), r"layers\.0\.self_attn\.k_scale is nan"),
        (_set("0.self_attn.v_scale", torch.tensor([math.inf])), r"layers\.0\.self_attn\.v_scale is inf"),
        (_set("0.self_attn.k_scale", torch.ones(2)), r"layers\.0\.self_attn\.k_scale is \[2\] numbers instead of one"),
        (_set("1.self_attn.v_scale", None), r"layer 1 has no v_scale"),
        (_set("3.self_attn.k_scale", torch.ones(1)), r"layers\.3\.self_attn\.k_scale is of none of the 3 layers"),
        (_set("1.self_attn.kv_scale", torch.ones(1)), r"layer 1 has its k_scale twice"),
    ],
)
def test_scales_that_cannot_be_used_are_named(
    change: Callable[[dict[str, torch.Tensor]], object], found: str, plain: Path, tmp_path: Path
) -> None:
    folder = scale_checkpoint(plain, tmp_path / "scaled", change=change)
    with pytest.raises(CorruptWeights, match=found) as caught:
        layers(folder)
    assert "kv_dtype='auto'" in str(caught.value)


@pytest.mark.parametrize(
    "quantization",
    [
        COMPRESSED,
        {**COMPRESSED, "config_groups": {"group_0": {"targets": ["LlamaAttention"], "weights": None}}},
        {"quant_method": "modelopt", "quant_algo": None, "kv_cache_scheme": SCHEME},
        {"quant_method": "modelopt", "quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}},
        {"quant_method": "quark", "global_quant_config": {"weight": None, "input_tensors": None}},
    ],
)
def test_a_checkpoint_whose_kv_cache_alone_is_quantised_is_read(
    quantization: dict[str, Any], plain: Path, tmp_path: Path
) -> None:
    assert layers(scale_checkpoint(plain, tmp_path / "scaled", quantization=quantization)) == list(SCALES)


@pytest.mark.parametrize(
    "quantization",
    [
        {**COMPRESSED, "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8}}}},
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
        {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}}},
        {"quant_method": "experts_int8"},
    ],
)
def test_quantised_weights_are_refused_with_or_without_scales(
    quantization: dict[str, Any], plain: Path, tmp_path: Path
) -> None:
    folder = scale_checkpoint(plain, tmp_path / "scaled", quantization=quantization)
    with pytest.raises(UnsupportedArchitecture, match=str(quantization["quant_method"])):
        open_model(str(folder))


@pytest.mark.parametrize("algorithm", [None, "FP8"])
def test_what_modelopt_says_beside_the_configuration_counts(algorithm: str | None, plain: Path, tmp_path: Path) -> None:
    folder = scale_checkpoint(plain, tmp_path / "scaled", ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"))
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(said))
    if algorithm is None:
        assert layers(folder) == list(SCALES)
        return
    with pytest.raises(UnsupportedArchitecture, match="modelopt"):
        open_model(str(folder))


@pytest.mark.parametrize(
    ("quantization", "found"),
    [
        ({**COMPRESSED, "kv_cache_scheme": {**SCHEME, "type": "int"}}, "int of 8 bits"),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}, "NVFP4"),
    ],
)
def test_scales_for_another_format_are_refused_where_they_would_be_used(
    quantization: dict[str, Any], found: str, plain: Path, tmp_path: Path
) -> None:
    folder = scale_checkpoint(plain, tmp_path / "scaled", quantization=quantization)
    assert layers(folder, kv_dtype=None) == [(1.0, 1.0)] * 3
    with pytest.raises(ConfigError, match=found):
        layers(folder)


@pytest.mark.parametrize("kind", ["llama", "olmo"])
def test_scales_in_use_cannot_be_changed_by_an_update(kind: str, tmp_path: Path) -> None:
    save_tiny(tmp_path / "plain", tiny_config(kind))
    folder = scale_checkpoint(tmp_path / "plain", tmp_path / "scaled")
    model, runner = loaded(folder)
    tensors = load_file(folder / "model.safetensors")
    before = decode_two(runner, FIRST, SECOND, 2)
    assert model.update_weights(tensors.items()) == sum("scale" not in name for name in tensors)
    assert_same(decode_two(Runner(model, runner.plan, runner.attention), FIRST, SECOND, 2), before)
    name = "model.layers.1.self_attn.v_scale"
    with pytest.raises(ModelError, match=r"layers\.1\.self_attn\.v_scale is 4\.0, and 512\.0 is in use"):
        model.update_weights([(name, torch.tensor([4.0]))])
    assert loaded(folder, DType.BFLOAT16)[0].update_weights([(name, torch.tensor([4.0]))]) == 0


@pytest.mark.parametrize("kind", ["llama", "olmo"])
def test_a_reload_from_a_checkpoint_with_other_scales_is_refused_before_anything_is_written(
    kind: str, tmp_path: Path
) -> None:
    save_tiny(tmp_path / "plain", tiny_config(kind))
    folder = scale_checkpoint(tmp_path / "plain", tmp_path / "scaled")
    others = scale_checkpoint(tmp_path / "plain", tmp_path / "others", scales=(*SCALES[:2], (2.0, 2.0)))
    model, _ = loaded(folder)
    written: set[str] = set()
    for other in (others, tmp_path / "plain"):
        with pytest.raises(ModelError, match="are in use"):
            model.reload(open_model(str(other)), written)
    assert not written
    assert model.reload(open_model(str(folder)), written) > 0
    assert loaded(folder, DType.BFLOAT16)[0].reload(open_model(str(others))) > 0
