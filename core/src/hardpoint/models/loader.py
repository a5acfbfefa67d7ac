"""Loading: the fastest way that can run the model, its weights in the allocator's memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from hardpoint.interfaces.allocator import DeviceAllocator
from hardpoint.interfaces.attention import AttentionBackend, AttentionPlan, Refusal
from hardpoint.interfaces.capabilities import AttentionLayer
from hardpoint.interfaces.dtypes import DType
from hardpoint.interfaces.errors import ConfigError
from hardpoint.interfaces.kernels import DecoderRequest, KernelSet
from hardpoint.models.base import RunnableModel
from hardpoint.models.checkpoint import Checkpoint
from hardpoint.models.families import LeanModel, Place
from hardpoint.models.kv_scales import ScalesInUse, scaled, takes_scales
from hardpoint.models.parallel import Ranks, layers_of_stage, share_of
from hardpoint.models.source import LOAD_FORMATS, ModelFormat, ModelSource

logger = logging.getLogger(__name__)

_ALONE = Place()


def attention_layers(
    source: ModelSource, dtype: DType, place: Place, kv_dtype: DType | None = None
) -> tuple[AttentionLayer, ...]:
    """Return what each layer of a rank's share asks of attention, with the checkpoint's scales where the KV cache is fp8.

    Args:
        kv_dtype: of the KV cache; None for `dtype`.

    Raises:
        CapabilityRefused, UnsupportedArchitecture: see `ModelSource.attention_layers` and `share_of`.
        CorruptWeights: the scales are damaged, not of all layers, or of single heads.
        ConfigError: the scales are for another format than fp8.
    """
    layers = source.attention_layers() if place.is_alone else share_of(source, dtype, place).spec.attention
    if not takes_scales(kv_dtype):
        return layers
    scales = source.kv_scales
    if scales is None:
        if place.is_first and place.tensor_rank == 0:
            logger.warning("the KV cache is %s, and %s has no scales for it: they are 1.0", kv_dtype, source.path)
        return layers
    first, end = layers_of_stage(len(scales), place)
    return scaled(layers, scales[first:end])


def load_model(
    source: ModelSource,
    *,
    dtype: DType,
    plan: AttentionPlan,
    attention: AttentionBackend,
    kernels: KernelSet | None,
    allocator: DeviceAllocator,
    torch_device: str,
    max_num_tokens: int,
    max_num_samples: int,
    max_context: int,
    load_format: str = "auto",
    use_fused_decoder: bool = True,
    use_lean_decoder: bool = True,
    seed: int = 0,
    place: Place = _ALONE,
    ranks: Ranks | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> RunnableModel:
    """Load a model by the first way that can run it: the kernel set's fused decoder, the lean decoder, transformers' code.

    Args:
        dtype: of weights and activations.
        plan: made by `attention` for `attention_layers(source, dtype, place, kv_dtype)`.
        kernels: the backend's fused operators; None for plain torch.
        torch_device: what torch calls the device.
        max_num_tokens: most tokens in one step.
        max_num_samples: most rows of logits in one step.
        max_context: longest context in tokens.
        load_format: "auto", or "dummy" for seeded random weights; otherwise as `source` was opened.
        use_fused_decoder, use_lean_decoder: False passes over that way.
        place: which share of the model is loaded; only the lean decoder runs anything less than the whole.
        ranks: the other ranks, where there are any.
        progress: called with (weights done, weights in all).

    Raises:
        CorruptWeights: the checkpoint does not fit the configuration or is damaged.
        UnsupportedArchitecture: no way can run the model; says why.
        DeviceOutOfMemory: the weights do not fit.
        ConfigError: a load format that does not fit the source.
        CapabilityRefused: the model cannot be divided like this.
    """
    if load_format not in LOAD_FORMATS or (
        load_format not in ("auto", ModelFormat.DUMMY) and load_format != source.format
    ):
        raise ConfigError(f"load_format {load_format!r} does not fit the model", found=str(source.format))
    dummy = ModelFormat.DUMMY in (load_format, source.format)

    lean = source.lean_model(dtype) if place.is_alone else share_of(source, dtype, place)
    if isinstance(lean, Refusal) or (place.is_alone and not use_lean_decoder):
        from hardpoint.models.fallback import TransformersDecoder

        return TransformersDecoder.load(
            source, dtype, plan, attention, allocator, torch_device, max_context, seed if dummy else None, progress
        )
    lean = replace(lean, kv_scales=ScalesInUse.of(source, plan.request.kv_dtype))
    if kernels is not None and use_fused_decoder and place.is_alone:
        request = DecoderRequest(lean.spec, dtype, plan, max_num_tokens, max_num_samples, max_context)
        program = kernels.plan_decoder(request, allocator)
        if not isinstance(program, Refusal):
            from hardpoint.models.fused import FusedDecoder

            fused = FusedDecoder(lean, program, dtype, max_context, seed)
            fused.load(_checkpoint(source, lean, dummy, seed), progress)
            return fused
        logger.info("no fused decoder for %s: %s", source.architecture, "; ".join(program.reasons))
    from hardpoint.models.lean import LeanDecoder

    decoder = LeanDecoder(
        lean,
        dtype=dtype,
        attention=attention,
        kernels=kernels,
        allocator=allocator,
        max_context=max_context,
        torch_device=torch_device,
        seed=seed,
        ranks=ranks,
    )
    decoder.load(_checkpoint(source, lean, dummy, seed), progress)
    return decoder


def _checkpoint(source: ModelSource, lean: LeanModel, dummy: bool, seed: int) -> Checkpoint:
    return source.dummy_checkpoint(lean.checkpoint_shapes(), seed) if dummy else source.checkpoint
