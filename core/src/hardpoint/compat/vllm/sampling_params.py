"""What scripts import from `vllm.sampling_params`."""

from __future__ import annotations

from hardpoint.sampling import RequestOutputKind, SamplingParams, StructuredOutputsParams

__all__ = ["RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]
