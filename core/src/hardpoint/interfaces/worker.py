"""The contract of a worker: one rank's device, model and KV cache, driven by the engine.

The engine calls a worker through the names in `WORKER_CALLS` and no others, in this order: `start`, `load`, `profile`, `initialize_kv`,
`warm_up`, then `submit` and `collect` once per step, and `shutdown` at the end. Sleeps and wakes (`begin`, then `commit` or `rollback`),
`write_weights` and `status` come between steps. Where there are several ranks, a sleep or wake is prepared on all of them and then
committed on all, or rolled back on all.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from hardpoint.interfaces.allocator import MemoryChange, MemoryReport, MemoryStats, SleepPlan
from hardpoint.interfaces.attention import AttentionPlan
from hardpoint.interfaces.backend import BackendDescriptor, Device
from hardpoint.interfaces.batch import EmbeddingKind, Pooling, StepInput, StepOutput
from hardpoint.interfaces.blocks import Quantization
from hardpoint.interfaces.contract import Contract, contract_methods
from hardpoint.interfaces.dtypes import DType
from hardpoint.interfaces.errors import CapabilityRefused

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class WorkerConfig:
    """What a worker is asked to be.

    Attributes:
        model: path of a folder or file with the model.
        dtype: of weights and activations; None for the model's own.
        kv_dtype: of the KV cache; None for `dtype`.
        load_format: "auto", "safetensors", "gguf" or "dummy" (seeded random weights from the configuration).
        max_model_len: longest context in tokens; None for the model's own.
        max_num_batched_tokens: most tokens in one step.
        max_num_seqs: most sequences in one step.
        num_speculative_tokens: most drafted tokens of a sequence in one step.
        draft_model: path of a smaller model of the same vocabulary, which makes the drafted tokens; None where they come with the steps.
        block_size: tokens per KV block; None lets the backend choose.
        memory_utilization: share of the device's memory that this engine may use, KV cache included; None for the worker's own
            default.
        swap_space: bytes of host memory for swapped KV blocks.
        enforce_eager: no captured graphs.
        quantization: how weights are stored and multiplied by.
        use_fused_decoder: let the kernel set run whole steps where it can.
        threads: host threads for computing; None for all usable cores.
        rank, world_size: this rank's place among all ranks: `rank = stage * tensor_parallel_size + place in the stage`, and
            `world_size = tensor_parallel_size * pipeline_parallel_size`.
        tensor_parallel_size: ranks that share each layer.
        pipeline_parallel_size: stages that the layers are divided into.
        init_method: where the ranks meet, as `Collectives.start` takes it; empty for a single rank.
        communication_timeout: seconds after which an operation with the other ranks has failed.
        seed: of dummy weights.
        kv_cache_groups: layers of unlike windows may form KV cache groups (`ModelInfo.kv_group_windows`), so that steps have a block table
            for each. Otherwise all layers keep all keys in one block table.
        prepare_sleep: the sleep that will be asked for; the worker readies the host for it once the weights are loaded.
        tokenizer: path of another tokenizer than the model's own, for sequences that follow a grammar.
        hf_overrides: values of the model's configuration instead of those in its file.
        max_loras: most adapters that one step goes through, for each of which the device has memory; 0 for a worker that takes none.
        max_lora_rank: greatest rank of an adapter.
    """

    model: str
    dtype: DType | None = None
    kv_dtype: DType | None = None
    load_format: str = "auto"
    max_model_len: int | None = None
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    num_speculative_tokens: int = 0
    draft_model: str | None = None
    block_size: int | None = None
    memory_utilization: float | None = None
    swap_space: int = 4 << 30
    enforce_eager: bool = False
    quantization: Quantization = Quantization.NONE
    use_fused_decoder: bool = True
    trust_remote_code: bool = False
    threads: int | None = None
    rank: int = 0
    world_size: int = 1
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    init_method: str = ""
    communication_timeout: float = 60.0
    seed: int = 0
    kv_cache_groups: bool = False
    prepare_sleep: SleepPlan | None = None
    tokenizer: str | None = None
    hf_overrides: Mapping[str, Any] | None = None
    max_loras: int = 0
    max_lora_rank: int = 16

    @property
    def num_draft_slots(self) -> int:
        """Most drafted tokens of all sequences in one step."""
        return min(self.max_num_seqs * self.num_speculative_tokens, max(64, self.max_num_seqs))

    @property
    def max_num_samples(self) -> int:
        """Most tokens that are sampled in one step."""
        return self.max_num_seqs + self.num_draft_slots

    @property
    def tensor_rank(self) -> int:
        """This rank's place among those that share its layers."""
        return self.rank % self.tensor_parallel_size

    @property
    def stage(self) -> int:
        """This rank's stage of the pipeline, 0 for the first layers."""
        return self.rank // self.tensor_parallel_size

    @property
    def driver_rank(self) -> int:
        """The rank that samples, the first of the last stage: its `StepOutput` counts, those of all others are empty."""
        return (self.pipeline_parallel_size - 1) * self.tensor_parallel_size


