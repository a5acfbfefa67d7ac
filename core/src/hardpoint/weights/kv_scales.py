"""Scales of an fp8 KV cache, as checkpoints have them: one number for a layer's keys and one for its values.

Calibration tools write them beside the weights: compressed-tensors and AutoFP8 into the attention (`self_attn.k_scale`, or one
`self_attn.kv_scale` for both), ModelOpt into the projections (`k_proj.k_scale`), Quark and early compressed-tensors as these
projections' outputs (`k_proj.output_scale`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hardpoint.interfaces.dtypes import DType
from hardpoint.interfaces.errors import ConfigError, CorruptWeights, ModelError
from hardpoint.weights.checkpoint import listed

if TYPE_CHECKING:
    from torch import Tensor

    from hardpoint.interfaces.capabilities import AttentionLayer
    from hardpoint.weights.checkpoint import Checkpoint

Scales = tuple[tuple[float, float], ...]
"""(k_scale, v_scale) of each layer of a whole model."""

_SCALED = frozenset({DType.FLOAT8_E4M3, DType.FLOAT8_E5M2})
_NAME = re.compile(
    r"(?:^|\.)(?P<layer>\d+)\.\w+\."
    r"(?:(?:attn\.|qkv_proj\.)?(?P<part>k|v|kv)_scale|(?P<projection>[kv])_proj\.(?:(?P=projection)_scale|output_scale))$"
)
_UNUSED = re.compile(r"\.\d+\.\w+\.(?:(?:attn\.|q_proj\.)?q_scale|q_proj\.output_scale|prob_scale|prob_output_scale)$")
"""Scales of queries and probabilities, which stay in the model's dtype here."""

_CALIBRATE = "Calibrate the checkpoint again, or run it with kv_dtype='auto', which takes no scales"


def takes_scales(kv_dtype: DType | None) -> bool:
    """Whether keys and values are divided by scales before they go into a cache of this dtype (None: the model's own)."""
    return kv_dtype in _SCALED


def is_scale(name: str) -> bool:
    """Whether a checkpoint tensor is a scale of attention, and no weight."""
    return _place_of(name) is not None or _UNUSED.search(name) is not None


def read_scales(checkpoint: Checkpoint, num_layers: int) -> Scales | None:
    """Return the scales of all layers, None where the checkpoint has none; raises CorruptWeights that lists what is wrong."""
    found: dict[tuple[int, str], float] = {}
    problems: list[str] = []
    for name in sorted(checkpoint.shapes()):
        place = _place_of(name)
        if place is None:
            continue
        layer, parts = place
        value = _number(checkpoint.read(name))
        if not 0 <= layer < num_layers:
            problems.append(f"{name} is of none of the {num_layers} layers")
        elif isinstance(value, str):
            problems.append(f"{name} is {value}")
        for part in parts:
            if (layer, part) in found:
                problems.append(f"layer {layer} has its {part}_scale twice")
            found[layer, part] = value if isinstance(value, float) else 1.0
    if not found:
        return None
    problems += [
        f"layer {layer} has no {part}_scale"
        for layer in range(num_layers)
        for part in "kv"
        if (layer, part) not in found
    ]
    if problems:
        raise CorruptWeights(
            "the checkpoint's scales of the KV cache cannot be used", found=listed(problems, "; "), hint=_CALIBRATE
        )
    return tuple((found[layer, "k"], found[layer, "v"]) for layer in range(num_layers))


def scaled(layers: Sequence[AttentionLayer], scales: Scales) -> tuple[AttentionLayer, ...]:
    """Return layers with their scales."""
    return tuple(
        replace(layer, k_scale=k_scale, v_scale=v_scale)
        for layer, (k_scale, v_scale) in zip(layers, scales, strict=True)
    )


def unscaled(layers: Sequence[AttentionLayer]) -> tuple[AttentionLayer, ...]:
    """Return layers as the configuration states them."""
    return scaled(layers, ((1.0, 1.0),) * len(layers))


