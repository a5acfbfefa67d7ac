"""Tokenizers: transformers' fast ones, from a model folder or from a GGUF file's metadata."""

from __future__ import annotations

import logging
from typing import Any

from hardpoint.interfaces.errors import CorruptWeights, ModelError
from hardpoint.models.source import ModelSource
from hardpoint.weights.gguf_file import GGUFFile

_TOKENIZER_KEYS = {
    "tokenizer_type": "model",
    "pre_tokenizer_type": "pre",
    "tokens": "tokens",
    "scores": "scores",
    "token_type": "token_type",
    "merges": "merges",
    "precompiled_charsmap": "precompiled_charsmap",
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "unk_token_id": "unknown_token_id",
    "pad_token_id": "padding_token_id",
    "add_prefix_space": "add_space_prefix",
}
logger = logging.getLogger(__name__)

# Vocabularies whose merges were learned with every digit apart (llama.cpp, src/llama-vocab.cpp).
_DIGITS_APART = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
_GPT2_SPLIT = frozenset({None, "default", "gpt-2", "mpt", "olmo", "phi-2", "jais", "trillion", "granite-docling"})
_VOCABULARY_FILES = ("tokenizer.json", "*.model", "vocab.json", "vocab.txt", "tekken.json", "*.tiktoken")
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


def load_tokenizer(source: ModelSource, trust_remote_code: bool = False) -> Any:
    """Return the model's tokenizer, a transformers fast tokenizer with its chat template; raises ModelError."""
    if source.gguf is not None:
        return _from_gguf(source.gguf)
    if not any(any(source.path.glob(pattern)) for pattern in _VOCABULARY_FILES):
        # transformers makes an empty tokenizer for some architectures then.
        raise ModelError(
            f"{source.path} has no tokenizer",
            found=f"none of {', '.join(_VOCABULARY_FILES)}",
            hint="Put the model's tokenizer files beside its config.json",
        )
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            str(source.path), trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:  # transformers raises whatever a missing or damaged file led to
        raise ModelError(
            f"{source.path} has no usable tokenizer",
            found=str(error).splitlines()[0] if str(error) else type(error).__name__,
            hint="Put the model's tokenizer files beside its config.json",
        ) from error


def _from_gguf(file: GGUFFile) -> Any:
    """Build the tokenizer by transformers' own conversion, from the metadata that is in memory already.

    `AutoTokenizer.from_pretrained(gguf_file=...)` does the same after reading the file two times, in seconds.
    """
    given = {name: file.metadata.get(f"tokenizer.ggml.{key}") for name, key in _TOKENIZER_KEYS.items()}
    described = {name: value for name, value in given.items() if value is not None}
    if "tokens" not in described:
        raise CorruptWeights(f"{file.path} has no vocabulary", found="no metadata key 'tokenizer.ggml.tokens'")
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import (
            GGUF_PRE_TOKENIZER_SPLITS,
            convert_gguf_tokenizer,
        )
    except ImportError:  # other versions of transformers keep the conversion elsewhere
        return AutoTokenizer.from_pretrained(str(file.path.parent), gguf_file=file.path.name)
    try:
        backend, extra = convert_gguf_tokenizer(file.architecture, described)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ModelError(
            f"{file.path} has a tokenizer that cannot be read", found=str(error), hint="Use the safetensors checkpoint"
        ) from error
    kind = described.get("pre_tokenizer_type")
    if described.get("tokenizer_type") == "gpt2" and kind not in _GPT2_SPLIT | _DIGITS_APART | set(
        GGUF_PRE_TOKENIZER_SPLITS
    ):
        logger.warning("%s splits text by the unknown rule %r; GPT-2's is used instead", file.path.name, kind)
    _split_digits(backend, kind)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=file.metadata.get("tokenizer.chat_template"),
        **_special_tokens(file, described),
        **extra,
    )


def _split_digits(backend: Any, kind: str | None) -> None:
    if kind in _DIGITS_APART:
        from tokenizers import pre_tokenizers

        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )


def _special_tokens(file: GGUFFile, described: dict[str, Any]) -> dict[str, Any]:
    tokens: list[str] = described["tokens"]
    # Files without the flag are older; llama.cpp then begins text of a sentencepiece vocabulary with BOS.
    begins = file.metadata.get("tokenizer.ggml.add_bos_token", described.get("tokenizer_type") == "llama")
    options: dict[str, Any] = {
        "add_bos_token": bool(begins),
        "add_eos_token": bool(file.metadata.get("tokenizer.ggml.add_eos_token", False)),
        "clean_up_tokenization_spaces": False,
    }
    for name in _SPECIAL_TOKENS:
        token = described.get(f"{name}_id")
        if token is not None and not 0 <= token < len(tokens):
            raise CorruptWeights(f"{file.path} names a token outside its vocabulary", found=f"{name} {token}")
        options[name] = None if token is None else tokens[token]
    return options
