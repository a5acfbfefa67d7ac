"""The contract between the core and its backends: classes to implement, values that cross the boundary, typed errors.

A backend imports this package (and `hardpoint.memory` and `hardpoint.worker` for the ready-made allocator and worker) and nothing deeper.
Nothing here imports torch. The contract is versioned (`API_VERSION`) and guarded by a snapshot; see docs/contract-changelog.md.
"""

from hardpoint.interfaces import errors
from hardpoint.interfaces.allocator import (
    BUFFERS,
    DEFAULT,
    GRAPHS,
    KV_CACHE,
    WEIGHTS,
    DeviceAllocator,
    FileExtent,
    LiveRanges,
    MemoryInfo,
    MemoryReport,
    MemoryStats,
    MemoryTransaction,
    Policy,
    SleepPlan,
    TagStats,
)
from hardpoint.interfaces.attention import AttentionBackend, AttentionPlan, KVCacheSpec, Refusal
from hardpoint.interfaces.backend import API_VERSION, BackendDescriptor, Device, ProbeResult
from hardpoint.interfaces.batch import (
    Pooling,
    SequencePooling,
    SequenceSampling,
    StepBatch,
    StepInput,
    StepOutput,
    TokenLogprobs,
)
from hardpoint.interfaces.capabilities import (
    AttentionCapabilities,
    AttentionFeature,
    AttentionLayer,
    AttentionRequest,
    Capabilities,
    Determinism,
    GraphLevel,
    IntSet,
    MemoryCapabilities,
    SleepTier,
    TorchPoolScope,
)
from hardpoint.interfaces.collectives import Collectives
from hardpoint.interfaces.contract import Contract, contract_methods, optional_methods
from hardpoint.interfaces.dtypes import DType
from hardpoint.interfaces.graphs import GraphRunner
from hardpoint.interfaces.kernels import (
    Activation,
    DecoderOutput,
    DecoderProgram,
    DecoderRequest,
    DecoderSpec,
    KernelSet,
)
from hardpoint.interfaces.sampling import Column, SampleFailure, SamplingTables
from hardpoint.interfaces.worker import (
    WORKER_CALLS,
    MemoryProfile,
    ModelInfo,
    Worker,
    WorkerConfig,
    WorkerContext,
)

__all__ = [
    "API_VERSION",
    "BUFFERS",
    "DEFAULT",
    "GRAPHS",
    "KV_CACHE",
    "WEIGHTS",
    "WORKER_CALLS",
    "Activation",
    "AttentionBackend",
    "AttentionCapabilities",
    "AttentionFeature",
    "AttentionLayer",
    "AttentionPlan",
    "AttentionRequest",
    "BackendDescriptor",
    "Capabilities",
    "Collectives",
    "Column",
    "Contract",
    "DType",
    "DecoderOutput",
    "DecoderProgram",
    "DecoderRequest",
    "DecoderSpec",
    "Determinism",
    "Device",
    "DeviceAllocator",
    "FileExtent",
    "GraphLevel",
    "GraphRunner",
    "IntSet",
    "KVCacheSpec",
    "KernelSet",
    "LiveRanges",
    "MemoryCapabilities",
    "MemoryInfo",
    "MemoryProfile",
    "MemoryReport",
    "MemoryStats",
    "MemoryTransaction",
    "ModelInfo",
    "Policy",
    "Pooling",
    "ProbeResult",
    "Refusal",
    "SampleFailure",
    "SamplingTables",
    "SequencePooling",
    "SequenceSampling",
    "SleepPlan",
    "SleepTier",
    "StepBatch",
    "StepInput",
    "StepOutput",
    "TagStats",
    "TokenLogprobs",
    "TorchPoolScope",
    "Worker",
    "WorkerConfig",
    "WorkerContext",
    "contract_methods",
    "errors",
    "optional_methods",
]
