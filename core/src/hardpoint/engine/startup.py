"""What an engine begins with: its backend, the executor of its worker or workers, and whether it can sleep as it is asked to."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial

from hardpoint.engine.config import EngineConfig
from hardpoint.executor import Executor, InProcessExecutor, ProcessTransport, RankLimits, RemoteExecutor
from hardpoint.executor.start import await_torch, begin, begin_torch, collection_paused
from hardpoint.interfaces.allocator import KV_CACHE, WEIGHTS, Policy, SleepPlan
from hardpoint.interfaces.capabilities import MemoryCapabilities, SleepTier
from hardpoint.interfaces.errors import CapabilityRefused, HardpointError
from hardpoint.interfaces.worker import WorkerConfig, WorkerContext
from hardpoint.plugins import Resolved, resolve_backend

_PRESERVED = {WEIGHTS: Policy.PRESERVE, KV_CACHE: Policy.DISCARD}


def resolve(config: EngineConfig) -> Resolved:
    """Return the backend and device to use; see `resolve_backend`."""
    ask = partial(resolve_backend, config.backend, device=config.device, require_accelerator=config.require_accelerator)
    if config.backend is not None or not _in_process(config):
        resolved = ask()
        # A worker without kernels of torch's may do without torch.
        if _in_process(config) and resolved.descriptor.kernels is not None:
            begin_torch()
        return resolved
    # Each vendor's driver is asked in a process of its own. While they answer this one takes in torch, which nearly every backend needs.
    resolving = begin(ask)
    await_torch()
    with collection_paused(), contextlib.suppress(ImportError):
        import torch  # noqa: F401
    return resolving.result()


def begin_imports(config: EngineConfig) -> None:
    """Begin to load torch's libraries before the model's files are read, if an `EngineCore` made here would import torch.

    It finds the same backend again; what cannot be found, it raises.
    """
    if not _in_process(config):
        return
    if config.backend is None:
        begin_torch()
    else:
        with contextlib.suppress(HardpointError):
            resolve(config)


def _in_process(config: EngineConfig) -> bool:
    return config.executor not in ("ray", "multi_process") and config.num_ranks == 1


def make_executor(config: EngineConfig, resolved: Resolved, worker_config: WorkerConfig) -> Executor:
    """Return what reaches the worker, or the workers of several ranks."""
    kind = config.executor
    if kind == "ray":
        # Imported where it is asked for: on one machine nobody needs Ray.
        from hardpoint.executor.ray_transport import RayTransport

        return RemoteExecutor(RayTransport(resolved, worker_config, RankLimits.parse(config.rank_limits), config.ray))
    if not _in_process(config):
        return RemoteExecutor(ProcessTransport(resolved, worker_config, RankLimits.parse(config.rank_limits)))
    context = WorkerContext(descriptor=resolved.descriptor, device=resolved.device, config=worker_config)
    return InProcessExecutor(resolved.descriptor.worker()(context))


def check_sleep(config: EngineConfig, resolved: Resolved, memory: MemoryCapabilities, settings: SleepPlan) -> None:
    """Raise CapabilityRefused where the engine is to sleep, and the backend cannot as it is asked to."""
    if not config.enable_sleep_mode:
        return
    reasons = []
    if not memory.sleep_levels & {1, 2}:
        reasons.append("its allocator supports no sleep level")
    elif settings.tier not in memory.tiers:
        reasons.append(
            f"its allocator has the tiers {', '.join(sorted(tier.value for tier in memory.tiers)) or 'none'}"
        )
    if reasons:
        raise CapabilityRefused(
            f"the {resolved.descriptor.name} backend cannot run with enable_sleep_mode",
            reasons,
            hint="Leave enable_sleep_mode off, or choose a backend whose `hardpoint doctor` entry lists sleep levels and tier",
        )


def prepared_sleep(config: EngineConfig, resolved: Resolved, settings: SleepPlan) -> SleepPlan | None:
    """Return the sleep to make ready for: pinning host memory takes longer than the sleep that uses it, and backups on disk that
    killed engines left take room until somebody removes them."""
    pins = resolved.descriptor.accelerator and settings.tier is SleepTier.HOST
    wanted = config.enable_sleep_mode and (pins or settings.tier is SleepTier.DISK)
    return replace(settings, policies=_PRESERVED) if wanted else None
