"""How a native model is cut: every element of every checkpoint tensor lands where it should, and nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import FALLBACK, NATIVE, describe, open_and_load, save_tiny, tiny_config

from hardpoint.interfaces import DType
from hardpoint.interfaces.errors import CapabilityRefused
from hardpoint.layers import ModelContext
from hardpoint.layers.parallel import layers_of_stage
from hardpoint.models import ParallelRank, open_model
from hardpoint.models.decoder import CausalLM
from hardpoint.models.description import ModelDescription


def model_of(kind: str, **changes: Any) -> ModelDescription:
    config = tiny_config(kind, **changes)
    architecture = {"llama": "LlamaForCausalLM", "phi3": "Phi3ForCausalLM", "qwen2": "Qwen2ForCausalLM"}[kind]
    found = describe(architecture, config)
    assert isinstance(found, ModelDescription), found
    return found


@st.composite
def models(draw: st.DrawFn) -> ModelDescription:
    kv_heads = draw(st.integers(1, 5))
    heads = kv_heads * draw(st.integers(1, 4))
    return model_of(
        draw(st.sampled_from(["llama", "phi3", "qwen2"])),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        hidden_size=8 * heads,
        head_dim=8,
        intermediate_size=draw(st.integers(8, 100)),
        vocab_size=draw(st.integers(8, 100)),
        num_hidden_layers=draw(st.integers(1, 5)),
        tie_word_embeddings=draw(st.booleans()),
    )


def places(model: ModelDescription, tensor: int, stages: int) -> list[ParallelRank]:
    return [ParallelRank(rank, tensor, stage, stages) for stage in range(stages) for rank in range(tensor)]


def share_of(model: ModelDescription, rank: ParallelRank) -> CausalLM:
    """Return a rank's share, not materialised."""
    return model.build(ModelContext(torch.float32, rank))


def numbered(model: ModelDescription) -> dict[str, np.ndarray]:
    """Return tensors in which every element of the checkpoint has a number of its own."""
    tensors, first = {}, 0
    for name, shape in model.checkpoint_shapes.items():
        size = int(np.prod(shape))
        tensors[name] = np.arange(first, first + size).reshape(shape)
        first += size
    return tensors


def weight(model: CausalLM, name: str, tensors: dict[str, np.ndarray]) -> np.ndarray:
    """Return a parameter as its shards say."""
    parts = []
    for shard in model.stored_weights()[name].shards:
        part = tensors[shard.name][shard.first_row : shard.end_row]
        parts.append(part if shard.columns is None else part[:, slice(*shard.columns)])
    return np.concatenate(parts)