@dataclass(frozen=True)
class ModelInfo:
    """What the engine needs to know of a loaded model.

    Attributes:
        architecture: as the configuration names it.
        dtype: of weights and activations.
        max_model_len: longest context in tokens, as it will be kept.
        weight_bytes: device bytes of the weights, those of a draft model included.
        weight_formats: how many of the weights' matrices are stored in which format of blocks (`BlockFormat`) or dtype.
        path: how the model runs ("fused", "modules" or "transformers"), for display.
        is_generative: it has a language-model head.
        attention: the plan of the first KV cache group, whose shape is that of the KV cache.
        kv_group_windows: of each KV cache group, the keys that a query sees, its own included; 0 for all. The first is the largest. Blocks
            outside of a group's window are not read any more.
        steps_in_flight: how many steps may be submitted beyond the one that is collected next; 0 where `submit` computes.
        state_bytes: what a sequence's recurrent states take on the rank, in the slot of its row of the block table; 0 for a model without.
            Of such a model nothing is found in a prefix cache and nothing is swapped: a sequence is computed from its first token.
        whole_prompts: the layers see both sides of a token, so that a step has all tokens of a prompt; there is no KV cache.
        pooling: how hidden states of a prompt become one, by the model's own files.
        num_labels: of the head that classifies; 0 where there is none.
        draft_block_bytes: device bytes of a block's keys and values of the draft model; 0 without one.
        hidden_size: elements of a token's embedding.
        embedding_kinds: sources of embeddings that steps may have in the place of tokens.
        adapter_bytes: device bytes for each of `WorkerConfig.max_loras` adapters.
    """

    architecture: str
    dtype: DType
    vocab_size: int
    max_model_len: int
    num_layers: int
    weight_bytes: int
    attention: AttentionPlan
    path: str
    is_generative: bool = True
    kv_group_windows: tuple[int, ...] = (0,)
    steps_in_flight: int = 0
    state_bytes: int = 0
    whole_prompts: bool = False
    pooling: Pooling = Pooling.LAST
    num_labels: int = 0
    hidden_size: int = 0
    embedding_kinds: frozenset[EmbeddingKind] = frozenset()
    weight_formats: Mapping[str, int] = field(default_factory=dict)
    draft_block_bytes: int = 0
    adapter_bytes: int = 0

    @property
    def block_bytes(self) -> int:
        """Device bytes of a block of the KV cache, for all models."""
        return self.attention.kv_cache.block_bytes + self.draft_block_bytes

    def step_tokens(self, budget: int) -> int:
        """Return the most tokens of a step for a budget, which is raised where a step has whole prompts."""
        return max(budget, self.max_model_len) if self.whole_prompts else budget


