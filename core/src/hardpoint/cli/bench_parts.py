"""What the commands of `hardpoint bench` share: an option's type, and tables."""

from __future__ import annotations

import json
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from hardpoint.bench.workload import Lengths

_VALUES = {
    "load_seconds": "s",
    "elapsed_seconds": "s",
    "requests_per_second": "1/s",
    "input_tokens_per_second": "tokens/s",
    "output_tokens_per_second": "tokens/s",
    "total_tokens_per_second": "tokens/s",
}
_SPREADS = {
    "end_to_end_seconds": "end to end",
    "ttft_seconds": "time to first token",
    "itl_seconds": "inter-token latency",
    "tpot_seconds": "time per output token",
}


def lengths(text: str) -> Lengths:
    """Read an option that is `Lengths`; raises typer.BadParameter."""
    try:
        return Lengths.parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def show(report: dict[str, Any], as_json: bool, title: str) -> None:
    """Print a report: one JSON object, or its rates and the percentiles of its times as tables."""
    if as_json:
        typer.echo(json.dumps(report))
        return
    # Figures are never cut off: a line that is wider than the terminal is the terminal's to fold.
    console = Console(highlight=False, soft_wrap=True, width=1000)
    console.print(title, markup=False)
    table = Table(box=None)
    for column in ("", "value", "unit"):
        table.add_column(column, justify="right" if column == "value" else "left")
    for key, unit in _VALUES.items():
        if key in report:
            table.add_row(key.replace("_", " "), f"{report[key]:,.2f}", unit)
    console.print(table)
    spreads = {name: report[key] for key, name in _SPREADS.items() if report.get(key) is not None}
    if spreads:
        spread = Table(box=None)
        for column in ("milliseconds", *next(iter(spreads.values()))):
            spread.add_column(column, justify="left" if column == "milliseconds" else "right", no_wrap=True)
        for name, values in spreads.items():
            spread.add_row(name, *(f"{value * 1e3:,.1f}" for value in values.values()))
        console.print(spread)
