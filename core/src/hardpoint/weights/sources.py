"""Where loaded weights can be read again: extents of the files that they came from, or a callback that loads them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, Protocol, Self, TypeVar

from hardpoint.interfaces.allocator import FileExtent
from hardpoint.interfaces.errors import BackupCorrupt, ModelError

if TYPE_CHECKING:
    from pathlib import Path

    from hardpoint.interfaces.dtypes import DType
    from hardpoint.layers.weights import StoredWeight
    from hardpoint.weights.checkpoint import Checkpoint


class Source(Protocol):
    """What weights were loaded from."""

    def opener(self) -> Callable[[], Self]:
        """Return what opens it again; it keeps no file open."""

    def fingerprint(self) -> tuple[tuple[Path, tuple[int, int]], ...]:
        """Return what tells whether a file has changed, for each file."""


S = TypeVar("S", bound=Source)


class WeightReloader(Generic[S]):
    """Writes weights again from the checkpoint that they were loaded from; given to an allocator as a source.

    It opens the checkpoint when it is called and closes it again, and holds the model by a weak reference, since the model
    holds the memory and the memory's allocator holds this.

    Args:
        load: bound method of the model that writes the weights from an opened source.
        source: what they were loaded from, just now.
    """

    def __init__(self, load: Callable[[S], None], source: S) -> None:
        self._load = weakref.WeakMethod(load)
        self._reopen = source.opener()
        self._files = source.fingerprint()

    def __call__(self) -> None:
        """Write the weights; raises BackupCorrupt when the checkpoint is not the one that was loaded any more."""
        load = self._load()
        if load is None:
            return
        try:
            source = self._reopen()
            self._check(source)
            load(source)
        except (ModelError, OSError) as error:
            raise _changed(str(error)) from error
        self._check(source)

    def _check(self, source: S) -> None:
        before, found = dict(self._files), dict(source.fingerprint())
        different = sorted(path.name for path in before.keys() | found.keys() if before.get(path) != found.get(path))
        if different:
            raise _changed(f"another size or time of change of {', '.join(different[:4])}")


def _changed(found: str) -> BackupCorrupt:
    return BackupCorrupt(
        "the checkpoint that the weights were loaded from has changed",
        found=found,
        hint="Put it back and wake again; or drop these weights with sleep(level=2), wake, and reload_weights()",
    )


def extents(checkpoint: Checkpoint, weight: StoredWeight, dtype: DType) -> tuple[FileExtent, ...] | None:
    """Return where the bytes of a parameter lie, or None where no file has them as they are on the device.

    Args:
        checkpoint: under the model's names.
        dtype: of the parameter on the device.
    """
    if not weight.verbatim:
        return None
    found: list[FileExtent] = []
    start = 0
    for shard in weight.shards:
        stored = checkpoint.stored(shard.name)
        if stored is None or stored.dtype is not dtype or shard.columns is not None:
            return None
        row_bytes = stored.size // shard.shape[0]
        size = shard.num_rows * row_bytes
        found.append(FileExtent(start, size, str(stored.path), stored.offset + shard.first_row * row_bytes))
        start += size
    return tuple(found)
