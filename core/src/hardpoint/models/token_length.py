"""How much text one token of a vocabulary can stand for, by which a text that is too long is known without its tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

_MOST_COMPOSED = 4
"""Characters of which NFC makes one: no canonical decomposition is longer."""


def most_characters(backend: Tokenizer) -> int | None:
    """Return the most characters of text that one token stands for; None where that is not known for sure.

    It is known of byte-level vocabularies, whose tokens stand for as many bytes as they have characters, where nothing of a text is
    left out on its way to them.
    """
    model, normalizer = backend.model, backend.normalizer
    if not isinstance(model, models.BPE) or not isinstance(backend.decoder, decoders.ByteLevel):
        return None
    if normalizer is not None and not isinstance(normalizer, normalizers.NFC):
        return None
    added = backend.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip or (token.normalized and normalizer is not None) for token in added):
        return None
    vocabulary = backend.get_vocab(with_added_tokens=False)
    kinds = set(_kinds(backend.pre_tokenizer))
    if "ByteLevel" not in kinds or not kinds <= {"ByteLevel", "Digits", "Split"}:
        return None
    # A model leaves out bytes that it has no token for, and pieces of words may be spelled otherwise.
    whole = all(byte in vocabulary for byte in _bytes_of_each_character())
    if not whole or model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    longest = max(map(len, (*vocabulary, *(token.content for token in added))))
    return longest if normalizer is None else _MOST_COMPOSED * longest


def _bytes_of_each_character() -> str:
    """Return, as vocabularies spell them, bytes of which every character has one: those of ASCII, and all that go on with others."""
    spelling = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(piece for piece, _ in spelling.pre_tokenize_str("".join(map(chr, range(0xC0)))))


def _kinds(pre_tokenizer: Any) -> Iterator[str]:
    """Yield the kinds of a pre-tokenizer's parts; a split is "Removed" where it leaves something out."""
    if pre_tokenizer is None:
        return
    parts = [json.loads(pre_tokenizer.__getstate__())]
    while parts:
        part = parts.pop()
        parts += part.get("pretokenizers", ())
        if part["type"] != "Sequence":
            yield "Removed" if part.get("behavior") == "Removed" else part["type"]
