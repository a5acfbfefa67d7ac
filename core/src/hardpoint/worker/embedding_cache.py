"""Embeddings that stand in the place of those of tokens: made of their sources once, and kept from step to step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from hardpoint.interfaces.batch import EmbeddingKind, EmbeddingSource, StepInput
from hardpoint.interfaces.errors import WorkerError

if TYPE_CHECKING:
    from torch import Tensor

    from hardpoint.interfaces.platform import Platform
    from hardpoint.models import RunnableModel


class EmbeddingCache:
    """The embeddings of the sources that a rank was given, on the device, by their numbers.

    Args:
        dtype: the model's.
    """

    def __init__(self, model: RunnableModel, platform: Platform, dtype: torch.dtype) -> None:
        self._model, self._platform, self._dtype = model, platform, dtype
        self._of_source: dict[int, Tensor] = {}

    def of_step(self, step: StepInput) -> tuple[Tensor, Tensor] | None:
        """Return which of a step's tokens have given embeddings, int64[k], and these [k, hidden_size]; None where none has.

        Raises WorkerError for a source that the rank does not have.
        """
        for number in step.dropped_sources:
            self._of_source.pop(number, None)
        for number, source in step.new_sources.items():
            self._of_source[number] = self._made(source)
        return self._embedded(step) if step.embedded else None

    @torch.inference_mode()
    def _embedded(self, step: StepInput) -> tuple[Tensor, Tensor]:
        missing = {one.source for one in step.embedded} - self._of_source.keys()
        if missing:
            raise WorkerError(
                "the step uses embeddings that the worker was not given", found=f"sources {sorted(missing)}"
            )
        places = np.concatenate([np.arange(one.first, one.first + one.count, dtype=np.int64) for one in step.embedded])
        parts = [self._of_source[one.source][one.row : one.row + one.count] for one in step.embedded]
        return self._platform.upload(places), parts[0] if len(parts) == 1 else torch.cat(parts)

    def clear(self) -> None:
        """Forget all sources."""
        self._of_source.clear()

    @torch.inference_mode()
    def _made(self, source: EmbeddingSource) -> Tensor:
        arrays = {name: self._platform.upload(array) for name, array in source.arrays.items()}
        made = arrays["rows"] if source.kind is EmbeddingKind.ROWS else self._model.encoded(source.kind, arrays)
        if len(made) != source.num_rows:
            raise WorkerError(
                "a source has another number of embeddings than was said", found=f"{len(made)}, not {source.num_rows}"
            )
        return made.to(self._dtype)
