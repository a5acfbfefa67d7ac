"""How a `Linear` stores its weight and multiplies by it: dense here; int8, int4 groups, fp8 and GGUF blocks have their place beside it.

A method is chosen once, in the `ModelContext` that a model is built with; layers and models know none of them.
"""

from hardpoint.quantization.base import LinearMethod
from hardpoint.quantization.dense import DENSE, Dense

__all__ = ["DENSE", "Dense", "LinearMethod"]
