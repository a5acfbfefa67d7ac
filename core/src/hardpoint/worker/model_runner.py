"""Running a loaded model on one batch: by a captured graph where there is one, else eagerly."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from hardpoint.interfaces.allocator import DeviceAllocator
from hardpoint.interfaces.attention import AttentionBackend
from hardpoint.interfaces.batch import Int32Array, StepBatch
from hardpoint.interfaces.capabilities import GraphLevel
from hardpoint.interfaces.kernels import DecoderOutput
from hardpoint.interfaces.worker import WorkerContext
from hardpoint.models import CapturableModel
from hardpoint.worker.decode_graphs import DecodeGraphs, graph_sizes
from hardpoint.worker.loading import LoadedModel

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger("hardpoint")


class ModelRunner:
    """A model, its attention, and the graphs of its decode steps once they are captured."""

    def __init__(
        self,
        context: WorkerContext,
        loaded: LoadedModel,
        *,
        allocator: DeviceAllocator,
        attention: AttentionBackend,
        empty_host: Callable[[Sequence[int], torch.dtype], Tensor],
        check_computes: Callable[[], None],
    ) -> None:
        """Capture nothing yet.

        Args:
            empty_host: makes host memory that the device copies to and from.
            check_computes: raises where the device cannot compute; called before every step.
        """
        self._context, self._model, self._plan = context, loaded.model, loaded.plan
        self._allocator, self._attention = allocator, attention
        self._empty_host, self._check_computes = empty_host, check_computes
        self._graphs: DecodeGraphs | None = None
        self._graphed_cache: Tensor | None = None

    @torch.inference_mode()
    def forward(self, batch: StepBatch, cache: Tensor, output: DecoderOutput, rows: Int32Array | None = None) -> Tensor:
        """Run the model on one step.

        Args:
            cache: the whole KV cache.
            rows: token indices, by default the last token of each sampled sequence.

        Returns:
            See `RunnableModel.run`.
        """
        self._check_computes()
        if rows is None:
            rows = batch.query_start[batch.sample_rows + 1] - 1
        if self._graphs is not None and cache is self._graphed_cache and self._graphs.fits(batch):
            return self._replay(self._graphs, batch, output, rows)
        metadata = self._attention.prepare(self._plan, batch)
        wanted = torch.from_numpy(rows).to(self._context.device.torch_device)
        return self._model.run(batch, metadata, cache, wanted, output)

    def capture(self, cache: Tensor) -> None:
        """Capture the decode steps over a KV cache, unless nobody wants them or they cannot be; raises GraphCaptureFailed."""
        self.drop_graphs()
        runner = self._context.descriptor.make("graph_runner", self._context.device) if self._wants_graphs() else None
        if runner is None:
            return
        model = self._model
        if not isinstance(model, CapturableModel):
            _log.warning("steps of this model run without graphs: its way to run (%s) cannot be captured", model.path)
            return
        with torch.inference_mode():
            self._graphs = DecodeGraphs(
                runner,
                attention=self._attention,
                plan=self._plan,
                model=model,
                kv_cache=cache,
                sizes=graph_sizes(self._context.config.max_num_seqs),
                allocator=self._allocator,
                empty_host=self._empty_host,
            )
        self._graphed_cache = cache

    def drop_graphs(self) -> None:
        """Drop the graphs and their memory, if there are any."""
        graphs, self._graphs, self._graphed_cache = self._graphs, None, None
        if graphs is not None:
            graphs.reset()

    def graph_bytes(self) -> int | None:
        """Return the device bytes that the graphs hold now, None where there are none."""
        return None if self._graphs is None else self._graphs.resident_bytes()

    def _wants_graphs(self) -> bool:
        config = self._context.config
        if config.enforce_eager or self._plan.graph_level is GraphLevel.NONE:
            return False
        if config.pipeline_parallel_size > 1:
            _log.warning("steps run without graphs: stages of a pipeline are not captured")
            return False
        return True

    def _replay(self, graphs: DecodeGraphs, batch: StepBatch, output: DecoderOutput, rows: Int32Array) -> Tensor:
        """Compute a step of decodes by its graph; token `i` of such a step is that of sequence `i`."""
        hidden = graphs.replay(batch)
        if len(rows) != len(hidden) or not np.array_equal(rows, np.arange(len(rows))):
            hidden = hidden.index_select(0, torch.from_numpy(rows).to(self._context.device.torch_device))
        return hidden if output is DecoderOutput.HIDDEN else cast(CapturableModel, self._model).head(hidden, output)
