"""Compile the kernels of attention, rows, experts, adapters and blocks for targets without a device, and fail where one spills: `make aot`.

    python scripts/triton_aot.py [--jobs N] [--target sm_90] [--again N] [--update] [--shows-spills]

Compiles each kernel of `hardpoint.triton.kernels` with the compile-time arguments and tiles that the attention gives it, for the element
types, head dimensions and features below, and those
of `hardpoint.triton.row_kernels`, `.expert_kernels`, `.adapter_kernels`, `.block_kernels` and `.sampling_kernels` for common widths.
Prints registers, shared memory and spilled bytes, and ends with status 1 if a kernel spills registers to memory or needs more shared
memory than a program may have on the target. Figures come from the code itself: for NVIDIA's from the cubin (cuobjdump
--dump-resource-usage; a frame on the stack is where ptxas spills to), for AMD's from the metadata of the assembly (`.vgpr_spill_count`,
`.sgpr_spill_count`, `.private_segment_fixed_size`).
What kernels need is committed, in `docs/triton_kernels.json`, by the hash of a kernel's source, its arguments and Triton's version: all
that the compiler's output depends on. Only kernels that are not there are compiled, and as many others as `--again` says, drawn at
random, which must need what is written there. `--update` compiles all and writes the file; a kernel counts as another one when it has
moved to other lines, too.
`--shows-spills` compiles kernels that must spill instead, and ends with status 1 unless that is reported.

Needs triton (`.torch/triton`), no torch build for the target and no device.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from hardpoint.interfaces import (
    Activation,
    AttentionLayer,
    AttentionRequest,
    BlockFormat,
    DType,
    ExpertsRequest,
    LinearRequest,
)
from hardpoint.triton.adapters import expand_constants, shrink_constants
from hardpoint.triton.blocks import LAYOUTS, Offset, product_constants
from hardpoint.triton.blocks import sum_constants as split_sum_constants
from hardpoint.triton.experts import (
    down_constants,
    expert_tiles,
    gate_up_constants,
    route_constants,
    sort_constants,
    sum_constants,
)
from hardpoint.triton.launch import KernelConstants
from hardpoint.triton.operators import activation_constants, norm_constants, rotary_constants, sampling_constants
from hardpoint.triton.tiles import COPY_WORDS, TileTarget

REPORT = Path(__file__).resolve().parent.parent / "docs" / "triton_kernels.json"
BLOCK_SIZE = 32


@dataclass(frozen=True)
class Machine:
    """A target of the compiler.

    Attributes:
        backend, arch: as Triton names them.
        facts: as the attention is told them.
        shared_bytes: shared memory that one program may have (CUDA C++ Programming Guide, table of compute capabilities; the LDS of a
            CDNA 2 or CDNA 3 workgroup).
    """

    backend: str
    arch: int | str
    facts: TileTarget
    shared_bytes: int


MACHINES = {
    "sm_80": Machine("cuda", 80, TileTarget(32, 80, 108), 163 << 10),
    "sm_86": Machine("cuda", 86, TileTarget(32, 86, 84), 99 << 10),
    "sm_89": Machine("cuda", 89, TileTarget(32, 89, 128), 99 << 10),
    "sm_90": Machine("cuda", 90, TileTarget(32, 90, 132), 227 << 10),
    "sm_100": Machine("cuda", 100, TileTarget(32, 100, 148), 227 << 10),
    "sm_120": Machine("cuda", 120, TileTarget(32, 120, 170), 99 << 10),
    "gfx90a": Machine("hip", "gfx90a", TileTarget(64, 0, 104), 64 << 10),
    "gfx942": Machine("hip", "gfx942", TileTarget(64, 0, 304), 64 << 10),
}
USUAL = ("sm_80", "sm_90", "gfx90a", "gfx942")
"""Compiled where no target is named; the others have the tiles of one of these, and are for looking at."""
TYPES = {DType.FLOAT32: "fp32", DType.FLOAT16: "fp16", DType.BFLOAT16: "bf16", DType.FLOAT8_E4M3: "fp8e4nv"}
INTS = (
    {"parameters", "masks", "history"}
    | {"header", "contexts", "starts", "items", "tables", "slots", "pairs", "ranks", "spans"}
    | {
        "chosen",
        "sorted_rows",
        "tile_experts",
    }
)
SINGLES = {"logits", "biases", "partial", "partial_state", "sinks", "slopes", "shares", "sums", "scales"}
EXPERT_TENSORS = {"logits", "gate_up", "down", "bias", "inner", "parts"}
BLOCK_TENSORS = {"block_scales", "offsets", "factors", "lowers", "bias"}
FACTORS = {"scale", "cap", "value_scale", "key_factor", "value_factor", "eps"}
ALIGNED = {
    "q_stride",
    "out_stride",
    "k_stride",
    "v_stride",
    "block_stride",
    "x_stride",
    "residual_stride",
    "slot_stride",
}

VARYING = {"rows", "num_tokens", "tiles", "partial_splits", "source_blocks", "destination_blocks"}
"""Numbers that steps differ in: kernels take them as they come."""


@dataclass(frozen=True)
class Job:
    """One kernel to compile for one machine.

    Attributes:
        what: of the model, human-readable.
        types: of the run-time arguments, by name, in order.
        constants: compile-time arguments, by name.
        options: of the launch.
    """

    machine: str
    kernel: str
    what: str
    types: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, int]

    def key(self) -> str:
        """Return the hash of everything that the compiled code depends on."""
        import triton

        source = _function(self.kernel).cache_key  # of the functions that it calls, too
        facts = [self.machine, self.kernel, self.types, self.constants, self.options, _aligned(self), source]
        text = json.dumps([*facts, triton.__version__], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Resources:
    """What compiled code needs.

    Attributes:
        registers: of a thread.
        shared: bytes of a program.
        spilled: bytes of a thread that lie in memory.
    """

    registers: int
    shared: int
    spilled: int


@cache
def _function(name: str) -> Any:
    """Return a kernel by its name."""
    from hardpoint.triton import (
        adapter_kernels,
        block_kernels,
        expert_kernels,
        kernels,
        row_kernels,
        sampling_kernels,
    )

    modules = (row_kernels, expert_kernels, adapter_kernels, block_kernels, sampling_kernels, kernels)
    return next(getattr(m, name) for m in modules if hasattr(m, name))


def _aligned(job: Job) -> list[str]:
    """Return the arguments that Triton knows to be multiples of 16: where tensors and rows begin."""
    return [name for name, kind in job.types.items() if kind.startswith("*") or name in ALIGNED]


def requests() -> Iterator[tuple[str, AttentionRequest]]:
    """Yield what is compiled: (description, request of one layer)."""
    plain = AttentionLayer(16, 8, 128, 0.1)
    rich = replace(plain, sliding_window=512, soft_cap=30.0, sinks=True, alibi=True)
    fp8, bf16, fp16, fp32 = DType.FLOAT8_E4M3, DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32
    wanted = [(bf16, bf16, dim, 16, plain) for dim in (16, 64, 80, 128, 192, 256)]
    wanted += [(bf16, bf16, 64, 16, rich), (bf16, bf16, 128, 256, rich), (bf16, bf16, 256, 512, rich)]
    wanted += [(bf16, fp8, 64, 16, rich), (bf16, fp8, 128, 16, plain), (bf16, fp8, 256, 16, plain)]
    wanted += [(fp16, fp16, 128, 16, plain), (fp16, fp8, 128, 16, rich)]
    wanted += [(fp32, fp32, 128, 16, plain), (fp32, fp32, 256, 16, rich)]
    for dtype, kv_dtype, dim, heads, kind in wanted:
        layer = replace(kind, head_dim=dim, num_heads=heads)
        what = (
            f"{TYPES[dtype]} kv {TYPES[kv_dtype]} dim {dim} group {heads // 8}{' all features' if kind is rich else ''}"
        )
        yield what, AttentionRequest((layer,), dtype, kv_dtype, BLOCK_SIZE, 32768)


def jobs(machines: Sequence[str]) -> Iterator[Job]:
    """Yield everything that is compiled."""
    from hardpoint.triton import (
        adapter_kernels,
        block_kernels,
        expert_kernels,
        kernels,
        row_kernels,
        sampling_kernels,
    )

    seen = set()
    for name in machines:
        facts = MACHINES[name].facts
        for what, request in requests():
            constants = KernelConstants.of(request, request.layers[0], BLOCK_SIZE, facts)
            q = TYPES[request.dtype]
            narrow = {"native": "fp8e4nv", "bits": "u8", "same": q}[constants.decode["KV_FORMAT"]]
            given = {
                "write_kv": constants.write,
                "decode": constants.decode,
                "merge": constants.merge,
                "prefill": constants.prefill,
            }
            for kernel, values in given.items():
                # Writing takes bytes in any case.
                cache_type = "u8" if kernel == "write_kv" and narrow != q else narrow
                job = _job(name, kernel, what, getattr(kernels, kernel), values, {"q": q, "kv": cache_type})
                if job.key() not in seen:
                    seen.add(job.key())
                    yield job
        for kernel, what, values in row_operators():
            yield _job(name, kernel, f"bf16 {what}", getattr(row_kernels, kernel), values, {"q": "bf16"})
        yield _job(name, "sample", "151936 logits", sampling_kernels.sample, sampling_constants(151936), {})
        for dtype, kernel, what, values in expert_operators():
            yield _job(
                name, kernel, f"{dtype} {what}", getattr(expert_kernels, kernel), values, {"q": dtype, "experts": dtype}
            )
        for dtype, kernel, what, values in adapter_operators():
            yield _job(name, kernel, f"{dtype} {what}", getattr(adapter_kernels, kernel), values, {"q": dtype})
        for types, kernel, what, values in block_operators():
            job = _job(name, kernel, f"{types['q']} {what}", getattr(block_kernels, kernel), values, types)
            # Formats that differ only in how they are repacked have one kernel.
            if job.key() not in seen:
                seen.add(job.key())
                yield job
        yield _job(name, "copy_blocks", "any", kernels.copy_blocks, {"WORDS": COPY_WORDS, "num_warps": 4}, {})


def row_operators() -> Iterator[tuple[str, str, dict[str, int]]]:
    """Yield the operators of rows: (kernel, of what, compile-time arguments)."""
    for width in (128, 1024, 4096, 16384):
        yield "rms_norm", f"width {width}", norm_constants(width)
        yield "add_rms_norm", f"width {width}", norm_constants(width)
    for heads, dim in ((16, 64), (64, 128), (8, 256)):
        yield "rotary", f"{heads} heads of {dim}", rotary_constants(heads, 8, dim // 2)
    for activation in Activation:
        yield "gated_activation", f"{activation} of 3072", activation_constants(3072, activation)


def expert_operators() -> Iterator[tuple[str, str, str, dict[str, int]]]:
    """Yield the kernels of experts: (dtype, kernel, of what, compile-time arguments)."""
    shapes = {
        "8 experts of 14336": ExpertsRequest(8, 2, 4096, 14336, Activation.SILU, DType.BFLOAT16, True),
        "128 experts of 768": ExpertsRequest(128, 8, 2048, 768, Activation.SILU, DType.BFLOAT16, True),
        "32 experts of 2880": ExpertsRequest(32, 4, 2880, 2880, Activation.CLAMPED_SWIGLU, DType.BFLOAT16, True),
        "60 experts of 1408, float32": ExpertsRequest(60, 4, 2048, 1408, Activation.SILU, DType.FLOAT32, False),
    }
    for what, request in shapes.items():
        dtype, itemsize, experts = TYPES[request.dtype], request.dtype.itemsize, request.num_experts
        biased = request.activation is Activation.CLAMPED_SWIGLU
        yield dtype, "route", what, route_constants(request)
        yield dtype, "sum_rows", what, sum_constants(request)
        for tiles in dict.fromkeys(expert_tiles(rows, experts, itemsize) for rows in (1, 1 << 20)):
            size = f"{what}, tiles of {tiles.block_m} rows"
            yield dtype, "sort_rows", size, sort_constants(experts, tiles.block_m)
            yield dtype, "expert_gate_up", size, gate_up_constants(request, tiles, biased)
            yield dtype, "expert_down", size, down_constants(request, tiles, biased)


def adapter_operators() -> Iterator[tuple[str, str, str, dict[str, int]]]:
    """Yield the kernels of adapters: (dtype, kernel, of what, compile-time arguments)."""
    for dtype, rank, slots in ((DType.BFLOAT16, 16, 32), (DType.BFLOAT16, 256, 128), (DType.FLOAT32, 64, 8)):
        what = f"{slots} adapters of rank {rank}, 4096 to 6144 in 3 parts"
        yield TYPES[dtype], "adapter_shrink", what, shrink_constants(4096, 3, rank, slots, dtype.itemsize)
        yield TYPES[dtype], "adapter_expand", what, expand_constants(6144, 3, rank, slots)


def block_operators() -> Iterator[tuple[dict[str, str], str, str, dict[str, int]]]:
    """Yield the kernels of weights in blocks: (types, kernel, of what, compile-time arguments)."""
    wanted = [(DType.BFLOAT16, format) for format in LAYOUTS]
    wanted += [(DType.FLOAT16, format) for format in (BlockFormat.Q4_K, BlockFormat.INT4, BlockFormat.FP8)]
    wanted += [(DType.FLOAT32, format) for format in LAYOUTS]
    for dtype, format in wanted:
        layout = LAYOUTS[format]
        scale = "fp32" if layout.scale.itemsize == 4 else "fp16"
        offset = {Offset.NONE: "u8", Offset.MINIMUM: scale, Offset.ZERO_POINT: "i16"}[layout.offset]
        factor = "i8" if layout.factored else "u8"
        types = {"q": TYPES[dtype], "block_scales": scale, "offsets": offset, "factors": factor, "lowers": factor}
        if layout.offset is Offset.NONE:
            types["lowers"] = "u8"
        request = LinearRequest(4096, 4096, dtype, format)
        for tokens in (1, 1024):
            what = f"{format} of 4096 x 4096, {'few' if tokens == 1 else 'many'} tokens"
            yield types, "block_product", what, product_constants(request, tokens, biased=True)
        if format is BlockFormat.Q4_K:
            yield types, "sum_splits", "4096 rows", split_sum_constants(request, biased=True)


def spilling_jobs() -> list[Job]:
    """Return jobs whose tiles cannot fit into a program's registers: one warp, each lane of which sums a row of 256 numbers."""
    from hardpoint.triton import kernels

    what, request = next((w, r) for w, r in requests() if r.layers[0].head_dim == 256)
    found = []
    for name in ("sm_90", "gfx942"):
        constants = KernelConstants.of(request, request.layers[0], BLOCK_SIZE, MACHINES[name].facts).prefill
        constants = constants | {"BLOCK_M": MACHINES[name].facts.lanes, "num_warps": 1, "num_stages": 1}
        types = {"q": "bf16", "kv": "bf16"}
        found.append(_job(name, "prefill", f"{what}, one warp", kernels.prefill, constants, types))
    return found


