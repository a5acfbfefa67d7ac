"""Decode steps as device graphs: which sizes, static inputs, capture, and replay with padding."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hardpoint.interfaces.allocator import GRAPHS, DeviceAllocator
from hardpoint.interfaces.attention import AttentionBackend, KVCacheGroup
from hardpoint.interfaces.batch import Int64Array, KVGroupSlots, StepBatch
from hardpoint.interfaces.capabilities import GraphLevel
from hardpoint.interfaces.dtypes import DType
from hardpoint.interfaces.errors import GraphCaptureFailed
from hardpoint.interfaces.graphs import GraphRunner
from hardpoint.interfaces.platform import Platform
from hardpoint.interfaces.worker import WorkerContext
from hardpoint.memory import factory_call_pool
from hardpoint.models import CapturableModel
from hardpoint.worker.loading import LoadedModel

if TYPE_CHECKING:
    from torch import Tensor


LARGEST = 512
"""Most sequences of a captured step: larger ones keep a device busy without graphs."""

_log = logging.getLogger("hardpoint")


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return the numbers of sequences to capture, rising: 1, 2, 4, 8, multiples of 16, and the most that a step can have."""
    largest = min(max_num_seqs, LARGEST)
    sizes = {size for size in (1, 2, 4, 8, *range(16, largest, 16)) if size < largest}
    return tuple(sorted(sizes | {largest}))


