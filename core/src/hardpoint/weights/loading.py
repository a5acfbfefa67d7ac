"""From checkpoint tensors to a model's parameters: checked, assembled, copied once."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hardpoint.interfaces.errors import CorruptWeights
from hardpoint.weights.checkpoint import Checkpoint, RenamedCheckpoint
from hardpoint.weights.kv_scales import is_scale
from hardpoint.weights.stacked_experts import unstacked, unstacked_pairs

if TYPE_CHECKING:
    from torch import Tensor

    from hardpoint.layers.weights import StoredWeight, WeightShard
    from hardpoint.weights.kv_scales import ScalesInUse

Progress = Callable[[int, int], None]

_READERS = 4
_PREFIXES = ("model.", "bert.", "roberta.")
_LANGUAGE = "language_model."
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
        checkpoint = RenamedCheckpoint(checkpoint, standard)
    return unstacked(checkpoint, shapes)


def standard_name(name: str, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return the name that a model's tensor has in whole models; others are returned as they are.

    Bare models are saved without what stands before their tensors' names, language models beside other parts with more, and old
    encoders call a norm's weight and bias gamma and beta.
    """
    stem, _, last = name.rpartition(".")
    if stem.endswith("LayerNorm") and last in _OLD_NORMS:
        name = f"{stem}.{_OLD_NORMS[last]}"
    possible = (name, *(prefix + name for prefix in _PREFIXES), name.removeprefix(_LANGUAGE))
    found = (known for known in possible if known in shapes)
    return next(found, name)


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
        problems.append(f"missing: {_listed(missing)}")
    unexpected = sorted(
        name
        for name in set(found) - set(expected)
        if name not in passed_over and not _is_ignored(name, unused) and not is_scale(name)
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


def load_weights(
    weights: ModelWeights,
    checkpoint: Checkpoint,
    place: Callable[[str], Tensor],
    finish: Callable[[str, Tensor], None],
    progress: Progress | None = None,
    *,
    only: Collection[str] | None = None,
    begin: Callable[[], None] | None = None,
) -> None:
    """Fill every parameter from the checkpoint; raises CorruptWeights, before anything is written if it can.

    Weights are read by a few threads, since dequantisation and page faults leave the interpreter free, and finished in
    order on the calling thread. At most a few weights are under way at a time.

    Args:
        place: returns the tensor that a parameter is written into.
        finish: called with each parameter's name and tensor once it is whole.
        progress: called with (parameters done, parameters in all).
        only: the parameters to fill; None for all.
        begin: called once the checkpoint's tensors were compared with the model's, before the first is written.
    """
    checkpoint = with_standard_names(checkpoint, weights.shapes)
    check_tensors(weights.shapes, checkpoint.shapes(), weights.optional, weights.unused)
    wanted = [name for name in weights.stored if only is None or name in only]
    done, total = 0, len(wanted)
    if begin is not None:
        begin()

    def fill(name: str) -> Tensor:
        target, row, stored = place(name), 0, weights.stored[name]
        for shard in stored.shards:
            for first, values in checkpoint.rows(shard.name, shard.first_row, shard.end_row):
                stored.write(target, row + first - shard.first_row, shard.of(values))
            row += shard.num_rows
        return target

    with ThreadPoolExecutor(_READERS, thread_name_prefix="hardpoint-load") as readers:
        under_way: deque[tuple[str, Future[Tensor]]] = deque()
        try:
            for name in wanted:
                under_way.append((name, readers.submit(fill, name)))
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


def _listed(names: Sequence[str], limit: int = 8) -> str:
    more = "" if len(names) <= limit else f" and {len(names) - limit} more"
    return ", ".join(names[:limit]) + more
