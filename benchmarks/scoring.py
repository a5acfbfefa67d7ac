"""Log probabilities of prompts beside their prefill, and beam search beside transformers, in one process.

    python benchmarks/scoring.py [--shapes demo 360m] [--threads 2] [--rounds 5] [--prompts 64] [--length 512] [--searches 2]
                                 [--new-tokens 64] [--json FILE]

Models in bf16, prefix caching off, prompts of random tokens. `demo` is the demo model; `360m` has SmolLM2-360M's shape, whose head is a
usual share of the whole, random weights and a quarter of the prompts. In each round all measurements of a shape take turns: a prefill
(one token is generated), the same prompts with the log probabilities of their tokens and of the most probable one at each position, every
one of them read, and of the demo model a beam search, and transformers' beam search of the same prompts, one at a time in both. A ratio is
the median of the rounds' ratios; wall time decides, and the processor time stands beside it. The limit beside a rate is that of the
arithmetic: the multiply-adds of the prefill, which computes its last feed-forward for one token alone, over those with all
tokens' and the head's products.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import report
import torch

sys.path.insert(0, str(Path(__file__).parent / "peers"))
import export_demo

from hardpoint import LLM, BeamSearchParams, SamplingParams
from hardpoint_cpu import _native

Prompts = list[list[int]]
Seconds = list[tuple[float, float]]
BEAM_PROMPT = 64
SMOLLM2_360M = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 960,
    "intermediate_size": 2560,
    "num_hidden_layers": 32,
    "num_attention_heads": 15,
    "num_key_value_heads": 5,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rope_theta": 100000,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def timed(call: Callable[[], Any]) -> tuple[Any, tuple[float, float]]:
    """Return what a call returns, and its seconds of wall and of processor time."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = call()
    return result, (time.perf_counter() - wall, time.process_time() - cpu)


def generator(llm: LLM, prompts: Prompts, **params: Any) -> Callable[[], Any]:
    chosen = SamplingParams(temperature=0, max_tokens=1, detokenize=False, **params)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    return lambda: llm.generate(asked, chosen, use_tqdm=False)


def scorer(llm: LLM, prompts: Prompts) -> Callable[[], list[float]]:
    """Return a call that gives the log probability of each prompt."""
    generate = generator(llm, prompts, prompt_logprobs=1)

    def total(output: Any) -> float:
        pairs = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
        return sum(position[token].logprob for token, position in pairs)

    return lambda: [total(output) for output in generate()]


