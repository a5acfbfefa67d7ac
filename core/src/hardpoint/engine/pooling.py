"""Pooling requests: which a model can answer, and what its answers are made of once the worker has pooled hidden states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hardpoint.engine.outputs import PoolingOutput, PoolingRequestOutput, ScoringRequestOutput
from hardpoint.interfaces.batch import Pooling, PoolingTask
from hardpoint.interfaces.errors import InvalidRequest
from hardpoint.models import LabelActivation, PoolingDefaults
from hardpoint.sampling import PoolingParams, PoolingUse
from hardpoint.validation import shown

if TYPE_CHECKING:
    from hardpoint.interfaces.batch import FloatArray
    from hardpoint.interfaces.worker import ModelInfo


@dataclass(frozen=True, slots=True)
class PoolingPlan:
    """A pooling request's parameters, with what the model decides filled in; see `PoolingParams`."""

    use: PoolingUse
    pooling: Pooling
    activates: bool
    params: PoolingParams

    @property
    def task(self) -> PoolingTask:
        """What the worker makes of the pooled hidden states."""
        return PoolingTask.CLASSIFY if self.use.labels else PoolingTask.EMBED


class PoolingModel:
    """What a model gives for prompts that are pooled.

    Attributes:
        defaults: what its files say.
        own_use: what it is for.
    """

    def __init__(self, info: ModelInfo, defaults: PoolingDefaults) -> None:
        self._info, self.defaults = info, defaults
        labels = PoolingUse.TOKEN_CLASSIFY if info.pooling is Pooling.ALL else PoolingUse.CLASSIFY
        self.own_use = labels if info.num_labels else PoolingUse.EMBED

    def plan(self, params: PoolingParams | None) -> PoolingPlan:
        """Return how a request is answered; raises InvalidRequest for what the model cannot do."""
        params = PoolingParams() if params is None else params
        use = params.task or self.own_use
        pooling = Pooling.ALL if use.of_tokens else params.pooling or self._info.pooling
        self._check(use, pooling, params)
        activates = params.use_activation
        if activates is None:
            activates = use.labels or self.defaults.normalize
        return PoolingPlan(use, pooling, activates, params)

    def finish(self, plan: PoolingPlan, token_ids: Sequence[int], pooled: FloatArray) -> FloatArray:
        """Return what a request asks of what the worker pooled, float32[width] or [tokens, width]."""
        params = plan.params
        if not plan.use.labels:
            made = pooled[..., : params.dimensions]
            return made / np.maximum(np.linalg.norm(made, axis=-1, keepdims=True), 1e-12) if plan.activates else made
        if params.step_tag_id is not None:
            pooled = pooled[np.asarray(token_ids) == params.step_tag_id]
        # As in vLLM, the activation comes after the choice of labels, over these alone.
        if params.returned_token_ids is not None:
            pooled = pooled[:, list(params.returned_token_ids)]
        return _activated(pooled, self.defaults.activation) if plan.activates else pooled

    @property
    def scores_pairs(self) -> bool:
        """Two texts are scored as one prompt by the model's head, and not by the cosine of their embeddings."""
        return bool(self._info.num_labels)

    def check_scores(self, params: PoolingParams | None) -> PoolingParams:
        """Return the parameters with which two texts are scored; raises InvalidRequest where the model cannot score them."""
        if self._info.num_labels > 1 or self.own_use.of_tokens:
            raise InvalidRequest(
                "two texts are scored by a head with one label, or by their embeddings",
                found=f"{self._info.num_labels} labels of {'each token' if self.own_use.of_tokens else 'a text'}",
                hint="Use classify or encode, or a model for reranking or embedding",
            )
        return for_use(self.own_use, params)

    def _check(self, use: PoolingUse, pooling: Pooling, params: PoolingParams) -> None:
        architecture = f"the architecture {self._info.architecture}"
        if use.labels and not self._info.num_labels:
            raise InvalidRequest(
                "the model has no head that classifies",
                found=architecture,
                hint="Use embed, or a model with such a head (a ...ForSequenceClassification)",
            )
        if pooling is Pooling.ALL and not use.of_tokens:
            raise InvalidRequest(
                "the model's head is for single tokens",
                found=f"{architecture} with task='{use}'",
                hint=f"Give task='token_{use}', or say which hidden state stands for a text: pooling='mean'",
            )
        only: tuple[tuple[str, bool, str], ...] = (
            ("pooling", use.of_tokens, "a task of texts"),
            ("dimensions", use.labels, "embeddings"),
            ("step_tag_id", use is not PoolingUse.TOKEN_CLASSIFY, "task='token_classify'"),
            ("returned_token_ids", use is not PoolingUse.TOKEN_CLASSIFY, "task='token_classify'"),
        )
        for name, is_foreign, home in only:
            value = getattr(params, name)
            if value is not None and is_foreign:
                raise InvalidRequest(f"{name} is for {home}", found=f"{name}={shown(value)} with task='{use}'")
        outside = [one for one in params.returned_token_ids or () if one >= self._info.num_labels]
        if outside:
            raise InvalidRequest(
                f"returned_token_ids must be below the {self._info.num_labels} labels", found=shown(outside)
            )
        if params.dimensions is not None and params.dimensions not in self.defaults.dimensions:
            raise self._wrong_dimensions(params.dimensions)

    def _wrong_dimensions(self, asked: int) -> InvalidRequest:
        known = self.defaults.dimensions
        if not known:
            return InvalidRequest(
                "the model is not trained for embeddings that are cut",
                found=f"dimensions={asked}, and neither is_matryoshka nor matryoshka_dimensions in its configuration",
                hint="Leave dimensions out, or give hf_overrides={'is_matryoshka': True} where you know that it is",
            )
        accepted = f"{known[0]} to {known[-1]}" if isinstance(known, range) else ", ".join(map(str, known))
        return InvalidRequest(
            "the model's embeddings cannot have so many elements", found=f"dimensions={asked}", hint=f"Give {accepted}"
        )


