"""Models on two ranks, each on a node of its own."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from hardpoint import LLM, SamplingParams
from hardpoint.compat.vllm.arguments import engine_settings
from hardpoint.engine.data_parallel import DataParallelLoop
from hardpoint.engine.sleep import EngineState
from hardpoint.executor import RemoteExecutor
from hardpoint.executor.ray_transport import RayTransport
from hardpoint.interfaces.errors import ClusterError, ConfigError, RankFailed
from hardpoint_conformance.tiny_model import Model
from tests.e2e.conftest import Oracle
from tests.e2e.test_ranks import PROMPTS, REPORTED_WITHIN, TOKENS, _check_dead, _check_tokens, _compute


def _engine(model: str, **settings: Any) -> LLM:
    small = {"max_model_len": 256, "num_device_blocks": 64, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    return LLM(model, dtype="float32", backend="cpu", **(small | settings))


@pytest.mark.timeout(900)
def test_two_ranks_on_two_machines_share_each_layer(cluster: Any, shallow: Model, greedy: Any) -> None:
    oracle = Oracle.of(shallow)
    split = {"tensor_parallel_size": 2, "executor": "ray", "ray": {"resource": "split"}}
    with _engine(shallow.path, skip_tokenizer_init=True, **split) as llm:
        executor = llm.engine._loop.core.executor
        assert isinstance(executor, RemoteExecutor)
        transport = executor._transport
        assert isinstance(transport, RayTransport)
        assert len(set(transport.nodes)) == 2
        assert (llm.info.num_ranks, llm.info.path) == (2, "modules")
        _check_tokens(llm, oracle, greedy(TOKENS))

        report = llm.sleep(tier="disk")
        assert report.freed >= llm.info.weight_bytes
        assert llm.wake_up().state is EngineState.RUNNING
        _check_tokens(llm, oracle, greedy(TOKENS))

        for number, prompt in enumerate(PROMPTS):
            llm.engine.add_request(str(number), prompt, greedy(200))
        _compute(llm, 5)
        os.kill(executor.pids[1], signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises(RankFailed, match="its process has ended, or its machine") as raised:
            _compute(llm, 50)
        assert time.monotonic() - killed < REPORTED_WITHIN
        assert raised.value.rank == 1
        _check_dead(llm, rank=1)


@pytest.mark.timeout(900)
def test_several_engines_have_their_ranks_in_one_cluster(cluster: Any, shallow_demo: str) -> None:
    prompts = [{"prompt_token_ids": [5, 9, 22, 7 + number]} for number in range(4)]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with _engine(shallow_demo) as one:
        expected = [list(output.outputs[0].token_ids) for output in one.generate(prompts, params)]
    settings = engine_settings({"data_parallel_size": 2, "data_parallel_backend": "ray"})
    assert settings == {"data_parallel_size": 2, "distributed_executor_backend": "ray"}
    with _engine(shallow_demo, ray={"resource": "split"}, **settings) as llm:
        loop = llm.engine._loop
        assert isinstance(loop, DataParallelLoop)
        assert ray_resources()["split"] == 0
        assert [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)] == expected
        assert llm.sleep(tier="disk").freed >= llm.info.weight_bytes
        llm.wake_up()
        assert [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)] == expected
        pids = loop.pids
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    while ray_resources()["split"] < 2:  # the test's time is limited
        time.sleep(0.1)
    with pytest.raises(ClusterError, match="room"):
        _engine(shallow_demo, data_parallel_size=3, executor="ray", ray={"resource": "split", "placement_seconds": 5})
    while ray_resources()["split"] < 2:
        time.sleep(0.1)


def ray_resources() -> dict[str, float]:
    """Return what is free in the cluster."""
    import ray

    return {"split": 0.0} | ray.available_resources()


def test_settings_for_ray_without_it_are_refused() -> None:
    with pytest.raises(ConfigError, match="the ranks do not run on it"):
        _engine("demo", ray={"resource": "split"})