def arithmetic_limit(config: Mapping[str, Any], length: int) -> float:
    """Return the multiply-adds of a prompt's prefill over those of its prefill with log probabilities."""
    hidden, heads, kv_heads = (config[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    width = heads * (hidden // heads)
    qkv = hidden * (heads + 2 * kv_heads) * (hidden // heads)
    attention = 2 * width * (length + 1) / 2  # of a causal prompt
    after_attention = width * hidden + 3 * hidden * config["intermediate_size"]
    head = hidden * config["vocab_size"]
    scored = config["num_hidden_layers"] * (qkv + attention + after_attention) + head
    return 1 - (after_attention + head) * (1 - 1 / length) / scored


def in_turns(calls: Mapping[str, Callable[[], Any]], rounds: int) -> tuple[dict[str, Any], dict[str, Seconds]]:
    """Return each call's result, and its seconds in each round."""
    results = {name: call() for name, call in calls.items()}  # all shapes of work are warm then
    seconds: dict[str, Seconds] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            seconds[name].append(timed(call)[1])
    return results, seconds


def shown(title: str, seconds: Mapping[str, Seconds]) -> None:
    rounds = len(next(iter(seconds.values())))
    rows = [[name, *(f"{wall:.2f} ({cpu:.2f})" for wall, cpu in taken)] for name, taken in seconds.items()]
    print(title)
    print(report.table(["seconds (processor)", *(str(number + 1) for number in range(rounds))], rows))


def scoring(
    name: str, folder: Path, options: argparse.Namespace, prompts: Prompts, **settings: Any
) -> tuple[report.Verdict, dict[str, Any]]:
    """Measure one shape; returns its verdict and its part of the result file."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    limit = arithmetic_limit(config, options.length)
    llm = LLM(str(folder), max_model_len=options.length + 64, **settings)
    calls = {"prefill": generator(llm, prompts), "prompt_logprobs=1, read": scorer(llm, prompts)}
    _, seconds = in_turns(calls, options.rounds)
    llm.shutdown()
    prefill, scored = seconds.values()
    ratio, of_processor = (of_rounds(prefill, scored, place) for place in (0, 1))
    shown(f"{name}: {len(prompts)} prompts of {options.length} tokens, {_native.isa()}", seconds)
    print(
        f"median of the rounds' ratios: {ratio:.3f} (processor {of_processor:.3f}), limit of the arithmetic {limit:.3f}"
    )
    verdict = report.Verdict(
        f"rate of prompt_logprobs, {name}, times its prefill", ratio, limit, "arithmetic", "≥ 0.80", ratio >= 0.8
    )
    return verdict, {
        "prompts": len(prompts),
        "median_ratio": ratio,
        "median_ratio_of_processor_time": of_processor,
        "arithmetic_limit": limit,
        "seconds_wall_and_processor": seconds,
    }


def beams(llm: LLM, prompts: Prompts, width: int, new_tokens: int) -> Prompts:
    """Return the best beam of each prompt, searched one after the other."""
    params = BeamSearchParams(beam_width=width, max_tokens=new_tokens, ignore_eos=True)
    return [list(llm.beam_search([{"prompt_token_ids": one}], params)[0].sequences[0].tokens) for one in prompts]


@torch.inference_mode()
def beams_of_transformers(model: Any, prompts: Prompts, width: int, new_tokens: int) -> Prompts:
    """Return the best beam of each prompt, searched one after the other."""
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            num_beams=width,
            do_sample=False,
            max_new_tokens=new_tokens,
            pad_token_id=0,
        )
        found.append(output[0].tolist())
    return found


def of_rounds(over: Sequence[tuple[float, float]], under: Sequence[tuple[float, float]], place: int) -> float:
    """Return the median of how many times as long `over` took as `under`, round by round; place 0 is wall time, 1 processor time."""
    return statistics.median(a[place] / b[place] for a, b in zip(over, under, strict=True))


def beam_search(
    demo: export_demo.DemoExport, options: argparse.Namespace, **settings: Any
) -> tuple[report.Verdict, dict[str, Any]]:
    """Measure beam search; returns its verdict and its part of the result file."""
    from transformers import AutoModelForCausalLM

    rng = np.random.default_rng(1)
    beginnings: Prompts = rng.integers(100, demo.vocab_size, (options.searches, BEAM_PROMPT)).tolist()
    peer = AutoModelForCausalLM.from_pretrained(demo.hf, dtype=torch.bfloat16).eval()
    peer.generation_config.eos_token_id = None  # ours ignores it, too
    llm = LLM(demo.hf, max_model_len=BEAM_PROMPT + options.new_tokens, **settings)
    calls = {
        "beams, hardpoint": lambda: beams(llm, beginnings, options.width, options.new_tokens),
        "beams, transformers": lambda: beams_of_transformers(peer, beginnings, options.width, options.new_tokens),
    }
    results, seconds = in_turns(calls, options.rounds)
    llm.shutdown()
    ours, theirs = seconds.values()
    same = sum(a == b for a, b in zip(*results.values(), strict=True))
    faster, of_processor = (of_rounds(theirs, ours, place) for place in (0, 1))
    shown(f"demo: beams of width {options.width}; {same} of {options.searches} best beams equal", seconds)
    print(f"median of the rounds' ratios: {faster:.2f} (processor {of_processor:.2f})")
    verdict = report.Verdict(
        f"rate of beam search of width {options.width}, times", faster, 1.0, "transformers", "≥ 2.00", faster >= 2
    )
    return verdict, {
        "equal_best_beams": f"{same} of {options.searches}",
        "median_ratio": faster,
        "median_ratio_of_processor_time": of_processor,
        "seconds_wall_and_processor": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=["demo", "360m"], default=["demo", "360m"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--length", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--width", type=int, default=4, help="beams")
    parser.add_argument("--searches", type=int, default=2, help="prompts of a round of beam search; 0 for none")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens of each beam")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    settings = {"dtype": "bfloat16", "backend": "cpu", "threads": options.threads, "enable_prefix_caching": False}
    demo = export_demo.export()
    rng = np.random.default_rng(0)
    prompts: Prompts = rng.integers(100, demo.vocab_size, (options.prompts, options.length)).tolist()
    found: dict[str, tuple[report.Verdict, dict[str, Any]]] = {}
    if "demo" in options.shapes:
        found["demo"] = scoring("demo", Path(demo.hf), options, prompts, **settings)
    if "360m" in options.shapes:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(SMOLLM2_360M), encoding="utf-8")
            fewer = prompts[: max(1, options.prompts // 4)]
            more = {"load_format": "dummy", "skip_tokenizer_init": True}
            found["360m"] = scoring("360m", Path(folder), options, fewer, **settings, **more)
    if options.searches:
        found["beam_search"] = beam_search(demo, options, **settings)
    verdicts = [verdict for verdict, _ in found.values()]
    print(report.verdict_table(verdicts))
    if options.json:
        report.write_json(
            options.json,
            {
                "command": report.command(),
                "machine": report.machine(("hardpoint-cpu", "torch", "transformers")),
                "isa": _native.isa(),
                "threads": options.threads,
                "length": options.length,
                **{name: result for name, (_, result) in found.items()},
                "verdicts": [verdict.as_dict() for verdict in verdicts],
            },
        )


if __name__ == "__main__":
    main()
