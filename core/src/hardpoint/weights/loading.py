"""From checkpoint tensors to a model's parameters: checked, assembled, copied once."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from hardpoint.interfaces.errors import CorruptWeights
from hardpoint.weights.checkpoint import Checkpoint, listed, renamed
from hardpoint.weights.integer_formats import divided
from hardpoint.weights.kv_scales import is_scale
from hardpoint.weights.stacked_experts import unstacked, unstacked_pairs

if TYPE_CHECKING:
    from torch import Tensor

    from hardpoint.layers.weights import StoredWeight, WeightShard
    from hardpoint.weights.kv_scales import ScalesInUse

_READERS = 4
_PIECE_ELEMENTS = 1 << 20
"""Most of one read: few enough that they are still in a processor's cache when they are packed."""
_TOGETHER = 64
"""Rows of a piece are a multiple of this, so that no two pieces share a tile of a packed layout."""
_PREFIXES = ("model.", "bert.", "roberta.")
_LANGUAGE = "language_model."
_IN_WHOLE = "model.language_model."
_NEMOTRON_H = "backbone."
_GRANITE_EXPERTS = {
    ".router.weight": ".router.layer.weight",
    ".experts.gate_up_proj": ".input_linear.weight",
    ".experts.down_proj": ".output_linear.weight",
}
_MIXTRAL_ROUTER = (".mlp.gate.", ".block_sparse_moe.gate.")
_HEAD = "lm_head.weight"
_COMPARED_ROWS = 1024
_OLD_NORMS = {"gamma": "weight", "beta": "bias"}
_IGNORED = re.compile(r"rotary_emb\.|\.masked_bias$|\.attn\.bias$")


def _is_ignored(name: str, unused: str) -> bool:
    return bool(_IGNORED.search(name) or (unused and re.match(unused, name)))


def with_standard_names(checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]]) -> Checkpoint:
    """Return the checkpoint with the names of the model's tensors, and stacked experts taken apart.

    Args:
        shapes: of the model's tensors.
    """
    standard = {standard_name(name, shapes): name for name in checkpoint.shapes()}
    if any(name != found for name, found in standard.items()):
        checkpoint = renamed(checkpoint, standard)
    return unstacked(checkpoint, shapes)


def standard_name(name: str, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return the name that a model's tensor has in whole models; others are returned as they are.

    Bare models are saved without what stands before their tensors' names, language models beside other parts with more (and those parts,
    where transformers has them in memory), and old encoders call a norm's weight and bias gamma and beta. In memory transformers 5 has
    other names for some than the checkpoints that it writes.
    """
    stem, _, last = name.rpartition(".")
    if stem.endswith("LayerNorm") and last in _OLD_NORMS:
        name = f"{stem}.{_OLD_NORMS[last]}"
    if name in shapes:
        return name
    of_mixtral = name.replace(*_MIXTRAL_ROUTER)
    possible = (
        *(prefix + name for prefix in _PREFIXES),
        name.removeprefix(_LANGUAGE),
        name.replace(_IN_WHOLE, "model.", 1),
        name.removeprefix("model."),
        _NEMOTRON_H + name.removeprefix("model."),
        *(f"{name.removesuffix(theirs)}{ours}" for theirs, ours in _GRANITE_EXPERTS.items() if name.endswith(theirs)),
        of_mixtral,
        f"model.{of_mixtral}",
    )
    found = (known for known in possible if known in shapes)
    return next(found, name)


def has_own_head(checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether the checkpoint of a model whose head is its embedding has a head that differs from that.

    Args:
        shapes: of the model's tensors.
    """
    if _HEAD not in checkpoint.shapes():
        return False
    import torch

    checkpoint = with_standard_names(checkpoint, shapes)
    found = checkpoint.shapes()
    embedding = next((name for name in shapes if name.endswith("embed_tokens.weight")), None)
    if embedding is None or embedding not in found:
        return False
    if found[_HEAD][1:] != found[embedding][1:]:
        return True
    # One of them may be padded to a rounder number of rows.
    rows = min(found[_HEAD][0], found[embedding][0])
    for begin in range(0, rows, _COMPARED_ROWS):
        span = begin, min(begin + _COMPARED_ROWS, rows)
        head, own = (torch.cat([rows for _, rows in checkpoint.rows(name, *span)]) for name in (_HEAD, embedding))
        if not torch.equal(head, own):
            return True
    return False


