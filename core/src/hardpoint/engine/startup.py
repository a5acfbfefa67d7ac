"""How an engine starts: its client's side (model files, tokenizer, draft model), and its loop's (backend, executor, sleep)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from hardpoint.engine.config import EngineConfig
from hardpoint.engine.media import Media
from hardpoint.engine.request_maker import RequestMaker
from hardpoint.engine.speculation import check_vocabularies, parse_speculative_config
from hardpoint.executor import Executor, InProcessExecutor, ProcessTransport, RankLimits, RemoteExecutor
from hardpoint.executor.start import await_torch, begin, begin_torch, collection_paused, return_free_memory
from hardpoint.interfaces.allocator import KV_CACHE, WEIGHTS, Policy, SleepPlan
from hardpoint.interfaces.capabilities import MemoryCapabilities, SleepTier
from hardpoint.interfaces.errors import (
    CapabilityRefused,
    ConfigError,
    HardpointError,
    InvalidSamplingParams,
    ModelError,
)
from hardpoint.interfaces.worker import WorkerConfig, WorkerContext
from hardpoint.models import ModelSource, TokenizerBackend, converted, load_tokenizer, open_model
from hardpoint.plugins import Resolved, resolve_backend
from hardpoint.sampling import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hardpoint.engine.loops import Loop

L = TypeVar("L", bound="Loop")

_PRESERVED = {WEIGHTS: Policy.PRESERVE, KV_CACHE: Policy.DISCARD}


@collection_paused()
def start_engine(config: EngineConfig, make_loop: Callable[[EngineConfig], L]) -> tuple[L, RequestMaker]:
    """Start a loop, with the tokenizer loaded beside it; nothing is left of what fails."""
    if not config.other_engines:
        begin_imports(config)
    source = open_model(
        config.model,
        load_format=config.load_format,
        trust_remote_code=config.trust_remote_code,
        generation_config=config.generation_config,
        revision=config.revision,
        download_dir=config.download_dir,
        hf_overrides=config.hf_overrides,
    )
    config, source = _converted(config, source)
    if source.hub is not None:
        # The ranks of this machine take what was fetched; those of others fetch the same commit.
        elsewhere = config.executor == "ray" and config.download_dir is None
        config = replace(config, model=str(source.hub if elsewhere else source.path), revision=None)
    params = _recommended_params(source)
    config = _with_draft_model(config)
    vocabulary = _tokenizers_model(config, source)
    with ThreadPoolExecutor(1) as background:
        # The tokenizer loads beside the weights, which are read and converted outside the interpreter lock.
        tokenizer = background.submit(_load_tokenizer, config, vocabulary)
        loop = make_loop(config)
        try:
            eos_ids = frozenset(source.eos_token_ids_with(vocabulary, loop.model.vocab_size))
            pooling = source.pooling_defaults
            media = Media(config, loop.model, source.path, tokenizer.result())
            maker = RequestMaker(config, loop.model, tokenizer.result(), eos_ids, params, pooling, media)
        except BaseException:
            loop.shutdown()
            raise
    # The allocator keeps what reading the model's files took, for a process that will not take so much again.
    return_free_memory()
    return loop, maker


def _converted(config: EngineConfig, source: ModelSource) -> tuple[EngineConfig, ModelSource]:
    """Return configuration and model for what the model is to be; raises ConfigError where it cannot be that."""
    use = config.convert
    if use == "auto":
        use = "embed" if config.runner == "pooling" else "none"
    if config.runner == "generate" and not source.is_generative:
        raise ConfigError(
            "the model has no language-model head",
            found=f"runner='generate' with the architecture {source.architecture}",
            hint="Leave runner out, or give runner='pooling'",
        )
    if use == "none":
        return config, source
    if config.runner == "generate":
        raise ConfigError(
            f"a model that is to generate keeps its head, and convert='{use}' takes it", hint="Leave convert out"
        )
    architecture = converted(source.architecture, use)
    if use == "classify" and not architecture.endswith(
        ("ForSequenceClassification", "ForTokenClassification", "RewardModel")
    ):
        raise ConfigError(
            "the model cannot have a head that labels texts",
            found=f"convert='classify' with the architecture {source.architecture}",
            hint="Models of the core's own families can: `hardpoint models` lists them",
        )
    if architecture != source.architecture:
        overrides = {**(config.hf_overrides or {}), "architectures": [architecture]}
        config = replace(config, hf_overrides=overrides)
        source = replace(source, architecture=architecture, hf_overrides=overrides)
    return config, source


def _with_draft_model(config: EngineConfig) -> EngineConfig:
    """Return the configuration with a draft model that was fetched, if it names one; raises ConfigError for another vocabulary."""
    if config.draft_model is None:
        return config
    dummy = config.load_format == "dummy"
    source = open_model(
        config.draft_model,
        load_format="dummy" if dummy else "auto",
        trust_remote_code=config.trust_remote_code,
        download_dir=config.download_dir,
    )
    path = str(source.path) if source.hub is not None else config.draft_model
    if not config.skip_tokenizer_init:
        own = TokenizerBackend.of(config.model, config.tokenizer, config.load_format, config.trust_remote_code)
        check_vocabularies(own, TokenizerBackend(path, own.load_format if dummy else "auto", config.trust_remote_code))
    speculation = parse_speculative_config(config.speculative_config)
    assert speculation is not None
    return replace(config, speculative_config=replace(speculation, model=path))


def _load_tokenizer(config: EngineConfig, source: ModelSource) -> PreTrainedTokenizerBase | None:
    if config.skip_tokenizer_init:
        return None
    tokenizer: PreTrainedTokenizerBase = load_tokenizer(source, config.trust_remote_code)
    return tokenizer


def _tokenizers_model(config: EngineConfig, source: ModelSource) -> ModelSource:
    """Return the model whose tokenizer is used, of which another than the engine's own needs no weights."""
    if config.tokenizer is None or config.skip_tokenizer_init:
        return source
    return open_model(config.tokenizer, load_format="dummy", trust_remote_code=config.trust_remote_code)


def _recommended_params(source: ModelSource) -> SamplingParams:
    try:
        return SamplingParams(**source.generation_defaults)
    except InvalidSamplingParams as error:
        raise ModelError(
            "the model's recommended sampling parameters are not possible",
            found=str(error),
            hint="Correct its generation_config.json, or give generation_config='vllm' to leave it out",
        ) from error


def resolve(config: EngineConfig) -> Resolved:
    """Return the backend and device to use; see `resolve_backend`."""
    ask = partial(resolve_backend, config.backend, device=config.device, require_accelerator=config.require_accelerator)
    if config.backend is not None or not _in_process(config):
        resolved = ask()
        # Only for a worker with torch kernels: others may do without torch.
        if _in_process(config) and resolved.descriptor.kernels is not None:
            begin_torch()
        return resolved
    # Each vendor's driver is asked in a process of its own. Meanwhile this process imports torch, which nearly every backend needs.
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
        # Imported only where it is asked for: on one machine nobody needs Ray.
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
