"""Write docs/models.md's tables of models and of weight formats from what the code can do, or check that they are current.

    python scripts/format_table.py [--check]

Architectures are the registry's; formats are asked of the backends' kernel sets, which say them without a device.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from hardpoint.interfaces import BlockFormat, KernelSet, Quantization
from hardpoint.models.registry import ARCHITECTURES, ENCODERS
from hardpoint.triton import TritonKernels
from hardpoint_ascend.kernels import AscendKernels
from hardpoint_conformance.compare import markdown_table
from hardpoint_cpu.kernels import CpuKernels

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "models.md"
BEGIN, END = "<!-- formats: begin -->", "<!-- formats: end -->"

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


def tables() -> str:
    """Return both tables in Markdown."""
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
    models = markdown_table(("run by the core's layers", "architectures"), architectures)
    return f"{models}\n{markdown_table(('weights, with `--quantization auto`', *known), rows)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--check", action="store_true", help="write nothing, and end with status 1 where the tables are stale"
    )
    parser.add_argument("file", nargs="?", type=Path, default=DOCUMENT)
    options = parser.parse_args(arguments)
    text = options.file.read_text("utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        print(f"{options.file} must hold {BEGIN} and after it {END}", file=sys.stderr)
        return 2
    current = f"{before}{BEGIN}\n{tables()}{END}{after}"
    if options.check:
        if current != text:
            print(f"{options.file} is stale: run python scripts/format_table.py", file=sys.stderr)
        return int(current != text)
    options.file.write_text(current, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
