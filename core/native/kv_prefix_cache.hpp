// Index of full device blocks by contents: which block holds the keys and values of these tokens after this prefix.
//
// Exactness. Cached blocks form a trie. The key of a block is (identity of its prefix, its tokens), where the identity is the
// node id of the block before it, or of its root. Node ids are never used twice, and a lookup compares identity and tokens in
// full. The hash only chooses where to look, so a collision costs time and never a false hit.
//
// Roots separate caches: one for each salt (an adapter, a tenant), and one without.
//
// Identities are of prefixes, not of places: the same prefix has one in the cache of the device and in the tiers below it (kv_tiers.hpp).
#pragma once
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "kv_array.hpp"
#include "kv_block_pool.hpp"

namespace hardpoint::kv {

using NodeId = uint64_t;
inline constexpr BlockId kNoBlock = -1;

// Roots and node ids, and the seed of hashes: what caches share that hold blocks of the same prefixes.
class PrefixNames {
 public:
  PrefixNames();

  uint64_t seed() const { return seed_; }
  NodeId new_node() { return next_id_++; }

  // Roots are counted: by each sequence that holds one and by each cached block below.
  uint32_t acquire_root(const std::string& salt);
  void share_root(uint32_t root) { ++roots_[root].uses; }
  void release_root(uint32_t root);
  NodeId root_node(uint32_t root) const { return roots_[root].node; }

 private:
  struct Root {
    std::string salt;
    NodeId node = 0;
    int64_t uses = 0;
  };

  uint64_t seed_;
  NodeId next_id_ = 1;
  std::vector<Root> roots_;
  std::vector<uint32_t> free_roots_;
  std::unordered_map<std::string, uint32_t> root_of_salt_;
};

class PrefixCache {
 public:
  // hash_bits (0 to 64): how many bits of the hash are used. Fewer than 64 is for tests, which provoke collisions. The names outlive it.
  PrefixCache(int32_t num_blocks, int32_t block_size, int hash_bits, PrefixNames& names);

  // Hash of the chain that ends in this block, from the hash of the chain before it (0 at a root, whatever the salt).
  uint64_t extend_hash(uint64_t chain_hash, const int32_t* tokens) const;

  BlockId find(uint64_t chain_hash, NodeId parent, const int32_t* tokens) const;
  // Requires that the block is not in the cache and that find() returns kNoBlock for the key. `id`: the node's, where it has one; 0: a new one.
  NodeId insert(BlockId block, uint64_t chain_hash, NodeId parent, uint32_t root, const int32_t* tokens, NodeId id = 0);
  void erase(BlockId block);
  void clear();

  bool contains(BlockId block) const { return nodes_[block].id != 0; }
  NodeId node_id(BlockId block) const { return nodes_[block].id; }
  NodeId parent_id(BlockId block) const { return nodes_[block].parent; }
  // As much of the chain's hash as is kept, by which find() and insert() go alone.
  uint32_t hash_of(BlockId block) const { return nodes_[block].hash; }
  uint32_t root_of(BlockId block) const { return nodes_[block].root; }
  const int32_t* tokens_of(BlockId block) const { return tokens_.data() + static_cast<size_t>(block) * block_size_; }
  int32_t size() const { return size_; }
  int32_t block_size() const { return block_size_; }

  void prefetch_slot(uint64_t chain_hash) const { __builtin_prefetch(&slots_[chain_hash & mask_]); }
  void prefetch_node(uint64_t chain_hash) const;
  // Of a block, or one past the last block.
  void prefetch_entry(BlockId block) const { __builtin_prefetch(&nodes_[block]); }
  void prefetch_insertion(BlockId block) const {
    __builtin_prefetch(&nodes_[block], 1);
    __builtin_prefetch(tokens_of(block), 1);
  }
  void prefetch_slot_of(BlockId block) const { __builtin_prefetch(&slots_[nodes_[block].hash & mask_]); }

  // Every slot leads to a cached block and every cached block is found by its key.
  bool is_consistent() const;

 private:
  struct Node {
    NodeId id;  // 0: not cached
    NodeId parent;
    uint32_t hash;
    uint32_t root;
  };
  // Open addressing with linear probing. At most half of the slots are taken.
  struct Slot {
    uint32_t hash;
    BlockId block;  // kNoBlock: empty
  };

  size_t slot_of(BlockId block) const;

  int32_t block_size_;
  int32_t size_ = 0;
  uint64_t hash_mask_;
  uint64_t seed_;
  size_t mask_;
  PrefixNames& names_;
  Array<Node> nodes_;
  Array<int32_t> tokens_;  // block_size for each block
  Array<Slot> slots_;
};

}  // namespace hardpoint::kv