@settings(max_examples=60, deadline=None)
@given(models(), st.integers(1, 6), st.integers(1, 4))
def test_the_ranks_weights_together_are_the_models(model: ModelDescription, tensor: int, stages: int) -> None:
    if model.obstacles(ParallelRank(tensor_size=tensor, stages=stages)):
        return
    tensors = numbered(model)
    shares = [share_of(model, place) for place in places(model, tensor, stages)]
    layer = model.whole.attention_layers()[0]
    kv_copies = max(1, tensor // layer.num_kv_heads)
    held: dict[str, list[np.ndarray]] = {}
    for share in shares:
        for name in share.stored_weights():
            part = weight(share, name, tensors)
            assert part.shape == tuple(share.get_parameter(name).shape), name
            held.setdefault(name, []).append(part)
    for name in model.whole.stored_weights():
        whole = weight(model.whole, name, tensors)
        found, counts = np.unique(np.concatenate([part.ravel() for part in held[name]]), return_counts=True)
        assert (found == np.sort(whole.ravel())).all(), name
        if "qkv_proj" in name:
            queries = np.isin(found, whole[: layer.num_heads * layer.head_dim])
            assert (counts[queries] == 1).all()
            assert (counts[~queries] == kv_copies).all()
        elif any(part in name for part in ("o_proj", "gate_up_proj", "down_proj", "lm_head")):
            assert (counts == 1).all(), name
        elif "embed_tokens" in name:
            assert (counts == (2 if model.config.tied and stages > 1 else 1)).all()
        else:
            assert (counts == tensor).all(), name


@settings(max_examples=60, deadline=None)
@given(models(), st.integers(1, 6))
def test_query_heads_stay_with_their_kv_head(model: ModelDescription, tensor: int) -> None:
    if model.obstacles(ParallelRank(tensor_size=tensor)):
        return
    qkv, out = "model.layers.0.self_attn.qkv_proj.weight", "model.layers.0.self_attn.o_proj.weight"
    tensors, whole = numbered(model), model.whole.attention_layers()[0]
    dim, group = whole.head_dim, whole.num_heads // whole.num_kv_heads
    full = weight(model.whole, qkv, tensors)
    head_of = {int(row[0]): index for index, row in enumerate(full[::dim])}
    sizes = []
    for place in places(model, tensor, 1):
        share = share_of(model, place)
        own = share.attention_layers()[0]
        rows = [head_of[int(row[0])] for row in weight(share, qkv, tensors)[::dim]]
        queries, keys = rows[: own.num_heads], rows[own.num_heads : own.num_heads + own.num_kv_heads]
        values = rows[own.num_heads + own.num_kv_heads :]
        assert [head - whole.num_heads for head in keys] == [
            head - whole.num_heads - whole.num_kv_heads for head in values
        ]
        for index, head in enumerate(queries):
            key = keys[index // (own.num_heads // own.num_kv_heads)] - whole.num_heads
            assert head // group == key
        columns = weight(share, out, tensors)
        first = weight(model.whole, out, tensors)[0, 0]
        assert [int(value - first) // dim for value in columns[0, ::dim]] == queries
        sizes.append(own.num_kv_heads)
    assert max(sizes) - min(sizes) <= 1


def test_the_demo_models_heads_are_cut_unevenly() -> None:
    model = model_of("llama", num_attention_heads=9, num_key_value_heads=3, hidden_size=576, head_dim=64)
    shares = [model.attention_layers(place)[0] for place in places(model, 2, 1)]
    assert [(share.num_heads, share.num_kv_heads) for share in shares] == [(6, 2), (3, 1)]
    assert model.tensor_sizes() == (1, 2, 3, 9)


def test_layers_are_balanced_over_stages() -> None:
    spans = [layers_of_stage(30, ParallelRank(stage=stage, stages=4)) for stage in range(4)]
    assert spans == [(0, 8), (8, 16), (16, 23), (23, 30)]


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        (ParallelRank(tensor_size=4), "4 ranks"),
        (ParallelRank(tensor_size=5), "5 ranks"),
        (ParallelRank(stages=4), "3 layers are fewer than 4 stages"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_what_can(tmp_path: Path, place: ParallelRank, reason: str) -> None:
    save_tiny(tmp_path, tiny_config("llama"))
    with pytest.raises(CapabilityRefused, match=reason) as caught:
        open_and_load(tmp_path, rank=place)
    assert "tensor_parallel_size can be 1, 2, 6; pipeline_parallel_size can be 1 to 3" in str(caught.value)


def test_all_reasons_are_given_at_once(tmp_path: Path) -> None:
    save_tiny(tmp_path, tiny_config("llama", vocab_size=9, bos_token_id=1, eos_token_id=2))
    with pytest.raises(CapabilityRefused) as caught:
        open_and_load(tmp_path, rank=ParallelRank(tensor_size=10, stages=9))
    assert len(caught.value.reasons) == 3


def test_models_outside_the_lean_family_run_on_one_rank_only(tmp_path: Path) -> None:
    kind, options = FALLBACK["gpt2"]
    save_tiny(tmp_path, tiny_config(kind, **options))
    with pytest.raises(CapabilityRefused, match="one rank only"):
        open_and_load(tmp_path, rank=ParallelRank(tensor_size=2))
    assert open_model(str(tmp_path)).attention_layers()


@pytest.mark.parametrize("name", NATIVE)
def test_a_share_has_a_part_of_the_models_weights(name: str, tmp_path: Path) -> None:
    kind, options = NATIVE[name]
    save_tiny(tmp_path, tiny_config(kind, **options))
    model = open_model(str(tmp_path)).describe(DType.FLOAT32)
    assert isinstance(model, ModelDescription)
    share = model.weights_of(share_of(model, ParallelRank(1, 2, 0, 2)))
    assert share.shapes == model.checkpoint_shapes == open_model(str(tmp_path)).checkpoint.shapes()
    assert share.names() < model.weights_of(model.whole).names()
