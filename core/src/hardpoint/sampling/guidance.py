"""Where a text stands in its grammar, and which tokens may follow: llguidance's work, done in a thread of its own.

A grammar is text until a sequence begins: it crosses processes with its request. Each sequence is followed by a `Guide`, whose next mask
is made while the model computes: from the moment that a token is on the host until the next one is sampled. So are those behind guesses.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np

from hardpoint.interfaces.batch import Int32Array, SequenceSampling
from hardpoint.interfaces.errors import ConfigError, InvalidSamplingParams
from hardpoint.sampling.masks import token_mask

_COMPILED = 32
"""Grammars that are kept compiled, those used last."""

_SHOWN, _LINES = 200, 8
"""Characters and lines of a reason."""

_STACK = 512 << 20
"""Bytes. llguidance recurses once for each rule that names another: a grammar of `MAX_GRAMMAR_BYTES` takes more than a thread usually has,
which would end the process."""

_starting = threading.Lock()
"""Held while the process's size of new stacks is another one."""

_TOKENIZERS = 4
"""Models whose tokenizers are kept; each takes some 100 bytes a token."""

_MAX_STATES = 50_000
"""Of a lexer, 1 to 2 kB each (llguidance, LLParserLimits). What else bounds a grammar's time are its length, and llguidance's own
limits: fuel of 20 ms for its expressions, and of 14 ms for each mask."""


def llguidance() -> Any:
    """Return the library; raises ConfigError where it is not installed."""
    try:
        import llguidance as library
    except ImportError as error:
        raise ConfigError(
            "structured outputs need llguidance, which is not installed",
            found=str(error),
            hint="Install the extra: hardpoint[structured]",
        ) from error
    return library


class GrammarTokenizer:
    """A model's vocabulary as llguidance sees it.

    Attributes:
        tokenizer: llguidance's, whose end of text is `end`.
        end: id of a token of its own, which no model has: it may follow where the grammar may end.

    Args:
        backend: a tokenizer of the `tokenizers` library.
        vocab_size: columns of the model's logits, which may be more or fewer than the tokenizer's tokens.

    Raises InvalidSamplingParams for a tokenizer whose tokens are not known as bytes.
    """

    def __init__(self, backend: Any, vocab_size: int) -> None:
        own = type(backend).from_str(backend.to_str())
        own.no_padding()
        own.no_truncation()
        name = "<|end of grammar|>"
        own.add_special_tokens([name])
        self.end: int = own.token_to_id(name)
        size = max(self.end + 1, vocab_size)
        try:
            self.tokenizer = llguidance().LLTokenizer(own.to_str(), n_vocab=size, eos_token=self.end)
        except ValueError as error:
            raise InvalidSamplingParams(
                "structured_outputs need a tokenizer that tells the bytes of each token",
                found=str(error)[:_SHOWN],
                hint="Leave structured_outputs out, or give a tokenizer with a decoder of bytes, WordPiece or Metaspace",
            ) from error
        self.words = -(-size // 32)

    def mask(self, matcher: Any) -> Int32Array | None:
        """Return int32[words] with the bits of the tokens that may come next, `end` among them; None after a failure of the matcher."""
        words = np.zeros(self.words, np.int32)
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, self.words * 4)
        return None if matcher.is_error() else words


_loading = threading.Lock()
"""Held while a tokenizer is made, so that requests that come together make one."""


@lru_cache(_TOKENIZERS)
def _tokenizer_of(load: Callable[[], Any], vocab_size: int) -> GrammarTokenizer:
    return GrammarTokenizer(load(), vocab_size)


