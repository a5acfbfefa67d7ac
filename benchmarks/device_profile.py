"""How long steps take, and where the time of a decode step goes: the device's kernels, and the host's functions beside them.

    python benchmarks/device_profile.py --backend cuda [--device 0] [--batch 1 256] [--context 512] [--steps 20] [--eager] [--json FILE]

The engine decodes with the model of `device_engine.py`, with dummy weights. First the times of steps of several kinds are measured, beside
the time in which the device copies as many bytes as the step must read: few and many requests, a long context, top-p, and decodes with a
prompt in each step. Then the same number of steps is run three times for each batch: alone, which gives the time of a step; under Python's
profiler, which gives the host's functions by their own time; and under torch's, which gives the kernels. A step whose kernels take much
less than the whole is limited by the host. A profiler slows what it watches: its times compare with one another.
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from child import run_script
from device_shapes import DECODERS, Decoder
from report import command, machine, median, table, write_json

ROWS = 15
TOKENS = 8192
"""Of a step, as in `device_engine.py`."""

WARM_UP_STEPS = 5


@dataclass(frozen=True)
class Kind:
    """Steps of one kind.

    Attributes:
        batch: requests that decode.
        context: tokens of each.
        top_p: how they are sampled; None for the most probable token.
        prompt: tokens of a prompt that is in every step besides.
    """

    batch: int
    context: int
    top_p: float | None = None
    prompt: int = 0

    @property
    def name(self) -> str:
        """As it is shown."""
        more = f", top-p {self.top_p}" if self.top_p else ""
        return f"{self.batch} x {self.context}{more}{f', and a prompt of {self.prompt}' if self.prompt else ''}"


KINDS = (
    Kind(1, 512),
    Kind(32, 512),
    Kind(256, 512),
    Kind(256, 512, top_p=0.9),
    Kind(64, 512, prompt=512),
    Kind(1, 32000),
)
QUICK_KINDS = (Kind(1, 16), Kind(4, 16, top_p=0.9), Kind(2, 16, prompt=8), Kind(1, 256))


def kind_of_steps(llm: Any, decoder: Decoder, kind: Kind, steps: int, bandwidth: float) -> dict[str, Any]:
    """Return the median seconds of steps of a kind, and of copies of what a step must read; requests are aborted in the end."""
    from hardpoint import SamplingParams

    engine, prompts = llm.engine, [f"prompt {number}" for number in range(steps + WARM_UP_STEPS if kind.prompt else 0)]
    decoding(llm, decoder, kind.batch, kind.context, 2 * (steps + WARM_UP_STEPS), kind.top_p)
    seconds = []
    for number in range(steps + WARM_UP_STEPS):
        if kind.prompt:
            request = engine.process({"prompt_token_ids": [number % decoder.vocab] * kind.prompt})
            engine.add_request(prompts[number], request, SamplingParams(temperature=0.0, max_tokens=1))
        seconds += steps_of(llm, 1)
    engine.abort_request([*map(str, range(kind.batch)), *prompts])
    at_limit = decoder.decode_bytes(1, kind.batch * kind.context) / bandwidth
    return {"step_s": median(seconds[WARM_UP_STEPS:]), "copies_s": at_limit}


def decoding(llm: Any, decoder: Decoder, batch: int, context: int, steps: int, top_p: float | None = None) -> None:
    """Submit requests and step until all of them decode, and none ends for the given number of steps."""
    from hardpoint import SamplingParams

    source = random.Random(0)
    params = SamplingParams(temperature=0.0, max_tokens=steps + batch * context, ignore_eos=True)
    if top_p is not None:
        params = params.clone(temperature=1.0, top_p=top_p, seed=0)
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
    kinds = QUICK_KINDS if arguments.quick else KINDS
    decoder = DECODERS["tiny" if arguments.quick else "qwen3-0.6b"]
    context = min(arguments.context, decoder.max_len // 4)
    length = max(context, *(kind.context for kind in kinds)) + 4 * arguments.steps + max(arguments.batch) + 64
    decoder = replace(decoder, max_len=max(decoder.max_len, length))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(decoder.config), encoding="utf-8")
        from hardpoint import LLM
        from hardpoint.interfaces.errors import HardpointError
        from hardpoint.plugins import resolve_backend

        try:
            torch_device = resolve_backend(arguments.backend, device=arguments.device).device.torch_device
            llm = LLM(
                folder,
                backend=arguments.backend,
                device=arguments.device,
                dtype="bfloat16",
                load_format="dummy",
                skip_tokenizer_init=True,
                max_model_len=length,
                max_num_seqs=max(*arguments.batch, *(kind.batch + bool(kind.prompt) for kind in kinds)),
                max_num_batched_tokens=TOKENS,
                enable_prefix_caching=False,
                swap_space=0.0,
                enforce_eager=arguments.eager,
            )
        except HardpointError as error:
            sys.exit(str(error))
    print(command())
    print(f"{llm.info.device}, path {llm.info.path}.{' THE FIGURES MEAN NOTHING.' if arguments.quick else ''}")
    limits = [str(1 << 24), "256", "3"] if arguments.quick else [str(4 << 30), "8192", "10"]
    script = Path(__file__).parent / "peers" / "device_limits.py"
    bandwidth = run_script(sys.executable, script, [torch_device, *limits], timeout_s=120)["copy_bytes_per_s"]
    batches, times = {}, {}
    with llm:
        for kind in kinds:
            times[kind.name] = kind_of_steps(llm, decoder, kind, arguments.steps, bandwidth)
        rows = [
            [
                name,
                f"{one['step_s'] * 1e3:.2f}",
                f"{one['copies_s'] * 1e3:.2f}",
                f"{one['copies_s'] / one['step_s']:.0%}",
            ]
            for name, one in times.items()
        ]
        print("\n" + table(["requests x context", "step, ms", "copies, ms", "of the peak"], rows))
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
            "times": times,
            "batches": batches,
            "verdicts": [],
        }
        write_json(arguments.json, result)


if __name__ == "__main__":
    main()
