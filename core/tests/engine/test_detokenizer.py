"""Text as tokens come: equal to decoding all at once, characters whole, stop texts found wherever they fall."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from hardpoint.engine import detokenizer as module
from hardpoint.engine.detokenizer import Detokenizer, TextStream
from hardpoint.models import load_tokenizer, open_model
from hardpoint.sampling import RequestOutputKind, SamplingParams

STREAMED = SamplingParams(output_kind=RequestOutputKind.DELTA, max_tokens=None)

TEXTS = [
    "The quick brown fox.",
    " leading and trailing ",
    "emoji 🌍👩‍🚀🏳️‍🌈 joined",
    "世界、こんにちは。한국어 العربية",
    "def f(x):\n\treturn {'a': x ** 2}  # ok\n\n\n",
    "e\u0301 combining, \u2028 separators, NUL \x00 and \ufffd itself",
    "<|im_start|>user\nhello<|im_end|>",
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(open_model("demo"))


class OnlyDecodes:
    """A tokenizer without a backend, like the slow ones."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def decode(self, token_ids: Sequence[int], **options: Any) -> str:
        return str(self._tokenizer.decode(token_ids, **options))


def run(
    tokenizer: Any, token_ids: Sequence[int], params: SamplingParams = STREAMED, prompt: Sequence[int] = ()
) -> tuple[list[str], str | None]:
    """Return what each token made visible, the end's part last, and the stop text that ended the stream."""
    stream = TextStream(Detokenizer(tokenizer), prompt, params)
    pieces, shown, stop = [], 0, None
    for token_id in token_ids:
        stop = stream.append(token_id)
        text = stream.text
        pieces.append(text[shown:])
        shown = len(text)
        if stop is not None:
            break
    if stop is None:
        stop = stream.finish()
    text = stream.text
    assert text.startswith("".join(pieces))
    return [*pieces, text[shown:]], stop


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", ["fast", "slow"])
def test_pieces_join_to_the_text_decoded_at_once(tokenizer: Any, text: str, skip: bool, kind: str) -> None:
    token_ids = tokenizer.encode(text)
    used = tokenizer if kind == "fast" else OnlyDecodes(tokenizer)
    pieces, _ = run(used, token_ids, STREAMED.clone(skip_special_tokens=skip))
    assert "".join(pieces) == tokenizer.decode(token_ids, skip_special_tokens=skip)
    assert "".join(pieces) == text or skip


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_random_tokens_join_to_the_text_decoded_at_once(tokenizer: Any, data: st.DataObject) -> None:
    token_ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=40))
    skip = data.draw(st.booleans())
    expected = tokenizer.decode(token_ids, skip_special_tokens=skip)
    for used in (tokenizer, OnlyDecodes(tokenizer)):
        assert "".join(run(used, token_ids, STREAMED.clone(skip_special_tokens=skip))[0]) == expected
    lazy = TextStream(
        Detokenizer(tokenizer), (), SamplingParams(skip_special_tokens=skip, output_kind=RequestOutputKind.FINAL_ONLY)
    )
    for token_id in token_ids:
        lazy.append(token_id)
    assert lazy.finish() is None
    assert lazy.text == expected


@settings(max_examples=60, deadline=None)
@given(st.text())
def test_characters_are_never_shown_in_parts(tokenizer: Any, text: str) -> None:
    token_ids = tokenizer.encode(text)
    pieces, _ = run(tokenizer, token_ids, STREAMED.clone(skip_special_tokens=False))
    assert "".join(pieces) == tokenizer.decode(token_ids)
    if "\ufffd" not in tokenizer.decode(token_ids):
        assert all("\ufffd" not in piece for piece in pieces)


def test_an_incomplete_character_at_the_end_is_shown_as_replacement(tokenizer: Any) -> None:
    token_ids = tokenizer.encode("ok 🌍")
    stream = TextStream(Detokenizer(tokenizer), (), STREAMED)
    for token_id in token_ids[:-1]:
        stream.append(token_id)
    assert stream.text == "ok"
    stream.finish()
    assert stream.text == tokenizer.decode(token_ids[:-1])
    assert "\ufffd" in stream.text


@pytest.fixture(scope="module")
def metaspace() -> Any:
    """A tokenizer in SentencePiece's manner: the first token of a text loses its leading space, bytes fall back."""
    words = ["<unk>", "<s>", "▁hello", "▁world", "!", "ing", "▁"]
    vocabulary = {token: index for index, token in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")


@pytest.mark.parametrize("kind", ["fast", "slow"])
def test_the_text_continues_the_prompt_with_its_space(metaspace: Any, kind: str) -> None:
    used = metaspace if kind == "fast" else OnlyDecodes(metaspace)
    hello, world, bang = metaspace.convert_tokens_to_ids(["▁hello", "▁world", "!"])
    for params in (STREAMED, SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY)):
        assert "".join(run(used, [world, bang], params, prompt=[1, hello])[0]) == " world!"
        assert "".join(run(used, [world, bang], params)[0]) == "world!"


