"""Requests sent as a schedule says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hardpoint.bench.answers import Answer


class Asks(Protocol):
    """What sends one request."""

    async def ask(self, body: bytes) -> Answer:
        """Return what became of it."""


@dataclass(frozen=True)
class Sent:
    """A run.

    Attributes:
        answers: in the order in which they ended.
        seconds: from the first request to the end of the last answer, or to the interruption.
        processor_seconds: of this process meanwhile.
        unfinished: requests that were interrupted or not sent any more.
    """

    answers: Sequence[Answer]
    seconds: float
    processor_seconds: float
    unfinished: int


async def send(
    client: Asks, bodies: Sequence[bytes], offsets: Sequence[float], concurrency: int | None, stop: asyncio.Event
) -> Sent:
    """Send each body at its offset in seconds, or later where `concurrency` requests are in progress; end early once `stop` is set.

    The time that a request waits for others to end is not part of its own.
    """
    answers: list[Answer] = []
    free = asyncio.Semaphore(concurrency or max(len(bodies), 1))
    start, processor = time.perf_counter(), time.process_time()

    async def one(body: bytes) -> None:
        try:
            answers.append(await client.ask(body))
        finally:
            free.release()

    async def whole() -> None:
        async with asyncio.TaskGroup() as tasks:
            for body, offset in zip(bodies, offsets, strict=True):
                early = start + offset - time.perf_counter()
                if early > 0:
                    await asyncio.sleep(early)
                await free.acquire()
                tasks.create_task(one(body))

    sending, stopping = asyncio.ensure_future(whole()), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((sending, stopping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        sending.cancel()
        await asyncio.wait([sending])
    if not sending.cancelled():
        sending.result()
    seconds = time.perf_counter() - start
    return Sent(answers, seconds, time.process_time() - processor, len(bodies) - len(answers))
