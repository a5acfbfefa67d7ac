"""Which replica a prompt is sent to, by the replicas that have its beginning."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hardpoint.engine.prefix_owners import PrefixOwners
from hardpoint.server.prefixes import beginnings

SYSTEM = {"role": "system", "content": "You are a helpful assistant who answers in one sentence. " * 3}


def names(**fields: Any) -> tuple[str, ...]:
    return beginnings(json.dumps({"model": "demo"} | fields).encode())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"prompt": "a" * 128 + "b" * 64}, {"prompt": "a" * 128 + "c" * 64}),
        ({"prompt": [*range(100), 1, 2, 3]}, {"prompt": [*range(100), *[4, 5, 6] * 30]}),
        (
            {"messages": [SYSTEM, {"role": "user", "content": "Why is the sky blue?"}]},
            {"messages": [SYSTEM, {"role": "user", "content": "Is the sea blue? " * 9}]},
        ),
    ],
    ids=["text", "tokens", "conversation"],
)
def test_prompts_share_the_names_of_what_they_begin_with_alike(one: dict[str, Any], other: dict[str, Any]) -> None:
    first, second = names(**one), names(**other)
    shared = [a == b for a, b in zip(first, second, strict=False)]
    assert shared[0]
    assert shared == sorted(shared, reverse=True)
    assert first != second


def test_a_prompt_of_another_tenant_shares_no_name() -> None:
    assert not set(names(prompt="a" * 200)) & set(names(prompt="a" * 200, cache_salt="tenant"))


@pytest.mark.parametrize(
    "body", [b"", b"no JSON", b"[1]", b"[" * 200_000, b"\xff\xfe", b'{"prompt": 3}', b'{"prompt": "short"}']
)
def test_what_has_no_beginning_worth_a_name_has_none(body: bytes) -> None:
    assert beginnings(body) == ()


def test_a_lone_surrogate_is_the_replicas_to_refuse() -> None:
    assert beginnings(b'{"prompt": "' + rb"\ud800" * 64 + b'"}')


def test_the_longest_beginning_counts_and_only_replicas_that_are_there() -> None:
    owners: PrefixOwners[str, str] = PrefixOwners(imbalance=4)
    owners.note(["a", "ab"], "one")
    owners.note(["a", "ab", "abc"], "two")
    owners.note(["a"], "three")
    idle = {"one": 0, "two": 0, "three": 0}
    assert owners.preferred(["a", "ab", "abc", "abcd"], idle) == "two"
    assert owners.preferred(["a", "ax"], idle) == "three"
    assert owners.preferred(["a", "ab", "abc"], {"one": 0, "three": 0}) == "three"
    assert owners.preferred(["z"], idle) is None
    assert owners.preferred([], idle) is None


def test_an_owner_is_passed_over_once_it_is_too_busy() -> None:
    owners: PrefixOwners[str, str] = PrefixOwners(imbalance=4)
    owners.note(["a"], "one")
    assert owners.preferred(["a"], {"one": 5, "two": 1}) == "one"
    assert owners.preferred(["a"], {"one": 6, "two": 1}) is None


def test_names_that_were_used_least_lately_are_forgotten() -> None:
    owners: PrefixOwners[str, str] = PrefixOwners(imbalance=0, capacity=2)
    owners.note(["a"], "one")
    owners.note(["b"], "one")
    owners.note(["a"], "one")
    owners.note(["c"], "one")
    assert [owners.preferred([name], {"one": 0}) for name in "abc"] == ["one", None, "one"]
