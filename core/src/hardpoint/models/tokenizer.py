"""Tokenizers, from a model folder or from a GGUF file's metadata.

They are transformers' fast ones. Where the rules of one are known here, or its file holds them all, the `tokenizers` library alone
reads it, which spares a start the seconds that transformers takes to import; transformers then stands behind it for what the engine
does not need (`LightTokenizer`).
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from hardpoint.interfaces.errors import CorruptWeights, ModelError
from hardpoint.models.source import ModelSource, open_model
from hardpoint.models.token_length import TokenLength, token_length
from hardpoint.validation import Validated, shown
from hardpoint.weights.gguf_file import GGUFFile, read_gguf

_TOKENIZER_KEYS = {
    name: f"tokenizer.ggml.{key}"
    for name, key in {
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
    }.items()
}
logger = logging.getLogger(__name__)

# Vocabularies whose merges were learned with every digit apart (llama.cpp, src/llama-vocab.cpp).
_DIGITS_APART = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
# Those for which a file without the flag means that texts begin with BOS, and a word that is a token is not merged (the same source).
_LLAMA3_LIKE = frozenset(
    ["llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano", "tekken"]
)
_BEGINS_WITH_BOS = _LLAMA3_LIKE | {"chameleon"}
_IGNORES_MERGES = _LLAMA3_LIKE | {"minicpm5", "youtu", "granite-embed-multi-97m"}
_GPT2_SPLIT = frozenset({None, "default", "gpt-2", "mpt", "olmo", "phi-2", "jais", "trillion", "granite-docling"})
_VOCABULARY_FILES = ("tokenizer.json", "*.model", "vocab.json", "vocab.txt", "tekken.json", "*.tiktoken")
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
_USUAL_TOKENS = {*_SPECIAL_TOKENS, "sep_token", "cls_token", "mask_token"}
_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes of transformers that take a tokenizer.json as it is."""
_CHANGES_BACKEND = ("add_bos_token", "add_eos_token", "add_prefix_space", "auto_map")
"""Settings by which they do not, or may not, whatever they are."""
_CHANGES_WHERE_SET = ("extra_special_tokens", "fix_mistral_regex", "split_special_tokens")
"""The same, unless they are false or empty."""
_LONG_TEXT = 10_000
"""Characters, which take about 2 ms."""
_SPACE = "\t"
"""What templates put behind no text of their own."""
_CONTROL, _USER_DEFINED = 3, 4
"""Types of tokens in a GGUF file (llama.cpp, llama_token_type)."""


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Make a RuntimeError of a panic in the tokenizers library, which is no Exception and would pass every handler."""
    try:
        yield
    except BaseException as error:
        if type(error).__module__ == "pyo3_runtime":
            raise RuntimeError(str(error)) from error
        raise


class LightTokenizer:
    """A fast tokenizer that encodes and decodes without transformers, and is transformers' own in everything else.

    Attributes:
        backend_tokenizer: of the `tokenizers` library.
        chat_template: in Jinja, None where there is none.
        special_tokens_map: texts of special tokens by the names under which templates know them.

    Args:
        load: makes transformers' tokenizer of the same vocabulary; called when something else is asked for.
        special: the map of special tokens; None where transformers' tokenizer is to be asked for it.
    """

    def __init__(
        self,
        backend: Tokenizer,
        chat_template: str | None,
        load: Callable[[], Any],
        special: Mapping[str, str] | None = None,
    ) -> None:
        self.backend_tokenizer = backend
        self.chat_template = chat_template
        if special is not None:
            self.special_tokens_map = special
        self._load = load

    @cached_property
    def token_length(self) -> TokenLength | None:
        """How much text a token stands for; None where that is not known for sure."""
        return token_length(self.backend_tokenizer)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return a text's token ids."""
        backend = self.backend_tokenizer
        if len(text) < _LONG_TEXT:
            encoded = backend.encode(text, add_special_tokens=add_special_tokens)
        else:
            # The library lets other threads run only while it encodes a batch.
            (encoded,) = backend.encode_batch([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoded.ids
        return ids

    def decode(self, token_ids: Any, **options: Any) -> Any:
        """Return the text of tokens; see transformers."""
        return self._transformers.decode(token_ids, **options)

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """Return a conversation as the model reads it; see transformers. Templates are not bounded here: see `write_chat`."""
        return self._transformers.apply_chat_template(conversation, **{"chat_template": self.chat_template, **options})

    def __call__(self, *given: Any, **options: Any) -> Any:
        return self._transformers(*given, **options)

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        return len(self._transformers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transformers, name)

    @cached_property
    def _transformers(self) -> Any:
        return self._load()


def write_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    template: str | None,
    add_generation_prompt: bool,
    *,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Return a conversation as the model reads it; raises whatever a template raises.

    Args:
        template: in Jinja, or the name of one of the tokenizer's; None for the tokenizer's own.
        continue_final_message: the text ends where the last message's content does, and the model goes on with it.
        tools, variables: see `chat_template.render`.
    """
    own = tokenizer.chat_template
    if isinstance(own, Mapping):
        usual = "tool_use" if tools and "tool_use" in own else "default"
        template = own.get(usual if template is None else template, template)
    text = own if template is None else template
    if not isinstance(text, str):
        raise TypeError(f"{shown(text)} is no chat template")
    from hardpoint.models.chat_template import render

    special = {
        name: list(map(str, token)) if isinstance(token, list) else str(token)
        for name, token in tokenizer.special_tokens_map.items()
    }
    if not continue_final_message:
        return render(text, messages, tools, variables, add_generation_prompt=add_generation_prompt, **special)
    mark = secrets.token_hex(16)
    content, end = _marked(messages[-1].get("content"), mark)
    messages = [*messages[:-1], {**messages[-1], "content": content}]
    made = render(text, messages, tools, variables, add_generation_prompt=add_generation_prompt, **special)
    if mark not in made:
        raise ValueError("the template leaves the last message out, so that it cannot be continued")
    begun, _, rest = made.rpartition(mark)
    # A template that takes the space around texts away did not see that this one has some before the mark.
    return begun if rest.startswith(_SPACE) else begun.removesuffix(end[len(end.rstrip()) :])


def _marked(content: Any, mark: str) -> tuple[Any, str]:
    """Return a message's content with a mark and some space behind its text, and the text; of parts, it is the last one's."""
    if not isinstance(content, (list, tuple)):
        text = str(content or "")
        return f"{text}{mark}{_SPACE}", text
    of_texts = [number for number, part in enumerate(content) if isinstance(part, Mapping) and "text" in part]
    if not of_texts:
        raise ValueError("the last message has no text that can be continued")
    number = of_texts[-1]
    marked, text = _marked(content[number]["text"], mark)
    return [*content[:number], {**content[number], "text": marked}, *content[number + 1 :]], text


@dataclass(frozen=True)
class TokenizerBackend:
    """Loads a tokenizer of the `tokenizers` library; equal ones load the same.

    Attributes:
        model: as `open_model` takes it, with `load_format`.
    """

    model: str
    load_format: str = "auto"
    trust_remote_code: bool = False

    @classmethod
    def of(cls, model: str, tokenizer: str | None, load_format: str, trust_remote_code: bool) -> TokenizerBackend:
        """Return that of a model, or of the tokenizer that is used in its place."""
        if tokenizer is None:
            return cls(model, load_format, trust_remote_code)
        # It needs no weights.
        return cls(tokenizer, "dummy", trust_remote_code)

    def __call__(self) -> Tokenizer:
        """Load it; raises ModelError."""
        source = open_model(self.model, load_format=self.load_format, trust_remote_code=self.trust_remote_code)
        backend: Tokenizer = load_tokenizer(source, self.trust_remote_code).backend_tokenizer
        return backend


def load_tokenizer(source: ModelSource, trust_remote_code: bool = False) -> Any:
    """Return the model's tokenizer, a transformers fast tokenizer or a `LightTokenizer`, with its chat template; raises ModelError."""
    if source.gguf is not None:
        light = _light_from_gguf(source.gguf)
        return _from_gguf(source.gguf) if light is None else light
    if not any(any(source.path.glob(pattern)) for pattern in _VOCABULARY_FILES):
        # transformers makes an empty tokenizer for some architectures then.
        raise ModelError(
            f"{source.path} has no tokenizer",
            found=f"none of {', '.join(_VOCABULARY_FILES)}",
            hint="Put the model's tokenizer files beside its config.json",
        )
    lowers = source.pooling_files.lowers
    light = None if lowers else _light_from_folder(source.path)
    tokenizer = _from_folder(source.path, trust_remote_code) if light is None else light
    if tokenizer.chat_template is None:
        tokenizer.chat_template = _template_of_processor(source.path)
    if lowers:
        backend = tokenizer.backend_tokenizer
        own = [] if backend.normalizer is None else [backend.normalizer]
        backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own])
    return tokenizer