def _job(machine: str, name: str, what: str, kernel: Any, values: dict[str, Any], types: dict[str, str]) -> Job:
    options = {key: value for key, value in values.items() if key not in kernel.arg_names}
    constants = {key: value for key, value in values.items() if key not in options}
    given = {argument: _type(argument, types) for argument in kernel.arg_names if argument not in constants}
    return Job(machine, name, what, given, constants, options)


def _type(argument: str, types: dict[str, str]) -> str:
    if argument in BLOCK_TENSORS and "block_scales" in types:
        return f"*{types.get(argument, types['q'])}"
    if argument == "numbers":
        return "*u8"
    if argument in EXPERT_TENSORS and "experts" in types:
        return f"*{types['experts']}"
    if argument in INTS:
        return "*i32"
    if argument in SINGLES:
        return "*fp32"
    if argument in FACTORS:
        return "fp32"
    if argument in ("keys", "values"):
        return f"*{types['kv']}"
    if argument in ("cos", "sin"):
        return "*fp32"
    if argument == "positions":
        return "*i64"
    if argument in ("q", "out", "k", "v", "x", "residual", "weight"):
        return f"*{types['q']}"
    return "*i64" if argument in ("source", "destination", "step", "last_tokens", "tokens") else "i32"


def compiled(job: Job) -> Resources:
    """Compile a job and return what its code needs."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function, machine = _function(job.kernel), MACHINES[job.machine]
    signature = {name: job.types.get(name, "constexpr") for name in function.arg_names}
    attributes = {(function.arg_names.index(name),): [["tt.divisibility", 16]] for name in _aligned(job)}
    source = ASTSource(function, signature=signature, constexprs=job.constants, attrs=attributes)
    target = GPUTarget(machine.backend, machine.arch, machine.facts.lanes)
    kernel = triton.compile(source, target=target, options=job.options)
    used = _of_cubin(kernel.asm["cubin"]) if machine.backend == "cuda" else _of_assembly(kernel.asm["amdgcn"])
    return Resources(used[0], int(kernel.metadata.shared), used[1])


def _of_cubin(code: bytes) -> tuple[int, int]:
    """Return registers, and bytes of stack and local memory."""
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__file__).with_name("bin") / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return found["REG"], found["STACK"] + found["LOCAL"]


def _of_assembly(text: str) -> tuple[int, int]:
    """Return vector registers (accumulation registers included), and bytes of spilled registers and private memory."""

    def number(name: str) -> int:
        found = re.search(rf"^\s*(?:- )?\.{name}:\s*(\d+)", text, re.MULTILINE)
        if found is None:
            raise ValueError(f"the assembly says nothing of .{name}")
        return int(found[1])

    spilled = 4 * (number("vgpr_spill_count") + number("sgpr_spill_count")) + number("private_segment_fixed_size")
    return number("vgpr_count"), spilled


def forks(workers: int) -> ProcessPoolExecutor:
    """Return processes that have imported what this one has, which takes as long as to compile several kernels."""
    return ProcessPoolExecutor(workers, mp_context=get_context("fork"))


def problems(job: Job, used: Resources) -> list[str]:
    """Return what is wrong with a kernel's needs, in words."""
    limit, found = MACHINES[job.machine].shared_bytes, []
    if used.spilled:
        found.append(f"spills {used.spilled} bytes")
    if used.shared > limit:
        found.append(f"needs {used.shared} bytes of shared memory, of {limit}")
    return found


