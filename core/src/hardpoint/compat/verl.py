"""verl's rollout over this engine: `actor_rollout_ref.rollout.name=hardpoint`, with trainer and engine on the same machine.

Importing this registers both halves with verl: `ServerAdapter`, which its training workers hold, and `HardpointReplica`, which starts the
`HardpointServer` that they speak to, a Ray actor with an engine. verl's processes import it where VERL_USE_EXTERNAL_MODULES, or
`actor_rollout_ref.model.external_lib`, is "hardpoint.compat.verl".

Hybrid replicas beside workers without accelerators are started, with whole weights sent through Ray's object store; others are refused.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterable, Iterable, Sequence
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import Tensor
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, RolloutReplicaRegistry, TokenOutput
from verl.workers.rollout.utils import ensure_async_iterator

from hardpoint import AsyncLLM, RequestOutput, SamplingParams
from hardpoint.engine.outputs import FlatLogprobs
from hardpoint.interfaces.errors import ConfigError, InvalidRequest

NAME = "hardpoint"

SentTensor = tuple[str, torch.dtype, tuple[int, ...], NDArray[np.uint8]]
"""A weight on its way: the checkpoint's name for it, its dtype and shape, and its bytes."""

# Settings of verl's rollout that would be without effect here, each with the values that ask for nothing.
_REFUSED: dict[str, tuple[object, ...]] = {
    "cudagraph_capture_sizes": (None,),
    "data_parallel_size": (1,),
    "enable_rollout_routing_replay": (False,),
    "expert_parallel_size": (1, None),
    "full_determinism": (False,),
    "layered_summon": (False,),
    "moe_tensor_parallel_size": (1, None),
    "quantization": (None,),
    "quantization_config_file": (None,),
}


def engine_settings(config: RolloutConfig, replica_rank: int = 0, trust_remote_code: bool = False) -> dict[str, Any]:
    """Return the settings of `AsyncLLM` that a rollout's configuration stands for; those under `engine_kwargs.hardpoint` come before.

    Args:
        replica_rank: replicas have seeds of their own, or they would draw the same answers to a prompt that several are given.
        trust_remote_code: of the model's configuration.

    Raises ConfigError where the configuration asks for what is not done here.
    """
    asked = [f"{name}={config.get(name)}" for name, neutral in _REFUSED.items() if config.get(name) not in neutral]
    asked += [f"{name}.enable=True" for name in ("mtp", "profiler", "prometheus", "qat") if _enabled(config.get(name))]
    if config.disaggregation.enabled:
        asked.append("disaggregation.enabled=True")
    if asked:
        raise ConfigError(
            "the rollout asks for what Hardpoint does not do in verl", found=", ".join(asked), hint="Leave it out"
        )
    settings = {
        "tensor_parallel_size": config.tensor_model_parallel_size,
        "pipeline_parallel_size": config.pipeline_model_parallel_size,
        "memory_utilization": config.gpu_memory_utilization,
        "max_model_len": config.max_model_len or config.prompt_length + config.response_length,
        "limit_mm_per_prompt": None if config.limit_images is None else {"image": config.limit_images},
        "enable_sleep_mode": config.enable_sleep_mode or config.free_cache_engine,
        "seed": config.seed + replica_rank,
        "trust_remote_code": trust_remote_code,
    }
    same = (
        "dtype enable_chunked_prefill enable_prefix_caching enforce_eager load_format logprobs_mode"
        " max_num_batched_tokens max_num_seqs scheduling_policy"
    )
    settings |= {name: config.get(name) for name in same.split()}
    return settings | dict(config.engine_kwargs.get(NAME) or {})


def _enabled(part: Any) -> bool:
    return bool(part is not None and part.get("enable", False))


def _server_name(replica_rank: int, suffix: str = "") -> str:
    return f"{NAME}_server_{replica_rank}_0{suffix}"


