"""`hardpoint models`: what can be run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from hardpoint.interfaces.errors import ModelNotFound
from hardpoint.models import ARCHITECTURES, DEMO, LOAD_FORMATS, open_model

_FORMATS = {
    "safetensors": "a folder with config.json and .safetensors files, one or sharded with an index",
    "gguf": "one .gguf file; quantised tensors are dequantised to the chosen dtype",
    "dummy": "random weights from the configuration alone (--load-format dummy)",
}


def models(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Show which architectures and formats can be run, and whether the demo model is installed."""
    demo = _demo_path()
    if as_json:
        typer.echo(json.dumps(_report(demo), indent=2))
        return
    console = Console(highlight=False, soft_wrap=True)
    console.print(Text("Native decoders (the core's own, or a backend's fused one)", "bold"))
    for architecture in ARCHITECTURES:
        console.print(f"  {architecture}")
    console.print(Text("\nAny other decoder", "bold"))
    console.print(f"  {_FALLBACK}")
    console.print(Text("\nFormats", "bold"))
    for name in _formats():
        console.print(Text(f"  {name}: {_FORMATS[name]}"))
    console.print(Text(f"\nDemo model (--model {DEMO})", "bold"))
    installed = f"installed, {demo}" if demo is not None else 'not installed; pip install "hardpoint[demo]"'
    console.print(Text(f"  {installed}"))


_FALLBACK = (
    "Runs by transformers' modelling code with the backend's paged attention in it, where that code takes its attention "
    "function from transformers' registry; refused with the reason otherwise."
)


def _formats() -> list[str]:
    return [str(name) for name in LOAD_FORMATS if name in _FORMATS]


def _demo_path() -> Path | None:
    try:
        return open_model(DEMO).path
    except ModelNotFound:
        return None


def _report(demo: Path | None) -> dict[str, Any]:
    return {
        "lean_architectures": list(ARCHITECTURES),
        "fallback": _FALLBACK,
        "formats": {name: _FORMATS[name] for name in _formats()},
        "demo": {"name": DEMO, "installed": demo is not None, "path": None if demo is None else str(demo)},
    }
