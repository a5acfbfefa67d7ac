"""Running a loaded model on one batch: by a captured graph where there is one, else eagerly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hardpoint.interfaces.attention import AttentionBackend
from hardpoint.interfaces.batch import Int32Array, StepBatch, in_groups
from hardpoint.interfaces.platform import Platform
from hardpoint.worker.decode_graphs import DecodeCapture, DecodeGraphs
from hardpoint.worker.dummy import dummy_batch
from hardpoint.worker.loading import LoadedModel

if TYPE_CHECKING:
    from torch import Tensor


class ModelRunner:
    """A model, its attention, and the graphs of its decode steps once they are captured."""

    def __init__(
        self,
        loaded: LoadedModel,
        attention: AttentionBackend,
        capture: DecodeCapture,
        platform: Platform,
        *,
        torch_device: str,
    ) -> None:
        """Capture nothing yet."""
        self._model, self._groups, self._attention = loaded.model, loaded.groups, attention
        self._capture, self._torch_device = capture, torch_device
        self._platform = platform
        self._graphs: DecodeGraphs | None = None
        self._graphed_cache: Tensor | None = None

    @torch.inference_mode()
    def forward(self, batch: StepBatch, cache: Tensor, rows: Int32Array | None = None) -> Tensor:
        """Run the model on one step and return hidden states; see `RunnableModel.run`.

        Args:
            cache: the whole KV cache.
            rows: token indices, by default the last token of each sampled sequence.
        """
        self._platform.check_computes()
        if rows is None:
            rows = batch.query_start[batch.sample_rows + 1] - 1
        if self._graphs is not None and cache is self._graphed_cache and self._graphs.fits(batch):
            return self._replay(self._graphs, batch, rows)
        metadata = self._prepare(batch)
        wanted = torch.from_numpy(rows).to(self._torch_device)
        return self._model.run(batch, metadata, cache, wanted)

    def _prepare(self, batch: StepBatch) -> tuple[Any, ...]:
        """Return the step's metadata of each KV cache group."""
        return tuple(
            self._attention.prepare(group.plan, step)
            for group, step in zip(self._groups, batch.by_group(), strict=True)
        )

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32[rows, vocab_size] of hidden states; all ranks of a stage call it alike."""
        return self._model.logits(hidden)

    @torch.inference_mode()
    def argmax(self, hidden: Tensor) -> Tensor:
        """Return int64[rows], the tokens of the highest logits; all ranks of a stage call it alike."""
        return self._model.argmax(hidden)

    def warm_up(self, cache: Tensor) -> None:
        """Run a small prefill and a small decode over a KV cache, then capture decodes where there are to be graphs."""
        self.drop_graphs()
        plan = self._groups[0].plan
        for length in (min(16, plan.request.max_context, plan.block_size), 1):
            batch = dummy_batch(num_tokens=length, max_len=length, block_size=plan.block_size, max_seqs=1)
            self.argmax(self.forward(in_groups(batch, len(self._groups), plan.block_size), cache))
        self._platform.synchronize()
        self._graphs, self._graphed_cache = self._capture.capture(cache), cache

    def drop_graphs(self) -> None:
        """Drop the graphs and their memory, if there are any."""
        graphs, self._graphs, self._graphed_cache = self._graphs, None, None
        if graphs is not None:
            graphs.reset()

    def graph_bytes(self) -> int | None:
        """Return the device bytes that the graphs hold now, None where there are none."""
        return None if self._graphs is None else self._graphs.resident_bytes()

    def _replay(self, graphs: DecodeGraphs, batch: StepBatch, rows: Int32Array) -> Tensor:
        """Compute a step of decodes by its graph; token `i` of such a step is that of sequence `i`."""
        hidden = graphs.replay(batch)
        if len(rows) != len(hidden) or not np.array_equal(rows, np.arange(len(rows))):
            hidden = hidden.index_select(0, torch.from_numpy(rows).to(self._torch_device))
        return hidden
