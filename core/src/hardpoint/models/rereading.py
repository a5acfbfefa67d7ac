"""Where loaded weights can be read again: extents of the files that they came from, or a callback that loads them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from hardpoint.interfaces.allocator import FileExtent
from hardpoint.interfaces.errors import BackupCorrupt, ModelError
from hardpoint.models.weights import with_standard_names

if TYPE_CHECKING:
    from hardpoint.interfaces.dtypes import DType
    from hardpoint.models.checkpoint import Checkpoint
    from hardpoint.models.families import LeanModel
    from hardpoint.models.source import ModelSource


class Restorer:
    """Writes weights again from the checkpoint that they were loaded from; given to an allocator as a source.

    It opens the checkpoint when it is called and closes it again, and holds the model by a weak reference, since the model
    holds the memory and the memory's allocator holds this.

    Args:
        load: bound method of the model that writes the weights from an opened source.
        source: what they were loaded from, just now.
    """

    def __init__(self, load: Callable[[ModelSource], None], source: ModelSource) -> None:
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

    def _check(self, source: ModelSource) -> None:
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


def extents(checkpoint: Checkpoint, model: LeanModel, weight: str, dtype: DType) -> tuple[FileExtent, ...] | None:
    """Return where the bytes of a weight of a lean decoder lie, or None where no file has them as they are on the device.

    Args:
        dtype: of the weight on the device.
    """
    if model.offset(weight):
        return None
    checkpoint = with_standard_names(checkpoint)
    found: list[FileExtent] = []
    start = 0
    for piece in model.sources[weight]:
        stored = checkpoint.stored(piece.name)
        if stored is None or stored.dtype is not dtype or piece.columns is not None:
            return None
        row_bytes = stored.size // piece.shape[0]
        size = piece.num_rows * row_bytes
        found.append(FileExtent(start, size, str(stored.path), stored.offset + piece.first_row * row_bytes))
        start += size
    return tuple(found)