@dataclass(frozen=True)
class MemoryProfile:
    """What the largest legal step takes, and what this engine may use; bytes.

    Attributes:
        total, used: the device's memory, and what was in use before the profile, the weights included.
        peak, current: most memory in use during the largest step, and in use after it.
        utilization: the share of `total` that the engine may use: as asked, or the worker's default.
        kv_limit: most bytes for the KV cache when nothing was asked; None for no such limit.
        seconds_per_token: of prefill, measured; for the choice between swap and recompute, and for how much of a prompt shares a step
            with decodes.
        seconds_per_swapped_block: measured; 0 when unknown.
        graphs: what captured steps will hold, which `warm_up` captures once the KV cache is there; estimated, 0 without graphs.
    """

    total: int
    used: int
    peak: int
    current: int
    utilization: float
    kv_limit: int | None = None
    seconds_per_token: float = 0.0
    seconds_per_swapped_block: float = 0.0
    graphs: int = 0

    @property
    def kv_bytes(self) -> int:
        """Bytes for the KV cache: total · utilisation - used - (peak - current) - graphs, within `kv_limit`; may be negative."""
        left = int(self.total * self.utilization) - self.used - (self.peak - self.current) - self.graphs
        return left if self.kv_limit is None else min(left, self.kv_limit)


class WeightWrite(StrEnum):
    """Where new values of weights come from.

    UPDATE: from the tensors that are given. RELOAD: from a checkpoint. DECLARE: from writers that the worker did not see; the weights
    are right as they stand.
    """

    UPDATE = "update"
    RELOAD = "reload"
    DECLARE = "declare"


@dataclass(frozen=True)
class WorkerStatus:
    """A rank's account of its memory and weights.

    Attributes:
        memory: the books of its allocator.
        missing_weights: checkpoint names of its weights without valid values; `submit` raises WeightsMissing while there are any. A sleep
            that discards the weights makes all missing, and each write fewer.
    """

    memory: MemoryStats
    missing_weights: frozenset[str] = frozenset()


@dataclass(frozen=True)
class WorkerContext:
    """What a worker is given when it is made: its backend's own parts, by injection."""

    descriptor: BackendDescriptor
    device: Device
    config: WorkerConfig


