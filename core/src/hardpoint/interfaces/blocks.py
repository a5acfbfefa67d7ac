"""Formats of weights in quantised blocks, without torch: what a checkpoint stores, and what a kernel set multiplies by as it is stored."""

from __future__ import annotations

from enum import StrEnum


class BlockFormat(StrEnum):
    """Formats of blocks; a block is the same number of a row's elements, with scales of their own.

    A weight [rows, columns] in blocks is uint8[rows, row_bytes(columns)]: the blocks of each row, in order. Those of ggml's formats are as
    GGUF files have them (ggml, ggml-common.h). INT4 and INT8 are for formats of scale and zero point, whose groups are one block or more:
    a block is its scale, float32, its zero point, int16, and 32 unsigned numbers, so that an element is `scale * (number - zero point)`.
    Numbers are bytes in INT8; in INT4 byte j has number j in its low half, and number j + 16 in the high one. INT4_128 and INT8_128 are
    for groups of 128 or a multiple: one scale and zero point, and then the numbers of four blocks. FP8 is for 8-bit floating
    numbers with a scale for a matrix, a row or a part of both: a block is its scale, float32, and 32 numbers in e4m3fn. Native byte order.
    """

    Q4_0 = "Q4_0"
    Q4_1 = "Q4_1"
    Q5_0 = "Q5_0"
    Q5_1 = "Q5_1"
    Q8_0 = "Q8_0"
    Q2_K = "Q2_K"
    Q3_K = "Q3_K"
    Q4_K = "Q4_K"
    Q5_K = "Q5_K"
    Q6_K = "Q6_K"
    INT4 = "INT4"
    INT4_128 = "INT4_128"
    INT8 = "INT8"
    INT8_128 = "INT8_128"
    FP8 = "FP8"

    @property
    def type_id(self) -> int:
        """ggml's number of the format, or one of our own beyond its numbers."""
        return _TABLE[self][0]

    @property
    def elements(self) -> int:
        """Elements of a row in one block."""
        return _TABLE[self][1]

    @property
    def nbytes(self) -> int:
        """Bytes of one block."""
        return _TABLE[self][2]

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of a row of so many elements, a multiple of `elements`."""
        return columns // self.elements * self.nbytes

    @property
    def forms(self) -> tuple[BlockFormat, ...]:
        """The formats that have its numbers and scales without loss, smallest first: itself, and that of 32 elements where it has 128."""
        return (self, *_DIVIDED.get(self, ()))

    @classmethod
    def of_type_id(cls, type_id: int) -> BlockFormat | None:
        """Return the format of one of ggml's numbers, None for a type that is not in these blocks."""
        return next((known for known, (number, _, _) in _TABLE.items() if number == type_id), None)


_TABLE = {
    BlockFormat.Q4_0: (2, 32, 18),
    BlockFormat.Q4_1: (3, 32, 20),
    BlockFormat.Q5_0: (6, 32, 22),
    BlockFormat.Q5_1: (7, 32, 24),
    BlockFormat.Q8_0: (8, 32, 34),
    BlockFormat.Q2_K: (10, 256, 84),
    BlockFormat.Q3_K: (11, 256, 110),
    BlockFormat.Q4_K: (12, 256, 144),
    BlockFormat.Q5_K: (13, 256, 176),
    BlockFormat.Q6_K: (14, 256, 210),
    BlockFormat.INT4: (1004, 32, 22),
    BlockFormat.INT4_128: (1104, 128, 70),
    BlockFormat.INT8: (1008, 32, 38),
    BlockFormat.INT8_128: (1108, 128, 134),
    BlockFormat.FP8: (1009, 32, 36),
}
_DIVIDED = {BlockFormat.INT4_128: (BlockFormat.INT4,), BlockFormat.INT8_128: (BlockFormat.INT8,)}


class Quantization(StrEnum):
    """How weights are stored and multiplied by.

    Of weights that a checkpoint has in quantised blocks AUTO multiplies by those as they are stored that the backend has an operator for
    and expands the others, GGUF refuses the others, and NONE expands all. The others are for checkpoints that are not quantised:
    matrices are rounded to the nearest numbers of 8 or 4 bits while they are loaded, each 32 elements of a row, or 128, with a scale of
    their own.
    """

    AUTO = "auto"
    GGUF = "gguf"
    INT4 = "int4"
    INT4_128 = "int4-128"
    INT8 = "int8"
    INT8_128 = "int8-128"
    NONE = "none"

    @property
    def rounds_to(self) -> tuple[BlockFormat, BlockFormat] | None:
        """The formats that dense weights are rounded to: of linear layers, and of the embedding and the head; None for no rounding."""
        return _ROUNDED.get(self)


_ROUNDED = {
    Quantization.INT4: (BlockFormat.Q4_1, BlockFormat.Q8_0),
    Quantization.INT4_128: (BlockFormat.INT4_128, BlockFormat.INT8_128),
    Quantization.INT8: (BlockFormat.Q8_0, BlockFormat.Q8_0),
    Quantization.INT8_128: (BlockFormat.INT8_128, BlockFormat.INT8_128),
}