@pytest.mark.parametrize("kind", ["fast", "slow"])
@pytest.mark.parametrize("before", ["好👍", "👍👍", "a👍👍👍"])
@pytest.mark.parametrize("after", ["中!", "👍", "!"])
def test_text_after_bytes_of_the_prompt_is_new_text_alone(metaspace: Any, kind: str, before: str, after: str) -> None:
    used = metaspace if kind == "fast" else OnlyDecodes(metaspace)

    def spelled(text: str) -> list[int]:
        tokens = ["!" if one == "!" else f"<0x{byte:02X}>" for one in text for byte in one.encode()]
        return list(metaspace.convert_tokens_to_ids(tokens))

    for params in (STREAMED, SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY)):
        assert "".join(run(used, spelled(after), params, prompt=spelled(before))[0]) == after


@pytest.mark.parametrize("kind", ["fast", "slow"])
@pytest.mark.parametrize(
    ("prompt", "cut", "text", "shown"),
    [
        ("a word \ufffd", 0, " and fish.", " and fish."),
        ("fun 🎉", 1, "🎉 ok", "🎉 ok"),
        ("fun \ufffd\ufffd🎉", 1, "🎉 ok", "🎉 ok"),
    ],
    ids=["ends with U+FFFD", "cut within a character", "cut within a character after U+FFFD"],
)
def test_nothing_of_a_prompt_is_in_the_text(
    tokenizer: Any, kind: str, prompt: str, cut: int, text: str, shown: str
) -> None:
    """Nor is a stop text that the prompt alone has."""
    used = tokenizer if kind == "fast" else OnlyDecodes(tokenizer)
    known = tokenizer.encode(prompt)
    new = [*known[len(known) - cut :], *tokenizer.encode(text.removeprefix("🎉") if cut else text)]
    for params in (STREAMED, STREAMED.clone(stop=["word", "fun"]), SamplingParams(max_tokens=99)):
        pieces, stop = run(used, new, params, prompt=known[: len(known) - cut])
        assert ("".join(pieces), stop) == (shown, None)


@pytest.mark.parametrize("kind", ["fast", "slow"])
def test_bytes_that_fall_back_make_whole_characters(metaspace: Any, kind: str) -> None:
    used = metaspace if kind == "fast" else OnlyDecodes(metaspace)
    token_ids = metaspace.convert_tokens_to_ids(["▁hello", *(f"<0x{byte:02X}>" for byte in "世🌍".encode()), "!"])
    pieces, _ = run(used, token_ids)
    assert "".join(pieces) == metaspace.decode(token_ids) == "hello世🌍!"
    assert all("\ufffd" not in piece for piece in pieces)


def test_a_failing_incremental_decoder_is_gone_on_without(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = module.DecodeStream

    class Fails:
        def __init__(self, **options: Any) -> None:
            self._stream, self._steps = real(**options), 0

        def step(self, backend: Any, token_id: int) -> str | None:
            self._steps += 1
            if self._steps == 6:
                raise Exception("Invalid prefix encountered")
            text: str | None = self._stream.step(backend, token_id)
            return text

    monkeypatch.setattr(module, "DecodeStream", Fails)
    text = "12🌍 世界 three 世界🌍 four five"
    assert "".join(run(tokenizer, tokenizer.encode(text))[0]) == text


def cut(text: str, stops: Sequence[str], include: bool) -> tuple[str, str | None]:
    """The definition, character by character."""
    for length in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:length].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return (text[:length] if include else text[: length - len(longest)]), longest
    return text, None


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_stop_texts_cut_as_if_the_text_came_by_characters(tokenizer: Any, data: st.DataObject) -> None:
    text = data.draw(st.one_of(st.sampled_from(TEXTS), st.text("ab \n🌍é", max_size=30)))
    stops = data.draw(st.lists(st.text("ab \n🌍équick", min_size=1, max_size=4), min_size=1, max_size=3))
    include = data.draw(st.booleans())
    params = STREAMED.clone(stop=stops, include_stop_str_in_output=include, skip_special_tokens=False)
    token_ids = tokenizer.encode(text)
    for used in (tokenizer, OnlyDecodes(tokenizer)):
        pieces, stop = run(used, token_ids, params)
        assert ("".join(pieces), stop) == cut(tokenizer.decode(token_ids), stops, include)


@pytest.mark.parametrize("split", range(1, 12))
def test_text_that_may_begin_a_stop_text_is_held_back(tokenizer: Any, split: int) -> None:
    text = "one STOP HERE two"
    token_ids = [tokenizer.encode(character)[0] for character in text]
    params = STREAMED.clone(stop=["STOP HERE", "STOP it"])
    stream = TextStream(Detokenizer(tokenizer), (), params)
    for token_id in token_ids[:split]:
        assert stream.append(token_id) is None
    assert stream.text == text[: min(split, 4)]


def test_held_back_text_that_was_no_stop_text_is_shown_at_the_end(tokenizer: Any) -> None:
    stream = TextStream(Detokenizer(tokenizer), (), STREAMED.clone(stop="world peace"))
    for token_id in tokenizer.encode("hello world"):
        assert stream.append(token_id) is None
    assert stream.text == "hello "
    stream.finish()
    assert stream.text == "hello world"


