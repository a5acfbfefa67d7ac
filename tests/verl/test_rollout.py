"""verl's own manager, client, load balancer and registries over this engine, on a cluster of this machine without accelerators."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
import verl
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from transformers import LlamaConfig, LlamaForCausalLM
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout import get_rollout_class
from verl.workers.rollout.llm_server import LLMServerManager
from verl.workers.rollout.replica import RolloutMode, TokenOutput, get_rollout_replica_class

from hardpoint import LLM, SamplingParams
from hardpoint.compat.verl import HardpointReplica, ServerAdapter, engine_settings
from hardpoint.interfaces.errors import ConfigError, CorruptWeights, EngineAsleep, InvalidRequest, WeightsMissing

PROMPT = [5, 9, 22, 7]
GREEDY = {"temperature": 0, "max_tokens": 8, "logprobs": True, "ignore_eos": True}
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def models() -> list[LlamaForCausalLM]:
    """Two random Llamas of one tiny shape, with tied embeddings, which trainers send twice."""
    made = []
    for seed in range(2):
        torch.manual_seed(seed)
        made.append(
            LlamaForCausalLM(
                LlamaConfig(
                    vocab_size=64,
                    hidden_size=64,
                    intermediate_size=96,
                    num_hidden_layers=2,
                    num_attention_heads=4,
                    num_key_value_heads=2,
                    max_position_embeddings=512,
                    initializer_range=0.2,
                    tie_word_embeddings=True,
                    pad_token_id=0,
                    bos_token_id=1,
                    eos_token_id=2,
                )
            )
        )
    return made


@pytest.fixture(scope="module")
def folders(models: list[LlamaForCausalLM], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    found = [tmp_path_factory.mktemp("model") for _ in models]
    for model, folder in zip(models, found, strict=True):
        model.save_pretrained(folder)
    return found


@pytest.fixture(scope="module")
def expected(folders: list[Path]) -> list[tuple[list[int], list[float]]]:
    """Each model's tokens and their log probabilities, from an engine in this process."""
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=0, ignore_eos=True, flat_logprobs=True)
    found = []
    for folder in folders:
        with LLM(str(folder), dtype="float32", num_device_blocks=32, skip_tokenizer_init=True) as llm:
            (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
        found.append((list(output.outputs[0].token_ids), list(output.outputs[0].logprobs.logprobs)))
    assert found[0][0] != found[1][0]
    return found


@pytest.fixture(scope="module")
def config(folders: list[Path]) -> DictConfig:
    """verl's configuration of its PPO trainer, with what docs/integrations.md says, and a tiny engine."""
    document = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text("utf-8")
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", document, re.MULTILINE | re.DOTALL)
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        whole = compose("ppo_trainer")
    tiny = {
        "model": {"path": str(folders[0]), "load_tokenizer": False},
        "rollout": {
            "dtype": "float32",
            "prompt_length": 16,
            "response_length": 400,
            "engine_kwargs": {"hardpoint": {"num_device_blocks": 64, "skip_tokenizer_init": True, "threads": 1}},
        },
    }
    OmegaConf.set_struct(whole, False)
    merged = OmegaConf.merge(whole, OmegaConf.create(block), {"actor_rollout_ref": tiny})
    assert isinstance(merged, DictConfig)
    return merged


@pytest.fixture(scope="module")
def manager(config: DictConfig) -> Iterator[LLMServerManager]:
    class Trainer:
        pass

    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        workers = SimpleNamespace(workers=[ray.remote(Trainer).remote()], world_size=1)
        yield LLMServerManager.create(config, worker_group=workers)
    finally:
        ray.shutdown()


@pytest.fixture
def adapter(config: DictConfig, monkeypatch: pytest.MonkeyPatch) -> ServerAdapter:
    monkeypatch.setenv("RANK", "0")
    return made(config)


def made(config: DictConfig, **changes: Any) -> ServerAdapter:
    """Return what a training worker makes, with some settings of the rollout changed."""
    rollout = omega_conf_to_dataclass(OmegaConf.merge(config.actor_rollout_ref.rollout, changes))
    model = omega_conf_to_dataclass(config.actor_rollout_ref.model, dataclass_type=HFModelConfig)
    return get_rollout_class("hardpoint")(config=rollout, model_config=model, device_mesh=None)


async def generated(manager: LLMServerManager, **params: Any) -> TokenOutput:
    return await manager.get_client().generate("a", prompt_ids=PROMPT, sampling_params=GREEDY | params)


def test_verls_registries_have_it() -> None:
    assert get_rollout_class("hardpoint") is ServerAdapter
    assert get_rollout_replica_class("hardpoint") is HardpointReplica


def test_a_step_of_a_trainer(
    manager: LLMServerManager,
    config: DictConfig,
    models: list[LlamaForCausalLM],
    expected: list[tuple[list[int], list[float]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory is given back and taken again in two parts; the same weights give the same tokens, and others those of their model."""
    monkeypatch.setenv("RANK", "0")
    # Buckets of no size: each tensor goes alone.
    adapter = made(config, checkpoint_engine={"update_weights_bucket_megabytes": 0})
    (replica,) = manager.get_replicas()

    async def weights(number: int) -> AsyncIterator[tuple[str, torch.Tensor]]:
        memory = torch.empty(1 << 20)
        for name, values in models[number].state_dict().items():
            # As receivers of weights do it: every tensor in the same memory.
            shared = memory[: values.numel()].view(values.shape)
            yield name, shared.copy_(values)

    async def step() -> None:
        # Random weights, as verl's configuration asks for until the trainer's come.
        found = await generated(manager)
        assert (len(found.token_ids), found.stop_reason) == (8, "completed")
        assert found.token_ids not in (expected[0][0], expected[1][0])
        assert found.extra_fields["global_steps"] is None
        for number in (0, 1):
            await (replica.sleep() if number else adapter.release())
            with pytest.raises(EngineAsleep):
                await generated(manager)
            await adapter.resume(["weights"])
            await adapter.update_weights(weights(number), global_steps=number + 1)
            with pytest.raises(EngineAsleep):
                await generated(manager)
            await adapter.resume(["kv_cache"])
            found = await generated(manager)
            assert found.token_ids == expected[number][0]
            assert found.log_probs == pytest.approx(expected[number][1], abs=1e-4)
            assert found.extra_fields["global_steps"] == number + 1
        # The KV cache alone, as between steps whose weights came while it was awake.
        await replica.release_kv_cache()
        await adapter.update_weights(iter(models[0].state_dict().items()))
        await replica.resume_kv_cache()
        assert (await generated(manager)).token_ids == expected[0][0]
        # Weights of which some did not come are not generated with.
        await adapter.release()
        await adapter.resume(["weights", "kv_cache"])
        await adapter.update_weights(list(models[0].state_dict().items())[:3])
        with pytest.raises(WeightsMissing):
            await generated(manager)
        with pytest.raises(CorruptWeights, match=r"model\.nothing"):
            await adapter.update_weights([("model.nothing", torch.zeros(1))])
        await adapter.update_weights(iter(models[0].state_dict().items()))
        assert (await generated(manager)).token_ids == expected[0][0]

    asyncio.run(step())


def test_requests_are_aborted_and_wait_until_generation_resumes(
    manager: LLMServerManager, expected: list[tuple[list[int], list[float]]]
) -> None:
    (replica,) = manager.get_replicas()

    async def aborted() -> None:
        long = [asyncio.ensure_future(generated(manager, max_tokens=400)) for _ in range(2)]
        (server,) = replica.servers
        while (await server.abort_all_requests.remote())["aborted_count"] == 0:
            await replica.resume_generation()
        waiting = asyncio.ensure_future(generated(manager))
        (first, *_), _ = await asyncio.wait(long, return_when=asyncio.FIRST_COMPLETED)
        assert first.result().stop_reason == "aborted"
        assert len(first.result().token_ids) < 400
        await replica.abort_all_requests(reject_request=True)
        assert (await generated(manager)).stop_reason == "aborted"
        await replica.resume_generation()
        assert (await generated(manager)).token_ids == expected[0][0]
        await asyncio.gather(*long, waiting)

    asyncio.run(aborted())


def test_what_is_not_done_is_refused_by_name(
    manager: LLMServerManager, config: DictConfig, adapter: ServerAdapter, models: list[LlamaForCausalLM]
) -> None:
    for changes in ({"quantization": "fp8"}, {"data_parallel_size": 2}, {"prometheus": {"enable": True}}):
        with pytest.raises(ConfigError, match=next(iter(changes))):
            made(config, **changes)
    rollout: RolloutConfig = adapter.config
    assert engine_settings(rollout)["max_model_len"] == 416
    adapters = OmegaConf.merge(config, {"actor_rollout_ref": {"model": {"lora_rank": 8}}})
    with pytest.raises(ConfigError, match=r"model\.lora\.merge"):
        made(adapters)
    replica = HardpointReplica(1, rollout, config.actor_rollout_ref.model, gpus_per_node=1)
    replica.rollout_mode = RolloutMode.STANDALONE
    replica.workers = manager.worker_group.workers
    with pytest.raises(ConfigError, match="mode standalone"):
        asyncio.run(replica.launch_servers())

    async def requests() -> None:
        with pytest.raises(InvalidRequest, match="delta_flush"):
            await adapter.update_weights([], wire_format="delta_flush")
        with pytest.raises(InvalidRequest, match="n=2"):
            await generated(manager, n=2, temperature=1)
        with pytest.raises(InvalidRequest, match="pictures"):
            await manager.get_client().generate("a", prompt_ids=PROMPT, sampling_params=GREEDY, image_data=[b"x"])
        with pytest.raises(InvalidRequest, match="sounds"):
            await manager.get_client().generate("a", prompt_ids=PROMPT, sampling_params=GREEDY, audio_data=[b"x"])

    asyncio.run(requests())


def test_profiles_of_the_training_workers_alone_do_not_stop_a_step(manager: LLMServerManager) -> None:
    """verl's trainer calls its rollout's profiler, too."""
    manager.start_profile()
    manager.stop_profile()


def test_replicas_draw_different_answers(config: DictConfig, adapter: ServerAdapter) -> None:
    """Engines of one seed give their first requests the same random numbers; verl gives replicas answers to one prompt to draw."""
    assert engine_settings(adapter.config, 0)["seed"] == config.actor_rollout_ref.rollout.get("seed", 42)
    assert len({engine_settings(adapter.config, rank)["seed"] for rank in range(3)}) == 3
    assert engine_settings(adapter.config, trust_remote_code=True)["trust_remote_code"]


def test_only_a_replicas_first_worker_speaks_to_its_server(config: DictConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two workers of a replica, the second reads all weights, since that may be collective, and sends nothing."""
    monkeypatch.setenv("RANK", "3")
    adapter = made(config, tensor_model_parallel_size=2)
    assert (adapter.replica_rank, adapter.is_leader_rank) == (1, False)
    left = iter([("a", torch.zeros(1)), ("b", torch.zeros(1))])
    asyncio.run(adapter.update_weights(left))
    assert next(left, None) is None
    asyncio.run(adapter.release())
    asyncio.run(adapter.resume(["weights"]))
