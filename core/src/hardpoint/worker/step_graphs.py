"""Steps as device graphs: which sizes, static inputs, capture, and replay with padding."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from hardpoint.interfaces.allocator import GRAPHS, DeviceAllocator
from hardpoint.interfaces.attention import AttentionBackend, KVCacheGroup, mixed_seqs
from hardpoint.interfaces.batch import Int32Array, Int64Array, KVGroupSlots, StepBatch
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
    import numpy.typing as npt
    from torch import Tensor


LARGEST = 512
"""Most sequences of a captured step: larger ones keep a device busy without graphs."""
MAX_TOKENS = 2048
"""Most tokens of a captured step with prompts, for the same reason."""
_TOKENS = (16, 32, 64, 128, 192, 256, 384, 512, 640, 768, 1024, 1280, 1536, 1792)

_log = logging.getLogger("hardpoint")


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return the numbers of sequences to capture, rising: 1, 2, 4, 8, multiples of 16, and the most that a step can have."""
    largest = min(max_num_seqs, LARGEST)
    sizes = {size for size in (1, 2, 4, 8, *range(16, largest, 16)) if size < largest}
    return tuple(sorted(sizes | {largest}))


def mixed_sizes(max_num_tokens: int) -> tuple[int, ...]:
    """Return the numbers of tokens of steps with prompts to capture, rising, the last one the most that a step can have."""
    largest = min(max_num_tokens, MAX_TOKENS)
    return (*(size for size in _TOKENS if size < largest), largest)


