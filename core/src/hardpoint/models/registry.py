"""Which family runs an architecture: a line for each, by the name that checkpoints give it.

A new family is a file like `llama.py` and its lines here. Nothing is imported before it is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from hardpoint.models.family import Family


class _Entry(NamedTuple):
    """Where a family is.

    Attributes:
        module: of this package.
        model_type: what configurations call it.
        bare: architecture of the family's bare model; empty for `<class>Model`.
        whole: architecture of models that have the family's beside parts for pictures; empty where there are none.
        pictures: the family's models take pictures; they are `<class>ForConditionalGeneration`.
        encoder: the family is of encoders, which have no `<class>ForCausalLM`; a `<class>ForMaskedLM` runs without its head.
        rewards: there are reward models of the family whose head has two layers, for each token.
    """

    module: str
    model_type: str
    bare: str = ""
    whole: str = ""
    encoder: bool = False
    rewards: bool = False
    pictures: bool = False

    def architectures(self, name: str) -> tuple[str, ...]:
        """Return what the family runs, its main architecture first."""
        if self.pictures:
            return (f"{name}ForConditionalGeneration",)
        bare = self.bare or f"{name}Model"
        stem = bare.removesuffix("Model")
        own = (bare, f"{name}ForMaskedLM") if self.encoder else (f"{name}ForCausalLM", bare)
        heads = ("SequenceClassification", "TokenClassification", *(_REWARDS if self.rewards else ()))
        return (*own, *(f"{stem}For{head}" for head in heads))


_REWARDS = ("RewardModel", "ProcessRewardModel")

_FAMILIES = {
    "Llama": _Entry("llama", "llama"),
    "Llama4": _Entry("llama4", "llama4_text", "Llama4TextModel", "Llama4ForConditionalGeneration"),
    "Mistral": _Entry("llama", "mistral"),
    "Qwen2": _Entry("qwen2", "qwen2", rewards=True),
    "Qwen3": _Entry("qwen3", "qwen3"),
    "Mixtral": _Entry("mixtral", "mixtral"),
    "Qwen2Moe": _Entry("qwen2_moe", "qwen2_moe"),
    "Qwen3Moe": _Entry("qwen3_moe", "qwen3_moe"),
    "Qwen3Next": _Entry("qwen3_next", "qwen3_next"),
    "GptOss": _Entry("gpt_oss", "gpt_oss"),
    "DeepseekV2": _Entry("deepseek", "deepseek_v2"),
    "DeepseekV3": _Entry("deepseek", "deepseek_v3"),
    "Phi3": _Entry("phi3", "phi3"),
    "Olmo2": _Entry("olmo2", "olmo2"),
    "Granite": _Entry("granite", "granite"),
    "GraniteMoeHybrid": _Entry("granite_hybrid", "granitemoehybrid"),
    "FalconH1": _Entry("falcon_h1", "falcon_h1"),
    "Lfm2": _Entry("lfm2", "lfm2"),
    "NemotronH": _Entry("nemotron_h", "nemotron_h"),
    "Gemma": _Entry("gemma", "gemma"),
    "Gemma2": _Entry("gemma2", "gemma2"),
    "Gemma3": _Entry("gemma3", "gemma3_text", "Gemma3TextModel"),
    "Idefics3": _Entry("idefics3", "idefics3", pictures=True),
    "SmolVLM": _Entry("idefics3", "smolvlm", pictures=True),
    "Qwen2_5_VL": _Entry("qwen2_5_vl", "qwen2_5_vl", pictures=True),
    "Bert": _Entry("bert", "bert", encoder=True),
    "Roberta": _Entry("bert", "roberta", encoder=True),
    "XLMRoberta": _Entry("bert", "xlm-roberta", encoder=True),
    "ModernBert": _Entry("modernbert", "modernbert", encoder=True),
}
"""By a family's class, whose name is what its architecture's begins with."""

ARCHITECTURES = tuple(entry.architectures(name)[0] for name, entry in _FAMILIES.items() if not entry.encoder)
"""Architectures that generate and that the core runs itself; their bare models (`LlamaModel`, ...) run too."""
ENCODERS = tuple(entry.architectures(name)[0] for name, entry in _FAMILIES.items() if entry.encoder)
"""Encoders that the core runs; all families run with heads that classify texts or tokens (`BertForSequenceClassification`, ...) too."""


def family_of(architecture: str) -> type[Family] | None:
    """Return the family that runs an architecture, None where none of the core's does."""
    name = _name(architecture)
    if name is None:
        return None
    family: type[Family] = getattr(import_module(f"hardpoint.models.{_FAMILIES[name].module}"), name)
    return family


def converted(architecture: str, use: str) -> str:
    """Return the architecture of the same layers without a head ("embed"), or with one that labels texts ("classify").

    One that has such a use anyway, and one of no family of the core, is returned as it is.
    """
    name = _name(architecture)
    if name is None or _FAMILIES[name].pictures:
        return architecture
    known = _FAMILIES[name].architectures(name)
    generates = not _FAMILIES[name].encoder and architecture == known[0]
    bare = known[1] if generates else architecture
    if use == "embed":
        return bare
    labels = next(one for one in known if one.endswith("ForSequenceClassification"))
    return labels if generates or architecture in known[:2] else architecture


def is_known(architecture: str) -> bool:
    """Whether a family of the core runs an architecture; imports nothing."""
    return _name(architecture) is not None


def architecture_of(model_type: object) -> str | None:
    """Return the architecture of a configuration that names none, None where its type is no family's."""
    found = (entry.architectures(name)[0] for name, entry in _FAMILIES.items() if entry.model_type == model_type)
    return next(found, None)


def language_part(architecture: str) -> str | None:
    """Return the architecture of the language model of one that has more, where a family runs it; None for any other."""
    return next((f"{name}ForCausalLM" for name, entry in _FAMILIES.items() if entry.whole == architecture), None)


def takes_pictures(architecture: str) -> bool:
    """Whether a family of the core runs an architecture with its parts for pictures."""
    name = _name(architecture)
    return name is not None and _FAMILIES[name].pictures


def _name(architecture: str) -> str | None:
    for name, entry in _FAMILIES.items():
        if architecture in entry.architectures(name):
            return name
    return None
