"""What an engine is asked to be."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from msgspec import Meta

from hardpoint.engine.speculation import SpeculativeConfig, parse_speculative_config
from hardpoint.executor import RankLimits, RaySettings
from hardpoint.interfaces.allocator import SleepPlan
from hardpoint.interfaces.batch import LogprobsMode
from hardpoint.interfaces.blocks import Quantization
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
_COMPUTED_IN = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16)
_EXECUTOR_ALIASES = {None: "auto", "uni": "in_process", "mp": "multi_process"}
_TIERS = (SleepTier.HOST, SleepTier.DISK, SleepTier.SOURCE)
_MAX_LORA_RANK = 512
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
        skip_tokenizer_init: load no tokenizer: prompts are token ids, and outputs have no text.
        trust_remote_code: run Python code that a model's or tokenizer's folder brings.
        generation_config: sampling parameters where a request gives none: "auto" for what the model's publisher recommends in
            generation_config.json, "vllm" for the engine's defaults, or a folder or file with another such file.
        dtype: "auto" for the model's own, or "float32", "bfloat16", "float16" ("half" and "float" are understood).
        kv_dtype: "auto" for `dtype`, or another that the backend claims, for example "float8_e4m3fn" ("fp8" is understood).
        max_model_len: longest context in tokens; None for the model's own.
        block_size: tokens per KV block; None lets the backend choose.
        memory_utilization: share of the device's memory for this engine; None for the backend's default.
        num_device_blocks: KV blocks on the device; None to measure what fits.
        swap_space: GiB of host memory for preempted requests.
        kv_offload_gib: GiB of host memory for KV blocks that the device's prefix cache evicts, from where prompts that begin alike get
            them back instead of computing them; 0 for none.
        kv_offload_disk_gib: GiB on disk for blocks that this memory has no room for; 0 for none.
        kv_offload_path: folder for them, in a file without a name.
        limit_mm_per_prompt: most pictures of a prompt, {"image": 2} for example.
        allowed_local_media_path: folder of which file: URLs in messages may name pictures; None for no local files.
        encoder_cache_space: GiB on the device for embeddings of pictures, which later steps and requests with the same picture use.
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
        runner: "generate" or "pooling": what the model is for; "auto" leaves both to a model that can.
        convert: "embed" leaves out a language model's head, "classify" puts one in its place that labels texts; "auto" does the first for
            runner="pooling", and "none" nothing.
        hf_overrides: values of the model's configuration instead of those in its file.
        load_format: "auto", "safetensors", "gguf", or "dummy" for random weights from the configuration.
        quantization: of weights that the checkpoint has quantised (GGUF's blocks, GPTQ, AWQ, compressed-tensors): "auto" multiplies by them
            as they are stored where the backend does so and expands the others, "gguf" refuses the others, "none" expands all. Of weights
            that are not quantised: "int8" and "int4" round them while they are loaded, in groups of 32 of a row with a scale each, and
            "int8-128" and "int4-128" in groups of 128 (where a row, or a rank's part, is no multiple of 128, of 32).
            `EngineInfo.weight_formats` says what became of them.
        tensor_parallel_size: ranks that share each layer.
        pipeline_parallel_size: stages that the layers are divided into; there are as many ranks as the two sizes' product.
        data_parallel_size: engines of the model behind one interface, each in a process of its own, with all of the model's ranks.
        executor: where ranks run: "in_process" (one rank only), "multi_process" (a process for each, on this machine) or "ray"; "auto" is
            the first with one rank, and the second with several.
        rank_limits: seconds that ranks in other processes may take, by name; see `hardpoint.executor.RankLimits`.
        ray: settings of the executor "ray", by name; see `hardpoint.executor.RaySettings`.
        communication_timeout: seconds after which an operation between ranks has failed.
        threads: host threads for computing, of all ranks together; None for all usable cores.
        engine_process: run the engine in a process of its own; one that crashes is an EngineDead of its client.
        enable_lora: take LoRA adapters, as PEFT writes them, for single requests.
        max_loras: most adapters in one step; the device has memory for as many of `max_lora_rank`, with the tag "adapters".
        max_lora_rank: greatest rank of an adapter.
        max_cpu_loras: most adapters that are kept on the host, from `max_loras` on, which is the default; others are read again.
        enable_prompt_embeds: take prompts that are embeddings, `{"prompt_embeds": tensor}`.
        max_commands: most commands that wait for a loop in a thread or process of its own; one more is InboxFull.
        use_fused_decoder: run the model by the backend's fused program where it has one for its family; False to run it as modules.
        logprobs_mode: what `SamplingParams.logprobs` returns: "raw_logprobs" and "raw_logits" are of the logits as the model computed them,
            "processed_logprobs" and "processed_logits" of those that tokens are drawn from. Of prompts it is always the first.
        speculative_config: guesses at next tokens that one step verifies, by name; see `hardpoint.engine.speculation.SpeculativeConfig`.
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
    kv_offload_gib: GiB = 0.0
    kv_offload_disk_gib: GiB = 0.0
    kv_offload_path: FileName | None = None
    limit_mm_per_prompt: Mapping[str, NonNegativeInt] | None = None
    allowed_local_media_path: FileName | None = None
    encoder_cache_space: GiB = 0.25
    enforce_eager: bool = False
    disable_hybrid_kv_cache_manager: bool = False
    enable_sleep_mode: bool = False
    sleep_tier: Literal["host", "disk", "source"] | None = None
    sleep_host_budget: GiB | None = None
    sleep_disk_directory: FileName | None = None
    sleep_disk_budget: GiB | None = None
    sleeping_requests: Literal["reject", "queue"] = "reject"
    max_queued_while_asleep: PositiveInt = 1024
    runner: Literal["auto", "generate", "pooling"] = "auto"
    convert: Literal["auto", "none", "embed", "classify"] = "auto"
    hf_overrides: Mapping[str, Any] | None = None
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = "auto"
    quantization: Literal["auto", "gguf", "int4", "int4-128", "int8", "int8-128", "none"] = "none"
    tensor_parallel_size: PositiveInt = 1
    pipeline_parallel_size: PositiveInt = 1
    data_parallel_size: PositiveInt = 1
    executor: Literal["auto", "in_process", "multi_process", "ray"] = "auto"
    rank_limits: RankLimits | Mapping[str, float] | None = None
    ray: RaySettings | Mapping[str, Any] | None = None
    communication_timeout: Seconds = 60.0
    threads: PositiveInt | None = None
    engine_process: bool = False
    enable_lora: bool = False
    max_loras: PositiveInt = 1
    max_lora_rank: Annotated[int, Meta(ge=1, le=_MAX_LORA_RANK)] = 16
    max_cpu_loras: PositiveInt | None = None
    enable_prompt_embeds: bool = False
    max_commands: PositiveInt = 16384
    use_fused_decoder: bool = True
    logprobs_mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS
    speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None
    seed: Int64 = 0

    def __post_init__(self) -> None:
        for name in ("dtype", "kv_dtype"):
            value = getattr(self, name)  # perhaps torch's
            object.__setattr__(self, name, value if isinstance(value, str) else shown(value).removeprefix("torch."))
        self._check_types()
        parse_speculative_config(self.speculative_config)
        self._check_ranks()
        self._check_offload()
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ConfigError(
                f"max_cpu_loras={self.max_cpu_loras} is not possible",
                found=f"max_loras={self.max_loras}",
                hint="What a step goes through is on the host too: give max_loras or more",
            )
        _parse_dtype("dtype", self.dtype)
        _parse_dtype("kv_dtype", self.kv_dtype)

    def _check_offload(self) -> None:
        if self.kv_offload_gib and not self.enable_prefix_caching:
            raise ConfigError(
                "kv_offload_gib keeps blocks of the prefix cache",
                found="enable_prefix_caching=False",
                hint="Leave kv_offload_gib out, or enable the prefix cache",
            )
        if self.kv_offload_disk_gib and not self.kv_offload_gib:
            raise ConfigError(
                "KV blocks go to the disk from the host's memory",
                found=f"kv_offload_disk_gib={self.kv_offload_disk_gib} without kv_offload_gib",
                hint="Give kv_offload_gib too",
            )
        if (self.kv_offload_disk_gib > 0) != (self.kv_offload_path is not None):
            raise ConfigError(
                "KV blocks on disk need a folder and a size",
                found=f"kv_offload_disk_gib={self.kv_offload_disk_gib}, kv_offload_path={shown(self.kv_offload_path)}",
                hint="Give both, or neither",
            )

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
        """How many ranks one engine has."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def other_engines(self) -> bool:
        """The engine, or each of several, runs in a process of its own."""
        return self.engine_process or self.data_parallel_size > 1

    @property
    def other_processes(self) -> str:
        """The setting by which the model runs in other processes than the client's; empty where it does not."""
        if self.data_parallel_size > 1:
            return f"data_parallel_size={self.data_parallel_size}"
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

    @property
    def encoder_cache_bytes(self) -> int:
        """`encoder_cache_space` in bytes."""
        return int(self.encoder_cache_space * (1 << 30))

    @property
    def num_speculative_tokens(self) -> int:
        """Most guesses at a sequence's next tokens in a step; 0 without speculative decoding."""
        speculation = parse_speculative_config(self.speculative_config)
        return 0 if speculation is None else speculation.num_tokens

    @property
    def draft_model(self) -> str | None:
        """The model that makes guesses; None where they are looked up, or none are made."""
        speculation = parse_speculative_config(self.speculative_config)
        return None if speculation is None else speculation.model

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
            "quantization": Quantization(self.quantization),
            "world_size": self.num_ranks,
            # Each pipeline stage has layers of its own, whose KV cache groups need not be alike.
            "kv_cache_groups": self.pipeline_parallel_size == 1 and not self.disable_hybrid_kv_cache_manager,
            "prepare_sleep": prepare_sleep,
            "max_loras": self.max_loras if self.enable_lora else 0,
        }
        return WorkerConfig(**shared | own)


def _gib(size: float | None) -> int | None:
    return None if size is None else int(size * (1 << 30))


def _parse_dtype(name: str, text: str) -> DType | None:
    if text == "auto":
        return None
    allowed = _COMPUTED_IN if name == "dtype" else tuple(DType)
    try:
        dtype = DType.of(_DTYPE_ALIASES.get(text, text))
    except ValueError:
        dtype = None
    if dtype in allowed:
        return dtype
    problem = "is not an element type" if dtype is None else "is not an element type that models compute in"
    known = ["auto", *(one.value for one in allowed), *(a for a, full in _DTYPE_ALIASES.items() if full in allowed)]
    raise ConfigError(f"{name}={shown(text)} {problem}", hint=did_you_mean(text, known))
