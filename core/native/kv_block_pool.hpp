// Pool of fixed-size blocks: reference counts and one doubly linked free list in an array, so every operation is O(1)
// whatever the size of the pool.
//
// The free list is ordered by worth: blocks without reusable contents at the front (last freed first, their bookkeeping is
// still in the processor's cache), blocks with cached contents behind them, least recently used first.
#pragma once
#include <cstdint>

#include "kv_array.hpp"

namespace hardpoint::kv {

using BlockId = int32_t;

class BlockPool {
 public:
  explicit BlockPool(int32_t num_blocks);

  int32_t size() const { return size_; }
  int32_t num_free() const { return num_free_; }
  int32_t ref_count(BlockId block) const { return blocks_[block].ref_count; }

  // The free block of least worth. Requires num_free() > 0 (for take_free).
  BlockId peek_free() const { return blocks_[size_].next; }
  // The free block after this one; size() at the end, and the first one after size().
  BlockId next_free(BlockId block) const { return blocks_[block].next; }
  BlockId take_free();

  // Another owner; a free block leaves the free list.
  void add_ref(BlockId block);

  // One owner less; true when none is left. The block is then on no list until put_front or put_back.
  bool drop_ref(BlockId block) { return --blocks_[block].ref_count == 0; }
  void put_front(BlockId block) { link(block, size_); }
  void put_back(BlockId block) { link(block, blocks_[size_].prev); }

  // Walks the free list; false when links, counts and reference counts disagree.
  bool is_consistent() const;

 private:
  struct Block {
    BlockId prev, next;  // meaningful while ref_count is 0
    int32_t ref_count;
    int32_t padding;
  };

  void link(BlockId block, BlockId after);

  int32_t size_;
  int32_t num_free_;
  Array<Block> blocks_;  // the entry at index size_ is the head of the circular list
};

}  // namespace hardpoint::kv
