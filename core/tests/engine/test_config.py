"""What settings of an engine accept and refuse; no engine is made."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from hardpoint import EngineConfig
from hardpoint.executor import RankLimits, RaySettings
from hardpoint.interfaces.errors import ConfigError
from hardpoint.scheduler import SchedulerConfig


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"max_model_len": "512"}, "max_model_len must be an integer of at least 1 or None: max_model_len='512'"),
        ({"max_model_len": True}, "max_model_len"),
        ({"max_model_len": 2**40}, "at most 2147483647"),
        ({"max_num_seqs": None}, "max_num_seqs must be an integer of at least 1: max_num_seqs=None"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"block_size": 16.0}, "block_size=16.0"),
        ({"memory_utilization": 1.5}, r"memory_utilization must be a number in \(0, 1\]"),
        ({"memory_utilization": math.nan}, "memory_utilization=nan"),
        ({"swap_space": math.inf}, "swap_space=inf"),
        ({"swap_space": -1}, "swap_space=-1"),
        ({"sleep_host_budget": 1e300}, "sleep_host_budget"),
        ({"communication_timeout": math.inf}, "communication_timeout"),
        ({"enforce_eager": "no"}, "enforce_eager must be True or False"),
        ({"seed": 2**63}, "seed"),
        ({"seed": "five"}, "seed"),
        ({"preemption_mode": "swop"}, "Did you mean 'swap'"),
        ({"sleep_tier": "hosts"}, "Did you mean 'host'"),
        ({"load_format": None}, "load_format"),
        ({"dtype": "flaot16"}, "Did you mean 'float16'"),
        ({"dtype": None}, "'None' is not an element type"),
        ({"dtype": "float64"}, "Did you mean 'float16'"),
        (
            {"dtype": "int8"},
            "is not an element type that models compute in. Known: auto, bfloat16, float, float16, float32, half$",
        ),
        ({"kv_dtype": 5}, "kv_dtype='5' is not an element type"),
        ({"executor": 5}, "executor"),
        ({"max_modle_len": 5}, "'max_modle_len' is not a setting of the engine. Did you mean 'max_model_len'"),
        ({"gpu_memory_utilisation": 5}, "Did you mean 'gpu_memory_utilization'"),
        ({"rank_limits": {"stap": 1}}, "'stap' is not a time limit of ranks. Did you mean 'step'"),
        ({"rank_limits": {"step": "1"}}, "step must be a number"),
        ({"rank_limits": 5}, "rank_limits must be a mapping or RankLimits"),
        ({"ray": {"adress": "x"}, "executor": "ray"}, "Did you mean 'address'"),
        ({"ray": {"amount": 1.5}, "executor": "ray"}, "1.5"),
        ({"ray": {"amount": 0}, "executor": "ray"}, "amount"),
        ({"ray": {}}, "the ranks do not run on it"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0"),
        ({"max_queued_while_asleep": 0}, "max_queued_while_asleep"),
        ({"sleep_disk_directory": "a\0b"}, "sleep_disk_directory must be a text that can name a file"),
        ({"sleep_disk_directory": "\ud800"}, "sleep_disk_directory must be a text that can name a file"),
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold"),
        ({"memory_utilization": 0.5, "gpu_memory_utilization": 0.5}, "given twice"),
    ],
)
def test_illegal_settings_are_refused_with_name_value_and_what_to_do(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        EngineConfig.from_arguments("demo", settings)


@pytest.mark.parametrize("model", [None, 5, b"demo", ["demo"]])
def test_a_model_that_is_no_name_is_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match="model must be a text"):
        EngineConfig.from_arguments(model, {})


def test_legal_edges_are_accepted() -> None:
    config = EngineConfig.from_arguments(
        Path("a") / "model",  # type: ignore[arg-type]
        {"dtype": torch.float16, "rank_limits": {"step": 2}, "swap_space": 0, "seed": -1, "max_model_len": None,
         "long_prefill_token_threshold": 0, "disable_log_stats": True, "distributed_executor_backend": None},
    )  # fmt: skip
    assert (config.model, config.dtype, config.rank_limits) == ("a/model", "float16", RankLimits(step=2.0))
    assert RaySettings.parse(None) == RaySettings()


def test_the_scheduler_gets_the_settings_of_the_engine() -> None:
    config = EngineConfig("demo", max_num_seqs=3, long_prefill_token_threshold=7, scheduling_policy="priority")
    complete = SchedulerConfig.complete(config, block_size=16, num_device_blocks=9, max_model_len=100)
    assert (complete.max_num_seqs, complete.long_prefill_token_threshold, complete.scheduling_policy) == (
        3,
        7,
        "priority",
    )
    assert (complete.block_size, complete.num_device_blocks, complete.max_model_len) == (16, 9, 100)


def test_workers_get_the_settings_of_the_engine() -> None:
    worker = EngineConfig("demo", dtype="half", swap_space=0.5, tensor_parallel_size=2, seed=5).worker_config()
    assert (worker.model, str(worker.dtype), worker.kv_dtype) == ("demo", "float16", None)
    assert (worker.swap_space, worker.world_size, worker.tensor_parallel_size, worker.seed) == (1 << 29, 2, 2, 5)
