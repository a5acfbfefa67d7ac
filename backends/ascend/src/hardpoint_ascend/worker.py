"""The worker of the Ascend backend: the core's for accelerators, with the limits of the attention operator."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from hardpoint.interfaces import MemoryProfile
from hardpoint.interfaces.errors import CapabilityRefused
from hardpoint.worker import AcceleratorWorker
from hardpoint_ascend.capabilities import MOST_ELEMENTS


class AscendWorker(AcceleratorWorker):
    """Runs on one device through torch_npu."""

    _torch_module: ClassVar[str] = "torch_npu.npu"

    def profile(self) -> MemoryProfile:
        """Return what the largest legal step takes; the KV cache is no larger than the attention operator can address."""
        profile = super().profile()
        spec = self._plan.kv_cache
        most = 2 * spec.num_layers * MOST_ELEMENTS * spec.dtype.itemsize
        return replace(profile, kv_limit=most if profile.kv_limit is None else min(most, profile.kv_limit))

    def initialize_kv(self, num_device_blocks: int, num_host_blocks: int) -> None:
        """Allocate the KV cache; raises CapabilityRefused for one whose layers the attention operator cannot address."""
        spec = self._plan.kv_cache
        most = MOST_ELEMENTS // (spec.block_size * spec.num_kv_heads * spec.head_dim)
        if num_device_blocks > most:
            raise CapabilityRefused(
                f"a KV cache of {num_device_blocks} blocks was asked for",
                [f"the attention operator addresses {MOST_ELEMENTS} elements of a layer's keys, which are {most} blocks"],
                hint=f"Ask for {most} blocks at most",
            )
        super().initialize_kv(num_device_blocks, num_host_blocks)
