"""The platform of a device that torch drives, over a stand-in for torch's module and the host's own memory."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hardpoint.interfaces import DType, MemoryInfo
from hardpoint.interfaces.batch import StepInput
from hardpoint.interfaces.errors import BackendUnavailable, CapabilityRefused
from hardpoint.interfaces.worker import WorkerConfig, WorkerContext
from hardpoint.plugins import resolve_backend
from hardpoint.worker import StandardWorker, TorchPlatform
from hardpoint.worker.dummy_batches import dummy_batch

MIB = 1 << 20


class Module:
    """The stand-in: notes what is asked of it; `reserved` is what it counts, `peak` the most of it."""

    def __init__(self) -> None:
        self.devices, self.calls, self.current = 1, list[str](), -1
        self.reserved = self.peak = 0

    def init(self) -> None:
        if not self.devices:
            raise RuntimeError("The driver is too old (found version 12040).\nUpdate it.")

    def is_available(self) -> bool:
        return self.devices > 0

    def device_count(self) -> int:
        return self.devices

    def set_device(self, index: int) -> None:
        self.current = index

    def synchronize(self, index: int) -> None:
        self.calls.append("synchronize")

    def empty_cache(self) -> None:
        self.calls.append("empty_cache")
        self.reserved = 0

    def memory_reserved(self, index: int) -> int:
        return self.reserved

    def max_memory_reserved(self, index: int) -> int:
        return self.peak

    def reset_peak_memory_stats(self, index: int) -> None:
        self.peak = self.reserved


class HostPlatform(TorchPlatform):
    """Calls the stand-in, and computes on the host."""

    def _module(self) -> Any:
        return sys.modules["stand_in_for_torch"]

    def empty_host(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Module:
    module = Module()
    monkeypatch.setitem(sys.modules, "stand_in_for_torch", module)  # type: ignore[arg-type]
    return module


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., StandardWorker]:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    resolved = resolve_backend("cpu")
    config = WorkerConfig(
        model=str(tmp_path),
        load_format="dummy",
        dtype=DType.FLOAT32,
        max_num_batched_tokens=64,
        max_num_seqs=4,
        use_fused_decoder=False,
    )

    def worker(**device: Any) -> StandardWorker:
        descriptor = replace(resolved.descriptor, platform=lambda: HostPlatform)
        return StandardWorker(WorkerContext(descriptor, replace(resolved.device, **device), config))

    return worker


def test_device_that_torch_does_not_see_is_refused(module: Module, make: Callable[..., StandardWorker]) -> None:
    module.devices = 0
    with pytest.raises(
        BackendUnavailable, match=r"sees 0 such devices: The driver is too old \(found version 12040\)\."
    ):
        make().start()


def test_device_is_current_in_every_call_that_computes(module: Module, make: Callable[..., StandardWorker]) -> None:
    worker = make()
    batch = dummy_batch(num_tokens=4, max_len=4, block_size=32, max_seqs=1)
    unsampled = replace(batch, sample_rows=batch.sample_rows[:0], sample_seq_ids=batch.sample_seq_ids[:0])
    calls: dict[str, tuple[Any, ...]] = {"start": (), "load": (), "profile": ()}
    calls |= {"initialize_kv": (4, 0), "warm_up": (), "submit": (StepInput(unsampled),)}
    for name, arguments in calls.items():
        module.current = 5  # another engine's
        getattr(worker, name)(*arguments)
        assert module.current == (5 if name == "initialize_kv" else 0), name
    worker.shutdown()
    assert module.calls[-1] == "empty_cache"
    module.calls.clear()
    worker.shutdown()
    assert module.calls == []


def test_profile_adds_torchs_peak_and_what_others_took(
    module: Module, make: Callable[..., StandardWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make()
    worker.start()
    free = [1000 * MIB]
    allocator, platform = worker._started.allocator, worker._started.platform
    monkeypatch.setattr(allocator, "memory_info", lambda: MemoryInfo(free[0], 2000 * MIB))

    def step() -> None:
        module.peak, module.reserved = 300 * MIB, 200 * MIB
        free[0] -= 250 * MIB  # torch's 200, and 50 of kernels and libraries

    module.reserved = 40 * MIB  # goes with the cache, before anything is counted
    assert platform.peak_growth(step, allocator) == 350 * MIB
    assert module.reserved == 0
    worker.shutdown()


def test_time_of_a_token_is_that_of_a_step_whose_kernels_are_there(
    module: Module, make: Callable[..., StandardWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make()
    worker.start()
    worker.load()
    runner = worker._loaded.runner
    forward, steps = runner.forward, list[int]()

    def compiling_at_first(*arguments: Any) -> torch.Tensor:
        if not steps:
            time.sleep(0.5)
        steps.append(1)
        return forward(*arguments)

    monkeypatch.setattr(runner, "forward", compiling_at_first)
    assert 0.0 < worker.profile().seconds_per_token < 0.5 / 64
    worker.shutdown()


def test_simulated_device_is_sized_and_refuses_to_compute(
    module: Module, make: Callable[..., StandardWorker], caplog: pytest.LogCaptureFixture
) -> None:
    worker = make(simulated=True)
    worker.start()
    info = worker.load()
    with caplog.at_level(logging.WARNING, "hardpoint"):
        profile = worker.profile()
    assert "the largest step is not run" in caplog.text
    assert profile.peak - profile.current == 4 * info.vocab_size * 4
    assert profile.kv_bytes == int(profile.total * 0.9) - profile.used - (profile.peak - profile.current)
    worker.initialize_kv(4, 2)
    with pytest.raises(CapabilityRefused, match="is a simulation"):
        worker.warm_up()
    worker.shutdown()