class Grammars:
    """The grammars of one model.

    Args:
        load: returns the model's tokenizer, of the `tokenizers` library; called with the first grammar, in the thread that compiles it.
            What equal ones return is shared in a process, by an engine and its client.
        vocab_size: columns of the model's logits.
    """

    def __init__(self, load: Callable[[], Any], vocab_size: int) -> None:
        self._load, self._vocab_size = load, vocab_size
        self._thread: ThreadPoolExecutor | None = None
        self._compiled = lru_cache(_COMPILED)(self._compile)

    def check(self, sampling: SequenceSampling) -> None:
        """Compile a sequence's grammar, which takes milliseconds, 0.5 s at most, and with the first one the tokenizer's 0.3 s and more.

        Raises InvalidSamplingParams for one that is wrong or takes too much, or where nothing can begin a text of it that the sequence's
        other parameters allow; ConfigError without llguidance.
        """
        guide = Guide(sampling, self._vocab_size)
        guide.begin(self)
        banned = [token for token, bias in sampling.logit_bias.items() if bias == -math.inf]
        (mask,) = guide.masks()
        if not (mask & ~token_mask(self._vocab_size, banned)).any():
            raise InvalidSamplingParams(
                "structured_outputs need a token that may begin the text",
                found="none that allowed_token_ids, stop_token_ids and bad_words leave",
                hint="Leave these out, or allow what the grammar needs",
            )

    def begin(self, sequences: Sequence[SequenceSampling]) -> list[Guide]:
        """Return the guides of sequences that have a grammar, whose first masks are being made."""
        guides = [Guide(one, self._vocab_size) for one in sequences]

        def work() -> None:
            for guide in guides:
                guide.try_to_begin(self)

        self._submit(work, guides)
        return guides

    def tokenizer(self) -> GrammarTokenizer:
        """Return the model's tokenizer, which is made once; raises ConfigError, InvalidSamplingParams, ModelError."""
        with _loading:
            return _tokenizer_of(self._load, self._vocab_size)

    def beginning(self, text: str) -> tuple[Any, Int32Array]:
        """Return an own matcher at a grammar's beginning, and what may come first, as `GrammarTokenizer.mask`; raises as `check`."""
        matcher, mask = self._compiled(text)
        return matcher.deep_copy(), mask.copy()

    def advance(self, given: Sequence[tuple[Guide, Sequence[int]]]) -> None:
        """Give sequences the tokens that they were sampled, and begin to make their next masks."""

        def work() -> None:
            for guide, tokens in given:
                guide.advance(tokens)

        self._submit(work, [guide for guide, _ in given])

    def prefetch_masks(self, given: Sequence[tuple[Guide, Sequence[int]]]) -> None:
        """Begin to make the masks behind guesses at sequences' next tokens, and behind those that were given before."""

        def work() -> None:
            for guide, tokens in given:
                guide.prefetch_masks(tokens)

        self._submit(work, [guide for guide, _ in given])

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
            self._thread = None

    def _submit(self, work: Callable[[], None], guides: Sequence[Guide]) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "hardpoint-grammars")
            with _deep_stack():
                self._thread.submit(int)
        done = self._thread.submit(work)
        for guide in guides:
            guide.pending = done

    def _compile(self, text: str) -> tuple[Any, Int32Array]:
        """Return a matcher at the grammar's beginning and what may come first, of both of which sequences take copies."""
        library, tokenizer = llguidance(), self.tokenizer()
        limits = library.LLParserLimits(max_lexer_states=_MAX_STATES, verbose_errors=False)

        def work() -> tuple[Any, Int32Array]:
            matcher = library.LLMatcher(tokenizer.tokenizer, text, log_level=0, limits=limits)
            if matcher.is_error():
                raise InvalidSamplingParams("structured_outputs cannot be compiled", found=_reason(matcher))
            mask = tokenizer.mask(matcher)
            if mask is None:
                raise InvalidSamplingParams("structured_outputs allow no text", found=_reason(matcher))
            return matcher, mask

        with ThreadPoolExecutor(1) as thread:
            with _deep_stack():
                making = thread.submit(work)
            return making.result()


