"""config.json as it is written: read, overridden, and understood as far as it takes to choose who reads the rest of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hardpoint.interfaces.errors import ConfigError, ModelError, UnsupportedArchitecture
from hardpoint.models.config import FULL
from hardpoint.models.registry import ARCHITECTURES, ENCODERS, architecture_of
from hardpoint.validation import did_you_mean, shown
from hardpoint.weights.float8_formats import Float8Format
from hardpoint.weights.integer_formats import IntegerFormat
from hardpoint.weights.kv_scales import quantises_weights

_OVERRIDES = frozenset(
    {
        *("architectures", "id2label", "label2id", "max_position_embeddings", "num_labels", "problem_type"),
        *("classifier_from_token", "is_original_qwen3_reranker", "method", "use_sep_token"),
        *("is_matryoshka", "matryoshka_dimensions", "sentence_transformers", "sbert_ce_default_activation_function"),
        *("rope_parameters", "rope_scaling", "rope_theta", "sliding_window", "tie_word_embeddings"),
    }
)
"""Values that are read of configurations, and that a file need not have."""


_OF_ROPE = ("rope_theta", "partial_rotary_factor", "rope_scaling")
"""What later configurations, of transformers 5, say in `rope_parameters`."""


def overridden(written: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with other values; raises ConfigError for one that nothing would read."""
    text = written.get("text_config")
    language = dict(text) if isinstance(text, Mapping) else {}
    for name in overrides:
        if name not in written and name not in language and name not in _OVERRIDES:
            raise ConfigError(
                f"hf_overrides names {shown(name)}, which nothing reads",
                found="it is not in the model's configuration",
                hint=did_you_mean(name, {*written, *language, *_OVERRIDES}),
            )
    merged = dict(written)
    for name, value in overrides.items():
        before = merged.get(name)
        place = "rope_parameters" if isinstance(merged.get("rope_parameters"), Mapping) else "rope_scaling"
        if name == place or (name in _OF_ROPE and place == "rope_parameters"):
            change = value if name in (place, "rope_scaling") else {name: value}
            merged[place] = _with_rope(merged.get(place), change)
        elif not isinstance(before, Mapping) or not isinstance(value, Mapping):
            merged[name] = value
        else:
            merged[name] = overridden(language, value) if name == "text_config" else {**before, **value}
        if language and name not in written:
            # It is the language model's, whose values have a place of their own.
            merged["text_config"] = overridden(merged["text_config"], {name: value})
    return merged


def with_one_rope(written: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration that says once how positions are rotated: of both names the former counts, as transformers reads them."""
    kept, text, given = dict(written), written.get("text_config"), written.get("rope_parameters")
    if isinstance(text, Mapping):
        kept["text_config"] = with_one_rope(text)
    if written.get("rope_scaling") and isinstance(given, Mapping):
        # Types of layers that have their own are more than the former name could say.
        of_layers = any(isinstance(value, Mapping) for value in given.values())
        kept.pop("rope_scaling" if of_layers else "rope_parameters")
    return kept


def _with_rope(before: Any, change: Any) -> Any:
    """Return rotary parameters with other ones; None is no scaling.

    Where types of layers have their own, those that are said of none are of the layers without a window, as transformers reads
    them of older configurations.
    """
    if change is None:
        change = {"rope_type": "default"}
    if not isinstance(change, Mapping):
        return change
    if "type" in change:
        change = {"rope_type": change["type"], **change}
    merged = dict(before) if isinstance(before, Mapping) else {}
    nested = any(isinstance(value, Mapping) for value in merged.values())
    for name, value in change.items():
        if isinstance(value, Mapping):
            merged[name] = {**(merged.get(name) or {}), **value}
        elif nested:
            merged[FULL] = {**(merged.get(FULL) or {}), name: value}
        else:
            merged[name] = value
    return merged


def language_values(folder: Path, written: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of the language model, with what the whole one says for all its parts."""
    text = written.get("text_config")
    if not isinstance(text, Mapping):
        raise ModelError(f"{folder / 'config.json'} is not a usable configuration", found=f"text_config={shown(text)}")
    of_all = ("dtype", "torch_dtype", "eos_token_id", "quantization_config")
    return {**{name: written[name] for name in of_all if name in written}, **text}


def picture_values(written: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a configuration says beside its language model's: of pictures, and of the head, which is the whole model's."""
    parts = ("vision_config", "text_config", "scale_factor", "image_token_id")
    found = {name: written[name] for name in parts if name in written}
    return {**found, "tie_word_embeddings": written.get("tie_word_embeddings", False)}


def read_json(file: Path) -> dict[str, Any]:
    """Return the object that a file has; raises ModelError."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read", found=str(error), hint="Download the file again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} cannot be read", found=f"a JSON {type(content).__name__} instead of an object")
    return content


_MAX_COUNTS = dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), 1 << 16) | {
    "num_labels": 1 << 20
}
"""Beyond any model's: transformers' configurations make an entry for each of them, whatever they are read for."""


