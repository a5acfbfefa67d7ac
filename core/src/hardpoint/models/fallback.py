"""Any other causal decoder: transformers' modelling code, with the backend's attention as its attention function.

What a model asks of attention is observed, not guessed: `attention_layers` runs it once on the meta device with an attention function
that writes down what every layer passes. A loaded model is then compared with transformers' own eager attention on a few
tokens, so that a model which the observation misjudged is refused and never served wrong.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from hardpoint.interfaces.allocator import KV_CACHE, WEIGHTS
from hardpoint.interfaces.attention import KVCacheGroup, places_of
from hardpoint.interfaces.batch import EmbeddingKind, StepBatch, in_groups
from hardpoint.interfaces.capabilities import AttentionLayer
from hardpoint.interfaces.dtypes import DType
from hardpoint.interfaces.errors import ConfigError, CorruptWeights, ModelError, UnsupportedArchitecture
from hardpoint.models.base import RunnableModel
from hardpoint.models.config_file import supported_architectures
from hardpoint.models.registry import is_known
from hardpoint.weights.kv_scales import ScalesInUse, is_scale, unscaled
from hardpoint.weights.loading import check_tensors
from hardpoint.weights.sources import WeightReloader

if TYPE_CHECKING:
    from hardpoint.interfaces.allocator import DeviceAllocator
    from hardpoint.interfaces.attention import AttentionBackend
    from hardpoint.models.source import ModelSource

logger = logging.getLogger(__name__)

_INTERFACE = "hardpoint"
_PROBE_TOKENS = 5
# What a model may hand to its attention function as a tensor without changing the softmax.
_HARMLESS_TENSORS = frozenset({"position_ids", "cache_position", "logits_to_keep", "position_embeddings"})
_HARMLESS_TYPES = (bool, int, float, str, type(None))


@dataclass
class _Probe:
    """Notes every call of the attention function."""

    layers: dict[int, AttentionLayer] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, options: dict[str, Any]) -> Tensor:
        index = getattr(module, "layer_idx", None)
        name = f"{type(module).__name__} of layer {index}"
        if not isinstance(index, int) or index in self.layers:
            self.reasons.append(f"{name} calls attention without a layer number of its own")
            return q.new_empty((1, q.shape[2], q.shape[1], v.shape[-1]))
        if options.get("is_causal", getattr(module, "is_causal", True)) is False:
            self.reasons.append(f"{name} is not causal")
        if mask is not None:
            self.reasons.append(f"{name} adds a mask or bias of its own")
        if k.shape[-1] != q.shape[-1] or v.shape[-1] != q.shape[-1]:
            self.reasons.append(f"{name} has keys of {k.shape[-1]} and values of {v.shape[-1]} elements")
        self.reasons.extend(f"{name} passes {option} to its attention" for option in _unknown(options))
        self.layers[index] = AttentionLayer(
            num_heads=q.shape[1],
            num_kv_heads=k.shape[1],
            head_dim=q.shape[-1],
            scale=_scale(q, options),
            sliding_window=options.get("sliding_window"),
            soft_cap=options.get("softcap"),
            sinks=options.get("s_aux") is not None,
        )
        return q.new_empty((1, q.shape[2], q.shape[1], v.shape[-1]))


@dataclass(frozen=True)
class _Step:
    """One step under way: what the attention function needs beside its arguments."""

    attention: AttentionBackend
    layers: tuple[AttentionLayer, ...]
    kv_cache: Tensor
    metadata: tuple[Any, ...]
    places: tuple[tuple[int, int], ...]

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, options: dict[str, Any]) -> Tensor:
        number: int = module.layer_idx  # type: ignore[assignment]
        layer, (group, index) = self.layers[number], self.places[number]
        cache, metadata = self.kv_cache[index], self.metadata[group]
        seen = (_scale(q, options), options.get("sliding_window"), options.get("softcap"))
        if mask is not None or seen != (layer.scale, layer.sliding_window, layer.soft_cap):
            raise UnsupportedArchitecture(
                f"layer {number} asks for another attention than when it was planned",
                found=f"scale, window and soft cap {seen}, {'a' if mask is not None else 'no'} mask",
            )
        q, k, v = (_token_major(x) for x in (q, k, v))
        out = q.new_empty(q.shape)
        sinks = options.get("s_aux")
        self.attention.write_kv(index, k, v, cache, metadata)
        self.attention.forward(
            index, q, k, v, cache, metadata, out, sinks=None if sinks is None else sinks.float().contiguous()
        )
        return out[None]


_current: ContextVar[_Probe | _Step] = ContextVar("hardpoint_attention")


def _attention_function(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """The function that transformers calls: q, k, v [1, heads, tokens, dim] to ([1, tokens, heads, dim], no weights)."""
    return _current.get().attend(module, query, key, value, attention_mask, options), None


def _token_major(x: Tensor) -> Tensor:
    x = x[0].transpose(0, 1)
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _scale(q: Tensor, options: Mapping[str, Any]) -> float:
    given = options.get("scaling")
    return float(q.shape[-1] ** -0.5 if given is None else given)


def _unknown(options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        if name in ("s_aux", *_HARMLESS_TENSORS) or isinstance(value, _HARMLESS_TYPES):
            continue
        yield name


def attention_layers(source: ModelSource) -> tuple[AttentionLayer, ...]:
    """Return what each layer of a model asks of attention; raises UnsupportedArchitecture with the reasons.

    Refused are models whose attention does not go through transformers' attention interface, is not causal softmax attention, or
    adds biases or masks of its own (ALiBi, chunked attention), and models that mix tokens by other means (recurrence, convolution).
    """
    given = source.config
    reasons: list[str] = []
    probe = _Probe()
    try:
        config = _probe_config(given)
        with torch.device("meta"), _uninitialised():
            model = (
                _model_class(source)
                .from_config(
                    config,
                    attn_implementation=_registered(),
                    dtype=torch.bfloat16,
                    trust_remote_code=source.trust_remote_code,
                )
                .eval()
            )
        reasons += _obstacles(model)
        if not getattr(source.text_config, "is_causal", True):
            reasons.append("its attention is not causal")
        if not reasons:
            ids = torch.zeros((1, _PROBE_TOKENS), dtype=torch.long, device="meta")
            positions = torch.arange(_PROBE_TOKENS, device="meta")[None]
            with torch.no_grad(), _attending(probe):
                model(input_ids=ids, position_ids=positions, use_cache=False)
    except Exception as error:  # whatever modelling code raises when it is run in a way it was not made for
        reasons.append(f"its modelling code cannot be run with a foreign attention function ({_first_line(error)})")
    reasons += probe.reasons
    if not reasons:
        reasons += _disagreements(source.text_config, probe.layers)
    if reasons:
        raise _unsupported(source, reasons)
    return tuple(layer for _, layer in sorted(probe.layers.items()))


def _obstacles(model: nn.Module) -> list[str]:
    """Return what the module tree shows: tokens mixed by other means than attention, or positions that cannot be given."""
    reasons = []
    if getattr(model, "_is_stateful", False):
        reasons.append("it has a recurrent state")
    mixing = {type(m).__name__ for m in model.modules() if isinstance(m, (nn.Conv1d, nn.RNNBase))}
    if mixing:
        reasons.append(f"it mixes tokens by {', '.join(sorted(mixing))}")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        reasons.append("its positions cannot be given from outside")
    return reasons


def _disagreements(config: Any, layers: Mapping[int, AttentionLayer]) -> list[str]:
    """Return where the observed layers and the configuration differ.

    A model that applies a window only by its mask passes none to its attention function, and would lose it here.
    """
    count = int(config.num_hidden_layers)
    if sorted(layers) != list(range(count)):
        return [f"{len(layers)} of its {count} layers call attention through transformers' attention interface"]
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    reasons = []
    for index, layer in layers.items():
        kind = kinds[index] if kinds else "sliding_attention" if window is not None else "full_attention"
        if kind not in ("full_attention", "sliding_attention"):
            reasons.append(f"layer {index} is of the type {kind}")
        elif layer.sliding_window != (window if kind == "sliding_attention" else None):
            reasons.append(
                f"layer {index} passes a window of {layer.sliding_window} where the configuration says {kind} ({window})"
            )
    return reasons


def _unsupported(source: ModelSource, reasons: Iterable[str]) -> UnsupportedArchitecture:
    return UnsupportedArchitecture(
        f"{source.architecture} cannot be run", found="; ".join(dict.fromkeys(reasons)), hint=supported_architectures()
    )


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def _registered() -> str:
    from transformers import AttentionInterface

    AttentionInterface.register(_INTERFACE, _attention_function)
    return _INTERFACE


def _model_class(source: ModelSource) -> Any:
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto import modeling_auto

    if not source.is_generative:
        return AutoModel
    kind = source.config.model_type
    # Of models that the core runs with their pictures, one that it refuses does not come to run without them.
    as_decoder = kind in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or is_known(source.architecture)
    takes_pictures = kind in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return AutoModelForImageTextToText if takes_pictures and not as_decoder else AutoModelForCausalLM


def _uninitialised() -> AbstractContextManager[None]:
    try:
        from transformers.initialization import no_init_weights
    except ImportError:  # transformers 4
        try:
            from transformers.modeling_utils import no_init_weights
        except ImportError:
            return nullcontext()
    context: AbstractContextManager[None] = no_init_weights()
    return context


def _probe_config(config: Any) -> Any:
    """Return a copy without what looks at the values of tokens or positions, which meta tensors do not have."""
    config = copy.deepcopy(config)
    for part in {id(part): part for part in (config, config.get_text_config(decoder=True))}.values():
        _without_padding(part)
        given = getattr(part, "rope_parameters", None)
        if not given:
            continue
        nested = {key: value for key, value in given.items() if isinstance(value, dict)}
        part.rope_parameters = {key: _unscaled(value) for key, value in nested.items()} or _unscaled(given)
    return config


def _without_padding(config: Any) -> None:
    """Say that no token is padding: nothing is ever padded, and some models look for it in every step."""
    # Some configurations check what they are given, and want a number.
    object.__setattr__(config, "pad_token_id", None)


def _unscaled(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters without what depends on positions; families read more of them than rotary embeddings do."""
    return {**parameters, "rope_type": "default"}


