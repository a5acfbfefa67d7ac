"""Rotary tables: inverse frequencies of each scaling variant, and cosines and sines by position.

The formulas are those of transformers' `ROPE_INIT_FUNCTIONS`, so that a model rotates here exactly as it was published:
linear interpolation, NTK-aware scaling, YaRN (arXiv:2309.00071), LongRoPE (arXiv:2402.13753) and Llama 3.1's band-wise scaling.
Where transformers picks frequencies anew for every batch from the longest sequence in it, a table is fixed for
`max_context`: see `dynamic` and `longrope` below. A paged cache holds rotated keys, so frequencies must not change
while a sequence runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hardpoint.interfaces.attention import Refusal

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Rope:
    """One rotary table's parameters.

    Attributes:
        rotary_dim: rotated elements of each head.
        theta: base of the frequencies.
        kind: "default", "linear", "dynamic", "yarn", "longrope" or "llama3".
        max_position_embeddings: the configuration's context length.
        parameters: the variant's own parameters, named as in a configuration's `rope_parameters`.
        frequency_divisors: float per frequency, from a GGUF file's `rope_freqs.weight`; None for no such tensor.
    """

    rotary_dim: int
    theta: float
    kind: str
    max_position_embeddings: int
    parameters: Mapping[str, Any] = field(default_factory=dict)
    frequency_divisors: Sequence[float] | None = None

    def table(self, max_context: int) -> tuple[Tensor, Tensor]:
        """Return (cos, sin), each float32[max_context, rotary_dim / 2], the variant's attention factor multiplied in."""
        import torch

        frequencies, factor = self.frequencies(max_context)
        angles = torch.arange(max_context, dtype=torch.float32)[:, None] * frequencies
        return angles.cos() * factor, angles.sin() * factor

    def rotates_like(self, other: Rope) -> bool:
        """Whether the other's table is this one up to rounding."""
        import torch

        length = min(self.max_position_embeddings, other.max_position_embeddings)
        (mine, factor), (others, other_factor) = self.frequencies(length), other.frequencies(length)
        return (
            mine.shape == others.shape
            and torch.allclose(mine, others, rtol=1e-5)
            and math.isclose(factor, other_factor)
        )

    def frequencies(self, max_context: int) -> tuple[Tensor, float]:
        """Return (inverse frequencies float32[rotary_dim / 2], factor of cosines and sines)."""
        import torch

        frequencies, factor = _VARIANTS[self.kind](self, max_context)
        if self.frequency_divisors is not None:
            frequencies = frequencies / torch.tensor(self.frequency_divisors, dtype=torch.float32)
        return frequencies, factor


def rope_from_config(
    parameters: Mapping[str, Any],
    rotary_dim: int,
    max_position_embeddings: int,
    divisors: Sequence[float] | None = None,
) -> Rope | Refusal:
    """Return the table's parameters for one entry of a configuration's `rope_parameters`, or why there is no such table."""
    kind = str(parameters.get("rope_type") or parameters.get("type") or "default")
    if kind not in _VARIANTS:
        return Refusal((f"its rotary embedding is of the kind {kind} (known: {', '.join(sorted(_VARIANTS))})",))
    given = dict(parameters)
    if given.get("original_max_position_embeddings") is None:
        given["original_max_position_embeddings"] = max_position_embeddings
    theta = given.get("rope_theta") or 10000.0
    wrong = [name for name in _FACTORS.get(kind, ()) if not _is_factor(given.get(name), rotary_dim // 2)]
    if not _is_factor(theta) or wrong:
        return Refusal((f"its rotary embedding of the kind {kind} has no usable {', '.join(wrong) or 'rope_theta'}",))
    return Rope(rotary_dim, float(theta), kind, max_position_embeddings, given, divisors)


_FACTORS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
"""What a variant cannot do without."""


def _is_factor(value: object, length: int = 0) -> bool:
    """Whether a value is a positive number, or a list of `length` of them."""
    if isinstance(value, (list, tuple)):
        return len(value) == length and all(map(_is_factor, value))
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def _exponents(rope: Rope) -> Tensor:
    import torch

    return torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim


def _default(rope: Rope, max_context: int) -> tuple[Tensor, float]:
    return 1.0 / rope.theta ** _exponents(rope), 1.0


def _linear(rope: Rope, max_context: int) -> tuple[Tensor, float]:
    return _default(rope, max_context)[0] / rope.parameters["factor"], 1.0


def _dynamic(rope: Rope, max_context: int) -> tuple[Tensor, float]:
    """NTK-aware scaling for `max_context` tokens; unscaled where that is within the configured context length.

    transformers raises the base as a sequence grows past the configured length; up to it, both agree.
    """
    length, factor = rope.max_position_embeddings, rope.parameters["factor"]
    stretch = factor * max(max_context, length) / length - (factor - 1)
    theta = rope.theta * stretch ** (rope.rotary_dim / (rope.rotary_dim - 2))
    return 1.0 / theta ** _exponents(rope), 1.0


def _yarn(rope: Rope, max_context: int) -> tuple[Tensor, float]:
    import torch

    given, dim = rope.parameters, rope.rotary_dim
    original = given.get("original_max_position_embeddings") or rope.max_position_embeddings
    factor = given.get("factor") or rope.max_position_embeddings / original

    def magnitude(weight: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    attention_factor = given.get("attention_factor")
    if attention_factor is None:
        mscale, mscale_all_dim = given.get("mscale"), given.get("mscale_all_dim")
        attention_factor = magnitude(mscale) / magnitude(mscale_all_dim) if mscale and mscale_all_dim else magnitude()

    def dimension_of(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(given.get("beta_fast") or 32), dimension_of(given.get("beta_slow") or 1)
    if given.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    interpolated = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    periods = rope.theta ** _exponents(rope)
    kept = 1 - interpolated
    return (1.0 / (factor * periods)) * (1 - kept) + (1.0 / periods) * kept, float(attention_factor)


def _longrope(rope: Rope, max_context: int) -> tuple[Tensor, float]:
    """Long factors where `max_context` exceeds the original context length, else short ones, for all positions.

    transformers changes from short to long factors in the middle of a sequence, which invalidates the keys cached before.
    """
    import torch

    given = rope.parameters
    original = given["original_max_position_embeddings"]
    factor = given.get("factor") or rope.max_position_embeddings / original
    attention_factor = given.get("attention_factor")
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    stretch = given["long_factor"] if max_context > original else given["short_factor"]
    periods = torch.tensor(stretch, dtype=torch.float32) * rope.theta ** _exponents(rope)
    return 1.0 / periods, float(attention_factor)


def _llama3(rope: Rope, max_context: int) -> tuple[Tensor, float]:
    import torch

    given = rope.parameters
    factor, low, high = given["factor"], given["low_freq_factor"], given["high_freq_factor"]
    original = given.get("original_max_position_embeddings") or rope.max_position_embeddings
    frequencies = _default(rope, max_context)[0]
    wavelengths = 2 * math.pi / frequencies
    scaled = torch.where(wavelengths > original / low, frequencies / factor, frequencies)
    smooth = (original / wavelengths - low) / (high - low)
    between = (wavelengths >= original / high) & (wavelengths <= original / low)
    return torch.where(between, (1 - smooth) * scaled / factor + smooth * scaled, scaled), 1.0


_VARIANTS: dict[str, Callable[[Rope, int], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
}
