"""The sampler in Triton's interpreter gives the tokens of the definition."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from hardpoint.interfaces import Device
from hardpoint.interfaces.errors import InvalidRequest
from hardpoint.sampling import SamplingParams
from hardpoint.sampling.sampler import Sampler
from hardpoint.triton import TritonKernels, operators
from hardpoint_conformance import sampling_reference
from tests.e2e.extremes import single, together

MIXED: list[dict[str, Any]] = [
    {"temperature": 0},
    {},
    {"temperature": 0.3},
    {"top_k": 5},
    {"top_k": 90, "temperature": 2.0},
    {"top_p": 0.3},
    {"top_p": 0.999, "temperature": 9.0},
    {"min_p": 0.2},
    {"top_k": 20, "top_p": 0.6, "min_p": 0.01},
    {"temperature": 0, "frequency_penalty": 1.0},
    {"min_tokens": 2, "stop_token_ids": (1, 2, 3), "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"allowed_token_ids": (5, 6, 60), "logit_bias": {5: -3.0}, "presence_penalty": 1.5},
]


@pytest.mark.parametrize(("columns", "block"), [(61, 64), (130, 64)])
@pytest.mark.parametrize("is_rounded", [False, True], ids=["float32", "integers"])
def test_tokens_are_those_of_the_definition(
    columns: int, block: int, is_rounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operators, "_SAMPLING_BLOCK", block)
    kernels = TritonKernels(Device("any", 0, "the host", "cpu"))
    sampler = Sampler(columns, kernels=kernels)
    sequences = [
        replace(SamplingParams(seed=i, **values).to_sequence_sampling(i, (1, 2, 3), 0, 0, []), state_row=2 * i)
        for i, values in enumerate(MIXED)
    ]
    sampler.set_rows(sequences)
    outputs: list[list[int]] = [[] for _ in sequences]
    generator = torch.Generator().manual_seed(columns)
    rows = np.array([one.state_row for one in sequences], np.int32)
    for step in range(1 if block < columns else 2):
        logits = 2 * torch.randn(len(sequences), columns, generator=generator)
        logits = logits.round() if is_rounded else logits
        found = sampler.sample(logits, rows, np.full(len(rows), step, np.int32)).collect()
        assert not found.failed
        for row, (one, output) in enumerate(zip(sequences, outputs, strict=True)):
            expected = sampling_reference.sample_row(logits[row].numpy(), one, output)
            assert found.token_ids[row] == expected, MIXED[row]
            output.append(expected)
    assert sampler.last_tokens(rows).tolist() == [output[-1] for output in outputs]


EDGES: dict[str, list[float]] = {
    "one token": [3.0],
    "two tokens": [-1.0, 2.0],
    "all equal": [2.5] * 67,
    "all zero, of both signs": [0.0, -0.0] * 33,
    "around zero": [0.0, -0.0, 1e-38, -1e-38, 1e-3, -1e-3, -0.0, 0.0] * 9,
    "one allowed": [-np.inf] * 40 + [-7.0] + [-np.inf] * 27,
    "two allowed": [-np.inf] * 5 + [1.0] + [-np.inf] * 60 + [1.25],
    "far apart": [-3e38, 3e38, 0.0, 1.0, -1.0] * 13,
    "all low": [-3e38, -2.9e38, -3.1e38] * 22,
    "neighbouring numbers": [float(np.float32(5) + np.float32(i % 7) * np.float32(2**-21)) for i in range(70)],
    "two values": [1.0, 1.0, -1.0] * 23,
    "steps": [i / 8 for i in range(65)],
    "tiny beside large": [1e-30 * i for i in range(64)] + [8.0],
    "banned by a bias": [-1e9 if i % 3 else 0.1 * i for i in range(70)],
}


@pytest.mark.parametrize("logits", EDGES.values(), ids=EDGES)
def test_the_search_for_a_bound_ends_at_the_definition(logits: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 32 logits: ties lie on both sides of a block's end, and the last block is not full."""
    monkeypatch.setattr(operators, "_SAMPLING_BLOCK", 32)
    width = len(logits)
    params = [
        SamplingParams(seed=seed, top_k=min(top_k, width), top_p=top_p, min_p=min_p, temperature=temperature)
        for seed, (top_k, top_p, min_p, temperature) in enumerate(
            [
                *product((0, 1, 3, width - 1, width), (1.0, 0.6), (0.0,), (1.0,)),
                *product((0, 5), (0.9, 2.0**-24), (0.0,), (1e-4, 1e3, 1e38)),
                (0, 1 - 2.0**-24, 0.3, 1.0),
            ]
        )
    ]
    sequences = [replace(one.to_sequence_sampling(0, (0,), 0, 0, []), state_row=row) for row, one in enumerate(params)]
    sampler = Sampler(width, kernels=TritonKernels(Device("any", 0, "the host", "cpu")))
    sampler.set_rows(sequences)
    row, rows = np.array(logits, np.float32), np.arange(len(params), dtype=np.int32)
    for count in range(2):
        found = sampler.sample(torch.from_numpy(row).repeat(len(params), 1), rows, np.full_like(rows, count)).collect()
        for one, token in zip(sequences, found.token_ids, strict=True):
            assert token == sampling_reference.sample_row(row, one, [0] * count), one


@pytest.mark.parametrize("values", [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5}], ids=str)
def test_a_row_without_a_token_fails_alone(values: dict[str, Any]) -> None:
    sampler = Sampler(300, kernels=TritonKernels(Device("any", 0, "the host", "cpu")))
    one = SamplingParams(seed=3, **values).to_sequence_sampling(0, (1,), 0, 0, [])
    sampler.set_rows([replace(one, state_row=row) for row in range(4)])
    logits = torch.randn(300, generator=torch.Generator().manual_seed(1)).repeat(4, 1)
    expected = sampling_reference.sample_row(logits[3].numpy(), one, [])
    logits[0, 77], logits[1, 299], logits[2] = torch.nan, torch.inf, -torch.inf
    found = sampler.sample(logits, np.arange(4, dtype=np.int32), np.zeros(4, np.int32)).collect()
    assert found.token_ids.tolist() == [-1, -1, -1, expected]
    assert "NaN or infinity" in found.failed[0]
    assert "NaN or infinity" in found.failed[1]
    assert "masks leave no token" in found.failed[2]


def test_extreme_parameters_are_a_matter_of_their_row() -> None:
    columns, sequences = 61, []
    for values in [*together(columns), *single(columns)[::9]]:
        values.pop("logits_processors", None)
        with suppress(InvalidRequest):
            params = SamplingParams(**values)
            params.check_vocab(columns)
            sequences.append(params.to_sequence_sampling(0, (1, 2, 3), 0, 0, []))
    sampler = Sampler(columns, kernels=TritonKernels(Device("any", 0, "the host", "cpu")))
    sampler.set_rows([replace(one, state_row=row) for row, one in enumerate(sequences)])
    logits = 2 * torch.randn(1, columns, generator=torch.Generator().manual_seed(0)).expand(len(sequences), -1)
    rows = np.arange(len(sequences), dtype=np.int32)
    found = sampler.sample(logits, rows, np.zeros_like(rows)).collect()
    for row, one in enumerate(sequences):
        assert found.token_ids[row] == max(sampling_reference.sample_row(logits[row].numpy(), one, []), -1), one
    assert 0 < len(found.failed) < len(sequences) / 2
