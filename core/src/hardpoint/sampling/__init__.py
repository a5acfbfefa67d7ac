"""Sampling: the parameters of a request, and the sampler that turns rows of logits into tokens.

Nothing here knows requests, blocks or schedules; the sampler sees rows of a table and of logits, on any device torch has.
"""

from hardpoint.sampling.params import PoolingParams, RequestOutputKind, SamplingParams
from hardpoint.sampling.sampler import Sampled, SampledTokens, Sampler

__all__ = ["PoolingParams", "RequestOutputKind", "Sampled", "SampledTokens", "Sampler", "SamplingParams"]