def check_tensors(
    expected: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[int, ...]],
    optional: Iterable[str] = (),
    unused: str = "",
) -> None:
    """Compare a checkpoint's tensors with those that a model is made of; raises CorruptWeights that lists the differences.

    Args:
        optional: names that a checkpoint may have without need (a tied head).
        unused: see `ModelWeights`.
    """
    passed_over = set(optional)
    problems: list[str] = []
    missing = sorted(set(expected) - set(found))
    if missing:
        problems.append(f"missing: {listed(missing)}")
    unexpected = sorted(
        name
        for name in set(found) - set(expected)
        if name not in passed_over and not _is_ignored(name, unused) and not is_scale(name)
    )
    if unexpected:
        problems.append(f"unexpected: {listed(unexpected)}")
    wrong = [
        f"{name} is {list(found[name])}, not {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if wrong:
        problems.append(f"of another shape: {listed(wrong)}")
    if problems:
        raise CorruptWeights(
            "the checkpoint's tensors are not those of the configuration",
            found="; ".join(problems),
            hint="Check that config.json and the weights belong to the same model",
        )


@dataclass(frozen=True)
class ModelWeights:
    """The parameters of a model, or of a rank's share of one, and the checkpoint tensors that they are made of.

    Attributes:
        stored: where each parameter comes from, by its name in the model, in the order of use.
        shapes: of every checkpoint tensor of the whole model.
        optional: tensors that a checkpoint may have without need (a tied head).
        unused: a regular expression for more of them, from the beginning of their names; empty for none.
    """

    stored: Mapping[str, StoredWeight]
    shapes: Mapping[str, tuple[int, ...]]
    optional: tuple[str, ...] = ()
    unused: str = ""

    def names(self) -> frozenset[str]:
        """Return the tensors that the parameters have something of."""
        return frozenset(shard.name for stored in self.stored.values() for shard in stored.shards)

    def parts(self) -> dict[str, list[tuple[str, int, WeightShard]]]:
        """Return, for each tensor by name, what of it goes where: (parameter, its first row there, shard)."""
        found: dict[str, list[tuple[str, int, WeightShard]]] = {}
        for name, stored in self.stored.items():
            row = 0
            for shard in stored.shards:
                found.setdefault(shard.name, []).append((name, row, shard))
                row += shard.num_rows
        return found


@dataclass(frozen=True)
class _Piece:
    """Rows of a parameter that are read together.

    Attributes:
        shards: what they are made of, one below the other.
        first_row: of the parameter.
    """

    name: str
    shards: tuple[WeightShard, ...]
    first_row: int

    @property
    def num_rows(self) -> int:
        return sum(shard.num_rows for shard in self.shards)

    @property
    def num_elements(self) -> int:
        return sum(shard.num_rows * prod(shard.shape[1:]) for shard in self.shards)


def load_weights(
    weights: ModelWeights,
    checkpoint: Checkpoint,
    place: Callable[[str, int], Tensor],
    finish: Callable[[str, int, Tensor], None],
    *,
    divides: bool = False,
    only: Collection[str] | None = None,
    begin: Callable[[], None] | None = None,
) -> None:
    """Fill every parameter from the checkpoint; raises CorruptWeights, before anything is written if it can.

    Weights are read by as many threads as there are processors, since reading, dequantisation and page faults leave the interpreter free.
    At most a few pieces are under way at a time, in about the order of the parameters.

    Args:
        place: (parameter, rows): returns the tensor that so many rows of a parameter are written into.
        finish: called with a parameter's name, its row and the tensor once it was written, by several threads at once.
        divides: whether rows of a parameter may come apart, several of them at once; otherwise each parameter is written as a whole.
        only: the parameters to fill; None for all.
        begin: called once the checkpoint's tensors were compared with the model's, before the first is written.
    """
    checkpoint = with_standard_names(checkpoint, weights.shapes)
    check_tensors(weights.shapes, checkpoint.shapes(), weights.optional, weights.unused)
    wanted = [name for name in weights.stored if only is None or name in only]
    if begin is not None:
        begin()

    def fill(pieces: list[_Piece]) -> None:
        for piece in pieces:
            fill_one(piece)

    def fill_one(piece: _Piece) -> None:
        stored, target, row = weights.stored[piece.name], place(piece.name, piece.num_rows), 0
        for shard in piece.shards:
            span = shard.name, shard.first_row, shard.end_row
            format = None if stored.blocks is None else checkpoint.block_format(shard.name)
            if format is not None and stored.blocks in format.forms:
                for first, rows in checkpoint.block_rows(*span):
                    blocks = shard.blocks_of(divided(rows, format, stored.blocks), stored.blocks)
                    stored.write(target, row + first - shard.first_row, blocks)
            elif stored.verbatim and shard.columns is None and target.shape[1:] == shard.shape[1:]:
                checkpoint.fill(*span, target[row : row + shard.num_rows])
            else:
                for first, values in checkpoint.rows(*span):
                    stored.write(target, row + first - shard.first_row, shard.of(values))
            row += shard.num_rows
        finish(piece.name, piece.first_row, target)

    pieces = (piece for name in wanted for piece in _pieces(name, weights.stored[name], checkpoint, divides))
    readers = max(_READERS, min(os.cpu_count() or 1, 4 * _READERS))
    with ThreadPoolExecutor(readers, thread_name_prefix="hardpoint-load") as pool:
        under_way: deque[Future[None]] = deque()
        try:
            for together in _tasks(pieces):
                under_way.append(pool.submit(fill, together))
                if len(under_way) > 2 * readers:
                    under_way.popleft().result()
            while under_way:
                under_way.popleft().result()
        finally:
            for future in under_way:
                future.cancel()


def _tasks(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    """Yield lists of pieces, each of about as many elements as the largest: what is small costs more to hand to a thread than to read."""
    task: list[_Piece] = []
    elements = 0
    for piece in pieces:
        task.append(piece)
        elements += piece.num_elements
        if elements > _PIECE_ELEMENTS // 2:
            yield task
            task, elements = [], 0
    if task:
        yield task


def _pieces(name: str, stored: StoredWeight, checkpoint: Checkpoint, divides: bool) -> Iterator[_Piece]:
    """Yield the pieces in which a parameter is read."""
    whole = _Piece(name, stored.shards, 0)
    divisible = all(len(shard.shape) == 2 and checkpoint.reads_parts(shard.name) for shard in stored.shards)
    if not divides or whole.num_elements <= _PIECE_ELEMENTS or not divisible:
        yield whole
        return
    row = 0
    for shard in stored.shards:
        step = max(1, _PIECE_ELEMENTS // shard.shape[1] // _TOGETHER) * _TOGETHER
        for first in range(shard.first_row, shard.end_row, step):
            part = replace(shard, rows=(first, min(first + step, shard.end_row)))
            yield _Piece(name, (part,), row)
            row += part.num_rows


def update_weights(
    weights: ModelWeights,
    given: Iterable[tuple[str, Tensor]],
    place: Callable[[str], Tensor],
    finish: Callable[[str, Tensor], None],
    scales: ScalesInUse,
    written: set[str] | None = None,
) -> int:
    """Write (checkpoint name, tensor) pairs into the parameters and return how many were used; raises CorruptWeights.

    Scales of the KV cache are passed over; other ones than those in use raise ModelError.

    Tensors are whole ones, of which a share of a model takes its part; those that it has nothing of are checked and count as used.

    Args:
        place: returns a tensor with a parameter's present value, to be written into.
        finish: called with each changed parameter once all its tensors, or all tensors in all, have come.
        written: gets the name of each tensor, as the model has it, before it is written.
    """
    parts, used = weights.parts(), 0
    changed: dict[str, tuple[Tensor, int]] = {}
    try:
        for name, values in unstacked_pairs(given, weights.shapes):
            known = standard_name(name, weights.shapes)
            shape = weights.shapes.get(known)
            if shape is None:
                if name in weights.optional or _is_ignored(name, weights.unused) or scales.passes(name, values):
                    continue
                raise CorruptWeights("the model has no tensor of this name", found=name)
            if tuple(values.shape) != shape:
                raise CorruptWeights(
                    f"tensor {name} has another shape than the model's",
                    found=f"{list(values.shape)} instead of {list(shape)}",
                )
            if written is not None and known in parts:
                written.add(known)
            for parameter, row, shard in parts.get(known, ()):
                stored = weights.stored[parameter]
                if parameter not in changed:
                    changed[parameter] = place(parameter), stored.num_rows
                target, left = changed.pop(parameter)
                stored.write(target, row, shard.of(values[shard.first_row : shard.end_row]))
                if left > shard.num_rows:
                    changed[parameter] = target, left - shard.num_rows
                else:
                    finish(parameter, target)
            used += 1
    finally:
        for parameter, (target, _) in changed.items():
            finish(parameter, target)
    return used
