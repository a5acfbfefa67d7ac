"""Loading: the fastest way that can run the model, its weights in the allocator's memory."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from hardpoint.interfaces.allocator import DeviceAllocator
from hardpoint.interfaces.attention import AttentionBackend, KVCacheGroup, Refusal, places_of
from hardpoint.interfaces.batch import EmbeddingKind
from hardpoint.interfaces.blocks import Quantization
from hardpoint.interfaces.capabilities import AttentionLayer
from hardpoint.interfaces.dtypes import DType
from hardpoint.interfaces.errors import CapabilityRefused
from hardpoint.interfaces.kernels import FuseRequest, KernelSet
from hardpoint.layers.parallel import ALONE, NO_OTHERS, ParallelRank, Ranks, layers_of_stage
from hardpoint.models.base import RunnableModel
from hardpoint.models.source import ModelFormat, ModelSource
from hardpoint.weights.kv_scales import scaled, takes_scales
from hardpoint.weights.loading import with_standard_names

if TYPE_CHECKING:
    from hardpoint.layers.adapters import AdapterSlots

logger = logging.getLogger(__name__)


def attention_layers(
    source: ModelSource, dtype: DType, rank: ParallelRank, kv_dtype: DType | None = None
) -> tuple[AttentionLayer, ...]:
    """Return what each layer of a rank's share asks of attention, with the checkpoint's scales where the KV cache is fp8.

    Args:
        kv_dtype: of the KV cache; None for `dtype`.

    Raises:
        CapabilityRefused, UnsupportedArchitecture: see `ModelSource.attention_layers` and `ModelSource.divided`.
        CorruptWeights: the scales are damaged, not of all layers, or of single heads.
        ConfigError: the scales are for another format than fp8.
    """
    layers = source.attention_layers(dtype) if rank.is_alone else source.divided(dtype, rank).attention_layers(rank)
    if not takes_scales(kv_dtype):
        return layers
    scales = source.kv_scales
    if scales is None:
        if rank.is_first and rank.tensor_rank == 0:
            logger.warning("the KV cache is %s, and %s has no scales for it: they are 1.0", kv_dtype, source.path)
        return layers
    first, end = layers_of_stage(len(scales), rank)
    return scaled(layers, scales[first:end])


def load_model(
    source: ModelSource,
    *,
    groups: tuple[KVCacheGroup, ...],
    attention: AttentionBackend,
    kernels: KernelSet | None,
    allocator: DeviceAllocator,
    torch_device: str,
    max_num_tokens: int,
    max_num_samples: int,
    quantization: Quantization = Quantization.NONE,
    use_fused_decoder: bool = True,
    seed: int = 0,
    rank: ParallelRank = ALONE,
    ranks: Ranks = NO_OTHERS,
    adapters: AdapterSlots | None = None,
) -> RunnableModel:
    """Load a model by the first way that can run it: the kernel set's program, the core's layers, transformers' code.

    Args:
        groups: KV cache groups with the plans of `attention` for `attention_layers(source, dtype, rank, kv_dtype)`; their dtype is that of
            weights and activations.
        kernels: the backend's fused operators; None for plain torch.
        torch_device: what torch calls the device.
        max_num_tokens: most tokens in one step.
        max_num_samples: most rows of logits in one step.
        quantization: how weights are stored and multiplied by.
        use_fused_decoder: False passes over that way.
        seed: of random weights, where the source's format is dummy.
        rank: whose share of the model is loaded; only the core's layers run anything less than the whole.
        ranks: the other ranks, where there are any.
        adapters: what linear layers add to their products; transformers' code does not. None for a model without adapters.

    Raises:
        CorruptWeights: the checkpoint does not fit the configuration or is damaged.
        UnsupportedArchitecture: no way can run the model; says why.
        DeviceOutOfMemory: the weights do not fit.
        CapabilityRefused: the model cannot be divided like this, or its weights not be stored as asked.
    """
    planned = groups[0].plan.request
    dtype, max_context = planned.dtype, planned.max_context
    dummy_seed = seed if source.format is ModelFormat.DUMMY else None
    description = source.describe(dtype) if rank.is_alone else source.divided(dtype, rank)
    from hardpoint.models.stored_blocks import store_in_blocks, wants_blocks

    runs_layers = not isinstance(description, Refusal)
    in_blocks = wants_blocks(
        quantization, source.weights({}, dummy_seed), kernels, source.path, runs_layers=runs_layers
    )
    if isinstance(description, Refusal):
        if adapters is not None:
            raise CapabilityRefused(
                f"{source.path} takes no LoRA adapters",
                description.reasons,
                hint="Leave enable_lora out, or merge the adapter into the model",
            )
        from hardpoint.models.fallback import TransformersDecoder

        return TransformersDecoder.load(source, groups, attention, allocator, torch_device, dummy_seed)
    from hardpoint.layers import TORCH_OPERATORS, ModelContext
    from hardpoint.models.fused import FusedModel
    from hardpoint.models.modular import FamilyModel, ModularModel
    from hardpoint.quantization import packed

    scales = source.scales_in_use(planned.kv_dtype)
    shapes = description.checkpoint_shapes
    checkpoint = with_standard_names(source.weights(shapes, dummy_seed), shapes)
    loaded: FamilyModel | None = None
    # A program has the language model alone.
    encodes = EmbeddingKind.IMAGE in description.whole.embedding_kinds
    if kernels is not None and use_fused_decoder and rank.is_alone and not encodes:
        request = FuseRequest(
            dtype, groups, max_num_tokens, max_num_samples, max_context, adapters=adapters is not None
        )
        whole = description.whole
        if in_blocks:
            whole = description.build(ModelContext(dtype.to_torch()))
            store_in_blocks(whole, checkpoint, kernels, dtype, quantization, by_layers=False)
        program = kernels.fuse(whole, request, allocator)
        if isinstance(program, Refusal):
            logger.info("no fused decoder for %s: %s", source.architecture, "; ".join(program.reasons))
        else:
            loaded = FusedModel(description, whole, scales, seed, program, adapters)
    if loaded is None:
        # A program has a layout of its own for the whole model; modules have one for each layer.
        operators = TORCH_OPERATORS if kernels is None else kernels
        context = ModelContext(
            dtype.to_torch(),
            rank,
            ranks,
            operators,
            linear_method=packed(operators),
            max_context=max_context,
            adapters=adapters,
        )
        model = description.build(context)
        if in_blocks and kernels is not None:
            store_in_blocks(model, checkpoint, kernels, dtype, quantization, by_layers=True)
        loaded = ModularModel(
            description,
            model,
            scales,
            seed,
            attention=attention,
            places=places_of(groups),
            allocator=allocator,
            token_head=source.token_head,
        )
    speaks = rank.is_first and rank.tensor_rank == 0
    if in_blocks and speaks:
        counts = ", ".join(f"{count} in {format}" for format, count in sorted(loaded.weight_formats.items()))
        logger.info("matrices of the weights: %s", counts)
    if speaks and source.model_config.tied and not description.config.tied:
        logger.warning(
            "%s has a head of its own, lm_head.weight, which is used: its configuration says tied", source.path
        )
    loaded.load(checkpoint)
    return loaded
