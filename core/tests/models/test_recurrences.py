"""The recurrences: many tokens at once give what one token after the other does, and convolutions know where sequences begin."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import NATIVE, Runner, open_and_load, save_tiny, tiny_config
from torch.nn import functional

from hardpoint.interfaces.errors import UnsupportedArchitecture
from hardpoint.layers.convolution import causal_convolution
from hardpoint.layers.delta import delta_scan, delta_step
from hardpoint.layers.selective import state_scan, state_step
from hardpoint.layers.states import StateStep, StateTensor
from hardpoint.worker.state_memory import slot_layout

LENGTHS = [1, 63, 64, 65, 150]


@pytest.mark.parametrize("tokens", LENGTHS)
def test_a_delta_nets_chunks_are_its_steps(tokens: int) -> None:
    torch.manual_seed(tokens)
    q, k, v = torch.randn(tokens, 3, 8), torch.randn(tokens, 3, 8), torch.randn(tokens, 3, 5)
    k = functional.normalize(k, dim=-1)
    inputs = q, k, v, -torch.rand(tokens, 3), torch.rand(tokens, 3)
    start = torch.randn(3, 8, 5)
    found, end = delta_scan(start, *inputs)
    state, outputs = start[None], []
    for token in range(tokens):
        output, state = delta_step(state, *(each[token : token + 1] for each in inputs))
        outputs.append(output)
    torch.testing.assert_close(found, torch.cat(outputs), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(end, state[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_a_state_spaces_chunks_are_its_steps(tokens: int) -> None:
    torch.manual_seed(tokens)
    x, t, b, c = (torch.randn(tokens, 3, size) for size in (5, 1, 8, 8))
    a, t = -torch.rand(3) * 3, functional.softplus(t[..., 0])
    start = torch.randn(3, 5, 8)
    found, end = state_scan(start, x, t, b, c, a)
    state, outputs = start[None], []
    for token in range(tokens):
        output, state = state_step(state, *(each[token : token + 1] for each in (x, t, b, c)), a)
        outputs.append(output)
    torch.testing.assert_close(found, torch.cat(outputs), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(end, state[0], rtol=1e-4, atol=1e-4)


def test_decay_that_leaves_nothing_gives_no_nan() -> None:
    x, b = torch.ones(70, 1, 2), torch.ones(70, 1, 3)
    found, end = state_scan(torch.ones(1, 2, 3), x, torch.full((70, 1), 50.0), b, b, torch.full((1,), -16.0))
    assert found.isfinite().all()
    assert end.isfinite().all()


@pytest.mark.parametrize("biased", [False, True])
def test_a_convolution_goes_on_where_each_sequence_was_left(biased: bool) -> None:
    torch.manual_seed(0)
    lengths, kernel, channels = [1, 1, 2, 7], 4, 5
    starts = [0, 1, 2, 4, 11]
    owners = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))
    given = StateStep((), torch.arange(4), torch.zeros(4) > 0, tuple(starts), torch.tensor(starts[:-1]), owners, 2)
    x, weight, before = torch.randn(11, channels), torch.randn(channels, kernel), torch.randn(4, kernel - 1, channels)
    bias = torch.randn(channels) if biased else None
    step: Any = SimpleNamespace(states=given)
    found, after = causal_convolution(step, x, weight, bias, before)
    for row, (first, end) in enumerate(itertools.pairwise(starts)):
        whole = torch.cat((before[row], x[first:end]))
        expected = functional.conv1d(whole.T[None], weight[:, None], bias, groups=channels)[0].T
        torch.testing.assert_close(found[first:end], expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(after[row], whole[-(kernel - 1) :])


def test_the_states_of_a_slot_do_not_overlap() -> None:
    layers = [
        (StateTensor((3, 5), torch.bfloat16), StateTensor((2, 4, 8), torch.float32)),
        (StateTensor((7,), torch.float32),),
    ]
    offsets, size = slot_layout(layers)
    assert offsets == [[0, 64], [320]]
    assert size == 384
    assert slot_layout([]) == ([], 0)


def test_what_a_family_refuses_is_said_where_transformers_code_cannot_run_it_either(tmp_path: Path) -> None:
    kind, options = NATIVE["granite-hybrid"]
    save_tiny(tmp_path, tiny_config(kind, **options, time_step_limit=(0.01, 0.5)))
    with pytest.raises(UnsupportedArchitecture, match=r"time steps are limited to \[0.01, 0.5\].*recurrent state"):
        open_and_load(tmp_path)


def test_published_configurations_are_understood_by_the_names_that_they_use(tmp_path: Path) -> None:
    """Before transformers 5, Granite's layers were "mamba" and "attention", LFM2 said which of its layers attend, and Nemotron
    H had a letter for each layer."""
    saved = {}
    for name in ("granite-hybrid", "lfm2", "nemotron-h"):
        kind, options = NATIVE[name]
        save_tiny(tmp_path / name, tiny_config(kind, **options))
        saved[name] = open_and_load(tmp_path / name)
        config = json.loads((tmp_path / name / "config.json").read_text())
        if name == "lfm2":
            config["full_attn_idxs"], config["block_ff_dim"] = [1], config.pop("intermediate_size")
            config["tie_embedding"] = config.pop("tie_word_embeddings")
            del config["layer_types"]
        elif name == "nemotron-h":
            del config["layers_block_type"]
            config |= {"hybrid_override_pattern": "M-*M", "num_hidden_layers": 4}
        else:
            config["layer_types"] = ["mamba", "attention", "mamba"]
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        logits = [
            Runner(model, plan, attention).step([(0, [3, 9, 27])])
            for _, model, plan, attention in (saved[name], open_and_load(tmp_path / name))
        ]
        assert torch.equal(*logits)
