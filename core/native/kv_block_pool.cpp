#include "kv_block_pool.hpp"

namespace hardpoint::kv {

BlockPool::BlockPool(int32_t num_blocks)
    : size_(num_blocks), num_free_(num_blocks), blocks_(static_cast<size_t>(num_blocks) + 1) {
  for (BlockId b = 0; b <= size_; ++b) {
    blocks_[b].prev = b == 0 ? size_ : b - 1;
    blocks_[b].next = b == size_ ? 0 : b + 1;
  }
}

BlockId BlockPool::take_free() {
  const BlockId block = peek_free();
  add_ref(block);
  return block;
}

void BlockPool::add_ref(BlockId block) {
  Block& b = blocks_[block];
  if (b.ref_count++ == 0) {
    blocks_[b.prev].next = b.next;
    blocks_[b.next].prev = b.prev;
    --num_free_;
  }
}

void BlockPool::link(BlockId block, BlockId after) {
  Block& b = blocks_[block];
  b.prev = after;
  b.next = blocks_[after].next;
  blocks_[b.next].prev = block;
  blocks_[after].next = block;
  ++num_free_;
}

bool BlockPool::is_consistent() const {
  int32_t walked = 0;
  BlockId before = size_;
  for (BlockId b = blocks_[size_].next; b != size_; b = blocks_[b].next) {
    if (walked++ > size_ || blocks_[b].ref_count != 0 || blocks_[b].prev != before) return false;
    before = b;
  }
  int32_t unreferenced = 0;
  for (BlockId b = 0; b < size_; ++b) unreferenced += blocks_[b].ref_count == 0;
  return walked == num_free_ && unreferenced == num_free_ && blocks_[size_].prev == before;
}

}  // namespace hardpoint::kv
