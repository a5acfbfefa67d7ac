"""Pictures in prompts and messages: where they are taken from, how many there may be, and what is refused by name."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from hardpoint.engine.commands import EmbeddedSpans
from hardpoint.engine.embedding_sources import digest_of
from hardpoint.interfaces.batch import EmbeddingKind, Int64Array
from hardpoint.interfaces.errors import InvalidRequest
from hardpoint.models import PictureProcessor, as_picture, picture_processor, read_picture
from hardpoint.validation import shown

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedTokenizerBase

    from hardpoint.engine.config import EngineConfig
    from hardpoint.interfaces.worker import ModelInfo

_MAX_BYTES = 1 << 26
"""Of a picture's file; one of so many bytes has more pixels than are taken."""
_MANY = 999
"""Pictures of a prompt where no limit is given."""
_URL, _PICTURE = "image_url", "image_pil"

Picture = tuple["Image", str | None]
"""A picture, and what names its content in the place of its pixels, where the caller does."""


class Media:
    """Takes the pictures of prompts for one engine; safe to use from any thread.

    Args:
        folder: of the model.
        tokenizer: the engine's; None for an engine that takes token ids alone.
    """

    def __init__(
        self, config: EngineConfig, model: ModelInfo, folder: Path, tokenizer: PreTrainedTokenizerBase | None
    ) -> None:
        self.takes_pictures = EmbeddingKind.IMAGE in model.embedding_kinds
        self._architecture, self._folder, self._tokenizer = model.architecture, folder, tokenizer
        self._limit = (config.limit_mm_per_prompt or {}).get("image", _MANY)
        self._local = config.allowed_local_media_path
        self._lock = Lock()

    def of_prompt(self, data: Mapping[str, Any], uuids: Mapping[str, Any]) -> list[Picture]:
        """Return the pictures of a prompt's `multi_modal_data`, with their names of `multi_modal_uuids`; raises InvalidRequest."""
        for name, given in (("multi_modal_data", data), ("multi_modal_uuids", uuids)):
            if not isinstance(given, Mapping):
                raise InvalidRequest(f"{name} is a mapping such as {{'image': ...}}", found=shown(given))
            other = [kind for kind, value in given.items() if kind != "image" and _as_list(value)]
            if other:
                raise InvalidRequest(
                    "of media, only pictures are taken", found=f"{name} with {other[0]!r}", hint="Give 'image'"
                )
        pictures, names = _as_list(data.get("image")), _as_list(uuids.get("image"))
        if not names:
            names = [None] * len(pictures)
        if len(names) != len(pictures):
            raise InvalidRequest(
                f"{len(names)} names in multi_modal_uuids for {len(pictures)} pictures",
                hint="Give one for each, or None",
            )
        if not all(name is None or (isinstance(name, str) and name) for name in names):
            raise InvalidRequest("a name of a picture is a text that is not empty", found=shown(names))
        if pictures:
            self._check_takes()
        return [(as_picture(picture), name) for picture, name in zip(pictures, names, strict=True)]

    def of_message(self, message: Mapping[str, Any], pictures: list[Picture], *, in_parts: bool) -> dict[str, Any]:
        """Return a message as the chat template takes it, and add its pictures to those of the messages before.

        Args:
            in_parts: the template writes parts of contents itself; otherwise it is given the text, with a line for each picture.
        """
        content = message.get("content")
        if content is None:
            return dict(message)
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else _as_list(content)
        written = [self._part(part, pictures) for part in parts]
        if in_parts:
            return {**message, "content": written}
        lines = [part.get("text", self._processor.placeholder) for part in written]
        return {**message, "content": "\n".join(lines)}

    def _part(self, part: object, pictures: list[Picture]) -> dict[str, str]:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(part, Mapping) or kind not in ("text", _URL, _PICTURE):
            raise InvalidRequest(
                "content parts of this type are not supported",
                found=shown(part if kind is None else kind),
                hint=f"Give parts of the type 'text', {_URL!r} or {_PICTURE!r}",
            )
        given = part.get(kind)
        if kind == "text":
            if not isinstance(given, str):
                raise InvalidRequest("a text part has a text", found=shown(part))
            return {"type": "text", "text": given}
        self._check_takes()
        uuid = part.get("uuid")
        if uuid is not None and not (isinstance(uuid, str) and uuid):
            raise InvalidRequest("the uuid of a picture is a text that is not empty", found=shown(uuid))
        if kind == _URL:
            url = given.get("url") if isinstance(given, Mapping) else given
            pictures.append((as_picture(read_picture(self._fetched(url))), uuid))
        else:
            pictures.append((as_picture(given), uuid))
        return {"type": "image"}

    def _fetched(self, url: object) -> bytes:
        """Return what a URL leads to; raises InvalidRequest. Nothing is fetched over a network: a server would be asked into its own."""
        if not isinstance(url, str):
            raise InvalidRequest("image_url has a 'url'", found=shown(url))
        scheme, _, rest = url.partition(":")
        if scheme.lower() == "data":
            return _data(rest)
        if scheme.lower() == "file":
            return self._local_file(url)
        raise InvalidRequest(
            "pictures are not fetched over the network",
            found=shown(url[:80]),
            hint="Give a data: URL with the picture's bytes, or a file: URL below allowed_local_media_path",
        )

    def _local_file(self, url: str) -> bytes:
        if self._local is None:
            raise InvalidRequest(
                "local pictures are not read",
                found=shown(url[:80]),
                hint="Set allowed_local_media_path, or give a data: URL",
            )
        parts = urlsplit(url)
        root, path = Path(self._local).resolve(), Path(unquote(parts.path))
        refusal = InvalidRequest("a local picture must be a file below allowed_local_media_path", found=shown(url[:80]))
        try:
            found = path.resolve(strict=True)
            if parts.netloc not in ("", "localhost") or not found.is_relative_to(root) or not found.is_file():
                raise refusal
            with found.open("rb") as file:
                return _bounded(file.read(_MAX_BYTES + 1))
        except (OSError, ValueError):
            raise refusal from None

    def prompt(
        self, text: str, pictures: Sequence[Picture], *, add_special_tokens: bool
    ) -> tuple[list[int], tuple[EmbeddedSpans, ...], Int64Array | None]:
        """Return the token ids of a text with pictures, which of them are the pictures', and their positions (see `Generate.positions`).

        Raises InvalidRequest, ConfigError where the package that reads pictures is missing, ModelError for an unusable processor.
        """
        if len(pictures) > self._limit:
            raise InvalidRequest(
                f"the prompt has {len(pictures)} pictures",
                found=f"at most {self._limit} are taken",
                hint="Raise limit_mm_per_prompt, or give fewer",
            )
        with self._lock:
            ids, made, positions = self._processor(
                text, [one for one, _ in pictures], add_special_tokens=add_special_tokens
            )
        names = [name for _, name in pictures]
        spans = tuple(
            EmbeddedSpans(digest_of(source, name), source, spans)
            for (source, spans), name in zip(made, names, strict=True)
        )
        return ids, spans, positions

    @cached_property
    def _processor(self) -> PictureProcessor:
        if self._tokenizer is None:
            raise InvalidRequest("the engine has no tokenizer", hint="Make it with one: pictures stand in a text")
        # A copy: the processor adds special tokens to its tokenizer and changes its settings, while other threads use the original.
        return picture_processor(self._architecture, self._folder, deepcopy(self._tokenizer))

    def _check_takes(self) -> None:
        if not self.takes_pictures:
            raise InvalidRequest("the model takes no pictures", found=self._architecture, hint="Give text alone")


def _as_list(given: Any) -> list[Any]:
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _data(rest: str) -> bytes:
    """Return the bytes of a data: URL (RFC 2397) after its scheme."""
    head, comma, data = rest.partition(",")
    try:
        if not comma:
            raise ValueError("it has no comma")
        if len(data) > 2 * _MAX_BYTES:
            raise ValueError(f"it has {len(data)} characters")
        if head.lower().rstrip().endswith(";base64"):
            return _bounded(base64.b64decode(unquote(data), validate=True))
        return _bounded(unquote_to_bytes(data))
    except (ValueError, binascii.Error) as error:
        raise InvalidRequest(
            "a data: URL cannot be read", found=str(error), hint="Give data:image/png;base64,... with the file's bytes"
        ) from None


def _bounded(data: bytes) -> bytes:
    if len(data) > _MAX_BYTES:
        raise InvalidRequest("a picture's file is too large", hint=f"Give at most {_MAX_BYTES} bytes")
    return data
