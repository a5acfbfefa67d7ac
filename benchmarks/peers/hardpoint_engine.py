"""Hardpoint, measured by the same harness as its peers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import harness


def _import() -> harness.Build:
    from hardpoint import LLM, SamplingParams

    class Hardpoint:
        def __init__(self, options: dict[str, Any]) -> None:
            self._detokenize = options.get("tokenizer", True)
            self._llm = LLM(
                options.get("model", "demo"),
                dtype="bfloat16",
                quantization=options.get("quantization", "none"),
                threads=options["threads"],
                max_model_len=options["max_model_len"],
                max_num_seqs=options["max_num_seqs"],
                enable_prefix_caching=False,
                skip_tokenizer_init=not self._detokenize,
            )
            info = self._llm.info
            self.details = {
                "weight_bytes": info.weight_bytes,
                "kv_bytes_per_token": info.kv_bytes // (info.num_device_blocks * info.block_size),
                "weight_formats": dict(info.weight_formats),
                "load_seconds": info.load_seconds,
            }

        def generate(self, prompts: Sequence[Sequence[int]], output_tokens: Sequence[int]) -> list[list[int]]:
            results = self._llm.generate(
                [{"prompt_token_ids": list(prompt)} for prompt in prompts],
                [
                    SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=self._detokenize)
                    for count in output_tokens
                ],
                use_tqdm=False,
            )
            return [list(result.outputs[0].token_ids) for result in results]

    return Hardpoint


if __name__ == "__main__":
    harness.run(_import, ["hardpoint", "hardpoint-cpu", "torch", "numpy"])
