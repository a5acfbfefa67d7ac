"""Which layers of a model share a block table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hardpoint.interfaces import AttentionLayer
from hardpoint.worker.kv_groups import MAX_GROUPS, group_layers

FULL = AttentionLayer(num_heads=4, num_kv_heads=2, head_dim=64, scale=0.125)
SLIDING = replace(FULL, sliding_window=512)
EVERY_SIXTH = tuple(FULL if layer % 6 == 5 else SLIDING for layer in range(26))


def numbers(layers: tuple[AttentionLayer, ...], window: int | None) -> list[int]:
    return [number for number, layer in enumerate(layers) if layer.sliding_window == window]


def test_layers_of_one_window_are_one_group() -> None:
    assert group_layers([FULL] * 3, 4096, 16) == [((0, 1, 2), 0, 0)]
    assert group_layers([SLIDING] * 3, 4096, 16) == [((0, 1, 2), 512, 0)]


def test_a_window_as_long_as_the_context_is_none() -> None:
    assert group_layers([FULL, SLIDING], 512, 16) == [((0, 1), 0, 0)]
    assert group_layers([SLIDING] * 2, 512, 16) == [((0, 1), 0, 0)]


def test_alternating_layers_are_two_groups_the_larger_window_first() -> None:
    layers = (SLIDING, FULL) * 6
    assert group_layers(layers, 4096, 16) == [
        (tuple(numbers(layers, None)), 0, 0),
        (tuple(numbers(layers, 512)), 512, 0),
    ]
    wide = (SLIDING, replace(SLIDING, sliding_window=2048)) * 2
    assert group_layers(wide, 4096, 16) == [((1, 3), 2048, 0), ((0, 2), 512, 0)]


def test_groups_have_equally_many_layers_but_the_last_of_a_window() -> None:
    groups = group_layers(EVERY_SIXTH, 32_768, 16)
    assert [len(layers) for layers, *_ in groups] == [4, 4, 4, 4, 4, 4, 2]
    assert [window for _, window, _ in groups] == [0, *[512] * 6]
    assert sorted(number for layers, *_ in groups for number in layers) == list(range(26))


def test_one_group_where_more_would_save_nothing() -> None:
    assert group_layers([FULL, *[SLIDING] * 2], 530, 16) == [((0, 1, 2), 0, 0)]


@pytest.mark.parametrize("full", [1, 2, 5])
def test_there_are_never_more_groups_than_the_most(full: int) -> None:
    layers = [FULL] * full + [SLIDING] * 40
    groups = group_layers(layers, 32_768, 16)
    assert len(groups) <= MAX_GROUPS
    assert sorted(number for own, *_ in groups for number in own) == list(range(len(layers)))


def test_layers_that_attend_in_chunks_have_groups_of_their_own_even_where_they_save_nothing() -> None:
    chunked = replace(FULL, chunk=512)
    assert group_layers([chunked, FULL], 530, 16) == [((1,), 0, 0), ((0,), 512, 512)]
    assert group_layers([chunked, FULL], 512, 16) == [((0, 1), 0, 0)]
    assert group_layers([chunked] * 2, 4096, 16) == [((0, 1), 512, 512)]
