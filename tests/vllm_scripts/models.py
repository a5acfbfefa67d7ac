"""A cache of the hub with tiny random models, by whose ids scripts load them without a network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
}


def write_cache(cache: Path) -> None:
    """Write all models into a cache as huggingface_hub keeps it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = _tokenizer()
    for name, changes in DECODERS.items():
        folder = _snapshot(cache, name)
        torch.manual_seed(0)
        values = {**SHAPE, "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, **changes}
        config = AutoConfig.for_model(values.pop("model_type"), **values)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def snapshots(cache: Path) -> dict[str, str]:
    """Return the models' ids by the folders in which they lie."""
    return {str(_folder(cache, name)): name for name in DECODERS}


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


def _tokenizer() -> Any:
    """Return a tokenizer of bytes, which writes any text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=CHAT_TEMPLATE,
    )
