"""`hardpoint sleep-demo`: an engine generates, sleeps, wakes and generates the same; what came back is measured."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hardpoint.cli.exit_codes import ExitCode
from hardpoint.cli.options import EngineOptions, takes
from hardpoint.cli.session import backend_name, describe

if TYPE_CHECKING:
    from hardpoint.engine.llm import LLM
    from hardpoint.interfaces import MemoryReport

_MIB = 1 << 20
_ENOUGH = 0.9
"""Share of the weights' bytes that a sleep must give back to have worked."""


@dataclass(frozen=True)
class Phase:
    """One measured operation; sizes in bytes, times in seconds.

    Attributes:
        mapped: given back to the device by a sleep, taken by a wake.
        copied: to or from backups, sources or the checkpoint.
        skipped: not copied, since a clean backup or the source has it.
        resident_before, resident_after: of this process, as the operating system says; None where it does not.
        free_before, free_after: of the device, as its driver says; None where no memory was asked for.
    """

    name: str
    seconds: float
    mapped: int
    copied: int
    skipped: int
    resident_before: int | None
    resident_after: int | None
    free_before: int | None
    free_after: int | None

    @property
    def bytes_per_second(self) -> float | None:
        """Copied bytes by time; None where nothing was copied."""
        return self.copied / self.seconds if self.copied and self.seconds else None


@takes(engine=EngineOptions)
def sleep_demo(
    *,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="What to complete before and after.")] = (
        "Once upon a time, in a small village by the sea,"
    ),
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate each time.")] = 32,
    level: Annotated[int, typer.Option(min=1, max=2, help="1 preserves the weights, 2 discards them.")] = 1,
    tier: Annotated[
        str | None, typer.Option(help="host, disk or source; without it, what is useful on the device.")
    ] = None,
    cycles: Annotated[int, typer.Option(min=1, help="How often to sleep and wake.")] = 1,
    directory: Annotated[str | None, typer.Option(help="Folder for backups on disk.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    engine: EngineOptions,
) -> None:
    """Generate, sleep, wake, generate again; print what each took and what memory came back.

    The exit status is 0 if the text was the same in every cycle, and at least 90 % of the weights' bytes came back in each sleep:
    as an accelerator's driver counts its free memory, or as the operating system counts this process's.
    """
    with engine.open(enable_sleep_mode=True, sleep_tier=tier, sleep_disk_directory=directory) as llm:
        text = _generate(llm, prompt, max_tokens)
        report: dict[str, Any] = {
            **describe(llm.info),
            "settings": {"prompt": prompt, "max_tokens": max_tokens, "level": level, "cycles": cycles},
            "cold_start_seconds": llm.info.load_seconds,
            "text": text,
            "cycles": [_cycle(llm, level, lambda: _generate(llm, prompt, max_tokens) == text) for _ in range(cycles)],
        }
    _conclude(report)
    if as_json:
        typer.echo(json.dumps(report, ensure_ascii=False))
    else:
        _show(report, backend_name(llm.info))
    if not (report["same_text"] and report["memory_came_back"]):
        raise typer.Exit(ExitCode.FAILED)


def _generate(llm: LLM, prompt: str, max_tokens: int) -> str:
    from hardpoint import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].text


def _cycle(llm: LLM, level: int, same_text: Callable[[], bool]) -> dict[str, Any]:
    """Sleep and wake once; return what was measured, as plain data."""
    resident = _resident()
    with _progress_bar(f"Sleeping at level {level}") as progress:
        slept = llm.sleep(level=level, progress=progress)
    phases = [_phase("sleep", slept.seconds, slept.memory, resident)]
    resident = _resident()
    woken = llm.wake_up()
    phases.append(_phase("wake", woken.seconds, woken.memory, resident))
    if not woken.weights_valid:
        phases.append(_reload(llm))
    came_back = _came_back(phases[0], llm.info.accelerator)
    return {
        "tier": None if slept.tier is None else slept.tier.value,
        "phases": [{**asdict(phase), "bytes_per_second": phase.bytes_per_second} for phase in phases],
        "returned_bytes": came_back,
        "memory_came_back": came_back >= _ENOUGH * llm.info.weight_bytes,
        "wake_seconds": sum(phase.seconds for phase in phases[1:]),
        "same_text": same_text(),
    }


