"""Which decode steps of a model are captured, and how much device memory that will take."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hardpoint.interfaces.allocator import DeviceAllocator
from hardpoint.interfaces.attention import AttentionBackend
from hardpoint.interfaces.capabilities import GraphLevel
from hardpoint.interfaces.platform import Platform
from hardpoint.interfaces.worker import WorkerContext
from hardpoint.models import CapturableModel
from hardpoint.worker.decode_graphs import DecodeGraphs, graph_sizes
from hardpoint.worker.loading import LoadedModel

if TYPE_CHECKING:
    from torch import Tensor

_SAMPLED = 4
"""How many sizes, from the largest, are captured to estimate what all of them take."""

_log = logging.getLogger("hardpoint")


class DecodeCapture:
    """Captures decode steps over a KV cache: a few of them for an estimate, all of them to be replayed."""

    def __init__(
        self,
        context: WorkerContext,
        loaded: LoadedModel,
        *,
        allocator: DeviceAllocator,
        attention: AttentionBackend,
        platform: Platform,
    ) -> None:
        """Capture nothing yet; warns where graphs are wanted and cannot be."""
        self._context, self._plan = context, loaded.plan
        self._allocator, self._attention, self._platform = allocator, attention, platform
        self._sizes = graph_sizes(context.config.max_num_seqs)
        self._model = _capturable(context, loaded)

    def capture(self, cache: Tensor) -> DecodeGraphs | None:
        """Capture all sizes; None where there are no graphs. Raises GraphCaptureFailed."""
        return self._captured(cache, self._sizes)

    def estimate_bytes(self, cache: Tensor, used: Callable[[], int]) -> int:
        """Return the device bytes that `capture` will take, 0 where there are no graphs; raises GraphCaptureFailed.

        The largest sizes are captured over `cache`, the largest first, and dropped again. Of the largest, whole growth counts: static
        inputs and outputs, attention's metadata, the pool that all sizes share. Of each other one counts what it adds, which for
        those that are not captured here is taken to be the mean of those that are.

        Args:
            used: waits for the device and returns the bytes in use on it.
        """
        in_use = [used()]
        graphs = self._captured(
            cache, self._sizes[-_SAMPLED:], is_trial=True, on_captured=lambda: in_use.append(used())
        )
        if graphs is None:
            return 0
        graphs.reset()
        before, with_largest, with_all = in_use[0], in_use[1], in_use[-1]
        sampled, others = len(in_use) - 2, len(self._sizes) - 1
        added = math.ceil((with_all - with_largest) * others / sampled) if sampled else 0
        return max(with_largest - before, 0) + max(added, 0)

    def _captured(self, cache: Tensor, sizes: Sequence[int], **how: Any) -> DecodeGraphs | None:
        if self._model is None:
            return None
        with torch.inference_mode():
            return DecodeGraphs(
                self._context.descriptor.make("graph_runner", self._context.device),
                attention=self._attention,
                plan=self._plan,
                model=self._model,
                kv_cache=cache,
                sizes=sizes,
                allocator=self._allocator,
                empty_host=self._platform.empty_host,
                **how,
            )


def _capturable(context: WorkerContext, loaded: LoadedModel) -> CapturableModel | None:
    """Return the model where its decode steps are to be captured; warns where that is wanted and cannot be."""
    config, model = context.config, loaded.model
    if config.enforce_eager or loaded.plan.graph_level is GraphLevel.NONE or context.descriptor.graph_runner is None:
        return None
    if config.pipeline_parallel_size > 1:
        _log.warning("steps run without graphs: stages of a pipeline are not captured")
        return None
    if not isinstance(model, CapturableModel):
        _log.warning("steps of this model run without graphs: its way to run (%s) cannot be captured", model.path)
        return None
    return model