@contextmanager
def _attending(handler: _Probe | _Step) -> Iterator[None]:
    token = _current.set(handler)
    try:
        yield
    finally:
        _current.reset(token)


class TransformersDecoder(RunnableModel):
    """A model of transformers whose attention is the backend's and whose weights are in the allocator's memory."""

    path: ClassVar[str] = "transformers"

    def __init__(
        self,
        model: Any,
        attention: AttentionBackend,
        layers: tuple[AttentionLayer, ...],
        groups: tuple[KVCacheGroup, ...],
        scales: ScalesInUse,
        torch_device: str,
        dtype: DType,
        seed: int | None,
    ) -> None:
        self._model = model
        self._dtype = dtype
        self._seed = seed
        self._attention = attention
        self._layers, self._places_in_cache = layers, places_of(groups)
        self._scales = scales
        self._device = torch.device(torch_device)
        self._base = getattr(model, "base_model", model)
        # What the head takes hidden states from: some call a part of the base model.
        self._decoders = [part for part in (self._base, getattr(self._base, "decoder", None)) if part is not None]
        self._output: Any = None

    @classmethod
    def load(
        cls,
        source: ModelSource,
        groups: tuple[KVCacheGroup, ...],
        attention: AttentionBackend,
        allocator: DeviceAllocator,
        torch_device: str,
        dummy_seed: int | None,
    ) -> TransformersDecoder:
        """Load by transformers' own conventions, move into the allocator's memory, and compare with eager attention.

        Args:
            dummy_seed: of random weights; None for the checkpoint's.

        Raises:
            UnsupportedArchitecture: the model cannot be run, or does not compute what transformers computes.
            CorruptWeights: the checkpoint does not fit the configuration or is damaged.
            ConfigError: the longest context is beyond what a position-dependent rotary scaling can keep constant.
        """
        places, request = places_of(groups), groups[0].plan.request
        planned = tuple(groups[group].plan.request.layers[index] for group, index in places)
        if unscaled(planned) != source.attention_layers():
            raise ConfigError("the attention plan was made for another model", found=source.architecture)
        _check_rope(source, request.max_context)
        if source.gguf is not None:
            raise _unsupported(source, ["GGUF files are read for the core's own families only"])
        model = _load(source, request.dtype, dummy_seed)
        _without_padding(model.config)
        allocator.adopt(model, WEIGHTS)
        scales = source.scales_in_use(request.kv_dtype)
        decoder = cls(
            model.eval(), attention, source.attention_layers(), groups, scales, torch_device, request.dtype, dummy_seed
        )
        decoder._compare_with_eager(source, groups, allocator, request.dtype)
        if source.text_config is not source.config:
            logger.warning(
                "%s runs on text alone: %s has other parts, which are not used", source.path, source.architecture
            )
        return decoder

    @torch.no_grad()
    def run(
        self,
        token_ids: Tensor,
        positions: Tensor,
        metadata: tuple[Any, ...],
        kv_cache: Tensor,
        rows: Tensor,
        token_types: Tensor | None = None,
        embedded: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        inputs = {"input_ids": token_ids[None]}
        if embedded is not None:
            inputs = {"inputs_embeds": self._base.get_input_embeddings()(token_ids).index_copy(0, *embedded)[None]}
        with _attending(_Step(self._attention, self._layers, kv_cache, metadata, self._places_in_cache)):
            output = self._base(**inputs, position_ids=positions[None], use_cache=False)
        self._output = type(output)
        return _tensor(output.last_hidden_state)[0, rows.long()]

    @property
    def embedding_kinds(self) -> frozenset[EmbeddingKind]:
        return frozenset({EmbeddingKind.ROWS})

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states: the model's own code, which may scale or cap them, with the decoder's answer given.

        Where there is no head, they are the hidden states.
        """
        if self._model is self._base:
            return hidden
        answer = self._output(last_hidden_state=hidden[None])
        ids = torch.zeros((1, len(hidden)), dtype=torch.long, device=self._device)
        for decoder in self._decoders:
            decoder.forward = lambda *given, **options: answer
        try:
            return _tensor(self._model(input_ids=ids, use_cache=False).logits)[0].float()
        finally:
            for decoder in self._decoders:
                del decoder.forward

    def argmax(self, hidden: Tensor) -> Tensor:
        return hidden if self._model is self._base else self.logits(hidden).argmax(dim=-1)

    def weight_names(self) -> frozenset[str]:
        """Return the names of parameters and persistent buffers, the tied ones left out."""
        return frozenset(self._places()) - self._tied()

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], written: set[str] | None = None) -> int:
        places, tied = self._places(), self._tied()
        prefix = f"{getattr(self._model, 'base_model_prefix', '')}."
        used = 0
        with torch.no_grad():
            for name, values in weights:
                known = name if name in places else prefix + name
                if known in tied or (known not in places and self._scales.passes(name, values)):
                    continue
                if known not in places:
                    raise CorruptWeights("the model has no tensor of this name", found=name)
                if places[known].shape != values.shape:
                    raise CorruptWeights(
                        f"tensor {name} has another shape than the model's",
                        found=f"{list(values.shape)} instead of {list(places[known].shape)}",
                    )
                if written is not None:
                    written.add(known)
                places[known].copy_(values)
                used += 1
        return used

    def reload(self, source: ModelSource, written: set[str] | None = None) -> int:
        """Load all weights again, by way of a second model on the host; see `RunnableModel.reload`."""
        self._check_same(source)
        loaded = dict(_load(source, self._dtype, self._seed if source.format == "dummy" else None).state_dict())
        names = sorted(self.weight_names())
        places = self._places()
        check_tensors(
            {name: tuple(places[name].shape) for name in names},
            {name: tuple(tensor.shape) for name, tensor in loaded.items()},
            optional=self._tied(),
        )
        if written is not None:
            written.update(names)
        with torch.no_grad():
            for name in names:
                places[name].copy_(loaded.pop(name))
        return len(names)

    def declare_sources(self, allocator: DeviceAllocator, source: ModelSource) -> None:
        reloader = WeightReloader(self._restore, source)
        places = self._places()
        for name in sorted(self.weight_names()):
            allocator.declare_source(places[name], reloader)

    def _restore(self, source: ModelSource) -> None:
        self.reload(source)

    def _places(self) -> dict[str, Tensor]:
        """Return parameters and persistent buffers by name, tied ones under each of their names."""
        return dict(self._model.state_dict(keep_vars=True))

    def _tied(self) -> frozenset[str]:
        return frozenset(getattr(self._model, "all_tied_weights_keys", None) or ())

    def _check_same(self, source: ModelSource) -> None:
        ours, theirs = self._model.config.get_text_config(decoder=True), source.text_config
        rope = "rope_parameters"
        if source.attention_layers() != self._layers or getattr(ours, rope, None) != getattr(theirs, rope, None):
            raise ModelError(
                f"{source.path} is not a checkpoint of the model that is loaded",
                found=f"{source.architecture} with another configuration",
                hint="Make a new engine for another model",
            )
        self._scales.check(source.kv_scales)

    @property
    def weight_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self._model.parameters())

    @property
    def weight_formats(self) -> Mapping[str, int]:
        return Counter(str(DType.of(parameter.dtype)) for parameter in self._model.parameters() if parameter.ndim > 1)

    @property
    def scratch_bytes(self) -> int:
        return 0

    def _compare_with_eager(
        self, source: ModelSource, groups: tuple[KVCacheGroup, ...], allocator: DeviceAllocator, dtype: DType
    ) -> None:
        """Raise UnsupportedArchitecture unless two short sequences give what transformers' eager attention gives."""
        generator = np.random.default_rng(0)
        sequences = [generator.integers(0, source.vocab_size, size=size).astype(np.int64) for size in (3, 5)]
        spec = groups[0].plan.kv_cache
        batch = in_groups(_prefill(sequences, spec.block_size), len(groups), spec.block_size)
        token_ids, positions = (torch.from_numpy(a).to(self._device) for a in (batch.token_ids, batch.positions))
        cache = allocator.empty(spec.shape(len(groups) * batch.block_table.size), spec.dtype, KV_CACHE)
        rows = torch.arange(batch.num_tokens, dtype=torch.int32, device=self._device)
        generates = source.is_generative
        try:
            cache.zero_()
            steps = zip(groups, batch.by_group(), strict=True)
            metadata = tuple(self._attention.prepare(group.plan, step) for group, step in steps)
            ours = self.run(token_ids, positions, metadata, cache, rows)
            ours = (self.logits(ours) if generates else ours).float()
            theirs = torch.cat([self._eager(tokens, generates) for tokens in sequences])
        except UnsupportedArchitecture:
            raise
        except Exception as error:  # whatever modelling code raises when it is run in a way it was not made for
            raise _unsupported(
                source, [f"its modelling code cannot be run on several sequences ({_first_line(error)})"]
            ) from error
        difference = float((ours - theirs).abs().max())
        # Rounding at 8 bits accumulates over layers; an attention that lacks something is off by the logits' own size.
        allowed = (2e-3 if dtype is DType.FLOAT32 else 0.1) * max(1.0, float(theirs.abs().max()))
        if not difference <= allowed:
            raise _unsupported(
                source,
                [
                    f"with the backend's attention its output differs from transformers' by {difference:.3g} ({allowed:.3g} allowed)"
                ],
            )

    @torch.no_grad()
    def _eager(self, tokens: Any, generates: bool) -> Tensor:
        ids = torch.from_numpy(tokens).to(self._device)[None]
        self._model.set_attn_implementation("eager")
        try:
            if generates:
                return _tensor(self._model(input_ids=ids, use_cache=False).logits)[0].float()
            return _tensor(self._model(input_ids=ids, use_cache=False).last_hidden_state)[0].float()
        finally:
            self._model.set_attn_implementation(_INTERFACE)


def _tensor(value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"the model returned a {type(value).__name__} where a tensor was expected")
    return value


def _load(source: ModelSource, dtype: DType, dummy_seed: int | None) -> Any:
    return _read(source, dtype) if dummy_seed is None else _random(source, dtype, dummy_seed)


def _read(source: ModelSource, dtype: DType) -> Any:
    # Opened first for its errors: transformers passes over tensors that are missing.
    _ = source.checkpoint
    try:
        with _no_progress_bars():
            model, notes = _model_class(source).from_pretrained(
                str(source.path),
                dtype=dtype.to_torch(),
                attn_implementation=_registered(),
                output_loading_info=True,
                local_files_only=True,
                trust_remote_code=source.trust_remote_code,
                use_safetensors=True,
                **({"config": source.config} if source.kv_quantisation else {}),
            )
        notes["unexpected_keys"] = [name for name in notes["unexpected_keys"] if not is_scale(name)]
    except (RuntimeError, OSError, ValueError, TypeError, LookupError, ArithmeticError) as error:
        raise CorruptWeights(
            f"the weights of {source.path} cannot be loaded",
            found=_first_line(error),
            hint="Check that config.json and the weights belong to the same model",
        ) from error
    problems = [
        f"{what}: {', '.join(sorted(str(name) for name in notes.get(key, ()))[:8])}"
        for what, key in (
            ("missing", "missing_keys"),
            ("unexpected", "unexpected_keys"),
            ("of another shape", "mismatched_keys"),
        )
        if notes.get(key)
    ]
    if problems:
        raise CorruptWeights(
            "the checkpoint's tensors are not those of the configuration",
            found="; ".join(problems),
            hint="Check that config.json and the weights belong to the same model",
        )
    return model


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _random(source: ModelSource, dtype: DType, seed: int) -> Any:
    with _uninitialised():
        model = _model_class(source).from_config(
            copy.deepcopy(source.config),
            attn_implementation=_registered(),
            dtype=dtype.to_torch(),
            trust_remote_code=source.trust_remote_code,
        )
    model.tie_weights()
    places: dict[str, Tensor] = dict(model.named_parameters())
    checkpoint = source.dummy_checkpoint({name: tuple(place.shape) for name, place in places.items()}, seed)
    with torch.no_grad():
        for name, place in places.items():
            place.copy_(checkpoint.read(name))
    return model


def _check_rope(source: ModelSource, max_context: int) -> None:
    """Refuse contexts in which transformers would change rotary frequencies while sequences run."""
    config = source.text_config
    given: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    for entry in (given, *(value for value in given.values() if isinstance(value, dict))):
        limits = {
            "dynamic": getattr(config, "max_position_embeddings", max_context),
            "longrope": entry.get("original_max_position_embeddings", max_context),
        }
        constant_to = int(limits.get(str(entry.get("rope_type")), max_context))
        if max_context > constant_to:
            raise ConfigError(
                f"{source.architecture} changes its rotary embedding beyond {constant_to} tokens, which invalidates "
                "cached keys",
                found=f"max_model_len {max_context}",
                hint=f"Set max_model_len to at most {constant_to}",
            )


def _prefill(sequences: list[Any], block_size: int) -> StepBatch:
    """Return a step that computes each sequence whole, each in blocks of its own."""
    lengths = [len(tokens) for tokens in sequences]
    count, none = len(sequences), np.zeros((0, 2), dtype=np.int32)
    blocks = -(-max(lengths) // block_size)
    return StepBatch(
        token_ids=np.concatenate(sequences),
        positions=np.concatenate([np.arange(length, dtype=np.int64) for length in lengths]),
        slot_mapping=np.concatenate(
            [row * blocks * block_size + np.arange(length, dtype=np.int32) for row, length in enumerate(lengths)]
        ).astype(np.int32),
        query_start=np.cumsum([0, *lengths]).astype(np.int32),
        context_lens=np.array(lengths, dtype=np.int32),
        block_table=np.arange(count * blocks, dtype=np.int32).reshape(count, blocks),
        rows=np.arange(count, dtype=np.int32),
        seq_ids=np.arange(count, dtype=np.int64),
        num_decodes=0,
        sample_rows=np.arange(count, dtype=np.int32),
        sample_seq_ids=np.arange(count, dtype=np.int64),
        swap_out=none,
        swap_in=none,
        copies=none,
        preempted=np.zeros(0, dtype=np.int64),
    )
