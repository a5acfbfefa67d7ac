"""A step's metadata on the device: all of its arrays in one buffer of int32, which one transfer fills."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from hardpoint.interfaces.attention import mixed_seqs
from hardpoint.interfaces.errors import InvalidBatch
from hardpoint.triton.work import SplitRule, decode_items, padded_items, prefill_items
from hardpoint.worker.attention_checks import check_arrays

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from hardpoint.interfaces.attention import AttentionPlan
    from hardpoint.interfaces.batch import Int32Array, StepBatch

_HEADER = 8
_INT32_MAX = 2**31 - 1
_ALIGNMENT = 4
"""Arrays begin at multiples of 16 bytes: Triton compiles other code for pointers that do not."""
MAX_PROMPTS = 32
"""Sequences of a captured step that are no decodes, at most: a replay launches a tile for each that there may be, also for those that
are not there."""


@dataclass(frozen=True)
class Geometry:
    """How the work of a plan is divided.

    Attributes:
        rule: of the splits of decodes.
        windows: each sliding window that a layer has, None for a layer without one.
        groups: query heads per KV head, each number that a layer has.
        heads: the most query heads of a layer.
        prefill_rows: rows of a tile.
        programs: of a decode, at most.
    """

    rule: SplitRule
    windows: tuple[int | None, ...]
    groups: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    max_blocks: int
    prefill_rows: int
    programs: int

    @classmethod
    def of(cls, plan: AttentionPlan, rule: SplitRule, prefill_rows: int, programs: int) -> Geometry:
        """Return the geometry of a plan."""
        layers = plan.request.layers
        return cls(
            rule=rule,
            windows=tuple(dict.fromkeys(layer.sliding_window for layer in layers)),
            groups=tuple(sorted({layer.num_heads // layer.num_kv_heads for layer in layers})),
            heads=max(layer.num_heads for layer in layers),
            kv_heads=plan.kv_cache.num_kv_heads,
            head_dim=plan.kv_cache.head_dim,
            block_size=plan.block_size,
            max_blocks=-(-plan.request.max_context // plan.block_size),
            prefill_rows=prefill_rows,
            programs=programs,
        )

    def splits(self, contexts: Int32Array) -> Int32Array:
        """Return into how many parts each context is split, the most of all layers: one list of items serves them all."""
        most = self.rule.splits(contexts, self.windows[0])
        for window in self.windows[1:]:
            most = np.maximum(most, self.rule.splits(contexts, window))
        return most


@dataclass(frozen=True)
class Partials:
    """Where the splits of decodes leave their results.

    Attributes:
        splits: parts of a sequence that there is room for; 0 when no sequence has several.
        values: float32[sequences, heads, splits, head_dim]; state: the same with 2 instead of head_dim.
    """

    splits: int
    values: Tensor
    state: Tensor

    @classmethod
    def room(cls, geometry: Geometry, sequences: int, splits: int, device: torch.device) -> Partials:
        """Allocate room for sequences of the given number of parts."""
        shape = (sequences, geometry.heads, splits)
        values = torch.empty((*shape, geometry.head_dim), dtype=torch.float32, device=device)
        return cls(splits, values, torch.empty((*shape, 2), dtype=torch.float32, device=device))


@dataclass(frozen=True)
class OpenCache:
    """A layer's cache, checked, as its kernels take it.

    Attributes:
        whole: the cache.
        written, read: keys and values, in the dtype that kernels write and read them in.
    """

    whole: Tensor
    written: tuple[Tensor, Tensor]
    read: tuple[Tensor, Tensor]


@dataclass
class Step:
    """Metadata of one step.

    Attributes:
        plan: what the step keeps to.
        num_decodes: sequences, from the first, that `decode` may serve: with static metadata as many as were captured.
        highest_block: that a sequence or a slot uses.
        programs: of the decode kernel; 0 for no decode.
        prefills: by group size, int32[items, 2] on the device.
        header, slots, contexts, starts, items, tables: as the kernels take them.
        decode_contexts: as `contexts`, and 0 for those of the first `num_decodes` sequences that are no decodes.
        cache: of the layer whose keys and values were written, and whose attention is next.
    """

    plan: AttentionPlan
    num_tokens: int
    num_decodes: int
    highest_block: int
    programs: int
    prefills: dict[int, Tensor]
    header: Tensor
    slots: Tensor
    contexts: Tensor
    starts: Tensor
    items: Tensor
    decode_contexts: Tensor
    tables: Tensor
    partials: Partials
    cache: OpenCache | None = None


@dataclass(frozen=True)
class _Static:
    """Arrays at fixed addresses for captured steps of one kind.

    Attributes:
        decodes: sequences that `decode` may serve.
        sizes: elements of the arrays but the tables, in their order: header, slots, contexts, starts, items, and for steps with prompts
            contexts of decodes, and tiles of each group size.
        tiles: room for them, by group size; none for steps of decodes alone.
        buffer: that the arrays lie in, the tables last, which are as wide as a step needs.
        parts: the arrays, each to the buffer's end.
    """

    decodes: int
    sizes: list[int]
    tiles: dict[int, int]
    buffer: Tensor
    parts: list[Tensor]

    @classmethod
    def over(cls, buffer: Tensor, decodes: int, sizes: list[int], tiles: dict[int, int]) -> _Static:
        """Return arrays of these sizes at the buffer's beginning."""
        return cls(decodes, sizes, tiles, buffer, [buffer[place:] for place in _places([*sizes, 0])[:-1]])


