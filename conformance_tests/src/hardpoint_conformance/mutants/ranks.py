"""Faults of ranks: of the collectives that they talk by, and of workers that share a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hardpoint.interfaces import (
    MemoryChange,
    MemoryReport,
    ModelInfo,
    Policy,
    SleepPlan,
    StepInput,
    StepOutput,
    WeightWrite,
    WorkerContext,
)
from hardpoint_conformance.mutants import Mutant
from hardpoint_conformance.mutants.derived import Faults, Methods
from hardpoint_conformance.mutants.worker import other_change, other_write, run_step, stepping

if TYPE_CHECKING:
    from torch import Tensor

_COLLECTIVES = Faults("collectives")
_WORKER = Faults("worker")


# Collectives


@_COLLECTIVES.fault(
    "Ranks keep their own parts of a sum.",
    "dist.tokens.tensor@1",
    "dist.all-reduce.exact@1",
    "dist.order.kept@1",
    "dist.rank.dead@1",
)
def all_reduce_left_out(base: Any) -> Methods:
    return {"all_reduce": lambda self, tensor: None}


@_COLLECTIVES.fault(
    "Gathered tensors are in the opposite order of ranks.", "dist.tokens.tensor@1", "dist.all-gather.exact@1"
)
def gathered_backwards(base: Any) -> Methods:
    def all_gather(self: Any, tensor: Tensor, axis: int) -> Tensor:
        import torch

        joined: Tensor = base.all_gather(self, tensor, axis)
        return torch.cat(joined.chunk(joined.shape[axis] // tensor.shape[axis], dim=axis)[::-1], dim=axis)

    return {"all_gather": all_gather}


@_COLLECTIVES.fault("The last row of what is received is lost.", "dist.tokens.pipeline@1", "dist.send-receive.exact@1")
def last_received_row_lost(base: Any) -> Methods:
    def receive(self: Any, tensor: Tensor, rank: int) -> None:
        base.receive(self, tensor, rank)
        tensor[-1] = 0

    return {"receive": receive}


@_COLLECTIVES.fault("A broadcast comes from rank 0, whatever the source.", "dist.broadcast.exact@1")
def broadcast_from_rank_0(base: Any) -> Methods:
    return {"broadcast": lambda self, tensor, source: base.broadcast(self, tensor, 0)}


@_COLLECTIVES.fault("A barrier holds nobody.", "dist.barrier.waits@1")
def barrier_open(base: Any) -> Methods:
    return {"barrier": lambda self: None}


@_COLLECTIVES.fault("A group can be left once only.", "dist.stop.twice@1")
def second_stop_fails(base: Any) -> Methods:
    def stop(self: Any) -> None:
        if vars(self).get("_stopped"):
            raise RuntimeError("there is no group")
        self._stopped = True
        base.stop(self)

    return {"stop": stop}


@_COLLECTIVES.fault("A group that is not complete is joined all the same.", "dist.start.missing-rank@1")
def joined_alone(base: Any) -> Methods:
    def start(self: Any, rank: int, world_size: int, init_method: str, timeout: float) -> None:
        try:
            base.start(self, rank, world_size, init_method, timeout)
        except Exception:
            self.stop()

    return {"start": start}


# Shares of the weights


def _after_loading(base: Any, change: Callable[[Any], None]) -> Methods:
    """Change a worker that has just loaded its share."""

    def load(self: Any) -> ModelInfo:
        info: ModelInfo = base.load(self)
        if self._config.world_size > 1:
            change(self)
        return info

    return {"load": load}


def _causal_lm(worker: Any) -> Any:
    """Return the model of a rank, as the core's layers."""
    return worker._loaded.model.model._model


@_WORKER.fault("Rank 1 has the columns of the attention's output of other heads.", "dist.tokens.tensor@1")
def wrong_columns_of_o(base: Any) -> Methods:
    def change(worker: Any) -> None:
        if worker._config.tensor_rank == 1:
            weight = _causal_lm(worker).get_parameter("model.layers.0.self_attn.o_proj.weight")
            weight.copy_(weight.roll(worker._loaded.model.plan.kv_cache.head_dim, dims=1))

    return _after_loading(base, change)