def check_counts(file: Path, written: Mapping[str, Any]) -> None:
    """Raise ModelError for a number, of the model or a part of it, of which transformers would make a list without end."""
    for part in (written, *(value for value in written.values() if isinstance(value, Mapping))):
        for name, most in _MAX_COUNTS.items():
            value = part.get(name)
            if isinstance(value, (int, float)) and not value <= most:
                raise ModelError(
                    f"{file} is not a usable configuration", found=f"{name} is {shown(value)}, not at most {most}"
                )


def transformers_config(folder: Path, trust_remote_code: bool) -> Any:
    """Return what transformers makes of a folder's config.json; raises ModelError, UnsupportedArchitecture."""
    written = read_json(folder / "config.json")
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code, local_files_only=True)
    except (ValueError, KeyError) as error:
        if "model_type" in written and not _knows(written["model_type"]):
            raise UnsupportedArchitecture(
                f"the architecture of {folder} is not known",
                found=f"{shown(written.get('architectures') or 'no architecture')} "
                f"(model_type {written['model_type']!r})",
                hint=supported_architectures(),
            ) from error
        raise ModelError(f"{folder / 'config.json'} is not a usable configuration", found=str(error)) from error
    except Exception as error:  # transformers raises validation errors of its own and of its dependencies
        raise ModelError(f"{folder / 'config.json'} is not a usable configuration", found=str(error)) from error


def _knows(model_type: str) -> bool:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return model_type in CONFIG_MAPPING_NAMES


def without_quantisation(config: Any) -> Any:
    """Return a configuration without what `quantisation` read, since transformers would look for the tool that wrote it."""
    config.__dict__.pop("quantization_config", None)
    return config


def quantisation(
    folder: Path, config: Mapping[str, Any]
) -> tuple[Mapping[str, Any], IntegerFormat | Float8Format | None]:
    """Return how the KV cache was calibrated, and in which format matrices are quantised; refuse formats that are not read."""
    given: Any = config.get("quantization_config")
    if given is None:
        beside = folder / "hf_quant_config.json"
        given = read_json(beside) if beside.is_file() else {}
    if not isinstance(given, Mapping):
        raise ModelError(
            f"{folder / 'config.json'} is not a usable configuration", found=f"quantization_config {given!r}"
        )
    format: IntegerFormat | Float8Format | None = None
    try:
        if given and quantises_weights(given):
            format = Float8Format.of(given, str(folder)) or IntegerFormat.of(given, str(folder))
    except (TypeError, ValueError, AttributeError) as error:  # of a value that is of another type than it must be
        raise ModelError(
            f"{folder} has no usable quantization_config",
            found=str(error),
            hint="Download its config.json again",
        ) from error
    return dict(given), format


def named_architecture(folder: Path, written: Mapping[str, Any]) -> str:
    """Return the architecture that a configuration names, or that its model type stands for; raises UnsupportedArchitecture."""
    named = written.get("architectures")
    if isinstance(named, list) and named:
        return str(named[0])
    model_type = written.get("model_type")
    derived = architecture_of(model_type)
    if derived is not None:
        return derived
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(model_type))
    if found is None:
        raise UnsupportedArchitecture(
            f"{folder} does not name an architecture, and its model type has no decoder",
            found=f"model_type {model_type!r}",
            hint=supported_architectures(),
        )
    return str(found)


def supported_architectures() -> str:
    """Return, for a hint, which architectures run."""
    return (
        f"Native decoders: {', '.join(ARCHITECTURES)}. Encoders: {', '.join(ENCODERS)}. "
        "Other causal decoders of transformers run where their "
        "attention goes through its attention interface and is plain, windowed or soft-capped softmax attention"
    )
