"""The mean log probability of given tokens by llama.cpp (llama_decode), in chunks whose second halves are scored.

The one argument is a job file (JSON, written by `quantized.py`); the answer is one line of JSON.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import harness


def main() -> None:
    """Score the tokens and print the answer."""
    job: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    with harness.stdout_to_stderr() as answer:
        import llama_cpp
        import numpy as np

        silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_load_from_file(job["model"].encode(), llama_cpp.llama_model_default_params())
        if not model:
            raise RuntimeError(f"llama.cpp could not load {job['model']}")
        size = job["chunk"]
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = size
        parameters.n_threads = parameters.n_threads_batch = job["threads"]
        context = llama_cpp.llama_init_from_model(model, parameters)
        if not context:
            raise RuntimeError(f"llama.cpp made no context for {size} tokens")
        batch = llama_cpp.llama_batch_init(size, 0, 1)
        vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        total, scored = 0.0, 0
        ids = job["token_ids"]
        for first in range(0, len(ids) - size + 1, size):
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), False)
            for at in range(size):
                batch.token[at], batch.pos[at] = ids[first + at], at
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, 0
                batch.logits[at] = int(size // 2 <= at < size - 1)
            batch.n_tokens = size
            if status := llama_cpp.llama_decode(context, batch):
                raise RuntimeError(f"llama_decode of {size} tokens returned {status}")
            for at in range(size // 2, size - 1):
                address = llama_cpp.llama_get_logits_ith(context, at)
                logits = np.ctypeslib.as_array(address, shape=(vocab_size,)).astype(np.float64)
                highest = logits.max()
                total += float(logits[ids[first + at + 1]] - highest - np.log(np.exp(logits - highest).sum()))
                scored += 1
        print(json.dumps({"mean_log_probability": total / scored, "scored": scored}), file=answer, flush=True)


if __name__ == "__main__":
    main()
