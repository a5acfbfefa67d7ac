"""Where the time of a decode step goes: the device's kernels, and the host's functions beside them.

    python benchmarks/device_profile.py --backend cuda [--device 0] [--batch 1 256] [--context 512] [--steps 20] [--eager] [--json FILE]

The engine decodes with the model of `device_engine.py`, with dummy weights. The same number of steps is run three times: alone, which
gives the time of a step; under Python's profiler, which gives the host's functions by their own time; and under torch's, which gives
the kernels. A step whose kernels take much less than the whole is limited by the host. A profiler slows what it watches: its times
compare with one another.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from device_shapes import DECODERS, Decoder
from report import command, machine, median, table, write_json

ROWS = 15
TOKENS = 8192
"""Of a step, as in `device_engine.py`."""

WARM_UP_STEPS = 5


def decoding(llm: Any, decoder: Decoder, batch: int, context: int, steps: int) -> None:
    """Submit requests and step until all of them decode, and none ends for the given number of steps."""
    from hardpoint import SamplingParams

    source = random.Random(0)
    params = SamplingParams(temperature=0.0, max_tokens=steps + batch * context, ignore_eos=True)
    engine = llm.engine
    for number in range(batch):
        prompt = [source.randrange(decoder.vocab) for _ in range(context)]
        engine.add_request(str(number), engine.process({"prompt_token_ids": prompt}), params)
    end = engine.stats().prefill_tokens + batch * context
    while engine.stats().prefill_tokens < end:
        engine.step()


def steps_of(llm: Any, count: int) -> list[float]:
    """Run steps; return the seconds of each."""
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        llm.engine.step()
        seconds.append(time.perf_counter() - start)
    return seconds


def host_functions(llm: Any, count: int) -> list[dict[str, Any]]:
    """Return the functions that took most time by themselves, in microseconds per step."""
    profile = cProfile.Profile()
    profile.runcall(steps_of, llm, count)
    entries = pstats.Stats(profile).stats.items()  # type: ignore[attr-defined]
    rows = [
        {"name": f"{_place(file, line)}{name}", "calls": calls / count, "us": own / count * 1e6}
        for (file, line, name), (_, calls, own, _, _) in entries
    ]
    return sorted(rows, key=lambda row: -row["us"])


def device_kernels(llm: Any, count: int) -> list[dict[str, Any]]:
    """Return the device's kernels by their time, in microseconds per step; empty where torch sees none."""
    from torch.profiler import profile

    with profile() as recorded:
        steps_of(llm, count)
    rows = [
        {"name": entry.key, "calls": entry.count / count, "us": entry.self_device_time_total / count}
        for entry in recorded.key_averages()
        if entry.self_device_time_total > 0 and not entry.key.startswith(("aten::", "cuda", "hip"))
    ]
    return sorted(rows, key=lambda row: -row["us"])


def profiled(llm: Any, decoder: Decoder, batch: int, context: int, steps: int) -> dict[str, Any]:
    """Return the seconds of steps, the kernels and the functions of a batch that decodes; its requests are aborted in the end."""
    decoding(llm, decoder, batch, context, 4 * steps)
    steps_of(llm, WARM_UP_STEPS)
    found = {
        "step_seconds": steps_of(llm, steps),
        "functions": host_functions(llm, steps),
        "kernels": device_kernels(llm, steps),
    }
    llm.engine.abort_request([str(number) for number in range(batch)])
    return found


def shown(title: str, rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a table of the longest rows, and the sum of all."""
    body = [[row["name"][:90], f"{row['calls']:.1f}", f"{row['us']:.1f}"] for row in rows[:ROWS]]
    body.append(["all", f"{sum(row['calls'] for row in rows):.1f}", f"{sum(row['us'] for row in rows):.1f}"])
    yield table([title, "calls a step", "µs a step"], body)


def _place(file: str, line: int) -> str:
    return "" if file == "~" else f"{Path(file).parent.name}/{Path(file).name}:{line} "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 256])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--eager", action="store_true", help="without graphs")
    parser.add_argument("--quick", action="store_true", help="a tiny model; the figures mean nothing")
    parser.add_argument("--json", type=Path, help="write results here")
    arguments = parser.parse_args()
    decoder = DECODERS["tiny" if arguments.quick else "qwen3-0.6b"]
    context = min(arguments.context, decoder.max_len // 4)
    length = context + 4 * arguments.steps + max(arguments.batch) + 64
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(decoder.config), encoding="utf-8")
        from hardpoint import LLM
        from hardpoint.interfaces.errors import HardpointError

        try:
            llm = LLM(
                folder,
                backend=arguments.backend,
                device=arguments.device,
                dtype="bfloat16",
                load_format="dummy",
                skip_tokenizer_init=True,
                max_model_len=length,
                max_num_seqs=max(arguments.batch),
                max_num_batched_tokens=TOKENS,
                enable_prefix_caching=False,
                swap_space=0.0,
                enforce_eager=arguments.eager,
            )
        except HardpointError as error:
            sys.exit(str(error))
    print(command())
    print(f"{llm.info.device}, path {llm.info.path}.{' THE FIGURES MEAN NOTHING.' if arguments.quick else ''}")
    batches = {}
    with llm:
        for batch in arguments.batch:
            batches[batch] = profiled(llm, decoder, batch, context, arguments.steps)
    for batch, found in batches.items():
        print(f"\n{batch} x {context}: a step takes {median(found['step_seconds']) * 1e6:.0f} µs\n")
        if found["kernels"]:
            print(*shown("kernels of the device", found["kernels"]), "", sep="\n")
        print(*shown("functions of the host, by their own time", found["functions"]), sep="\n")
    if arguments.json:
        result = {
            "command": command(),
            "machine": machine(("hardpoint", "torch", "triton")),
            "device": llm.info.device,
            "meaningful": not arguments.quick,
            "batches": batches,
            "verdicts": [],
        }
        write_json(arguments.json, result)


if __name__ == "__main__":
    main()