class Guide:
    """One sequence's place in its grammar.

    Attributes:
        pending: done once the masks are those of the next token, and of what was guessed.
        failure: why no token can follow; None while there is nothing wrong.
        guesses: at the next tokens.
    """

    def __init__(self, sampling: SequenceSampling, vocab_size: int) -> None:
        assert sampling.grammar is not None
        self.pending: Future[Any] | None = None
        self.failure: str | None = None
        self._grammar = sampling.grammar
        self._stop = token_mask(vocab_size, sampling.stop_token_ids)
        allowed = sampling.allowed_token_ids
        self._allowed = None if allowed is None else token_mask(vocab_size, allowed)
        self._min_tokens, self._count = sampling.min_tokens, 0
        self._mask: Int32Array = np.zeros_like(self._stop)
        self._matcher: Any = None
        self._tokenizer: GrammarTokenizer | None = None
        self.guesses: list[int] = []
        self._foreseen: list[Int32Array] = []
        self._ahead: Any = None

    def masks(self) -> list[Int32Array]:
        """Wait for the mask of the next token, and those behind each guess that the grammar goes on with, and return them.

        They are as in `SamplingTables.masks`; empty after a failure.
        """
        if self.pending is not None:
            self.pending.result()
        return [self._mask, *self._foreseen]

    def begin(self, grammars: Grammars) -> None:
        """Make the first mask; raises as `Grammars.check`."""
        self._tokenizer = grammars.tokenizer()
        self._matcher, mask = grammars.beginning(self._grammar)
        self._mask = self._narrowed(mask, self._count)

    def try_to_begin(self, grammars: Grammars) -> None:
        """Make the first mask; what fails is the sequence's failure."""
        try:
            self.begin(grammars)
        except Exception as error:
            self._fail(str(error))

    def advance(self, token_ids: Sequence[int]) -> None:
        """Take the tokens that were sampled and make the next mask; guesses are forgotten."""
        self._count += len(token_ids)
        self.guesses, self._foreseen, self._ahead = [], [], None
        if self.failure is not None:
            return
        try:
            # One that is not of the grammar is a stop token, after which only others may follow, if anything does.
            for token in token_ids:
                self._matcher.try_consume_tokens([token])
            self._fill()
        except Exception as error:
            self._fail(str(error))

    def prefetch_masks(self, token_ids: Sequence[int]) -> None:
        """Make the masks behind further guesses, up to the first that the grammar does not go on with.

        What fails so far ahead is no failure of the sequence: it is one once the guesses before it were sampled.
        """
        for token in token_ids:
            goes_on = self.failure is None and len(self._foreseen) == len(self.guesses)
            self.guesses.append(token)
            try:
                if goes_on and self._ahead is None:
                    self._ahead = self._matcher.deep_copy()
                if goes_on and self._ahead.try_consume_tokens([token]) == 1:
                    mask = self._mask_of(self._ahead, self._count + len(self.guesses))
                    if mask is not None:
                        self._foreseen.append(mask)
            except Exception:
                self._ahead = None

    def _fill(self) -> None:
        mask = self._mask_of(self._matcher, self._count)
        if mask is None:
            self._fail(_reason(self._matcher))
        else:
            self._mask = mask

    def _mask_of(self, matcher: Any, count: int) -> Int32Array | None:
        """Return the mask of the token after `count` others; None after a failure of the matcher."""
        assert self._tokenizer is not None
        mask = self._tokenizer.mask(matcher)
        return None if mask is None else self._narrowed(mask, count)

    def _narrowed(self, words: Int32Array, count: int) -> Int32Array:
        """Return the mask of the token after `count` others, of what the grammar allows there; `words` are written."""
        assert self._tokenizer is not None
        place, bit = divmod(self._tokenizer.end, 32)
        flag = np.array(1 << bit, np.uint32).view(np.int32)
        may_end = bool(words[place] & flag)
        words[place] &= ~flag
        mask = words[: len(self._stop)]
        if may_end:
            mask |= self._stop
        if self._allowed is not None:
            mask &= self._allowed
        if count < self._min_tokens:
            longer = mask & ~self._stop
            # Where the grammar has come to its end there is nothing else.
            mask = longer if longer.any() else mask
        return mask

    def _fail(self, reason: str) -> None:
        self.failure = f"the grammar of structured_outputs: {reason}"
        self._mask = np.zeros_like(self._stop)


def _reason(matcher: Any) -> str:
    """Return what is wrong with a matcher, in lines that can be read, without the library's own stack."""
    text: str = matcher.get_error().partition("<backtrace>")[0].replace("<non-verbose/>", "").strip()
    text = text.replace(
        "NoExtensionBias", "no token goes on with the text, which cannot end here either (NoExtensionBias)"
    )
    lines = [line if len(line) <= _SHOWN else f"{line[:_SHOWN]}..." for line in text.splitlines()]
    return "\n".join(lines[:_LINES])


@contextmanager
def _deep_stack() -> Iterator[None]:
    """Have threads that start within have a stack for the deepest grammar, of which they take what they use."""
    with _starting:
        before = threading.stack_size(_STACK)
        try:
            yield
        finally:
            threading.stack_size(before)