def end_of_text(folder: Path) -> int | None:
    """Return the token that ends texts by a folder's tokenizer, None where its files do not say; without loading it.

    What is wrong with the files is said where it is loaded.
    """
    try:
        settings = _read_beside(folder / "special_tokens_map.json") | _read_beside(folder / "tokenizer_config.json")
        named = settings.get("eos_token")
        text = named["content"] if isinstance(named, dict) else named
        if text is None:
            return None
        ids = {token["content"]: int(index) for index, token in (settings.get("added_tokens_decoder") or {}).items()}
        if text not in ids:
            vocabulary = _read_beside(folder / "tokenizer.json")
            ids = {token["content"]: token["id"] for token in vocabulary.get("added_tokens") or ()}
        found = ids.get(text)
    except (ValueError, OSError, RecursionError, TypeError, LookupError, AttributeError):
        return None
    return found if type(found) is int and found >= 0 else None


def _template_of_processor(folder: Path) -> str | None:
    """Return the chat template that models with a processor of pictures were published with, beside their tokenizer's files."""
    file = folder / "chat_template.json"
    if not file.is_file():
        return None
    try:
        template = json.loads(file.read_text(encoding="utf-8"))["chat_template"]
        if not isinstance(template, str):
            raise TypeError(f"chat_template is {type(template).__name__}")
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise ModelError(f"{file} has no chat template", found=str(error), hint="Download the file again") from error
    return template