def _phase(name: str, seconds: float, memory: MemoryReport | None, resident_before: int | None) -> Phase:
    return Phase(
        name=name,
        seconds=seconds,
        mapped=0 if memory is None else memory.unmapped,
        copied=0 if memory is None else memory.preserved,
        skipped=0 if memory is None else memory.skipped,
        resident_before=resident_before,
        resident_after=_resident(),
        free_before=None if memory is None else memory.free_before,
        free_after=None if memory is None else memory.free_after,
    )


def _reload(llm: LLM) -> Phase:
    resident, start = _resident(), time.perf_counter()
    llm.reload_weights()
    seconds = time.perf_counter() - start
    return Phase("reload", seconds, 0, llm.info.weight_bytes, 0, resident, _resident(), None, None)


def _conclude(report: dict[str, Any]) -> None:
    """Add what follows from all cycles."""
    cycles = report["cycles"]
    report["same_text"] = all(cycle["same_text"] for cycle in cycles)
    report["memory_came_back"] = all(cycle["memory_came_back"] for cycle in cycles)
    report["wake_seconds"] = statistics.median(cycle["wake_seconds"] for cycle in cycles)
    report["cold_start_over_wake"] = report["cold_start_seconds"] / report["wake_seconds"]


def _resident() -> int | None:
    """Return the bytes of this process that are in memory (proc(5), VmRSS); None where the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:")), None)


def _came_back(sleep: Phase, accelerator: bool) -> int:
    """Return the bytes that a sleep gave back: as the device's driver counts them, or for the host's own memory the system."""
    if accelerator:
        after, before = sleep.free_after, sleep.free_before
    else:
        after, before = sleep.resident_before, sleep.resident_after
    return 0 if after is None or before is None else after - before


@contextmanager
def _progress_bar(title: str) -> Iterator[Callable[[int, int], None] | None]:
    """Show bytes done on standard error, where that is a terminal."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn(title), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _show(report: dict[str, Any], backend: str) -> None:
    # Figures are never cut off: a line that is wider than the terminal is the terminal's to fold.
    console = Console(highlight=False, soft_wrap=True, width=1000)
    model, level = report["model"]["name"], report["settings"]["level"]
    tier = report["cycles"][0]["tier"]
    console.print(f"{model} on {backend}, sleep level {level}, tier {tier}", markup=False)
    table = Table(box=None)
    columns = ("cycle", "phase", "memory MiB", "copied MiB", "seconds", "GB/s", "resident MiB", "free MiB")
    for column in columns:
        table.add_column(column, justify="left" if column == "phase" else "right")
    for number, cycle in enumerate(report["cycles"], start=1):
        for phase in cycle["phases"]:
            table.add_row(str(number), *_row(phase))
    console.print(table)
    weights = report["engine"]["weight_bytes"]
    returned = min(cycle["returned_bytes"] for cycle in report["cycles"])
    console.print(f"came back: {returned / _MIB:,.1f} MiB, {returned / weights:.1%} of the weights' bytes")
    console.print(
        f"wake {report['wake_seconds']:.3f} s, cold start {report['cold_start_seconds']:.3f} s: "
        f"{report['cold_start_over_wake']:.1f} times faster"
    )
    same = "the same text in every cycle" if report["same_text"] else "ANOTHER TEXT after waking"
    console.print(f"{same}: {report['text'].strip()}", markup=False)


def _row(phase: dict[str, Any]) -> tuple[str, ...]:
    sign = "-" if phase["name"] == "sleep" else "+"
    speed = phase["bytes_per_second"]
    return (
        phase["name"],
        f"{sign}{phase['mapped'] / _MIB:,.1f}" if phase["mapped"] else "",
        f"{phase['copied'] / _MIB:,.1f}",
        f"{phase['seconds']:.3f}",
        "" if speed is None else f"{speed / 1e9:.2f}",
        _change(phase["resident_before"], phase["resident_after"]),
        _change(phase["free_before"], phase["free_after"]),
    )


def _change(before: int | None, after: int | None) -> str:
    return "" if before is None or after is None else f"{before / _MIB:,.0f} → {after / _MIB:,.0f}"
