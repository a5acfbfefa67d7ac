"""llama.cpp through its own C API (llama_decode), so that its Python wrapper's costs are not measured.

Several prompts are served by a continuous batching loop as in its server: each call of llama_decode takes the next token
of every running sequence and whole prompts of waiting requests as far as a sequence and the batch have room.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import harness

_BATCH_TOKENS = 2048
_SUB_BATCH_TOKENS = 512


@dataclass
class _Running:
    """A request that holds a sequence of the cache."""

    request: int
    sequence: int
    remaining: int
    pending: list[int]
    position: int = 0
    output: list[int] = field(default_factory=list)


def _import() -> harness.Build:
    import llama_cpp
    import numpy as np

    # The callback must outlive the library's use of it.
    silent = llama_cpp.llama_log_callback(lambda level, text, data: None)

    class Context:
        """One llama_context with its batch; `decode` takes the running requests one step further."""

        def __init__(self, model: Any, sequences: int, tokens_per_sequence: int, options: dict[str, Any]) -> None:
            parameters = llama_cpp.llama_context_default_params()
            parameters.n_ctx = sequences * tokens_per_sequence
            parameters.n_batch = _BATCH_TOKENS
            parameters.n_ubatch = _SUB_BATCH_TOKENS
            parameters.n_seq_max = sequences
            parameters.n_threads = parameters.n_threads_batch = options["threads"]
            parameters.flash_attn_type = (
                llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
                if options["flash_attention"]
                else llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
            )
            self._unified = parameters.kv_unified = options["kv_unified"]
            parameters.no_perf = True
            self._context = llama_cpp.llama_init_from_model(model, parameters)
            if not self._context:
                raise RuntimeError(f"llama.cpp made no context for {sequences} x {tokens_per_sequence} tokens")
            self._memory = llama_cpp.llama_get_memory(self._context)
            self._batch = llama_cpp.llama_batch_init(_BATCH_TOKENS, 0, 1)
            self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
            self.sequences = sequences

        def generate(self, prompts: Sequence[Sequence[int]], output_tokens: Sequence[int]) -> list[list[int]]:
            llama_cpp.llama_memory_clear(self._memory, False)
            waiting = deque(range(len(prompts)))
            free = list(range(self.sequences))
            running: list[_Running] = []
            outputs: list[list[int]] = [[] for _ in prompts]
            while waiting or running:
                room = _BATCH_TOKENS - len(running)
                admitted: list[_Running] = []
                while waiting and free and len(prompts[waiting[0]]) <= room:
                    request = waiting.popleft()
                    admitted.append(_Running(request, free.pop(), output_tokens[request], list(prompts[request])))
                    room -= len(prompts[request])
                if self._unified:
                    self._decode([*running, *admitted])
                else:
                    # With a cache per sequence, a batch is split until all of its sequences have equally many tokens.
                    for member in admitted:
                        self._decode([member])
                    if running:
                        self._decode(running)
                running += admitted
                for member in [member for member in running if member.remaining == 0]:
                    outputs[member.request] = member.output
                    llama_cpp.llama_memory_seq_rm(self._memory, member.sequence, -1, -1)
                    free.append(member.sequence)
                    running.remove(member)
            return outputs

        def _decode(self, running: Sequence[_Running]) -> None:
            batch, filled = self._batch, 0
            last_rows = []
            for member in running:
                for token in member.pending:
                    batch.token[filled] = token
                    batch.pos[filled] = member.position
                    batch.n_seq_id[filled] = 1
                    batch.seq_id[filled][0] = member.sequence
                    batch.logits[filled] = 0
                    member.position += 1
                    filled += 1
                batch.logits[filled - 1] = 1
                last_rows.append(filled - 1)
            batch.n_tokens = filled
            status = llama_cpp.llama_decode(self._context, batch)
            if status != 0:
                raise RuntimeError(f"llama_decode of {filled} tokens returned {status}")
            for member, row in zip(running, last_rows, strict=True):
                address = llama_cpp.llama_get_logits_ith(self._context, row)
                token = int(np.ctypeslib.as_array(address, shape=(self._vocab_size,)).argmax())
                member.output.append(token)
                member.pending = [token]
                member.remaining -= 1

    class LlamaCpp:
        def __init__(self, options: dict[str, Any]) -> None:
            llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
            llama_cpp.llama_backend_init()
            parameters = llama_cpp.llama_model_default_params()
            self._model = llama_cpp.llama_model_load_from_file(options["model"].encode(), parameters)
            if not self._model:
                raise RuntimeError(f"llama.cpp could not load {options['model']}")
            self._single = Context(self._model, 1, options["max_model_len"], options)
            self._many = Context(self._model, options["sequences"], options["max_mixed_len"], options)
            self.details = {"system_info": llama_cpp.llama_print_system_info().decode().strip(" |")}

        def generate(self, prompts: Sequence[Sequence[int]], output_tokens: Sequence[int]) -> list[list[int]]:
            context = self._single if len(prompts) == 1 else self._many
            return context.generate(prompts, output_tokens)

    return LlamaCpp


if __name__ == "__main__":
    harness.run(_import, ["llama_cpp_python", "numpy"])