class DecodeGraphs:
    """Captured decode steps of one model over one KV cache, up to the last hidden state.

    The head stays outside: it is queued while the graph runs, and what it returns differs by step. Inputs and outputs lie at fixed
    addresses, in memory with the tag `graphs`, which sleep preserves. A step with a size in between replays the next larger one
    with padding: tokens that belong to no sequence (slot -1), and sequences without tokens and context.
    """

    def __init__(
        self,
        runner: GraphRunner,
        *,
        attention: AttentionBackend,
        groups: tuple[KVCacheGroup, ...],
        model: CapturableModel,
        kv_cache: Tensor,
        sizes: Sequence[int],
        allocator: DeviceAllocator,
        upload: Callable[[Int64Array], Tensor],
        is_trial: bool = False,
        on_captured: Callable[[], None] = lambda: None,
    ) -> None:
        """Capture all sizes that attention can replay, the largest first.

        Args:
            runner: of the device, started here.
            sizes: numbers of sequences, rising.
            upload: see `Platform.upload`.
            is_trial: nothing will be replayed, so that every size can be captured, over a smaller cache too.
            on_captured: called after each size.

        Raises:
            GraphCaptureFailed: names the size; nothing captured is left.
        """
        self._runner, self._attention, self._groups, self._model = runner, attention, groups, model
        self._cache, plan = kv_cache, groups[0].plan
        self._num_blocks = kv_cache.shape[1 + plan.kv_cache.axes.index("block")]
        largest = sizes[-1]
        self._inputs = allocator.empty((2 * largest,), DType.INT64, GRAPHS)
        self._rows = allocator.empty((largest,), DType.INT32, GRAPHS)
        self._hidden = allocator.empty((largest, model.hidden_size), plan.request.dtype, GRAPHS)
        self._upload, self._allocator = upload, allocator
        self._staged = staged = np.zeros(2 * largest, np.int64)
        self._steps = {
            size: PaddedStep(
                staged[:size],
                staged[size : 2 * size],
                (largest, -(-plan.request.max_context // plan.block_size)),
                len(groups),
            )
            for size in sizes
        }
        if not is_trial:
            sizes = self._replayable(sizes)
        self._larger = [next(size for size in sizes if size >= count) for count in range(sizes[-1] + 1)]
        self._rows.copy_(torch.arange(largest, dtype=torch.int32))
        self._inputs.copy_(torch.zeros(2 * largest, dtype=torch.int64))
        start = time.perf_counter()
        runner.start(allocator)
        try:
            self._capture(sizes, on_captured)
        except BaseException:
            runner.reset()
            raise
        _log.info(
            "captured decode steps of %s sequences in %.1f s; the graphs hold %.1f MiB",
            ", ".join(map(str, sizes)),
            time.perf_counter() - start,
            runner.resident_bytes() / 2**20,
        )

    def fits(self, batch: StepBatch) -> bool:
        """Whether a step is one that was captured: decodes alone, not too many, and none that attention cannot replay."""
        count = batch.num_seqs
        if not batch.num_decodes == count == batch.num_tokens < len(self._larger) or count == 0:
            return False
        return self._can_replay(batch, self._larger[count])

    def replay(self, batch: StepBatch, early: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Compute a step that `fits`; return the hidden states [num_seqs, hidden_size], valid until the next replay.

        Args:
            early: places in the step, and the tokens there, int64[k] on the device, of tokens that the batch does not know.
        """
        count = batch.num_seqs
        size = self._larger[count]
        padded = self._steps[size].fill(batch)
        # By a kernel: on some devices a captured step does not see what a copy wrote (`TileTarget.caches_scalars`).
        torch.add(self._upload(self._staged[: 2 * size]), 0, out=self._inputs[: 2 * size])
        if early is not None:
            self._inputs.index_copy_(0, *early)
        # The groups' arguments from the host are of the step, and so the same.
        arguments = [self._attention.host_arguments(metadata) for metadata in self._prepare(padded)]
        if arguments[0] is not None:
            self._runner.update(size, arguments[0])
        self._runner.replay(size)
        return self._hidden[:count]

    def resident_bytes(self) -> int:
        """Return the device bytes that the graphs hold now."""
        return self._runner.resident_bytes()

    def reset(self) -> None:
        """Drop the graphs and their memory."""
        self._runner.reset()
        del self._inputs, self._rows, self._hidden, self._steps

    def _replayable(self, sizes: Sequence[int]) -> list[int]:
        """Return the sizes of which attention can replay a step at all; raises GraphCaptureFailed when there is none."""
        found = [size for size in sizes if self._can_replay(self._steps[size].empty, size)]
        if not found:
            raise GraphCaptureFailed(
                "no decode step can be captured",
                found=f"attention cannot replay any over a KV cache of {self._num_blocks} blocks",
                hint="With enforce_eager steps run without graphs",
            )
        if len(found) < len(sizes):
            _log.warning(
                "steps of more than %d sequences run without graphs: attention cannot replay them over a KV cache of %d blocks",
                found[-1],
                self._num_blocks,
            )
        return found

    def _prepare(self, step: StepBatch) -> tuple[Any, ...]:
        return tuple(
            self._attention.prepare(group.plan, own) for group, own in zip(self._groups, step.by_group(), strict=True)
        )

    def _can_replay(self, step: StepBatch, size: int) -> bool:
        return all(
            self._attention.can_replay(group.plan, own, size, self._num_blocks)
            for group, own in zip(self._groups, step.by_group(), strict=True)
        )

    def _capture(self, sizes: Sequence[int], on_captured: Callable[[], None]) -> None:
        # What attention allocates for captured steps sleeps and is counted with the graphs.
        with factory_call_pool(self._allocator, GRAPHS):
            for group in self._groups:
                self._attention.begin_capture(group.plan, sizes[-1])
        try:
            for size in reversed(sizes):
                metadata = self._prepare(self._steps[size].empty)
                try:
                    self._runner.capture(size, partial(self._step, size, metadata))
                except Exception as error:
                    raise GraphCaptureFailed(
                        f"the decode step of {size} sequences could not be captured",
                        found=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}",
                        hint=(
                            "Lower max_num_seqs or memory_utilization if memory ran out; with enforce_eager steps run without graphs"
                        ),
                    ) from error
                on_captured()
        finally:
            self._attention.end_capture()

    def _step(self, size: int, metadata: tuple[Any, ...]) -> None:
        """Compute one step of `size` sequences from the static inputs: the device work of a graph."""
        hidden = self._model.run(
            self._inputs[:size],
            self._inputs[size : 2 * size],
            metadata,
            self._cache,
            self._rows[:size],
        )
        # By a kernel: torch copies by the driver's own copy, a node of which nobody has shown that it outlives a remapping.
        torch.mul(hidden, 1, out=self._hidden[:size])


class PaddedStep:
    """A step of `size` sequences with one token each, whose arrays are filled anew for every batch.

    What a smaller batch leaves over is padding: tokens that belong to no sequence, with the slot -1, and sequences without tokens and
    context.
    """

    def __init__(
        self, token_ids: Int64Array, positions: Int64Array, table_shape: tuple[int, int], num_groups: int = 1
    ) -> None:
        """Make the step, all padding, over arrays int64[size] of the caller's.

        Args:
            table_shape: of a block table that stands for one until there is a batch.
            num_groups: KV cache groups of the model.
        """
        size = len(token_ids)
        no_pairs, nobody = np.zeros((0, 2), np.int32), np.zeros(0, np.int64)
        self._step = StepBatch(
            token_ids=token_ids,
            positions=positions,
            slot_mapping=np.zeros(size, np.int32),
            query_start=np.zeros(size + 1, np.int32),
            context_lens=np.zeros(size, np.int32),
            block_table=np.zeros(table_shape, np.int32),
            rows=np.zeros(size, np.int32),
            seq_ids=np.full(size, -1, np.int64),
            num_decodes=0,
            sample_rows=np.zeros(0, np.int32),
            sample_seq_ids=nobody,
            swap_out=no_pairs,
            swap_in=no_pairs,
            copies=no_pairs,
            preempted=nobody,
        )
        self._step.more_groups = tuple(
            KVGroupSlots(np.zeros(size, np.int32), self._step.block_table) for _ in range(1, num_groups)
        )
        self._clear(0)

    @property
    def empty(self) -> StepBatch:
        """The step as it was made, without a sequence; before the first `fill`."""
        return self._step

    def fill(self, batch: StepBatch) -> StepBatch:
        """Return the step with a batch of decodes at its beginning; it holds until the next call."""
        step, count = self._step, batch.num_seqs
        step.token_ids[:count] = batch.token_ids
        step.positions[:count] = batch.positions
        step.slot_mapping[:count] = batch.slot_mapping
        step.query_start[: count + 1] = batch.query_start
        step.context_lens[:count] = batch.context_lens
        step.rows[:count] = batch.rows
        if count < len(step.rows):
            self._clear(count)
        for group, given in zip(step.more_groups, batch.more_groups, strict=True):
            group.slot_mapping[:count] = given.slot_mapping
            group.block_table = given.block_table
        if step.num_decodes != count or step.block_table is not batch.block_table:
            self._step = replace(step, num_decodes=count, block_table=batch.block_table)
        return self._step

    def _clear(self, count: int) -> None:
        """Make padding of what follows the first `count` sequences."""
        step = self._step
        step.token_ids[count:] = step.positions[count:] = 0
        for slots in (step.slot_mapping, *(group.slot_mapping for group in step.more_groups)):
            slots[count:] = -1
        step.query_start[count + 1 :] = count
        step.context_lens[count:] = step.rows[count:] = 0


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
        self._context, self._groups = context, loaded.groups
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
                groups=self._groups,
                model=self._model,
                kv_cache=cache,
                sizes=sizes,
                allocator=self._allocator,
                upload=self._platform.upload,
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
    if any(group.chunk for group in loaded.groups):
        _log.warning("steps run without graphs: layers that attend in chunks are not captured")
        return None
    if model.state_layers():
        _log.warning("steps run without graphs: layers with recurrent states are not captured")
        return None
    return model
