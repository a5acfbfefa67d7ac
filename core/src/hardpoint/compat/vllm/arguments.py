"""vLLM's names of arguments: settings of this engine, what has no effect here, and what is refused unless it asks for nothing."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping
from typing import Any

from hardpoint import EngineConfig
from hardpoint.interfaces.blocks import Quantization
from hardpoint.interfaces.errors import ConfigError
from hardpoint.validation import did_you_mean, shown

_log = logging.getLogger("hardpoint")

_THEIRS = {
    "memory_utilization": "gpu_memory_utilization",
    "num_device_blocks": "num_gpu_blocks_override",
    "kv_dtype": "kv_cache_dtype",
    "executor": "distributed_executor_backend",
}
"""Settings that vLLM calls otherwise; `EngineConfig.from_arguments` understands both."""

_QUIET = frozenset(
    {
        *("aggregate_engine_logging", "disable_log_requests", "disable_log_stats", "enable_log_requests", "log_level"),
        *(
            "ignore_patterns",
            "max_logprobs",
            "served_model_name",
            "show_hidden_metrics_for_version",
            "use_tqdm_on_load",
        ),
        *("fully_sharded_loras", "lora_dtype", "lora_extra_vocab_size"),
        *("mm_processor_cache_gb", "mm_processor_cache_type", "disable_mm_preprocessor_cache", "skip_mm_profiling"),
        *("allow_deprecated_quantization", "collect_detailed_traces", "cudagraph_metrics", "custom_histogram_buckets"),
        *("enable_layerwise_nvtx_tracing", "enable_logging_iteration_details", "enable_mfu_metrics"),
        *("enable_mm_processor_stats", "fail_on_environ_validation", "jit_monitor_mode", "jit_monitor_verbose"),
        *("kv_cache_metrics", "kv_cache_metrics_sample", "kv_offloading_backend", "log_config_file", "logging_config"),
        "chat_template",
    }
)
"""Arguments about logs, or about what is refused elsewhere where it is asked for: any value is taken."""

_TUNING = frozenset(
    {
        *("all2all_backend", "async_scheduling", "attention_backend", "attention_config", "compilation_config"),
        *("cudagraph_capture_sizes", "disable_cascade_attn", "disable_custom_all_reduce"),
        *("disable_async_output_proc", "enable_flashinfer_autotune", "guided_decoding_backend", "kernel_config"),
        *("linear_backend", "max_cudagraph_capture_size", "max_parallel_loading_workers", "max_seq_len_to_capture"),
        *("model_loader_extra_config", "moe_backend", "multi_step_stream_outputs", "num_scheduler_steps", "numa_bind"),
        *("optimization_level", "performance_mode", "prefix_caching_hash_algo", "pt_load_map_location"),
        *("renderer_num_workers", "safetensors_load_strategy", "stream_interval"),
        *("use_v2_block_manager", "watermark"),
        *("cp_kv_cache_interleave_size", "cpu_distributed_timeout_seconds", "dbo_decode_token_threshold"),
        *("dbo_prefill_token_threshold", "dcp_comm_backend", "dcp_kv_cache_interleave_size", "dcp_q_replicate"),
        *("disable_chunked_mm_input", "disable_nccl_for_dp_synchronization", "distributed_timeout_seconds"),
        *("dp_sync_interval", "enable_batch_sharded_sampling", "enable_cumem_allocator", "enable_ep_weight_filter"),
        *("enable_hc_sp", "enable_mixed_moe_lora_format", "enable_moe_shared_loras", "enable_nccl_comm_suspend"),
        *("enable_shm_tensor_arena", "eplb_config", "expert_placement_strategy", "gdn_prefill_backend"),
        *("ir_op_priority", "kda_decode_backend", "kda_prefill_backend", "long_prefill_token_threshold_adaptive"),
        *("mamba_backend", "mamba_block_size", "mamba_cache_mode", "mamba_ssu_algorithm", "max_num_active_seqs"),
        *("max_num_scheduled_tokens", "mm_device_do_normalize", "mm_encoder_attn_backend", "mm_encoder_tp_mode"),
        *("mm_hasher_algorithm", "mm_ipc_gpu_memory_gb", "mm_processor_device", "mm_shm_cache_max_object_size_mb"),
        *("mm_tensor_ipc", "numa_bind_cpus", "numa_bind_nodes", "prefill_schedule_interval", "prefix_match_unit"),
        *("safetensors_prefetch_block_size", "safetensors_prefetch_num_threads", "scheduler_reserve_full_isl"),
        *("sleep_mode_offload_cudagraph", "sparse_indexer_topk_backend", "specialize_active_lora"),
        *("swa_bounded_replay", "ubatch_size", "use_fp64_gumbel"),
    }
)
"""Arguments that tune how vLLM computes, and not what: any value is taken, and said to have no effect."""

_BY_THE_FIRST = "The first process starts the engines of data_parallel_size: start the script once, without a rank"
_STORED_AS = ("awq", "awq_marlin", "compressed-tensors", "gguf", "gptq", "gptq_marlin")
"""vLLM's names of formats whose weights are multiplied by as they are stored, where the backend can."""
_FROM_CHECKPOINT = "Weights are used as the checkpoint stores them: give a checkpoint that is quantised so"
_PER_REQUEST = "Pass functions with each request: SamplingParams(logits_processors=[...])"

