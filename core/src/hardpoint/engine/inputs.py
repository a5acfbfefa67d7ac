"""From what a caller passes as a prompt to token ids, checked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, NotRequired, TypeAlias, TypedDict

from msgspec import Meta

from hardpoint.executor.interrupts import allow_between
from hardpoint.interfaces.errors import (
    ConfigError,
    CorruptWeights,
    EmptyPrompt,
    InvalidRequest,
    ModelError,
    PromptTooLong,
    TokenOutOfRange,
)
from hardpoint.models import panics_as_errors, write_chat
from hardpoint.sampling import BeamSearchParams, PoolingParams, SamplingParams
from hardpoint.validation import INT32_MAX, Int64, NonNegativeInt, Validated, shown

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

Prompt: TypeAlias = "str | Sequence[int] | Mapping[str, Any] | TokenizedPrompt"
"""A text, token ids, what `PromptProcessor` made of them, or a mapping with `prompt` or `prompt_token_ids` (and `cache_salt`, which keeps
prefix caches apart), such as `TextPrompt` and `TokensPrompt`."""


class TextPrompt(TypedDict):
    """A prompt as text; `cache_salt` keeps prefix caches apart."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: Sequence[int]
    cache_salt: NotRequired[str]


Message: TypeAlias = Mapping[str, Any]
"""One message of a conversation: `role` and `content`, a text or a list of parts `{"type": "text", "text": ...}`, and whatever
else the model's chat template knows."""


