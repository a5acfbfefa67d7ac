"""Prompts that are embeddings instead of tokens."""

from __future__ import annotations

import io
import zipfile
from typing import Any

import numpy as np

from hardpoint.engine.commands import EmbeddedSpans
from hardpoint.engine.embedding_sources import digest_of
from hardpoint.interfaces.batch import EmbeddingKind, EmbeddingSource, FloatArray
from hardpoint.interfaces.errors import EmptyPrompt, InvalidRequest, PromptTooLong
from hardpoint.interfaces.worker import ModelInfo
from hardpoint.validation import shown

PLACEHOLDER = 0
"""Token id that stands for an embedding in a prompt's token ids."""
_PICKLE_BYTES = 1 << 20
"""What a serialised tensor may have beside its values."""
_WIDEST = 8
"""Bytes of the largest element."""


class PromptEmbeds:
    """Takes prompts of embeddings for one model.

    Args:
        enabled: the engine was made to take them.
    """

    def __init__(self, model: ModelInfo, *, enabled: bool) -> None:
        self._model, self._enabled = model, enabled

    def prompt(self, given: Any) -> tuple[list[int], tuple[EmbeddedSpans, ...]]:
        """Return placeholders as token ids, and the embeddings that stand in their place.

        Args:
            given: [tokens, hidden_size] or [1, tokens, hidden_size] of floating-point numbers; a tensor or an array.

        Raises InvalidRequest, EmptyPrompt, PromptTooLong.
        """
        self._check_model()
        rows = self._rows(given)
        source = EmbeddingSource(EmbeddingKind.ROWS, len(rows), {"rows": rows})
        return [PLACEHOLDER] * len(rows), (EmbeddedSpans(digest_of(source), source, ((0, len(rows)),)),)

    def load(self, serialised: bytes) -> Any:
        """Return a tensor that `torch.save` wrote, read without running code of its; raises InvalidRequest."""
        self._check_model()
        most = self._model.max_model_len * self._model.hidden_size * _WIDEST + _PICKLE_BYTES
        try:
            with zipfile.ZipFile(io.BytesIO(serialised)) as archive:
                size = sum(one.file_size for one in archive.infolist())
        except zipfile.BadZipFile as error:
            raise InvalidRequest("prompt_embeds is not a tensor as torch.save writes it", found=str(error)) from error
        if size > most:
            raise InvalidRequest("prompt_embeds is too large", found=f"{size} bytes, of at most {most}")
        import torch

        try:
            return torch.load(io.BytesIO(serialised), map_location="cpu", weights_only=True)
        except Exception as error:  # whatever torch's reader meets in what a client made up
            raise InvalidRequest("prompt_embeds cannot be read as a tensor", found=type(error).__name__) from error

    def _check_model(self) -> None:
        if not self._enabled:
            raise InvalidRequest(
                "the engine takes no prompt_embeds",
                hint="Make it with enable_prompt_embeds=True (--enable-prompt-embeds)",
            )
        if EmbeddingKind.ROWS not in self._model.embedding_kinds:
            raise InvalidRequest(
                "the model takes no prompt_embeds",
                found=f"the architecture {self._model.architecture}",
                hint="Give text or token ids",
            )

    def _rows(self, given: Any) -> FloatArray:
        shape = tuple(getattr(given, "shape", ()))
        if len(shape) == 3 and shape[0] == 1:
            given, shape = given[0], shape[1:]
        width = self._model.hidden_size
        if len(shape) != 2 or shape[1] != width:
            raise InvalidRequest(
                f"prompt_embeds must be a tensor [tokens, {width}]",
                found=f"{type(given).__name__} of the shape {list(shape)}" if shape else shown(given),
            )
        if shape[0] == 0:
            raise EmptyPrompt("the prompt has no embeddings", hint="Give at least one row")
        if shape[0] >= self._model.max_model_len:
            raise PromptTooLong(
                f"the prompt has {shape[0]} embeddings",
                found=f"the context is {self._model.max_model_len} tokens, of which 1 must stay free for output",
                hint="Shorten the prompt, or raise max_model_len if the model allows it",
            )
        rows = _as_float32(given)
        if not np.isfinite(rows).all():
            raise InvalidRequest(
                "prompt_embeds has elements that are no finite numbers", hint="Look for NaN and infinity"
            )
        return rows


def _as_float32(given: Any) -> FloatArray:
    import torch

    try:
        tensor = torch.as_tensor(given).detach()
        if not tensor.is_floating_point() or tensor.layout != torch.strided:
            raise InvalidRequest(
                "prompt_embeds must be a dense tensor of floating-point numbers",
                found=f"{tensor.dtype}, {tensor.layout}",
            )
        # A copy, which the caller cannot change.
        rows: FloatArray = tensor.to("cpu", torch.float32, copy=True).contiguous().numpy()
    except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        if isinstance(error, InvalidRequest):
            raise
        raise InvalidRequest("prompt_embeds cannot be read", found=shown(str(error))) from error
    return rows