class HardpointServer:
    """An engine as verl's adapters, replicas and load balancer call it, in a Ray actor.

    Args:
        model: folder of the model.
        config: of the rollout.
        settings: of the engine, see `engine_settings`.
    """

    def __init__(self, model: str, config: RolloutConfig, settings: dict[str, Any]) -> None:
        self._model, self._config, self._settings = model, config, settings
        self._llm: AsyncLLM
        self._global_steps: int | None = None
        self._running: set[str] = set()
        self._admits = asyncio.Event()
        self._rejects = False

    async def launch(self) -> None:
        """Load the model; errors as for `LLM`."""
        self._llm = await AsyncLLM.create(self._model, **self._settings)
        self._admits.set()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: Sequence[Any] | None = None,
        video_data: Sequence[Any] | None = None,
        audio_data: Sequence[Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
        priority: int = 0,
    ) -> TokenOutput:
        """Continue a prompt by one completion, and return its tokens with, where `logprobs` is true, their log probabilities.

        Args:
            sampling_params: of `SamplingParams` by name, with `logprobs` a bool; `max_new_tokens` is another name for `max_tokens`.
            priority: see `LLM.generate`.

        Raises InvalidRequest where there are pictures, films or sounds, several completions or `prompt_logprobs`, and what
        `AsyncLLM.generate` raises. `mm_processor_kwargs` is of these alone.
        """
        if image_data or video_data or audio_data:
            raise InvalidRequest("pictures, films and sounds are not taken from verl", hint="Give prompts of tokens")
        params = self._params(len(prompt_ids), dict(sampling_params))
        while not self._admits.is_set():
            if self._rejects:
                return self._output([], None, "aborted")
            await self._admits.wait()
        # Nothing awaits between the gate and the engine's taking the request, so that an abort finds all that came through.
        self._running.add(request_id)
        try:
            async for output in self._llm.generate(
                {"prompt_token_ids": list(prompt_ids)}, params, request_id, priority=priority
            ):
                last: RequestOutput = output
        finally:
            self._running.discard(request_id)
        (completion,) = last.outputs
        logprobs = completion.logprobs
        reason = {"abort": "aborted", "stop": "completed", "length": "completed"}
        return self._output(
            list(completion.token_ids),
            # One entry for each token: with logprobs=0 there is the sampled one's alone.
            list(logprobs.logprobs) if isinstance(logprobs, FlatLogprobs) else None,
            reason.get(completion.finish_reason or "", completion.finish_reason),
            num_cached_tokens=last.num_cached_tokens,
        )

    def _params(self, num_prompt_tokens: int, given: dict[str, Any]) -> SamplingParams:
        config = self._config
        room = self._llm.info.max_model_len - num_prompt_tokens
        most = min(config.response_length, config.prompt_length + config.response_length - num_prompt_tokens)
        for name in ("max_tokens", "max_new_tokens"):
            most = given.pop(name, most)
        given = {"repetition_penalty": config.repetition_penalty, "ignore_eos": config.ignore_eos} | given
        given["logprobs"] = 0 if given.get("logprobs") else None
        # A prompt that leaves no room is refused by the engine.
        params = SamplingParams(**given, max_tokens=max(1, min(most, room)), flat_logprobs=True, detokenize=False)
        if params.num_sequences != 1 or params.prompt_logprobs is not None:
            raise InvalidRequest(
                "verl is given one completion, without log probabilities of the prompt",
                found=f"n={params.n}, prompt_logprobs={params.prompt_logprobs}",
            )
        return params

    def _output(
        self, token_ids: list[int], log_probs: list[float] | None, stop_reason: str | None, **fields: Any
    ) -> TokenOutput:
        fields["global_steps"] = self._global_steps
        return TokenOutput(token_ids=token_ids, log_probs=log_probs, stop_reason=stop_reason, extra_fields=fields)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take memory again, "weights" or "kv_cache" or all; see `LLM.wake_up`."""
        await self._llm.wake_up(tags)

    async def sleep(self) -> None:
        """Serve what runs to its end and give all memory back; the weights are discarded, as the trainer will send new ones."""
        if self._config.free_cache_engine:
            await self._llm.sleep(level=2, mode="wait")

    async def release_kv_cache(self) -> None:
        """Give the memory of the KV cache back; the weights stay."""
        if self._config.free_cache_engine:
            await self._llm.sleep(level=1, mode="wait", tags="kv_cache", kv="discard")

    async def resume_kv_cache(self) -> None:
        """Take the memory of the KV cache again."""
        await self._llm.wake_up("kv_cache")

    async def clear_kv_cache(self) -> None:
        """Forget all cached prompt beginnings."""
        await self._llm.reset_prefix_cache()

    async def update_weights(self, tensors: Sequence[SentTensor]) -> int:
        """Replace some weights, and return how many were used; see `LLM.update_weights`."""
        # Copied, because the store's arrays cannot be written to, which torch's tensors have to allow.
        return await self._llm.update_weights(
            (name, torch.from_numpy(array.copy()).view(dtype).view(shape)) for name, dtype, shape, array in tensors
        )

    async def start_profile(self, **_: Any) -> None:
        """Do nothing: verl calls it of every replica, and profiles of the rollout are refused (see `engine_settings`)."""

    async def stop_profile(self) -> None:
        """See `start_profile`."""

    async def set_global_steps(self, global_steps: int) -> None:
        """Name the version of the weights, which outputs carry as `extra_fields["global_steps"]`."""
        self._global_steps = global_steps

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """End all requests with what they have, and let none begin until `resume_generation`.

        Args:
            reject_request: return later ones at once, as aborted, instead of letting them wait.
        """
        self._rejects = reject_request
        self._admits.clear()
        names = sorted(self._running)
        self._llm.abort(names)
        while self._running:
            await asyncio.sleep(0.005)
        await self._llm.reset_prefix_cache()
        return {"aborted_count": len(names), "request_ids": names}

    async def resume_generation(self) -> None:
        """Let requests begin again."""
        self._rejects = False
        self._admits.set()


class ServerAdapter(base.BaseRollout):  # type: ignore[misc]
    """What a training worker holds: it moves weights to its replica's server, and has it give memory back and take it again.

    Args:
        config, model_config, device_mesh: as verl gives them; see `engine_settings`.
        replica_rank: -1 for that of this worker, by the environment's RANK.

    Raises ConfigError where weights would be adapters (LoRA that is not merged), or as `engine_settings`.
    """

    def __init__(
        self, config: RolloutConfig, model_config: HFModelConfig, device_mesh: Any, replica_rank: int = -1
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        engine_settings(self.config)
        _check_no_adapters(self.model_config)
        ranks = self.config.tensor_model_parallel_size * self.config.pipeline_model_parallel_size
        rank = int(os.environ["RANK"])
        self.replica_rank = rank // ranks if replica_rank == -1 else replica_rank
        self.is_leader_rank = rank % ranks == 0
        self._handle: Any = None

    @property
    def _server(self) -> Any:
        # Not in the constructor: verl starts servers when its workers are there.
        if self._handle is None:
            self._handle = ray.get_actor(_server_name(self.replica_rank))
        return self._handle

    async def resume(self, tags: list[str]) -> None:
        """Take memory again: "weights" or "kv_cache"; see `LLM.wake_up`."""
        if self.config.free_cache_engine and self.is_leader_rank:
            await self._server.wake_up.remote(tags)

    async def release(self) -> None:
        """Give all memory back; the weights are discarded."""
        if self.config.free_cache_engine and self.is_leader_rank:
            await self._server.sleep.remote()

    async def update_weights(
        self,
        weights: Iterable[tuple[str, Tensor]] | AsyncIterable[tuple[str, Tensor]],
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        peft_config: Any = None,
        base_sync_done: bool = True,
    ) -> None:
        """Send whole weights by their names in the checkpoint, in buckets; every rank reads all pairs, since that may be collective.

        Args:
            global_steps: names the version; see `HardpointServer.set_global_steps`.

        Raises InvalidRequest for other formats and for adapters, and what `LLM.update_weights` raises.
        """
        if wire_format != "named_tensors" or peft_config is not None or not base_sync_done:
            raise InvalidRequest(
                "whole weights are taken, and neither changes of some nor adapters",
                found=f"wire_format={wire_format!r}, peft_config={peft_config!r}, base_sync_done={base_sync_done}",
                hint="Choose the checkpoint engine 'naive', and merge adapters (model.lora.merge=True)",
            )
        limit = self.config.checkpoint_engine.update_weights_bucket_megabytes << 20
        bucket: list[SentTensor] = []
        size = 0
        async for name, tensor in ensure_async_iterator(weights):
            if not self.is_leader_rank:
                continue
            # A copy, because the next pair may come in the same memory.
            values = tensor.detach().to("cpu", copy=True).contiguous()
            if bucket and size + values.nbytes > limit:
                await self._server.update_weights.remote(bucket)
                bucket, size = [], 0
            bucket.append((name, values.dtype, tuple(values.shape), values.view(-1).view(torch.uint8).numpy()))
            size += values.nbytes
        if bucket:
            await self._server.update_weights.remote(bucket)
        if self.is_leader_rank and global_steps is not None:
            await self._server.set_global_steps.remote(global_steps)


class HardpointReplica(RolloutReplica):  # type: ignore[misc]
    """A server beside the training workers of one machine. Its `server_address` is the actor's name: there is no HTTP server."""

    async def launch_servers(self) -> None:
        """Start the server and load the model; raises ConfigError where workers have accelerators, or are on several machines."""
        model = omega_conf_to_dataclass(self.model_config, dataclass_type=HFModelConfig)
        settings = engine_settings(self.config, self.replica_rank, model.trust_remote_code)
        _check_no_adapters(model)
        places = await asyncio.gather(*(worker.__ray_call__.remote(_place) for worker in self.workers))
        nodes = {node for node, _ in places}
        accelerators = sorted({one for _, found in places for one in found})
        if self.rollout_mode is not RolloutMode.HYBRID or self.nnodes != 1 or len(nodes) != 1 or accelerators:
            raise ConfigError(
                "replicas are started beside training workers of one machine without accelerators",
                found=f"mode {self.rollout_mode.value}, {len(nodes)} machines, accelerators: {', '.join(accelerators) or 'none'}",
            )
        name = _server_name(self.replica_rank, self.name_suffix)
        server = (
            ray.remote(HardpointServer)
            .options(
                name=name,
                max_concurrency=self.max_concurrency,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=nodes.pop(), soft=False),
            )
            .remote(model.local_path, self.config, settings)
        )
        await server.launch.remote()
        self.servers = [server]
        self._server_handle, self._server_address = server, name


def _place(_: Any) -> tuple[str, list[str]]:
    """Return the machine that a worker runs on, and the accelerators that it was given."""
    context = ray.get_runtime_context()
    given = context.get_accelerator_ids()
    return context.get_node_id(), [f"{kind} {one}" for kind, ids in given.items() for one in ids]


def _check_no_adapters(model: HFModelConfig) -> None:
    if (model.lora_rank > 0 or model.lora.get("rank", 0) > 0) and not model.lora.get("merge", False):
        raise ConfigError("adapters are not sent to the rollout", hint="Have verl merge them: model.lora.merge=True")


base._ROLLOUT_REGISTRY[NAME, "async"] = f"{__name__}.{ServerAdapter.__name__}"
RolloutReplicaRegistry.register(NAME, lambda: HardpointReplica)
