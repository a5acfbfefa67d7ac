"""How few tokens a text can have, by which one that is too long is known without its tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

_MAX_COMPOSED = 4
"""Characters of which NFC makes one: no canonical decomposition is longer."""
_LAST_ASCII = 0x7F


@dataclass(frozen=True)
class TokenLength:
    """How much text a token of a vocabulary stands for.

    Attributes:
        most: characters of one token.
        dropped: characters for which there is no token, and which the vocabulary leaves out.
    """

    most: int
    dropped: str

    def fewest_tokens(self, text: str) -> int:
        """Return a number of tokens that a text has at least."""
        return -(-(len(text) - sum(map(text.count, self.dropped))) // self.most)


def token_length(backend: Tokenizer) -> TokenLength | None:
    """Return it where it is known for sure: of byte-level vocabularies, whose tokens stand for as many bytes as they have characters,
    where nothing else of a text is left out on its way to them."""
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
    # Pieces of words may be spelled otherwise.
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    missing = [character for character, byte in _spelled_bytes() if byte not in vocabulary]
    if any(ord(character) > _LAST_ASCII for character in missing):
        return None
    longest = max(map(len, (*vocabulary, *(token.content for token in added))))
    return TokenLength(longest if normalizer is None else _MAX_COMPOSED * longest, "".join(missing))


def _spelled_bytes() -> Iterator[tuple[str, str]]:
    """Yield characters with a byte of theirs as vocabularies spell it: of ASCII the only one, and all that end others."""
    spelling = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for character in map(chr, range(0xC0)):
        yield character, "".join(piece for piece, _ in spelling.pre_tokenize_str(character))[-1]


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
