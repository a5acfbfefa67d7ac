"""Tile sizes of the kernels, by facts about the target. A table, and no tuning at run time: the same model has the same kernels everywhere.

`scripts/triton_aot.py` compiles every line of it for every target, and fails where one spills registers or exceeds the target's shared
memory. Reasons for the sizes:

- Decode reads the cache once, so it must keep enough bytes in flight: a compute unit of 1/132 of 4.8 TB/s over a latency of about 1 us
  needs some 36 KB (Little's law); two or three programs on each with two stages of a tile of keys and one of values have twice that.
- A prefill tile of 128 rows does 128 products for each element of K and V that is loaded; smaller ones with a large head dimension, whose
  float32 accumulator (rows x head dimension / threads) would not fit into registers beside the logits.
- Targets with 64 lanes have 64 KiB of shared memory: fewer stages and narrower tiles.
- float32 is multiplied without matrix units: small tiles, for registers.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TileTarget:
    """Facts about what kernels are compiled for.

    Attributes:
        lanes: threads that execute together.
        capability: compute capability, 10 * major + minor; 0 where the target has none.
        units: compute units (multiprocessors).
        interpreted: kernels run in Triton's interpreter.
    """

    lanes: int
    capability: int
    units: int
    interpreted: bool = False

    @property
    def persistent(self) -> bool:
        """A decode's programs take one part after the other, so that a captured launch need not have one for every part that there may be.

        Not on targets with 64 lanes: a loop keeps all that it needs in scalar registers, of which they have too few.
        """
        return self.lanes == 32

    @property
    def caches_scalars(self) -> bool:
        """Loads of one number for all lanes have a cache of their own, which a captured launch may find stale after a copy from the
        host: reported of targets with 64 lanes (issue 3902 of their runtime)."""
        return self.lanes == 64

    @property
    def converts_float8(self) -> bool:
        """The target has instructions for e4m3fn (compute capability 8.9 and later); elsewhere its bits are taken apart."""
        return not self.interpreted and self.lanes == 32 and self.capability >= 89


@dataclass(frozen=True)
class Tiles:
    """One kernel's shape.

    Attributes:
        block_m: rows (query heads of tokens).
        block_n: keys.
        warps: groups of lanes of one program.
        stages: depth of the software pipeline.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int


SPLIT_KEYS = 256
"""A decode's context is split into parts of at least as many keys."""
PROGRAMS_PER_UNIT = 6
"""Programs of a decode for each compute unit, at most; each takes several parts where there are more. Registers let two or three run at a
time, and both divide it, so that none runs alone at the end."""
WRITE_TOKENS = 4
COPY_WORDS = 1024


def padded(number: int) -> int:
    """Return the least power of two that is not less."""
    return 1 << (number - 1).bit_length()


def decode_tiles(head_dim: int, group: int, itemsize: int, target: TileTarget) -> Tiles:
    """Return the tiles of decodes with `group` query heads per KV head, and queries of `itemsize` bytes."""
    rows, dim = max(16, padded(group)), padded(head_dim)
    if target.interpreted:
        return Tiles(rows, 128, 4, 1)
    if itemsize == 4:
        # The queries of a large group take 64 KiB, of the 99 that a program has where there is least.
        large = dim > 128 and rows > 32
        narrow = dim > 128 or rows > 16
        return Tiles(rows, 16 if narrow else 32, 8 if large else 4, 2 if target.lanes == 32 and not large else 1)
    if target.lanes == 64:
        return Tiles(rows, 32 if dim > 128 or rows > 16 else 64, 4, 1)
    # The pipeline loads a tile's blocks from the table, then its keys and values: five stages keep two tiles of these.
    if dim > 128:
        return Tiles(rows, 32, 8 if rows > 32 else 4, 3)
    return Tiles(rows, 64, 4, 5)


def prefill_tiles(head_dim: int, itemsize: int, target: TileTarget, unpacks: bool = False) -> Tiles:
    """Return the tiles of everything that is not a decode. `unpacks`: the bits of e4m3 are taken apart, which takes registers."""
    dim = padded(head_dim)
    if target.interpreted:
        return Tiles(128, 128, 4, 1)
    if itemsize == 4:
        return Tiles(16, 16, 4, 1) if dim > 128 else Tiles(32, 32, 8, 1)
    if target.lanes == 64:
        return Tiles(64, 16 if dim > 128 and unpacks else 32, 4, 1)
    if dim > 128:
        return Tiles(64, 32, 8, 3)
    if target.capability >= 90:
        return Tiles(128, 64, 8, 5)
    return Tiles(128, 16 if unpacks else 32, 8, 3)


def max_splits(kv_heads: int, target: TileTarget) -> int:
    """Return into how many parts a decode's context is split at most: enough for two programs on each unit with a single sequence."""
    return min(64, max(8, 2 * target.units // kv_heads))
