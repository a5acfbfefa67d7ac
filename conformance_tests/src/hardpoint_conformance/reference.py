"""The oracle of whole models: a decoder in plain torch on the CPU, in float64, and the same one in the element type of the case.

Greedy tokens are judged by the logit-margin rule. The oracle runs over the text that the backend wrote, so that every token is
judged after the same tokens before it. A token other than the oracle's is right only where the oracle prefers its own by no more
than rounding explains. What rounding does is measured on the same text, prompt included: the plain decoder in the case's type gives
the largest error of a logit's distance from the oracle's best. A correct backend sums in other orders and keeps other intermediate
results in that type, so its errors are other draws of the same size: they may be twice as large. Log probabilities are judged by
the error of the plain decoder's in the same way. Nothing else is a tolerance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from hardpoint.interfaces import DType
from hardpoint_conformance.tiny_model import Model, Shape

if TYPE_CHECKING:
    from hardpoint.interfaces import TokenLogprobs

FACTOR = 2.0
"""A backend's error by that of the plain run; FlashAttention's own tests use the same."""


@dataclass(frozen=True)
class Judgement:
    """What the oracle says of a text.

    Attributes:
        exact: float64[positions, vocab], logits at the positions before each judged token.
        margin: largest margin of the oracle's best over another token at which rounding may prefer that one.
        logprob_error: bound of the error of a log probability.
        tokens: the judged tokens.
    """

    exact: Tensor
    margin: float
    logprob_error: float
    tokens: Tensor

    @property
    def ratios(self) -> Tensor:
        """The oracle's margin of its token over the one judged, by its bound; above 1 the token is wrong."""
        return (self.exact.max(dim=-1).values - self.exact.gather(1, self.tokens[:, None])[:, 0]) / self.margin

    @property
    def decided(self) -> float:
        """Share of the positions at which only the oracle's token is right."""
        best = self.exact.topk(2, dim=-1).values
        return float((best[:, 0] - best[:, 1] > self.margin).double().mean())

    def check(self) -> float:
        """Raise AssertionError that names the first wrong token; return the largest ratio."""
        ratios = self.ratios
        wrong = torch.nonzero(ratios > 1)
        if len(wrong):
            at = int(wrong[0])
            best = int(self.exact[at].argmax())
            margin = float(self.exact[at, best] - self.exact[at, self.tokens[at]])
            raise AssertionError(
                f"token {at} is {int(self.tokens[at])}; the oracle has {best}, by a margin of {margin:.3g} "
                f"where rounding explains {self.margin:.3g}; {len(wrong)} of {len(ratios)} tokens are wrong"
            )
        return float(ratios.max())

    def check_logprobs(self, given: Sequence[TokenLogprobs]) -> float:
        """Raise AssertionError where log probabilities differ from the oracle's by more than their bound; return the largest ratio."""
        exact = self.exact.log_softmax(dim=-1)
        worst = 0.0
        for at, found in enumerate(given):
            values = torch.from_numpy(found.logprobs).double()
            assert bool(torch.isfinite(values).all()), f"token {at} has log probabilities {found.logprobs}"
            assert int(found.token_ids[0]) == int(self.tokens[at]), "the sampled token comes first"
            difference = (values - exact[at, torch.from_numpy(found.token_ids).long()]).abs().max()
            worst = max(worst, float(difference) / self.logprob_error)
        assert worst <= 1, f"log probabilities are off by {worst:.3g} times what rounding explains"
        return worst


def judge(model: Model, text: Sequence[int], prompt_len: int, dtype: DType) -> Judgement:
    """Return what the oracle says of the tokens from `prompt_len` on, for a backend that computes in `dtype`."""
    (judged,) = judge_texts(model, [(text, prompt_len)], dtype)
    return judged


def judge_texts(model: Model, texts: Sequence[tuple[Sequence[int], int]], dtype: DType) -> list[Judgement]:
    """Return what the oracle says of each text's tokens from its `prompt_len` on; all texts are run at once."""
    vocab = model.shape.vocab
    for text, prompt_len in texts:
        tokens = text[prompt_len:]
        assert all(0 <= token < vocab for token in tokens), f"tokens {list(tokens)} of a vocabulary of {vocab}"
    # The prompt's positions count for the error too: a few tokens alone would be few draws of it.
    judged = [text[:-1] for text, _ in texts]
    runs = _logits(model, judged, (torch.float64, dtype.to_torch()))
    parts = zip(*(torch.split(run, list(map(len, judged))) for run in runs), strict=True)
    return [
        _judgement(exact, plain, torch.tensor(text[prompt_len:], dtype=torch.int64))
        for (text, prompt_len), (exact, plain) in zip(texts, parts, strict=True)
    ]


def _judgement(exact: Tensor, plain: Tensor, tokens: Tensor) -> Judgement:
    """Judge the tokens after the last positions of a text, by logits of the oracle and of the plain decoder at all of its positions."""
    best = exact.argmax(dim=-1, keepdim=True)
    distances = (plain - plain.gather(1, best)) - (exact - exact.gather(1, best))
    logprobs = plain.log_softmax(dim=-1) - exact.log_softmax(dim=-1)
    # Logits are returned in float32, and so rounded once more.
    floor = torch.finfo(torch.float32).eps * float(exact.abs().max())
    margin, logprob_error = (FACTOR * float(error.abs().max()) + floor for error in (distances, logprobs))
    return Judgement(exact[len(exact) - len(tokens) :], margin, logprob_error, tokens)


