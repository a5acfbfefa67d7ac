"""transformers' continuous batching on a device, one process of `device_engine.py`."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import device_job
from decode_window import window_of


class Transformers:
    """A model and `generate_batch`, with one manager for all runs of a case, which keeps what it captured and compiled."""

    def __init__(self, options: dict[str, Any]) -> None:
        import torch
        from transformers import AutoModelForCausalLM, logging

        logging.set_verbosity_error()
        self._options = options
        self._model = AutoModelForCausalLM.from_pretrained(
            options["model"], dtype=torch.bfloat16, attn_implementation=options["attention"]
        )
        self._model = self._model.to(options["torch_device"]).eval()
        self._settings: dict[str, Any] = {}
        self.details = {"attention": options["attention"], "settings": options["settings"]}

    def begin(self, prompts: int, length: int, output_tokens: int) -> None:
        """Drop the manager of the case before, which is sized for its requests."""
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        with contextlib.suppress(AttributeError):
            self._model.destroy_cached_continuous_batching_manager()
        self._settings = dict(self._options["settings"])
        if self._options["torch_device"] == "cpu":
            # Sizes are found by the device's free memory alone.
            default = ContinuousBatchingConfig()
            page = getattr(default, "page_size", None) or default.block_size
            self._settings |= {"num_blocks": 2 * prompts * (-(-(length + output_tokens) // page) + 1)}

    def run(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> dict[str, Any]:
        """See `device_job.System`."""
        from transformers import GenerationConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        results = self._model.generate_batch(
            [list(prompt) for prompt in prompts],
            generation_config=GenerationConfig(
                do_sample=False, max_new_tokens=output_tokens, eos_token_id=-1, pad_token_id=0
            ),
            continuous_batching_config=ContinuousBatchingConfig(**self._settings),
            record_timestamps=True,
            persistent_manager=True,
        )
        outputs = list(results.values())
        failed = [output.error for output in outputs if output.error]
        lengths = {len(output.generated_tokens) for output in outputs}
        if failed or len(outputs) != len(prompts) or lengths != {output_tokens}:
            raise RuntimeError(f"{len(outputs)} answers of {lengths} tokens; {'; '.join(failed[:1])}")
        times = [output.timestamps for output in outputs]
        emissions = sorted(Counter(at for one in times for at in one).items())
        first_token, first_end = max(one[0] for one in times), min(one[-1] for one in times)
        found = window_of(emissions, first_token, first_end, min(output.created_time for output in outputs))
        by_prompt = {tuple(output.prompt_ids): output.generated_tokens[0] for output in outputs}
        return found | {"first_tokens": [by_prompt.get(tuple(prompt), -1) for prompt in prompts]}


if __name__ == "__main__":
    device_job.main(Transformers, ["transformers", "torch", "triton", "numpy"])
