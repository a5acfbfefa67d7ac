"""Paged KV blocks: the block manager, its prefix cache and the host pool that blocks are swapped to.

Bookkeeping only, in native code and without torch: no keys or values live here, and what is to be copied or moved on the
device is returned as lists of block ids. The scheduler uses the same native code directly.
"""

from hardpoint.kv.block_manager import AllocStatus, BlockManager, BlockStats, OutOfBlocks

__all__ = ["AllocStatus", "BlockManager", "BlockStats", "OutOfBlocks"]