def logits(model: Model, text: Sequence[int], *dtypes: torch.dtype) -> list[Tensor]:
    """Return float64[tokens, vocab], computed in each of these types."""
    return _logits(model, [text], dtypes)


@torch.inference_mode()
def _logits(model: Model, texts: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    name = "model.embed_tokens.weight" if model.shape.tied else "lm_head.weight"
    head = model.weights[name]
    return [(hidden @ head.to(hidden.dtype).T).double() for hidden in _hidden(model, texts, dtypes)]


@torch.inference_mode()
def hidden_states(model: Model, text: Sequence[int], *dtypes: torch.dtype) -> list[Tensor]:
    """Return float64[tokens, hidden], after the last norm, computed in each of these types."""
    return [hidden.double() for hidden in _hidden(model, [text], dtypes)]


def _hidden(model: Model, texts: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Run the decoder in each type, layer by layer: weights that are expanded when they are looked up are so once.

    The tokens of all texts come one after another, and see none of another text.
    """
    shape = model.shape
    lengths = [len(text) for text in texts]
    visible = [_visible(length, shape.window) for length in lengths]
    positions = torch.cat([torch.arange(length) for length in lengths])
    rotations = [_rotation(shape, positions, dtype) for dtype in dtypes]
    embedded = model.weights["model.embed_tokens.weight"][torch.tensor([token for text in texts for token in text])]
    states = [embedded.to(dtype) for dtype in dtypes]
    for index in range(shape.layers):
        weights = {part: model.weights[f"model.layers.{index}.{part}.weight"] for part in _LAYER_PARTS}
        states = [
            _layer(shape, weights, hidden, visible, rotation)
            for hidden, rotation in zip(states, rotations, strict=True)
        ]
    norm = model.weights["model.norm.weight"]
    return [_normed(hidden, norm, shape) for hidden in states]


_LAYER_PARTS = (
    "input_layernorm",
    *(f"self_attn.{part}_proj" for part in "qkvo"),
    "post_attention_layernorm",
    *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
)


def _layer(
    shape: Shape,
    weights: Mapping[str, Tensor],
    hidden: Tensor,
    visible: Sequence[Tensor],
    rotation: tuple[Tensor, Tensor],
) -> Tensor:
    """Run one layer in the type of its input, with norms, rotary angles and softmax in no less than float32."""
    dtype, tokens = hidden.dtype, len(hidden)

    def linear(x: Tensor, part: str) -> Tensor:
        return x @ weights[part].to(dtype).T

    x = _normed(hidden, weights["input_layernorm"], shape)
    q, k, v = (linear(x, f"self_attn.{part}_proj").view(tokens, -1, shape.head_dim).transpose(0, 1) for part in "qkv")
    q, k = _rotated(q, *rotation), _rotated(k, *rotation)
    group = shape.heads // shape.kv_heads
    k, v = k.repeat_interleave(group, dim=0), v.repeat_interleave(group, dim=0)
    texts = zip(*(torch.split(part, list(map(len, visible)), dim=1) for part in (q, k, v)), visible, strict=True)
    mixed = torch.cat([_attended(shape, *text) for text in texts], dim=1)
    hidden = hidden + linear(mixed.transpose(0, 1).flatten(1), "self_attn.o_proj")
    x = _normed(hidden, weights["post_attention_layernorm"], shape)
    gated = functional.silu(linear(x, "mlp.gate_proj")) * linear(x, "mlp.up_proj")
    return hidden + linear(gated, "mlp.down_proj")


def _attended(shape: Shape, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    scores = (q @ k.transpose(1, 2) * shape.head_dim**-0.5).to(_wide(q.dtype)).masked_fill(~visible, float("-inf"))
    mixed: Tensor = scores.softmax(dim=-1).to(q.dtype) @ v
    return mixed


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _normed(x: Tensor, weight: Tensor, shape: Shape) -> Tensor:
    wide = x.to(_wide(x.dtype))
    spread = wide.square().mean(dim=-1, keepdim=True) + shape.norm_eps
    return (wide * spread.rsqrt()).to(x.dtype) * weight.to(x.dtype)


def _visible(length: int, window: int | None) -> Tensor:
    distance = torch.arange(length)[:, None] - torch.arange(length)
    return (distance >= 0) & (distance < (window or length))


def _rotation(shape: Shape, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [tokens, head_dim / 2] of the rotary angles, in `dtype`, of angles in no less than float32."""
    half, wide = shape.head_dim // 2, _wide(dtype)
    frequencies = shape.rope_theta ** (-torch.arange(half, dtype=wide) / half)
    angles = positions.to(wide)[:, None] * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return heads [heads, tokens, head_dim] after rotary embedding by halves (arXiv:2104.09864, Hugging Face's order)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
