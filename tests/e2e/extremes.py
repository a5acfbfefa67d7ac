"""Extreme values of every field of a request's parameters, made from what the field declares, and what becomes of such a request."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import numpy as np
import torch

from hardpoint import LLM, LLMEngine, SamplingParams
from hardpoint.engine.outputs import RequestOutput
from hardpoint.interfaces.batch import FloatArray
from hardpoint.interfaces.errors import ConfigError, HardpointError, InvalidRequest
from hardpoint.sampling import RequestOutputKind
from hardpoint.validation.declared import FLOAT32_MAX, FLOAT32_MIN
from hardpoint_conformance import sampling_reference

EOS = 2
"""The end-of-text token of the tests' models."""

_INTEGERS = [0, 1, -1, 2, 3, 255, 256, 2**31 - 1, 2**31, -(2**31), 2**63 - 1, 2**63, -(2**63), 2**64, 2**70, -(2**70)]
_NUMBERS = [
    0.0,
    -0.0,
    5e-324,
    1e-320,
    1e-46,
    1e-45,
    1e-40,
    1e-5,
    0.5,
    1.0,
    1.5,
    1e30,
    1e39,
    1e308,
    math.inf,
    -math.inf,
    math.nan,
]
_TEXTS = ["", "a", " ", "\0", "\ud800", "é" * 3000, "<s>"]
WRONG = [
    None,
    True,
    1,
    0.5,
    "1",
    b"1",
    [],
    [None],
    [[]],
    [[1]],
    {},
    {None: None},
    {1: {}},
    object(),
    np.empty((2, 2)),
    np.bool_(1),
]


