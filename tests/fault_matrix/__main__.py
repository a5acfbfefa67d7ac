"""Prints the fault-injection matrix and ends with status 1 if anything was wrong in it."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.table import Table

from hardpoint_conformance.fault_matrix import OPERATIONS, Row, run_target

from .system_calls import SystemCallTarget, run_system_calls
from .targets import all_targets, driver_targets

STRIDE = 5
"""Between the second calls that are tried with each first system call: there are tens of thousands of pairs."""


def _matrices() -> Iterator[tuple[str, Iterable[Row]]]:
    for target in all_targets():
        yield target.name, run_target(target)
    for target in driver_targets():
        yield f"{target.name}, pairs", run_target(target, pairs=1)
    names = [operation.name for operation in OPERATIONS]
    yield SystemCallTarget.name, run_system_calls(names)
    yield f"{SystemCallTarget.name}, pairs (every {STRIDE}th)", run_system_calls(names, STRIDE)


def main() -> int:
    """Run every target and print a table for each, then the count."""
    console = Console(width=140)
    rows: list[Row] = []
    for name, found_rows in _matrices():
        table = Table(title=name, title_justify="left")
        for column in ("operation", "calls made to fail (k tried)", "cases", "undone", "tolerated", "failures"):
            table.add_column(
                column, justify="left" if column in ("operation", "calls made to fail (k tried)") else "right"
            )
        by_operation: defaultdict[str, list[Row]] = defaultdict(list)
        for row in found_rows:
            rows.append(row)
            by_operation[row.operation].append(row)
        for operation, found in by_operation.items():
            table.add_row(
                operation,
                ", ".join(f"{row.call} {row.cases}" for row in found),
                *(
                    str(sum(counts))
                    for counts in zip(*((r.cases, r.undone, r.tolerated, len(r.failures)) for r in found), strict=True)
                ),
            )
        console.print(table)
    failures = [f"{row.target}: {row.operation}: {row.call} {text}" for row in rows for text in row.failures]
    for failure in failures:
        console.print(failure, style="red", markup=False)
    cases = sum(row.cases for row in rows)
    console.print(f"{cases} cases, {len(failures)} failures")
    return 1 if failures or not cases else 0


if __name__ == "__main__":
    sys.exit(main())