def for_use(use: PoolingUse, params: PoolingParams | None) -> PoolingParams:
    """Return parameters for a call that is for one use; raises InvalidRequest where they name another."""
    params = PoolingParams() if params is None else params
    if params.task not in (None, use):
        raise InvalidRequest(
            f"the call is for task='{use}'", found=f"task='{params.task}'", hint="Leave task out, or use encode"
        )
    return replace(params, task=use)


def text_pairs(data_1: Any, data_2: Any) -> tuple[list[str], list[str]]:
    """Return the first and the second texts of the pairs that are scored: one text with each of several, or one by one.

    Raises InvalidRequest for lists that do not fit, and for what is no text.
    """
    first, second = _texts("data_1", data_1), _texts("data_2", data_2)
    if len(first) not in (1, len(second)):
        raise InvalidRequest(
            "data_1 is one text, or as many as data_2 has", found=f"{len(first)} and {len(second)} texts"
        )
    return first, second


def cosine_score(
    one: PoolingRequestOutput[PoolingOutput], other: PoolingRequestOutput[PoolingOutput], separator: Sequence[int]
) -> ScoringRequestOutput:
    """Return the cosine of two embeddings, in [-1, 1]; the tokens are those of both, with `separator` between them."""
    a, b = one.outputs.data, other.outputs.data
    cosine = np.empty(0, np.float32)
    if a.size and b.size:
        cosine = np.atleast_1d(a @ b / max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-12))
        cosine = cosine.clip(-1, 1)  # rounding may take it beyond
    joined = PoolingRequestOutput(
        f"{one.request_id}_{other.request_id}",
        PoolingOutput(cosine),
        [*one.prompt_token_ids, *separator, *other.prompt_token_ids],
        finish_reason="stop" if cosine.size else "abort",
    )
    return ScoringRequestOutput.from_base(joined)


def _texts(name: str, given: Any) -> list[str]:
    many = list(given) if isinstance(given, Iterable) and not isinstance(given, str | Mapping) else [given]
    if not all(isinstance(one, str) for one in many):
        raise InvalidRequest(f"{name} must be a text or a list of texts", found=shown(given))
    if not many:
        raise InvalidRequest(f"{name} has no text", hint="Give at least one")
    return many


def _activated(logits: FloatArray, activation: LabelActivation) -> FloatArray:
    match activation:
        case LabelActivation.IDENTITY:
            return logits
        case LabelActivation.TANH:
            return np.tanh(logits)
        case LabelActivation.PROBABILITIES if logits.shape[-1] > 1:
            weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
            return weights / weights.sum(axis=-1, keepdims=True)  # type: ignore[no-any-return]
        case _:
            # The sigmoid, by tanh, which overflows for no value.
            return 0.5 * (1 + np.tanh(0.5 * logits))  # type: ignore[no-any-return]
