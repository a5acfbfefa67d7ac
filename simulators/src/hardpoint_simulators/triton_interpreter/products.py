"""Products of tiles as devices have them: a row's does not depend on where in the tile it is."""

from __future__ import annotations

from functools import cache
from typing import Any


@cache
def multiply_rows_alike() -> None:
    """Have Triton's interpreter multiply each row of a tile by the same call of numpy's library.

    A whole tile is a product in which the library takes the last rows in another way than the first, and sums them in another order; a
    device's instruction treats all rows alike.
    """
    import numpy as np
    from triton.runtime import interpreter

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        left, right = a.data.astype(d.data.dtype), b.data.astype(d.data.dtype)
        product = np.matmul(left[..., :, None, :], right[..., None, :, :])[..., 0, :]
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot
