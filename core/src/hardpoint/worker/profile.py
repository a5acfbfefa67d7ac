"""What the largest legal step of a model takes."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from hardpoint.interfaces.allocator import DeviceAllocator
from hardpoint.interfaces.batch import EmbeddingKind, StepBatch, in_groups
from hardpoint.interfaces.dtypes import DType
from hardpoint.interfaces.platform import Platform
from hardpoint.interfaces.worker import WorkerConfig
from hardpoint.sampling.sampler import Sampler
from hardpoint.worker.dummy_batches import dummy_batch
from hardpoint.worker.kv_memory import KVMemory
from hardpoint.worker.loading import LoadedModel
from hardpoint.worker.model_runner import ModelRunner
from hardpoint.worker.ranks import parallel_rank_of
from hardpoint.worker.step_graphs import StepCapture

if TYPE_CHECKING:
    from torch import Tensor

_TIMED_TOKENS = 128
"""Length of the timed step of a model that needs no memory measured."""
_FIRST_TOKENS = 8
"""Length of what runs before it."""


@dataclass(frozen=True)
class StepCost:
    """What the largest step costs.

    Attributes:
        growth: bytes of device memory at its peak, beyond what was in use before.
        graphs, seconds_per_token, seconds_per_swapped_block: see `MemoryProfile`.
    """

    growth: int
    graphs: int = 0
    seconds_per_token: float = 0.0
    seconds_per_swapped_block: float = 0.0


def largest_step(
    config: WorkerConfig,
    loaded: LoadedModel,
    runner: ModelRunner,
    kv: KVMemory,
    capture: StepCapture,
    sampler: Sampler,
    platform: Platform,
    allocator: DeviceAllocator,
) -> StepCost:
    """Run the largest legal step with dummy tokens over a KV cache of just its own size, and return what it takes.

    Then capture a few decode steps over that cache, for what graphs take.

    On a device, sampling counts with as many rows as a step can have, all of which ask for everything; its tables keep their room. On the
    host it works on a few rows at a time.

    A model that holds its working memory for the largest step already (`scratch_bytes`) is run with a shorter one, for the time.
    """

    def used() -> int:
        platform.synchronize()
        return platform.total_and_used(allocator, config.world_size)[1]

    info, holds_scratch = loaded.info, bool(loaded.model.scratch_bytes)
    num_groups = len(loaded.groups)

    def dummy(longest: int) -> StepBatch:
        return dummy_batch(
            num_tokens=min(info.step_tokens(config.max_num_batched_tokens), longest),
            max_len=min(info.max_model_len, longest),
            block_size=loaded.plan.block_size,
            max_seqs=config.max_num_seqs,
        )

    batch = dummy(_TIMED_TOKENS if holds_scratch else sys.maxsize)
    cache = kv.scratch(num_groups * (int(batch.block_table.max()) + 1))
    batch = in_groups(batch, num_groups, loaded.plan.block_size)
    samples = info.is_generative and config.rank == config.driver_rank and cache.device.type != "cpu"
    compute = partial(_compute, runner, batch, cache)
    # A short step runs first, untimed: a first run compiles, or reads all weights from where loading left them, for half of its time.
    growth = 0
    if holds_scratch:
        first = in_groups(dummy(_FIRST_TOKENS), num_groups, loaded.plan.block_size)
        growth = platform.peak_growth(partial(_compute, runner, first, cache), allocator)
    start = time.perf_counter()
    growth += platform.peak_growth(partial(compute, sampler, config.max_num_samples) if samples else compute, allocator)
    pictures = {name: platform.upload(array.numpy()) for name, array in loaded.model.largest_source().items()}
    if pictures:
        # Pictures are encoded before the step that has them.
        encode = partial(loaded.model.encoded, EmbeddingKind.IMAGE, pictures)
        growth = max(growth, platform.peak_growth(encode, allocator))
    if platform.compiles or samples or (batch.num_tokens <= _TIMED_TOKENS and not holds_scratch):
        start = time.perf_counter()
        compute()
        used()
    seconds = time.perf_counter() - start
    graphs = capture.estimate_bytes(cache, used)
    del cache, compute
    unsampled = (
        config.max_num_samples - len(batch.sample_rows) if parallel_rank_of(config).is_last and not samples else 0
    )
    return StepCost(
        growth + logits_bytes(unsampled, info.vocab_size),
        graphs,
        seconds_per_token=seconds / batch.num_tokens,
        seconds_per_swapped_block=kv.seconds_per_swapped_block(),
    )


def _compute(
    runner: ModelRunner, batch: StepBatch, cache: Tensor, sampler: Sampler | None = None, samples: int = 0
) -> None:
    """Compute a step's logits, and sample the given number of rows."""
    runner.logits(runner.forward(batch, cache))
    if sampler is not None:
        sampler.rehearse(samples)


def logits_bytes(num_rows: int, vocab_size: int) -> int:
    """Return the bytes of the given number of rows of logits."""
    return num_rows * vocab_size * DType.FLOAT32.itemsize