class StepBuilder:
    """Makes the metadata of a plan's steps.

    After `reserve` the metadata of steps that have decodes alone, and no more of them than were reserved for, are always at the same
    addresses: a captured step that is replayed after `build` follows the new batch. After `reserve_mixed` that holds for padded steps
    with prompts too.

    Args:
        kernel_writes: static metadata are written by a kernel, which captured launches see, and not by the copy from the host.
    """

    def __init__(
        self, plan: AttentionPlan, geometry: Geometry, device: torch.device, kernel_writes: bool = False
    ) -> None:
        self._plan = plan
        self._geometry = geometry
        self._device = device
        self._nothing = Partials.room(geometry, 0, 0, device)
        self._kernel_writes = kernel_writes
        self._reserved: _Static | None = None
        self._mixed: dict[int, _Static] = {}
        self._static_partials = self._nothing

    @property
    def plan(self) -> AttentionPlan:
        """The plan that all steps keep to."""
        return self._plan

    def reserve(self, max_num_seqs: int) -> None:
        """Allocate static metadata for up to the given number of sequences with one query each; drop those of steps with prompts."""
        geometry = self._geometry
        most = geometry.rule.most(self._plan.request.max_context)
        sizes = [_HEADER, max_num_seqs, max_num_seqs, max_num_seqs + 1, 2 * max_num_seqs * most]
        self._static_partials = Partials.room(geometry, max_num_seqs, most if most > 1 else 0, self._device)
        buffer = self._room(_places([*sizes, max_num_seqs * geometry.max_blocks])[-1])
        self._reserved, self._mixed = _Static.over(buffer, max_num_seqs, sizes, {}), {}

    def reserve_mixed(self, max_num_seqs: int, num_tokens: Sequence[int]) -> None:
        """Reserve static metadata of steps of so many tokens with prompts, after `reserve` for as many sequences; all are in one place.

        The launches are those of the most tiles that there may be. In the place of tiles that a step does not have there are some of its
        last sequence, which has no queries.
        """
        geometry = self._geometry
        shapes: dict[int, tuple[int, list[int], dict[int, int]]] = {}
        size = 0
        for tokens in num_tokens:
            seqs = mixed_seqs(max_num_seqs, tokens)
            prompts = min(MAX_PROMPTS, seqs - 1)
            # Each prompt has at most one tile that it does not fill.
            tiles = {group: tokens * group // geometry.prefill_rows + prompts for group in geometry.groups}
            items = 2 * (seqs - 1) * self._static_splits
            sizes = [_HEADER, tokens, seqs, seqs + 1, items, seqs, *(2 * room for room in tiles.values())]
            shapes[tokens] = seqs - 1, sizes, tiles
            size = max(size, _places([*sizes, seqs * geometry.max_blocks])[-1])
        reserved = self._reserved
        if reserved is None:
            raise InvalidBatch(
                "steps with prompts are reserved for after those of decodes", found="no such reservation"
            )
        buffer = reserved.buffer
        if size > buffer.numel():
            buffer = self._room(size)
            self._reserved = _Static.over(buffer, reserved.decodes, reserved.sizes, reserved.tiles)
        self._mixed = {tokens: _Static.over(buffer, *shape) for tokens, shape in shapes.items()}

    def build(self, batch: StepBatch) -> Step:
        """Return a batch's metadata, on their way to the device; raises InvalidBatch when its arrays do not fit together."""
        geometry, queries = self._geometry, _checked(batch)
        decodes, seqs, tokens = batch.num_decodes, batch.num_seqs, batch.num_tokens
        contexts = batch.context_lens
        tables, highest = self._tables(batch)
        splits = geometry.splits(contexts[:decodes])
        items = decode_items(splits)
        static = self._static_of(batch, queries)
        arrays = [batch.slot_mapping, contexts, batch.query_start, items]
        prefills: dict[int, Int32Array] = {}
        if static is None:
            prefills = self._prefills(queries, contexts, decodes)
        elif static.tiles:
            prefills = self._prefills(queries, contexts, decodes)
            prefills = {group: padded_items(part, static.tiles[group], seqs - 1) for group, part in prefills.items()}
            arrays.append(np.where(np.arange(seqs, dtype=np.int32) < decodes, contexts, 0))
        arrays += prefills.values()
        sizes = [_HEADER, *(part.size for part in arrays)] if static is None else static.sizes
        places = _places([*sizes, tables.size])
        # A pinned buffer goes back to torch's host allocator, which does not give it away before the transfer is done.
        host = torch.empty(places[-1], dtype=torch.int32, pin_memory=self._device.type != "cpu")
        view = host.numpy()
        view[0], view[1] = len(items), tables.shape[1]
        for place, part in zip(places[1:], [*arrays, tables], strict=False):
            view[place : place + part.size] = part.ravel()
        if static is None:
            device = host.to(self._device, non_blocking=True, copy=True)
            parts = [device[place:] for place in places[:-1]]
            several = int(splits.max(initial=0))
            partials = self._nothing if several < 2 else Partials.room(geometry, decodes, several, self._device)
            programs = len(items) * geometry.kv_heads
        else:
            view[places[1] + tokens : places[1] + sizes[1]] = -1
            view[places[2] + seqs : places[2] + sizes[2]] = 0
            if static.tiles:
                # Kernels read the query before the end of the last sequence, though it has none.
                view[places[3] + seqs - 1 : places[3] + seqs + 1] = max(batch.query_start[-1], 1)
            self._write(static.buffer[: places[-1]], host)
            parts, partials = static.parts, self._static_partials
            decodes = static.decodes if static.tiles else seqs
            programs = decodes * self._static_splits * geometry.kv_heads
        first_tiles = len(sizes) - len(prefills)
        return Step(
            self._plan,
            tokens,
            decodes,
            highest,
            min(programs, geometry.programs),
            {
                group: parts[place][: part.size]
                for place, (group, part) in enumerate(prefills.items(), first_tiles)
                if part.size
            },
            parts[0],
            parts[1],
            parts[2],
            parts[3],
            parts[4],
            parts[5] if first_tiles > 5 else parts[2],
            parts[len(sizes)],
            partials,
        )

    @property
    def _static_splits(self) -> int:
        return max(1, self._static_partials.splits)

    def _static_of(self, batch: StepBatch, queries: Int32Array) -> _Static | None:
        """Return where the metadata of captured steps like this one are, None for a step that is like none."""
        seqs, tokens, prompts = batch.num_seqs, batch.num_tokens, np.count_nonzero(queries[batch.num_decodes :])
        mixed = self._mixed.get(tokens)
        # No other step ends with a sequence that has neither tokens nor a context.
        if mixed is not None and seqs == mixed.decodes + 1 and not batch.context_lens[-1] and prompts <= MAX_PROMPTS:
            return mixed
        reserved = self._reserved
        if reserved is not None and max(seqs, tokens) <= reserved.decodes and not prompts:
            return reserved
        return None

    def _room(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32, device=self._device)

    def _write(self, static: Tensor, host: Tensor) -> None:
        if self._kernel_writes:
            torch.add(host.to(self._device, non_blocking=True), 0, out=static)
        else:
            static.copy_(host, non_blocking=True)

    def _prefills(self, queries: Int32Array, contexts: Int32Array, decodes: int) -> dict[int, Int32Array]:
        geometry = self._geometry
        return {
            group: prefill_items(queries[decodes:], contexts[decodes:], group, geometry.prefill_rows, decodes)
            for group in geometry.groups
        }

    def _tables(self, batch: StepBatch) -> tuple[Int32Array, int]:
        """Return the rows of the block table that the step needs, as wide as its longest context, and the highest block in use."""
        used = -(-batch.context_lens // self._geometry.block_size)
        width, table = int(used.max(initial=0)), batch.block_table
        if width > table.shape[1] or width > self._geometry.max_blocks:
            raise InvalidBatch(
                f"a context has up to {self._plan.request.max_context} tokens and {table.shape[1]} blocks in the table",
                found=f"a context of {int(batch.context_lens.max())} tokens in blocks of {self._geometry.block_size}",
            )
        if len(batch.rows) and (int(batch.rows.min()) < 0 or int(batch.rows.max()) >= len(table)):
            raise InvalidBatch(f"the block table has {len(table)} rows", found=f"rows {batch.rows.tolist()}")
        rows = table[batch.rows, :width]
        blocks = np.where(np.arange(width) < used[:, None], rows, 0)
        # Read without a sign, negative numbers are the highest.
        highest = int(blocks.view(np.uint32).max(initial=0))
        if highest > _INT32_MAX:
            raise InvalidBatch("blocks are numbered from 0", found=f"block {int(blocks.min())} in the block table")
        slot = int(batch.slot_mapping.max(initial=0))
        return rows, max(highest, slot // self._geometry.block_size)


def _places(sizes: Sequence[int]) -> list[int]:
    """Return where arrays of these sizes begin in one buffer, and last its end."""
    places = [0]
    for size in sizes[:-1]:
        places.append(places[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
    return [*places, places[-1] + sizes[-1]]


def _checked(batch: StepBatch) -> Int32Array:
    """Return how many queries each sequence has; raises InvalidBatch when the batch's arrays do not fit together."""
    check_arrays(batch)
    seqs, tokens = batch.num_seqs, batch.num_tokens
    queries = batch.query_start[1:] - batch.query_start[:-1]
    decodes = batch.num_decodes
    if batch.query_start[0] != 0 or batch.query_start[-1] > tokens or (queries < 0).any():
        raise InvalidBatch(f"queries begin at rising tokens from 0 to {tokens}", found=f"{batch.query_start.tolist()}")
    if not 0 <= decodes <= seqs or (queries[:decodes] != 1).any():
        raise InvalidBatch(f"the first {decodes} of {seqs} sequences have one query each", found=f"{queries.tolist()}")
    if (batch.context_lens < queries).any():
        raise InvalidBatch(
            "a context includes its queries",
            found=f"{queries.tolist()} queries, contexts of {batch.context_lens.tolist()} tokens",
        )
    return queries
