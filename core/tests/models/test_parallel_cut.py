"""How a lean model is cut: every element of every checkpoint tensor lands where it should, and nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import FALLBACK, LEAN, open_and_load, save_tiny, tiny_config

from hardpoint.interfaces import DType
from hardpoint.interfaces.errors import CapabilityRefused
from hardpoint.models import Place, open_model
from hardpoint.models.families import LeanModel, lean_model
from hardpoint.models.parallel import cut, layers_of_stage, obstacles, tensor_sizes


def model_of(kind: str, **changes: Any) -> LeanModel:
    config = tiny_config(kind, **changes)
    architecture = {"llama": "LlamaForCausalLM", "phi3": "Phi3ForCausalLM", "qwen2": "Qwen2ForCausalLM"}[kind]
    found = lean_model(architecture, config, DType.FLOAT32)
    assert isinstance(found, LeanModel), found
    return found


@st.composite
def models(draw: st.DrawFn) -> LeanModel:
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


def places(model: LeanModel, tensor: int, stages: int) -> list[Place]:
    return [Place(rank, tensor, stage, stages) for stage in range(stages) for rank in range(tensor)]


def numbered(model: LeanModel) -> dict[str, np.ndarray]:
    """Return tensors in which every element of the checkpoint has a number of its own."""
    tensors, first = {}, 0
    for name, shape in model.checkpoint_shapes().items():
        size = int(np.prod(shape))
        tensors[name] = np.arange(first, first + size).reshape(shape)
        first += size
    return tensors


def weight(model: LeanModel, name: str, tensors: dict[str, np.ndarray]) -> np.ndarray:
    """Return a weight as its pieces say."""
    parts = []
    for piece in model.sources[name]:
        part = tensors[piece.name][piece.first_row : piece.end_row]
        parts.append(part if piece.columns is None else part[:, slice(*piece.columns)])
    return np.concatenate(parts)


@settings(max_examples=60, deadline=None)
@given(models(), st.integers(1, 6), st.integers(1, 4))
def test_the_ranks_weights_together_are_the_models(model: LeanModel, tensor: int, stages: int) -> None:
    if obstacles(model, Place(tensor_size=tensor, stages=stages)):
        return
    tensors = numbered(model)
    shares = [cut(model, place) for place in places(model, tensor, stages)]
    kv_copies = max(1, tensor // model.spec.attention[0].num_kv_heads)
    for share in shares:
        for name, shape in share.weight_shapes().items():
            assert weight(share, name, tensors).shape == shape, name
    for name in model.sources:
        whole = weight(model, name, tensors)
        kind = name.rpartition(".")[2]
        held = []
        for share in shares:
            first, _ = layers_of_stage(model.spec.num_layers, share.place)
            local = name
            if name.startswith("layers."):
                local = f"layers.{int(name.split('.')[1]) - first}.{kind}"
            if local in share.sources:
                held.append(weight(share, local, tensors))
        found, counts = np.unique(np.concatenate([part.ravel() for part in held]), return_counts=True)
        assert (found == np.sort(whole.ravel())).all(), name
        if kind in ("qkv", "qkv_bias"):
            layer = model.spec.attention[0]
            queries = np.isin(found, whole[: layer.num_heads * layer.head_dim])
            assert (counts[queries] == 1).all()
            assert (counts[~queries] == kv_copies).all()
        elif kind in ("o", "gate_up", "down", "head", "o_bias"):
            assert (counts == 1).all(), name
        elif kind == "embed":
            assert (counts == (2 if model.spec.tied and stages > 1 else 1)).all()
        else:
            assert (
                counts == (1 if name == "final_norm" else len(held)) * (tensor if name == "final_norm" else 1)
            ).all()


@settings(max_examples=60, deadline=None)
@given(models(), st.integers(1, 6))
def test_query_heads_stay_with_their_kv_head(model: LeanModel, tensor: int) -> None:
    if obstacles(model, Place(tensor_size=tensor)):
        return
    tensors, whole = numbered(model), model.spec.attention[0]
    dim, group = whole.head_dim, whole.num_heads // whole.num_kv_heads
    full = weight(model, "layers.0.qkv", tensors)
    head_of = {int(row[0]): index for index, row in enumerate(full[::dim])}
    sizes = []
    for place in places(model, tensor, 1):
        share = cut(model, place)
        own = share.spec.attention[0]
        rows = [head_of[int(row[0])] for row in weight(share, "layers.0.qkv", tensors)[::dim]]
        queries, keys = rows[: own.num_heads], rows[own.num_heads : own.num_heads + own.num_kv_heads]
        values = rows[own.num_heads + own.num_kv_heads :]
        assert [head - whole.num_heads for head in keys] == [
            head - whole.num_heads - whole.num_kv_heads for head in values
        ]
        for index, head in enumerate(queries):
            key = keys[index // (own.num_heads // own.num_kv_heads)] - whole.num_heads
            assert head // group == key
        columns = weight(share, "layers.0.o", tensors)
        first = full[0, 0] * 0 + weight(model, "layers.0.o", tensors)[0, 0]
        assert [int(value - first) // dim for value in columns[0, ::dim]] == queries
        sizes.append(own.num_kv_heads)
    assert max(sizes) - min(sizes) <= 1


def test_the_demo_models_heads_are_cut_unevenly() -> None:
    model = model_of("llama", num_attention_heads=9, num_key_value_heads=3, hidden_size=576, head_dim=64)
    shares = [cut(model, place).spec.attention[0] for place in places(model, 2, 1)]
    assert [(share.num_heads, share.num_kv_heads) for share in shares] == [(6, 2), (3, 1)]
    assert tensor_sizes(model) == (1, 2, 3, 9)


def test_layers_are_balanced_over_stages() -> None:
    spans = [layers_of_stage(30, Place(stage=stage, stages=4)) for stage in range(4)]
    assert spans == [(0, 8), (8, 16), (16, 23), (23, 30)]


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        (Place(tensor_size=4), "4 ranks"),
        (Place(tensor_size=5), "5 ranks"),
        (Place(stages=4), "3 layers are fewer than 4 stages"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_what_can(tmp_path: Path, place: Place, reason: str) -> None:
    save_tiny(tmp_path, tiny_config("llama"))
    with pytest.raises(CapabilityRefused, match=reason) as caught:
        open_and_load(tmp_path, place=place)
    assert "tensor_parallel_size can be 1, 2, 6; pipeline_parallel_size can be 1 to 3" in str(caught.value)


def test_all_reasons_are_given_at_once(tmp_path: Path) -> None:
    save_tiny(tmp_path, tiny_config("llama", vocab_size=9, bos_token_id=1, eos_token_id=2))
    with pytest.raises(CapabilityRefused) as caught:
        open_and_load(tmp_path, place=Place(tensor_size=10, stages=9))
    assert len(caught.value.reasons) == 3


def test_models_outside_the_lean_family_run_on_one_rank_only(tmp_path: Path) -> None:
    kind, options = FALLBACK["gpt2"]
    save_tiny(tmp_path, tiny_config(kind, **options))
    with pytest.raises(CapabilityRefused, match="one rank only"):
        open_and_load(tmp_path, place=Place(tensor_size=2))
    assert open_model(str(tmp_path)).attention_layers()


@pytest.mark.parametrize("name", LEAN)
def test_a_share_is_of_the_model_it_was_cut_from(name: str, tmp_path: Path) -> None:
    kind, options = LEAN[name]
    save_tiny(tmp_path, tiny_config(kind, **options))
    model = open_model(str(tmp_path)).lean_model(DType.FLOAT32)
    assert isinstance(model, LeanModel)
    share = cut(model, Place(1, 2, 0, 2))
    assert share.checkpoint_shapes() == model.checkpoint_shapes()
    assert share.weight_names() < model.weight_names()
    assert share.computes_the_same(model)
    assert cut(model, Place()) is model
