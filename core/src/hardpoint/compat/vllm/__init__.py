"""vLLM's names over this engine.

`python -m hardpoint.compat.vllm script.py` runs a script in which `import vllm` means this package; `stand_in()` does the same from within
a program, before anything imports `vllm`. docs/moving-from-vllm.md says what works and what is refused.
"""

from __future__ import annotations

import sys
from typing import Any

from hardpoint import (
    BeamSearchOutput,
    BeamSearchParams,
    BeamSearchSequence,
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    EmbedsPrompt,
    PoolingRequestOutput,
    RequestOutputKind,
    ScoringRequestOutput,
    TextPrompt,
    TokensPrompt,
)
from hardpoint.compat.vllm import paths
from hardpoint.compat.vllm.engine_args import AsyncEngineArgs, EngineArgs, FlexibleArgumentParser
from hardpoint.compat.vllm.engines import AsyncLLM, LLMEngine
from hardpoint.compat.vllm.llm import LLM
from hardpoint.compat.vllm.requests import LoRARequest, PoolingParams, SamplingParams, StructuredOutputsParams
from hardpoint.compat.vllm.results import CompletionOutput, RequestOutput, RequestStateStats
from hardpoint.compat.vllm.tools import (
    Counter,
    UsageContext,
    cleanup_dist_env_and_memory,
    get_ip,
    get_open_port,
    get_tokenizer,
    init_logger,
    packed_nccl_broadcast_producer,
    random_uuid,
    trainer_init,
)
from hardpoint.engine.inputs import Prompt as PromptType
from hardpoint.engine.outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    FlatLogprobs,
    Logprob,
    PoolingOutput,
    ScoringOutput,
)
from hardpoint.interfaces.errors import ConfigError
from hardpoint.interfaces.errors import EngineDead as EngineDeadError
from hardpoint.interfaces.errors import InvalidRequest as VLLMValidationError
from hardpoint.interfaces.errors import WorkerError as EngineGenerateError

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "Counter",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EmbedsPrompt",
    "EngineArgs",
    "EngineDeadError",
    "EngineGenerateError",
    "FlatLogprobs",
    "FlexibleArgumentParser",
    "GuidedDecodingParams",
    "LLMEngine",
    "LoRARequest",
    "Logprob",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptType",
    "RequestOutput",
    "RequestOutputKind",
    "RequestStateStats",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "UsageContext",
    "VLLMValidationError",
    "cleanup_dist_env_and_memory",
    "get_ip",
    "get_open_port",
    "get_tokenizer",
    "init_logger",
    "packed_nccl_broadcast_producer",
    "random_uuid",
    "stand_in",
    "trainer_init",
]

__version__ = "0.31.0"
"""Of vLLM, whose names and arguments these are."""

AsyncLLMEngine = AsyncLLM
GuidedDecodingParams = StructuredOutputsParams


def __getattr__(name: str) -> Any:
    return paths.missing("vllm", name)


def stand_in() -> None:
    """Let `import vllm` mean this package, in this process; raises ConfigError where vLLM itself was imported already."""
    there = sys.modules.get("vllm")
    here = sys.modules[__name__]
    if there is not None and there is not here:
        raise ConfigError(
            "vLLM was imported already, and cannot be replaced any more",
            found=str(getattr(there, "__file__", there)),
            hint="Call stand_in() before the first import of vllm or trl, or run `python -m hardpoint.compat.vllm SCRIPT`",
        )
    paths.install(here)
