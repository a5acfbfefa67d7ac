"""A rank's steps, and what sequences need of the worker from one step to the next: samplers, chunked prompts' poolings."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from hardpoint.interfaces.batch import FloatArray, Int64Array, StepBatch, StepInput, StepOutput
from hardpoint.interfaces.errors import OutputFailed
from hardpoint.interfaces.kernels import DecoderOutput
from hardpoint.interfaces.worker import WorkerConfig
from hardpoint.sampling import Sampler
from hardpoint.worker.kv_memory import KVMemory
from hardpoint.worker.model_runner import ModelRunner
from hardpoint.worker.pooling import Pooler
from hardpoint.worker.ranks import PlainSequences

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

_NO_TOKENS: Int64Array = np.empty(0, np.int64)


class Steps:
    """Executes steps: blocks are moved, the model runs, the driver samples and pools."""

    def __init__(
        self, config: WorkerConfig, runner: ModelRunner, kv: KVMemory, sampler: Sampler, synchronize: Callable[[], None]
    ) -> None:
        """Begin without sequences.

        Args:
            synchronize: waits until the device has done all its work.
        """
        self._runner, self._kv, self._sampler = runner, kv, sampler
        self._synchronize = synchronize
        self._pooler, self._plain = Pooler(), PlainSequences()
        self._is_driver, self._is_alone = config.rank == config.driver_rank, config.world_size == 1

    def execute(self, step: StepInput) -> StepOutput:
        """Swap, copy, compute and sample one step; see `Worker.submit`."""
        batch, cache = step.batch, self._kv.cache
        self._follow(step)
        self._kv.move_blocks(batch)
        if batch.num_tokens == 0:
            return StepOutput(_NO_TOKENS)
        hidden = self._hidden(batch, cache) if step.pooling else None
        if not len(batch.sample_seq_ids):
            if hidden is None:
                self._runner.forward(batch, cache, DecoderOutput.ARGMAX)
            self._synchronize()
            return StepOutput(_NO_TOKENS, embeddings=self._alone(partial(self._embeddings, step, hidden)))
        # Pooled before the next run of the model, which may use the same memory.
        embeddings = self._embeddings(step, hidden)
        output = DecoderOutput.ARGMAX if self._wants_argmax(batch.sample_seq_ids) else DecoderOutput.LOGITS
        result = self._runner.forward(batch, cache, output)
        if not self._is_driver:
            self._synchronize()
            return StepOutput(_NO_TOKENS)
        if output is DecoderOutput.ARGMAX:
            return StepOutput(result.numpy(force=True), embeddings=embeddings)
        token_ids, logprobs = self._alone(partial(self._sampler.sample, result, batch.sample_seq_ids))
        return StepOutput(token_ids, logprobs, embeddings)

    def _alone(self, make: Callable[[], T]) -> T:
        """Return what a rank makes of a step when it needs the others no more; raises OutputFailed for what fails in it.

        A device that failed in what was queued before says so when it is waited for, and that is no failed output.
        """
        try:
            return make()
        except Exception as error:
            self._synchronize()
            raise OutputFailed.after(error) from error

    def _follow(self, step: StepInput) -> None:
        """Forget the sequences that ended and begin the new ones."""
        if step.finished_seq_ids:
            for state in (self._sampler, self._plain, self._pooler):
                state.remove(step.finished_seq_ids)
        for sequence in step.new_sequences:
            self._plain.add(sequence)
            if self._is_driver:
                self._sampler.add(sequence)

    def _wants_argmax(self, seq_ids: Int64Array) -> bool:
        """Whether a step needs no logits; the same answer on all ranks, of which only the driver counts tokens."""
        return self._sampler.all_plain_argmax(seq_ids) if self._is_alone else self._plain.all(seq_ids)

    def _hidden(self, batch: StepBatch, cache: Tensor) -> Tensor:
        """Run a step for the hidden states of all its tokens.

        A step that also samples runs once more for its logits: keys and values are then written again, the same ones.
        """
        rows = np.arange(batch.num_tokens, dtype=np.int32)
        return self._runner.forward(batch, cache, DecoderOutput.HIDDEN, rows)

    def _embeddings(self, step: StepInput, hidden: Tensor | None) -> dict[int, FloatArray]:
        """Return the embeddings of the prompts that end in a step, on the driver."""
        embeddings: dict[int, FloatArray] = {}
        if hidden is None or not self._is_driver:
            return embeddings
        batch = step.batch
        for row, seq_id in enumerate(batch.seq_ids.tolist()):
            request = step.pooling.get(seq_id)
            if request is None:
                continue
            chunk = hidden[batch.query_start[row] : batch.query_start[row + 1]]
            context = int(batch.context_lens[row])
            embedding = self._pooler.add(
                seq_id, request.pooling, chunk, ends=context == request.prompt_len, starts=context == len(chunk)
            )
            if embedding is not None:
                embeddings[seq_id] = embedding
        return embeddings
