"""The progress bar of offline runs."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from hardpoint.engine.info import EngineStats, StepTotals


class StepProgress:
    """Finished requests, and prefill and decode tokens per second, on stderr; nothing where that is not a terminal."""

    def __init__(self, num_requests: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("requests"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[speed]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("requests", total=num_requests, speed="")

    def update(self, finished: int, totals: StepTotals | EngineStats) -> None:
        """Count requests as finished and show the rates so far."""
        prefill = totals.prefill_tokens / totals.prefill_seconds if totals.prefill_seconds else 0.0
        decode = totals.decode_tokens / totals.decode_seconds if totals.decode_seconds else 0.0
        speed = f"prefill {prefill:,.0f} tok/s, decode {decode:,.0f} tok/s"
        self._bar.update(self._task, advance=finished, speed=speed)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