@_WORKER.fault("A rank embeds the tokens of its own part of the vocabulary alone.", "dist.tokens.tensor@1")
def first_token_of_a_share_ignored(base: Any) -> Methods:
    def change(worker: Any) -> None:
        embedding = _causal_lm(worker).model.embed_tokens
        if embedding is not None:
            embedding._first, embedding._end = 0, embedding._end - embedding._first

    return _after_loading(base, change)


@_WORKER.fault("The best token is the best of the driver's own part of the vocabulary.", "dist.tokens.tensor@1")
def argmax_of_own_vocabulary(base: Any) -> Methods:
    def change(worker: Any) -> None:
        model = _causal_lm(worker)
        model.argmax = lambda hidden: model.lm_head._own_logits(hidden).argmax(dim=-1)

    return _after_loading(base, change)


@_WORKER.fault("The second stage normalises the first one's output twice.", "dist.tokens.pipeline@1")
def stage_normalises_twice(base: Any) -> Methods:
    def change(worker: Any) -> None:
        if worker._config.stage:
            decoder = _causal_lm(worker).model
            layer, link = next(iter(decoder.layers.values())), decoder._pipeline
            receive = link.receive

            def normalised(tensor: Tensor, rank: int) -> None:
                receive(tensor, rank)
                tensor.copy_(layer.input_layernorm(tensor, None))

            link.receive = normalised

    return _after_loading(base, change)


# Calls


@_WORKER.fault("Every rank returns tokens of its own.", "dist.driver.samples@1")
def every_rank_samples(base: Any) -> Methods:
    def execute(self: Any, step: StepInput) -> StepOutput:
        output = run_step(base, self, step)
        missing = len(step.batch.sample_rows) - len(output.token_ids)
        return replace(output, token_ids=np.pad(output.token_ids, (0, missing)))

    return stepping(execute)


@_WORKER.fault("The driver returns the tokens of the step before.", "dist.tokens.tensor@1", "dist.tokens.pipeline@1")
def tokens_of_the_step_before(base: Any) -> Methods:
    def execute(self: Any, step: StepInput) -> StepOutput:
        output = run_step(base, self, step)
        before = getattr(self, "_tokens_before", output.token_ids)
        self._tokens_before = output.token_ids
        late = len(before) == len(output.token_ids) and self._config.world_size > 1
        return replace(output, token_ids=before) if late else output

    return stepping(execute)


@_WORKER.fault("Rank 1 takes no updates of its weights.", "dist.weights.update@1")
def updates_on_the_driver_alone(base: Any) -> Methods:
    def write(self: Any, weights: Iterable[tuple[str, Tensor]], _: str | None) -> int:
        if self._config.rank == 1:
            return sum(1 for _ in weights)
        count: int = base.write_weights(self, WeightWrite.UPDATE, weights)
        return count

    return other_write(base, WeightWrite.UPDATE, write)


@_WORKER.fault("Rank 1 loses its weights in a sleep of level 1.", "dist.sleep.tokens@1")
def rank_forgets_in_its_sleep(base: Any) -> Methods:
    def forgetting(self: Any, change: MemoryChange) -> MemoryChange:
        if self._config.rank == 1 and isinstance(change, SleepPlan):
            return replace(change, policies=dict.fromkeys(change.policies, Policy.DISCARD))
        return change

    def commit(self: Any, transaction: int) -> MemoryReport:
        report: MemoryReport = base.commit(self, transaction)
        self._loaded.weights.ledger.declare_valid()
        return report

    return {**other_change(base, forgetting), "commit": commit}


@_WORKER.fault("Rank 1 commits what is rolled back.", "dist.sleep.rollback@1")
def rank_commits_a_rollback(base: Any) -> Methods:
    def rollback(self: Any, transaction: int) -> None:
        if self._config.rank == 1:
            self.commit(transaction)
        else:
            base.rollback(self, transaction)

    return {"rollback": rollback}


@_WORKER.fault("A worker that is one of many ranks runs alone.", "dist.world-size.reasons@1")
def world_size_ignored(base: Any) -> Methods:
    def init(self: Any, context: WorkerContext) -> None:
        alone: dict[str, Any] = {"rank": 0, "world_size": 1, "tensor_parallel_size": 1, "pipeline_parallel_size": 1}
        base.__init__(self, replace(context, config=replace(context.config, **alone)))

    return {"__init__": init}


MUTANTS: Sequence[Mutant] = (*_COLLECTIVES.mutants, *_WORKER.mutants)
