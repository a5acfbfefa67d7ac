"""config.json, generation_config.json and tokenizer files with hostile values, used as an engine uses them, with random weights."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from hardpoint import LLM, SamplingParams
from hardpoint.engine.inputs import PromptProcessor
from hardpoint.interfaces import Refusal
from hardpoint.models import load_tokenizer, open_model

from .models import GREEDY, SETTINGS, SHAPE, TOKENS
from .values import changed, hostile, misplaced, write_json

_MOST_WEIGHTS = 1 << 20
"""Parameters of a model that is run; larger ones are only described."""
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
_ROPE = {"full_attention": {"rope_type": "default", "rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_LAYERS = ["sliding_attention", "full_attention"]
_STATES = ["linear_attention", "full_attention"]
_CHUNKS = {"attention_chunk_size": 32, "interleave_moe_layer_step": 2}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}
_DELTA = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
}
_LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "moe_intermediate_size": 16,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
FAMILIES: list[tuple[str, str, dict[str, Any]]] = [
    ("LlamaForCausalLM", "llama", {"rope_scaling": _LLAMA3, "attention_bias": False, "tie_word_embeddings": True}),
    ("MistralForCausalLM", "mistral", {"sliding_window": 8}),
    ("Qwen2ForCausalLM", "qwen2", _WINDOW),
    ("Qwen3ForCausalLM", "qwen3", {"rope_parameters": _YARN}),
    ("MixtralForCausalLM", "mixtral", {"num_local_experts": 2, "num_experts_per_tok": 1}),
    ("Qwen2MoeForCausalLM", "qwen2_moe", {**_EXPERTS, "shared_expert_intermediate_size": 16, "decoder_sparse_step": 1}),
    ("Qwen3MoeForCausalLM", "qwen3_moe", {**_EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [0]}),
    (
        "GptOssForCausalLM",
        "gpt_oss",
        {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 8, "layer_types": _LAYERS},
    ),
    ("Phi3ForCausalLM", "phi3", {"partial_rotary_factor": 0.5, "pad_token_id": 0}),
    ("GemmaForCausalLM", "gemma", {"hidden_act": "gelu_pytorch_tanh"}),
    (
        "Gemma2ForCausalLM",
        "gemma2",
        {"sliding_window": 8, "query_pre_attn_scalar": 16, "final_logit_softcapping": 30.0},
    ),
    (
        "Gemma3ForCausalLM",
        "gemma3_text",
        {"sliding_window": 8, "query_pre_attn_scalar": 16, "layer_types": _LAYERS, "rope_parameters": _ROPE},
    ),
    ("Olmo2ForCausalLM", "olmo2", {}),
    (
        "GraniteForCausalLM",
        "granite",
        {"attention_multiplier": 0.3, "embedding_multiplier": 3.0, "logits_scaling": 2.0},
    ),
    ("Llama4ForCausalLM", "llama4_text", {"intermediate_size_mlp": 32, "num_local_experts": 2, **_CHUNKS}),
    ("DeepseekV2ForCausalLM", "deepseek_v2", {**_LATENT, "topk_method": "group_limited_greedy"}),
    ("DeepseekV3ForCausalLM", "deepseek_v3", {**_LATENT, "rope_parameters": _YARN}),
    (
        "Qwen3NextForCausalLM",
        "qwen3_next",
        {**_EXPERTS, **_DELTA, "layer_types": _STATES, "shared_expert_intermediate_size": 16},
    ),
    (
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        {**_MAMBA, "layer_types": _STATES, "num_local_experts": 2, "shared_intermediate_size": 16},
    ),
    ("FalconH1ForCausalLM", "falcon_h1", {**_MAMBA, "mamba_n_groups": 2, "mamba_d_ssm": 64}),
    ("Lfm2ForCausalLM", "lfm2", {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8}),
    (
        "NemotronHForCausalLM",
        "nemotron_h",
        {
            "layers_block_type": _STATES,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "n_groups": 2,
        },
    ),
    ("BertModel", "bert", {"num_key_value_heads": None}),
    ("RobertaForSequenceClassification", "roberta", {"num_labels": 3, "pad_token_id": 0}),
    ("ModernBertModel", "modernbert", {"local_attention": 8, "global_attn_every_n_layers": 2}),
]
FOREIGN: list[tuple[str, str, dict[str, Any]]] = [
    ("OlmoForCausalLM", "olmo", {"pad_token_id": 0}),
    ("GPT2LMHeadModel", "gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}),
    ("Qwen2ForSequenceClassification", "qwen2", {"num_labels": 3}),
    ("BertForMaskedLM", "bert", {}),
]
_ADDED = [
    "quantization_config",
    "dtype",
    "torch_dtype",
    "rope_scaling",
    "partial_rotary_factor",
    "text_config",
    "num_labels",
]
_ADDED += [
    "id2label",
    "layer_types",
    "rope_parameters",
    "head_dim",
    "auto_map",
    "transformers_version",
    "tie_word_embeddings",
]
GENERATION: dict[str, Any] = {
    "temperature": 0.6,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.05,
    "repetition_penalty": 1.05,
    "max_new_tokens": 4,
    "eos_token_id": [2, 3],
    "do_sample": True,
}
TEMPLATE = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] }}{{ eos_token }}{% endfor %}"
_TEMPLATES = [
    "{{ messages[0]['content'] * 10**9 }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "{% for a in messages %}{{ raise_exception('no') }}{% endfor %}",
    "{{ ''.__class__.__mro__ }}",
    "{% for",
    "{{ undefined.something }}",
    "{{ messages | tojson(indent=4) }}",
    "{% include 'x' %}",
    "{{ 1 / 0 }}",
]
SETTINGS_OF_TOKENIZERS: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "chat_template": TEMPLATE,
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "model_max_length": 64,
    "clean_up_tokenization_spaces": False,
    "added_tokens_decoder": {"1": {"content": "<s>", "special": True}},
}


def tokenizer_json() -> dict[str, Any]:
    """Return what a tokenizer.json of bytes says."""
    vocabulary = {token: number for number, token in enumerate(TOKENS)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("t", "h"), ("h", "e")], unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(TOKENS[:3])
    made: dict[str, Any] = json.loads(tokenizer.to_str())
    return made


def prepare(own: Path) -> Any:
    """Return the case of a seed."""
    plain_tokenizer = tokenizer_json()

    def case(seed: int, folder: Path) -> None:
        rng = Random(seed)
        foreign = seed % 50 == 0
        architecture, model_type, more = rng.choice(FOREIGN if foreign else FAMILIES)
        config: dict[str, Any] = {"architectures": [architecture], "model_type": model_type, **SHAPE, **more}
        generation, tokenizer, settings = GENERATION, plain_tokenizer, SETTINGS_OF_TOKENIZERS
        if rng.random() < 0.2:
            settings = settings | {"tokenizer_class": rng.choice(["LlamaTokenizerFast", "GPT2Tokenizer", "X", None])}
        for _ in range(rng.choice([1, 1, 2, 3])):
            what = rng.random()
            if what < 0.45:
                config = changed(rng, config)
            elif what < 0.55:
                config = dict(config) | {rng.choice(_ADDED): hostile(rng)} if isinstance(config, dict) else config
            elif what < 0.65:
                generation = changed(rng, generation)
            elif what < 0.85:
                tokenizer = changed(rng, tokenizer)
            elif isinstance(settings, dict) and what < 0.92:
                settings = settings | {"chat_template": rng.choice(_TEMPLATES)}
            else:
                settings = changed(rng, settings)
        files = [
            folder / name
            for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
        ]
        for file, content in zip(files, (config, generation, tokenizer, settings), strict=True):
            write_json(rng, file, content)
        if rng.random() < 0.03:
            misplaced(rng, files)
        use(folder, runs=seed % 12 == 0)

    return case


def use(folder: Path, *, runs: bool) -> None:
    """Do what an engine does with a model's files; where it `runs`, by an engine with random weights."""
    source = open_model(str(folder), load_format="dummy")
    described = source.describe(source.dtype)
    assert source.vocab_size > 0
    assert source.max_model_len > 0
    assert all(0 <= token < 2**31 for token in source.eos_token_ids)
    if isinstance(described, Refusal):
        source.attention_layers()
        return
    assert len(source.attention_layers()) == len(described.whole.attention_layers())
    if runs and sum(map(prod, described.checkpoint_shapes.values())) <= _MOST_WEIGHTS:
        with LLM(str(folder), load_format="dummy", **SETTINGS) as llm:
            assert isinstance(llm.get_default_sampling_params(), SamplingParams)
            if not source.is_generative:
                for output in llm.embed(["the", {"prompt_token_ids": [0]}], use_tqdm=False):
                    assert len(output.outputs.embedding) > 0
                return
            for given in (None, GREEDY):
                for output in llm.generate(["the", {"prompt_token_ids": [0]}], given, use_tqdm=False):
                    assert output.outputs[0].finish_reason is not None
            llm.chat([{"role": "user", "content": "the"}], GREEDY, use_tqdm=False)
        return
    SamplingParams(**source.generation_defaults)
    processor = PromptProcessor(load_tokenizer(source), source.vocab_size, source.max_model_len)
    processor("the <s> \u20ac")
    processor.chat([{"role": "user", "content": "the"}], None, True)
