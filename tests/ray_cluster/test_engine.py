"""The demo model on two ranks, each on a node of its own."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from hardpoint import LLM
from hardpoint.engine.sleep import EngineState
from hardpoint.executor import RemoteExecutor
from hardpoint.executor.ray_transport import RayTransport
from hardpoint.interfaces.errors import ConfigError, RankFailed
from tests.e2e.test_ranks import PROMPTS, REPORTED_WITHIN, TOKENS, _check_dead, _check_tokens, _compute


def _engine(**settings: Any) -> LLM:
    small = {"max_model_len": 256, "num_device_blocks": 64, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    return LLM("demo", dtype="float32", backend="cpu", **(small | settings))


@pytest.mark.timeout(300)
def test_two_ranks_on_two_machines_share_each_layer(cluster: Any, oracle_float32: Any, greedy: Any) -> None:
    with _engine(tensor_parallel_size=2, executor="ray", ray={"resource": "split"}) as llm:
        executor = llm.engine._loop.core.executor
        assert isinstance(executor, RemoteExecutor)
        transport = executor._transport
        assert isinstance(transport, RayTransport)
        assert len(set(transport.nodes)) == 2
        assert (llm.info.num_ranks, llm.info.path) == (2, "lean")
        _check_tokens(llm, oracle_float32, greedy(TOKENS))

        report = llm.sleep(tier="disk")
        assert report.freed >= llm.info.weight_bytes
        assert llm.wake_up().state is EngineState.RUNNING
        _check_tokens(llm, oracle_float32, greedy(TOKENS))

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


def test_settings_for_ray_without_it_are_refused() -> None:
    with pytest.raises(ConfigError, match="the ranks do not run on it"):
        _engine(ray={"resource": "split"})