def run(wanted: Sequence[Job], known: dict[str, Resources], workers: int) -> dict[str, Resources]:
    """Compile the jobs whose needs are not known, print a table, and return the needs of all by the jobs' keys."""
    began, found, bad = time.perf_counter(), dict[str, Resources](), 0
    missing = {key: job for job in wanted if (key := job.key()) not in known}
    print(f"{'target':8}{'kernel':12}{'registers':>10}{'shared':>9}{'spilled':>9}  {'warps x stages':16}for")
    with forks(workers) as pool:
        fresh = dict(zip(missing, pool.map(compiled, missing.values()), strict=True))
    for job in wanted:
        used = found[job.key()] = fresh.get(job.key()) or known[job.key()]
        wrong = problems(job, used)
        bad += bool(wrong)
        shape = f"{job.options.get('num_warps')} x {job.options.get('num_stages', 1)}"
        line = (
            f"{job.machine:8}{job.kernel:12}{used.registers:>10}{used.shared:>9}{used.spilled:>9}  {shape:16}{job.what}"
        )
        print(line + ("".join(f"  <- {text}" for text in wrong)))
    verdict = f"{bad} of {len(wanted)} kernels must not be used" if bad else f"{len(wanted)} kernels, none spills"
    seconds = time.perf_counter() - began
    print(f"{verdict}; {len(fresh)} compiled in {seconds:.0f} s, triton {__import__('triton').__version__}", flush=True)
    return found


