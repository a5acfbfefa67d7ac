"""The mean log probability of Python's help texts by a model, in chunks whose second halves are scored.

The one argument is a job file (JSON, written by `quantized.py`); the answer is one line of JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import harness


def main() -> None:
    """Score the text and print the answer."""
    job: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    with harness.stdout_to_stderr() as answer:
        from pydoc_data.topics import topics

        from hardpoint import LLM, SamplingParams

        size, count = job["chunk"], job["tokens"]
        llm = LLM(
            job["model"],
            dtype=job["dtype"],
            quantization=job["quantization"],
            threads=job["threads"],
            max_model_len=size + 64,
            max_num_seqs=16,
            enable_prefix_caching=False,
        )
        ids = job["token_ids"]
        if ids is None:
            text = "\n\n".join(topics[name] for name in sorted(topics))
            ids = llm.get_tokenizer().encode(text)[:count]
        if len(ids) < count:
            raise ValueError(f"the text has {len(ids)} tokens, fewer than {count}")
        chunks = [ids[first : first + size] for first in range(0, count - size + 1, size)]
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": chunk} for chunk in chunks], params, use_tqdm=False)
        found = [
            output.prompt_logprobs[at][chunk[at]].logprob
            for chunk, output in zip(chunks, outputs, strict=True)
            for at in range(size // 2 + 1, size)
        ]
        result = {"mean_log_probability": sum(found) / len(found), "scored": len(found), "token_ids": ids}
        print(json.dumps(result | {"weight_formats": dict(llm.info.weight_formats)}), file=answer, flush=True)
        llm.shutdown()


if __name__ == "__main__":
    main()
