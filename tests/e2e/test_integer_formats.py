"""Safetensors checkpoints of GPTQ, AWQ and compressed-tensors, against float32 of what the formats say.

The files are written here from the formats' definitions, number by number, with values of their own for every group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hardpoint import LLM, SamplingParams
from hardpoint.interfaces.errors import CapabilityRefused, CorruptWeights, ModelError, UnsupportedArchitecture
from hardpoint.models import open_model
from tests.quantised_checkpoints import LAYERS, dense_weights, write_folder

PROMPTS = [{"prompt_token_ids": [(7 * i + 3 * p) % 250 for i in range(5 + 9 * p)]} for p in range(3)]
DOWN = "model.layers.1.mlp.down_proj"
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def words(numbers: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack numbers [n, m] into int32[n, m * bits / 32]: nibble i of a word is number `order[i]` of its group."""
    per_word = 32 // bits
    out = np.zeros((len(numbers), -(-numbers.shape[1] // per_word)), dtype=np.uint32)
    for column in range(numbers.shape[1]):
        group, place = divmod(column, per_word)
        bit = (order or tuple(range(per_word))).index(place) * bits
        out[:, group] |= numbers[:, column].astype(np.uint32) << np.uint32(bit)
    return torch.from_numpy(out.view(np.int32))


class Kind:
    """A format: its `quantization_config`, and a matrix's tensors in it."""

    def __init__(self, name: str, bits: int, size: int | None, config: dict[str, Any], zeros: bool = True) -> None:
        self.name, self.bits, self.size, self.config, self.zeros = name, bits, size, config, zeros

    @property
    def blocks(self) -> str:
        """The format of blocks that has the same numbers, and no scale more than once where groups are of 128 or a multiple."""
        return f"INT{self.bits}" if self.size in (32, 64) else f"INT{self.bits}_128"

    def of(self, weight: Tensor, rng: np.random.Generator) -> tuple[dict[str, Tensor], Tensor]:
        """Return the tensors of a quantised matrix, and what it means, float32."""
        rows, columns = weight.shape
        groups = 1 if self.size is None else columns // self.size
        most = (1 << self.bits) - 1
        half, quarter = (most + 1) // 2, (most + 1) // 4
        # Zero points of unlike groups are unlike, and no number is clipped.
        zeros = (
            rng.integers(half - quarter, half + quarter, (rows, groups))
            if self.zeros
            else np.full((rows, groups), half)
        )
        spread = weight.reshape(rows, groups, -1).abs().amax(-1)
        scales = (spread / (quarter - 1)).to(torch.bfloat16 if "quantized" in self.name else torch.float16)
        zero, scale = (np.repeat(each, columns // groups, axis=1) for each in (zeros, scales.float().numpy()))
        numbers = np.clip(np.rint(weight.numpy() / scale) + zero, 0, most).astype(np.int64)
        values = torch.from_numpy(((numbers - zero) * scale).astype(np.float32))
        return self._tensors(numbers, zeros, scales), values

    def _tensors(self, numbers: np.ndarray, zeros: np.ndarray, scales: Tensor) -> dict[str, Tensor]:
        rows, columns = numbers.shape
        half = 1 << (self.bits - 1)
        if self.name in ("gptq", "gptq_v2"):
            stored = zeros - 1 if self.name == "gptq" else zeros
            return {
                "qweight": words(numbers, self.bits).T,
                "qzeros": words(stored.T, self.bits),
                "scales": scales.T,
                "g_idx": (torch.arange(columns) // (self.size or columns)).int(),
            }
        if self.name == "awq":
            return {
                "qweight": words(numbers.T, 4, AWQ_ORDER),
                "qzeros": words(zeros.T, 4, AWQ_ORDER),
                "scales": scales.T,
            }
        if self.name == "int-quantized":
            return {"weight": torch.from_numpy((numbers - half).astype(np.int8)), "weight_scale": scales}
        found = {
            "weight_packed": words(numbers, self.bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor([rows, columns]),
        }
        return found | ({"weight_zero_point": words(zeros.T, self.bits).T} if self.zeros else {})


def compressed(format: str, bits: int, size: int | None, symmetric: bool, **group: Any) -> dict[str, Any]:
    """Return a `quantization_config` of compressed-tensors."""
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "channel" if size is None else "group",
        "group_size": size,
        "dynamic": False,
    }
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, **group}}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": groups, "ignore": ["lm_head"]}


DYNAMIC = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token", "symmetric": True}
KINDS = {
    "gptq-4-128": Kind("gptq", 4, 128, {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}),
    "gptq-4-32-symmetric": Kind("gptq", 4, 32, {"quant_method": "gptq", "bits": 4, "group_size": 32}, zeros=False),
    "gptq-v2-8-64": Kind(
        "gptq_v2", 8, 64, {"quant_method": "gptq", "bits": 8, "group_size": 64, "checkpoint_format": "gptq_v2"}
    ),
    "awq-4-64": Kind("awq", 4, 64, {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}),
    "packed-4-128": Kind("pack-quantized", 4, 128, compressed("pack-quantized", 4, 128, True), zeros=False),
    "packed-4-32-zeros": Kind("pack-quantized", 4, 32, compressed("pack-quantized", 4, 32, False)),
    "packed-8-rows": Kind("pack-quantized", 8, None, compressed("pack-quantized", 8, None, True), zeros=False),
    "w8a8": Kind(
        "int-quantized", 8, None, compressed("int-quantized", 8, None, True, input_activations=DYNAMIC), zeros=False
    ),
    "w4a8": Kind(
        "int-quantized", 4, 32, compressed("int-quantized", 4, 32, True, input_activations=DYNAMIC), zeros=False
    ),
}


def quantised(kind: Kind, seed: int = 0) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors of a model whose layers' matrices are quantised, and those of the dense model that they mean."""
    rng = np.random.default_rng(seed)
    stored, meant = {}, {}
    for name, tensor in dense_weights(seed).items():
        if tensor.ndim == 2 and "embed" not in name:
            tensors, meant[name] = kind.of(tensor, rng)
            stored |= {name.removesuffix("weight") + part: values for part, values in tensors.items()}
        else:
            stored[name] = meant[name] = tensor
    return stored, meant


def write(folder: Path, kind: Kind, changes: dict[str, Tensor | None] | None = None, seed: int = 0) -> Path:
    """Write a quantised model, with some of its tensors changed or left out."""
    tensors = quantised(kind, seed)[0] | (changes or {})
    there = {name: values for name, values in tensors.items() if values is not None}
    return write_folder(folder, there, quantization_config=kind.config)


@pytest.fixture
def start() -> Iterator[Callable[..., LLM]]:
    made: list[LLM] = []

    def engine(path: Path, quantization: str = "auto", **settings: Any) -> LLM:
        arguments = {"dtype": "float32", "num_device_blocks": 64, "threads": 1, "skip_tokenizer_init": True}
        made.append(LLM(str(path), quantization=quantization, **arguments | settings))
        return made[-1]

    yield engine
    for llm in made:
        llm.shutdown()


def run(llm: LLM) -> list[list[float]]:
    """Return the log probability of each prompt's first tokens."""
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0, detokenize=False)
    done = [output.outputs[0] for output in llm.generate(PROMPTS, params)]
    return [[entry[t].logprob for entry, t in zip(one.logprobs or (), one.token_ids, strict=True)] for one in done]


def scored(llm: LLM) -> np.ndarray:
    """Return the log probabilities of the prompts' own tokens."""
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False))
    rows = [zip(one.prompt_logprobs or (), one.prompt_token_ids, strict=True) for one in outputs]
    return np.array([entry[token].logprob for row in rows for entry, token in row if entry is not None])


@pytest.mark.parametrize("name", sorted(KINDS))
def test_matrices_are_what_the_format_says_expanded_and_in_blocks(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    checkpoint = open_model(str(write(tmp_path, kind))).checkpoint
    meant = quantised(kind)[1]
    assert checkpoint.shapes() == {name: tuple(tensor.shape) for name, tensor in meant.items()}
    for tensor, expected in meant.items():
        assert torch.equal(checkpoint.read(tensor), expected)
    # Rows from the middle, of words that they share with others; blocks by their definition.
    weight = f"{DOWN}.weight"
    rows = torch.cat([values for _, values in checkpoint.rows(weight, 5, 77)])
    assert torch.equal(rows, meant[weight][5:77])
    format = checkpoint.block_format(weight)
    assert format == kind.blocks
    raw = torch.cat([values for _, values in checkpoint.block_rows(weight, 5, 77)])
    blocks = raw.view(72, -1, format.nbytes).numpy()
    scales, zeros, stored = blocks[..., :4].copy().view("f4"), blocks[..., 4:6].copy().view("i2"), blocks[..., 6:]
    if kind.bits == 4:
        pairs = stored.reshape(*stored.shape[:2], -1, 16)
        stored = np.concatenate([pairs & 15, pairs >> 4], axis=-1).reshape(*stored.shape[:2], -1)
    values = scales * (stored.astype(np.float32) - zeros)
    assert torch.equal(torch.from_numpy(values.reshape(72, -1)), meant[weight][5:77])
    assert checkpoint.block_format("model.embed_tokens.weight") is None


@pytest.mark.parametrize("name", ["gptq-4-128", "awq-4-64", "packed-4-32-zeros", "w8a8"])
def test_products_are_those_of_the_matrices(name: str, tmp_path: Path, start: Callable[..., LLM]) -> None:
    kind = KINDS[name]
    folder = write(tmp_path / "quantised", kind)
    llm = start(folder)
    assert llm.info.weight_formats == {kind.blocks: 4 * LAYERS, "float32": 1}
    dense = start(write_folder(tmp_path / "dense", quantised(kind)[1]))
    expanded = start(folder, "none")
    assert expanded.info.weight_formats == {"float32": 4 * LAYERS + 1}
    assert run(expanded) == run(dense)
    errors = scored(llm) - scored(dense)
    assert np.sqrt(np.mean(errors**2)) < 0.07, "the root mean square of what rounded activations change is larger"


@pytest.mark.parametrize(
    ("name", "settings", "formats"),
    [
        ("awq-4-64", {"use_fused_decoder": False}, {"INT4"}),
        ("gptq-4-128", {"use_fused_decoder": False}, {"INT4_128"}),
        ("awq-4-64", {"tensor_parallel_size": 2, "executor": "multi_process"}, {"INT4"}),
        # A rank's half of 128 columns is not whole blocks of 128, and is kept in those of 32.
        ("gptq-4-128", {"tensor_parallel_size": 2, "executor": "multi_process"}, {"INT4", "INT4_128"}),
    ],
    ids=["layers", "layers-128", "two-ranks", "two-ranks-128"],
)
def test_layers_and_ranks_compute_what_the_program_does(
    name: str, settings: dict[str, Any], formats: set[str], tmp_path: Path, start: Callable[..., LLM]
) -> None:
    folder = write(tmp_path, KINDS[name])
    other = start(folder, **settings)
    assert set(other.info.weight_formats) == {*formats, "float32"}
    for ours, theirs in zip(run(start(folder)), run(other), strict=True):
        assert ours[0] == pytest.approx(theirs[0], abs=0.1)


@pytest.mark.parametrize(
    "renamed",
    [lambda name: name.removeprefix("model."), lambda name: name.replace("model.", "model.language_model.", 1)],
    ids=["bare", "beside-pictures"],
)
def test_matrices_under_other_names_than_the_models_stay_in_blocks(
    renamed: Callable[[str], str], tmp_path: Path, start: Callable[..., LLM]
) -> None:
    kind = KINDS["gptq-4-128"]
    tensors = {renamed(name): values for name, values in quantised(kind)[0].items()}
    llm = start(write_folder(tmp_path / "renamed", tensors, quantization_config=kind.config))
    assert llm.info.weight_formats == {kind.blocks: 4 * LAYERS, "float32": 1}
    assert np.array_equal(scored(llm), scored(start(write(tmp_path / "standard", kind))))


def test_matrices_of_a_reranker_whose_head_is_made_of_tokens_stay_in_blocks(
    tmp_path: Path, start: Callable[..., LLM]
) -> None:
    kind, head = KINDS["gptq-4-128"], {"classifier_from_token": [1, 2], "method": "no_post_processing"}
    llm = start(write(tmp_path, kind), convert="classify", hf_overrides=head)
    assert llm.info.weight_formats == {kind.blocks: 4 * LAYERS, "float32": 2}


def test_stacked_experts_beside_quantised_matrices_change_no_result(tmp_path: Path, start: Callable[..., LLM]) -> None:
    kind, (experts, inner, hidden) = KINDS["gptq-4-128"], (4, 64, 128)
    generator = torch.Generator().manual_seed(1)
    single = {name: values for name, values in quantised(kind)[0].items() if ".mlp." not in name}
    stacked = dict(single)
    for layer in range(LAYERS):
        router, up, down = (
            torch.randn(shape, generator=generator) * 0.15
            for shape in ((experts, hidden), (experts, 2 * inner, hidden), (experts, hidden, inner))
        )
        theirs, ours = f"model.layers.{layer}.mlp", f"model.layers.{layer}.block_sparse_moe"
        stacked |= {
            f"{theirs}.gate.weight": router,
            f"{theirs}.experts.gate_up_proj": up,
            f"{theirs}.experts.down_proj": down,
        }
        single[f"{ours}.gate.weight"] = router
        for one in range(experts):
            parts = zip(("w1", "w3", "w2"), (*up[one].chunk(2), down[one]), strict=True)
            single |= {f"{ours}.experts.{one}.{part}.weight": values for part, values in parts}
    config = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "intermediate_size": inner,
        "num_local_experts": experts,
        "num_experts_per_tok": 2,
        "quantization_config": kind.config,
    }
    expected, llm = (start(write_folder(tmp_path / n, t, **config)) for n, t in (("a", single), ("b", stacked)))
    assert llm.info.weight_formats == expected.info.weight_formats
    assert llm.info.weight_formats[kind.blocks] == 2 * LAYERS
    assert np.array_equal(scored(llm), scored(expected))


def test_they_sleep_and_are_reloaded_and_floating_values_are_rounded(tmp_path: Path, start: Callable[..., LLM]) -> None:
    kind = KINDS["gptq-4-128"]
    folder = write(tmp_path / "model", kind)
    llm = start(folder, enable_sleep_mode=True, sleep_disk_directory=str(tmp_path))
    expected = run(llm)
    for arguments in ({"tier": "source"}, {"tier": "host"}, {"level": 2}):
        llm.sleep(**arguments)
        if not llm.wake_up().weights_valid:
            llm.reload_weights()
        assert run(llm) == expected, arguments
    write(folder, kind, seed=1)
    llm.reload_weights()
    changed = run(llm)
    assert changed != expected
    # What groups of 128 hold exactly is written without loss, so that the file's values bring its answers back.
    llm.update_weights([(f"{DOWN}.weight", torch.ones(128, 256))])
    assert run(llm) != changed
    llm.update_weights([(f"{DOWN}.weight", quantised(kind, seed=1)[1][f"{DOWN}.weight"])])
    for ours, theirs in zip(run(llm), changed, strict=True):
        assert ours[0] == pytest.approx(theirs[0], abs=0.1)


GPTQ, AWQ = KINDS["gptq-4-128"], KINDS["awq-4-64"]
NAN = torch.full((2, 128), float("nan"), dtype=torch.float16)


@pytest.mark.parametrize(
    ("kind", "changes", "match"),
    [
        (GPTQ, {f"{DOWN}.scales": None}, r"down_proj.scales.*\n?.*there is none"),
        (GPTQ, {f"{DOWN}.qzeros": None}, "down_proj.qzeros"),
        (GPTQ, {f"{DOWN}.scales": NAN}, "not finite"),
        (GPTQ, {f"{DOWN}.scales": torch.ones(2, 128).int()}, "numbers of torch.int32"),
        (GPTQ, {f"{DOWN}.scales": torch.ones(4, 128)}, r"\[4, 128\], not \[2, 128\] for 4 bits in groups of 128"),
        (AWQ, {f"{DOWN}.qzeros": torch.zeros(3, 16).int()}, r"\[3, 16\], not \[4, 16\]"),
        (KINDS["packed-4-128"], {f"{DOWN}.weight_shape": torch.tensor([128, 512])}, r"\[128, 32\], not \[128, 64\]"),
        (KINDS["w8a8"], {f"{DOWN}.weight_scale": None}, "weight_scale"),
        (GPTQ, {f"{DOWN}.qweight": torch.zeros(32, 128, dtype=torch.int8)}, "elements of I8, not I32"),
        (AWQ, {f"{DOWN}.qzeros": torch.zeros(4, 16)}, "elements of F32, not I32"),
        (GPTQ, {f"{DOWN}.scales": torch.full((2, 128), torch.nan).to(torch.float8_e4m3fn)}, "not finite"),
    ],
    ids=["scales", "zeros", "nan", "integers", "group", "awq-zeros", "shape", "w8a8-scales", "bytes", "floats", "fp8"],
)
def test_damaged_matrices_are_corrupt(
    kind: Kind, changes: dict[str, Tensor | None], match: str, tmp_path: Path, start: Callable[..., LLM]
) -> None:
    with pytest.raises(CorruptWeights, match=match):
        start(write(tmp_path, kind, changes))


def test_columns_in_the_order_of_activations_are_refused_also_where_the_configuration_is_silent(
    tmp_path: Path, start: Callable[..., LLM]
) -> None:
    order = torch.arange(256).flip(0).int() // 128
    with pytest.raises(UnsupportedArchitecture, match="g_idx"):
        start(write(tmp_path / "gptq", GPTQ, {f"{DOWN}.g_idx": order}))
    with pytest.raises(UnsupportedArchitecture, match="weight_g_idx"):
        start(write(tmp_path / "packed", KINDS["packed-4-128"], {f"{DOWN}.weight_g_idx": order}))


def with_order(order: object) -> dict[str, Any]:
    """Return a `quantization_config` with an `actorder`."""
    config = compressed("pack-quantized", 4, 128, True)
    config["config_groups"]["group_0"]["weights"]["actorder"] = order
    return config


def with_transform(location: str) -> dict[str, Any]:
    """Return a `quantization_config` with a transform."""
    apply = [{"targets": ["Linear"], "location": location}]
    transforms = {"config_groups": {"u": {"type": "hadamard", "apply": apply}}}
    return compressed("pack-quantized", 4, 128, True) | {"transform_config": transforms}


@pytest.mark.parametrize("config", [with_order("static"), with_order("weight"), with_transform("weight_input")])
def test_what_was_done_to_weights_alone_is_in_them(config: dict[str, Any], tmp_path: Path) -> None:
    kind = KINDS["packed-4-128"]
    stored, meant = quantised(kind)
    checkpoint = open_model(str(write_folder(tmp_path, stored, quantization_config=config))).checkpoint
    assert torch.equal(checkpoint.read(f"{DOWN}.weight"), meant[f"{DOWN}.weight"])


@pytest.mark.parametrize(
    "change", [{"config_groups": [1]}, {"sparsity_config": "dense"}, {"transform_config": {"config_groups": {"u": 7}}}]
)
def test_values_of_another_type_are_a_model_error(change: dict[str, Any], tmp_path: Path) -> None:
    config = compressed("pack-quantized", 4, 128, True) | change
    with pytest.raises(ModelError, match="no usable quantization_config"):
        open_model(str(write_folder(tmp_path, dense_weights(), quantization_config=config)))


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (with_order("dynamic"), "actorder 'dynamic'"),
        (with_order("GROUP"), "actorder 'GROUP'"),
        (with_transform("input"), "transform_config"),
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "3 bits"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 16}, "groups of 16"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}, "desc_act"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"-:mlp": {}}}, "dynamic"),
        ({"quant_method": "gptq", "bits": "4", "group_size": 128}, "0 bits"),
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemv"}, "gemv"),
        (compressed("pack-quantized", 4, 128, True) | {"config_groups": {"a": {}, "b": {}}}, "2 groups of layers"),
        (compressed("marlin-24", 4, 128, True), "marlin-24"),
        (compressed("int-quantized", 8, None, True, input_activations=DYNAMIC | {"dynamic": False}), "dynamic=False"),
    ],
)
def test_other_formats_are_refused_with_what_was_found(config: dict[str, Any], match: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, dense_weights(), quantization_config=config)
    with pytest.raises(UnsupportedArchitecture, match=match) as refused:
        open_model(str(folder))
    assert "GPTQ, AWQ" in str(refused.value)


def test_a_configuration_without_quantised_matrices_and_a_second_rounding_are_refused(
    tmp_path: Path, start: Callable[..., LLM]
) -> None:
    with pytest.raises(CorruptWeights, match="none are"):
        start(write_folder(tmp_path, dense_weights(), quantization_config=GPTQ.config))
    with pytest.raises(CapabilityRefused, match="INT4"):
        start(write(tmp_path, GPTQ), "int8")
