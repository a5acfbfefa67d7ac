"""Element types by their standard names, without torch: descriptors and capabilities are read before torch is imported."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class DType(StrEnum):
    """An element type; its value is the name that torch uses."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT8_E4M3 = "float8_e4m3fn"
    FLOAT8_E5M2 = "float8_e5m2"
    INT8 = "int8"
    UINT8 = "uint8"
    INT32 = "int32"
    INT64 = "int64"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEMSIZE[self]

    def to_torch(self) -> torch.dtype:
        """Return the torch dtype of the same name."""
        import torch

        dtype: torch.dtype = getattr(torch, self.value)
        return dtype

    @classmethod
    def of(cls, dtype: torch.dtype | str | DType) -> DType:
        """Return the element type of a torch dtype or of a name (`bfloat16`, `torch.bfloat16`); raises ValueError."""
        return cls(str(dtype.value if isinstance(dtype, DType) else dtype).removeprefix("torch."))


_ITEMSIZE = {
    DType.FLOAT32: 4,
    DType.FLOAT16: 2,
    DType.BFLOAT16: 2,
    DType.FLOAT8_E4M3: 1,
    DType.FLOAT8_E5M2: 1,
    DType.INT8: 1,
    DType.UINT8: 1,
    DType.INT32: 4,
    DType.INT64: 8,
}