def _from_folder(folder: Path, trust_remote_code: bool = False) -> Any:
    from transformers import AutoTokenizer

    try:
        with panics_as_errors():
            return AutoTokenizer.from_pretrained(
                str(folder), trust_remote_code=trust_remote_code, local_files_only=True
            )
    except Exception as error:  # transformers raises whatever a missing or damaged file led to
        raise ModelError(
            f"{folder} has no usable tokenizer",
            found=str(error).splitlines()[0] if str(error) else type(error).__name__,
            hint="Put the model's tokenizer files beside its config.json",
        ) from error


def _light_from_folder(folder: Path) -> LightTokenizer | None:
    """Return the tokenizer of a folder whose tokenizer.json is all of it, None where transformers' classes may change it."""
    file, settings = folder / "tokenizer.json", folder / "tokenizer_config.json"
    try:
        given = json.loads(settings.read_text(encoding="utf-8"))
        numbered: dict[str, int] = {}
        if "added_tokens_decoder" not in given:
            # Older folders say in files of their own what else is of the vocabulary.
            given |= _read_beside(folder / "special_tokens_map.json")
            numbered = _read_beside(folder / "added_tokens.json")
        changes = any(given.get(key) is not None for key in _CHANGES_BACKEND)
        if given.get("tokenizer_class") not in _PLAIN_CLASSES or changes or any(map(given.get, _CHANGES_WHERE_SET)):
            return None
        template = given.get("chat_template")
        beside = folder / "chat_template.jinja"
        if beside.is_file():
            template = beside.read_text(encoding="utf-8")
        if (folder / "additional_chat_templates").exists() or not isinstance(template, (str, type(None))):
            return None
        with panics_as_errors():
            backend = Tokenizer.from_file(str(file))
        added = backend.get_added_tokens_decoder()
        special = {token.content for token in added.values() if token.special}
        if not special.issuperset(_named_tokens(given)):
            return None
        listed = {int(index): AddedToken(**token) for index, token in (given.get("added_tokens_decoder") or {}).items()}
        # Their representations tell how they take the space around them.
        if any(index not in added or repr(added[index]) != repr(token) for index, token in listed.items()):
            return None
        if any(index not in added or added[index].content != text for text, index in numbered.items()):
            return None
    except Exception:  # whatever is wrong with the files, transformers says it
        return None
    backend.no_padding()
    backend.no_truncation()
    return LightTokenizer(backend, template, partial(_from_folder, folder), _usual_tokens(given))


def _read_beside(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}


def _named_tokens(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the special tokens that settings name; transformers adds those that a vocabulary does not have."""
    own = _own_tokens(settings)
    listed = settings.get("additional_special_tokens") or ()
    of_model = settings.get("model_specific_special_tokens") or {}
    for token in (*own.values(), *listed, *of_model.values()):
        yield _text(token)


def _own_tokens(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: one for name, one in settings.items() if name.endswith("_token") and isinstance(one, (str, dict))}


def _text(token: str | dict[str, Any]) -> str:
    return str(token["content"] if isinstance(token, dict) else token)


def _usual_tokens(settings: Mapping[str, Any]) -> dict[str, str] | None:
    """Return the special tokens that settings name; None where some are of one model alone, named as transformers' version has it."""
    own = _own_tokens(settings)
    others = any(map(settings.get, ("additional_special_tokens", "model_specific_special_tokens")))
    return {name: _text(token) for name, token in own.items()} if not others and own.keys() <= _USUAL_TOKENS else None


def _light_from_gguf(file: GGUFFile) -> LightTokenizer | None:
    """Return the tokenizer of a byte-level vocabulary that splits text by a rule known here; None for others.

    The same as transformers' own conversion makes of it.
    """
    described = _described(file)
    kind, tokens, merges = (described.get(name) for name in ("pre_tokenizer_type", "tokens", "merges"))
    known = kind in _GPT2_SPLIT or kind in _DIGITS_APART
    if described.get("tokenizer_type") != "gpt2" or not known or tokens is None or merges is None:
        return None
    special = {name: token for name, token in _special_tokens(file, described).items() if name in _SPECIAL_TOKENS}
    spelling = byte_spelling()
    alphabet = frozenset(spelling)
    vocabulary = {
        token if alphabet.issuperset(token) else "".join(spelling[byte] for byte in token.encode()): index
        for index, token in enumerate(tokens)
    }
    if any(token is not None and token not in vocabulary for token in special.values()):
        return None
    try:
        backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[tuple(merge.split(" ")) for merge in merges]))
    except Exception:  # the library raises nothing narrower; transformers' conversion says what is wrong
        return None
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    _split_digits(backend, kind)
    kinds = described.get("token_type") or ()
    control = [
        token for token, number in zip(tokens, kinds, strict=False) if number == _CONTROL and token in vocabulary
    ]
    control += [token for token in special.values() if token is not None and token not in control]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    own = [
        token for token, number in zip(tokens, kinds, strict=False) if number == _USER_DEFINED and token in vocabulary
    ]
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in own])
    _add_ends(backend, file, special, vocabulary)
    named = {name: token for name, token in special.items() if token is not None}
    return LightTokenizer(backend, _chat_template(file), partial(_reopened, file.path), named)


def _reopened(path: Path) -> Any:
    """Return transformers' tokenizer of a GGUF file, which a tokenizer does not keep open."""
    return _from_gguf(read_gguf(path))


def _add_ends(backend: Tokenizer, file: GGUFFile, special: Mapping[str, str | None], ids: Mapping[str, int]) -> None:
    """Have texts begin and end with what the file says they do."""
    first = special["bos_token"] if file.metadata.get("tokenizer.ggml.add_bos_token") else None
    last = special["eos_token"] if file.metadata.get("tokenizer.ggml.add_eos_token") else None
    if first or last:
        named = [(token, ids[token]) for token in dict.fromkeys((first, last)) if token]
        single = [part for part in (first, "$A", last) if part]
        backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=named)


def byte_spelling() -> list[str]:
    """Return the printable character that stands for each byte in a byte-level vocabulary (GPT-2's encoder.py)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _described(file: GGUFFile) -> dict[str, Any]:
    described = {name: file.metadata[key] for name, key in _TOKENIZER_KEYS.items() if key in file.metadata}
    if "tokens" not in described:
        raise CorruptWeights(f"{file.path} has no vocabulary", found="no metadata key 'tokenizer.ggml.tokens'")
    _GGUFTokenizer(**described, chat_template=_chat_template(file))
    return described


def _chat_template(file: GGUFFile) -> Any:
    return file.metadata.get("tokenizer.chat_template")


@dataclass(frozen=True, kw_only=True)
class _GGUFTokenizer(Validated):
    """The types of what a GGUF file says of its tokenizer, under transformers' names."""

    _error = CorruptWeights
    _inside = "the file's tokenizer: "

    tokenizer_type: str | None = None
    pre_tokenizer_type: str | None = None
    tokens: list[str]
    scores: list[float] | None = None
    token_type: list[int] | None = None
    merges: list[str] | None = None
    precompiled_charsmap: list[int] | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    unk_token_id: int | None = None
    pad_token_id: int | None = None
    add_prefix_space: bool | None = None
    chat_template: str | None = None


def _from_gguf(file: GGUFFile) -> Any:
    """Build the tokenizer by transformers' own conversion, from the metadata that is in memory already.

    `AutoTokenizer.from_pretrained(gguf_file=...)` does the same after reading the file two times, in seconds.
    """
    described = _described(file)
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import (
            GGUF_PRE_TOKENIZER_SPLITS,
            convert_gguf_tokenizer,
        )
    except ImportError:  # other versions of transformers keep the conversion elsewhere
        return AutoTokenizer.from_pretrained(str(file.path.parent), gguf_file=file.path.name)
    try:
        with panics_as_errors():
            backend, extra = convert_gguf_tokenizer(file.architecture, described)
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise ModelError(
            f"{file.path} has a tokenizer that cannot be read", found=str(error), hint="Use the safetensors checkpoint"
        ) from error
    kind = described.get("pre_tokenizer_type")
    if described.get("tokenizer_type") == "gpt2" and kind not in _GPT2_SPLIT | _DIGITS_APART | set(
        GGUF_PRE_TOKENIZER_SPLITS
    ):
        logger.warning("%s splits text by the unknown rule %r; GPT-2's is used instead", file.path.name, kind)
    _split_digits(backend, kind)
    if described.get("tokenizer_type") == "gpt2" and kind in _IGNORES_MERGES:
        backend.model.ignore_merges = True
    # Gemma's never has one, and its files say so too.
    if described.get("add_prefix_space") is False and isinstance(backend.pre_tokenizer, pre_tokenizers.Metaspace):
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=_chat_template(file),
        **_special_tokens(file, described),
        **extra,
    )


def _split_digits(backend: Any, kind: str | None) -> None:
    if kind in _DIGITS_APART:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )


def _special_tokens(file: GGUFFile, described: dict[str, Any]) -> dict[str, Any]:
    tokens: list[str] = described["tokens"]
    # Files without the flag are older, or of vocabularies that llama.cpp knows to begin with BOS.
    kind = described.get("tokenizer_type")
    known = kind == "llama" or (kind == "gpt2" and described.get("pre_tokenizer_type") in _BEGINS_WITH_BOS)
    begins = file.metadata.get("tokenizer.ggml.add_bos_token", known)
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