class Worker(Contract, contract=True):
    """One rank; made by the descriptor's factory with a `WorkerContext` as its only argument."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context

    @abstractmethod
    def start(self) -> None:
        """Start the device and make allocator, attention and kernels."""

    @abstractmethod
    def load(self) -> ModelInfo:
        """Load the model's weights onto the device; raises ModelError, CapabilityRefused, DeviceOutOfMemory."""

    @abstractmethod
    def profile(self) -> MemoryProfile:
        """Run the largest legal step with dummy tokens and no KV cache, and return what it takes."""

    @abstractmethod
    def initialize_kv(self, num_device_blocks: int, num_host_blocks: int) -> None:
        """Allocate the KV cache and the host's swap space; raises DeviceOutOfMemory, HostBudgetExceeded."""

    @abstractmethod
    def warm_up(self) -> None:
        """Run (and capture) the steps whose first run would be slow."""

    @abstractmethod
    def submit(self, step: StepInput) -> None:
        """Begin one step: swap, copy, compute and sample.

        May return before the device has done the work, or before it has begun; the arrays of the step hold until its `collect`. All ranks
        are called with the same steps in the same order. What fails in the step is raised by the `collect` that belongs to it.

        Raises:
            MemoryAsleep, WeightsMissing, MemoryBusy: the step is refused; nothing was done, and nothing is to be collected.
            WorkerError: `ModelInfo.steps_in_flight` + 1 steps wait to be collected already, or the worker is not ready for steps; likewise.
        """

    @abstractmethod
    def collect(self) -> StepOutput:
        """Wait for the oldest step that was submitted and not collected, and return its output.

        Ranks other than `WorkerConfig.driver_rank` return an output that is empty, but for `StepOutput.tiers`. A step that ends with an
        error may leave ranks waiting for one another. OutputFailed says that it does not: the driver raises it for what fails when it needs
        the others no more, and its device has done all its work. Either way the step is over, and steps that were submitted after it are
        collected next.

        Raises:
            NothingToCollect: no step was submitted.
            OutputFailed, and what computing the step raised.
        """

    @abstractmethod
    def begin(self, transaction: int, change: MemoryChange) -> None:
        """Prepare a sleep or wake: do everything of it that can fail. There is no other way to change this rank's memory.

        Steps in flight are waited for, and their outputs are collected after it as before it.

        Until `commit` or `rollback` of the same number, `submit` and whatever writes weights or changes memory raise MemoryBusy. A tag that
        is asleep with its bytes preserved, and that a sleep discards, loses its backup with the commit.

        Args:
            transaction: its number, above all that this worker was given before; a failed preparation uses its number up.

        Raises:
            InvalidTransaction: the number is not; nothing was done.
            MemoryBusy: another one is open; nothing was done.
            What `DeviceAllocator.begin_sleep` or `begin_wake` raises, CapabilityRefused for weights without a source: nothing is open,
            and the state before holds.
        """

    @abstractmethod
    def commit(self, transaction: int) -> MemoryReport:
        """Finish what was prepared, and return what it did; raises InvalidTransaction for any other number than the open one's.

        What it loses is missing in `status` before the memory is gone.
        """

    @abstractmethod
    def rollback(self, transaction: int) -> None:
        """Return to the state before the preparation.

        Raises InvalidTransaction for any other number than the open one's, and what `MemoryTransaction.rollback` raises.
        """

    @abstractmethod
    def write_weights(
        self, write: WeightWrite, weights: Iterable[tuple[str, Tensor]] = (), model: str | None = None
    ) -> int:
        """Give weights values, after the steps in flight; returns how many tensors of the checkpoint were used.

        Every rank is given the checkpoint's whole tensors and takes its parts; those of other ranks count as used.

        Args:
            write: where the values come from.
            weights: for UPDATE, (checkpoint name, tensor) pairs.
            model: for RELOAD, another checkpoint of the same model; None for the one that was loaded last.

        Raises:
            MemoryAsleep: the weights are asleep.
            MemoryBusy: a transaction is open.
            CorruptWeights, ModelError, and whatever `weights` raises; a failure after the first tensor was written makes all weights
            missing.
        """

    @abstractmethod
    def status(self) -> WorkerStatus:
        """Return this rank's account of its memory and weights."""

    def open_tiers(self, num_host_blocks: int, num_disk_blocks: int, folder: str | None) -> None:
        """Take memory for blocks that the prefix cache evicts, after `initialize_kv`; steps have `StepBatch.tier_moves` then. Optional.

        Args:
            num_host_blocks: slots in the host's memory.
            num_disk_blocks: slots in a file that nobody else can open and that is gone when the worker ends.
            folder: of that file, made where it is not there; None with no slots on disk.

        Raises:
            HostBudgetExceeded, ConfigError for a folder that cannot be written to, CapabilityRefused where the worker has no such tiers.
        """
        raise CapabilityRefused("evicted KV blocks are not kept here", [f"{type(self).__name__} has no open_tiers"])

    def load_adapter(self, number: int, path: str) -> int:
        """Read a LoRA adapter from a folder as PEFT writes it, check it against the model, and keep it on the host; optional.

        A step brings it to the device where it is not there. What a number stands for does not change until `unload_adapter`.
        Returns the bytes that it takes on the host.

        Raises InvalidAdapter, with which nothing was done; CapabilityRefused where the worker takes no adapters.
        """
        raise CapabilityRefused("adapters are not loaded here", [f"{type(self).__name__} has no load_adapter"])

    def unload_adapter(self, number: int) -> None:
        """Forget an adapter, which no step uses any more; numbers that are not known are passed over. Optional."""
        raise CapabilityRefused("adapters are not loaded here", [f"{type(self).__name__} has no unload_adapter"])

    def start_trace(self, folder: str) -> None:
        """Record from here on what the host and the device do, for `stop_trace` to write to a file in `folder`; optional.

        Raises CapabilityRefused where the worker cannot; InvalidRequest where the folder cannot be written to, or a recording goes on.
        """
        raise CapabilityRefused("profiles are not recorded here", [f"{type(self).__name__} has no start_trace"])

    def stop_trace(self) -> str:
        """Write what was recorded since `start_trace`, and return the file's path; raises InvalidRequest where nothing is recorded."""
        raise CapabilityRefused("profiles are not recorded here", [f"{type(self).__name__} has no stop_trace"])

    @abstractmethod
    def shutdown(self) -> None:
        """Give everything back, after rolling back what is open; callable in any state, idempotent."""


WORKER_CALLS = frozenset(contract_methods(Worker))
"""The closed table of names that an executor may call on a worker."""