_REFUSED: Mapping[str, str] = {
    "additional_config": "There are no plugins of the platform to configure: leave it out",
    "allowed_media_domains": "Give pictures as data: URLs, as PIL images, or as files below allowed_local_media_path",
    "code_revision": "Give revision, which is of the model and its code",
    "config_format": "Configurations are read as Hugging Face writes them, and of GGUF files",
    "cpu_offload_gb": "Weights are on the device as a whole: choose a smaller or quantised checkpoint, or more ranks",
    "data_parallel_rank": _BY_THE_FIRST,
    "decode_context_parallel_size": "Use tensor_parallel_size or pipeline_parallel_size",
    "disable_sliding_window": "Layers see the window that the model has: leave it out",
    "ec_transfer_config": "Encoders run in the engine: leave it out",
    "enable_dbo": "Leave it out",
    "enable_eplb": "Leave it out",
    "enable_expert_parallel": "Use tensor_parallel_size, by which experts are divided, too",
    "enable_reasoning": "Use StructuredOutputsParams(after='</think>'), or the server, which tells reasoning from answers",
    "hf_config_path": "Give a folder that holds the configuration and the weights",
    "hf_token": "Set HF_TOKEN in the environment",
    "interleave_mm_strings": "Leave it out: the chat template puts pictures where the message has them",
    "io_processor_plugin": "Prepare the data before the call",
    "kv_cache_memory_bytes": "Give num_gpu_blocks_override, or gpu_memory_utilization",
    "kv_events_config": "Leave it out: the server's metrics say what the prefix cache does",
    "kv_offloading_size": "Give kv_offload_gib",
    "kv_sharing_fast_prefill": "Leave it out",
    "kv_transfer_config": "Prefill and decode run in one engine: leave it out",
    "language_model_only": "Give limit_mm_per_prompt={'image': 0} to take no pictures",
    "logits_processor_pattern": _PER_REQUEST,
    "logits_processors": _PER_REQUEST,
    "media_io_kwargs": "Prepare the pictures before the call",
    "mm_encoder_only": "Leave it out",
    "mm_processor_kwargs": "Edit preprocessor_config.json in a copy of the model's folder, and give that",
    "nnodes": "Ranks on several machines run over Ray: distributed_executor_backend='ray'",
    "node_rank": "Ranks on several machines run over Ray: distributed_executor_backend='ray'",
    "override_generation_config": "Give SamplingParams with the request, or generation_config, a folder with another such file",
    "otlp_traces_endpoint": "The server traces: `hardpoint serve --help`",
    "override_pooler_config": "Give PoolingParams with the request",
    "pooler_config": "Give PoolingParams with the request",
    "prefill_context_parallel_size": "Use tensor_parallel_size or pipeline_parallel_size",
    "profiler_config": "Give it to LLM, or set VLLM_TORCH_PROFILER_DIR",
    "quantization_config": _FROM_CHECKPOINT,
    "reasoning_parser": "Use StructuredOutputsParams(after='</think>'), or the server, which tells reasoning from answers",
    "rope_scaling": "Edit config.json in a copy of the model's folder, and give that",
    "rope_theta": "Edit config.json in a copy of the model's folder, and give that",
    "scheduler_cls": "Give scheduling_policy and the other settings of the scheduler",
    "speculative_model": "Give speculative_config={'method': 'draft_model', 'model': ...}",
    "tokenizer_revision": "Give tokenizer, a folder with the other one",
    "weight_transfer_config": "Use update_weights with (name, tensor) pairs, or reload_weights",
    "worker_cls": "Write a backend (docs/adding-a-device.md)",
    "worker_extension_cls": "Use update_weights, reload_weights and collective_rpc's own calls",
    **dict.fromkeys(
        (
            *("aux_output_config", "cpu_offload_params", "default_mm_loras", "device_ids", "diffusion_config"),
            *("ec_manager_config", "elastic_ep_max_dp_size", "enable_elastic_ep", "enable_fault_tolerance"),
            *("enable_mamba_cache_stochastic_rounding", "enable_mamba_shared_prefix_checkpoint", "enable_mm_embeds"),
            *("enable_return_routed_experts", "enable_tower_connector_lora", "enable_trace_replay", "engram_config"),
            *("fault_tolerance_config", "kv_cache_dtype_skip_layers", "lora_target_modules", "mamba_cache_dtype"),
            *("mamba_cache_philox_rounds", "mamba_config", "mamba_ssm_cache_dtype", "max_lora_cls_labels"),
            *("max_num_queued_reqs", "max_num_queued_tokens", "mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path"),
            *("mm_encoder_fp8_scale_save_margin", "mm_encoder_fp8_scale_save_path", "model_class_overrides"),
            *("model_weights", "offload_backend", "offload_group_size", "offload_num_in_group", "offload_params"),
            *("offload_prefetch_step", "per_request_spec_decode_metrics", "prefix_cache_retention_interval"),
            *("ray_workers_use_nsight", "reasoning_config", "reasoning_parser_plugin", "replayssm_buffer_len"),
            *("return_sampling_mask", "shutdown_timeout", "sleep_preserve_parameter_names", "spec_method"),
            *("spec_model", "spec_tokens", "tokens_only", "use_replayssm", "video_pruning_method"),
            *("video_pruning_rate", "watermark_config"),
        ),
        "Leave it out",
    ),
    **dict.fromkeys(
        (
            *("data_parallel_address", "data_parallel_external_lb", "data_parallel_hybrid_lb"),
            *("data_parallel_multi_port_external_lb", "data_parallel_rpc_port", "data_parallel_size_local"),
            *("data_parallel_start_rank", "master_addr", "master_port"),
        ),
        _BY_THE_FIRST,
    ),
}
"""Arguments of features that are not here, and what to do instead. Values that ask for nothing are taken."""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "config_format": ("auto", "hf"),
    "hf_token": (True,),
    "decode_context_parallel_size": (1,),
    "mamba_cache_dtype": ("auto",),
    "mamba_ssm_cache_dtype": ("auto",),
    "master_addr": ("127.0.0.1",),
    "nnodes": (1,),
    "offload_backend": ("auto",),
    "prefill_context_parallel_size": (1,),
    "worker_cls": ("auto",),
}
_ASKS_NOTHING: tuple[Any, ...] = (False, 0, 0.0, "", {}, [], (), set())

