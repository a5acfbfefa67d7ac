"""LoRA adapters in folders as PEFT writes them: `adapter_config.json` and `adapter_model.safetensors`, read and checked against a model."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hardpoint.interfaces.errors import CorruptWeights, HardpointError, InvalidAdapter
from hardpoint.weights.checkpoint import SafetensorsCheckpoint, listed
from hardpoint.weights.loading import standard_name

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_MATRIX = re.compile(rf"{re.escape(_PREFIX)}(.+)\.lora_([AB])\.weight")
_WITHOUT_EFFECT = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
    }
)
"""Entries of the configuration that the weights beside it, or their places, already say, or that are for training."""
_USED = frozenset(
    {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "bias"}
)
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of `init_lora_weights` with which training starts from other weights of the model than its checkpoint's."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """What an adapter adds to one linear layer: `scale * up @ down`.

    Attributes:
        down: the matrix A, [rank, inputs], on the host.
        up: the matrix B, [outputs, rank].
    """

    down: Tensor
    up: Tensor
    scale: float

    @property
    def rank(self) -> int:
        return len(self.down)


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter on the host.

    Attributes:
        layers: by the checkpoint name of the layer that each is added to, without ".weight".
    """

    layers: Mapping[str, LowRank]

    @property
    def nbytes(self) -> int:
        return sum(layer.down.nbytes + layer.up.nbytes for layer in self.layers.values())


def read_adapter(path: str, targets: Mapping[str, tuple[int, int]], max_rank: int, dtype: torch.dtype) -> Adapter:
    """Return the adapter of a folder, in `dtype`; raises InvalidAdapter.

    Args:
        targets: (outputs, inputs) of all linear layers that adapters are added to, by their checkpoint names without ".weight".
    """
    try:
        return _read(Path(path), targets, max_rank, dtype)
    except InvalidAdapter:
        raise
    except (HardpointError, OSError, ValueError) as error:
        raise InvalidAdapter(f"the adapter in {path} cannot be read", found=str(error)) from error


def _read(folder: Path, targets: Mapping[str, tuple[int, int]], max_rank: int, dtype: torch.dtype) -> Adapter:
    config = _config(folder)
    weights = folder / _WEIGHTS
    if not weights.is_file():
        raise InvalidAdapter(
            f"the adapter in {folder} has no weights",
            found=f"no {_WEIGHTS}",
            hint="Save it with PEFT's save_pretrained(), in safetensors",
        )
    checkpoint = SafetensorsCheckpoint([weights])
    matrices = _matrices(folder, checkpoint.shapes(), targets)
    own_names = {name: _own_name(down) for name, (down, _) in matrices.items()}
    _check_targets(folder, config, own_names, targets.keys())
    layers = {}
    for name, (down, up) in matrices.items():
        shapes = checkpoint.shapes()
        rank = _pattern(config, "rank_pattern", own_names[name], config["r"])
        alpha = _pattern(config, "alpha_pattern", own_names[name], config["lora_alpha"])
        outputs, inputs = targets[name]
        expected = (rank, inputs), (outputs, rank)
        if (shapes[down], shapes[up]) != expected:
            raise InvalidAdapter(
                f"the adapter in {folder} was made for another model, or its rank is not what its configuration says",
                found=f"A {list(shapes[down])} and B {list(shapes[up])} for {name}",
                hint=f"With rank {rank} this model takes A {list(expected[0])} and B {list(expected[1])}",
            )
        if rank > max_rank:
            raise InvalidAdapter(
                f"the adapter in {folder} has a rank of {rank}",
                found=f"an engine for ranks up to {max_rank}",
                hint=f"Make the engine with max_lora_rank={rank}",
            )
        scale = alpha / (math.sqrt(rank) if config["use_rslora"] else rank)
        layers[name] = LowRank(_values(checkpoint, down, dtype), _values(checkpoint, up, dtype), scale)
    return Adapter(layers)


