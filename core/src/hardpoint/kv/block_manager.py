"""Block tables of sequences over a device pool and a host pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from hardpoint._native import AllocStatus, BlockStats, NotEnoughBlocks, SequenceBlocks
from hardpoint.interfaces.errors import ConfigError, EmptyPrompt, InvalidRequest, MemoryFault, TokenOutOfRange

__all__ = ["AllocStatus", "BlockManager", "BlockStats", "OutOfBlocks", "TokenIds"]

TokenIds: TypeAlias = Sequence[int] | npt.NDArray[np.integer]
_Result = TypeVar("_Result")


class OutOfBlocks(MemoryFault, MemoryError):
    """A call needs more free blocks than there are; nothing was changed. The matching `can_...` says whether to wait."""


class BlockManager:
    """Blocks of many sequences, addressed by sequence ids that the caller chooses.

    A sequence is its tokens, of which a leading part is computed (their keys and values are in the blocks). Usual order:
    `allocate` with the prompt, compute, `mark_computed`; then for every new token `append_slots`, compute, `mark_computed`;
    `free` at the end. Full computed blocks are immutable and enter the prefix cache; they stay there after `free` until their
    block is needed, least recently used first and the end of a sequence before its beginning. A cached block that equals one
    just computed replaces it in the table, so a table may change under `mark_computed`; read it after, not before.

    Every call is all or nothing. Calls on an unknown sequence raise KeyError, calls that the sequence's state forbids
    InvalidRequest.

    Args:
        block_size: tokens per block.
        num_device_blocks, num_host_blocks: sizes of the two pools; their cost per call does not depend on them.
        watermark: share of the device blocks that admission (`can_allocate`, `can_swap_in`) leaves free against thrashing,
            except when all blocks are free, so nothing that fits the pool has to wait forever.
        enable_prefix_caching: reuse full blocks with equal tokens and prefix.
        hash_bits: bits of the prefix hash in use. A hit is verified in full, so fewer only cost time; for tests.

    Raises:
        ConfigError: a size is impossible.
    """

    def __init__(
        self,
        *,
        block_size: int,
        num_device_blocks: int,
        num_host_blocks: int = 0,
        watermark: float = 0.01,
        enable_prefix_caching: bool = True,
        hash_bits: int = 64,
    ) -> None:
        if block_size < 1 or num_device_blocks < 1 or num_host_blocks < 0:
            raise ConfigError(
                "the block pools have impossible sizes",
                found=f"block_size={block_size}, num_device_blocks={num_device_blocks}, num_host_blocks={num_host_blocks}",
            )
        if block_size * max(num_device_blocks, num_host_blocks) >= 1 << 31:
            raise ConfigError(
                "a pool has more slots than int32 can number",
                found=f"{num_device_blocks} and {num_host_blocks} blocks of {block_size} tokens",
                hint="Use fewer blocks",
            )
        if not 0.0 <= watermark < 1.0:
            raise ConfigError("the watermark is a share of the device blocks", found=str(watermark))
        if not 0 <= hash_bits <= 64:
            raise ConfigError("hash_bits is between 0 and 64", found=str(hash_bits))
        self.block_size = block_size
        self.num_device_blocks = num_device_blocks
        self.num_host_blocks = num_host_blocks
        self._native = SequenceBlocks(
            block_size=block_size,
            num_device_blocks=num_device_blocks,
            num_host_blocks=num_host_blocks,
            watermark=watermark,
            enable_prefix_caching=enable_prefix_caching,
            hash_bits=hash_bits,
        )

    @property
    def watermark_blocks(self) -> int:
        """Device blocks that admission leaves free."""
        return self._native.watermark_blocks()

    @property
    def stats(self) -> BlockStats:
        """Counts at this moment; `queried_tokens` and `hit_tokens` (of prompts) and `evictions` since the beginning."""
        return self._native.stats()

    def can_allocate(
        self, token_ids: TokenIds, *, salt: str = "", use_prefix_cache: bool = True, lookahead: int = 0
    ) -> AllocStatus:
        """Whether `allocate` with the same arguments would succeed: now (OK), after others are freed (LATER), or NEVER."""
        return self._call(lambda: self._native.can_allocate(token_ids, salt, use_prefix_cache, lookahead))

    def allocate(
        self,
        seq_id: int,
        token_ids: TokenIds,
        *,
        salt: str = "",
        use_prefix_cache: bool = True,
        lookahead: int = 0,
    ) -> int:
        """Give a new sequence blocks for its tokens and `lookahead` more.

        Cached blocks are reused as far as they reach, at most up to the block before the last token: one token is always
        left to compute, and a shared block is never written.

        Args:
            token_ids: the prompt.
            salt: sequences share cached blocks only with sequences of the same salt (an adapter's name, a tenant's).
            use_prefix_cache: False computes everything anew (for log probabilities of the prompt).

        Returns:
            Leading tokens that are computed already, a multiple of the block size.

        Raises:
            EmptyPrompt, TokenOutOfRange, InvalidRequest (the sequence exists), OutOfBlocks.
        """
        if len(token_ids) == 0:
            raise EmptyPrompt("a sequence needs at least one token")
        return self._call(lambda: self._native.allocate(seq_id, token_ids, salt, use_prefix_cache, lookahead))

    def num_new_blocks(self, seq_id: int, num_tokens: int = 1, lookahead: int = 0) -> int:
        """Free blocks that `append_slots` would take, a copy of a shared last block included."""
        return self._call(lambda: self._native.num_new_blocks(seq_id, num_tokens, lookahead))

    def can_append(self, seq_id: int, num_tokens: int = 1, lookahead: int = 0) -> AllocStatus:
        """Whether `append_slots` would succeed; NEVER when the sequence would outgrow the pool."""
        return self._call(lambda: self._native.can_append(seq_id, num_tokens, lookahead))

    def append_slots(self, seq_id: int, token_ids: TokenIds, lookahead: int = 0) -> list[tuple[int, int]]:
        """Append tokens and see to it that they and `lookahead` more have slots.

        Returns:
            (source, destination) device blocks to copy before the new tokens are written: at most one, when the last block
            is shared with a fork.

        Raises:
            OutOfBlocks, TokenOutOfRange.
        """
        return self._call(lambda: self._native.append_slots(seq_id, token_ids, lookahead))

    def mark_computed(self, seq_id: int, num_computed: int) -> None:
        """Say that the first `num_computed` tokens have their keys and values in the blocks; the number never falls."""
        self._call(lambda: self._native.mark_computed(seq_id, num_computed))

    def fork(self, parent: int, child: int) -> None:
        """Make `child` a sequence with the parent's tokens and blocks; all of the parent's tokens must be computed."""
        self._call(lambda: self._native.fork(parent, child))

    def free(self, seq_id: int) -> None:
        """Forget a sequence; blocks without another owner become free, and stay cached where they were."""
        self._call(lambda: self._native.free(seq_id))

    def can_swap_out(self, seq_ids: Sequence[int]) -> AllocStatus:
        """Whether the host pool has room for the computed blocks of these sequences, shared ones counted once."""
        return self._call(lambda: self._native.can_swap_out(seq_ids))

    def swap_out(self, seq_ids: Sequence[int]) -> list[tuple[int, int]]:
        """Move sequences (of one request) to host blocks; blocks that they share stay shared.

        Returns:
            (device block, host block) pairs to copy before a device block is written again.

        Raises:
            OutOfBlocks.
        """
        return self._call(lambda: self._native.swap_out(seq_ids))

    def can_swap_in(self, seq_ids: Sequence[int]) -> AllocStatus:
        """Whether the device pool has room for these sequences, the watermark observed."""
        return self._call(lambda: self._native.can_swap_in(seq_ids))

    def swap_in(self, seq_ids: Sequence[int]) -> list[tuple[int, int]]:
        """Move sequences back to device blocks.

        Returns:
            (host block, device block) pairs to copy before a host block is written again.

        Raises:
            OutOfBlocks.
        """
        return self._call(lambda: self._native.swap_in(seq_ids))

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._native

    def is_swapped(self, seq_id: int) -> bool:
        """Whether the sequence's blocks are in the host pool."""
        return self._call(lambda: self._native.is_swapped(seq_id))

    def block_table(self, seq_id: int) -> list[int]:
        """The sequence's blocks in order: of the host pool while it is swapped, of the device pool otherwise."""
        return self._call(lambda: self._native.block_table(seq_id))

    def num_tokens(self, seq_id: int) -> int:
        """Tokens of a sequence, computed or not."""
        return self._call(lambda: self._native.num_tokens(seq_id))

    def ref_count(self, block: int) -> int:
        """Sequences that hold a device block."""
        return self._call(lambda: self._native.ref_count(block))

    def reset_prefix_cache(self) -> None:
        """Forget all cached contents at once; sequences keep their blocks, which will not be shared any more."""
        self._native.reset_prefix_cache()

    def check(self) -> None:
        """Verify all invariants (reference counts, free lists, cache, tables); slow, for tests.

        Raises:
            AssertionError: the first that does not hold.
        """
        broken = self._native.check()
        if broken:
            raise AssertionError(broken)

    def _call(self, operation: Callable[[], _Result]) -> _Result:
        try:
            return operation()
        except IndexError as error:
            if len(error.args) == 2:
                raise TokenOutOfRange(
                    "a token id is out of range", found=f"{error.args[0]} at position {error.args[1]}"
                ) from None
            raise KeyError("no such sequence") from None
        except NotEnoughBlocks:
            raise OutOfBlocks(
                "not enough free blocks",
                found=f"{self.stats.device_free} of {self.num_device_blocks} device blocks and "
                f"{self.stats.host_free} of {self.num_host_blocks} host blocks are free",
                hint="Ask can_allocate, can_append, can_swap_out or can_swap_in first",
            ) from None
        except ValueError as error:
            raise InvalidRequest(str(error)) from None
