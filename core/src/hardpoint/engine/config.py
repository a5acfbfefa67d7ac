"""What an engine is asked to be."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, fields
from typing import Any, Literal

from hardpoint.executor import RankLimits, RaySettings
from hardpoint.interfaces.allocator import SleepPlan
from hardpoint.interfaces.batch import LogprobsMode
from hardpoint.interfaces.capabilities import SleepTier
from hardpoint.interfaces.dtypes import DType
from hardpoint.interfaces.errors import ConfigError
from hardpoint.interfaces.worker import WorkerConfig
from hardpoint.scheduler import SchedulerSettings
from hardpoint.validation import FileName, GiB, Int64, NonNegativeInt, PositiveInt, Seconds, Share, did_you_mean, shown

# Names under which scripts written for other engines pass the same settings.
_ALIASES = {
    "gpu_memory_utilization": "memory_utilization",
    "num_gpu_blocks_override": "num_device_blocks",
    "kv_cache_dtype": "kv_dtype",
    "distributed_executor_backend": "executor",
}
_DTYPE_ALIASES = {"half": "float16", "float": "float32", "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn"}
_EXECUTOR_ALIASES = {None: "auto", "uni": "in_process", "mp": "multi_process"}
_TIERS = (SleepTier.HOST, SleepTier.DISK, SleepTier.SOURCE)
_IGNORED = frozenset({"disable_log_stats", "use_tqdm_on_load"})


@dataclass(frozen=True)
class EngineConfig(SchedulerSettings):
    """Settings of one engine, with those of its scheduler; each is checked when the object is made.

    Attributes:
        model: "demo", a folder with a model, a GGUF file, or a hub id such as "org/name" (see `hardpoint.models.hub`).
        revision: of a model on a hub: a branch, tag or commit.
        download_dir: where models are fetched to; None for Hugging Face's cache.
        backend: name of the backend; None for HARDPOINT_BACKEND or the best that is available.
        device: index of the device within the backend.
        require_accelerator: refuse to run on the host's processor.
        tokenizer: path of another tokenizer; None for the model's own.
        generation_config: sampling parameters where a request gives none: "auto" for what the model's publisher recommends in
            generation_config.json, "vllm" for the engine's defaults, or a folder or file with another such file.
        dtype: "auto" for the model's own, or "float32", "bfloat16", "float16" ("half" and "float" are understood).
        kv_dtype: "auto" for `dtype`, or another that the backend claims, for example "float8_e4m3fn" ("fp8" is understood).
        max_model_len: longest context in tokens; None for the model's own.
        block_size: tokens per KV block; None lets the backend choose.
        memory_utilization: share of the device's memory for this engine; None for the backend's default.
        num_device_blocks: KV blocks on the device; None to measure what fits.
        swap_space: GiB of host memory for preempted requests.
        enforce_eager: no captured graphs.
        disable_hybrid_kv_cache_manager: keep the keys and values of all tokens also in layers that see a window of them only.
        enable_sleep_mode: require a backend that can sleep, and make ready for it while the model loads.
        sleep_tier: where a sleep of level 1 puts the weights: "host", "disk", "source" (read again from the checkpoint); None for
            host memory beside an accelerator, and disk where the host's memory is the device's.
        sleep_host_budget: most GiB of host memory for backups; None for what is free.
        sleep_disk_directory: for backups on disk; None for HARDPOINT_SLEEP_DIR, or else the user's cache directory.
        sleep_disk_budget: most GiB of backups there; None for what the file system has free.
        sleeping_requests: "reject" requests that come while the engine sleeps, or "queue" them until it wakes.
        max_queued_while_asleep: most requests in that queue.
        load_format: "auto", "safetensors", "gguf", or "dummy" for random weights from the configuration.
        tensor_parallel_size: ranks that share each layer.
        pipeline_parallel_size: stages that the layers are divided into; there are as many ranks as the two sizes' product.
        executor: where ranks run: "in_process" (one rank only), "multi_process" (a process for each, on this machine) or "ray"; "auto" is
            the first with one rank, and the second with several.
        rank_limits: seconds that ranks in other processes may take, by name; see `hardpoint.executor.RankLimits`.
        ray: settings of the executor "ray", by name; see `hardpoint.executor.RaySettings`.
        communication_timeout: seconds after which an operation between ranks has failed.
        threads: host threads for computing, of all ranks together; None for all usable cores.
        engine_process: run the engine in a process of its own; one that crashes is an EngineDead of its client.
        max_commands: most commands that wait for a loop in a thread or process of its own; one more is InboxFull.
        logprobs_mode: what `SamplingParams.logprobs` returns: "raw_logprobs" and "raw_logits" are of the logits as the model computed them,
            "processed_logprobs" and "processed_logits" of those that tokens are drawn from. Of prompts it is always the first.
        seed: of sampling without a seed of its own, and of dummy weights.
    """

    _called = "a setting of the engine"

    model: str
    revision: str | None = None
    download_dir: FileName | None = None
    backend: str | None = None
    device: NonNegativeInt = 0
    require_accelerator: bool = False
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    trust_remote_code: bool = False
    generation_config: str = "auto"
    dtype: str = "auto"
    kv_dtype: str = "auto"
    max_model_len: PositiveInt | None = None
    block_size: PositiveInt | None = None
    memory_utilization: Share | None = None
    num_device_blocks: PositiveInt | None = None
    swap_space: GiB = 4.0
    enforce_eager: bool = False
    disable_hybrid_kv_cache_manager: bool = False
    enable_sleep_mode: bool = False
    sleep_tier: Literal["host", "disk", "source"] | None = None
    sleep_host_budget: GiB | None = None
    sleep_disk_directory: FileName | None = None
    sleep_disk_budget: GiB | None = None
    sleeping_requests: Literal["reject", "queue"] = "reject"
    max_queued_while_asleep: PositiveInt = 1024
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = "auto"
    tensor_parallel_size: PositiveInt = 1
    pipeline_parallel_size: PositiveInt = 1
    executor: Literal["auto", "in_process", "multi_process", "ray"] = "auto"
    rank_limits: RankLimits | Mapping[str, float] | None = None
    ray: RaySettings | Mapping[str, Any] | None = None
    communication_timeout: Seconds = 60.0
    threads: PositiveInt | None = None
    engine_process: bool = False
    max_commands: PositiveInt = 16384
    use_fused_decoder: bool = True
    logprobs_mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS
    seed: Int64 = 0

    def __post_init__(self) -> None:
        for name in ("dtype", "kv_dtype"):
            value = getattr(self, name)  # perhaps torch's
            object.__setattr__(self, name, value if isinstance(value, str) else shown(value).removeprefix("torch."))
        self._check_types()
        self._check_ranks()
        _parse_dtype("dtype", self.dtype)
        _parse_dtype("kv_dtype", self.kv_dtype)

    def _check_ranks(self) -> None:
        if self.ray is not None and self.executor != "ray":
            raise ConfigError(
                "there are settings for Ray, and the ranks do not run on it",
                found=f"executor='{self.executor}'",
                hint="Give executor='ray', or leave the settings out",
            )
        if self.executor == "in_process" and self.num_ranks > 1:
            raise ConfigError(
                f"{self.num_ranks} ranks do not run in one process",
                found=f"tensor_parallel_size={self.tensor_parallel_size}, pipeline_parallel_size={self.pipeline_parallel_size}",
                hint="Leave executor out, or choose 'multi_process'",
            )

    @property
    def num_ranks(self) -> int:
        """How many ranks the engine has."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def other_processes(self) -> str:
        """The setting by which the model runs in other processes than the client's; empty where it does not."""
        if self.engine_process:
            return "engine_process=True"
        if self.executor in ("multi_process", "ray"):
            return f"executor='{self.executor}'"
        return f"{self.num_ranks} ranks" if self.num_ranks > 1 else ""

    @classmethod
    def from_arguments(cls, model: str, arguments: Mapping[str, Any]) -> EngineConfig:
        """Make a config of keyword arguments, also under the names that other engines use for them."""
        settings: dict[str, Any] = {}
        for name, value in arguments.items():
            target = _ALIASES.get(name, name)
            if target in settings:
                raise ConfigError(f"'{target}' is given twice, once as '{name}'", hint="Give it once")
            if name not in _IGNORED:
                settings[target] = value
        cls._check_names(settings, _ALIASES)
        executor = settings.get("executor", "auto")
        if executor is None or isinstance(executor, str):
            settings["executor"] = _EXECUTOR_ALIASES.get(executor, executor)
        return cls(model=model, **settings)

    @property
    def queue_while_asleep(self) -> int:
        """Most requests to queue while the engine sleeps; 0 where they are rejected."""
        return self.max_queued_while_asleep if self.sleeping_requests == "queue" else 0

    def sleep_settings(self, *, accelerator: bool, tiers: Set[SleepTier]) -> SleepPlan:
        """Return how the engine sleeps on a device with these tiers, as far as no request says it.

        Args:
            accelerator: the device has memory of its own, from which a copy to the host frees something.
        """
        if self.sleep_tier is not None:
            tier = SleepTier(self.sleep_tier)
        else:
            preference = _TIERS if accelerator else _TIERS[1:]
            tier = next((tier for tier in preference if tier in tiers), SleepTier.HOST)
        return SleepPlan(
            tier=tier,
            host_budget=_gib(self.sleep_host_budget),
            disk_directory=self.sleep_disk_directory,
            disk_budget=_gib(self.sleep_disk_budget),
        )

    def worker_config(self, prepare_sleep: SleepPlan | None = None) -> WorkerConfig:
        """Return the part that a worker needs.

        Args:
            prepare_sleep: the sleep that the worker makes ready for.
        """
        shared = {f.name: getattr(self, f.name) for f in fields(WorkerConfig) if hasattr(self, f.name)}
        own = {
            "dtype": _parse_dtype("dtype", self.dtype),
            "kv_dtype": _parse_dtype("kv_dtype", self.kv_dtype),
            "swap_space": _gib(self.swap_space),
            "world_size": self.num_ranks,
            # Stages have layers of their own, whose groups need not be alike.
            "kv_cache_groups": self.pipeline_parallel_size == 1 and not self.disable_hybrid_kv_cache_manager,
            "prepare_sleep": prepare_sleep,
        }
        return WorkerConfig(**shared | own)


def _gib(size: float | None) -> int | None:
    return None if size is None else int(size * (1 << 30))


def _parse_dtype(name: str, text: str) -> DType | None:
    if text == "auto":
        return None
    try:
        return DType.of(_DTYPE_ALIASES.get(text, text))
    except ValueError:
        known = ["auto", *(dtype.value for dtype in DType), *_DTYPE_ALIASES]
        raise ConfigError(f"{name}={shown(text)} is not an element type", hint=did_you_mean(text, known)) from None
