"""Write the tables of documents that code can make, or check that they are current: docs/models.md, docs/settings.md.

    python scripts/document_tables.py [--check]

Architectures are the registry's; formats are asked of the backends' kernel sets, which say them without a device.
Settings are the fields of `EngineConfig`, explained by its docstring.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from pathlib import Path

from hardpoint.engine.config import EngineConfig
from hardpoint.interfaces import BlockFormat, KernelSet, Quantization
from hardpoint.models.registry import ARCHITECTURES, ENCODERS
from hardpoint.scheduler import SchedulerSettings
from hardpoint.triton import TritonKernels
from hardpoint_ascend.kernels import AscendKernels
from hardpoint_conformance.compare import markdown_table
from hardpoint_cpu.kernels import CpuKernels

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"

BACKENDS: dict[str, type[KernelSet]] = {"cpu": CpuKernels, "cuda, rocm": TritonKernels, "ascend": AscendKernels}
SOURCES: dict[str, tuple[BlockFormat, ...]] = {
    "blocks of GGUF files": tuple(one for one in BlockFormat if one.type_id < 1000),
    "GPTQ, AWQ (`gemm`), compressed-tensors `pack-quantized`, `int-quantized` (W4A8): 4 bits, in groups of a multiple of 32": (
        BlockFormat.INT4,
        BlockFormat.INT4_128,
    ),
    "GPTQ, compressed-tensors `pack-quantized`, `int-quantized` (W8A8): 8 bits, in groups of a multiple of 32 or rows": (
        BlockFormat.INT8,
        BlockFormat.INT8_128,
    ),
    "FP8 (e4m3) with a scale for a matrix, a row or a block": (BlockFormat.FP8,),
}
"""What checkpoints have, and the formats of blocks that it is."""


def _of_checkpoint(formats: Sequence[BlockFormat], known: frozenset[BlockFormat]) -> str:
    kept = [format for format in formats if format in known]
    if not kept:
        return "expanded"
    if len(kept) == len(formats):
        return "as stored"
    return f"as stored: {', '.join(kept)}; others expanded"


def models() -> str:
    """Return the tables of architectures and of weight formats in Markdown."""
    known = {name: kind.__new__(kind).block_formats() for name, kind in BACKENDS.items()}
    rows = [
        (what, *(_of_checkpoint(formats, of_backend) for of_backend in known.values()))
        for what, formats in SOURCES.items()
    ]
    for way in Quantization:
        if way.rounds_to is not None:
            does = ["rounded" if set(way.rounds_to) <= of_backend else "refused" for of_backend in known.values()]
            rows.append((f"dense, with `--quantization {way}`", *does))
    architectures = [
        ("decoders", ", ".join(f"`{one}`" for one in ARCHITECTURES)),
        ("encoders", ", ".join(f"`{one}`" for one in ENCODERS)),
    ]
    run = markdown_table(("run by the core's layers", "architectures"), architectures)
    return f"{run}\n{markdown_table(('weights, with `--quantization auto`', *known), rows)}"


def _explained(kind: type) -> dict[str, str]:
    """Return what a docstring says of each name in its section "Attributes"."""
    _, _, section = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")
    return {
        name: " ".join(text.split())
        for name, text in re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    }


def settings() -> str:
    """Return the table of an engine's settings in Markdown; raises KeyError for one that no docstring explains."""
    explained = _explained(EngineConfig) | _explained(SchedulerSettings)
    rows = [
        (
            f"`{field.name}`",
            "required" if field.default is MISSING else f"`{field.default!s}`",
            explained[field.name].replace("|", r"\|"),
        )
        for field in sorted(fields(EngineConfig), key=lambda field: list(explained).index(field.name))
    ]
    return markdown_table(("setting", "default", "meaning"), rows)


DOCUMENTS: dict[str, Callable[[], str]] = {"models.md": models, "settings.md": settings}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--check", action="store_true", help="write nothing, and end with status 1 where a table is stale"
    )
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "docs")
    options = parser.parse_args(arguments)
    stale = 0
    for name, tables in DOCUMENTS.items():
        file = options.folder / name
        text = file.read_text("utf-8")
        before, begin, rest = text.partition(BEGIN)
        _, end, after = rest.partition(END)
        if not begin or not end:
            print(f"{file} must hold {BEGIN} and after it {END}", file=sys.stderr)
            return 2
        current = f"{before}{BEGIN}\n{tables()}{END}{after}"
        if options.check and current != text:
            print(f"{file} is stale: run python scripts/document_tables.py", file=sys.stderr)
            stale = 1
        elif not options.check:
            file.write_text(current, "utf-8")
    return stale


if __name__ == "__main__":
    sys.exit(main())
