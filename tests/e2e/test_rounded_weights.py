"""Dense models whose weights are rounded to 8 or 4 bits while they are loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor

from hardpoint import LLM, SamplingParams
from hardpoint.interfaces.errors import CapabilityRefused, ConfigError, CorruptWeights
from tests.quantised_checkpoints import LAYERS, dense_weights, write_folder

PROMPTS = [{"prompt_token_ids": [(7 * i + 3 * p) % 250 for i in range(5 + 9 * p)]} for p in range(3)]
FORMATS = {
    "int4": ("Q4_1", "Q8_0"),
    "int4-128": ("INT4_128", "INT8_128"),
    "int8": ("Q8_0", "Q8_0"),
    "int8-128": ("INT8_128", "INT8_128"),
}
Tokens = list[tuple[list[int], list[float]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("dense"), dense_weights())


@pytest.fixture
def start() -> Iterator[Callable[..., LLM]]:
    made: list[LLM] = []

    def engine(path: Path, quantization: str, **settings: Any) -> LLM:
        arguments = {"dtype": "float32", "num_device_blocks": 64, "threads": 1, "skip_tokenizer_init": True}
        made.append(LLM(str(path), quantization=quantization, **arguments | settings))
        return made[-1]

    yield engine
    for llm in made:
        llm.shutdown()


def run(llm: LLM) -> Tokens:
    """Return each prompt's tokens and their log probabilities."""
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0, detokenize=False)
    done = [output.outputs[0] for output in llm.generate(PROMPTS, params)]
    return [
        (list(one.token_ids), [entry[t].logprob for entry, t in zip(one.logprobs or (), one.token_ids, strict=True)])
        for one in done
    ]


def rounded(weights: dict[str, Tensor], quantization: str) -> dict[str, Tensor]:
    """Return what the weights become, where rows are whole groups: by ggml's own rounding, or in groups of 128 or 32."""
    matrices, embedding = FORMATS[quantization]
    found = dict(weights)
    for name, tensor in weights.items():
        if tensor.ndim == 2 and tensor.shape[1] % 32 == 0:
            format = embedding if "embed" in name else matrices
            found[name] = to_integers(tensor, format) if format.startswith("INT") else by_ggml(tensor, format)
    return found


def by_ggml(tensor: Tensor, format: str) -> Tensor:
    kind = gguf.GGMLQuantizationType[format]
    return torch.from_numpy(gguf.dequantize(gguf.quantize(tensor.numpy(), kind), kind))


def to_integers(tensor: Tensor, format: str, size: int = 128) -> Tensor:
    """Round to 16 numbers from the least to the greatest of a group, both or zero, or to 255 around zero."""
    size = size if tensor.shape[1] % size == 0 else 32
    groups = tensor.double().view(len(tensor), -1, size)
    if format == "INT8_128":
        scale = groups.abs().amax(-1, keepdim=True) / 127
        return ((groups / scale).round() * scale).flatten(1).float()
    low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
    scale = (high - low) / 15
    zero = (-low / scale).round()
    return ((((groups / scale).round() + zero).clamp(0, 15) - zero) * scale).flatten(1).float()


@pytest.mark.parametrize("quantization", sorted(FORMATS))
def test_products_are_those_of_the_rounded_weights(
    quantization: str, folder: Path, tmp_path: Path, start: Callable[..., LLM]
) -> None:
    llm = start(folder, quantization)
    matrices, embedding = FORMATS[quantization]
    assert llm.info.weight_formats == Counter({matrices: 4 * LAYERS}) + Counter({embedding: 1})
    plain = start(write_folder(tmp_path, rounded(dense_weights(), quantization)), "none")
    assert plain.info.weight_formats == {"float32": 4 * LAYERS + 1}
    assert llm.info.weight_bytes < plain.info.weight_bytes / 3
    dense = run(start(folder, "none"))
    for (_, ours), (_, theirs), (_, before) in zip(run(llm), run(plain), dense, strict=True):
        assert ours[0] == pytest.approx(theirs[0], abs=0.1)
        if matrices != embedding:
            # Far nearer to the rounded weights than to those of the file.
            assert abs(ours[0] - theirs[0]) < abs(ours[0] - before[0])


@pytest.mark.parametrize(
    ("quantization", "settings"),
    [
        ("int4", {"use_fused_decoder": False}),
        ("int4-128", {"use_fused_decoder": False}),
        ("int4", {"tensor_parallel_size": 2, "executor": "multi_process"}),
    ],
    ids=["layers", "layers-128", "two-ranks"],
)
def test_layers_and_ranks_compute_what_the_program_does(
    quantization: str, settings: dict[str, Any], folder: Path, start: Callable[..., LLM]
) -> None:
    other = start(folder, quantization, **settings)
    assert other.info.path == "modules"
    assert set(other.info.weight_formats) == set(FORMATS[quantization])
    for (_, ours), (_, theirs) in zip(run(start(folder, quantization)), run(other), strict=True):
        assert ours[0] == pytest.approx(theirs[0], abs=0.1)


