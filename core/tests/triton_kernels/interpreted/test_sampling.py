"""The sampler in Triton's interpreter gives the tokens of the definition."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hardpoint.interfaces import Device
from hardpoint.interfaces.errors import InvalidRequest
from hardpoint.sampling import SamplingParams, reference
from hardpoint.sampling.sampler import Sampler
from hardpoint.triton import TritonKernels, operators
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
            expected = reference.sample_row(logits[row].numpy(), one, output)
            assert found.token_ids[row] == expected, MIXED[row]
            output.append(expected)
    assert sampler.last_tokens(rows).tolist() == [output[-1] for output in outputs]


@pytest.mark.parametrize("values", [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5}], ids=str)
def test_a_row_without_a_token_fails_alone(values: dict[str, Any]) -> None:
    sampler = Sampler(300, kernels=TritonKernels(Device("any", 0, "the host", "cpu")))
    one = SamplingParams(seed=3, **values).to_sequence_sampling(0, (1,), 0, 0, [])
    sampler.set_rows([replace(one, state_row=row) for row in range(4)])
    logits = torch.randn(300, generator=torch.Generator().manual_seed(1)).repeat(4, 1)
    expected = reference.sample_row(logits[3].numpy(), one, [])
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
        assert found.token_ids[row] == max(reference.sample_row(logits[row].numpy(), one, []), -1), one
    assert 0 < len(found.failed) < len(sequences) / 2
