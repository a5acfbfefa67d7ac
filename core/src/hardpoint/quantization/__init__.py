"""How a `Linear` stores its weight and multiplies by it: dense here; int8, int4 groups, fp8 and GGUF blocks have their place beside it.

The `ModelContext` that a model is built with chooses the method of each layer by its shape; layers and models know none of them.
"""

from hardpoint.quantization.base import LinearMethod, MethodOfShape
from hardpoint.quantization.dense import DENSE, Dense, dense
from hardpoint.quantization.packed import Packed, packed

__all__ = ["DENSE", "Dense", "LinearMethod", "MethodOfShape", "Packed", "dense", "packed"]
