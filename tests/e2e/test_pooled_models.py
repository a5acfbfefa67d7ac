"""Encoders, and heads that classify, as engines run them: each against transformers' code on the same seeded weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hardpoint import LLM, PoolingParams

VOCAB = 120
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 98,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "cls_token_id": 0,
    "sep_token_id": 2,
}
DECODER = {"num_key_value_heads": 2, "head_dim": 16, "pad_token_id": None}
WINDOWS = {"local_attention": 12, "global_attn_every_n_layers": 2, "norm_bias": True}
BOTH_SIDES = {
    "sliding_window": 12,
    "use_bidirectional_attention": True,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 24,
}
LABELS = {"id2label": {0: "low", 1: "middle", 2: "high"}, "label2id": {"low": 0, "middle": 1, "high": 2}}
ONE = {"id2label": {0: "score"}, "label2id": {"score": 0}}
ENCODERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertModel", "bert", {}),
    "roberta": ("RobertaModel", "roberta", {"type_vocab_size": 1}),
    "modernbert": ("ModernBertModel", "modernbert", WINDOWS),
    "modernbert-biases": ("ModernBertModel", "modernbert", {**WINDOWS, "attention_bias": True, "norm_bias": False}),
    "embedding-gemma": ("Gemma3TextModel", "gemma3_text", {**DECODER, **BOTH_SIDES}),
    "qwen3": ("Qwen3Model", "qwen3", DECODER),
}
HEADS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertForSequenceClassification", "bert", LABELS),
    "bert-two-labels": ("BertForSequenceClassification", "bert", {}),
    "bert-tokens": ("BertForTokenClassification", "bert", LABELS),
    "roberta": ("RobertaForSequenceClassification", "roberta", {"type_vocab_size": 1, **LABELS}),
    "roberta-tokens": ("RobertaForTokenClassification", "roberta", {"type_vocab_size": 1, **LABELS}),
    "xlm-roberta-scores": ("XLMRobertaForSequenceClassification", "xlm-roberta", {"type_vocab_size": 1, **ONE}),
    "modernbert": ("ModernBertForSequenceClassification", "modernbert", {**WINDOWS, **LABELS}),
    "modernbert-mean": (
        "ModernBertForSequenceClassification",
        "modernbert",
        {**WINDOWS, **LABELS, "classifier_pooling": "mean", "classifier_bias": True},
    ),
    "modernbert-tokens": ("ModernBertForTokenClassification", "modernbert", {**WINDOWS, **LABELS}),
    "llama": ("LlamaForSequenceClassification", "llama", {**DECODER, **LABELS}),
    "llama-tokens": ("LlamaForTokenClassification", "llama", {**DECODER, **LABELS}),
    "qwen3-reward": ("Qwen3ForSequenceClassification", "qwen3", {**DECODER, **ONE}),
    "gemma3": (
        "Gemma3TextForSequenceClassification",
        "gemma3_text",
        {**DECODER, **BOTH_SIDES, "use_bidirectional_attention": False, **LABELS},
    ),
}
LENGTHS = [1, 2, 40, 7, 96, 13]

MakeEngine = Callable[..., Any]


def save(folder: Path, architecture: str, kind: str, options: dict[str, Any]) -> Any:
    """Write a seeded float32 model and return it, as transformers runs it."""
    import transformers

    config = transformers.AutoConfig.for_model(kind, **{**SHAPE, **options})
    torch.manual_seed(0)
    model = getattr(transformers, architecture)._from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Far from the published initialisation, where every norm is 1 and every bias 0.
            parameter.add_(torch.randn_like(parameter) * 0.15)
    model.save_pretrained(folder)
    return model


def prompts(lengths: list[int] = LENGTHS) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(3, VOCAB, length).tolist() for length in lengths]


def whole(model: Any, tokens: list[int], **inputs: Any) -> Any:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([tokens]), **inputs)


def pooled(llm: LLM, texts: list[list[int]], **params: Any) -> list[np.ndarray[Any, Any]]:
    outputs = llm.embed([{"prompt_token_ids": one} for one in texts], PoolingParams(**params))
    return [output.outputs.embedding for output in outputs]


@pytest.mark.parametrize("name", ENCODERS)
def test_hidden_states_and_what_is_pooled_of_them_are_transformers_in_any_batch(
    tmp_path: Path, make_engine: MakeEngine, name: str
) -> None:
    model, texts = save(tmp_path, *ENCODERS[name]), prompts()
    expected = [whole(model, one).last_hidden_state[0] for one in texts]
    with make_engine(
        str(tmp_path), skip_tokenizer_init=True, max_model_len=None, max_num_batched_tokens=64, max_num_seqs=4
    ) as llm:
        assert llm.info.path == "lean" or name == "qwen3"
        for pooling, pick in (
            ("all", lambda x: x),
            ("cls", lambda x: x[0]),
            ("last", lambda x: x[-1]),
            ("mean", lambda x: x.mean(0)),
        ):
            for found, hidden in zip(pooled(llm, texts, pooling=pooling, normalize=False), expected, strict=True):
                np.testing.assert_allclose(found, pick(hidden).numpy(), atol=2e-4, rtol=1e-3)
        assert llm.engine.stats().blocks_used == 0


@pytest.mark.parametrize("name", HEADS)
def test_logits_of_labels_are_transformers(tmp_path: Path, make_engine: MakeEngine, name: str) -> None:
    model, texts = save(tmp_path, *HEADS[name]), prompts()
    with make_engine(
        str(tmp_path), skip_tokenizer_init=True, max_model_len=None, max_num_batched_tokens=64, max_num_seqs=4
    ) as llm:
        for found, tokens in zip(pooled(llm, texts, task="classify"), texts, strict=True):
            expected = whole(model, tokens).logits[0].numpy()
            assert found.shape == expected.shape
            np.testing.assert_allclose(found, expected, atol=2e-4, rtol=1e-3)
