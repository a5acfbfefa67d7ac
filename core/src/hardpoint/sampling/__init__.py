"""Sampling: the parameters of a request, and the sampler that turns rows of logits into tokens.

Nothing here knows requests, blocks or schedules; the sampler (`hardpoint.sampling.sampler`) sees rows of a table and of logits, on any
device torch has. Parameters do without torch.
"""

from hardpoint.sampling.params import BeamSearchParams, PoolingParams, PoolingUse, RequestOutputKind, SamplingParams
from hardpoint.sampling.structured import StructuredOutputsParams

__all__ = [
    "BeamSearchParams",
    "PoolingParams",
    "PoolingUse",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
]
