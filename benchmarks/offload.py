"""First token of a long prompt whose KV blocks come from a tier below the prefix cache, beside the same prompt computed, in one process.

    python benchmarks/offload.py [--prompt 2000] [--rounds 9] [--threads 2] [--json FILE]

The demo model in bf16, with a device cache that one prompt fills, so that each request evicts the one before. In each round a new prompt
is computed, by an engine without tiers and by one that stores what it evicts, and one comes back from the host and one from disk; a ratio
is the median of the rounds' ratios to the times of the engine without.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any

import numpy as np
import report

from hardpoint import LLM, SamplingParams

BAR = 0.2
"""Of the time of a prompt that is computed, what one that is found on the host may take."""
BLOCK = 32


def first_token(llm: LLM, prompt: list[int]) -> float:
    """Return the seconds until the first token of a prompt."""
    start = time.perf_counter()
    llm.generate({"prompt_token_ids": prompt}, SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    blocks = args.prompt // BLOCK + 2
    settings: dict[str, Any] = {
        "dtype": "bfloat16",
        "backend": "cpu",
        "threads": args.threads,
        "block_size": BLOCK,
        "num_device_blocks": blocks,
        "max_model_len": args.prompt + 8,
    }
    prompts = [rng.integers(100, 40000, args.prompt).tolist() for _ in range(args.rounds + 3)]
    with tempfile.TemporaryDirectory() as folder:
        disk = {"kv_offload_disk_gib": 8.0, "kv_offload_path": folder}
        plain = LLM("demo", **settings)
        llm = LLM("demo", **settings, kv_offload_gib=8.0)
        block_bytes = llm.info.kv_bytes // llm.info.num_device_blocks
        # The host's tier of the second one has room for three prompts, so that what was served before them is on disk.
        small = 3.5 * blocks * block_bytes / (1 << 30)
        on_disk = LLM("demo", **settings, kv_offload_gib=small, **disk)
        first_token(plain, prompts[0])
        for engine in (llm, on_disk):
            for prompt in prompts:
                first_token(engine, prompt)
        times: dict[str, list[float]] = {"computed": [], "stores": [], "host": [], "disk": []}
        for number in range(args.rounds):
            fresh = rng.integers(100, 40000, args.prompt).tolist()
            times["computed"].append(first_token(plain, fresh))
            times["stores"].append(first_token(llm, fresh))
            times["host"].append(first_token(llm, prompts[number]))
            times["disk"].append(first_token(on_disk, prompts[number]))
        host, disk_stats = llm.stats(), on_disk.stats()
        assert host.offload_host_hits >= args.rounds * (blocks - 3), "prompts were not found on the host"
        assert disk_stats.offload_disk_hits >= args.rounds * (blocks - 3), "prompts were not found on disk"
        ratios = {
            tier: statistics.median(a / b for a, b in zip(times[tier], times["computed"], strict=True))
            for tier in ("stores", "host", "disk")
        }
        for name, values in times.items():
            ratio = f"  {ratios[name]:.3f} of computed" if name in ratios else ""
            print(f"{name:10} {1e3 * statistics.median(values):9.1f} ms to the first token of {args.prompt}{ratio}")
        print(f"bar: at most {BAR} from the host: {'held' if ratios['host'] <= BAR else 'MISSED'}")
        for engine in (plain, llm, on_disk):
            engine.shutdown()
    if args.json:
        machine = report.machine(("hardpoint-cpu", "torch"))
        options = {"prompt": args.prompt, "rounds": args.rounds, "threads": args.threads}
        results = {"block_bytes": block_bytes, "seconds": times, "ratios": ratios}
        report.write_json(
            args.json, {"command": report.command(), "machine": machine, "options": options, "results": results}
        )


if __name__ == "__main__":
    main()
