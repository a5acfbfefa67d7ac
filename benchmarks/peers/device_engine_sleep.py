"""Sleep and wake of a whole engine on a device, with the graphs that it captured: a process of `sleep_device.py`.

    python device_engine_sleep.py BACKEND DEVICE MODEL_FOLDER ROUNDS        (the folder has config.json; weights are random)

The engine captures its graphs when it is made, answers the same prompts before the first sleep and after every wake, and is never captured
again: tokens that are the same come from graphs whose memory went away and came back.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import stdout_to_stderr

PROMPTS, LENGTH, OUTPUT_TOKENS = 5, 24, 24
"""Five sequences: no size that is captured, so that steps are padded, and fewer ones as they end."""


def answers(llm: Any, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the tokens of every prompt, of different numbers, seeded and at a low temperature.

    Random weights with tied embeddings repeat their last token when decoding is greedy; these tokens depend on all logits of every step.
    """
    from hardpoint import SamplingParams

    params = [
        SamplingParams(temperature=0.2, seed=number, max_tokens=OUTPUT_TOKENS - 3 * number, ignore_eos=True)
        for number in range(len(prompts))
    ]
    outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def measure(backend: str, device: int, model: str, rounds: int) -> dict[str, Any]:
    """Return seconds of sleeps and wakes, bytes, and how many of the tokens after each wake are those of before."""
    from hardpoint import LLM

    with LLM(
        model,
        backend=backend,
        device=device,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_seqs=32,
        num_device_blocks=512,
        swap_space=0.0,
        enable_prefix_caching=False,
        enable_sleep_mode=True,
    ) as llm:
        source = random.Random(0)
        vocab = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))["vocab_size"]
        prompts = [[source.randrange(vocab) for _ in range(LENGTH)] for _ in range(PROMPTS)]
        expected = answers(llm, prompts)
        sleeps, wakes, same = [], [], []
        for _ in range(rounds):
            report = llm.sleep(1)
            wakes.append(llm.wake_up().seconds)
            sleeps.append(report.seconds)
            found = answers(llm, prompts)
            pairs = zip(expected, found, strict=True)
            same.append(sum(a == b for one, other in pairs for a, b in zip(one, other, strict=True)))
        captured = "graphs" in report.tags
        graphs = llm.sleep(1, tags="graphs").freed if captured else 0
        if captured:
            llm.wake_up()
        return {
            "graphs": captured,
            "graph_bytes": graphs,
            "residual": dict(report.residual),
            "freed": report.freed,
            "tags": sorted(report.tags),
            "sleep_s": sleeps,
            "wake_s": wakes,
            "same_tokens": same,
            "tokens": sum(map(len, expected)),
            "distinct_tokens": len({token for one in expected for token in one}),
        }


def main() -> None:
    """Print the result as one line of JSON."""
    backend, device, model, rounds = sys.argv[1:5]
    with stdout_to_stderr() as answer:
        print(json.dumps(measure(backend, int(device), model, int(rounds))), file=answer, flush=True)


if __name__ == "__main__":
    main()
