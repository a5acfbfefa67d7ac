"""Throughput of one batch whose requests go through many LoRA adapters, beside the base model's without adapters, in one process.

    python benchmarks/lora.py [--adapters 32] [--rank 16] [--batch 64] [--prompt 32] [--new-tokens 64] [--rounds 5] [--threads 2]
                              [--json FILE]

The demo model in bf16, prompts of random tokens, adapters of random values. The base engine runs the model as it is fastest without
adapters; the other one is made with `enable_lora`, once for adapters of queries and values (`q_proj` and `v_proj`, PEFT's default for
this family) and once for all linear layers. In each round all of them take turns; a ratio is the median of the rounds' ratios of generated
tokens per second, prompts included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import report
import torch
from safetensors.torch import save_file

from hardpoint import LLM, LoRARequest, SamplingParams

LAYERS, HIDDEN, INNER, KV = 30, 576, 1536, 192
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KV, HIDDEN),
    "self_attn.v_proj": (KV, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
"""Outputs and inputs of the demo model's linear layers."""
KINDS = {"queries and values": ("self_attn.q_proj", "self_attn.v_proj"), "all linear layers": tuple(SHAPES)}


def write_adapter(folder: Path, seed: int, rank: int, layers: Sequence[str]) -> LoRARequest:
    """Write an adapter of random values, and return what names it."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for number in range(LAYERS):
        for layer in layers:
            outputs, inputs = SHAPES[layer]
            name = f"base_model.model.model.layers.{number}.{layer}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator).bfloat16() * 0.02
            tensors[f"{name}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator).bfloat16() * 0.02
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted({one.split(".")[1] for one in layers}),
    }
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return LoRARequest(folder.name, seed + 1, str(folder))


def measured(options: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    """Return the tokens per second of each round, by what was measured."""
    random = np.random.default_rng(0)
    prompts = [{"prompt_token_ids": random.integers(100, 40000, options.prompt).tolist()} for _ in range(options.batch)]
    params = SamplingParams(temperature=0, max_tokens=options.new_tokens, ignore_eos=True, detokenize=False)
    settings = {
        "backend": "cpu",
        "dtype": "bfloat16",
        "threads": options.threads,
        "max_num_seqs": options.batch,
        "max_model_len": options.prompt + options.new_tokens,
        "enable_prefix_caching": False,
    }
    engines: list[LLM] = []

    def call(llm: LLM, adapters: Sequence[LoRARequest | None]) -> Callable[[], float]:
        def run() -> float:
            start = time.perf_counter()
            found = llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)
            return sum(len(one.outputs[0].token_ids) for one in found) / (time.perf_counter() - start)

        return run

    try:
        engines.append(LLM("demo", **settings))
        calls = {"base": call(engines[0], [None] * options.batch)}
        for kind, layers in KINDS.items():
            place = folder / kind.replace(" ", "-")
            place.mkdir()
            made = [write_adapter(place / f"a{seed}", seed, options.rank, layers) for seed in range(options.adapters)]
            count = options.adapters
            llm = LLM("demo", enable_lora=True, max_loras=count, max_lora_rank=options.rank, **settings)
            engines.append(llm)
            calls[kind] = call(llm, [made[number % count] for number in range(options.batch)])
        calls["enabled, and not asked for"] = call(engines[-1], [None] * options.batch)
        for one in calls.values():
            one()
        rates: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(options.rounds):
            for name, one in calls.items():
                rates[name].append(one())
        return rates
    finally:
        for llm in engines:
            llm.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in (
        ("adapters", 32),
        ("rank", 16),
        ("batch", 64),
        ("prompt", 32),
        ("new-tokens", 64),
        ("rounds", 5),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        rates = measured(options, Path(folder))
    results = {
        name: {
            "tokens_per_second": round(statistics.median(own), 1),
            "ratio": round(statistics.median(one / base for one, base in zip(own, rates["base"], strict=True)), 3),
        }
        for name, own in rates.items()
    }
    asked = {name: value for name, value in vars(options).items() if name != "json"}
    print(f"{options.adapters} adapters of rank {options.rank} in a batch of {options.batch}")
    for name, one in results.items():
        print(f"{name:30} {one['tokens_per_second']:9.1f} tokens/s   {one['ratio']:.3f} of the base model")
    if options.json is not None:
        machine = report.machine(("hardpoint-cpu", "torch"))
        record = {"command": report.command(), "machine": machine, "options": asked, "results": results}
        report.write_json(options.json, record)


if __name__ == "__main__":
    main()
