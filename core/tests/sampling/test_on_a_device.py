"""The sampler on a device with memory of its own: the tokens are those of the host, which waits for none but where it collects them.

A stand-in for the device: tensors that lie on the host and say that they do not, for torch's functions and for ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from hardpoint import interfaces
from hardpoint.interfaces.platform import Event
from hardpoint.sampling import SamplingParams
from hardpoint.sampling.sampler import SampledTokens, Sampler
from hardpoint.worker import TorchPlatform

ROWS, COLUMNS = 40, 50_000

aten = torch.ops.aten
WAITING = {aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default, aten.masked_select.default}
"""Operators whose result, or whose size, the host must know."""


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

        if function in WAITING:
            OnDevice.waits += 1
        plain, named = tree_map(held, (args, dict(kwargs or {})))
        asked = named.get("device")
        if asked is not None:
            named["device"] = torch.device("cpu")
        result = function(*plain, **named)
        is_own = bool(own) if asked is None else torch.device(asked).type == "meta"
        return tree_map(lambda x: OnDevice(x) if is_own and isinstance(x, torch.Tensor) else x, result)


class Queue(TorchPlatform):
    """Counts how often what was queued was marked, and waited for."""

    made = waited = 0

    def __init__(self) -> None:
        super().__init__(interfaces.Device("stand_in", 0, "a stand-in for a device", "meta"))

    def empty_host(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    def record_event(self) -> Event:
        self.made += 1
        queue = self

        class Mark:
            def synchronize(self) -> None:
                queue.waited += 1

        return Mark()


def run(sampler: Sampler, logits: list[torch.Tensor], values: dict[str, Any]) -> list[SampledTokens]:
    """Sample steps without collecting any, and return them."""
    one = SamplingParams(**values).to_sequence_sampling(0, (1, 2), 0, 0, [5])
    sampler.set_rows([replace(one, state_row=row, seed=row) for row in range(ROWS)])
    rows = np.arange(ROWS, dtype=np.int32)
    return [sampler.sample(step, rows, np.full(ROWS, number, np.int32)) for number, step in enumerate(logits)]


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"temperature": 0.7, "top_p": 0.95},
        {"top_k": 20},
        {"min_p": 0.1},
        {"temperature": 0.0},
        {"presence_penalty": 1.0, "logit_bias": {3: 2.0}},
        {"allowed_token_ids": (5, 9, 10, 11), "min_tokens": 1},
        {"logprobs": 3},
    ],
    ids=str,
)
def test_steps_give_the_tokens_of_the_host_and_never_wait(values: dict[str, Any]) -> None:
    logits = list(3 * torch.randn(2, ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)))
    expected = [step.collect() for step in run(Sampler(COLUMNS), logits, values)]
    OnDevice.waits, queue = 0, Queue()
    with Device():
        steps = run(Sampler(COLUMNS, "meta", platform=queue), [OnDevice(step.clone()) for step in logits], values)
        assert (OnDevice.waits, queue.made, queue.waited) == (0, 2, 0)
        found = [step.collect() for step in steps]
    assert (OnDevice.waits, queue.waited) == (0, 2)
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.logprobs.keys() == other.logprobs.keys()
        for row, expected_row in other.logprobs.items():
            assert one.logprobs[row].token_ids.tolist() == expected_row.token_ids.tolist()
            np.testing.assert_allclose(one.logprobs[row].logprobs, expected_row.logprobs)
