"""Layers that attend in chunks are given to a backend as sequences of chunks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from reference import ReferenceAttention, step_batch
from safetensors.torch import load_file, save_file
from tiny_models import LLAMA4, save_tiny, tiny_config

from hardpoint.interfaces import AttentionLayer, AttentionRequest, DType, Refusal
from hardpoint.interfaces.errors import ModelError
from hardpoint.models import open_model
from hardpoint.models.description import ModelDescription
from hardpoint.weights.loading import load_weights
from hardpoint.worker.kv_groups import in_chunks, plan_groups

FULL = AttentionLayer(num_heads=4, num_kv_heads=2, head_dim=64, scale=0.125)


def test_a_step_in_chunks_has_a_sequence_for_each_chunk_with_tokens() -> None:
    """A decode in its second chunk, one at the first place of its third, and a prefill over a border."""
    block, chunk = 4, 8
    tables = np.arange(30, dtype=np.int32).reshape(3, 10)
    batch = step_batch([([7], 9), ([8], 16), (list(range(9)), 5)], tables.tolist(), block)
    found = in_chunks(batch, chunk, block)
    assert found.query_start.tolist() == [0, 1, 2, 5, 11]
    assert found.context_lens.tolist() == [2, 1, 8, 6]
    assert found.positions.tolist() == [1, 0, 5, 6, 7, 0, 1, 2, 3, 4, 5]
    assert found.num_decodes == 2
    assert found.block_table[found.rows].tolist() == [[2, 3], [14, 15], [20, 21], [22, 23]]
    assert np.array_equal(found.slot_mapping, batch.slot_mapping)
    assert in_chunks(batch, 0, block) is batch


def test_layers_in_chunks_are_refused_where_there_is_one_block_table_or_blocks_do_not_fit() -> None:
    attention = ReferenceAttention()
    request = AttentionRequest((replace(FULL, chunk=24), FULL), DType.FLOAT32, DType.FLOAT32, 8, 64)
    groups = plan_groups(attention, request, divides=True)
    assert not isinstance(groups, Refusal)
    assert [(group.layers, group.window, group.chunk) for group in groups] == [((1,), 0, 0), ((0,), 24, 24)]
    assert all(layer.chunk is None for group in groups for layer in group.plan.request.layers)
    for refused in (
        plan_groups(attention, request, divides=False),
        plan_groups(attention, replace(request, block_size=16), divides=True),
    ):
        assert isinstance(refused, Refusal)
    assert "chunks" in " ".join(attention.capabilities().explain(request))


def test_of_a_model_with_a_part_for_pictures_the_language_model_runs_alone_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole, part = tmp_path / "whole", tmp_path / "part"
    save_tiny(part, tiny_config("llama4_text", **LLAMA4))
    whole.mkdir()
    text = json.loads((part / "config.json").read_text())
    config = {"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "torch_dtype": "float32"}
    (whole / "config.json").write_text(json.dumps(config | {"text_config": text, "vision_config": {}}))
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(part / "model.safetensors").items()}
    save_file(tensors | {"vision_model.class_embedding": torch.ones(4)}, whole / "model.safetensors")
    loaded: list[dict[str, torch.Tensor]] = []
    for folder in (part, whole):
        source = open_model(str(folder))
        described = source.describe(DType.FLOAT32)
        assert isinstance(described, ModelDescription)
        weights, parameters = described.weights_of(described.whole), dict(described.whole.named_parameters())
        found: dict[str, torch.Tensor] = {}
        load_weights(
            weights,
            source.checkpoint,
            lambda name, rows, parameters=parameters: torch.zeros(parameters[name].shape),  # type: ignore[misc]
            lambda name, row, tensor, found=found: found.__setitem__(name, tensor),  # type: ignore[misc]
        )
        loaded.append(found)
    assert "runs on text alone" in caplog.text
    assert loaded[0].keys() == loaded[1].keys()
    assert all(torch.equal(loaded[0][name], loaded[1][name]) for name in loaded[0])
    (whole / "config.json").write_text(json.dumps(config | {"text_config": 5}))
    with pytest.raises(ModelError, match="text_config"):
        open_model(str(whole))