class GraphShape(NamedTuple):
    """A captured step, padding included.

    Attributes:
        key: of its graph.
        tokens, seqs: that it has.
        rows: tokens whose hidden states it computes: of decodes all of them.
    """

    key: int
    tokens: int
    seqs: int
    rows: int

    @classmethod
    def of_decodes(cls, size: int) -> GraphShape:
        """Return the shape of steps of decodes alone."""
        return cls(size, size, size, size)

    @classmethod
    def of_tokens(cls, tokens: int, max_num_seqs: int) -> GraphShape:
        """Return the shape of steps that may have prompts."""
        return cls(-tokens, tokens, mixed_seqs(max_num_seqs, tokens), min(max_num_seqs, tokens))

    @property
    def is_mixed(self) -> bool:
        """Whether the step may have prompts, and computes the hidden states of some of its tokens."""
        return self.key < 0

    @property
    def size(self) -> int:
        """Numbers of 64 bits that its inputs take: tokens, positions, and where any are wanted rows, in int32."""
        return 2 * self.tokens + (-(-self.rows // 2) if self.is_mixed else 0)

    def __str__(self) -> str:
        return f"step of {self.tokens} tokens" if self.is_mixed else f"decode step of {self.seqs} sequences"


class StepGraphs:
    """Captured steps of one model over one KV cache, up to the last hidden state: decodes alone, and decodes with prompts.

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
        num_tokens: Sequence[int] = (),
        allocator: DeviceAllocator,
        upload: Callable[[npt.NDArray[np.generic]], Tensor],
        is_trial: bool = False,
        on_captured: Callable[[], None] = lambda: None,
    ) -> None:
        """Capture all sizes that attention can replay, the largest first.

        Args:
            runner: of the device, started here.
            sizes: numbers of sequences of steps of decodes alone, rising.
            num_tokens: of steps with prompts, rising; none where attention captures decodes alone.
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
        decodes = [GraphShape.of_decodes(size) for size in sizes]
        mixed = [GraphShape.of_tokens(tokens, largest) for tokens in num_tokens]
        room = max(shape.size for shape in (*decodes, *mixed))
        self._inputs = allocator.empty((room,), DType.INT64, GRAPHS)
        self._rows = allocator.empty((largest,), DType.INT32, GRAPHS)
        self._hidden = allocator.empty((largest, model.hidden_size), plan.request.dtype, GRAPHS)
        self._upload, self._allocator = upload, allocator
        self._staged = staged = np.zeros(room, np.int64)
        self._steps = {
            shape.key: PaddedStep(
                staged[: shape.tokens],
                staged[shape.tokens : 2 * shape.tokens],
                (largest, -(-plan.request.max_context // plan.block_size)),
                len(groups),
                shape.seqs,
            )
            for shape in (*decodes, *mixed)
        }
        if not is_trial:
            decodes = self._replayable(decodes)
            mixed = [shape for shape in mixed if self._can_replay(self._steps[shape.key].empty, shape)]
        self._larger = [
            next(shape for shape in decodes if shape.seqs >= count) for count in range(decodes[-1].seqs + 1)
        ]
        self._mixed = mixed
        self._rows.copy_(torch.arange(largest, dtype=torch.int32))
        self._inputs.copy_(torch.zeros(room, dtype=torch.int64))
        start = time.perf_counter()
        runner.start(allocator)
        try:
            self._capture(decodes, mixed, largest, on_captured)
        except BaseException:
            runner.reset()
            raise
        _log.info(
            "captured decode steps of %s sequences%s in %.1f s; the graphs hold %.1f MiB",
            ", ".join(str(shape.seqs) for shape in decodes),
            f" and steps with prompts of {', '.join(str(shape.tokens) for shape in mixed)} tokens" if mixed else "",
            time.perf_counter() - start,
            runner.resident_bytes() / 2**20,
        )

    def replay(self, batch: StepBatch, rows: Int32Array, early: tuple[Tensor, Tensor] | None = None) -> Tensor | None:
        """Compute a step that was captured, with padding; return None for one that was not, or that attention cannot replay.

        Args:
            rows: int32[k], tokens whose hidden states are wanted.
            early: places in the step, and the tokens there, int64[k] on the device, of tokens that the batch does not know.

        Returns:
            The hidden states [k, hidden_size], valid until the next replay.
        """
        shape = self._shape_of(batch, len(rows))
        if shape is None or not self._can_replay(batch, shape):
            return None
        padded, tokens = self._steps[shape.key].fill(batch), shape.tokens
        if shape.is_mixed:
            wanted = self._staged[2 * tokens : shape.size].view(np.int32)
            wanted[: len(rows)], wanted[len(rows) :] = rows, 0
        # Inputs are written by a kernel: on some devices a captured step does not see what a copy wrote (`TileTarget.caches_scalars`).
        torch.add(self._upload(self._staged[: shape.size]), 0, out=self._inputs[: shape.size])
        if early is not None:
            self._inputs.index_copy_(0, *early)
        # Host arguments depend on the step alone, so that those of the first group are those of all.
        arguments = [self._attention.host_arguments(metadata) for metadata in self._prepare(padded)]
        if arguments[0] is not None:
            self._runner.update(shape.key, arguments[0])
        self._runner.replay(shape.key)
        if shape.is_mixed:
            return self._hidden[: len(rows)]
        # Here every sequence has one token: token `i` is that of sequence `i`.
        hidden = self._hidden[: batch.num_seqs]
        is_all = len(rows) == len(hidden) and np.array_equal(rows, np.arange(len(rows)))
        return hidden if is_all else hidden.index_select(0, self._upload(rows))

    def resident_bytes(self) -> int:
        """Return the device bytes that the graphs hold now."""
        return self._runner.resident_bytes()

    def reset(self) -> None:
        """Drop the graphs and their memory."""
        self._runner.reset()
        del self._inputs, self._rows, self._hidden, self._steps

    def _shape_of(self, batch: StepBatch, num_rows: int) -> GraphShape | None:
        """Return the smallest captured step that has room for a batch, None where there is none."""
        count, tokens = batch.num_seqs, batch.num_tokens
        if batch.num_decodes == count == tokens < len(self._larger):
            return self._larger[count] if count else None
        seqs = max(count, num_rows)
        return next((shape for shape in self._mixed if tokens <= shape.tokens and seqs <= shape.rows), None)

    def _replayable(self, shapes: Sequence[GraphShape]) -> list[GraphShape]:
        """Return the shapes of which attention can replay a step at all; raises GraphCaptureFailed when there is none."""
        found = [shape for shape in shapes if self._can_replay(self._steps[shape.key].empty, shape)]
        if not found:
            raise GraphCaptureFailed(
                "no decode step can be captured",
                found=f"attention cannot replay any over a KV cache of {self._num_blocks} blocks",
                hint="With enforce_eager steps run without graphs",
            )
        if len(found) < len(shapes):
            _log.warning(
                "steps of more than %d sequences run without graphs: attention cannot replay them over a KV cache of %d blocks",
                found[-1].seqs,
                self._num_blocks,
            )
        return found

    def _prepare(self, step: StepBatch) -> tuple[Any, ...]:
        return tuple(
            self._attention.prepare(group.plan, own) for group, own in zip(self._groups, step.by_group(), strict=True)
        )

    def _can_replay(self, step: StepBatch, shape: GraphShape) -> bool:
        return all(
            self._attention.can_replay(group.plan, own, shape.seqs, self._num_blocks)
            for group, own in zip(self._groups, step.by_group(), strict=True)
        )

    def _capture(
        self,
        decodes: Sequence[GraphShape],
        mixed: Sequence[GraphShape],
        max_num_seqs: int,
        on_captured: Callable[[], None],
    ) -> None:
        # Tensors that attention allocates for captured steps sleep with the graphs, and are counted with them.
        with factory_call_pool(self._allocator, GRAPHS):
            for group in self._groups:
                self._attention.begin_capture(group.plan, max_num_seqs if mixed else decodes[-1].seqs)
                if mixed:
                    self._attention.begin_mixed_capture(group.plan, max_num_seqs, [shape.tokens for shape in mixed])
        try:
            for shape in sorted((*mixed, *decodes), key=lambda shape: shape.tokens, reverse=True):
                metadata = self._prepare(self._steps[shape.key].empty)
                try:
                    self._runner.capture(shape.key, partial(self._step, shape, metadata))
                except Exception as error:
                    raise GraphCaptureFailed(
                        f"the {shape} could not be captured",
                        found=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}",
                        hint=(
                            "Lower max_num_seqs or memory_utilization if memory ran out; with enforce_eager steps run without graphs"
                        ),
                    ) from error
                on_captured()
        finally:
            self._attention.end_capture()

    def _step(self, shape: GraphShape, metadata: tuple[Any, ...]) -> None:
        """Compute one step from the static inputs: the device work of a graph."""
        tokens = shape.tokens
        rows = self._inputs[2 * tokens : shape.size].view(torch.int32) if shape.is_mixed else self._rows
        hidden = self._model.run(
            self._inputs[:tokens],
            self._inputs[tokens : 2 * tokens],
            metadata,
            self._cache,
            rows[: shape.rows],
        )
        # Outputs are written by a kernel: `copy_` would be captured as the driver's copy, and none is known to outlive a remapping.
        torch.mul(hidden, 1, out=self._hidden[: shape.rows])


class PaddedStep:
    """A step of so many tokens and sequences, whose arrays are filled anew for every batch.

    What a smaller batch leaves over is padding: tokens that belong to no sequence, with the slot -1, and sequences without tokens and
    context.
    """

    def __init__(
        self,
        token_ids: Int64Array,
        positions: Int64Array,
        table_shape: tuple[int, int],
        num_groups: int = 1,
        num_seqs: int | None = None,
    ) -> None:
        """Make the step, all padding, over arrays int64[size] of the caller's.

        Args:
            table_shape: of a block table that stands for one until there is a batch.
            num_groups: KV cache groups of the model.
            num_seqs: sequences; None for one of each token.
        """
        size = len(token_ids)
        seqs = size if num_seqs is None else num_seqs
        no_pairs, nobody = np.zeros((0, 2), np.int32), np.zeros(0, np.int64)
        self._step = StepBatch(
            token_ids=token_ids,
            positions=positions,
            slot_mapping=np.zeros(size, np.int32),
            query_start=np.zeros(seqs + 1, np.int32),
            context_lens=np.zeros(seqs, np.int32),
            block_table=np.zeros(table_shape, np.int32),
            rows=np.zeros(seqs, np.int32),
            seq_ids=np.full(seqs, -1, np.int64),
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
        self._clear(0, 0)

    @property
    def empty(self) -> StepBatch:
        """The step as it was made, without a sequence; before the first `fill`."""
        return self._step

    def fill(self, batch: StepBatch) -> StepBatch:
        """Return the step with a batch at its beginning; it holds until the next call."""
        step, count, tokens = self._step, batch.num_seqs, batch.num_tokens
        step.token_ids[:tokens] = batch.token_ids
        step.positions[:tokens] = batch.positions
        step.slot_mapping[:tokens] = batch.slot_mapping
        step.query_start[: count + 1] = batch.query_start
        step.context_lens[:count] = batch.context_lens
        step.rows[:count] = batch.rows
        self._clear(count, tokens)
        for group, given in zip(step.more_groups, batch.more_groups, strict=True):
            group.slot_mapping[:tokens] = given.slot_mapping
            group.block_table = given.block_table
        if step.num_decodes != batch.num_decodes or step.block_table is not batch.block_table:
            self._step = replace(step, num_decodes=batch.num_decodes, block_table=batch.block_table)
        return self._step

    def _clear(self, count: int, tokens: int) -> None:
        """Make padding of what follows the first `count` sequences and their tokens."""
        step = self._step
        if tokens < len(step.token_ids):
            step.token_ids[tokens:] = step.positions[tokens:] = 0
            for slots in (step.slot_mapping, *(group.slot_mapping for group in step.more_groups)):
                slots[tokens:] = -1
        if count < len(step.rows):
            step.query_start[count + 1 :] = tokens
            step.context_lens[count:] = step.rows[count:] = 0


_SAMPLED = 4
"""How many sizes, from the largest, are captured to estimate what all of them take; half of them with prompts where some have any."""


class StepCapture:
    """Captures steps over a KV cache: a few of them for an estimate, all of them to be replayed."""

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
        is_mixed = all(group.plan.graph_level >= GraphLevel.MIXED for group in loaded.groups)
        self._tokens = mixed_sizes(context.config.max_num_batched_tokens) if is_mixed else ()
        self._model = _capturable(context, loaded)

    def capture(self, cache: Tensor) -> StepGraphs | None:
        """Capture all sizes; None where there are no graphs. Raises GraphCaptureFailed."""
        return self._captured(cache, self._sizes, self._tokens)

    def estimate_bytes(self, cache: Tensor, used: Callable[[], int]) -> int:
        """Return the device bytes that `capture` will take, 0 where there are no graphs; raises GraphCaptureFailed.

        The largest sizes are captured over `cache`, the largest first, and dropped again. Of the largest, whole growth counts: static
        inputs and outputs, attention's metadata, the pool that all sizes share. Of each other one counts what it adds, which for
        those that are not captured here is taken to be the mean of those that are.

        Args:
            used: waits for the device and returns the bytes in use on it.
        """
        in_use = [used()]
        sampled = _SAMPLED // 2 if self._tokens else _SAMPLED
        graphs = self._captured(
            cache,
            self._sizes[-sampled:],
            self._tokens[-sampled:],
            is_trial=True,
            on_captured=lambda: in_use.append(used()),
        )
        if graphs is None:
            return 0
        graphs.reset()
        before, with_largest, with_all = in_use[0], in_use[1], in_use[-1]
        sampled, others = len(in_use) - 2, len(self._sizes) + len(self._tokens) - 1
        added = math.ceil((with_all - with_largest) * others / sampled) if sampled else 0
        return max(with_largest - before, 0) + max(added, 0)

    def _captured(
        self, cache: Tensor, sizes: Sequence[int], num_tokens: Sequence[int], **how: Any
    ) -> StepGraphs | None:
        if self._model is None:
            return None
        with torch.inference_mode():
            return StepGraphs(
                self._context.descriptor.make("graph_runner", self._context.device),
                attention=self._attention,
                groups=self._groups,
                model=self._model,
                kv_cache=cache,
                sizes=sizes,
                num_tokens=num_tokens,
                allocator=self._allocator,
                upload=self._platform.upload,
                **how,
            )


def _capturable(context: WorkerContext, loaded: LoadedModel) -> CapturableModel | None:
    """Return the model where its steps are to be captured; warns where that is wanted and cannot be."""
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
