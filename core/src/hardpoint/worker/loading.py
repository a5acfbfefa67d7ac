"""Loading a rank's share of a model: what attention plans for it, whom the rank meets, and the weights on the device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from hardpoint.interfaces.allocator import DeviceAllocator
from hardpoint.interfaces.attention import AttentionBackend, AttentionPlan, KVCacheGroup, Refusal
from hardpoint.interfaces.capabilities import AttentionFeature, AttentionRequest
from hardpoint.interfaces.errors import CapabilityRefused, ConfigError
from hardpoint.interfaces.kernels import KernelSet
from hardpoint.interfaces.platform import Platform
from hardpoint.interfaces.worker import ModelInfo, WorkerConfig, WorkerContext
from hardpoint.layers import TORCH_OPERATORS
from hardpoint.layers.adapters import AdapterSlots
from hardpoint.models import Ranks, attention_layers, load_model, open_model
from hardpoint.worker.adapter_memory import AdapterMemory
from hardpoint.worker.communicators import Communicators
from hardpoint.worker.kv_groups import plan_groups
from hardpoint.worker.ranks import join_ranks, parallel_rank_of
from hardpoint.worker.state_memory import slot_layout

if TYPE_CHECKING:
    from hardpoint.models import ModelSource, RunnableModel

_ENGINE_FEATURES = frozenset({AttentionFeature.CHUNKED_PREFILL, AttentionFeature.MIXED_BATCH})


@dataclass(frozen=True)
class LoadedModel:
    """A model on the device, and where it came from.

    Attributes:
        fingerprint: of the source before its weights were read.
        groups: the KV cache groups of the rank's layers.
        ranks: what the rank reaches the others by.
        communicators: of the groups that the rank is in; none on the host, where they take nothing of a device.
        adapters: of the rank's layers; None where the model takes none.
    """

    model: RunnableModel
    info: ModelInfo
    source: ModelSource
    fingerprint: object
    groups: tuple[KVCacheGroup, ...]
    ranks: Ranks = field(default_factory=Ranks)
    communicators: Communicators = field(default_factory=Communicators)
    adapters: AdapterMemory | None = None

    @property
    def plan(self) -> AttentionPlan:
        """What attention planned for the first KV cache group."""
        return self.groups[0].plan


def load_rank(
    context: WorkerContext,
    *,
    allocator: DeviceAllocator,
    attention: AttentionBackend,
    kernels: KernelSet | None,
    platform: Platform,
    groups: ExitStack,
    ranks: Ranks | None = None,
) -> LoadedModel:
    """Load the model that a worker's configuration names.

    What cannot be is refused before a weight is read and before other ranks are waited for.

    Args:
        groups: takes what leaves the groups that the rank joins.
        ranks: what the rank reaches the others by already; by default it joins them.

    Raises:
        ModelError, CapabilityRefused, ConfigError, DeviceOutOfMemory, WorkerError: see `Worker.load` and `join_ranks`.
    """
    config, place = context.config, parallel_rank_of(context.config)
    source = open_model(
        config.model,
        load_format=config.load_format,
        trust_remote_code=config.trust_remote_code,
        hf_overrides=config.hf_overrides,
    )
    fingerprint = source.fingerprint()
    request = _request(config, source)
    kv_groups = plan_groups(attention, request, divides=config.kv_cache_groups)
    if isinstance(kv_groups, Refusal):
        raise CapabilityRefused(
            f"the {context.descriptor.name} backend cannot run {source.path}",
            kv_groups.reasons,
            hint="`hardpoint doctor` lists what the backend supports",
        )
    communicators = Communicators()
    if place.is_alone:
        ranks = Ranks()
    elif ranks is None:
        ranks, joined = join_ranks(config, context.descriptor, context.device)
        groups.enter_context(joined)
        if torch.device(context.device.torch_device).type != "cpu":
            joined_groups = [group for group in (ranks.tensor, ranks.pipeline) if group is not None]
            communicators = Communicators(joined_groups, lambda: allocator.memory_info().free)
    slots = None
    if config.max_loras:
        slots = AdapterSlots(config.max_loras, config.max_lora_rank, kernels or TORCH_OPERATORS)
    with torch.no_grad(), kept_default_dtype():
        model = load_model(
            source,
            groups=kv_groups,
            attention=attention,
            kernels=kernels,
            allocator=allocator,
            torch_device=context.device.torch_device,
            max_num_tokens=config.max_num_batched_tokens,
            max_num_samples=config.max_num_samples,
            quantization=config.quantization,
            use_fused_decoder=config.use_fused_decoder,
            seed=config.seed,
            rank=place,
            ranks=ranks,
            adapters=slots,
        )
        adapters = None
        if slots is not None:
            adapters = AdapterMemory(model, slots, request.dtype, allocator, platform)
    info = ModelInfo(
        architecture=source.architecture,
        dtype=request.dtype,
        vocab_size=source.vocab_size,
        max_model_len=request.max_context,
        num_layers=len(source.attention_layers()),
        weight_bytes=model.weight_bytes,
        attention=kv_groups[0].plan,
        path=model.path,
        is_generative=source.is_generative,
        kv_group_windows=tuple(group.window for group in kv_groups),
        # Among several ranks, a token that the driver samples reaches those that embed it by way of the engine, with the next step.
        steps_in_flight=platform.steps_in_flight if place.is_alone else 0,
        whole_prompts=request.bidirectional,
        pooling=source.pooling,
        num_labels=model.num_labels,
        state_bytes=slot_layout(model.state_layers())[1],
        hidden_size=source.hidden_size,
        embedding_kinds=model.embedding_kinds,
        weight_formats=model.weight_formats,
        adapter_bytes=0 if adapters is None else adapters.slot_bytes,
    )
    return LoadedModel(model, info, source, fingerprint, kv_groups, ranks, communicators, adapters)


@contextlib.contextmanager
def kept_default_dtype() -> Iterator[None]:
    """Restore torch's default dtype, which model code may change, on exit."""
    dtype = torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)


def _request(config: WorkerConfig, source: ModelSource) -> AttentionRequest:
    """Return what the rank's layers and the engine ask of attention."""
    dtype, max_model_len = config.dtype or source.dtype, _max_model_len(config, source)
    layers = attention_layers(source, dtype, parallel_rank_of(config), config.kv_dtype)
    return AttentionRequest(
        layers=layers,
        dtype=dtype,
        kv_dtype=config.kv_dtype or dtype,
        block_size=config.block_size,
        max_context=max_model_len,
        features=_ENGINE_FEATURES if all(layer.causal for layer in layers) else frozenset(),
    )


def _max_model_len(config: WorkerConfig, source: ModelSource) -> int:
    asked = config.max_model_len
    if asked is None:
        return source.max_model_len
    if not 1 <= asked <= source.max_model_len:
        raise ConfigError(
            f"max_model_len={asked} is not possible",
            found=f"the model's context is {source.max_model_len} tokens",
            hint=f"Give a value from 1 to {source.max_model_len}",
        )
    return asked