class _Odd:
    """A logits processor that fails in whatever is asked of it."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("nothing is known of it")

    def __repr__(self) -> str:
        raise RuntimeError("it cannot be shown")

    def __call__(self, token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        raise KeyError("it does nothing")


def _to(kind: torch.dtype | str) -> Any:
    return lambda token_ids, logits: logits.to(kind)


_FUNCTIONS = [
    _Odd(),
    lambda token_ids, logits: logits,
    lambda token_ids, logits: logits.fill_(-torch.inf),
    lambda token_ids, logits: logits * torch.nan,
    lambda token_ids, logits: logits + torch.inf,
    lambda token_ids, logits: logits[:3],
    lambda token_ids, logits: logits.resize_(1),
    lambda token_ids, logits: token_ids.extend([1] * 5000) or logits,
    lambda token_ids, logits: None,
    lambda token_ids, logits: logits.to_sparse(),
    lambda token_ids, logits: logits.clone().requires_grad_(),
    lambda logits: logits,
    *map(_to, (torch.float64, torch.bool, torch.int8, "meta")),
]


def values_of(kind: Any, vocabulary: int) -> list[Any]:
    """Return extreme values of a declared type: what it allows at its ends, what lies next to them, and what other types have."""
    origin, members = get_origin(kind), get_args(kind)
    if origin is Annotated:
        meta, ends = members[1], []
        for end, outside in ((meta.ge, -math.inf), (meta.le, math.inf)):
            if end is None:
                continue
            if members[0] is int:
                ends += [end, end - 1, end + 1]
            else:
                ends += [end, math.nextafter(end, outside), math.nextafter(end, -outside)]
        return ends + values_of(members[0], vocabulary)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return [*kind, *(member.value for member in kind), -1, 99]
    if kind is int:
        return [*_INTEGERS, vocabulary - 1, vocabulary, vocabulary + 1]
    if kind is float:
        return [*_INTEGERS, *_NUMBERS]
    if kind is bool:
        return [True, False]
    if kind is str:
        return list(_TEXTS)
    if kind is Any:
        return list(_FUNCTIONS)
    if origin is Sequence:
        each = values_of(members[0], vocabulary)
        whole = [range(vocabulary), list(range(vocabulary)) * 2, range(1, vocabulary), range(vocabulary + 1)]
        texts = [[chr(code) for code in range(32, 1000)]] if members[0] is str else []
        return [[], *([one] for one in each), each[:2], *(whole if members[0] is not str else []), *texts]
    if origin is Mapping:
        keys, values = (values_of(one, vocabulary) for one in members)
        whole = [dict.fromkeys(range(vocabulary), value) for value in values]
        return [{}, *({key: 1.0} for key in keys), *({5: value} for value in values), *whole]
    return [value for member in members for value in values_of(member, vocabulary)]


def extremes(kind: type, vocabulary: int) -> dict[str, list[Any]]:
    """Return extreme values of each field of a class, and some of wrong types."""
    hints = get_type_hints(kind, include_extras=True)
    return {
        name: values_of(hint, vocabulary) + WRONG for name, hint in hints.items() if name in kind.__dataclass_fields__
    }


PROMPT = [5, 9, 22, 7]
"""Of the requests with extreme parameters."""

NEIGHBOURS = {
    "greedy": ([40, 41, 42, 43, 44], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)),
    "drawn": ([11, 12, 11, 12, 13], SamplingParams(seed=7, max_tokens=8, ignore_eos=True, logprobs=2)),
}


class Beside:
    """Runs requests beside two that must not notice them.

    Args:
        logits: float32[vocab_size], what the model says after `PROMPT`.
        exact: they are the engine's own, bit for bit; otherwise only whether there is a token is known, not which.

    Attributes:
        counts: trials, and how many were refused, or ended with an error of their own.
        wrong: what should not have been.
    """

    def __init__(self, engine: LLMEngine, logits: FloatArray, *, exact: bool = True) -> None:
        self.engine, self.counts, self.wrong = engine, Counter[str](), list[str]()
        self._logits, self._exact = logits, exact
        self._alone: dict[str, Any] = {}
        for name, (prompt, params) in NEIGHBOURS.items():
            engine.add_request(name, prompt, params)
            self._alone |= {name: end_of(outputs) for name, outputs in self._served().items()}

    def try_params(self, trials: Sequence[Mapping[str, Any]]) -> None:
        """Run one request for each of the parameters, all in the same steps."""
        accepted: dict[str, SamplingParams] = {}
        with self.neighbours(trials) as outputs:
            for number, values in enumerate(trials):
                with self.trial(values):
                    params = SamplingParams(**values)
                    self.engine.add_request(str(number), PROMPT, params)
                    accepted[str(number)] = params
        for name, params in accepted.items():
            problem = self._problem(params, outputs[name]) if name in outputs else "it has no output"
            if problem is not None:
                self.wrong.append(f"{short(trials[int(name)])}: {problem}")

    @contextmanager
    def trial(self, what: object) -> Iterator[None]:
        """Count what is done, and whether it was refused, which is one of two typed errors."""
        self.counts["trials"] += 1
        try:
            yield
        except (InvalidRequest, ConfigError) as error:
            str(error).encode()
            self.counts["refused"] += 1
        except Exception as error:
            self.wrong.append(f"{short(what)} raised {type(error).__name__}: {error}")

    @contextmanager
    def neighbours(self, what: object) -> Iterator[dict[str, list[RequestOutput]]]:
        """Have the neighbours in progress, then serve all requests to their end, and look what became of the neighbours.

        Yields what is filled with the outputs at the end, by request.
        """
        for name, (prompt, params) in NEIGHBOURS.items():
            self.engine.add_request(name, prompt, params)
        outputs: dict[str, list[RequestOutput]] = {output.request_id: [output] for output in self.engine.step()}
        yield outputs
        try:
            for name, more in self._served().items():
                outputs.setdefault(name, []).extend(more)
        except HardpointError as error:
            self.wrong.append(f"{short(what)} raised {type(error).__name__}: {error}")
            self.engine.abort_request([*NEIGHBOURS, *map(str, range(1000))])
        for name, expected in self._alone.items():
            found = end_of(outputs[name]) if name in outputs else None
            if found != expected:
                self.wrong.append(f"{name} beside {short(what)}: {found}")
        if self.engine.has_unfinished_requests() or self.engine.stats().blocks_used:
            self.wrong.append(f"{short(what)} leaves something in the engine")

    def _served(self) -> dict[str, list[RequestOutput]]:
        outputs: dict[str, list[Any]] = {}
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                outputs.setdefault(output.request_id, []).append(output)
        return outputs

    def _problem(self, params: SamplingParams, outputs: Sequence[RequestOutput]) -> str | None:
        """Return what is not as the definition of sampling says."""
        is_delta = params.output_kind is RequestOutputKind.DELTA
        for index, last in enumerate(outputs[-1].outputs):
            all_parts = [output.outputs[index] for output in outputs] if is_delta else [last]
            tokens = [token for part in all_parts for token in part.token_ids]
            "".join(part.text for part in all_parts).encode()
            reason = last.finish_reason
            self.counts["ended"] += reason == "error"
            if reason not in ("stop", "length", "error") or not all(0 <= token < len(self._logits) for token in tokens):
                return f"completion {index}: {reason}, {tokens}"
            if params.needs_ranking or (params.seed is None and not params.is_greedy):
                continue  # which of the sampled ones it is, or what it was drawn with, is not known
            if 0 < (params.truncate_prompt_tokens or 0) < len(PROMPT):
                continue  # what the model says after a shorter prompt is not known
            expected = _first_token(params, self._logits, index, self._bad_tokens(params))
            is_known = tokens[:1] == [expected] if self._exact else bool(tokens)
            if not (is_known if expected >= 0 else (reason, tokens) == ("error", [])):
                return f"completion {index}: {reason}, {tokens}; the definition says {expected}"
        return None

    def _bad_tokens(self, params: SamplingParams) -> list[tuple[int, ...]]:
        """Return the words that are one token; longer ones do not forbid a first token."""
        if not params.bad_words:
            return []
        assert self.engine.tokenizer is not None
        words = [self.engine.tokenizer.encode(word, add_special_tokens=False) for word in params.bad_words]
        return [tuple(word) for word in words if len(word) == 1]


def end_of(outputs: Sequence[RequestOutput]) -> Any:
    (completion,) = outputs[-1].outputs
    return completion.finish_reason, completion.token_ids, completion.logprobs


def _first_token(params: SamplingParams, logits: FloatArray, fork: int, bad_tokens: list[tuple[int, ...]]) -> int:
    sampling = params.to_sequence_sampling(0, PROMPT, fork, 0, [EOS], bad_words=bad_tokens)
    try:
        return sampling_reference.sample_row(logits, sampling, [])
    except Exception:  # a logits processor's
        return -1


def short(values: object) -> str:
    try:
        return repr(values)[:300]
    except Exception:
        return "what cannot be shown"


def single(vocabulary: int) -> list[dict[str, Any]]:
    """Return parameters of which one is extreme, of a draw and of a greedy choice."""
    base = [{"seed": 1, "max_tokens": 4, "temperature": temperature} for temperature in (0.9, 0.0)]
    return [
        one | {name: value}
        for name, values in extremes(SamplingParams, vocabulary).items()
        for value in values
        for one in base
    ]


def together(vocabulary: int) -> list[dict[str, Any]]:
    """Return parameters that are extreme in what they do together."""
    wide, whole = {"temperature": FLOAT32_MAX}, range(vocabulary)
    interactions: list[dict[str, Any]] = [
        {"min_tokens": 2, "stop_token_ids": whole},
        {"min_tokens": 2, "stop_token_ids": whole, "temperature": 0.0},
        {"min_tokens": 2, "stop_token_ids": whole[1:], "allowed_token_ids": whole[1:]},
        {"min_tokens": 2, "stop_token_ids": whole[1:], "allowed_token_ids": whole[:1]},
        {"min_tokens": 2, "stop_token_ids": whole[1:], "logit_bias": {0: -100.0}, "min_p": 1.0},
        {"min_tokens": 2, "stop_token_ids": whole[1:], "logits_processors": [_without_the_first]},
        {"allowed_token_ids": [0], "logits_processors": [_without_the_first]},
        {"temperature": 0.0, "repetition_penalty": 1.2e-38, "ignore_eos": True},
        {"temperature": 1.0, "repetition_penalty": FLOAT32_MAX, "ignore_eos": True},
        {**wide, "allowed_token_ids": [5, 6]},
        {**wide, "allowed_token_ids": [5, 6], "top_p": 1.2e-38},
        {"temperature": 1e-5, "top_k": 2**31 - 1, "min_p": 1e-320, "ignore_eos": True},
        {"logit_bias": dict.fromkeys(whole, -100.0), "ignore_eos": True},
        {"logit_bias": dict.fromkeys(whole, 100.0), "repetition_penalty": FLOAT32_MIN},
        {"n": 3, "min_tokens": 1, "stop_token_ids": whole},
        {"n": 1, "best_of": 3, "min_tokens": 1, "stop_token_ids": whole, "logprobs": vocabulary},
    ]
    return [{"seed": 1, "max_tokens": 4} | one for one in interactions]


def _without_the_first(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    logits[0] = -torch.inf
    return logits


def combined(vocabulary: int, count: int) -> list[dict[str, Any]]:
    """Return so many parameters of which two to five have extreme values, each accepted alone."""
    accepted: dict[str, list[Any]] = {}
    for name, values in extremes(SamplingParams, vocabulary).items():
        for value in values:
            with suppress(InvalidRequest):
                SamplingParams(**{"max_tokens": None, name: value})
                accepted.setdefault(name, []).append(value)
    rng = random.Random(0)
    names = [rng.sample(sorted(accepted), rng.randint(2, 5)) for _ in range(count)]
    return [{"seed": 1, "max_tokens": 4} | {name: rng.choice(accepted[name]) for name in some} for some in names]


def batches(trials: Sequence[Any], size: int = 60) -> Iterator[Sequence[Any]]:
    """Cut trials into parts that run in the same steps."""
    return (trials[start : start + size] for start in range(0, len(trials), size))


def check_that_a_request_of_nan_ends_alone(llm: LLM, logits: FloatArray, embeddings: torch.Tensor) -> None:
    """Requests with a token whose embedding is NaN end with an error; neighbours, and those that get their blocks, do not notice.

    Args:
        embeddings: the model's, float32[vocab_size, hidden_size].
    """
    beside = Beside(llm.engine, logits, exact=False)
    name, token = "model.embed_tokens.weight", len(embeddings) - 1
    llm.update_weights([(name, torch.cat((embeddings[:-1], torch.full_like(embeddings[-1:], torch.nan))))])
    for params in (SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_k=3, logprobs=3)) * 3:
        with beside.neighbours(params) as outputs:
            llm.engine.add_request("broken", [token] * 9, params)
        assert end_of(outputs["broken"])[:2] == ("error", [])
    assert not beside.wrong, "\n".join(beside.wrong)
    llm.reload_weights()
