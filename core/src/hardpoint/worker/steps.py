"""A rank's steps, and what sequences need of the worker from one step to the next: rows of the sampler, chunked prompts' poolings."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from hardpoint.interfaces.batch import FloatArray, Int64Array, StepInput, StepOutput
from hardpoint.interfaces.errors import OutputFailed
from hardpoint.interfaces.worker import WorkerConfig
from hardpoint.sampling import Sampled, Sampler
from hardpoint.worker.kv_memory import KVMemory
from hardpoint.worker.model_runner import ModelRunner
from hardpoint.worker.pooling import Pooler
from hardpoint.worker.ranks import PlainRows

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

_NO_TOKENS: Int64Array = np.empty(0, np.int64)


class StepExecutor:
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
        self._pooler, self._plain = Pooler(), PlainRows()
        self._is_driver = config.rank == config.driver_rank

    def execute(self, step: StepInput) -> StepOutput:
        """Swap, copy, compute and sample one step; see `Worker.submit`."""
        batch, cache = step.batch, self._kv.cache
        self._follow(step)
        self._kv.move_blocks(batch)
        if batch.num_tokens == 0:
            return StepOutput(_NO_TOKENS)
        last = batch.query_start[batch.sample_rows + 1] - 1
        # A step that pools wants all tokens' hidden states, and samples from some of them.
        hidden = self._runner.forward(
            batch, cache, np.arange(batch.num_tokens, dtype=np.int32) if step.pooling else last
        )
        if not len(last):
            self._synchronize()
            return StepOutput(_NO_TOKENS, embeddings=self._alone(partial(self._embeddings, step, hidden)))
        embeddings = self._embeddings(step, hidden)
        if step.pooling and len(hidden):
            hidden = hidden.index_select(0, torch.from_numpy(last).to(hidden.device))
        is_plain = self._plain.all(batch.sample_state_rows, batch.sample_positions)
        result = self._runner.argmax(hidden) if is_plain else self._runner.logits(hidden)
        if not self._is_driver:
            self._synchronize()
            return StepOutput(_NO_TOKENS)
        sampled = self._alone(partial(self._sample, step, result, is_plain=is_plain))
        return StepOutput(sampled.token_ids, sampled.logprobs, embeddings, sampled.failed)

    def _sample(self, step: StepInput, result: Tensor, *, is_plain: bool) -> Sampled:
        """Return the step's tokens: those that the model chose, or sampled from its logits."""
        self._sampler.set_rows(step.new_sequences)
        rows, positions = step.batch.sample_state_rows, step.batch.sample_positions
        tokens = self._sampler.take(result, rows) if is_plain else self._sampler.sample(result, rows, positions)
        return tokens.collect()

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
        """Forget the poolings of sequences that ended, and note the new sequences."""
        self._pooler.remove(step.finished_seq_ids)
        self._plain.write(step.new_sequences)

    def _embeddings(self, step: StepInput, hidden: Tensor) -> dict[int, FloatArray]:
        """Return the embeddings of the prompts that end in a step, on the driver."""
        embeddings: dict[int, FloatArray] = {}
        if not step.pooling or not self._is_driver:
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
