"""Safetensors checkpoints of 8-bit floating numbers with scales, against float32 of what the formats say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hardpoint import LLM, SamplingParams
from hardpoint.interfaces import BlockFormat
from hardpoint.interfaces.errors import CorruptWeights, UnsupportedArchitecture
from hardpoint.models import open_model
from tests.quantised_checkpoints import LAYERS, dense_weights, write_folder

DOWN = "model.layers.1.mlp.down_proj"
BLOCK = (96, 80)
"""Divides no matrix evenly."""


def compressed(strategy: str, bits: int = 8, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False, **more}
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
# The configuration, the name of scales, and what shares one: a matrix, a row or a block.
KINDS: dict[str, tuple[dict[str, Any], str, str]] = {
    "fp8-blocks": (FP8 | {"weight_block_size": list(BLOCK)}, "weight_scale_inv", "block"),
    "fp8-matrix-static": (FP8 | {"activation_scheme": "static"}, "weight_scale", "matrix"),
    "fbgemm-rows": ({"quant_method": "fbgemm_fp8"}, "weight_scale", "row"),
    "w8a8-rows": (compressed("channel"), "weight_scale", "row"),
    "w8a8-matrix": (compressed("tensor"), "weight_scale", "matrix"),
    "w8a8-blocks": (compressed("block", block_structure=list(BLOCK)), "weight_scale", "block"),
}


def quantised(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors of a model whose layers' matrices are quantised, and those of the dense model that they mean."""
    _, scale_name, shared = KINDS[name]
    stored, meant = {}, {}
    generator = torch.Generator().manual_seed(3)
    for tensor, values in dense_weights().items():
        stored[tensor] = meant[tensor] = values
        if values.ndim != 2 or "embed" in tensor:
            continue
        rows, columns = values.shape
        high, wide = {"matrix": (rows, columns), "row": (1, columns), "block": BLOCK}[shared]
        scales = torch.rand(-(-rows // high), -(-columns // wide), generator=generator) + 0.5
        stored[tensor] = values.to(torch.float8_e4m3fn)
        spread = scales.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
        meant[tensor] = stored[tensor].float() * spread
        stem = tensor.removesuffix("weight")
        stored[stem + scale_name] = scales[0, 0] if shared == "matrix" else scales
        if "static" in name:
            stored[f"{stem}input_scale"] = torch.tensor(0.25)
    return stored, meant


def write(folder: Path, name: str, changes: dict[str, Tensor | None] | None = None) -> Path:
    """Write a quantised model, with some of its tensors changed or left out."""
    tensors = quantised(name)[0] | (changes or {})
    there = {tensor: values for tensor, values in tensors.items() if values is not None}
    return write_folder(folder, there, quantization_config=KINDS[name][0])


@pytest.fixture
def start() -> Iterator[Callable[..., LLM]]:
    made: list[LLM] = []

    def engine(path: Path, **settings: Any) -> LLM:
        arguments = {"dtype": "float32", "num_device_blocks": 64, "threads": 1, "skip_tokenizer_init": True}
        made.append(LLM(str(path), **arguments | settings))
        return made[-1]

    yield engine
    for llm in made:
        llm.shutdown()


@pytest.mark.parametrize("name", sorted(KINDS))
def test_matrices_are_what_the_format_says(name: str, tmp_path: Path) -> None:
    source = open_model(str(write(tmp_path, name)))
    meant = quantised(name)[1]
    assert source.checkpoint.shapes() == {tensor: tuple(values.shape) for tensor, values in meant.items()}
    for tensor, expected in meant.items():
        assert torch.equal(source.checkpoint.read(tensor), expected)
    rows = torch.cat([values for _, values in source.checkpoint.rows(f"{DOWN}.weight", 5, 107)])
    assert torch.equal(rows, meant[f"{DOWN}.weight"][5:107])


@pytest.mark.parametrize("name", ["fp8-matrix-static", "fbgemm-rows", "fp8-blocks"])
def test_blocks_mean_what_the_format_says(name: str, tmp_path: Path) -> None:
    """Parts of 80 elements are not cut into blocks of 32; parts of 96 are, the last of a row among them, which is less."""
    format = BlockFormat.FP8
    checkpoint = open_model(str(write(tmp_path, name))).checkpoint
    tensor = f"{DOWN}.weight"
    if name == "fp8-blocks":
        assert checkpoint.block_format(tensor) is None
        values = quantised(name)[0]
        config = FP8 | {"weight_block_size": [96, 96]}
        for stored in [one for one in values if one.endswith("weight_scale_inv")]:
            rows, columns = values[stored.replace("_scale_inv", "")].shape
            values[stored] = torch.rand(-(-rows // 96), -(-columns // 96)) + 0.5
        checkpoint = open_model(str(write_folder(tmp_path, values, quantization_config=config))).checkpoint
    assert checkpoint.block_format(tensor) is format
    assert checkpoint.block_format("model.embed_tokens.weight") is None
    blocks = torch.cat([rows for _, rows in checkpoint.block_rows(tensor, 5, 107)])
    meant = torch.cat([rows for _, rows in checkpoint.rows(tensor, 5, 107)])
    assert blocks.shape == (102, format.row_bytes(meant.shape[1]))
    parts = blocks.view(102, -1, format.nbytes)
    scales = parts[..., :4].contiguous().view(torch.float32)
    numbers = parts[..., 4:].contiguous().view(torch.float8_e4m3fn).float()
    assert torch.equal((numbers * scales).flatten(1), meant)


def test_numbers_of_8_floating_bits_can_be_rounded_to_whole_ones(tmp_path: Path, start: Callable[..., LLM]) -> None:
    llm = start(write(tmp_path, "fbgemm-rows"), quantization="int8")
    assert llm.info.weight_formats == {"Q8_0": 4 * LAYERS + 1}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_computes_what_the_dense_one_does(ranks: int, tmp_path: Path, start: Callable[..., LLM]) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0, detokenize=False)
    prompts = [{"prompt_token_ids": [(7 * i + 3 * p) % 250 for i in range(5 + 9 * p)]} for p in range(3)]
    settings: dict[str, Any] = {} if ranks == 1 else {"tensor_parallel_size": 2, "executor": "multi_process"}
    found = []
    for folder in (
        write(tmp_path / "fp8", "fp8-blocks"),
        write_folder(tmp_path / "dense", quantised("fp8-blocks")[1]),
    ):
        llm = start(folder, quantization="auto", **settings)
        # A rank counts its own share of each matrix.
        assert llm.info.weight_formats == {"float32": ranks * (4 * LAYERS + 1)}
        done = [output.outputs[0] for output in llm.generate(prompts, params)]
        found.append([(list(one.token_ids), one.cumulative_logprob) for one in done])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("name", "changes", "match"),
    [
        ("fp8-blocks", {f"{DOWN}.weight_scale_inv": None}, r"down_proj.weight_scale_inv.*\n?.*there is none"),
        ("fp8-blocks", {f"{DOWN}.weight_scale_inv": torch.ones(2, 3)}, r"\[2, 3\], not \[2, 4\]"),
        ("w8a8-rows", {f"{DOWN}.weight_scale": None}, "down_proj.weight_scale"),
        ("w8a8-rows", {f"{DOWN}.weight_scale": torch.ones(64, 1)}, r"\[64, 1\], not one, or one for each row"),
        ("w8a8-rows", {f"{DOWN}.weight_scale": torch.full((128, 1), float("nan"))}, "not finite"),
        ("w8a8-rows", {f"{DOWN}.weight_scale": torch.ones(128, 1).int()}, "quantised|not finite"),
    ],
)
def test_damaged_matrices_are_typed_errors(
    name: str, changes: dict[str, Tensor | None], match: str, tmp_path: Path, start: Callable[..., LLM]
) -> None:
    with pytest.raises((CorruptWeights, UnsupportedArchitecture), match=match):
        start(write(tmp_path, name, changes))


def test_a_configuration_without_such_matrices_is_corrupt(tmp_path: Path, start: Callable[..., LLM]) -> None:
    with pytest.raises(CorruptWeights, match="none are"):
        start(write_folder(tmp_path, dense_weights(), quantization_config=FP8))


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (FP8 | {"weight_block_size": [128]}, r"blocks of \[128\]"),
        (FP8 | {"weight_block_size": [0, 128]}, r"blocks of \[0, 128\]"),
        (compressed("group"), "strategy 'group'"),
        (compressed("channel", bits=4), "4 bits"),
        (compressed("channel") | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse"),
        (
            compressed("channel") | {"transform_config": {"config_groups": {"u": {"apply": [{"location": "output"}]}}}},
            "transform_config",
        ),
    ],
)
def test_what_is_not_read_is_refused_with_what_was_found(config: dict[str, Any], match: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedArchitecture, match=match):
        open_model(str(write_folder(tmp_path, dense_weights(), quantization_config=config)))