@pytest.mark.parametrize(
    ("quantization", "fused"),
    [("int4", True), ("int4", False), ("int4-128", True)],
    ids=["fused", "layers", "groups-of-128"],
)
def test_rounded_weights_sleep_are_reloaded_and_updated(
    quantization: str, fused: bool, folder: Path, tmp_path: Path, start: Callable[..., LLM]
) -> None:
    path = write_folder(tmp_path / "model", dense_weights())
    settings = {"use_fused_decoder": fused, "enable_sleep_mode": True, "sleep_disk_directory": str(tmp_path)}
    llm = start(path, quantization, **settings)
    expected = run(llm)
    for arguments in ({"tier": "source"}, {"tier": "disk"}, {"tier": "host"}, {"level": 2}):
        llm.sleep(**arguments)
        if not llm.wake_up().weights_valid:
            llm.reload_weights()
        assert run(llm) == expected, arguments
    llm.update_weights(list(dense_weights(seed=1).items()))
    changed = run(llm)
    assert changed != expected
    write_folder(path, dense_weights(seed=1))
    llm.update_weights(list(dense_weights().items()))
    assert run(llm) == expected
    llm.reload_weights()
    assert run(llm) == changed


def test_rows_that_are_not_whole_blocks_stay_dense(tmp_path: Path, start: Callable[..., LLM]) -> None:
    narrow = write_folder(tmp_path, dense_weights(inner=240), intermediate_size=240)
    llm = start(narrow, "int4")
    assert llm.info.weight_formats == {"Q4_1": 3 * LAYERS, "Q8_0": 1, "float32": LAYERS}
    values = rounded(dense_weights(inner=240), "int4")
    plain = start(write_folder(tmp_path / "rounded", values, intermediate_size=240), "none")
    assert llm.info.weight_bytes < plain.info.weight_bytes
    for (_, ours), (_, theirs) in zip(run(llm), run(plain), strict=True):
        assert ours[0] == pytest.approx(theirs[0], abs=0.1)


def test_rows_that_are_not_whole_groups_of_128_are_rounded_in_groups_of_32(
    tmp_path: Path, start: Callable[..., LLM]
) -> None:
    llm = start(write_folder(tmp_path, dense_weights(inner=160), intermediate_size=160), "int4-128")
    assert llm.info.weight_formats == {"INT4_128": 3 * LAYERS, "INT8_128": 1, "INT4": LAYERS}
    values = rounded(dense_weights(inner=160), "int4-128")
    plain = start(write_folder(tmp_path / "rounded", values, intermediate_size=160), "none")
    for (_, ours), (_, theirs) in zip(run(llm), run(plain), strict=True):
        assert ours[0] == pytest.approx(theirs[0], abs=0.1)


def test_a_rank_with_columns_that_are_not_whole_groups_of_128_rounds_them_in_groups_of_32(
    folder: Path, tmp_path: Path, start: Callable[..., LLM]
) -> None:
    llm = start(folder, "int4-128", tensor_parallel_size=2, executor="multi_process")
    assert llm.info.weight_formats == {"INT4_128": 6 * LAYERS, "INT4": 2 * LAYERS, "INT8_128": 2}
    values = rounded(dense_weights(), "int4-128")
    values |= {name: to_integers(one, "INT4", 32) for name, one in dense_weights().items() if "o_proj" in name}
    plain = start(write_folder(tmp_path, values), "none")
    for (_, ours), (_, theirs) in zip(run(llm), run(plain), strict=True):
        assert ours[0] == pytest.approx(theirs[0], abs=0.1)


def test_random_weights_are_rounded_like_others(folder: Path, start: Callable[..., LLM]) -> None:
    llm = start(folder, "int8", load_format="dummy")
    assert llm.info.weight_formats == {"Q8_0": 4 * LAYERS + 1}
    assert run(llm) == run(start(folder, "int8", load_format="dummy"))


def test_what_cannot_be_is_refused(folder: Path, tmp_path: Path, start: Callable[..., LLM]) -> None:
    for name in ("int3", "int4-64"):
        with pytest.raises(ConfigError, match=f"'int4', 'int4-128', 'int8', 'int8-128', .*quantization='{name}'"):
            start(folder, name)
    with pytest.raises(CapabilityRefused, match=r"quantised already .*quantization='auto'"):
        start(Path("demo"), "int4")
    for value, match in ((float("nan"), "not finite"), (1e30, "too large")):
        weights = dense_weights()
        weights["model.layers.1.mlp.up_proj.weight"][3, 5] = value
        with pytest.raises(CorruptWeights, match=match):
            start(write_folder(tmp_path, weights), "int8")
