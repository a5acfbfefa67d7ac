"""From tokens to text as they come: characters never broken, stop texts found wherever they fall."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Protocol, TypeAlias

from tokenizers.decoders import DecodeStream

from hardpoint.models.tokenizer import byte_spelling
from hardpoint.sampling import RequestOutputKind, SamplingParams

_REPLACEMENT = "\ufffd"

_CONTEXT = 6
"""Tokens before a token that decide how it is written (a leading space, joined bytes); tokenizers look back one or two."""
_MAX_CONTEXT = 4 * _CONTEXT
"""The same, where fewer begin within a character's bytes."""

Decode: TypeAlias = Callable[[Sequence[int]], str]


class Tokenizer(Protocol):
    """What is needed of a tokenizer of transformers; the `backend_tokenizer` of a fast one is used where there is one."""

    def decode(self, token_ids: Sequence[int], **options: Any) -> str:
        """Return the text of tokens."""


class Detokenizer:
    """Text of tokens, for the sequences of one model.

    Args:
        tokenizer: the model's. Fast tokenizers are stepped with their own incremental decoder, at about 2 microseconds per
            token; others decode the last few tokens again.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        self._token_texts: dict[int, str] = {}
        self._token_bytes: dict[int, bytes] = {}

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of tokens, as the tokenizer's decoder gives it, without further clean-up of spaces."""
        if self._backend is not None:
            text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
            return text
        return self._tokenizer.decode(
            token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def token_text(self, token_id: int) -> str:
        """Return the text of a token alone, special tokens included, as log probabilities show it."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._token_texts[token_id] = self.decode([token_id])
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes of a token alone, which may be a part of a character: those of tokens in a row join to their text."""
        found = self._token_bytes.get(token_id)
        if found is None:
            text = self.token_text(token_id)
            found = self._part_of_character(token_id) if _REPLACEMENT in text else None
            self._token_bytes[token_id] = found = text.encode() if found is None else found
        return found

    def _part_of_character(self, token_id: int) -> bytes | None:
        """Return the bytes that a vocabulary's spelling of a token stands for; None for one that spells no bytes."""
        spelled = None if self._backend is None else self._backend.id_to_token(token_id)
        if spelled is None:
            return None
        # Sentencepiece spells a byte in hexadecimal digits, and a byte-level vocabulary each byte as a character.
        if len(spelled) == 6 and spelled.startswith("<0x") and spelled.endswith(">"):
            return bytes.fromhex(spelled[3:5])
        spelling = byte_spelling()
        return bytes(map(spelling.index, spelled)) if set(spelled) <= set(spelling) else None

    def incremental(self, context: Sequence[int], *, skip_special_tokens: bool) -> Callable[[int], str]:
        """Return a function that takes one token after another and returns the text that each completes, often empty.

        Args:
            context: tokens before them, of which the last few decide how they are written.
        """

        def decode(token_ids: Sequence[int]) -> str:
            return self.decode(token_ids, skip_special_tokens=skip_special_tokens)

        context, text = self.context(context, skip_special_tokens=skip_special_tokens)
        # The library's decoder takes a text that ends with a replacement character for an incomplete one, and would give it again.
        if self._backend is None or text.endswith(_REPLACEMENT):
            return _OffsetDecoder(decode, context, len(context)).step
        return _StreamDecoder(self._backend, skip_special_tokens, decode, context).step

    def context(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> tuple[Sequence[int], str]:
        """Return the last of some tokens, and their text: enough to begin with a whole character, as far as there are."""
        for count in (_CONTEXT, 2 * _CONTEXT, _MAX_CONTEXT):
            context = token_ids[-count:]
            text = self.decode(context, skip_special_tokens=skip_special_tokens) if context else ""
            if count >= len(token_ids) or _REPLACEMENT not in text:
                break
        return context, text


class _StopTexts:
    """Stop texts, ordered so that a look at the end of a text takes the same few searches however many they are."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts, self._ordered = frozenset(texts), sorted(texts)
        self._lengths = sorted(set(map(len, texts)))

    def held_from(self, text: str, start: int) -> int:
        """Return from where on, at `start` or later, the text may yet become a stop text; its length where it may not."""
        ordered = self._ordered
        for at in range(max(start, len(text) - self._lengths[-1] + 1), len(text)):
            tail = text[at:]
            place = bisect_left(ordered, tail)
            if place < len(ordered) and ordered[place].startswith(tail):
                return at
        return len(text)

    def ending(self, text: str, end: int, start: int) -> str | None:
        """Return the longest stop text that the text has up to `end`, from `start` or later."""
        for length in reversed(self._lengths[: bisect_right(self._lengths, end - start)]):
            if (found := text[end - length : end]) in self._texts:
                return found
        return None


@lru_cache(16)
def _stop_texts(texts: tuple[str, ...]) -> _StopTexts:
    return _StopTexts(texts)


class TextStream:
    """The text of one completion, as its tokens come.

    The text continues the prompt's, so a leading space is kept. Where nothing is streamed and no stop text is looked for,
    tokens are collected, and decoded once at the end.

    Stop texts are found as if the text came character by character: the one that is complete first ends it, the longest of
    those complete at once. So the result does not depend on how the text falls into tokens.

    Args:
        detokenizer: the model's; None makes no text, like `detokenize=False`.
        prompt_token_ids: of which the last few are kept as context.
    """

    def __init__(
        self, detokenizer: Detokenizer | None, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None:
        self._detokenizer = detokenizer if params.detokenize else None
        self._prompt_end = list(prompt_token_ids[-_MAX_CONTEXT:])
        self._skip_special_tokens = params.skip_special_tokens
        self._stops = _stop_texts(params.stop_texts) if params.stop_texts else None
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._token_ids: list[int] = []
        self._text = ""
        self._search_from = 0
        # Text before this place cannot become part of a stop text any more, and is not searched again.
        self._held_from = 0
        self._ended = False
        lazy = params.output_kind is RequestOutputKind.FINAL_ONLY and not self._stops
        self._step: Callable[[int], str] | None = None
        if self._detokenizer is not None and not lazy:
            self._step = self._detokenizer.incremental(self._prompt_end, skip_special_tokens=self._skip_special_tokens)

    def append(self, token_id: int, *, is_stop_token: bool = False) -> str | None:
        """Add the next token.

        Args:
            is_stop_token: the completion ends with this token, whose own text is shown only where the parameters
                include stops in the output.

        Returns:
            The stop text that is now complete, if any; the text then ends before or after it, and the stream has ended.
        """
        if self._detokenizer is None or self._ended or (is_stop_token and not self._include_stop):
            return None
        self._token_ids.append(token_id)
        if self._step is None:
            return None
        self._text += self._step(token_id)
        if self._stops is None:
            return None
        found = self._cut_at_stop(self._stops) if len(self._token_ids) > self._min_tokens else None
        self._search_from = len(self._text)
        self._held_from = self._stops.held_from(self._text, self._held_from)
        return found

    def finish(self) -> str | None:
        """End the stream: what was held back belongs to the text, an incomplete character as U+FFFD. Idempotent.

        Returns:
            The stop text that the held back text completes, if any.
        """
        if self._detokenizer is None or self._ended:
            return None
        whole = self._whole_text(self._detokenizer)
        if self._step is None or whole.startswith(self._text):
            self._text = whole
        counts = len(self._token_ids) > self._min_tokens
        found = self._cut_at_stop(self._stops) if self._stops is not None and counts else None
        self._ended = True
        return found

    @property
    def text(self) -> str:
        """The text so far: before the end, without what may yet become a stop text, or an incomplete character."""
        return self._text if self._ended or self._stops is None else self._text[: self._held_from]

    def _whole_text(self, detokenizer: Detokenizer) -> str:
        skip = self._skip_special_tokens
        context, before = detokenizer.context(self._prompt_end, skip_special_tokens=skip)
        return _after(before, detokenizer.decode([*context, *self._token_ids], skip_special_tokens=skip))

    def _cut_at_stop(self, stops: _StopTexts) -> str | None:
        """Look for stops that end after `_search_from`; cut the text at the one complete first."""
        for end in range(self._search_from + 1, len(self._text) + 1):
            stop = stops.ending(self._text, end, self._held_from)
            if stop is not None:
                self._text = self._text[: end if self._include_stop else end - len(stop)]
                self._ended = True
                return stop
        return None


class _StreamDecoder:
    """Steps the tokenizer's own incremental decoder, and goes on without it where that fails.

    `DecodeStream` raises where the text of tokens changes as more of them come, which happens with some tokenizers.
    """

    def __init__(self, backend: Any, skip_special_tokens: bool, decode: Decode, context: Sequence[int]) -> None:
        self._backend = backend
        self._stream: Any = DecodeStream(ids=list(context), skip_special_tokens=skip_special_tokens)
        self._decode = decode
        self._ids = list(context)
        self._shown = len(context)
        self._offsets: _OffsetDecoder | None = None

    def step(self, token_id: int) -> str:
        if self._offsets is not None:
            return self._offsets.step(token_id)
        try:
            text: str | None = self._stream.step(self._backend, token_id)
        except Exception:  # tokenizers raises nothing narrower
            self._offsets = _OffsetDecoder(self._decode, self._ids, self._shown)
            return self._offsets.step(token_id)
        self._ids.append(token_id)
        if text is None:
            return ""
        self._shown = len(self._ids)
        return text


class _OffsetDecoder:
    """Decodes the last tokens with and without the new one; the difference is its text.

    Args:
        token_ids: before the first step.
        shown: how many of them have had their text returned.
    """

    def __init__(self, decode: Decode, token_ids: Sequence[int], shown: int) -> None:
        self._decode = decode
        self._ids = list(token_ids)
        self._prefix = max(0, shown - _MAX_CONTEXT)
        self._shown = shown

    def step(self, token_id: int) -> str:
        self._ids.append(token_id)
        before = self._decode(self._ids[self._prefix : self._shown])
        text = self._decode(self._ids[self._prefix :])
        new = _after(before, text)
        if not new or text.endswith(_REPLACEMENT):
            return ""
        self._prefix, self._shown = self._shown, len(self._ids)
        return new


def _after(before: str, text: str) -> str:
    """Return what a text has beyond the one before, at whose end a character may have been incomplete."""
    # Only what the new text has otherwise was incomplete: other replacement characters are of the text before.
    while before.endswith(_REPLACEMENT) and not text.startswith(before):
        before = before[:-1]
    return text[len(before) :]
