"""A model's configuration from a GGUF file's metadata, under Hugging Face's names.

Keys are those of the GGUF specification (ggml, docs/gguf.md); what llama.cpp derives instead of storing (Gemma 2's query scale) is
derived in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hardpoint.interfaces.errors import CorruptWeights, UnsupportedArchitecture
from hardpoint.weights.gguf_file import GGUFFile

_GEMMA2_27B_LAYERS = 46
_YARN = {
    "yarn_attn_factor": "attention_factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
"""What llama.cpp's converter calls a configuration's parameters."""
_YARN_PLAIN = {"yarn_ext_factor": 1.0, "yarn_log_multiplier": 0.0}
"""Keys that a configuration has no name for, with the values that change nothing."""


def config_from_gguf(file: GGUFFile) -> dict[str, Any]:
    """Return what a config.json of the model would say; raises UnsupportedArchitecture, CorruptWeights."""
    if file.architecture not in _ARCHITECTURES:
        raise UnsupportedArchitecture(
            f"{file.path.name} has an architecture that Hardpoint does not read from GGUF files",
            found=file.architecture,
            hint=f"Read from GGUF files: {', '.join(_ARCHITECTURES)}. Use the safetensors checkpoint for others",
        )
    model_type, extra = _ARCHITECTURES[file.architecture]
    try:
        return {"model_type": model_type, **_common(file), **extra(file)}
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise CorruptWeights(f"{file.path} has impossible hyperparameters", found=str(error)) from error


def rope_divisors(file: GGUFFile) -> tuple[float, ...] | None:
    """Return the divisors of the rotary frequencies that the file stores (Llama 3.1's scaling), None for none."""
    if "rope_freqs.weight" not in file.tensors:
        return None
    # Of another shape, or larger than a chunk of rows, they are no divisors, which their number says.
    _, values = next(file.rows("rope_freqs.weight"), (0, None))
    return () if values is None else tuple(values.float().flatten().tolist())


def _common(file: GGUFFile) -> dict[str, Any]:
    heads = file.require("attention.head_count")
    kv_heads = file.get("attention.head_count_kv", heads)
    if isinstance(heads, list) or isinstance(kv_heads, list):
        raise UnsupportedArchitecture(
            f"{file.path.name} has layers with different numbers of heads", hint="Such models cannot be run"
        )
    embed = file.tensors.get("token_embd.weight")
    if embed is None:
        raise CorruptWeights(f"{file.path} has no embedding", found="no tensor token_embd.weight")
    hidden = file.require("embedding_length")
    tokens = file.metadata
    return {
        "architectures": [_CLASS_NAMES[file.architecture]],
        "vocab_size": embed.shape[0],
        "hidden_size": hidden,
        "intermediate_size": file.require("feed_forward_length"),
        "num_hidden_layers": file.require("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": file.get("attention.key_length", hidden // heads),
        "max_position_embeddings": file.require("context_length"),
        "rms_norm_eps": file.require("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_parameters": _rope_parameters(file),
        "bos_token_id": tokens.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": tokens.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": tokens.get("tokenizer.ggml.padding_token_id"),
    }


def _rope_parameters(file: GGUFFile) -> dict[str, Any]:
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": file.get("rope.freq_base", 10000.0)}
    # As llama.cpp reads files that leave the type out, and older ones.
    kind = file.get("rope.scaling.type", "linear")
    factor = file.get("rope.scaling.factor", file.get("rope.scale_linear"))
    is_scaled = kind != "none" and factor not in (None, 0, 1)
    magnitude = file.get("rope.scaling.attn_factor", 1.0)
    if magnitude != 1 and not (is_scaled and kind == "yarn"):
        raise _unread_scaling(file, f"attn_factor {magnitude} with the type {kind}")
    if not is_scaled:
        return parameters
    if kind not in ("linear", "yarn"):
        raise _unread_scaling(file, str(kind))
    parameters |= {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        original = file.get("rope.scaling.original_context_length")
        parameters["original_max_position_embeddings"] = original or file.require("context_length")
        given = ((ours, file.get(f"rope.scaling.{theirs}")) for theirs, ours in _YARN.items())
        parameters |= {name: value for name, value in given if value is not None}
        if magnitude != 1:
            # llama.cpp multiplies the magnitude by it; the other keys' is a configuration's, which is the whole of it.
            parameters["attention_factor"] = magnitude * parameters.get(
                "attention_factor", 0.1 * math.log(max(factor, 1)) + 1
            )
        unread = {name: file.get(f"rope.scaling.{name}", plain) for name, plain in _YARN_PLAIN.items()}
        if unread != _YARN_PLAIN:
            raise _unread_scaling(file, ", ".join(f"{name} {value}" for name, value in unread.items()))
    return parameters


def _unread_scaling(file: GGUFFile, found: str) -> UnsupportedArchitecture:
    return UnsupportedArchitecture(
        f"{file.path.name} scales its rotary embedding in a way that Hardpoint does not read from GGUF files",
        found=found,
        hint="Use the safetensors checkpoint",
    )


def _has_bias(file: GGUFFile, name: str) -> bool:
    return f"blk.0.{name}.bias" in file.tensors


def _llama(file: GGUFFile) -> dict[str, Any]:
    rotated, head_dim = file.get("rope.dimension_count"), _head_dim(file)
    if rotated not in (None, head_dim):
        raise UnsupportedArchitecture(
            f"{file.path.name} rotates only a part of each head",
            found=f"{rotated} of {head_dim} elements",
            hint="Use the safetensors checkpoint",
        )
    if file.get("expert_count"):
        raise UnsupportedArchitecture(
            f"{file.path.name} is a mixture of experts", hint="Use the safetensors checkpoint"
        )
    if _has_bias(file, "attn_q") or _has_bias(file, "ffn_gate"):
        raise UnsupportedArchitecture(
            f"{file.path.name} is of the architecture llama, with biases", hint="Use the safetensors checkpoint"
        )
    return {}


def _qwen2(file: GGUFFile) -> dict[str, Any]:
    return {"use_sliding_window": False}


def _qwen3(file: GGUFFile) -> dict[str, Any]:
    return {"use_sliding_window": False, "attention_bias": _has_bias(file, "attn_q")}


def _gemma(file: GGUFFile) -> dict[str, Any]:
    return {"hidden_act": "gelu_pytorch_tanh"}


def _gemma2(file: GGUFFile) -> dict[str, Any]:
    layers, hidden, heads = (file.require(key) for key in ("block_count", "embedding_length", "attention.head_count"))
    return {
        "query_pre_attn_scalar": hidden // heads if layers == _GEMMA2_27B_LAYERS else _head_dim(file),
        "sliding_window": file.require("attention.sliding_window"),
        "attn_logit_softcapping": file.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": file.get("final_logit_softcapping", 30.0),
    }


def _head_dim(file: GGUFFile) -> int:
    default = file.require("embedding_length") // file.require("attention.head_count")
    return int(file.get("attention.key_length", default))


_ARCHITECTURES: dict[str, tuple[str, Callable[[GGUFFile], dict[str, Any]]]] = {
    "llama": ("llama", _llama),
    "qwen2": ("qwen2", _qwen2),
    "qwen3": ("qwen3", _qwen3),
    "gemma": ("gemma", _gemma),
    "gemma2": ("gemma2", _gemma2),
}
_CLASS_NAMES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
}