_CHOICES: Mapping[str, tuple[Any, ...]] = {
    "data_parallel_backend": ("mp", "ray"),
    "model_impl": ("auto", "vllm"),
    "task": ("auto", "generate", "embed", "embedding", "classify", "score", "reward"),
    "tokenizer_mode": ("auto", "hf"),
}
"""Arguments of which some values are what this engine does anyway."""

_STRUCTURED = "structured_outputs_config"

_OF_DRAFTS: Mapping[str, tuple[Any, ...]] = {
    "disable_padded_drafter_batch": (False, True),
    "draft_tensor_parallel_size": (1,),
    "enforce_eager": (False, True),
    "parallel_drafting": (False,),
}
"""Keys of `speculative_config` that are not here, with the values that change no text."""

KNOWN = frozenset(_QUIET | _TUNING | _REFUSED.keys() | _CHOICES.keys() | {_STRUCTURED})
"""vLLM's arguments that are no settings of this engine."""

SETTINGS = {_THEIRS.get(one.name, one.name): one for one in dataclasses.fields(EngineConfig)}
"""By vLLM's names, the fields of `EngineConfig`."""
_NAMES = frozenset(SETTINGS) | frozenset(_THEIRS)


def engine_settings(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `EngineConfig.from_arguments` takes of vLLM's arguments; None means the default, as it does there.

    Raises ConfigError for an argument that asks for what is not here, and for a name that nobody knows.
    """
    settings: dict[str, Any] = {}
    without_effect = []
    for name, value in arguments.items():
        if value is None or name in _QUIET:
            continue
        if name in _TUNING:
            without_effect += [] if _is_in(value, _ASKS_NOTHING) else [name]
        elif name == _STRUCTURED:
            without_effect += _structured_outputs(value)
        elif name in _CHOICES:
            choose(name, value, _CHOICES[name])
        elif name in _REFUSED:
            if not _is_in(value, _NEUTRAL.get(name, ()) + _ASKS_NOTHING):
                raise ConfigError(f"{name} is not supported", found=f"{name}={shown(value)}", hint=_REFUSED[name])
        elif name == "quantization":
            settings[name] = _quantization(value)
        elif name == "speculative_config" and isinstance(value, Mapping):
            settings[name] = {
                key: one for key, one in value.items() if one is not None and not _is_in(one, _OF_DRAFTS.get(key, ()))
            }
        elif name in _NAMES:
            settings[name] = value
        else:
            raise ConfigError(
                f"{name!r} is neither an argument of vLLM nor a setting of the engine",
                hint=did_you_mean(name, _NAMES | KNOWN),
            )
    if without_effect:
        _log.warning("without effect here: %s", ", ".join(sorted(without_effect)))
    _place_ranks(
        settings, arguments.get("data_parallel_backend") == "ray" and settings.get("data_parallel_size", 1) != 1
    )
    if isinstance(settings.get("device"), str):
        # vLLM's name of a kind of device is that of a backend.
        settings["backend"] = settings.pop("device")
        if settings["backend"] == "auto":
            del settings["backend"]
    return settings


def profile_folder(config: Any) -> str | None:
    """Return the folder of profiles that vLLM's `profiler_config` names, else VLLM_TORCH_PROFILER_DIR; raises ConfigError."""
    if config is None:
        return os.environ.get("VLLM_TORCH_PROFILER_DIR")
    values = dict(config) if isinstance(config, Mapping) else {}
    kind, folder = values.pop("profiler", None), values.pop("torch_profiler_dir", None)
    if kind != "torch" or values or not isinstance(folder, str):
        raise ConfigError(
            "profiler_config is not supported as given",
            found=f"profiler_config={shown(config)}",
            hint="Give {'profiler': 'torch', 'torch_profiler_dir': FOLDER}",
        )
    return folder


def choose(name: str, value: Any, known: tuple[Any, ...]) -> Any:
    """Return a value that is one of those that are known; raises ConfigError."""
    if not _is_in(value, known):
        raise ConfigError(f"{name}={value!r} is not supported", hint=f"Use one of: {', '.join(map(str, known))}")
    return value


def _quantization(name: Any) -> Any:
    """Return the engine's setting for vLLM's name of a checkpoint's format; raises ConfigError."""
    if name in _STORED_AS:
        return Quantization.AUTO.value
    if name not in set(Quantization):
        known = ", ".join((*_STORED_AS, *(one for one in Quantization if one.rounds_to is not None)))
        raise ConfigError(
            "quantization is not supported as given", found=f"quantization={shown(name)}", hint=f"Use one of: {known}"
        )
    return name


def _structured_outputs(value: Any) -> list[str]:
    """Return the argument's name where it names a backend; raises ConfigError where it changes which texts match."""
    given = dict(value) if isinstance(value, Mapping) else {"": value}
    names_backend = given.pop("backend", "auto") != "auto"
    if not all(one is None or _is_in(one, _ASKS_NOTHING) for one in given.values()):
        raise ConfigError(
            f"{_STRUCTURED} is not supported as given",
            found=f"{_STRUCTURED}={shown(value)}",
            hint="Give {'backend': ...} alone; of a model that reasons, StructuredOutputsParams(after='</think>')",
        )
    return [_STRUCTURED] if names_backend else []


def _place_ranks(settings: dict[str, Any], engines_on_ray: bool) -> None:
    if engines_on_ray:
        if settings.setdefault("distributed_executor_backend", "ray") != "ray":
            raise ConfigError(
                "engines of a Ray cluster have their ranks in it",
                found=f"data_parallel_backend='ray', distributed_executor_backend={shown(settings['distributed_executor_backend'])}",
                hint="Leave distributed_executor_backend out",
            )
        return
    if settings.get("distributed_executor_backend") != "external_launcher":
        return
    if settings.get("tensor_parallel_size", 1) != 1 or settings.get("pipeline_parallel_size", 1) != 1:
        raise ConfigError(
            "processes that a launcher started cannot be ranks of one engine",
            found="distributed_executor_backend='external_launcher' with several ranks",
            hint="Start the script once, without torchrun, and leave out distributed_executor_backend: the engine starts its ranks. Or "
            "give each process an engine of one rank",
        )
    settings["distributed_executor_backend"] = "uni"


def _is_in(value: Any, some: tuple[Any, ...]) -> bool:
    return any(type(value) is type(one) and value == one for one in some)
