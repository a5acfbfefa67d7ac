"""Dense models whose weights are rounded to 8 or 4 bits while they are loaded."""

from __future__ import annotations

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
FORMATS = {"int4": ("Q4_1", "Q8_0"), "int8": ("Q8_0", "Q8_0")}
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
    """Return what the weights become, by ggml's own rounding, where rows are whole blocks."""
    matrices, embedding = (gguf.GGMLQuantizationType[format] for format in FORMATS[quantization])
    found = dict(weights)
    for name, tensor in weights.items():
        if tensor.ndim == 2 and tensor.shape[1] % 32 == 0:
            kind = embedding if "embed" in name else matrices
            found[name] = torch.from_numpy(gguf.dequantize(gguf.quantize(tensor.numpy(), kind), kind))
    return found


@pytest.mark.parametrize("quantization", sorted(FORMATS))
def test_products_are_those_of_the_rounded_weights(
    quantization: str, folder: Path, tmp_path: Path, start: Callable[..., LLM]
) -> None:
    llm = start(folder, quantization)
    matrices, embedding = FORMATS[quantization]
    expected_formats = {matrices: 4 * LAYERS, embedding: 1} if quantization == "int4" else {matrices: 4 * LAYERS + 1}
    assert llm.info.weight_formats == expected_formats
    plain = start(write_folder(tmp_path, rounded(dense_weights(), quantization)), "none")
    assert plain.info.weight_formats == {"float32": 4 * LAYERS + 1}
    assert llm.info.weight_bytes < plain.info.weight_bytes / 3
    dense = run(start(folder, "none"))
    for (_, ours), (_, theirs), (_, before) in zip(run(llm), run(plain), dense, strict=True):
        assert ours[0] == pytest.approx(theirs[0], abs=0.1)
        if quantization == "int4":
            # Far nearer to the rounded weights than to those of the file.
            assert abs(ours[0] - theirs[0]) < abs(ours[0] - before[0])


@pytest.mark.parametrize(
    "settings",
    [{"use_fused_decoder": False}, {"tensor_parallel_size": 2, "executor": "multi_process"}],
    ids=["layers", "two-ranks"],
)
def test_layers_and_ranks_compute_what_the_program_does(
    settings: dict[str, Any], folder: Path, start: Callable[..., LLM]
) -> None:
    other = start(folder, "int4", **settings)
    assert other.info.path == "lean"
    assert set(other.info.weight_formats) == {"Q4_1", "Q8_0"}
    for (_, ours), (_, theirs) in zip(run(start(folder, "int4")), run(other), strict=True):
        assert ours[0] == pytest.approx(theirs[0], abs=0.1)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "layers"])
def test_rounded_weights_sleep_are_reloaded_and_updated(
    fused: bool, folder: Path, tmp_path: Path, start: Callable[..., LLM]
) -> None:
    path = write_folder(tmp_path / "model", dense_weights())
    settings = {"use_fused_decoder": fused, "enable_sleep_mode": True, "sleep_disk_directory": str(tmp_path)}
    llm = start(path, "int4", **settings)
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


def test_random_weights_are_rounded_like_others(folder: Path, start: Callable[..., LLM]) -> None:
    llm = start(folder, "int8", load_format="dummy")
    assert llm.info.weight_formats == {"Q8_0": 4 * LAYERS + 1}
    assert run(llm) == run(start(folder, "int8", load_format="dummy"))


def test_what_cannot_be_is_refused(folder: Path, tmp_path: Path, start: Callable[..., LLM]) -> None:
    with pytest.raises(ConfigError, match="int3"):
        start(folder, "int3")
    with pytest.raises(CapabilityRefused, match=r"quantised already .*quantization='auto'"):
        start(Path("demo"), "int4")
    for value, match in ((float("nan"), "not finite"), (1e30, "too large")):
        weights = dense_weights()
        weights["model.layers.1.mlp.up_proj.weight"][3, 5] = value
        with pytest.raises(CorruptWeights, match=match):
            start(write_folder(tmp_path, weights), "int8")