@dataclass(frozen=True)
class ScalesInUse:
    """The scales that a loaded model's cache is written and read with: part of its attention plan, fixed while it is loaded.

    Attributes:
        scales: of the whole model; None where the cache takes none, and those that come along with weights mean nothing.
    """

    scales: Scales | None = None

    def passes(self, name: str, values: Tensor) -> bool:
        """Whether a tensor that came with an update is a scale, to be passed over; raises ModelError for another than in use."""
        place = _place_of(name)
        if self.scales is not None and place is not None:
            layer, parts = place
            value, known = _number(values), range(len(self.scales))
            used = [self.scales[layer]["kv".index(part)] for part in parts] if layer in known else []
            if not used or any(scale != value for scale in used):
                raise _fixed(f"{name} is {value}, and {' and '.join(map(str, used)) or 'no layer'} is in use")
        return is_scale(name)

    def check(self, scales: Scales | None) -> None:
        """Raise ModelError unless another checkpoint's scales, 1.0 where it has none, are those in use."""
        if self.scales is None:
            return
        found = scales or ((1.0, 1.0),) * len(self.scales)
        for layer, (one, other) in enumerate(zip(self.scales, found, strict=True)):
            if one != other:
                raise _fixed(f"(k_scale, v_scale) of layer {layer} are {other}, and {one} are in use")


def quantises_weights(config: Mapping[str, Any]) -> bool:
    """Whether a `quantization_config` may be about more than the KV cache: all of it that is not known to be about less."""
    config = _flat(config)
    method = config.get("quant_method")
    groups: list[Any]
    if method == "compressed-tensors":
        groups = [*(config.get("config_groups") or {}).values(), config.get("sparsity_config")]
        return not config.get("kv_cache_scheme") or any(group and _quantised(group) for group in groups)
    if method == "modelopt":
        return not _is_empty(config.get("quant_algo")) or bool(config.get("quantized_layers"))
    if method == "quark":
        kinds = ("layer_quant_config", "layer_type_quant_config")
        groups = [config.get("global_quant_config"), *(g for kind in kinds for g in (config.get(kind) or {}).values())]
        return any(group and (group.get("weight") or group.get("input_tensors")) for group in groups)
    return True


def check_format(config: Mapping[str, Any]) -> None:
    """Raise ConfigError where a `quantization_config` says that the scales are for something else than fp8."""
    config = _flat(config)
    scheme, algorithm = config.get("kv_cache_scheme"), config.get("kv_cache_quant_algo")
    if isinstance(scheme, Mapping) and (scheme.get("type"), scheme.get("num_bits")) != ("float", 8):
        found = f"{scheme.get('type')} of {scheme.get('num_bits')} bits"
    elif not _is_empty(algorithm) and algorithm != "FP8":
        found = str(algorithm)
    else:
        return
    raise ConfigError(
        "the checkpoint's KV cache was calibrated for another format than fp8",
        found=found,
        hint="Run it with kv_dtype='auto'",
    )


def _place_of(name: str) -> tuple[int, str] | None:
    """Return (layer, "k", "v" or "kv") of a scale of keys or values."""
    match = _NAME.search(name)
    return None if match is None else (int(match["layer"]), match["part"] or match["projection"])


def _number(values: Tensor) -> float | str:
    """Return a scale, or what is wrong with it."""
    if values.numel() != 1:
        return f"{list(values.shape)} numbers instead of one (scales of single heads are not read)"
    value = float(values)
    return value if 0 < value < math.inf else f"{value}, not a positive number"


def _flat(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a configuration with ModelOpt's inner one, which older files have, spread out."""
    inner = config.get("quantization")
    return {"quant_method": "modelopt", **config, **inner} if isinstance(inner, Mapping) else config


def _quantised(group: Mapping[str, Any]) -> bool:
    return bool(group.get("weights")) or group.get("format", "dense") not in ("dense", None)


def _is_empty(algorithm: object) -> bool:
    return algorithm is None or str(algorithm).lower() in ("", "none")


def _fixed(found: str) -> ModelError:
    return ModelError(
        "the scales of an fp8 KV cache cannot be changed while the model is loaded",
        found=found,
        hint="Make a new engine, or leave the scales out of the update",
    )
