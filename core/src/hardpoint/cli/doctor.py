"""`hardpoint doctor`: what is installed, what can be used, and why the rest cannot."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from hardpoint.cli.exit_codes import ExitCode
from hardpoint.interfaces.errors import BackendNotFound
from hardpoint.plugins import BackendRecord, BackendState
from hardpoint.plugins.doctor import Diagnosis, device_claims, diagnose

if TYPE_CHECKING:
    from hardpoint.interfaces import Device, MemoryInfo

_COLOURS = {
    BackendState.OK: "green",
    BackendState.UNAVAILABLE: "yellow",
    BackendState.BLOCKED: "dim",
    BackendState.INCOMPATIBLE: "red",
    BackendState.BROKEN: "red",
    BackendState.SHADOWED: "red",
}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON (docs/doctor.md).")] = False,
    backend: Annotated[str | None, typer.Option(help="Look at this backend alone.")] = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="Start the devices, in processes of their own, and show their memory.")
    ] = False,
    classes: Annotated[
        bool | None,
        typer.Option(
            "--classes/--no-classes",
            help="Import the backends' classes, in processes of their own, and compare them with the contract; with --backend, by default.",
        ),
    ] = None,
) -> None:
    """Show the backends that are installed, their devices, and what is wrong with those that cannot be used.

    Exit codes: 0 a backend can be used; 1 something installed is broken or incompatible, or the choice is an error although
    there are usable backends; 2 wrong options, or no backend has the name; 3 nothing is broken, and no backend can be used here.
    """
    try:
        diagnosis = diagnose(backend, memory=memory, classes=backend is not None if classes is None else classes)
    except BackendNotFound as error:
        raise typer.BadParameter(str(error), param_hint="--backend") from error
    code = exit_code(diagnosis)
    if as_json:
        typer.echo(json.dumps(diagnosis.to_json() | {"exit_code": int(code)}, indent=2))
    else:
        _print(diagnosis)
    raise typer.Exit(code)


def exit_code(diagnosis: Diagnosis) -> ExitCode:
    """Return what the command ends with."""
    if diagnosis.choice is not None and not diagnosis.is_faulty:
        return ExitCode.OK
    return ExitCode.FAILED if diagnosis.is_faulty or diagnosis.is_usable else ExitCode.UNUSABLE


def _print(diagnosis: Diagnosis) -> None:
    # Reasons are whole sentences: where the output is not a terminal, lines are long enough to keep them together.
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(_table(diagnosis.records))
    for record in diagnosis.records:
        for device in record.devices:
            console.print(_device(record, device, diagnosis))
    for record in diagnosis.records:
        if record.traceback:
            console.print(Text(f"\n{record.name}: traceback", "bold red"))
            console.print(Text(record.traceback.rstrip()))
    for name in diagnosis.unmatched_blocks:
        console.print(
            Text(f"HARDPOINT_BLOCK_BACKENDS excludes '{name}', which no installed backend is called", "yellow")
        )
    if diagnosis.choice is not None:
        device = diagnosis.choice.device
        console.print(
            Text.assemble("\nWithout further options: ", (device.backend, "bold green"), f" on {device.name}")
        )
        if diagnosis.choice.notice:
            console.print(Text(diagnosis.choice.notice))
    elif diagnosis.error is not None:
        console.print(Text.assemble(("\nNo backend would be used: ", "bold red"), str(diagnosis.error)))


def _table(records: tuple[BackendRecord, ...]) -> Table:
    table = Table(
        "Backend", "State", "Package", "Priority", "Contract", "Devices", title="Backends", title_justify="left"
    )
    for record in records:
        state = Text(record.state.value, _COLOURS[record.state])
        priority = "" if record.priority is None else str(record.priority)
        contract = "" if record.api is None else f"{record.api[0]} to {record.api[1]}"
        devices = "; ".join(device.name for device in record.devices)
        shown = Text("\n".join(filter(None, (devices, record.reason))))
        table.add_row(Text(record.name, "bold"), state, Text(record.source), priority, contract, shown)
    return table


def _device(record: BackendRecord, device: Device, diagnosis: Diagnosis) -> Group:
    simulated = " (simulated)" if device.simulated else ""
    table = Table.grid(padding=(0, 2))
    title = Text(f"\n{device.backend} device {device.index}: {device.name}{simulated}", "bold")
    memory = f"{device.total_memory / 2**30:.1f} GiB" if device.total_memory else "not known"
    rows = {"memory": memory, "driver": device.driver_version or "none", **device.properties}
    if (record.name, device.index) in diagnosis.memory:
        rows |= _memory(*diagnosis.memory[record.name, device.index])
    claims, problem = device_claims(record, device)
    rows |= {"capabilities": problem} if claims is None else _summary(claims)
    for key, value in rows.items():
        table.add_row(Text(f"  {key}", "dim"), Text(value))
    # A title of the table's own would be folded to its width.
    return Group(title, table)


def _memory(found: MemoryInfo | None, problem: str) -> dict[str, str]:
    """Return what a started device said of its memory."""
    if found is None:
        return {"memory": f"not known: {problem}"}
    memory = f"{found.free / 2**30:.1f} GiB free of {found.total / 2**30:.1f} GiB"
    return {"memory": memory, "quirks found": ", ".join(found.quirks) or "none"}


def _summary(claims: dict[str, Any]) -> dict[str, str]:
    """Return the parts of a capability object that are asked for first."""
    attention, memory = claims["attention"], claims["memory"]
    return {
        "dtypes": ", ".join(attention["dtypes"]) or "none",
        "block sizes": attention["block_sizes"],
        "head dimensions": attention["head_dims"],
        "attention": (", ".join(attention["features"]) or "plain causal attention only")
        if attention["dtypes"]
        else "none",
        "KV dtypes": _pairs(attention["kv_dtypes"]),
        "graphs": attention["graph_level"].replace("_", " "),
        "sleep levels": ", ".join(map(str, memory["sleep_levels"])) or "none",
        "sleep tiers": ", ".join(memory["tiers"]) or "none",
        "tensor parallel": claims["tensor_parallel"],
        "collectives": ", ".join(claims["collectives"]) or "none",
        "notes": "\n".join(claims["notes"]) or "none",
    }


def _pairs(kv_dtypes: dict[str, list[str]]) -> str:
    """Return which element types of the cache go with each of queries, other than the same one."""
    others = {dtype: [kv for kv in found if kv != dtype] for dtype, found in kv_dtypes.items()}
    listed = [f"{', '.join(found)} with {dtype}" for dtype, found in others.items() if found]
    return "; ".join(listed) or ("those of the queries" if kv_dtypes else "none")
