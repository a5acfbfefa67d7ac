"""From what a caller passes as a prompt to token ids, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from hardpoint.interfaces.errors import ConfigError, EmptyPrompt, InvalidRequest, PromptTooLong, TokenOutOfRange

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or a mapping with `prompt` or `prompt_token_ids` (and `cache_salt`, which keeps prefix caches apart)."""

Message: TypeAlias = Mapping[str, Any]
"""One message of a conversation: `role` and `content`."""


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt as the engine takes it."""

    text: str | None
    token_ids: list[int]
    cache_salt: str | None = None


class PromptProcessor:
    """Tokenizes prompts and checks them against the model's limits."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len

    def __call__(self, prompt: Prompt, *, reserve: int = 1) -> TokenizedPrompt:
        """Return the checked prompt; `reserve` tokens of the context stay free for output.

        Raises EmptyPrompt, PromptTooLong, TokenOutOfRange, InvalidRequest.
        """
        text, token_ids, salt = self._parse(prompt)
        if token_ids is None:
            assert text is not None
            token_ids = self.encode(text)
        self._check(token_ids, reserve)
        return TokenizedPrompt(text, token_ids, salt)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return a text's token ids; raises InvalidRequest when the engine has no tokenizer."""
        ids: list[int] = self._need_tokenizer().encode(text, add_special_tokens=add_special_tokens)
        return ids

    def chat(self, messages: Sequence[Message], template: str | None, add_generation_prompt: bool) -> TokenizedPrompt:
        """Return a conversation as the model's chat template writes it; raises InvalidRequest without a template."""
        tokenizer = self._need_tokenizer()
        if template is None and tokenizer.chat_template is None:
            raise InvalidRequest(
                "the model has no chat template", hint="Pass chat_template, or use generate with a plain prompt"
            )
        if not messages:
            raise EmptyPrompt("the conversation has no messages", hint="Give at least one message")
        try:
            text = tokenizer.apply_chat_template(
                list(messages), chat_template=template, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:
            raise InvalidRequest(
                "the chat template cannot write this conversation",
                found=f"{type(error).__name__}: {error}",
                hint="Each message needs a 'role' that the template knows and a 'content'",
            ) from error
        token_ids = self.encode(text, add_special_tokens=False)
        self._check(token_ids, reserve=1)
        return TokenizedPrompt(text, token_ids)

    def _need_tokenizer(self) -> PreTrainedTokenizerBase:
        if self._tokenizer is None:
            raise InvalidRequest("the engine has no tokenizer", hint="Pass token ids, or make it with a tokenizer")
        return self._tokenizer

    @staticmethod
    def _parse(prompt: Prompt) -> tuple[str | None, list[int] | None, str | None]:
        if isinstance(prompt, str):
            return prompt, None, None
        if isinstance(prompt, Mapping):
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            if (text is None) == (ids is None):
                raise InvalidRequest(
                    "a prompt mapping needs either 'prompt' or 'prompt_token_ids'", found=f"keys {sorted(prompt)}"
                )
            return text, None if ids is None else _token_list(ids), prompt.get("cache_salt")
        return None, _token_list(prompt), None

    def _check(self, token_ids: list[int], reserve: int) -> None:
        if not token_ids:
            raise EmptyPrompt("the prompt has no tokens", hint="Give at least one token")
        if len(token_ids) + reserve > self._max_model_len:
            raise PromptTooLong(
                f"the prompt has {len(token_ids)} tokens",
                found=f"the context is {self._max_model_len} tokens, of which {reserve} must stay free for output",
                hint="Shorten the prompt, or raise max_model_len if the model allows it",
            )
        ids = np.asarray(token_ids)
        outside = np.flatnonzero((ids < 0) | (ids >= self._vocab_size))
        if len(outside):
            raise TokenOutOfRange(
                f"token id {token_ids[outside[0]]} at position {outside[0]} is not in the vocabulary",
                found=f"ids are 0 to {self._vocab_size - 1}",
            )


def _token_list(ids: Any) -> list[int]:
    if isinstance(ids, (bytes, str)) or not hasattr(ids, "__len__"):
        raise InvalidRequest("token ids must be a sequence of integers", found=type(ids).__name__)
    tokens = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    for token in tokens:
        if type(token) is not int and (isinstance(token, (bool, float)) or not hasattr(token, "__index__")):
            raise InvalidRequest("token ids must be integers", found=f"{token!r}")
    return [int(token) for token in tokens]


def pair_with_params(count: int, params: Any, default: Any) -> list[Any]:
    """Return one parameter object per prompt: the same for all, or a list of the same length; raises ConfigError."""
    if params is None:
        return [default] * count
    if isinstance(params, Sequence):
        if len(params) != count:
            raise ConfigError(
                f"{len(params)} sampling parameters for {count} prompts", hint="Give one, or one per prompt"
            )
        return list(params)
    return [params] * count
