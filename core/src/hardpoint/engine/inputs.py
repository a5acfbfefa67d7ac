"""From what a caller passes as a prompt to token ids, checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, NotRequired, TypeAlias, TypedDict

from msgspec import Meta

from hardpoint.engine.commands import EmbeddedSpans
from hardpoint.engine.media import Media, Picture
from hardpoint.engine.prompt_embeds import PromptEmbeds
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
from hardpoint.models import LightTokenizer, panics_as_errors, write_chat
from hardpoint.sampling import BeamSearchParams, PoolingParams, SamplingParams
from hardpoint.validation import INT32_MAX, Int64, Seconds, Validated, shown

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

_MANY_CHARACTERS_PER_TOKEN = 16
"""A text with more of them for each token of the context is looked at before it is tokenized."""

Prompt: TypeAlias = "str | Sequence[int] | Mapping[str, Any] | TokenizedPrompt"
"""A text, token ids, what `PromptProcessor` made of them, or a mapping with `prompt`, `prompt_token_ids` or `prompt_embeds` (and
`cache_salt`, which keeps prefix caches apart, and `multi_modal_data` with the text's pictures), such as `TextPrompt`, `TokensPrompt` and
`EmbedsPrompt`."""


class TextPrompt(TypedDict):
    """A prompt as text; `cache_salt` keeps prefix caches apart.

    `multi_modal_data` has the pictures of the text's placeholders, `{"image": picture}` or a list of them, and `multi_modal_uuids` names of
    their contents, which are compared in the place of their pixels.
    """

    prompt: str
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[Mapping[str, Any]]
    multi_modal_uuids: NotRequired[Mapping[str, Any]]


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: Sequence[int]
    cache_salt: NotRequired[str]


class EmbedsPrompt(TypedDict):
    """A prompt as embeddings [tokens, hidden_size], which stand in the place of tokens'; see `enable_prompt_embeds`."""

    prompt_embeds: Any
    cache_salt: NotRequired[str]


Message: TypeAlias = Mapping[str, Any]
"""One message of a conversation: `role` and `content`, a text or a list of parts (`{"type": "text", "text": ...}`, and for models that take
pictures `{"type": "image_url", "image_url": {"url": "data:..."}}` and `{"type": "image_pil", "image_pil": ...}`), and whatever else the
model's chat template knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _PromptKeys(Validated):
    """A prompt given as a mapping."""

    _error = InvalidRequest
    _called = "a key of a prompt"

    prompt: str | None = None
    prompt_token_ids: Sequence[int] | None = None
    prompt_embeds: Any = None
    cache_salt: str | None = None
    multi_modal_data: Any = None
    multi_modal_uuids: Any = None
    mm_processor_kwargs: Any = None


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
    second_text: Int64 = 0
    """See `SequencePooling.second_text`."""
    embedded: tuple[EmbeddedSpans, ...] = ()
    """What stands in the place of tokens' embeddings."""
    positions: Any = None
    """See `Generate.positions`."""

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
        if self.embedded:
            raise InvalidRequest(
                "a prompt with pictures or embeddings is not cut",
                found=f"{len(self.token_ids)} tokens, of which {count} would stay",
                hint="Leave truncate_prompt_tokens out",
            )
        # In a pair whose first text is cut off entirely, every token is the second text's: -1, since 0 means no second text.
        second = self.second_text and (self.second_text - dropped or -1)
        return replace(self, token_ids=self.token_ids[dropped:], second_text=second)

    def salted(self, cache_salt: str | None) -> TokenizedPrompt:
        """Return the prompt with its prefix cache kept apart by `cache_salt`; None shares it with all others that have none."""
        return self if cache_salt is None else replace(self, cache_salt=cache_salt)


class PromptProcessor:
    """Tokenizes prompts and checks them against the model's limits.

    Args:
        embeds: takes prompts of embeddings.
        separates: two texts of a pair have what the tokenizer puts between them; otherwise one follows the other.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        vocab_size: int,
        max_model_len: int,
        media: Media | None = None,
        *,
        embeds: PromptEmbeds | None = None,
        separates: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._separates = separates
        self._media = media
        self._embeds = embeds
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len

    def __call__(
        self, prompt: Prompt | TokenizedPrompt, *, reserve: int = 1, truncate: int | None = None
    ) -> TokenizedPrompt:
        """Return the checked prompt; `reserve` tokens of the context stay free for output.

        Args:
            truncate: use its last so many tokens; -1 for as many as the context holds. Of a text the special tokens around it stay, and
                where nothing is generated after it (`reserve=0`) it loses its end instead.

        Raises EmptyPrompt, PromptTooLong, TokenOutOfRange, InvalidRequest.
        """
        if not isinstance(prompt, TokenizedPrompt):
            keys = self._parse(prompt)
            pictures = self._pictures(keys)
            if pictures and keys.prompt is not None:
                prompt = self._with_pictures(keys.prompt, pictures, add_special_tokens=True).salted(keys.cache_salt)
            else:
                embedded: tuple[EmbeddedSpans, ...] = ()
                if keys.prompt_embeds is not None:
                    token_ids, embedded = self._need_embeds().prompt(keys.prompt_embeds)
                elif keys.prompt is not None:
                    self._check_length(keys.prompt, truncate)
                    token_ids = self._cut(keys.prompt, self.encode(keys.prompt), reserve, truncate)
                else:
                    token_ids = list(keys.prompt_token_ids or ())
                self.check_ids(token_ids)  # Not all of them are integers of 64 bits.
                prompt = TokenizedPrompt(keys.prompt, token_ids, keys.cache_salt, embedded=embedded)
        return self._checked(prompt, reserve, truncate)

    def text(
        self, text: str, *, add_special_tokens: bool = True, reserve: int = 1, truncate: int | None = None
    ) -> TokenizedPrompt:
        """Return a text as a prompt, with or without the tokens that the model's publisher adds; errors as for a call."""
        self._check_length(text, truncate)
        token_ids = self.encode(text, add_special_tokens=add_special_tokens)
        if add_special_tokens:
            token_ids = self._cut(text, token_ids, reserve, truncate)
        return self._checked(TokenizedPrompt(text, token_ids), reserve, truncate)

    def _cut(self, text: str, token_ids: list[int], reserve: int, truncate: int | None) -> list[int]:
        """Return a text's tokens, as many as are asked for, in which the special tokens around it stay.

        It loses its beginning where something is generated after it, else its end, as transformers and vLLM have it.
        """
        count = self._max_model_len - reserve if truncate == -1 else truncate
        if not count or (over := len(token_ids) - count) <= 0:
            return token_ids
        own = self.encode(text, add_special_tokens=False)
        around = len(token_ids) - len(own)
        begin = next((index for index in range(around + 1) if token_ids[index : index + len(own)] == own), None)
        if begin is None or over >= len(own):
            return token_ids
        begin += 0 if reserve else len(own) - over
        return token_ids[:begin] + token_ids[begin + over :]

    def _check_length(self, text: str, truncate: int | None) -> None:
        """Raise PromptTooLong for a text that no tokens of the context can stand for, before it is tokenized, which takes long."""
        if truncate is not None or len(text) <= _MANY_CHARACTERS_PER_TOKEN * self._max_model_len:
            return
        length = self._tokenizer.token_length if isinstance(self._tokenizer, LightTokenizer) else None
        if length is not None and (fewest := length.fewest_tokens(text)) > self._max_model_len:
            raise PromptTooLong(
                f"the prompt has {len(text)} characters, which are {fewest} tokens or more",
                found=f"the context is {self._max_model_len} tokens",
                hint="Shorten the prompt, or raise max_model_len if the model allows it",
            )

    def _checked(self, prompt: TokenizedPrompt, reserve: int, truncate: int | None) -> TokenizedPrompt:
        if truncate == 0:
            raise EmptyPrompt("truncate_prompt_tokens leaves no token of the prompt", hint="Give at least 1, or -1")
        prompt = prompt.truncated(truncate, self._max_model_len - reserve)
        self._check(prompt.token_ids, reserve)
        return prompt

    @property
    def pad_token_ids(self) -> list[int]:
        """The token that fills batches, of tokenizers that have one."""
        found = getattr(self._tokenizer, "pad_token_id", None)
        return [] if found is None else [int(found)]

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

    def pair(
        self, text: str, second: str, *, template: str | None = None, truncate: int | None = None
    ) -> TokenizedPrompt:
        """Return two texts as one prompt, as the model's publisher puts them together; errors as for a call.

        Args:
            template: a chat template that writes them instead, as messages of the roles "query" and "document".
            truncate: use so many tokens, -1 for as many as the context holds: texts lose their ends, the longer one first, as
                transformers' "longest_first" has it; where they are written as one text, the second alone.
        """
        for one in (text, second):
            _check_unicode("the prompt", one)
        tokenizer = self._need_tokenizer()
        if template is not None or not self._separates:

            def written(document: str) -> str:
                if template is None:
                    return text + document
                messages = [{"role": "query", "content": text}, {"role": "document", "content": document}]
                return self._write_chat(messages, template, add_generation_prompt=False)

            if truncate:
                second = self._without_end(written, second, self._max_model_len if truncate == -1 else truncate)
            return self.text(written(second), reserve=0, truncate=truncate)
        try:
            with panics_as_errors():
                encoded = tokenizer(text, second, return_token_type_ids=True)
        except Exception as error:  # as in `encode`
            raise InvalidRequest("the model's tokenizer cannot read these texts", found=str(error)) from error
        types: list[int] = encoded["token_type_ids"]
        token_ids: list[int] = encoded["input_ids"]
        # A tokenizer in Python does not say which tokens are of which text.
        if truncate and encoded.is_fast:
            count = self._max_model_len if truncate == -1 else truncate
            if len(token_ids) > count:
                kept = _longest_first(encoded.sequence_ids(0), count)
                types, token_ids = [types[index] for index in kept], [token_ids[index] for index in kept]
        pair = TokenizedPrompt(None, token_ids, second_text=types.index(1) if 1 in types else 0)
        return self._checked(pair, 0, truncate)

    def _without_end(self, written: Callable[[str], str], document: str, count: int) -> str:
        """Return as much of a document's beginning as leaves what is written of it `count` tokens; raises InvalidRequest."""
        tokenizer = self._need_tokenizer()
        over = len(self.encode(written(document))) - count
        if over <= 0:
            return document
        if not tokenizer.is_fast:  # it does not say where tokens begin
            return document
        offsets = tokenizer(document, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        begins = [begin for begin, _ in offsets]
        kept = len(begins)
        while over > 0:
            kept -= over
            if kept <= 0:
                raise InvalidRequest(
                    "truncate_prompt_tokens leaves nothing of the document",
                    found=f"{count}, and what is written beside it has more",
                    hint="Give more, or shorten the query",
                )
            over = len(self.encode(written(document[: begins[kept]]))) - count
        return document[: begins[kept]]

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
        pictures: list[Picture] = []
        written = self._written(messages, tokenizer.chat_template if template is None else template, pictures)
        text = self._write_chat(
            written,
            template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            variables=variables,
        )
        if not pictures:
            self._check_length(text, truncate)
            return self._checked(TokenizedPrompt(text, self.encode(text, add_special_tokens=False)), 1, truncate)
        return self._checked(self._with_pictures(text, pictures, add_special_tokens=False), 1, truncate)

    def _written(self, messages: Sequence[Message], template: object, pictures: list[Picture]) -> list[Message]:
        """Return messages as the chat template takes them, and add their pictures."""
        media = self._media
        if media is None or not media.takes_pictures:
            return [with_plain_content(message) for message in messages]
        in_parts = "image" in str(template)
        return [media.of_message(message, pictures, in_parts=in_parts) for message in messages]

    def _pictures(self, keys: _PromptKeys) -> list[Picture]:
        """Return a prompt's pictures."""
        if keys.mm_processor_kwargs:
            raise InvalidRequest(
                "the model's processor of pictures runs with its own settings",
                found=f"mm_processor_kwargs={shown(keys.mm_processor_kwargs)}",
                hint="Change its preprocessor_config.json",
            )
        if keys.multi_modal_data is None and keys.multi_modal_uuids is None:
            return []
        if self._media is None:
            raise InvalidRequest("the model takes no pictures", found="multi_modal_data", hint="Give text alone")
        data = {} if keys.multi_modal_data is None else keys.multi_modal_data
        pictures = self._media.of_prompt(data, {} if keys.multi_modal_uuids is None else keys.multi_modal_uuids)
        if pictures and keys.prompt is None:
            raise InvalidRequest(
                "pictures belong to a prompt that is a text", found="prompt_token_ids", hint="Give 'prompt'"
            )
        return pictures

    def _with_pictures(self, text: str, pictures: Sequence[Picture], *, add_special_tokens: bool) -> TokenizedPrompt:
        """Return a text with pictures as a prompt."""
        _check_unicode("the prompt", text)
        assert self._media is not None
        token_ids, embedded, positions = self._media.prompt(text, pictures, add_special_tokens=add_special_tokens)
        return TokenizedPrompt(text, token_ids, embedded=embedded, positions=positions)

    def _write_chat(
        self, messages: Sequence[Message], template: str | None, *, add_generation_prompt: bool, **how: Any
    ) -> str:
        try:
            return write_chat(self._need_tokenizer(), messages, template, add_generation_prompt, **how)
        except Exception as error:
            raise InvalidRequest(
                "the chat template cannot write this conversation",
                found=f"{type(error).__name__}: {error}",
                hint="Each message needs a 'role' that the template knows and a 'content'",
            ) from error

    def load_embeds(self, serialised: bytes) -> Any:
        """Return the embeddings that `torch.save` wrote; see `PromptEmbeds.load`."""
        return self._need_embeds().load(serialised)

    def _need_embeds(self) -> PromptEmbeds:
        if self._embeds is None:
            raise InvalidRequest("prompts are text or token ids here", found="prompt_embeds")
        return self._embeds

    def _need_tokenizer(self) -> PreTrainedTokenizerBase:
        if self._tokenizer is None:
            raise InvalidRequest("the engine has no tokenizer", hint="Pass token ids, or make it with a tokenizer")
        return self._tokenizer

    @staticmethod
    def _parse(prompt: Prompt) -> _PromptKeys:
        if isinstance(prompt, str):
            return _PromptKeys(prompt=prompt)
        if not isinstance(prompt, Mapping):
            prompt = {"prompt_token_ids": prompt}
        keys = _PromptKeys.parse(prompt)
        if sum(one is not None for one in (keys.prompt, keys.prompt_token_ids, keys.prompt_embeds)) != 1:
            raise InvalidRequest(
                "a prompt has either a text or token ids or embeddings",
                found=f"keys {sorted(prompt)}",
                hint="Give one of 'prompt', 'prompt_token_ids' and 'prompt_embeds'",
            )
        return keys

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


@dataclass(frozen=True, slots=True)
class Timeout(Validated):
    """Within how many seconds a request must be done; None for no limit. Raises InvalidRequest."""

    _error = InvalidRequest

    seconds: Seconds | None


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


def with_plain_content(message: Message) -> Message:
    """Return a message whose content is a text: of a list of parts, the texts, one line each, as vLLM joins them."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return message
    texts = []
    for part in _as_list(content, "the content of a message must be a text or a list of parts"):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in ("image_url", "image_pil"):
            raise InvalidRequest(
                "the model takes no pictures", found=f"a part of the type {kind!r}", hint="Give text alone"
            )
        if kind != "text":
            raise InvalidRequest(
                "content parts other than text are not supported",
                found=f"a part of the type {shown(kind)}" if kind is not None else shown(part),
                hint="Give parts {'type': 'text', 'text': ...}",
            )
        texts.append(_TextPart.parse(part).text)
    return {**message, "content": "\n".join(texts)}


def _longest_first(texts: Sequence[int | None], count: int) -> list[int]:
    """Return the places of the `count` tokens of a pair that stay; raises InvalidRequest where a text would lose all.

    Args:
        texts: which of the two each token is of, 0 or 1; None for special tokens, which stay.
    """
    lengths = texts.count(0), texts.count(1)
    left = count - texts.count(None)
    if left < 2:
        raise InvalidRequest(
            "truncate_prompt_tokens leaves nothing of one of the two texts",
            found=f"{count}, of which {texts.count(None)} are for special tokens",
            hint="Give more",
        )
    shorter = min(*lengths, left // 2)
    places = [shorter, left - shorter] if lengths[0] <= lengths[1] else [left - shorter, shorter]
    kept = []
    for index, text in enumerate(texts):
        if text is not None:
            places[text] -= 1
        if text is None or places[text] >= 0:
            kept.append(index)
    return kept


def _check_unicode(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{name} is not valid Unicode",
            found=f"a lone surrogate, {text[error.start]!r}, at position {error.start}",
            hint="Decode bytes with errors='replace'",
        ) from None
