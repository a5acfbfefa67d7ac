"""A rank's weights between steps: which are valid, who writes them, and where they can be read again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from hardpoint.interfaces.allocator import WEIGHTS, DeviceAllocator, MemoryStats
from hardpoint.interfaces.errors import CapabilityRefused, WeightsMissing
from hardpoint.models import open_model
from hardpoint.worker.loading import LoadedModel, kept_default_dtype

if TYPE_CHECKING:
    from torch import Tensor

    from hardpoint.models import ModelSource


class WeightLedger:
    """Keeps account of the weights that a sleep discarded and that were not written since.

    Args:
        names: the checkpoint names of all weights.
    """

    def __init__(self, names: Set[str]) -> None:
        self._names = frozenset(names)
        self._missing: frozenset[str] = frozenset()

    @property
    def missing(self) -> frozenset[str]:
        """Names of the weights without valid values."""
        return self._missing

    def discard_all(self) -> None:
        """Note that no weight is valid any more."""
        self._missing = self._names

    def declare_valid(self) -> None:
        """Note that all weights are valid."""
        self._missing = frozenset()

    @contextmanager
    def writing(self, written: Set[str]) -> Iterator[None]:
        """Note what a write did when it ends: what it wrote is valid, or everything is missing when it broke off in the middle.

        Args:
            written: filled during the write, with each name before its weight is written.
        """
        try:
            yield
        except BaseException:
            if written:
                self.discard_all()
            raise
        self._missing -= written


KEPT = frozenset({WEIGHTS})
"""Tags all of whose writers say so: the loader, updates and reloads."""


class Weights:
    """Writes a model's weights, and tells the allocator of every write.

    Attributes:
        ledger: which weights hold valid values.
    """

    def __init__(self, loaded: LoadedModel, allocator: DeviceAllocator, synchronize: Callable[[], None]) -> None:
        """Take charge of weights that were just loaded.

        Args:
            synchronize: waits until the device has done all its work.
        """
        self._model, self._source = loaded.model, loaded.source
        self._allocator, self._synchronize = allocator, synchronize
        self.ledger = WeightLedger(loaded.model.weight_names())
        self._unsourced = ""
        self._declare_sources(loaded.source, loaded.fingerprint)

    def update(self, weights: Iterable[tuple[str, Tensor]]) -> int:
        """Replace weights by (checkpoint name, tensor) pairs; see `Worker.write_weights`."""
        self._synchronize()
        written: set[str] = set()
        try:
            with torch.inference_mode(), self.ledger.writing(written):
                return self._model.update_weights(weights, written)
        finally:
            self._note_written(written, "they were updated since they were loaded")

    def reload(self, model: str | None, *, trust_remote_code: bool) -> int:
        """Load the weights again from the source that was loaded last, or from `model`; see `Worker.write_weights`."""
        if model is None:
            source = self._source.opener()()
        else:
            overrides = self._source.hf_overrides
            source = open_model(model, trust_remote_code=trust_remote_code, hf_overrides=overrides)
        fingerprint = source.fingerprint()
        self._synchronize()
        written: set[str] = set()
        try:
            with torch.no_grad(), kept_default_dtype(), self.ledger.writing(written):
                count = self._model.reload(source, written)
        finally:
            self._note_written(written, "a reload broke off")
        self._source = source
        self._declare_sources(source, fingerprint)
        return count

    def restore(self, *, trust_remote_code: bool) -> None:
        """Load the weights again where a sleep has discarded them; raises what `reload` raises."""
        if self.ledger.missing:
            self.reload(None, trust_remote_code=trust_remote_code)

    def declare_valid(self) -> None:
        """Say that the weights are right as they stand; backups and sources of them are void."""
        self._note_written(self.ledger.missing or KEPT, "they were written by ways that the engine does not see")
        self.ledger.declare_valid()

    def check_valid(self) -> None:
        """Raise WeightsMissing where not all weights hold valid values."""
        missing = self.ledger.missing
        if missing:
            raise WeightsMissing(
                "the weights were discarded and have not been loaded again",
                found=f"{len(missing)} tensors are missing",
                hint="Call reload_weights(), update_weights() with all of them, or declare_weights_valid()",
            )

    def check_sourced(self, stats: MemoryStats) -> None:
        """Raise CapabilityRefused for weights that are nowhere to be read again."""
        weights = stats.tags.get(WEIGHTS)
        if weights is None or not weights.sourced:
            raise CapabilityRefused(
                "the weights cannot be left to their source",
                (self._unsourced or "they cannot be told apart from other memory of the decoder",),
                hint="Use the tier host or disk, or reload_weights() first",
            )

    def _declare_sources(self, source: ModelSource, fingerprint: object) -> None:
        """Tell the allocator where the weights can be read again, unless their files changed while they were loaded."""
        if source.fingerprint() == fingerprint:
            self._model.declare_sources(self._allocator, source)
            self._unsourced = ""
        else:
            self._unsourced = "the checkpoint changed while it was loaded"
        source.close_weights()

    def _note_written(self, written: Set[str], reason: str) -> None:
        if written:
            self._allocator.mark_written([WEIGHTS])
            self._unsourced = reason