def _config(folder: Path) -> dict[str, Any]:
    """Return what is used of the configuration; raises InvalidAdapter for what is not computed here."""
    file = folder / _CONFIG
    if not file.is_file():
        raise InvalidAdapter(
            f"{folder} is no folder of a LoRA adapter",
            found=f"no {_CONFIG}",
            hint="Give a folder that PEFT's save_pretrained() wrote",
        )
    values = json.loads(file.read_text("utf-8"))
    if not isinstance(values, dict) or values.get("peft_type") != "LORA":
        kind = values.get("peft_type") if isinstance(values, dict) else type(values).__name__
        raise InvalidAdapter(f"{file} is not of a LoRA adapter", found=f"peft_type {kind!r}")
    if values.get("bias", "none") != "none":
        raise InvalidAdapter(
            f"the adapter in {folder} has biases, which are not added", found=f"bias={values['bias']!r}", hint=_MERGE
        )
    unknown = sorted(name for name, value in values.items() if name not in _USED | _WITHOUT_EFFECT and value)
    start = values.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower().startswith(_CHANGE_THE_BASE):
        unknown.append("init_lora_weights")
    if unknown:
        found = ", ".join(f"{name}={values[name]!r}" for name in unknown)
        raise InvalidAdapter(f"the adapter in {folder} needs what is not computed here", found=found, hint=_MERGE)
    used = {
        "r": values.get("r"),
        "lora_alpha": values.get("lora_alpha"),
        "use_rslora": values.get("use_rslora", False),
        "rank_pattern": values.get("rank_pattern") or {},
        "alpha_pattern": values.get("alpha_pattern") or {},
        "target_modules": values.get("target_modules"),
        "layers": values.get("layers_to_transform") is None and not values.get("exclude_modules"),
    }
    ranks = [used["r"], *_numbers(used["rank_pattern"])]
    alphas = [used["lora_alpha"], *_numbers(used["alpha_pattern"])]
    is_flag = isinstance(used["use_rslora"], bool)
    if not (all(map(_is_rank, ranks)) and all(map(_is_alpha, alphas)) and is_flag):
        found = f"r={used['r']!r}, lora_alpha={used['lora_alpha']!r}, use_rslora={used['use_rslora']!r}"
        patterns = f", rank_pattern={used['rank_pattern']!r}, alpha_pattern={used['alpha_pattern']!r}"
        raise InvalidAdapter(
            f"{file} has impossible values",
            found=found + patterns,
            hint="Ranks are whole numbers from 1 on, and alphas numbers",
        )
    return used


_MERGE = "Merge it into the model with PEFT's merge_and_unload(), and serve that"


def _numbers(pattern: Any) -> list[Any]:
    return list(pattern.values()) if isinstance(pattern, dict) else [None]


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_alpha(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _matrices(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], targets: Mapping[str, tuple[int, int]]
) -> dict[str, tuple[str, str]]:
    """Return the names of the tensors A and B of each layer, by its checkpoint name."""
    found: dict[str, dict[str, str]] = {}
    strange = []
    weights = {f"{name}.weight": shape for name, shape in targets.items()}
    for tensor in shapes:
        match = _MATRIX.fullmatch(tensor)
        name = "" if match is None else standard_name(f"{match[1]}.weight", weights).removesuffix(".weight")
        if match is None or name not in targets or match[2] in found.get(name, {}):
            strange.append(tensor)
        else:
            found.setdefault(name, {})[match[2]] = tensor
    if strange or not found:
        raise InvalidAdapter(
            f"the adapter in {folder} was made for another model, or has more than matrices of linear layers",
            found=listed(strange) if strange else "no tensors",
            hint=f"Adapters of this model are for {', '.join(sorted({name.rpartition('.')[2] for name in targets}))}",
        )
    single = sorted(name for name, pair in found.items() if len(pair) < 2)
    if single:
        raise InvalidAdapter(f"the adapter in {folder} is not whole", found=f"one matrix of two for {listed(single)}")
    return {name: (pair["A"], pair["B"]) for name, pair in found.items()}


def _own_name(tensor: str) -> str:
    """Return what the model that the adapter was trained with calls the layer of a matrix."""
    return tensor.removeprefix(_PREFIX).rpartition(".lora_")[0]


def _check_targets(folder: Path, config: Mapping[str, Any], present: Mapping[str, str], targets: Any) -> None:
    """Compare the layers that there are weights for, by name with the adapter's own, with those that the configuration lists."""
    wanted = config["target_modules"]
    if not isinstance(wanted, list) or not all(isinstance(one, str) for one in wanted):
        return  # a regular expression, or none: the weights say it
    own_names = {name: present.get(name, name) for name in targets}
    named = {name for name, own in own_names.items() if any(own == one or own.endswith(f".{one}") for one in wanted)}
    missing, more = sorted(named - set(present)), sorted(set(present) - named)
    if more or (missing and config["layers"]):
        raise InvalidAdapter(
            f"the adapter in {folder} does not have the layers that its target_modules say",
            found=f"{listed(more)} beside them" if more else f"nothing for {listed(missing)}",
            hint=f"Its target_modules are {', '.join(wanted)}",
        )


def _pattern(config: Mapping[str, Any], pattern: str, name: str, default: Any) -> Any:
    """Return the value of the first key that the end of a layer's name matches, as PEFT does."""
    for key, value in config[pattern].items():
        try:
            if re.fullmatch(rf"(.*\.)?({key})", name):
                return value
        except re.error as error:
            raise InvalidAdapter(
                f"{pattern} has a key that is no regular expression", found=f"{key!r}: {error}"
            ) from error
    return default


def _values(checkpoint: SafetensorsCheckpoint, name: str, dtype: torch.dtype) -> Tensor:
    import torch

    values = torch.cat([rows for _, rows in checkpoint.rows(name)]).to(dtype)
    if not bool(values.isfinite().all()):
        raise CorruptWeights(f"{name} has values that are not finite in {dtype}", found="NaN or infinity")
    return values.contiguous()
