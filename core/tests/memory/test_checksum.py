"""XXH64 against the reference implementation."""

from __future__ import annotations

import xxhash
from hypothesis import given
from hypothesis import strategies as st

from hardpoint._native import Xxh64, xxh64

SEEDS = st.integers(0, 2**64 - 1)


@given(st.binary(max_size=300), SEEDS)
def test_hash_of_bytes_is_that_of_the_reference(data: bytes, seed: int) -> None:
    assert xxh64(data, seed) == xxhash.xxh64_intdigest(data, seed)


@given(st.lists(st.binary(max_size=100), max_size=12), SEEDS)
def test_hash_of_a_stream_does_not_depend_on_how_it_is_cut(parts: list[bytes], seed: int) -> None:
    stream = Xxh64(seed)
    reference = xxhash.xxh64(seed=seed)
    for part in parts:
        stream.update(part)
        reference.update(part)
        assert stream.digest() == reference.intdigest()


def test_hash_of_memory_at_any_alignment() -> None:
    data = memoryview(bytes(range(256)) * 8)
    for start in range(9):
        for size in (0, 1, 31, 32, 33, 1000):
            piece = data[start : start + size]
            assert xxh64(piece) == xxhash.xxh64_intdigest(piece)


def test_hash_of_a_long_stream() -> None:
    block = bytes(range(256)) * (1 << 14)
    stream, reference = Xxh64(), xxhash.xxh64()
    for _ in range(4):
        stream.update(block)
        reference.update(block)
    assert stream.digest() == reference.intdigest()
