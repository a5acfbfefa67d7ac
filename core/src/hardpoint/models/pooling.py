"""How a model's hidden states become embeddings and labels, as its configuration and sentence-transformers' files beside it say."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from hardpoint.interfaces.batch import Pooling
from hardpoint.interfaces.errors import ModelError, UnsupportedArchitecture
from hardpoint.validation import shown

if TYPE_CHECKING:
    from hardpoint.models.config import ModelConfig

_MODULES = "modules.json"
_MODES = {
    "cls": Pooling.CLS,
    "cls_token": Pooling.CLS,
    "lasttoken": Pooling.LAST,
    "mean": Pooling.MEAN,
    "mean_tokens": Pooling.MEAN,
}
"""By the names of `pooling_mode`, and the middles of `pooling_mode_..._tokens`."""
_OF_TRANSFORMERS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
"""What a Transformer's own file was named after; all of them are read, as sentence-transformers and vLLM do."""
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
        lowers: texts are read in lower case.
        dense: layers between pooling and normalisation.
    """

    pooling: Pooling | None = None
    normalize: bool = True
    max_length: int | None = None
    lowers: bool = False
    dense: tuple[DenseModule, ...] = ()


class LabelActivation(StrEnum):
    """What turns logits of labels into what is returned of them.

    PROBABILITIES: softmax, or sigmoid where there is a single label. The others work on each label alone.
    """

    PROBABILITIES = "probabilities"
    SIGMOID = "sigmoid"
    TANH = "tanh"
    IDENTITY = "identity"


_PROBLEMS = {
    "regression": LabelActivation.IDENTITY,
    "single_label_classification": LabelActivation.PROBABILITIES,
    "multi_label_classification": LabelActivation.SIGMOID,
}
"""By the names of `problem_type` in configurations."""
_LABEL_ACTIVATIONS = {
    "Identity": LabelActivation.IDENTITY,
    "Sigmoid": LabelActivation.PROBABILITIES,
    "Softmax": LabelActivation.PROBABILITIES,
    "Tanh": LabelActivation.TANH,
}
"""By the names of torch's modules. Sentence-transformers writes Sigmoid for models whose only label it is of, as vLLM reads it."""


@dataclass(frozen=True)
class PoolingDefaults:
    """What a model's files say of its results, beside the pooling itself.

    Attributes:
        normalize: embeddings have the length 1.
        activation: of labels.
        label_names: of the labels, in order; empty for a model without.
        dimensions: lengths to which embeddings may be cut (Matryoshka, arXiv:2205.13147); empty for a model that is not trained for it.
        separates: the two texts of a pair have the tokenizer's separator between them.
    """

    normalize: bool = True
    activation: LabelActivation = LabelActivation.PROBABILITIES
    label_names: tuple[str, ...] = ()
    dimensions: Sequence[int] = ()
    separates: bool = True


def pooling_defaults(config: ModelConfig, files: PoolingFiles) -> PoolingDefaults:
    """Return what a configuration and the files beside it say of results; raises ModelError, UnsupportedArchitecture."""
    return PoolingDefaults(
        files.normalize,
        _label_activation(config),
        config.label_names,
        _dimensions(config),
        config.flag("use_sep_token", config.head_tokens is None),
    )


def _label_activation(config: ModelConfig) -> LabelActivation:
    problem = config.values.get("problem_type")
    if isinstance(problem, str) and problem in _PROBLEMS:
        return _PROBLEMS[problem]
    named = config.mapping("sentence_transformers").get("activation_fn")
    named = named or config.values.get("sbert_ce_default_activation_function")
    if not config.num_labels or named is None:
        return LabelActivation.PROBABILITIES
    activation = str(named).rpartition(".")[2]
    if activation not in _LABEL_ACTIVATIONS:
        raise UnsupportedArchitecture(
            f"{config.where} names an activation of labels that is not done here",
            found=shown(named),
            hint=f"One of {', '.join(_LABEL_ACTIVATIONS)} is",
        )
    return _LABEL_ACTIVATIONS[activation]


def _dimensions(config: ModelConfig) -> Sequence[int]:
    listed = config.integers("matryoshka_dimensions")
    if not listed and not config.flag("is_matryoshka"):
        return ()
    size = config.dense[-1].out_features if config.dense else config.hidden_size
    if any(not 0 < one <= size for one in listed):
        raise ModelError(
            f"{config.where} is not a usable configuration",
            found=f"matryoshka_dimensions is {shown(listed)}, and embeddings have {size} elements",
        )
    return listed or range(1, size + 1)


def read_pooling(folder: Path) -> PoolingFiles:
    """Read the files of a model's folder; what they do not say is as it is for models without such files.

    Raises:
        ModelError: a file cannot be read, or has values that cannot be.
        UnsupportedArchitecture: they name a module or a pooling that is not run here.
    """
    modules = folder / _MODULES
    if not modules.is_file():
        return PoolingFiles()
    pooling, normalize, max_length, lowers, dense = None, False, None, False, []
    for module in _read(modules, list):
        if not isinstance(module, Mapping) or not isinstance(module.get("type"), str):
            raise ModelError(f"{modules} cannot be used", found=f"the module {shown(module)}")
        kind, path = module["type"].rpartition(".")[2], str(module.get("path", ""))
        if kind == "Transformer":
            max_length, lowers = _texts(folder / path)
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
    return PoolingFiles(pooling, normalize, max_length, lowers, tuple(dense))


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


def _texts(folder: Path) -> tuple[int | None, bool]:
    """Return the most tokens of a text, and whether it is read in lower case."""
    file = next(
        (found for name in _OF_TRANSFORMERS if (found := folder / f"sentence_{name}_config.json").is_file()), None
    )
    if file is None:
        return None, False
    values: dict[str, Any] = _read(file, dict)
    length, lowers = values.get("max_seq_length"), values.get("do_lower_case", False)
    if length is not None and (type(length) is not int or length < 1):
        raise ModelError(f"{file} cannot be used", found=f"max_seq_length is {shown(length)}")
    if not isinstance(lowers, bool):
        raise ModelError(f"{file} cannot be used", found=f"do_lower_case is {shown(lowers)}")
    return length, lowers


def _read(file: Path, kind: type) -> Any:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read", found=str(error), hint="Download the file again") from error
    if not isinstance(content, kind):
        raise ModelError(f"{file} cannot be read", found=f"a JSON {type(content).__name__}")
    return content
