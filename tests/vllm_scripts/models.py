"""A cache of the hub with tiny random models, by whose ids scripts load them without a network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.picture_models import save_picture_model

COMMIT = "0" * 40

CHAT_TEMPLATE = """{% for tool in tools or [] %}tool {{ tool.function.name }}
{% endfor %}{% for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""

SHAPE: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
}
DECODERS: Mapping[str, Mapping[str, Any]] = {
    "tiny/llama": {"model_type": "llama"},
    "tiny/mixtral": {"model_type": "mixtral", "num_local_experts": 4},
    "tiny/mistral": {"model_type": "mistral", "sliding_window": 32},
    "tiny/reranker": {"model_type": "qwen3"},
}
_LABELS = {"id2label": {0: "low", 1: "middle", 2: "high"}, "num_key_value_heads": 4}
HEADS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "tiny/classifier": ("SequenceClassification", _LABELS),
    "tiny/cross-encoder": ("SequenceClassification", {"num_labels": 1, "num_key_value_heads": 4}),
    "tiny/entities": ("TokenClassification", _LABELS),
}
"""Encoders with a head that labels texts or tokens."""

PICTURES = "tiny/idefics3"


def write_cache(cache: Path) -> None:
    """Write all models into a cache as huggingface_hub keeps it."""
    import torch
    import transformers

    made = {name: ("CausalLM", changes) for name, changes in DECODERS.items()}
    made |= {name: (head, {"model_type": "bert", **changes}) for name, (head, changes) in HEADS.items()}
    for name, (kind, changes) in made.items():
        folder = _snapshot(cache, name)
        torch.manual_seed(0)
        vocab_size = write_tokenizer(folder, pairs=name in HEADS)
        values = {**SHAPE, "vocab_size": vocab_size, "eos_token_id": vocab_size - 1, **changes}
        config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
        model_class = getattr(transformers, f"AutoModelFor{kind}")
        model_class.from_config(config, dtype=torch.float32).save_pretrained(folder)
    save_picture_model(_snapshot(cache, PICTURES))


def snapshots(cache: Path) -> dict[str, str]:
    """Return the models' ids by the folders in which they lie."""
    return {str(_folder(cache, name)): name for name in (*DECODERS, *HEADS, PICTURES)}


def _folder(cache: Path, name: str) -> Path:
    return cache / f"models--{name.replace('/', '--')}" / "snapshots" / COMMIT


def _snapshot(cache: Path, name: str) -> Path:
    """Return the folder of a model's only commit, which its main branch names."""
    folder = _folder(cache, name)
    folder.mkdir(parents=True)
    references = folder.parents[1] / "refs"
    references.mkdir()
    (references / "main").write_text(COMMIT)
    return folder


def write_tokenizer(folder: Path, *, pairs: bool = False) -> int:
    """Write a tokenizer of bytes, which writes any text, and return how many tokens it has.

    Args:
        pairs: two texts have `</s>` between them, and tokens of two types.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<pad>", "<s>", "</s>"])
    if pairs:
        separator = [("</s>", made.token_to_id("</s>"))]
        made.post_processor = processors.TemplateProcessing(
            single="$A:0", pair="$A:0 </s>:0 $B:1", special_tokens=separator
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.save_pretrained(folder)
    return len(tokenizer)
