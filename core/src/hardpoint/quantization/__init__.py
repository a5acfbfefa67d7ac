"""How a `Linear` stores its weight and multiplies by it: dense, in the backend's layout, or in the blocks of its checkpoint.

The `ModelContext` that a model is built with chooses the method of each layer by its shape; layers and models know none of them.
"""

from hardpoint.quantization.base import LinearMethod, MethodOfShape
from hardpoint.quantization.blocks import Blocks
from hardpoint.quantization.dense import DENSE, Dense, dense
from hardpoint.quantization.packed import Packed, packed

__all__ = ["DENSE", "Blocks", "Dense", "LinearMethod", "MethodOfShape", "Packed", "dense", "packed"]
