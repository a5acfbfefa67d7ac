"""The definition of sampling: one row at a time, in numpy, as plainly as it can be said. Slow; every implementation is compared with it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from hardpoint.interfaces.batch import FloatArray, SequenceSampling, TokenLogprobs
from hardpoint.interfaces.sampling import DRAW_BITS, TOP_P_BITS, WEIGHT_BITS, SampleFailure
from hardpoint.sampling.params import GREEDY_BELOW
from hardpoint.sampling.random import draws, stream_key
from hardpoint.sampling.table import MAX_TEMPERATURE


def sample_row(logits: FloatArray, sampling: SequenceSampling, output: Sequence[int]) -> int:
    """Return the token of one sequence, or a `SampleFailure`.

    Args:
        logits: float32[vocab_size].
        output: the tokens that the sequence was given before.
    """
    processed = processed_logits(logits, sampling, output)
    if np.isnan(processed).any() or processed.max() == np.inf:
        return SampleFailure.NOT_FINITE
    if processed.max() == -np.inf:
        return SampleFailure.NO_TOKEN
    if sampling.temperature < GREEDY_BELOW:
        return int(canonical_order(processed)[0])
    return drawn_token(kept_weights(processed, sampling), sampling, output)


def drawn_token(weights: Sequence[int], sampling: SequenceSampling, output: Sequence[int]) -> int:
    """Return the token that is drawn by weights, one for each token of the vocabulary; for `output` see `sample_row`."""
    key = np.array([stream_key(sampling.seed)], np.uint64)
    draw = int(draws(key, np.array([len(output)]))[0])
    target = sum(weights) * draw >> DRAW_BITS
    running = 0
    for token_id, weight in enumerate(weights):
        running += weight
        if running > target:
            return token_id
    raise AssertionError("the target is below the total")


def processed_logits(logits: FloatArray, sampling: SequenceSampling, output: Sequence[int]) -> FloatArray:
    """Return the logits after the request's own processors, masks, biases and penalties, in this order: float32[vocab_size]."""
    result = logits.astype(np.float32)
    for processor in sampling.logits_processors:
        result = processor(list(output), torch.from_numpy(result)).detach().to(torch.float32, copy=True).numpy()
    if sampling.allowed_token_ids is not None:
        result[np.setdiff1d(np.arange(len(logits)), sampling.allowed_token_ids)] = -np.inf
    if len(output) < sampling.min_tokens:
        result[list(sampling.stop_token_ids)] = -np.inf
    with np.errstate(all="ignore"):
        for token_id, bias in sampling.logit_bias.items():
            if result[token_id] != -np.inf:
                result[token_id] += np.float32(bias)
        repetition = np.float32(sampling.repetition_penalty)
        for token_id in {*sampling.prompt_token_ids, *output}:
            value = result[token_id]
            result[token_id] = value / repetition if value > 0 else value * repetition
        for token_id in set(output):
            result[token_id] -= np.float32(sampling.frequency_penalty) * np.float32(list(output).count(token_id))
            result[token_id] -= np.float32(sampling.presence_penalty)
    return result


def canonical_order(logits: FloatArray) -> npt.NDArray[np.int64]:
    """Return the token ids, the higher logit first, the lower id first among equals."""
    return np.lexsort((np.arange(len(logits)), -logits))


def kept_weights(processed: FloatArray, sampling: SequenceSampling) -> list[int]:
    """Return each token's weight: 0 where min_p, top_k and top_p, in this order, leave it out.

    Each works on what the one before left, and keeps the first tokens of the canonical order: top_p as many as reach its part of their sum.
    """
    inverse = np.float32(1 / min(sampling.temperature, MAX_TEMPERATURE))
    with np.errstate(over="ignore"):
        scaled = (processed - processed.max()) * inverse
    exponentials = np.exp(scaled.astype(np.float64)).astype(np.float32)
    weights = [int(value * 2**WEIGHT_BITS) for value in exponentials.tolist()]
    log_min_p = np.float32(math.log(sampling.min_p)) if sampling.min_p > 0 else -np.inf
    order = [token_id for token_id in canonical_order(processed).tolist() if scaled[token_id] >= log_min_p]
    if sampling.top_k:
        order = order[: sampling.top_k]
    goal = -(-sum(weights[i] for i in order) * int(sampling.top_p * 2**TOP_P_BITS) >> TOP_P_BITS)
    kept, running = set(), 0
    for token_id in order:
        kept.add(token_id)
        running += weights[token_id]
        if running >= goal:
            break
    return [weight if token_id in kept else 0 for token_id, weight in enumerate(weights)]


def row_logprobs(logits: FloatArray, token_id: int, count: int) -> TokenLogprobs:
    """Return the log probabilities of a token and of the `count` best ones, by the model's own logits."""
    wide = logits.astype(np.float64)
    values = wide - wide.max() - math.log(np.exp(wide - wide.max()).sum())
    ids = np.array([token_id, *canonical_order(logits)[:count]])
    return TokenLogprobs(ids, values[ids].astype(np.float32), int((logits > logits[token_id]).sum()) + 1)