_MEDIA = frozenset({"mm_processor_kwargs", "multi_modal_data", "multi_modal_uuids"})
"""Keys of vLLM's prompts that say something of pictures, sounds and films."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _PromptKeys(Validated):
    """A prompt given as a mapping."""

    _error = InvalidRequest
    _called = "a key of a prompt"

    prompt: str | None = None
    prompt_token_ids: Sequence[int] | None = None
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _TextPart(Validated):
    """A part of a message's content, as in OpenAI's interface."""

    _error = InvalidRequest
    _called = "a key of a text part"

    type: str
    text: str


@dataclass(frozen=True, slots=True)
class TokenizedPrompt(Validated):
    """A prompt as the engine takes it, which may be in another process; raises InvalidRequest."""

    _error = InvalidRequest
    _called = "a part of a tokenized prompt"

    text: str | None
    token_ids: list[Int64]
    cache_salt: str | None = None
    second_text: NonNegativeInt = 0
    """Place of the token with which the second of two texts begins, for models that tell them apart; 0 for one text."""

    def __post_init__(self) -> None:
        self._check_types()
        if self.cache_salt is not None:
            _check_unicode("cache_salt", self.cache_salt)

    def truncated(self, num_tokens: int | None, most: int) -> TokenizedPrompt:
        """Return the prompt with its last `num_tokens` tokens, -1 for `most`; None leaves it as it is."""
        if num_tokens is None:
            return self
        count = most if num_tokens == -1 else num_tokens
        dropped = len(self.token_ids) - count
        if dropped <= 0:
            return self
        second = max(self.second_text - dropped, 0)
        return replace(self, token_ids=self.token_ids[dropped:], second_text=second)

    def salted(self, cache_salt: str | None) -> TokenizedPrompt:
        """Return the prompt with its prefix cache kept apart by `cache_salt`; None shares it with all others that have none."""
        return self if cache_salt is None else replace(self, cache_salt=cache_salt)


class PromptProcessor:
    """Tokenizes prompts and checks them against the model's limits."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len

    def __call__(
        self, prompt: Prompt | TokenizedPrompt, *, reserve: int = 1, truncate: int | None = None
    ) -> TokenizedPrompt:
        """Return the checked prompt; `reserve` tokens of the context stay free for output.

        Args:
            truncate: use its last so many tokens; -1 for as many as the context holds.

        Raises EmptyPrompt, PromptTooLong, TokenOutOfRange, InvalidRequest.
        """
        if not isinstance(prompt, TokenizedPrompt):
            text, token_ids, salt = self._parse(prompt)
            if token_ids is None:
                assert text is not None
                token_ids = self.encode(text)
            self.check_ids(token_ids)  # Not all of them are integers of 64 bits.
            prompt = TokenizedPrompt(text, token_ids, salt)
        return self._checked(prompt, reserve, truncate)

    def text(
        self, text: str, *, add_special_tokens: bool = True, reserve: int = 1, truncate: int | None = None
    ) -> TokenizedPrompt:
        """Return a text as a prompt, with or without the tokens that the model's publisher adds; errors as for a call."""
        token_ids = self.encode(text, add_special_tokens=add_special_tokens)
        return self._checked(TokenizedPrompt(text, token_ids), reserve, truncate)

    def _checked(self, prompt: TokenizedPrompt, reserve: int, truncate: int | None) -> TokenizedPrompt:
        if truncate == 0:
            raise EmptyPrompt("truncate_prompt_tokens leaves no token of the prompt", hint="Give at least 1, or -1")
        prompt = prompt.truncated(truncate, self._max_model_len - reserve)
        self._check(prompt.token_ids, reserve)
        return prompt

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return a text's token ids; raises InvalidRequest when the engine has no tokenizer, or one that cannot read it."""
        _check_unicode("the prompt", text)
        tokenizer = self._need_tokenizer()
        try:
            with panics_as_errors():
                ids: list[int] = tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except Exception as error:  # nothing narrower is raised for a vocabulary without what it falls back on
            raise InvalidRequest("the model's tokenizer cannot read this text", found=str(error)) from error
        return ids

    def pair(self, text: str, second: str) -> TokenizedPrompt:
        """Return two texts as one prompt, with the tokens that the model's publisher puts between them; errors as for a call."""
        for one in (text, second):
            _check_unicode("the prompt", one)
        tokenizer = self._need_tokenizer()
        try:
            with panics_as_errors():
                encoded = tokenizer(text, second, return_token_type_ids=True)
        except Exception as error:  # as in `encode`
            raise InvalidRequest("the model's tokenizer cannot read these texts", found=str(error)) from error
        types: list[int] = encoded["token_type_ids"]
        token_ids: list[int] = encoded["input_ids"]
        self._check(token_ids, reserve=0)
        return TokenizedPrompt(None, token_ids, second_text=types.index(1) if 1 in types else 0)

    def chat(
        self,
        messages: Sequence[Message],
        template: str | None,
        add_generation_prompt: bool,
        *,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        truncate: int | None = None,
    ) -> TokenizedPrompt:
        """Return a conversation as the model's chat template writes it; raises InvalidRequest without a template.

        Args:
            continue_final_message: the prompt ends within the last message, which the model goes on with.
            tools: functions that the model may call, as OpenAI describes them.
            variables: of the template, further ones.
            truncate: as for a call.
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "a prompt that ends within the last message has no beginning of a new one",
                found="continue_final_message=True with add_generation_prompt=True",
                hint="Give add_generation_prompt=False",
            )
        tokenizer = self._need_tokenizer()
        if template is None and tokenizer.chat_template is None:
            raise InvalidRequest(
                "the model has no chat template", hint="Pass chat_template, or use generate with a plain prompt"
            )
        if not messages:
            raise EmptyPrompt("the conversation has no messages", hint="Give at least one message")
        written = [_with_plain_content(message) for message in messages]
        try:
            text = write_chat(
                tokenizer,
                written,
                template,
                add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                variables=variables,
            )
        except Exception as error:
            raise InvalidRequest(
                "the chat template cannot write this conversation",
                found=f"{type(error).__name__}: {error}",
                hint="Each message needs a 'role' that the template knows and a 'content'",
            ) from error
        return self._checked(TokenizedPrompt(text, self.encode(text, add_special_tokens=False)), 1, truncate)

    def _need_tokenizer(self) -> PreTrainedTokenizerBase:
        if self._tokenizer is None:
            raise InvalidRequest("the engine has no tokenizer", hint="Pass token ids, or make it with a tokenizer")
        return self._tokenizer

    @staticmethod
    def _parse(prompt: Prompt) -> tuple[str | None, list[int] | None, str | None]:
        if isinstance(prompt, str):
            return prompt, None, None
        if not isinstance(prompt, Mapping):
            prompt = {"prompt_token_ids": prompt}
        if any(prompt.get(key) for key in _MEDIA):
            raise InvalidRequest(
                "prompts are text: pictures, sounds and films are not supported",
                found=f"keys {sorted(prompt)}",
                hint="Give 'prompt' or 'prompt_token_ids' alone",
            )
        prompt = {key: value for key, value in prompt.items() if key not in _MEDIA}
        keys = _PromptKeys.parse(prompt)
        if (keys.prompt is None) == (keys.prompt_token_ids is None):
            raise InvalidRequest(
                "a prompt has either a text or token ids",
                found=f"keys {sorted(prompt)}",
                hint="Give 'prompt' or 'prompt_token_ids'",
            )
        return keys.prompt, None if keys.prompt_token_ids is None else list(keys.prompt_token_ids), keys.cache_salt

    def _check(self, token_ids: list[int], reserve: int) -> None:
        if not token_ids:
            raise EmptyPrompt("the prompt has no tokens", hint="Give at least one token")
        if len(token_ids) + reserve > self._max_model_len:
            raise PromptTooLong(
                f"the prompt has {len(token_ids)} tokens",
                found=f"the context is {self._max_model_len} tokens, of which {reserve} must stay free for output",
                hint="Shorten the prompt, or raise max_model_len if the model allows it",
            )
        self.check_ids(token_ids)

    def check_ids(self, token_ids: Sequence[int]) -> None:
        """Raise TokenOutOfRange for an id that is not in the vocabulary."""
        if token_ids and (min(token_ids) < 0 or max(token_ids) >= self._vocab_size):
            place = next(i for i, token in enumerate(token_ids) if not 0 <= token < self._vocab_size)
            raise TokenOutOfRange(
                f"token id {shown(token_ids[place])} at position {place} is not in the vocabulary",
                found=f"ids are 0 to {self._vocab_size - 1}",
            )


@dataclass(frozen=True, slots=True)
class RequestArguments(Validated):
    """What names and ranks a request; raises InvalidRequest."""

    _error = InvalidRequest

    request_id: str
    priority: Annotated[int, Meta(ge=-INT32_MAX, le=INT32_MAX)] = 0


def check_params(params: object, kind: type[SamplingParams] | type[PoolingParams] | type[BeamSearchParams]) -> None:
    """Raise InvalidRequest unless `params` is of the kind that a request needs."""
    if not isinstance(params, kind):
        raise InvalidRequest(f"the request's parameters must be {kind.__name__}", found=shown(params))


def weight_pairs(weights: object) -> Iterator[tuple[str, Tensor]]:
    """Return an iterator over (checkpoint name, tensor) pairs; it raises CorruptWeights at the first item that is none."""
    if isinstance(weights, str) or not isinstance(weights, Iterable):
        raise CorruptWeights(
            "weights must be pairs of a checkpoint name and a tensor",
            found=f"a {type(weights).__name__}",
            hint="Give an iterable such as `state_dict().items()`",
        )
    return map(_weight_pair, allow_between(weights))


def _weight_pair(item: object) -> tuple[str, Tensor]:
    import torch

    if isinstance(item, (tuple, list)):
        if len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], torch.Tensor):
            return item[0], item[1]
        found = f"({', '.join(type(one).__name__ for one in item)})"
    else:
        found = type(item).__name__
    raise CorruptWeights(
        "weights must be pairs of a checkpoint name and a tensor",
        found=f"an item of type {found}",
        hint="Give (name, tensor) tuples",
    )


def check_checkpoint(model: object) -> None:
    """Raise ModelError for what cannot name a checkpoint."""
    if model is not None and not isinstance(model, str):
        raise ModelError(
            "a checkpoint is named by its path",
            found=f"a {type(model).__name__}",
            hint="Give a text, or None for the checkpoint that was loaded",
        )


def as_prompts(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """Return a list of prompts; a text, a mapping, or token ids (not prompts of them) are one prompt."""
    if isinstance(prompts, (str, bytes, Mapping, TokenizedPrompt)):
        return [prompts]
    many = _as_list(prompts, "prompts must be a text, token ids, a mapping, or several of these")
    return (
        many
        if not many or isinstance(many[0], (str, Mapping, TokenizedPrompt)) or hasattr(type(many[0]), "__len__")
        else [many]
    )


def as_conversations(messages: Iterable[Message] | Iterable[Iterable[Message]]) -> list[list[Message]]:
    """Return a list of conversations; a list of messages is one."""
    accepted = "messages must be a list of mappings with 'role' and 'content', or several such lists"
    many: list[Any] = _as_list(messages, accepted)
    conversations = [many] if not many or isinstance(many[0], Mapping) else [_as_list(one, accepted) for one in many]
    if not all(isinstance(message, Mapping) for conversation in conversations for message in conversation):
        raise InvalidRequest(accepted, found=shown(messages))
    return conversations


def pair_with_params(count: int, given: Any, default: Any) -> list[Any]:
    """Return one parameter object, of the class of `default`, per prompt.

    Args:
        given: for all prompts, or one for each; None for `default`.

    Raises:
        ConfigError: there are more or fewer than prompts.
        InvalidRequest: something else than parameters was given.
    """
    kind = type(default)
    if given is None:
        return [default] * count
    if isinstance(given, kind):
        return [given] * count
    wanted = (
        f"sampling parameters must be {kind.__name__}, one or a list"
        if kind is not int
        else "priorities must be integers"
    )
    many = _as_list(given, wanted)
    if len(many) != count:
        raise ConfigError(f"{len(many)} sampling parameters for {count} prompts", hint="Give one, or one per prompt")
    for one in many:
        if not isinstance(one, kind):
            raise InvalidRequest(wanted, found=shown(one))
    return many


def _as_list(given: Any, wanted: str) -> list[Any]:
    """Return what was given one by one, read once, so that generators lose nothing; raises InvalidRequest."""
    if hasattr(type(given), "tolist"):  # numpy's and torch's
        try:
            given = given.tolist()
        except Exception as error:  # a tensor without data, for example
            raise InvalidRequest(wanted, found=f"{type(given).__name__}: {error}") from error
    if not isinstance(given, Iterable) or isinstance(given, (str, bytes, Mapping)):
        raise InvalidRequest(wanted, found=shown(given))
    return list(given)


def _with_plain_content(message: Message) -> Message:
    """Return a message whose content is a text: of a list of parts, the texts, one line each, as vLLM joins them."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return message
    texts = []
    for part in _as_list(content, "the content of a message must be a text or a list of parts"):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            raise InvalidRequest(
                "content parts other than text are not supported",
                found=f"a part of the type {shown(kind)}" if kind is not None else shown(part),
                hint="Give parts {'type': 'text', 'text': ...}",
            )
        texts.append(_TextPart.parse(part).text)
    return {**message, "content": "\n".join(texts)}


def _check_unicode(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{name} is not valid Unicode",
            found=f"a lone surrogate, {text[error.start]!r}, at position {error.start}",
            hint="Decode bytes with errors='replace'",
        ) from None
