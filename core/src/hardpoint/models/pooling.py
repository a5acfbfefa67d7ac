"""How a model's hidden states become an embedding, as sentence-transformers' files beside it say: `modules.json` and what that names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from hardpoint.interfaces.batch import Pooling
from hardpoint.interfaces.errors import ModelError, UnsupportedArchitecture
from hardpoint.validation import shown

_MODULES = "modules.json"
_MODES = {
    "cls": Pooling.CLS,
    "cls_token": Pooling.CLS,
    "lasttoken": Pooling.LAST,
    "mean": Pooling.MEAN,
    "mean_tokens": Pooling.MEAN,
}
"""By the names of `pooling_mode`, and the middles of `pooling_mode_..._tokens`."""
_DENSE_ACTIVATIONS = {"Identity": "identity", "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu"}


@dataclass(frozen=True)
class DenseModule:
    """A dense layer after the pooling: `activation(x @ weight.T + bias)`.

    Attributes:
        path: its folder beside the model, which its tensors' names begin with.
    """

    path: str
    in_features: int
    out_features: int
    bias: bool
    activation: str


@dataclass(frozen=True)
class PoolingFiles:
    """What the files say.

    Attributes:
        pooling: of the hidden states; None where they do not say it.
        normalize: embeddings have the length 1.
        max_length: most tokens of a text; None for as many as the model takes.
        dense: layers between pooling and normalisation.
    """

    pooling: Pooling | None = None
    normalize: bool = True
    max_length: int | None = None
    dense: tuple[DenseModule, ...] = ()


def read_pooling(folder: Path) -> PoolingFiles:
    """Read the files of a model's folder; what they do not say is as it is for models without such files.

    Raises:
        ModelError: a file cannot be read, or has values that cannot be.
        UnsupportedArchitecture: they name a module or a pooling that is not run here.
    """
    modules = folder / _MODULES
    if not modules.is_file():
        return PoolingFiles()
    pooling, normalize, max_length, dense = None, False, None, []
    for module in _read(modules, list):
        if not isinstance(module, Mapping) or not isinstance(module.get("type"), str):
            raise ModelError(f"{modules} cannot be used", found=f"the module {shown(module)}")
        kind, path = module["type"].rpartition(".")[2], str(module.get("path", ""))
        if kind == "Transformer":
            max_length = _max_length(folder / path)
        elif kind == "Pooling":
            pooling = _pooling(folder / path / "config.json")
        elif kind == "Dense" and pooling is not None and not normalize:
            dense.append(_dense(folder, path))
        elif kind == "Normalize":
            normalize = True
        else:
            raise UnsupportedArchitecture(
                f"{modules} names a module that is not run here",
                found=module["type"],
                hint="Modules are Transformer, Pooling, Dense and Normalize, in this order",
            )
    return PoolingFiles(pooling, normalize, max_length, tuple(dense))


def _pooling(file: Path) -> Pooling:
    values: dict[str, Any] = _read(file, dict)
    named = values.get("pooling_mode")
    modes = [str(named)] if named is not None else []
    modes += [
        name.removeprefix("pooling_mode_")
        for name, on in values.items()
        if on is True and name.startswith("pooling_mode_")
    ]
    found = [_MODES.get(mode) for mode in dict.fromkeys(modes)]
    if len(found) != 1 or found[0] is None:
        raise UnsupportedArchitecture(
            f"{file} asks for a pooling that is not done here",
            found=", ".join(modes) or "no pooling_mode",
            hint="One of cls_token, mean_tokens and lasttoken is",
        )
    if values.get("include_prompt") is False:
        raise UnsupportedArchitecture(f"{file} leaves prompts out of the pooling", found="include_prompt is false")
    return found[0]


def _dense(folder: Path, path: str) -> DenseModule:
    file = folder / path / "config.json"
    values: dict[str, Any] = _read(file, dict)
    inputs, outputs = values.get("in_features"), values.get("out_features")
    if not (_is_size(inputs) and _is_size(outputs)) or "/" in path or not path:
        raise ModelError(
            f"{file} cannot be used", found=f"in_features is {shown(inputs)}, out_features {shown(outputs)}"
        )
    activation = str(values.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if activation not in _DENSE_ACTIVATIONS:
        raise UnsupportedArchitecture(
            f"{file} names an activation that is not done here",
            found=activation,
            hint=f"One of {', '.join(_DENSE_ACTIVATIONS)} is",
        )
    bias = values.get("bias", True) is not False
    return DenseModule(path, inputs, outputs, bias, _DENSE_ACTIVATIONS[activation])


def _is_size(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 < value < 1 << 24


def _max_length(folder: Path) -> int | None:
    file = folder / "sentence_bert_config.json"
    value = _read(file, dict).get("max_seq_length") if file.is_file() else None
    if value is not None and (type(value) is not int or value < 1):
        raise ModelError(f"{file} cannot be used", found=f"max_seq_length is {shown(value)}")
    return value


def _read(file: Path, kind: type) -> Any:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read", found=str(error), hint="Download the file again") from error
    if not isinstance(content, kind):
        raise ModelError(f"{file} cannot be read", found=f"a JSON {type(content).__name__}")
    return content
