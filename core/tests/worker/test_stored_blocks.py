"""A worker whose linear layers are Triton's over weights in blocks: what it serves, over sleep, wake and reload.

Runs where kernels are interpreted (`make test-triton`), with the CPU's memory and Triton's attention and kernel set.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hardpoint.interfaces import KV_CACHE, WEIGHTS, DType, Policy, Quantization, SleepPlan, WeightWrite
from hardpoint_conformance.target import Target
from hardpoint_conformance.tiny_model import Shape, tiny_model
from hardpoint_conformance.worker_bench import WorkerBench, running

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="Triton's kernels are not interpreted here: `make test-triton` does it",
)

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5]]
PLAIN = tiny_model(Shape(head_dim=16, layers=2))
BLOCK = 32


def _attention() -> Any:
    from hardpoint.triton import TritonAttention

    return TritonAttention


def _kernels() -> Any:
    from hardpoint.triton import TritonKernels

    return TritonKernels


@pytest.fixture
def target() -> Target:
    return Target.find("cpu").with_descriptor(attention=_attention, kernels=_kernels)


def write(folder: Path, tensors: dict[str, torch.Tensor], **changes: Any) -> str:
    folder.mkdir()
    config = json.loads((Path(PLAIN.path) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def float8(folder: Path) -> tuple[str, str]:
    """Return folders of a model with matrices in e4m3, a scale for each block, and of the dense one that it means."""
    stored, meant = {}, {}
    for name, values in load_file(Path(PLAIN.path) / "model.safetensors").items():
        stored[name] = meant[name] = values
        if values.ndim == 2 and ".layers." in name:
            rows, columns = values.shape
            scales = torch.rand(rows // BLOCK, columns // BLOCK) * 0.01 + 0.002
            spread = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            stored[name] = (values.float() / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scales
            meant[name] = stored[name].float() * spread
    config = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    return write(folder / "fp8", stored, quantization_config=config), write(folder / "dense", meant)


def answers(bench: WorkerBench) -> tuple[list[list[int]], torch.Tensor]:
    """Return what the prompts give: tokens, and their log probabilities."""
    served = bench.generate(PROMPTS, 3, logprobs=1)
    return [one.generated for one in served], torch.tensor(
        [[float(entry.logprobs[0]) for entry in one.logprobs] for one in served]
    )


def same_over_sleep_and_reload(bench: WorkerBench) -> None:
    tokens, values = answers(bench)
    for weights in (Policy.PRESERVE, Policy.DISCARD):
        bench.sleep_and_wake(SleepPlan(policies={WEIGHTS: weights, KV_CACHE: Policy.DISCARD}))
        if weights is Policy.DISCARD:
            bench.worker.write_weights(WeightWrite.RELOAD)
        again = answers(bench)
        assert again[0] == tokens
        assert torch.equal(again[1], values)


def test_float8_is_multiplied_as_it_is_stored(target: Target, tmp_path: Path) -> None:
    path, dense = float8(tmp_path)
    with running(target, replace(PLAIN, path=dense), dtype=DType.FLOAT32, block_size=16) as bench:
        tokens, values = answers(bench)
    settings: dict[str, Any] = {"dtype": DType.FLOAT32, "block_size": 16, "quantization": Quantization.AUTO}
    with running(target, replace(PLAIN, path=path), **settings) as bench:
        assert bench.info.weight_formats["FP8"] == 8
        found = answers(bench)
        assert found[0] == tokens
        torch.testing.assert_close(found[1], values, atol=1e-4, rtol=0)
        same_over_sleep_and_reload(bench)


def test_rounded_weights_are_the_same_over_sleep_and_reload(target: Target) -> None:
    settings: dict[str, Any] = {"dtype": DType.BFLOAT16, "block_size": 16, "quantization": Quantization.INT4}
    with running(target, PLAIN, **settings) as bench:
        assert set(bench.info.weight_formats) == {"Q4_1", "Q8_0"}
        same_over_sleep_and_reload(bench)
