"""Speculative decoding by prompt lookup beside the same engine without it: an editing task and free text, one stream, in one process.

    python benchmarks/speculation.py [--threads 2] [--rounds 5] [--tokens 160] [--json FILE]

The demo model in bf16, in two engines that take turns in each round. The editing task repeats a text in which one word was changed; its
answer is begun, so that a small model goes on with it. Free text goes on with the beginnings of stories, drawn at a temperature of 0.8 with
seeds. A ratio is the median of the rounds' ratios of wall time, without over with speculation; the processor's is beside it. Whether the
tokens of both are the same, as they have to be, is printed. How many steps each took says what the machine's load does not move.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import report

from hardpoint import LLM, SamplingParams

TEXT = """The harbour of Aldmouth lies at the end of a narrow valley, where the river Senn meets the sea. In spring the fishing
boats leave before dawn, and the gulls follow them out past the old lighthouse. Most families have lived here for
generations; their houses, built of grey stone and roofed with slate, stand in rows above the quay. On market days the
square fills with farmers from the hills, who bring cheese, wool and apples, and take home salted fish, rope and news
from the coast. A railway once ran along the shore, but the storms of a single winter washed most of it away, and only
the station remains, which now serves as a library. Visitors come in summer to walk the cliffs, to paint the light on
the water, and to eat at the three small inns that share one kitchen."""
CHANGED = TEXT.replace("Aldmouth", "Westbury")
EDIT = (
    f"Text:\n\n{TEXT}\n\nThe same text, with Westbury in the place of Aldmouth:\n\n{CHANGED[: CHANGED.index('Most')]}"
)
FREE = (
    "Once upon a time, in a village between two rivers, there lived a clockmaker who",
    "The letter arrived on a Tuesday, and nobody in the house wanted to open it, because",
    "When the ship finally reached the island, the captain",
)


def asked(tokens: int) -> dict[str, tuple[list[str], list[SamplingParams]]]:
    """Return prompts and parameters of each task."""
    greedy = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    drawn = [
        SamplingParams(temperature=0.8, seed=seed, max_tokens=tokens, ignore_eos=True) for seed in range(len(FREE))
    ]
    return {"editing": ([EDIT], [greedy]), "free text": (list(FREE), drawn)}


def run(llm: LLM, prompts: list[str], params: list[SamplingParams]) -> dict[str, Any]:
    """Return tokens, seconds, processor seconds, steps and counts of drafts of one stream after the other."""
    before, wall, cpu = llm.stats(), time.perf_counter(), time.process_time()
    outputs = [llm.generate(one, each, use_tqdm=False)[0] for one, each in zip(prompts, params, strict=True)]
    wall, cpu, after = time.perf_counter() - wall, time.process_time() - cpu, llm.stats()
    counts = {
        name: getattr(after, name) - getattr(before, name) for name in ("steps", "draft_tokens", "accepted_tokens")
    }
    return {"tokens": [list(one.outputs[0].token_ids) for one in outputs], "seconds": wall, "processor": cpu} | counts


def measure(engines: dict[str, LLM], name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Let the engines take turns at one task."""
    task = asked(options.tokens)[name]
    rounds: dict[str, list[dict[str, Any]]] = {kind: [] for kind in engines}
    for number in range(options.rounds + 1):
        for kind, llm in engines.items():
            found = run(llm, *task)
            if number:  # the first warms all shapes of steps
                rounds[kind].append(found)
    same = all(one["tokens"] == rounds["without"][0]["tokens"] for of_kind in rounds.values() for one in of_kind)
    pairs = list(zip(rounds["without"], rounds["ngram"], strict=True))

    def ratio(of: str) -> float:
        return report.median([without[of] / given[of] for without, given in pairs])

    taken = {
        kind: [{key: one[key] for key in one if key != "tokens"} for one in of_kind] for kind, of_kind in rounds.items()
    }
    return {"ratio": ratio("seconds"), "ratio_of_processor_time": ratio("processor"), "ratio_of_steps": ratio("steps"),
            "same_tokens": same, "rounds": taken}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=160, help="tokens of each answer")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    settings = {"dtype": "bfloat16", "backend": "cpu", "threads": options.threads, "max_model_len": 1024}
    settings |= {"quantization": "none", "num_device_blocks": 128}
    engines = {
        "without": LLM("demo", **settings),
        "ngram": LLM("demo", **settings, speculative_config={"method": "ngram"}),
    }
    found = {name: measure(engines, name, options) for name in asked(options.tokens)}
    for llm in engines.values():
        llm.shutdown()
    rows = [
        [name, kind, *(f"{one['seconds']:.2f}" for one in taken), str(taken[-1]["steps"]),
         f"{taken[-1]['accepted_tokens']} of {taken[-1]['draft_tokens']}"]
        for name, result in found.items() for kind, taken in result["rounds"].items()
    ]  # fmt: skip
    print(report.table(["task", "engine", *(f"s, {n + 1}" for n in range(options.rounds)), "steps", "accepted"], rows))
    bars = {"editing": 2.0, "free text": 0.97}
    verdicts = [
        report.Verdict(
            f"{name}, times the engine without",
            result["ratio"],
            None,
            "",
            f"≥ {bars[name]}",
            result["ratio"] >= bars[name],
        )
        for name, result in found.items()
    ]
    print(report.verdict_table(verdicts))
    for name, result in found.items():
        print(f"{name}: tokens {'are the same' if result['same_tokens'] else 'DIFFER'}, steps {result['ratio_of_steps']:.2f} x fewer,"
              f" processor time {result['ratio_of_processor_time']:.2f} x")  # fmt: skip
    if options.json:
        report.write_json(
            options.json,
            {
                "command": report.command(),
                "machine": report.machine(("hardpoint-cpu", "torch")),
                "tokens": options.tokens,
                **found,
                "verdicts": [verdict.as_dict() for verdict in verdicts],
            },
        )


if __name__ == "__main__":
    main()
