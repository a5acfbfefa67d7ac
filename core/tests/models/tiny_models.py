"""Tiny seeded models of published architectures, and greedy decoding through a loaded model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from reference import PlainAllocator, ReferenceAttention, last_rows, step_batch

from hardpoint.interfaces import AttentionBackend, AttentionPlan, AttentionRequest, DType, KVCacheGroup, Refusal
from hardpoint.models import ModelSource, ParallelRank, RunnableModel, attention_layers, load_model, open_model
from hardpoint.models.config import ModelConfig
from hardpoint.models.description import ModelDescription
from hardpoint.models.registry import family_of
from hardpoint.worker.state_memory import StateMemory

BLOCK = 4
VOCAB = 128
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
PARTIAL_ROPE = {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}
SOFT_CAPS = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 4.0}
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 16,
}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GRANITE = {
    "attention_multiplier": 0.3,
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.7,
    "tie_word_embeddings": True,
}
MAMBA = {"mamba_n_heads": 6, "mamba_d_state": 8}
MULTIPLIERS = {
    "key_multiplier": 0.5,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.9,
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.8,
    "embedding_multiplier": 2.0,
    "lm_head_multiplier": 0.5,
}
LATENT = {
    "head_dim": 8,
    "kv_lora_rank": 20,
    "q_lora_rank": 28,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": None,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
}
LATENT_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 16,
}
NATIVE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-attention-bias": ("llama", {"attention_bias": True}),
    "mistral-window": ("mistral", {"sliding_window": 7}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "qwen2-moe": ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 40}),
    "qwen3-moe": ("qwen3_moe", {**EXPERTS, "norm_topk_prob": True}),
    "gpt-oss": (
        "gpt_oss",
        {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 6, "rope_parameters": GPT_OSS_ROPE},
    ),
    "deepseek-v2": ("deepseek_v2", {**LATENT, "topk_method": "group_limited_greedy", "rope_parameters": LATENT_ROPE}),
    "deepseek-v3": ("deepseek_v3", {**LATENT, "rope_parameters": LATENT_ROPE}),
    "qwen3-next": (
        "qwen3_next",
        {
            **EXPERTS,
            "shared_expert_intermediate_size": 40,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "rope_parameters": PARTIAL_ROPE,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 12,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 6,
        },
    ),
    "granite-hybrid": (
        "granitemoehybrid",
        {
            **GRANITE,
            **MAMBA,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_local_experts": 5,
            "shared_intermediate_size": 40,
        },
    ),
    "falcon-h1": (
        "falcon_h1",
        {
            **MAMBA,
            **MULTIPLIERS,
            "mamba_n_groups": 3,
            "mamba_d_ssm": 72,
            "mamba_rms_norm": True,
            "mlp_multipliers": [0.6, 1.4],
            "ssm_multipliers": [0.8, 1.2, 0.9, 1.1, 0.7],
        },
    ),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 8}),
    "nemotron-h": (
        "nemotron_h",
        {
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
            "mamba_num_heads": 6,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 3,
        },
    ),
    "phi3": ("phi3", {"head_dim": 8, "rope_parameters": PARTIAL_ROPE}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"sliding_window": 5, "query_pre_attn_scalar": 24, **SOFT_CAPS}),
    "gemma3": ("gemma3_text", {"sliding_window": 5, "query_pre_attn_scalar": 24, "layer_types": ALTERNATING}),
    "olmo2": ("olmo2", {"rms_norm_eps": 1e-3}),
    "granite": (
        "granite",
        GRANITE,
    ),
}
LLAMA4 = {
    "intermediate_size_mlp": 80,
    "num_local_experts": 4,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 16,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "granite-hybrid-rotated": (
        "granitemoehybrid",
        {
            **GRANITE,
            **MAMBA,
            "mamba_n_groups": 2,
            "mamba_proj_bias": True,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "num_local_experts": 0,
            "position_embedding_type": "rope",
        },
    ),
    "falcon-h1-plain-gate": ("falcon_h1", {**MAMBA, "mamba_d_ssm": None, "tie_word_embeddings": True}),
    "falcon-h1-gate-first": (
        "falcon_h1",
        {**MAMBA, "mamba_d_ssm": 72, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ),
    "lfm2-biases": (
        "lfm2",
        {
            "layer_types": ["full_attention", "conv", "conv"],
            "conv_bias": True,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": False,
        },
    ),
    "deepseek-v2-lite": ("deepseek_v2", {**LATENT, "q_lora_rank": None, "v_head_dim": 32}),
    "deepseek-v3-in-halves": ("deepseek_v3", {**LATENT, "norm_topk_prob": False, "rope_interleave": False}),
    "mixtral-window": ("mixtral", {"num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 7}),
    "qwen2-moe-window": (
        "qwen2_moe",
        {
            **EXPERTS,
            "shared_expert_intermediate_size": 40,
            "norm_topk_prob": True,
            "use_sliding_window": True,
            "sliding_window": 6,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3-moe-window": (
        "qwen3_moe",
        {**EXPERTS, "use_sliding_window": True, "sliding_window": 6, "decoder_sparse_step": 2},
    ),
}
"""Settings of families that change what is computed in a layer and nothing about how a model is loaded or divided."""
MIXTURES = [name for name in NATIVE if name.startswith(("mixtral", "gpt-oss", "deepseek")) or "-moe" in name]
HYBRIDS = ["qwen3-next", "granite-hybrid", "falcon-h1", "lfm2", "nemotron-h"]
"""Families whose layers keep recurrent states."""
FALLBACK: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 64}),
    "gpt2-scaled-by-layer": (
        "gpt2",
        {"n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 64, "scale_attn_by_inverse_layer_idx": True},
    ),
    "olmo": ("olmo", {}),
    "phi": ("phi", {"num_key_value_heads": 6}),
    "stablelm": ("stablelm", {}),
    "gpt-neox": ("gpt_neox", {}),
    "starcoder2-window": ("starcoder2", {"sliding_window": 6}),
    "cohere": ("cohere", {}),
    "smollm3-no-rope-layers": ("smollm3", {"no_rope_layers": [1, 0, 1]}),
    "opt": ("opt", {"ffn_dim": 80}),
    "opt-projected": ("opt", {"ffn_dim": 80, "word_embed_proj_dim": 24, "do_layer_norm_before": False}),
    # Its rotary parameters have those of its attention beside them.
    "ministral3": ("ministral3", {}),
    # Its configuration takes no None for the token that pads.
    "modernbert-decoder": ("modernbert-decoder", {"num_attention_heads": 3, "local_attention": 12}),
}
PICTURES: dict[str, dict[str, Any]] = {
    "mistral3": {
        "text_config": {**SHAPE, "model_type": "ministral3"},
        "vision_config": {
            "model_type": "pixtral",
            "hidden_size": 32,
            "intermediate_size": 40,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "head_dim": 16,
        },
    },
    "qwen2_vl": {
        "text_config": {
            **{name: value for name, value in SHAPE.items() if name != "head_dim"},
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]},
        },
        "vision_config": {"depth": 1, "embed_dim": 16, "hidden_size": 48, "num_heads": 2, "patch_size": 4},
    },
}
"""Models that take pictures, of which transformers' code runs the language model."""


