"""From checkpoint tensors to the decoder's weights: checked, assembled, copied once."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from hardpoint.interfaces.attention import Refusal
from hardpoint.interfaces.errors import CorruptWeights, ModelError
from hardpoint.models.checkpoint import Checkpoint, RenamedCheckpoint
from hardpoint.models.families import LeanModel, Piece
from hardpoint.models.kv_scales import is_scale

if TYPE_CHECKING:
    from torch import Tensor

    from hardpoint.interfaces.dtypes import DType
    from hardpoint.models.source import ModelSource

Progress = Callable[[int, int], None]

_READERS = 4
_IGNORED = re.compile(r"rotary_emb\.|\.masked_bias$|\.attn\.bias$")


def with_standard_names(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with the prefix `model.` where a bare model was saved without it."""
    shapes = checkpoint.shapes()
    if "model.embed_tokens.weight" not in shapes and "embed_tokens.weight" in shapes:
        return RenamedCheckpoint(checkpoint, "model.")
    return checkpoint


def check_tensors(
    expected: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[int, ...]],
    optional: Iterable[str] = (),
) -> None:
    """Compare a checkpoint's tensors with those that a model is made of; raises CorruptWeights that lists the differences.

    Args:
        optional: names that a checkpoint may have without need (a tied head).
    """
    passed_over = set(optional)
    problems: list[str] = []
    missing = sorted(set(expected) - set(found))
    if missing:
        problems.append(f"missing: {_listed(missing)}")
    unexpected = sorted(
        name
        for name in set(found) - set(expected)
        if name not in passed_over and not _IGNORED.search(name) and not is_scale(name)
    )
    if unexpected:
        problems.append(f"unexpected: {_listed(unexpected)}")
    wrong = [
        f"{name} is {list(found[name])}, not {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if wrong:
        problems.append(f"of another shape: {_listed(wrong)}")
    if problems:
        raise CorruptWeights(
            "the checkpoint's tensors are not those of the configuration",
            found="; ".join(problems),
            hint="Check that config.json and the weights belong to the same model",
        )


def load_weights(
    model: LeanModel,
    checkpoint: Checkpoint,
    place: Callable[[str], Tensor],
    finish: Callable[[str, Tensor], None],
    progress: Progress | None = None,
    *,
    only: Collection[str] | None = None,
    begin: Callable[[], None] | None = None,
) -> None:
    """Fill every weight of the decoder from the checkpoint; raises CorruptWeights, before anything is written if it can.

    Weights are read by a few threads, since dequantisation and page faults leave the interpreter free, and finished in
    order on the calling thread. At most a few weights are under way at a time.

    Args:
        place: returns the tensor that a weight is written into (by name of the spec).
        finish: called with each weight once it is whole.
        progress: called with (tensors done, tensors in all).
        only: the weights to fill, by name of the spec; None for all.
        begin: called once the checkpoint's tensors were compared with the model's, before the first is written.
    """
    checkpoint = with_standard_names(checkpoint)
    check_tensors(model.checkpoint_shapes(), checkpoint.shapes(), optional=_unused(model))
    wanted = [weight for weight in model.sources if only is None or weight in only]
    done, total = 0, len(wanted)
    if begin is not None:
        begin()

    def fill(weight: str) -> Tensor:
        target, row, offset = place(weight), 0, model.offset(weight)
        for piece in model.sources[weight]:
            for first, values in checkpoint.rows(piece.name, piece.first_row, piece.end_row):
                _write(target, row + first - piece.first_row, _columns(values, piece), offset)
            row += piece.num_rows
        return target

    with ThreadPoolExecutor(_READERS, thread_name_prefix="hardpoint-load") as readers:
        under_way: deque[tuple[str, Future[Tensor]]] = deque()
        try:
            for weight in wanted:
                under_way.append((weight, readers.submit(fill, weight)))
                if len(under_way) > 2 * _READERS:
                    done += _finish_oldest(under_way, finish, progress, done, total)
            while under_way:
                done += _finish_oldest(under_way, finish, progress, done, total)
        finally:
            for _, future in under_way:
                future.cancel()


def _finish_oldest(
    under_way: deque[tuple[str, Future[Tensor]]],
    finish: Callable[[str, Tensor], None],
    progress: Progress | None,
    done: int,
    total: int,
) -> int:
    weight, future = under_way.popleft()
    finish(weight, future.result())
    if progress is not None:
        progress(done + 1, total)
    return 1


def update_weights(
    model: LeanModel,
    weights: Iterable[tuple[str, Tensor]],
    place: Callable[[str], Tensor],
    finish: Callable[[str, Tensor], None],
    written: set[str] | None = None,
) -> int:
    """Write (checkpoint name, tensor) pairs into the decoder's weights and return how many were used; raises CorruptWeights.

    Scales of the KV cache are passed over; other ones than those in use raise ModelError.

    Tensors are whole ones, of which a share of a model takes its part; those that it has nothing of are checked and count as used.

    Args:
        place: returns a tensor with a weight's present value, to be written into.
        finish: called with each changed weight once all its tensors, or all tensors in all, have come.
        written: gets the name of each tensor, as the model has it, before it is written.
    """
    parts, shapes, unused, used = model.parts(), model.checkpoint_shapes(), set(_unused(model)), 0
    rows = {weight: sum(piece.num_rows for piece in pieces) for weight, pieces in model.sources.items()}
    changed: dict[str, tuple[Tensor, int]] = {}
    try:
        for name, values in weights:
            known = name if name in shapes else f"model.{name}"
            shape = shapes.get(known)
            if shape is None:
                if name in unused or _IGNORED.search(name) or model.kv_scales.passes(name, values):
                    continue
                raise CorruptWeights("the model has no tensor of this name", found=name)
            if tuple(values.shape) != shape:
                raise CorruptWeights(
                    f"tensor {name} has another shape than the model's",
                    found=f"{list(values.shape)} instead of {list(shape)}",
                )
            if written is not None and known in parts:
                written.add(known)
            for weight, row, piece in parts.get(known, ()):
                if weight not in changed:
                    changed[weight] = place(weight), rows[weight]
                target, left = changed.pop(weight)
                part = _columns(values[piece.first_row : piece.end_row], piece)
                _write(target, row, part, model.offset(weight))
                if left > piece.num_rows:
                    changed[weight] = target, left - piece.num_rows
                else:
                    finish(weight, target)
            used += 1
    finally:
        for weight, (target, _) in changed.items():
            finish(weight, target)
    return used


def check_same_model(model: LeanModel, source: ModelSource, dtype: DType) -> None:
    """Raise ModelError unless `source` is a checkpoint of this model with its KV scales, whose weights may be other ones."""
    other = source.lean_model(dtype)
    if isinstance(other, Refusal) or not model.computes_the_same(other):
        raise ModelError(
            f"{source.path} is not a checkpoint of the model that is loaded",
            found=f"{source.architecture} with another configuration",
            hint="Make a new engine for another model",
        )
    model.kv_scales.check(source.kv_scales)


def lean_checkpoint(source: ModelSource, model: LeanModel, seed: int) -> Checkpoint:
    """Return the weights of a source; random ones of this seed where its format is dummy."""
    if source.format == "dummy":
        return source.dummy_checkpoint(model.checkpoint_shapes(), seed)
    return source.checkpoint


def _columns(values: Tensor, piece: Piece) -> Tensor:
    return values if piece.columns is None else values[:, piece.columns[0] : piece.columns[1]]


def _write(target: Tensor, row: int, values: Tensor, offset: float) -> None:
    values = values.float() + offset if offset else values
    target[row : row + len(values)].copy_(values)


def _unused(model: LeanModel) -> tuple[str, ...]:
    return ("lm_head.weight",) if model.spec.tied else ()


def _listed(names: Sequence[str], limit: int = 8) -> str:
    more = "" if len(names) <= limit else f" and {len(names) - limit} more"
    return ", ".join(names[:limit]) + more
