"""transformers' generate() with static batches, padded on the left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import harness


def _import() -> harness.Build:
    import torch
    from transformers import AutoModelForCausalLM

    class Transformers:
        def __init__(self, options: dict[str, Any]) -> None:
            torch.set_num_threads(options["threads"])
            self._batch = options["batch_size"]
            self._model = AutoModelForCausalLM.from_pretrained(options["model"], dtype=torch.bfloat16).eval()

        @torch.inference_mode()
        def generate(self, prompts: Sequence[Sequence[int]], output_tokens: Sequence[int]) -> list[list[int]]:
            outputs: list[list[int]] = [[] for _ in prompts]
            # A static batch runs until its longest member ends: like with like wastes the least.
            order = sorted(range(len(prompts)), key=lambda i: output_tokens[i])
            for start in range(0, len(order), self._batch):
                members = order[start : start + self._batch]
                for i, tokens in zip(
                    members,
                    self._batch_of([prompts[i] for i in members], [output_tokens[i] for i in members]),
                    strict=True,
                ):
                    outputs[i] = tokens
            return outputs

        def _batch_of(self, prompts: Sequence[Sequence[int]], output_tokens: Sequence[int]) -> list[list[int]]:
            width, longest = max(map(len, prompts)), max(output_tokens)
            ids = torch.zeros(len(prompts), width, dtype=torch.int64)
            mask = torch.zeros_like(ids)
            for row, prompt in enumerate(prompts):
                ids[row, width - len(prompt) :] = torch.tensor(prompt)
                mask[row, width - len(prompt) :] = 1
            result = self._model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=longest,
                eos_token_id=[],
                pad_token_id=0,
            )
            new = result[:, width:].tolist()
            return [tokens[:count] for tokens, count in zip(new, output_tokens, strict=True)]

    return Transformers


if __name__ == "__main__":
    harness.run(_import, ["transformers", "torch", "numpy"])
