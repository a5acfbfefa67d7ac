"""Weights from safetensors and from a seed; updates in place; every kind of damage is a typed error."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from reference import PlainAllocator
from safetensors.torch import load_file, save_file
from tiny_models import (
    FALLBACK,
    NATIVE,
    SHAPE,
    VOCAB,
    Runner,
    assert_equals_transformers,
    edit_config,
    open_and_load,
    save_tiny,
    tiny_config,
)
from transformers import AutoModelForCausalLM

from hardpoint.interfaces import DType, Refusal
from hardpoint.interfaces.allocator import BUFFERS, WEIGHTS
from hardpoint.interfaces.errors import ConfigError, CorruptWeights, ModelError, ModelNotFound, UnsupportedArchitecture
from hardpoint.models import ModelSource, open_model
from hardpoint.weights.checkpoint import Checkpoint, SafetensorsCheckpoint, renamed

PROMPT = [3, 17, 90, 4, 55]


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    save_tiny(tmp_path, tiny_config("llama"))
    return tmp_path


def _logits(folder: Path, **options: Any) -> torch.Tensor:
    _, model, plan, attention = open_and_load(folder, **options)
    return Runner(model, plan, attention).step([(0, PROMPT)])


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def _write(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def _shard(folder: Path) -> list[Path]:
    tensors = _tensors(folder)
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for part in range(3):
        file = f"model-{part + 1:05d}-of-00003.safetensors"
        save_file({name: tensors[name] for name in names[part::3]}, folder / file)
        weight_map |= dict.fromkeys(names[part::3], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return sorted(folder.glob("model-*.safetensors"))


def test_sharded_weights_equal_a_single_file(llama: Path) -> None:
    whole = _logits(llama)
    _shard(llama)
    assert torch.equal(_logits(llama), whole)


def test_a_safetensors_file_stands_for_its_folder(llama: Path) -> None:
    assert open_model(str(llama / "model.safetensors")).path == llama


def test_a_folder_with_only_a_half_precision_checkpoint_runs_in_float32(llama: Path) -> None:
    exact = _logits(llama)
    _write(llama, {name: tensor.half() for name, tensor in _tensors(llama).items()})
    rounded = _logits(llama)
    assert 0 < float((rounded - exact).abs().max()) < 0.1


def test_dtype_is_the_configurations_else_the_checkpoints(llama: Path) -> None:
    assert open_model(str(llama)).dtype is DType.FLOAT32
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(config | {"dtype": "float16"}))
    assert open_model(str(llama)).dtype is DType.FLOAT16
    config.pop("dtype", None)
    (llama / "config.json").write_text(json.dumps(config))
    _write(llama, {name: tensor.bfloat16() for name, tensor in _tensors(llama).items()})
    assert open_model(str(llama)).dtype is DType.BFLOAT16


def test_weights_lie_in_the_allocators_memory(llama: Path) -> None:
    allocator = PlainAllocator()
    _, model, _, _ = open_and_load(llama, allocator=allocator)
    tags = allocator.stats().tags
    assert tags[WEIGHTS].allocated == model.weight_bytes == sum(t.nbytes for t in _tensors(llama).values())
    assert tags[BUFFERS].allocated == 2 * 64 * 8 * 4


def test_source_describes_the_model(llama: Path) -> None:
    (llama / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [7, 2], "temperature": 0.6, "top_p": 0.9})
    )
    source = open_model(str(llama))
    assert source.architecture == "LlamaForCausalLM"
    assert (source.vocab_size, source.max_model_len) == (VOCAB, 64)
    assert source.eos_token_ids == (7, 2)
    assert source.generation_defaults == {"temperature": 0.6, "top_p": 0.9}
    assert source.is_generative
    assert [layer.num_heads for layer in source.attention_layers()] == [6, 6, 6]


def test_generation_config_may_be_left_out_or_come_from_elsewhere(llama: Path, tmp_path: Path) -> None:
    own = {"temperature": 0.6, "max_new_tokens": 99, "top_k": None, "do_sample": True, "eos_token_id": 5}
    (llama / "generation_config.json").write_text(json.dumps(own))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "generation_config.json").write_text(json.dumps({"top_k": 7, "eos_token_id": 3}))

    def opened(setting: str) -> tuple[dict[str, Any], int]:
        source = open_model(str(llama), generation_config=setting)
        return source.generation_defaults, source.eos_token_ids[0]

    assert opened("auto") == ({"temperature": 0.6, "max_tokens": 99}, 5)
    assert opened("vllm") == ({}, 5)
    assert opened(str(tmp_path / "other")) == ({"top_k": 7}, 3)
    assert opened(str(tmp_path / "other" / "generation_config.json")) == ({"top_k": 7}, 3)
    with pytest.raises(ConfigError, match="generation_config='nowhere'"):
        opened("nowhere")


@pytest.mark.parametrize(
    ("settings", "beside", "expected"),
    [
        ({"eos_token": "<end>", "added_tokens_decoder": {"9": {"content": "<end>"}}}, {}, (2, 9)),
        (
            {"eos_token": {"content": "<end>"}},
            {"tokenizer.json": {"added_tokens": [{"id": 9, "content": "<end>"}]}},
            (2, 9),
        ),
        ({}, {"special_tokens_map.json": {"eos_token": "<end>"}, "tokenizer.json": {"added_tokens": []}}, (2,)),
        ({"eos_token": "<end>", "added_tokens_decoder": {"999": {"content": "<end>"}}}, {}, (2,)),
        ({"eos_token": None}, {}, (2,)),
        ({"eos_token": ["<end>"], "added_tokens_decoder": [7]}, {}, (2,)),
    ],
)
def test_texts_end_with_the_tokenizers_own_token_too(
    llama: Path, settings: dict[str, Any], beside: dict[str, Any], expected: tuple[int, ...]
) -> None:
    """Chat models are often published with the base model's token in their configuration; vLLM ends with the tokenizer's."""
    for name, content in {"tokenizer_config.json": settings, **beside}.items():
        (llama / name).write_text(json.dumps(content))
    assert open_model(str(llama)).eos_token_ids == expected


def test_texts_end_with_the_token_of_the_tokenizer_that_is_given(llama: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for folder, end in ((llama, 9), (other, 11)):
        settings = {"eos_token": "<end>", "added_tokens_decoder": {str(end): {"content": "<end>"}}}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (other / "config.json").write_bytes((llama / "config.json").read_bytes())
    source = open_model(str(llama))
    assert source.eos_token_ids == (2, 9)
    assert source.eos_token_ids_with(open_model(str(other), load_format="dummy"), source.vocab_size) == (2, 11)


@pytest.mark.parametrize("eos", [2**31, -1, "2", [2, None], [[2]], True, 2.5, {"id": 2}])
def test_end_of_text_tokens_that_cannot_be_are_a_model_error(llama: Path, eos: Any) -> None:
    (llama / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(ModelError, match="eos_token_id"):
        _ = open_model(str(llama)).eos_token_ids


def test_end_of_text_tokens_beyond_the_vocabulary_are_left_out(llama: Path) -> None:
    (llama / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, VOCAB, 99999]}))
    assert open_model(str(llama)).eos_token_ids == (7, 2)


def test_a_bare_model_gives_hidden_states(tmp_path: Path) -> None:
    from transformers import AutoModel

    config = tiny_config("qwen3")
    torch.manual_seed(0)
    reference = AutoModel.from_config(config, attn_implementation="eager").eval()
    reference.save_pretrained(tmp_path)
    source, model, plan, attention = open_and_load(tmp_path)
    assert (source.architecture, source.is_generative, model.path) == ("Qwen3Model", False, "modules")
    hidden = Runner(model, plan, attention).step([(0, PROMPT)], "hidden")
    with torch.no_grad():
        expected = reference(input_ids=torch.tensor([PROMPT])).last_hidden_state[0, -1:]
    torch.testing.assert_close(hidden, expected, rtol=0, atol=1e-4)


# Dummy weights


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_dummy_weights_need_no_checkpoint_and_repeat(name: str, tmp_path: Path) -> None:
    kind, options = {**NATIVE, **FALLBACK}[name]
    config = tiny_config(kind, **options)
    config.architectures = None
    config.save_pretrained(tmp_path)
    first, again, other = (_logits(tmp_path, load_format="dummy", seed=seed) for seed in (5, 5, 6))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)
    assert bool(torch.isfinite(first).all())


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
def test_dummy_weights_are_the_same_by_every_way_of_running(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, options = NATIVE[name]
    tiny_config(kind, **options).save_pretrained(tmp_path)
    native = _logits(tmp_path, load_format="dummy", seed=3)
    monkeypatch.setattr(ModelSource, "describe", lambda source, dtype: Refusal(("as of no family",)))
    transformers = _logits(tmp_path, load_format="dummy", seed=3)
    torch.testing.assert_close(native, transformers, rtol=1e-4, atol=1e-5)


# Updates


@pytest.mark.parametrize("name", ["llama-tied", "gemma2", "phi3", "gpt2"])
def test_updated_weights_take_effect(name: str, tmp_path: Path) -> None:
    kind, options = {**NATIVE, **FALLBACK}[name]
    old, new = tmp_path / "old", tmp_path / "new"
    save_tiny(old, tiny_config(kind, **options), seed=1)
    reference = save_tiny(new, tiny_config(kind, **options), seed=2)
    _, model, plan, attention = open_and_load(old)
    tensors = _tensors(new)
    assert model.update_weights(tensors.items()) == len(tensors)
    assert_equals_transformers(reference, Runner(model, plan, attention), steps=3)


@pytest.mark.parametrize("name", ["nemotron-h", "granite-hybrid", "qwen3-moe"])
def test_weights_are_updated_under_the_names_that_transformers_has_in_memory(name: str, tmp_path: Path) -> None:
    kind, options = NATIVE[name]
    old, new = tmp_path / "old", tmp_path / "new"
    save_tiny(old, tiny_config(kind, **options), seed=1)
    reference = save_tiny(new, tiny_config(kind, **options), seed=2)
    _, model, plan, attention = open_and_load(old)
    assert not set(dict(reference.named_parameters())) <= set(_tensors(new))
    model.update_weights(reference.named_parameters())
    assert_equals_transformers(reference, Runner(model, plan, attention), steps=3)


def test_a_single_part_of_a_fused_weight_can_be_updated(llama: Path) -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    _, model, plan, attention = open_and_load(llama)
    tensors = _tensors(llama)
    assert model.update_weights([(name, tensors[name] * 2)]) == 1
    _write(llama, {**tensors, name: tensors[name] * 2})
    assert torch.equal(Runner(model, plan, attention).step([(0, PROMPT)]), _logits(llama))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_wrong_update_is_refused(name: str, tmp_path: Path) -> None:
    kind, options = {**NATIVE, **FALLBACK}[name]
    save_tiny(tmp_path, tiny_config(kind, **options))
    _, model, _, _ = open_and_load(tmp_path)
    known, tensor = next(iter(_tensors(tmp_path).items()))
    with pytest.raises(CorruptWeights, match="no tensor of this name: nonsense"):
        model.update_weights([("nonsense", tensor)])
    with pytest.raises(CorruptWeights, match="another shape"):
        model.update_weights([(known, tensor[:-1])])


# Bad input


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_missing_and_unexpected_tensors_are_listed(name: str, tmp_path: Path) -> None:
    kind, options = {**NATIVE, **FALLBACK}[name]
    save_tiny(tmp_path, tiny_config(kind, **options))
    tensors = _tensors(tmp_path)
    dropped = next(key for key in tensors if ".1." in key)
    tensors.pop(dropped)
    tensors["model.layers.0.extra.weight"] = torch.zeros(3)
    _write(tmp_path, tensors)
    with pytest.raises(CorruptWeights) as caught:
        open_and_load(tmp_path)
    assert dropped in str(caught.value) or dropped.removeprefix("transformer.") in str(caught.value)
    assert "extra.weight" in str(caught.value)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_tensor_of_another_shape_is_refused(name: str, tmp_path: Path) -> None:
    kind, options = {**NATIVE, **FALLBACK}[name]
    save_tiny(tmp_path, tiny_config(kind, **options))
    tensors = _tensors(tmp_path)
    wrong = next(key for key in tensors if ".1." in key and tensors[key].dim() == 2)
    tensors[wrong] = torch.zeros(5, 7)
    _write(tmp_path, tensors)
    with pytest.raises(CorruptWeights):
        open_and_load(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 300, 0.5, 0.99])
def test_truncated_safetensors_are_corrupt(llama: Path, keep: float) -> None:
    file = llama / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    with pytest.raises(CorruptWeights, match="damaged or truncated"):
        open_and_load(llama)


def test_safetensors_that_are_not_there_are_not_called_damaged(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"there is no file .*absent\.safetensors") as missing:
        SafetensorsCheckpoint([tmp_path / "absent.safetensors"])
    assert "Download" not in str(missing.value)
    with pytest.raises(ModelNotFound, match=r"there is no file .*: a folder"):
        SafetensorsCheckpoint([tmp_path])
    with pytest.raises(ModelError, match="cannot be read: File name too long"):
        SafetensorsCheckpoint([tmp_path / ("x" * 300)])


def test_a_file_that_is_cut_short_while_it_is_open_is_corrupt(llama: Path) -> None:
    file = llama / "model.safetensors"
    source = open_model(str(llama))
    last = max(source.checkpoint.shapes(), key=lambda name: source.checkpoint.stored(name).offset)
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(CorruptWeights, match="truncated"):
        source.checkpoint.read(last)


def test_a_missing_shard_is_named(llama: Path) -> None:
    lost = _shard(llama)[1]
    lost.unlink()
    with pytest.raises(CorruptWeights, match=lost.name):
        open_and_load(llama)


def test_an_index_that_names_an_absent_tensor_is_corrupt(llama: Path) -> None:
    _shard(llama)
    index = llama / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.ghost"] = "model-00001-of-00003.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(CorruptWeights, match=r"model\.ghost"):
        open_and_load(llama)
    index.write_text("{not json")
    with pytest.raises(CorruptWeights, match="index"):
        open_and_load(llama)


def test_an_unknown_path_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no-such-model"):
        open_model(str(tmp_path / "no-such-model"))
    with pytest.raises(FileNotFoundError):
        open_model("some-org/some-model")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ModelNotFound, match=r"suffix '\.txt'"):
        open_model(str(tmp_path / "notes.txt"))


def test_a_folder_without_configuration_says_what_it_has(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="an empty folder"):
        open_model(str(tmp_path))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelNotFound, match=r"no config\.json among: pytorch_model\.bin"):
        open_model(str(tmp_path))


def test_a_folder_without_readable_weights_says_what_it_has(llama: Path) -> None:
    (llama / "model.safetensors").rename(llama / "pytorch_model.bin")
    with pytest.raises(ModelNotFound, match=r"pytorch_model\.bin"):
        open_model(str(llama))


def test_damaged_configuration_is_a_model_error(llama: Path) -> None:
    from hardpoint.interfaces.errors import ModelError

    (llama / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        open_model(str(llama))
    (llama / "config.json").write_text(json.dumps({"model_type": "llama", "num_attention_heads": "many"}))
    with pytest.raises(ModelError, match="not a usable configuration"):
        open_model(str(llama))
    # RoBERTa's positions begin after that of the padding token.
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    values = dict.fromkeys(names, 2) | {"architectures": ["RobertaModel"], "pad_token_id": 64}
    values["max_position_embeddings"] = 64
    (llama / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelError, match="-1 positions for tokens"):
        _ = open_model(str(llama)).max_model_len


def test_an_architecture_unknown_to_transformers_lists_the_lean_ones(llama: Path) -> None:
    (llama / "config.json").write_text(json.dumps({"model_type": "quux", "architectures": ["QuuxForCausalLM"]}))
    with pytest.raises(UnsupportedArchitecture, match=r"QuuxForCausalLM.*LlamaForCausalLM"):
        open_model(str(llama))


def test_a_rotary_embedding_that_nobody_knows_is_a_typed_error(llama: Path) -> None:
    edit_config(llama, rope_parameters={"rope_type": "quux", "rope_theta": 1e4})
    with pytest.raises(CorruptWeights, match=r"cannot be loaded: .*quux"):
        open_and_load(llama)


def test_a_checkpoint_that_is_quantised_in_another_format_is_refused(llama: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    for method, found in (
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "gptq", "bits": 3}, "numbers of 3 bits"),
    ):
        (llama / "config.json").write_text(json.dumps(config | {"quantization_config": method}))
        with pytest.raises(UnsupportedArchitecture, match=found):
            open_model(str(llama))


def test_unknown_load_formats_are_refused(llama: Path) -> None:
    with pytest.raises(ConfigError, match="auto, safetensors, gguf, dummy"):
        open_model(str(llama), load_format="pickle")
    with pytest.raises(ConfigError, match="gguf"):
        open_model(str(llama), load_format="gguf")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bloom": ({"n_layer": 2, "n_head": 4}, "interface|positions"),
    "bert": ({"architectures": ["BertLMHeadModel"]}, "not causal|interface"),
    "mamba": ({}, "recurrent|Conv1d|positions"),
    "llama": ({"layer_types": ["chunked_attention"] * 3}, "chunked_attention|cannot be run"),
    "bamba": ({"mamba_n_heads": 6, "mamba_d_head": 16, "attn_layer_indices": [1]}, "recurrent|Conv1d"),
    "deepseek_v3": (
        {
            "q_lora_rank": 16,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "num_key_value_heads": 6,
            "head_dim": 8,
            "first_k_dense_replace": 3,
            "n_routed_experts": 4,
        },
        "keys of 16 and values of 8",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_our_attention_cannot_serve_is_refused_with_the_reason(kind: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    options, reason = REFUSED[kind]
    config = AutoConfig.for_model(kind, **{**SHAPE, **options})
    config.save_pretrained(tmp_path)
    source = open_model(str(tmp_path), load_format="dummy")
    with pytest.raises(UnsupportedArchitecture, match=reason) as caught:
        source.attention_layers()
    assert "LlamaForCausalLM" in str(caught.value)


def test_a_model_whose_output_differs_from_transformers_is_refused(tmp_path: Path) -> None:
    from reference import ReferenceAttention

    class Uncapped(ReferenceAttention):
        def forward(self, layer: int, q: torch.Tensor, *rest: Any, **options: Any) -> None:
            super().forward(layer, q * 2, *rest, **options)

    save_tiny(tmp_path, tiny_config("olmo"))
    with pytest.raises(UnsupportedArchitecture, match="differs from transformers' by"):
        open_and_load(tmp_path, attention=Uncapped())


def test_position_dependent_rotary_scaling_is_refused_beyond_its_length(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    save_tiny(tmp_path, tiny_config("olmo", rope_parameters=rope))
    _, model, _, _ = open_and_load(tmp_path, max_context=64)
    assert model.path == "transformers"
    with pytest.raises(ConfigError, match="at most 64"):
        open_and_load(tmp_path, max_context=65)


def test_context_length_follows_the_rotary_scaling(tmp_path: Path) -> None:
    def length(kind: str, **rope: Any) -> int:
        tiny_config(kind, rope_parameters={"rope_theta": 1e4, **rope}).save_pretrained(tmp_path)
        return open_model(str(tmp_path), load_format="dummy").max_model_len

    assert length("llama", rope_type="default") == 64
    assert length("llama", rope_type="linear", factor=4.0) == 256
    assert length("llama", rope_type="yarn", factor=4.0, original_max_position_embeddings=32) == 128
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 32}
    assert length("olmo", rope_type="longrope", **factors) == 32


@pytest.mark.parametrize(
    "method", [name for name in vars(Checkpoint) if name[0] != "_" and name not in ("shapes", "dtype")]
)
def test_a_composed_checkpoint_asks_everything_of_the_one_that_has_the_tensor(method: str) -> None:
    part = Mock(spec=Checkpoint, **{"shapes.return_value": {"inner": (2,)}, "fill.return_value": None})
    _, _, *rest = inspect.signature(getattr(Checkpoint, method)).parameters
    assert getattr(renamed(part, {"outer": "inner"}), method)("outer", *rest) is getattr(part, method).return_value
    getattr(part, method).assert_called_once_with("inner", *rest)


@pytest.mark.parametrize("change", [0.0, 1.0])
def test_a_tied_models_own_head_is_used_and_named_where_it_differs(
    change: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny(tmp_path, tiny_config("llama", tie_word_embeddings=True))
    tensors = _tensors(tmp_path)
    head = tensors["model.embed_tokens.weight"].clone()
    head[VOCAB - 2] += change
    _write(tmp_path, {**tensors, "lm_head.weight": head})
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    _, model, plan, attention = open_and_load(tmp_path)
    assert_equals_transformers(reference.eval(), Runner(model, plan, attention))
    assert ("has a head of its own, lm_head.weight, which is used" in caplog.text) is (change != 0)
    assert ("lm_head.weight" in model.weight_names()) is (change != 0)


def test_updates_may_come_from_a_generator(llama: Path) -> None:
    _, model, _, _ = open_and_load(llama)

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        yield from _tensors(llama).items()

    assert model.update_weights(stream()) == len(_tensors(llama))
