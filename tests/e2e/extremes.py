"""Extreme sampling parameters, each beside a greedy neighbour that must not notice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hardpoint import LLM, SamplingParams

_WIDE = {"temperature": 3.4e38}
EXTREMES: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 0.7, "min_tokens": 2, "stop_token_ids": "the vocabulary"}, "error"),
    ({"temperature": 0.0, "min_tokens": 2, "stop_token_ids": "the vocabulary"}, "error"),
    ({"temperature": 0.0, "repetition_penalty": 1.2e-38, "ignore_eos": True}, "error"),
    ({"temperature": 1.0, "repetition_penalty": 3.4e38, "ignore_eos": True}, "length"),
    ({**_WIDE, "allowed_token_ids": [5, 6]}, "length"),
    ({**_WIDE, "allowed_token_ids": [5, 6], "top_p": 1.2e-38}, "length"),
    ({"temperature": 1.0, "top_k": 2**31 - 1, "ignore_eos": True}, "length"),
    ({"temperature": 1e-5, "top_k": 2**31 - 1, "min_p": 1e-320, "ignore_eos": True}, "length"),
    ({"temperature": 1.0, "seed": -(2**63), "ignore_eos": True}, "length"),
    ({"temperature": 1.0, "logit_bias": dict.fromkeys(range(1000), -100.0), "ignore_eos": True}, "length"),
]
"""Parameters, and the reason for which a request that has them ends."""


def check_that_extremes_end_alone(llm: LLM, prompts: Sequence[Any], vocabulary: int) -> None:
    """Run each of them beside a greedy request, whose tokens do not change; all others end as they should."""
    greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    (expected,) = llm.generate(prompts[0], greedy, use_tqdm=False)
    for values, reason in EXTREMES:
        given = values | ({"stop_token_ids": list(range(vocabulary))} if "stop_token_ids" in values else {})
        params = [SamplingParams(max_tokens=4, **given), greedy]
        extreme, neighbour = llm.generate([prompts[1], prompts[0]], params, use_tqdm=False)
        assert neighbour.outputs[0].token_ids == expected.outputs[0].token_ids, values
        assert extreme.outputs[0].finish_reason == reason, values
        assert len(extreme.outputs[0].token_ids) == (4 if reason == "length" else 0), values
    assert not llm.engine.has_unfinished_requests()
    assert llm.engine.stats().blocks_used == 0
