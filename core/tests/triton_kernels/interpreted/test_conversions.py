"""The interpreter, made quicker, converts every number as it does by itself."""

from __future__ import annotations

import numpy as np
import pytest


@pytest.mark.parametrize("with_subnormal", [False, True])
def test_conversions_between_float32_and_bfloat16_are_the_interpreters_own(with_subnormal: bool) -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    from hardpoint_simulators.triton_interpreter.speed import quicken_interpreter

    quicken_interpreter()
    quick = interpreter._convert_float
    (own,) = (
        cell.cell_contents
        for cell in quick.__closure__
        if getattr(cell.cell_contents, "__name__", "") == "_convert_float"
    )
    narrow = np.arange(1 << 16, dtype=np.uint16)
    wide = np.random.default_rng(0).integers(0, 1 << 32, 1 << 18, dtype=np.uint32)
    wide[:6] = 0, 1 << 31, 0x7F80_0000, 0xFF80_0000, 0x7F80_0001, 0x0080_0000
    for numbers, kind, to, fraction in (
        (narrow, tl.bfloat16, tl.float32, 7),
        (wide, tl.float32, tl.bfloat16, 23),
    ):
        size = numbers & np.array((1 << (8 + fraction)) - 1, numbers.dtype)
        chosen = numbers[(size == 0) | (size >> fraction > 0) | with_subnormal]
        for shaped in (chosen[:, None], chosen[:1], chosen[:0]):
            expected = own(shaped, kind, to, None)
            found = quick(shaped, kind, to, None)
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
            assert np.array_equal(found, expected)