@settings(max_examples=100, deadline=None)
@given(
    text=st.text("ab", max_size=24),
    stops=st.lists(st.text("ab", min_size=1, max_size=9), min_size=1, max_size=5),
    min_tokens=st.integers(0, 9),
)
def test_what_is_held_back_is_the_longest_end_that_begins_a_stop_text(
    tokenizer: Any, text: str, stops: list[str], min_tokens: int
) -> None:
    stream = TextStream(Detokenizer(tokenizer), (), STREAMED.clone(stop=stops, min_tokens=min_tokens))
    longest = max(map(len, stops))
    for count in range(1, len(text) + 1):
        found = stream.append(tokenizer.encode(text[count - 1])[0])
        if count > min_tokens and (complete := [one for one in stops if text[:count].endswith(one)]):
            assert found == max(complete, key=len)
            return
        assert found is None
        ends = (text[start:count] for start in range(max(0, count - longest + 1), count))
        held = next((end for end in ends if any(one.startswith(end) for one in stops)), "")
        assert stream.text + held == text[:count]


def test_thousands_of_stop_texts_cost_a_token_little(tokenizer: Any) -> None:
    """It is the thread of all of a server's clients that looks for them."""
    stops = [f"{number * 7919 % 10_007:05} stop" for number in range(9_999)] + ["a" * 100_000]
    stream = TextStream(Detokenizer(tokenizer), (), STREAMED.clone(stop=stops))
    word = tokenizer.encode(" aaaa")
    start = time.process_time()
    for token_id in word * (400 // len(word)):
        assert stream.append(token_id) is None
        assert stream.text
    assert time.process_time() - start < 0.4


def test_stop_texts_do_not_count_before_min_tokens(tokenizer: Any) -> None:
    token_ids = tokenizer.encode("a.b.c.d")
    params = STREAMED.clone(stop=".", min_tokens=4)
    assert len(token_ids) == 7
    pieces, stop = run(tokenizer, token_ids, params)
    assert ("".join(pieces), stop) == ("a.b.c", ".")


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY])
@pytest.mark.parametrize(("include", "expected"), [(False, "hello"), (True, "hello!")])
def test_a_stop_tokens_text_is_shown_only_if_asked_for(
    tokenizer: Any, kind: RequestOutputKind, include: bool, expected: str
) -> None:
    hello, bang = tokenizer.encode("hello!")
    params = SamplingParams(output_kind=kind, stop_token_ids=[bang], include_stop_str_in_output=include)
    stream = TextStream(Detokenizer(tokenizer), (), params)
    stream.append(hello)
    stream.append(bang, is_stop_token=True)
    stream.finish()
    assert stream.text == expected


@pytest.mark.parametrize("tokenizer_is_missing", [True, False])
def test_without_detokenization_there_is_no_text(tokenizer_is_missing: bool) -> None:
    class Refuses:
        def decode(self, token_ids: Sequence[int], **options: Any) -> str:
            raise AssertionError("decoded")

    stream = TextStream(None if tokenizer_is_missing else Detokenizer(Refuses()), [1], SamplingParams(detokenize=False))
    assert stream.append(5) is None
    assert stream.text == ""
    stream.finish()
    assert stream.text == ""


def test_nothing_is_decoded_before_the_end_unless_it_is_needed(tokenizer: Any) -> None:
    class Counts(OnlyDecodes):
        calls = 0

        def decode(self, token_ids: Sequence[int], **options: Any) -> str:
            self.calls += 1
            return super().decode(token_ids, **options)

    counting = Counts(tokenizer)
    token_ids = tokenizer.encode("a longer text of some tokens")
    stream = TextStream(Detokenizer(counting), token_ids, SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY))
    for token_id in token_ids:
        stream.append(token_id)
    assert counting.calls == 0
    stream.finish()
    assert stream.text == "a longer text of some tokens"
    assert counting.calls <= 2


def test_a_tokens_text_alone_shows_special_tokens(tokenizer: Any) -> None:
    detokenizer = Detokenizer(tokenizer)
    (end,) = tokenizer.encode("<|im_end|>")
    assert detokenizer.token_text(end) == detokenizer.decode([end]) == "<|im_end|>"
    assert detokenizer.decode([end], skip_special_tokens=True) == ""


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_tokens_join_to_their_text(tokenizer: Any, text: str) -> None:
    detokenizer = Detokenizer(tokenizer)
    token_ids = tokenizer.encode(text)
    assert b"".join(map(detokenizer.token_bytes, token_ids)).decode() == text


def test_bytes_of_a_sentencepiece_vocabulary() -> None:
    backend = Tokenizer(models.BPE(vocab={"a": 0, "<0xF0>": 1, "<0x9F>": 2}, merges=[]))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    detokenizer = Detokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert [detokenizer.token_bytes(token_id) for token_id in range(3)] == [b"a", b"\xf0", b"\x9f"]
