"""What every benchmark of this folder prints and stores: the machine, aligned tables, verdicts against a bar, JSON."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent

_FLAGS = (
    "sse4_2", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16",
    "avx_vnni", "amx_tile", "amx_bf16", "amx_int8", "asimd", "bf16", "i8mm", "sve", "sve2",
)  # fmt: skip


def machine(packages: Iterable[str] = ()) -> dict[str, Any]:
    """Describe where and when a measurement was made.

    Args:
        packages: distributions of this environment whose versions belong beside the numbers; absent ones are left out.
    """
    cpuinfo = _fields_of("/proc/cpuinfo")
    flags = set(cpuinfo.get("flags", cpuinfo.get("Features", "")).split())
    memory = _fields_of("/proc/meminfo").get("MemTotal", "0 kB").split()[0]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "cpu": cpuinfo.get("model name", platform.processor() or platform.machine()),
        "cpu_family_model_stepping": "/".join(cpuinfo.get(key, "?") for key in ("cpu family", "model", "stepping")),
        "flags": [flag for flag in _FLAGS if flag in flags],
        "cores": os.cpu_count(),
        "cores_usable": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(memory) / (1 << 20), 1),
        "kernel": platform.release(),
        "load_average_at_start": [round(value, 2) for value in os.getloadavg()],
        "python": platform.python_version(),
        "packages": versions(packages),
    }


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of the distributions that are installed in this environment."""
    found = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def command() -> str:
    """Return the command line that reproduces this run, from the root of the repository."""
    script = Path(sys.argv[0]).resolve()
    shown = script.relative_to(REPOSITORY) if script.is_relative_to(REPOSITORY) else script.name
    return shlex.join(["python", str(shown), *sys.argv[1:]])


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return an aligned Markdown table; the first column is left-aligned, the others right-aligned."""
    body = [list(row) for row in rows]
    widths = [max(len(row[column]) for row in [list(header), *body]) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first = cells[0].ljust(widths[0])
        rest = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return "| " + " | ".join([first, *rest]) + " |"

    rule = "|" + "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]) + "|"
    return "\n".join([line(header), rule, *map(line, body)])


def median(values: Sequence[float]) -> float:
    """Return the median of at least one value."""
    return statistics.median(values)


@dataclass(frozen=True)
class Verdict:
    """One measured value held against a bar.

    Attributes:
        metric: what was measured, with its unit.
        ours: our value.
        reference: the value it is held against, a peer's or a limit's; None where it was not measured.
        reference_name: whose value that is.
        bar: the requirement in words, for example "≥ 1.00 × best peer"; None for a mere comparison.
        met: whether the bar is reached; None where there is none or it could not be decided.
        paired: the median of the ratios of neighbouring measurements, which is held against the bar; None where values were not paired.
    """

    metric: str
    ours: float | None
    reference: float | None
    reference_name: str
    bar: str | None
    met: bool | None
    paired: float | None = None

    @property
    def ratio(self) -> float | None:
        """Ours over the reference, by the pairs where there are any; None without both."""
        if self.paired is not None:
            return self.paired
        if self.ours is None or not self.reference:
            return None
        return self.ours / self.reference

    def as_dict(self) -> dict[str, Any]:
        """Return the verdict for a result file."""
        return {**asdict(self), "ratio": self.ratio}


def verdict_table(verdicts: Iterable[Verdict]) -> str:
    """Return the table of ratios and bars."""
    words = {True: "met", False: "NOT MET", None: "not decided"}
    rows = [
        [
            verdict.metric,
            number(verdict.ours),
            number(verdict.reference),
            verdict.reference_name,
            "–" if verdict.ratio is None else f"{verdict.ratio:.2f}",
            verdict.bar or "–",
            words[verdict.met] if verdict.bar else "–",
        ]
        for verdict in verdicts
    ]
    return table(["metric", "ours", "reference", "whose", "ratio", "bar", "verdict"], rows)


def number(value: float | None) -> str:
    """Format a value with three significant digits or all digits before the point; a dash for None."""
    if value is None:
        return "–"
    magnitude = abs(value)
    if magnitude >= 100:
        return f"{value:,.0f}"
    if magnitude >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if magnitude >= 1 or value == 0 else f"{value:.3f}"


def write_json(path: str | os.PathLike[str], result: Mapping[str, Any]) -> None:
    """Write a result file; the folder is made where it is missing."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _fields_of(path: str) -> dict[str, str]:
    """Return the first value of each key of a 'key : value' file, nothing where the system has no such file."""
    fields: dict[str, str] = {}
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError:
        return fields
    for line in text.splitlines():
        key, separator, value = line.partition(":")
        if separator:
            fields.setdefault(key.strip(), value.strip())
    return fields


def _commit() -> str | None:
    """Return the commit of this checkout, marked where files differ from it."""
    try:
        head, changes = (
            subprocess.run(
                ["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=10
            ).stdout.strip()
            for arguments in (["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return head + ("-modified" if changes else "")
