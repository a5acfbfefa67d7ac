"""Several models on one device that does not hold all of them: who is awake."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hardpoint.interfaces.errors import DeviceOutOfMemory, KVCacheTooSmall

if TYPE_CHECKING:
    from hardpoint.server.served_model import ServedModel

_log = logging.getLogger("hardpoint.server")

_MIB, _GIB = 1 << 20, 1 << 30
_KEPT = 200
_PAUSE = 0.02
"""Seconds."""


@dataclass(frozen=True)
class Decision:
    """Why one model slept.

    Attributes:
        at: seconds since the epoch.
        slept, for_model: names.
    """

    at: float
    slept: str
    for_model: str
    reason: str


class DeviceBudget:
    """Keeps what the awake models of a device take within a limit: one that wakes waits until others have made way.

    The model that was used least lately goes first, among those whose time awake is over: idle ones, then busy ones, which end what
    they have and take nothing new. So a model that is asked for waits for at most the shortest time awake and what another has in progress,
    and models that are asked for in turns do not spend their time on waking.

    Args:
        limit: bytes.
        min_awake: seconds that a model stays awake at least.
    """

    def __init__(self, limit: int, min_awake: float) -> None:
        self.limit = limit
        self.decisions: deque[Decision] = deque(maxlen=_KEPT)
        self._min_awake = min_awake
        self._models: Sequence[ServedModel] = ()
        self._waking = asyncio.Lock()
        self._asking: list[ServedModel] = []

    def watch(self, models: Sequence[ServedModel]) -> None:
        """Take charge of models."""
        self._models = models
        for model in models:
            model.room = self.room

    @asynccontextmanager
    async def room(self, model: ServedModel) -> AsyncIterator[None]:
        """The context in which a model takes its memory, one after the other; raises DeviceOutOfMemory where it never has room."""
        self._asking.append(model)
        try:
            while True:
                async with self._waking:
                    if await self._make_room(model):
                        yield
                        break
                # Poll: meanwhile another model may become idle, end, or have to wake before it can make way.
                await asyncio.sleep(_PAUSE)
        finally:
            self._asking.remove(model)
        if model.need > self.limit:
            raise _too_large(model.name, model.need, self.limit)

    async def _make_room(self, model: ServedModel) -> bool:
        """Put others to sleep until there is room for a model; returns False where none may be now, or another one asked before."""
        # A model's need is known once it was loaded; until then it may take the whole budget.
        need = (model.need or self.limit) - model.device_bytes
        while sum(one.device_bytes for one in self._models) + need > self.limit:
            now = time.monotonic()
            awake = [one for one in self._models if one is not model and one.device_bytes]
            if not awake:
                raise _too_large(model.name, need, self.limit)
            first = min(
                (one for one in awake if one.can_make_way),
                key=lambda one: (max(one.awake_since + self._min_awake, now), one.in_progress > 0, one.last_used),
                default=None,
            )
            if first is None or first.awake_since + self._min_awake > now or self._asking[0] is not model:
                return False
            busy = f" and {first.in_progress} requests in progress" if first.in_progress else ""
            reason = f"'{model.name}' was asked for; '{first.name}' was used {now - first.last_used:.1f} s before{busy}"
            await first.make_way(reason)
            self.decisions.append(Decision(time.time(), first.name, model.name, reason))
        return True


def too_small(error: KVCacheTooSmall, limit: int, share: float) -> KVCacheTooSmall:
    """Return an engine's error with a hint that names the budget: `limit` bytes, of which the engine's share of the device was made."""
    if error.enough is None:
        return error
    needed = math.ceil(error.enough * limit / share / _MIB)
    last = f"raise --device-memory to {needed}MiB or more"
    return KVCacheTooSmall.of(error.problem, error.found, error.others, last, error.enough)


def _too_large(name: str, need: int, limit: int) -> DeviceOutOfMemory:
    return DeviceOutOfMemory(
        f"the model '{name}' takes {need / _GIB:.2f} GiB of its device",
        found=f"the budget of all models is {limit / _GIB:.2f} GiB",
        hint="Raise --device-memory, or lower --num-blocks or --max-model-len",
    )