def differences(wanted: Sequence[Job], known: dict[str, Resources], again: int, workers: int) -> list[str]:
    """Compile some jobs again whose needs are known; return where these are not what is written, in words."""
    candidates = [job for job in wanted if job.key() in known]
    drawn = random.sample(candidates, min(again, len(candidates)))
    with forks(workers) as pool:
        found = list(pool.map(compiled, drawn))
    print(f"{len(drawn)} kernels compiled again, to compare")
    return [
        f"{job.machine} {job.kernel} of {job.what}: {used} now, {known[job.key()]} in {REPORT.name}"
        for job, used in zip(drawn, found, strict=True)
        if used != known[job.key()]
    ]


def compiled_while_serving(wanted: Sequence[Job]) -> list[str]:
    """Return the kernels that Triton would compile anew for another step, since it looks at the value of a number that steps differ in."""
    return sorted(
        {
            f"{job.kernel} is compiled for values of {parameter.name}, which differ by step"
            for job in wanted
            for parameter in _function(job.kernel).params
            if parameter.name in VARYING and not parameter.do_not_specialize
        }
    )


def read_report() -> dict[str, Resources]:
    """Return what is committed, by the keys of jobs."""
    rows = json.loads(REPORT.read_text()) if REPORT.exists() else []
    return {row["key"]: Resources(row["registers"], row["shared"], row["spilled"]) for row in rows}


