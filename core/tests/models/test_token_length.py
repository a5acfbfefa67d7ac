"""A text has at least as many tokens as its length says, where the most that one token stands for is known."""

from __future__ import annotations

import unicodedata
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from hardpoint.models.token_length import TokenLength
from hardpoint.models.tokenizer import LightTokenizer

WORDS = ["the moon is round and the sun is far", "             ", "naïve été ümlaut", "ﬁ ᾂ 각 각 \u1f82"] * 20
CONTROL = "<|a_token_of_control|>"
TEXTS = [
    "the moon " * 40,
    " " * 300,
    CONTROL * 9,
    "가각갂\u1100\u1161\u11a8" * 30,
    unicodedata.normalize("NFD", "ᾂ") * 50,
    "é" * 70,
    "🙂\x00\r\n\t" * 20,
    "\x04" * 400,
]


def made(**parts: Any) -> LightTokenizer:
    """Return a byte-level tokenizer with some of its parts changed.

    Args:
        lacks: a byte, as it is spelled, that the vocabulary has no token for.
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    lacks = parts.pop("lacks", "")
    alphabet = [byte for byte in pre_tokenizers.ByteLevel.alphabet() if byte != lacks]
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(WORDS, trainer)
    backend.add_special_tokens([parts.pop("token", AddedToken(CONTROL, normalized=False))])
    for name, part in parts.items():
        setattr(backend, name, part)

    def load() -> Any:
        raise AssertionError("nothing of transformers is needed")

    return LightTokenizer(backend, None, load)


SPLIT = pre_tokenizers.Split(Regex(r"\s+|\S+"), "isolated")
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
KNOWN: dict[str, dict[str, Any]] = {
    "plain": {},
    "nfc": {"normalizer": normalizers.NFC()},
    "split": {"pre_tokenizer": pre_tokenizers.Sequence([SPLIT, pre_tokenizers.Digits(True), BYTES])},
    "space-before": {"pre_tokenizer": pre_tokenizers.ByteLevel()},
    "normalised-token": {"token": AddedToken("<moon>", normalized=True)},
    "without-a-byte-that-is-in-no-text": {"lacks": "ÿ"},
    "without-a-control-character": {"lacks": "Ą"},
}
UNKNOWN: dict[str, dict[str, Any]] = {
    "strips": {"token": AddedToken("<moon>", lstrip=True)},
    "strips-behind": {"token": AddedToken("<moon>", rstrip=True)},
    "normalised-token": {"token": AddedToken("<moon>", normalized=True), "normalizer": normalizers.NFC()},
    "nfkc": {"normalizer": normalizers.NFKC()},
    "several-normalisers": {"normalizer": normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])},
    "leaves-out": {"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), BYTES])},
    "words": {"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), BYTES])},
    "no-bytes": {"pre_tokenizer": SPLIT},
    "not-split": {"pre_tokenizer": None},
    "without-a-byte-of-characters": {"lacks": "¥"},
    "other-decoder": {"decoder": decoders.Fuse()},
    "no-decoder": {"decoder": None},
    "words-of-a-list": {"model": models.WordLevel({"<unk>": 0}, unk_token="<unk>")},
    "word-ends": {
        "model": models.BPE(vocab={one: n for n, one in enumerate(BYTES.alphabet())}, merges=[], end_of_word_suffix="_")
    },
}


@pytest.mark.parametrize("name", KNOWN)
def test_no_token_stands_for_more(name: str) -> None:
    tokenizer = made(**KNOWN[name])
    length = tokenizer.token_length
    assert length is not None
    for text in [*TEXTS, "".join(TEXTS)]:
        assert length.fewest_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("name", UNKNOWN)
def test_it_is_not_known_of_a_vocabulary_that_may_leave_text_out(name: str) -> None:
    assert made(**UNKNOWN[name]).token_length is None


def test_it_is_the_length_of_the_longest_token() -> None:
    long = AddedToken(f"<{'a' * 60}>", normalized=False)
    assert made().token_length == TokenLength(len(WORDS[0]), "")
    assert made(token=long).token_length == TokenLength(62, "")
    assert made(token=long, normalizer=normalizers.NFC()).token_length == TokenLength(4 * 62, "")


def test_characters_without_a_token_are_not_counted() -> None:
    length = made(lacks="Ą").token_length
    assert length == TokenLength(len(WORDS[0]), "\x04")
    assert length.fewest_tokens("\x04" * 1000 + "a") == 1
