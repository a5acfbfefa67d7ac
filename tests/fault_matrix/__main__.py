"""Prints the fault-injection matrix and ends with status 1 if anything was wrong in it."""

from __future__ import annotations

import sys
from collections import defaultdict

from rich.console import Console
from rich.table import Table

from hardpoint_conformance.fault_matrix import Row, run_target

from .targets import all_targets


def main() -> int:
    """Run every target and print a table for each, then the count."""
    console = Console(width=140)
    rows: list[Row] = []
    for target in all_targets():
        table = Table(title=target.name, title_justify="left")
        for column in ("operation", "calls made to fail (k tried)", "cases", "undone", "tolerated", "failures"):
            table.add_column(
                column, justify="left" if column in ("operation", "calls made to fail (k tried)") else "right"
            )
        by_operation: defaultdict[str, list[Row]] = defaultdict(list)
        for row in run_target(target):
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
