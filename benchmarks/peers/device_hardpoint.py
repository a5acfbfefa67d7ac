"""Hardpoint on a device, one process of `device_engine.py`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import device_job
from decode_window import window_of


class Hardpoint:
    """The engine, driven step by step; prefix caching is off."""

    def __init__(self, options: dict[str, Any]) -> None:
        from hardpoint import LLM

        self._llm = LLM(
            options["model"],
            backend=options["backend"],
            device=options["device"],
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=options["max_model_len"],
            max_num_seqs=options["max_num_seqs"],
            max_num_batched_tokens=options["max_num_batched_tokens"],
            memory_utilization=options["memory_utilization"],
            enable_prefix_caching=False,
            swap_space=0.0,
            enforce_eager=options["enforce_eager"],
        )
        info = self._llm.info
        self.details = {
            "device": info.device,
            "simulated": info.simulated,
            "path": info.path,
            "block_size": info.block_size,
            "kv_bytes": info.kv_bytes,
            "weight_bytes": info.weight_bytes,
            "load_s": info.load_seconds,
        }

    def begin(self, prompts: int, length: int, output_tokens: int) -> None:
        """Nothing depends on the case."""

    def run(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> dict[str, Any]:
        """See `device_job.System`; also `window_steps`, and `window_context`: keys that the window's tokens read, their sum."""
        from hardpoint import SamplingParams
        from hardpoint.sampling import RequestOutputKind

        engine = self._llm.engine
        params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
        params = params.clone(output_kind=RequestOutputKind.FINAL_ONLY)
        requests = [engine.process({"prompt_token_ids": list(prompt)}) for prompt in prompts]
        prompt_tokens = sum(map(len, prompts))
        before = engine.stats()
        sampled, prefilled = before.sampled_tokens, before.prefill_tokens
        emissions: list[tuple[float, int]] = []
        first_token = first_end = 0.0
        steps, context, count, firsts = 0, 0, 0, [-1] * len(prompts)
        start = time.perf_counter()
        for number, request in enumerate(requests):
            engine.add_request(str(number), request, params)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter()
            tokens = engine.stats().sampled_tokens - sampled - count
            if first_token and not first_end:
                steps, context = steps + 1, context + prompt_tokens + count
            count += tokens
            emissions.append((now, tokens))
            if not first_token and engine.stats().prefill_tokens - prefilled >= prompt_tokens:
                first_token = now
            if outputs and not first_end:
                first_end = now
            for output in outputs:
                firsts[int(output.request_id)] = output.outputs[0].token_ids[0]
                if len(output.outputs[0].token_ids) != output_tokens:
                    raise RuntimeError(f"{len(output.outputs[0].token_ids)} tokens, not {output_tokens}")
        found = window_of(emissions, first_token, first_end, start)
        return found | {"first_tokens": firsts, "window_steps": steps, "window_context": context}


if __name__ == "__main__":
    device_job.main(Hardpoint, ["hardpoint", "torch", "triton", "numpy"])