def write_report(wanted: Sequence[Job], found: dict[str, Resources]) -> None:
    """Write a line for each kernel, in the order of the jobs."""
    rows = [
        json.dumps(
            {"target": job.machine, "kernel": job.kernel, "for": job.what, **asdict(found[job.key()]), "key": job.key()}
        )
        for job in wanted
    ]
    REPORT.write_text("[\n" + ",\n".join(rows) + "\n]\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--target", action="append", choices=MACHINES)
    parser.add_argument("--again", type=int, default=8, metavar="N", help="known kernels to compile again, to compare")
    parser.add_argument("--update", action="store_true", help=f"compile everything, and write {REPORT.name}")
    parser.add_argument("--shows-spills", action="store_true", help="compile kernels that must spill, and nothing else")
    options = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET"):
        print("TRITON_INTERPRET is set: kernels would be interpreted and not compiled", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        if options.shows_spills:
            must_spill = spilling_jobs()
            found = run(must_spill, {}, options.jobs)
            return 0 if all(problems(job, found[job.key()]) for job in must_spill) else 1
        wanted = list(jobs(options.target or USUAL))
        if again := compiled_while_serving(wanted):
            print("\n".join(again))
            return 1
        known = {} if options.update else read_report()
        found = run(wanted, known, options.jobs)
        if options.update:
            write_report(wanted, found)
        different = differences(wanted, known, options.again, options.jobs)
        print("\n".join(different))
        return 1 if different or any(problems(job, found[job.key()]) for job in wanted) else 0


if __name__ == "__main__":
    sys.exit(main())