def tiny_config(kind: str, **options: Any) -> Any:
    """Return a configuration of tiny shape; `kind` is a model type of transformers."""
    from transformers import AutoConfig

    shape = {key: value for key, value in SHAPE.items() if kind not in _WITHOUT_HEAD_DIM or key != "head_dim"}
    return AutoConfig.for_model(kind, **{**shape, **options})


_WITHOUT_HEAD_DIM = frozenset(
    {"gpt2", "olmo", "olmo2", "phi", "stablelm", "gpt_neox", "starcoder2", "cohere", "granite", "smollm3"}
)


def describe(architecture: str, config: Any, dtype: DType = DType.FLOAT32) -> ModelDescription | Refusal:
    """Return how the core runs a configuration of transformers."""
    family = family_of(architecture)
    assert family is not None
    return ModelDescription.of(ModelConfig(architecture, family.complete(config.to_dict())), dtype)


def save_tiny(folder: Path, config: Any, seed: int = 0, **save_options: Any) -> Any:
    """Write a seeded float32 model of this configuration and return it with eager attention."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    torch.manual_seed(seed)
    auto = AutoModelForImageTextToText if config.model_type in PICTURES else AutoModelForCausalLM
    model = auto.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Far from the published initialisation, where every norm is 1 and every logit almost 0.
            parameter.add_(torch.randn_like(parameter) * 0.15)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer) * 0.15)
    model.save_pretrained(folder, **save_options)
    return model


def edit_config(folder: Path, *left_out: str, **values: Any) -> None:
    """Change values of a folder's config.json, and take those out that are named."""
    file = folder / "config.json"
    written = {**json.loads(file.read_text()), **values}
    file.write_text(json.dumps({name: value for name, value in written.items() if name not in left_out}))


def open_and_load(
    model: str | Path,
    *,
    dtype: DType = DType.FLOAT32,
    max_context: int = 64,
    attention: AttentionBackend | None = None,
    block_size: int = BLOCK,
    kv_dtype: DType | None = None,
    **options: Any,
) -> tuple[ModelSource, RunnableModel, AttentionPlan, AttentionBackend]:
    """Return a model loaded with the reference attention (unless another is given) and a plain allocator."""
    open_options = {key: options.pop(key) for key in ("load_format", "trust_remote_code") if key in options}
    source = open_model(str(model), **open_options)
    attention = attention or ReferenceAttention()
    layers = attention_layers(source, dtype, options.get("rank", ParallelRank()), kv_dtype)
    plan = attention.plan(AttentionRequest(layers, dtype, kv_dtype or dtype, block_size, max_context))
    assert isinstance(plan, AttentionPlan), plan
    settings: dict[str, Any] = {
        "groups": KVCacheGroup.whole(plan),
        "attention": attention,
        "kernels": None,
        "allocator": PlainAllocator(),
        "torch_device": "cpu",
        "max_num_tokens": 64,
        "max_num_samples": 8,
    }
    return source, load_model(source, **{**settings, **options}), plan, attention


