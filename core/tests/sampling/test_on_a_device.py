"""The sampler on a device with memory of its own: the tokens are those of the host, and the host waits a few times in a step.

A stand-in for the device: tensors that lie on the host and say that they do not, for torch's functions and for ours.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from hardpoint.sampling import Sampler, SamplingParams

ROWS, COLUMNS = 40, 50_000


class OnDevice(torch.Tensor):
    """A tensor of the stand-in; `held` is its content. Counts how often the host reads one, for which it waits."""

    waits = 0
    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> OnDevice:
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), dtype=held.dtype, device=torch.device("meta")
        )
        tensor.held = held
        return tensor

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.Tensor.numpy, torch.Tensor.tolist):
            cls.waits += 1
            return function(args[0].held, **(kwargs or {}))
        return super().__torch_function__(function, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{function} was called outside of the stand-in")


class Device(TorchDispatchMode):
    """Runs operators on what its tensors hold; what is made for the device, or from its tensors, is its own."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own: list[OnDevice] = []

        def held(value: Any) -> Any:
            if isinstance(value, OnDevice):
                own.append(value)
                return value.held
            return value

        plain, named = tree_map(held, (args, dict(kwargs or {})))
        asked = named.get("device")
        if asked is not None:
            named["device"] = torch.device("cpu")
        result = function(*plain, **named)
        is_own = bool(own) if asked is None else torch.device(asked).type == "meta"
        return tree_map(lambda x: OnDevice(x) if is_own and isinstance(x, torch.Tensor) else x, result)


def sampler(values: dict[str, Any]) -> Sampler:
    made = Sampler(COLUMNS)
    for seq_id in range(ROWS):
        params = SamplingParams(seed=seq_id, **values)
        made.add(params.to_sequence_sampling(seq_id, (1, 2), 0, 0, []))
    return made


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"temperature": 0.7, "top_p": 0.95},
        {"top_k": 20},
        {"min_p": 0.1},
        {"temperature": 0.0},
        {"presence_penalty": 1.0, "logit_bias": {3: 2.0}},
        {"logprobs": 3},
    ],
    ids=str,
)
def test_a_step_gives_the_tokens_of_the_host_and_waits_as_often_for_many_rows(values: dict[str, Any]) -> None:
    logits = 3 * torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    seq_ids = np.arange(ROWS)
    expected, expected_logprobs = sampler(values).sample(logits, seq_ids)
    OnDevice.waits = 0
    with Device():
        tokens, logprobs = sampler(values).sample(OnDevice(logits.clone()), seq_ids)
    assert tokens.tolist() == expected.tolist()
    assert 0 < OnDevice.waits <= 10
    assert logprobs.keys() == expected_logprobs.keys()
    for row, expected_row in expected_logprobs.items():
        assert logprobs[row].token_ids.tolist() == expected_row.token_ids.tolist()
        np.testing.assert_allclose(logprobs[row].logprobs, expected_row.logprobs)
