"""Hardpoint: an LLM inference engine whose hardware layer is a set of plugins.

from hardpoint import LLM, SamplingParams
print(LLM("demo").generate("The capital of France is")[0].outputs[0].text)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hardpoint.engine.adapters import LoRARequest
    from hardpoint.engine.async_llm import AsyncLLM
    from hardpoint.engine.config import EngineConfig
    from hardpoint.engine.inputs import EmbedsPrompt, TextPrompt, TokensPrompt
    from hardpoint.engine.llm import LLM
    from hardpoint.engine.llm_engine import LLMEngine
    from hardpoint.engine.outputs import (
        BeamSearchOutput,
        BeamSearchSequence,
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingRequestOutput,
        PoolingRequestOutput,
        RequestOutput,
        ScoringRequestOutput,
    )
    from hardpoint.sampling import (
        BeamSearchParams,
        PoolingParams,
        RequestOutputKind,
        SamplingParams,
        StructuredOutputsParams,
    )

    __version__: str

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "EmbedsPrompt",
    "EngineConfig",
    "LLMEngine",
    "LoRARequest",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]

# Resolved on first use, so that backends' descriptors and light commands import no torch.
_HOMES = {
    "LLM": "hardpoint.engine.llm",
    "AsyncLLM": "hardpoint.engine.async_llm",
    "BeamSearchOutput": "hardpoint.engine.outputs",
    "BeamSearchParams": "hardpoint.sampling",
    "BeamSearchSequence": "hardpoint.engine.outputs",
    "ClassificationRequestOutput": "hardpoint.engine.outputs",
    "CompletionOutput": "hardpoint.engine.outputs",
    "EmbeddingRequestOutput": "hardpoint.engine.outputs",
    "EmbedsPrompt": "hardpoint.engine.inputs",
    "EngineConfig": "hardpoint.engine.config",
    "LLMEngine": "hardpoint.engine.llm_engine",
    "LoRARequest": "hardpoint.engine.adapters",
    "PoolingParams": "hardpoint.sampling",
    "PoolingRequestOutput": "hardpoint.engine.outputs",
    "RequestOutput": "hardpoint.engine.outputs",
    "RequestOutputKind": "hardpoint.sampling",
    "SamplingParams": "hardpoint.sampling",
    "ScoringRequestOutput": "hardpoint.engine.outputs",
    "StructuredOutputsParams": "hardpoint.sampling",
    "TextPrompt": "hardpoint.engine.inputs",
    "TokensPrompt": "hardpoint.engine.inputs",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("hardpoint")
    if name not in _HOMES:
        raise AttributeError(f"module 'hardpoint' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