class Runner:
    """Runs steps of a model over its own paged cache; unused slots hold NaN."""

    def __init__(self, model: RunnableModel, plan: AttentionPlan, attention: AttentionBackend) -> None:
        self._model, self.plan, self.attention = model, plan, attention
        dtype = plan.kv_cache.dtype.to_torch()
        self._states = None
        if model.state_layers():
            self._states = StateMemory(model.state_layers(), 16, allocator=PlainAllocator(), upload=torch.as_tensor)
            for table in (table for layer in self._states._tables for table in layer):
                table.fill_(float("nan"))
        self._cache = torch.full(plan.kv_cache.shape(64), float("nan"), dtype=dtype)
        self._tables: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}

    def step(self, work: Sequence[tuple[int, Sequence[int]]], output: str = "logits") -> torch.Tensor:
        """Run new tokens of several sequences, by id, and return each one's "hidden" state, "logits" or "argmax" at its last token."""
        for sequence, tokens in work:
            table = self._tables.setdefault(sequence, [])
            length = self._lengths.get(sequence, 0) + len(tokens)
            while len(table) * self.plan.block_size < length:
                # Neighbouring blocks of a sequence are far apart, and sequences interleave.
                used = sum(map(len, self._tables.values()))
                table.append((used * 37 + 11) % 64)
        batch = step_batch(
            [(tokens, self._lengths.get(sequence, 0)) for sequence, tokens in work],
            [self._tables[sequence] for sequence, _ in work],
            self.plan.block_size,
        )
        metadata: tuple[Any, ...] = (self.attention.prepare(self.plan, batch),)
        if self._states is not None:
            slots = np.array([sequence for sequence, _ in work], np.int32)
            metadata = (*metadata, self._states.prepare(replace(batch, rows=slots)))
        token_ids, positions = torch.from_numpy(batch.token_ids), torch.from_numpy(batch.positions)
        result = self._model.run(token_ids, positions, metadata, self._cache, last_rows(batch))
        if output != "hidden":
            result = getattr(self._model, output)(result)
        for sequence, tokens in work:
            self._lengths[sequence] = self._lengths.get(sequence, 0) + len(tokens)
        # A program may use the same memory for its next result.
        return result.clone()


def decode_two(runner: Runner, first: list[int], second: list[int], steps: int) -> list[tuple[list[int], torch.Tensor]]:
    """Greedily decode two prompts: one chunked, the other joining while the first decodes.

    Returns (generated tokens, logits float32[tokens, vocab]) of each.
    """
    half = len(first) // 2
    runner.step([(0, first[:half])])
    logits = {0: [runner.step([(0, first[half:])])[0]], 1: []}
    tokens: dict[int, list[int]] = {0: [int(logits[0][0].argmax())], 1: []}
    mixed = runner.step([(0, tokens[0][-1:]), (1, second)])
    for _ in range(steps):
        for sequence in (0, 1):
            logits[sequence].append(mixed[sequence])
            tokens[sequence].append(int(mixed[sequence].argmax()))
        mixed = runner.step([(0, tokens[0][-1:]), (1, tokens[1][-1:])])
    return [(tokens[sequence], torch.stack(logits[sequence])) for sequence in (0, 1)]


def expected_logits(model: Any, prompt: list[int], generated: list[int]) -> torch.Tensor:
    """Return transformers' logits float32[len(generated), vocab] at the positions that gave the generated tokens."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + generated[:-1]]), use_cache=False).logits
    return logits[0, len(prompt) - 1 :].float()


FIRST = [3, 17, 90, 4, 55, 120, 8, 33, 71, 64, 12]
SECOND = [5, 99, 42, 7, 81]


def assert_equals_transformers(model: Any, runner: Runner, steps: int = 8, tolerance: float = 1e-4) -> None:
    """Compare greedy tokens exactly and logits within `tolerance` of the largest, in chunked and mixed steps."""
    for prompt, (tokens, logits) in zip((FIRST, SECOND), decode_two(runner, FIRST, SECOND, steps), strict=True):
        expected = expected_logits(model, prompt, tokens)
        assert tokens == expected.argmax(dim=-1).tolist()
        assert float(expected.std()) > 0.05, "the reference model tells no tokens apart"
        torch.testing.assert_close(logits, expected, rtol=0, atol=tolerance * max(1.0, float(expected.abs().max())))
