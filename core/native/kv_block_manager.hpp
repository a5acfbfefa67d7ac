// Paged KV blocks of sequences: allocation, growth, forks with copy-on-write, prefix reuse, swap to host memory.
//
// A caller keeps one BlockTable for each sequence and owns the memory of its block ids. Every operation is all or nothing:
// the number of blocks that it takes is known and compared with the free ones before anything changes.
//
// Groups. Layers with unlike windows form KV cache groups of equally many layers, so that a block has the same bytes in each and all
// groups take theirs from one pool. A sequence has a table for each group, with equally many entries; in a group with a window the
// blocks that no later query sees are given back (free_unseen). The prefix cache is a trie of the first group's blocks, the group with
// the largest window: a node of it also names the blocks of the other groups with the same tokens, as far as they are cached.
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "kv_block_pool.hpp"
#include "kv_prefix_cache.hpp"
#include "kv_tiers.hpp"

namespace hardpoint::kv {

enum class AllocStatus { ok, later, never };

using BlockPair = std::pair<BlockId, BlockId>;  // source, destination

inline constexpr int32_t kMaxGroups = 8;

// Blocks of one sequence in order. Full blocks are immutable. The first group's blocks [0, num_registered) are the cache's own: the
// chain of nodes from the root, each the only cached block with its contents.
struct BlockTable {
  BlockId* blocks = nullptr;  // of the first group
  NodeId parent = 0;          // node of the last registered block, else of the root
  uint64_t chain_hash = 0;    // up to the last registered block
  int32_t max_blocks = 0;
  int32_t num_blocks = 0;
  int32_t num_registered = 0;
  uint32_t root = 0;
  uint32_t epoch = 0;           // of the cache when the contents were computed; older contents are never registered
  bool may_share_tail = false;  // the block of the next position may have other owners, which will write to it too
  int64_t group_stride = 0;     // entries from one group's table to the next one's
  std::array<int32_t, kMaxGroups> first{};  // of each group, the first block that is held; entries before it are 0
};

// What the prefix cache holds of a prompt; the first group's ids are in the first entries of the table that was matched.
struct PrefixMatch {
  int32_t num_blocks = 0;
  int32_t num_free = 0;  // blocks of all groups that would be shared, and that no sequence holds
  NodeId parent = 0;
  uint64_t chain_hash = 0;
};

struct BlockManagerConfig {
  int32_t block_size = 16;
  int32_t num_device_blocks = 0;
  int32_t num_host_blocks = 0;
  // Of the tiers below the prefix cache, which need it, and a single group without a window.
  int32_t num_tier_host_blocks = 0, num_tier_disk_blocks = 0;
  double watermark = 0.01;
  bool enable_prefix_caching = true;
  int hash_bits = 64;
  // Keys that a query of each group sees, its own included; 0 for all. The first is the largest.
  std::vector<int32_t> windows = {0};
};

struct BlockStats {
  int32_t device_free = 0, device_used = 0, host_free = 0, host_used = 0;
  int32_t cached = 0;  // registered blocks, in use or free
  int64_t queried_tokens = 0, hit_tokens = 0, evictions = 0;
};

class BlockManager {
 public:
  explicit BlockManager(const BlockManagerConfig& config);

  const BlockManagerConfig& config() const { return config_; }
  int32_t blocks_for(int64_t num_tokens) const {
    return static_cast<int32_t>((num_tokens + config_.block_size - 1) / config_.block_size);
  }
  int32_t num_groups() const { return num_groups_; }
  bool has_windows() const { return has_windows_; }
  int32_t num_free_device() const { return device_.num_free(); }
  PrefixNames& names() { return names_; }
  PrefixTiers& tiers() { return tiers_; }
  const PrefixTiers& tiers() const { return tiers_; }
  bool is_cached(BlockId block) const {
    return config_.enable_prefix_caching && (cache_.contains(block) || (num_groups_ > 1 && owners_[block] != kNoBlock));
  }
  // First block that the query at `position`, or a later one, sees in a group.
  int32_t first_seen(int32_t group, int64_t position) const {
    const int32_t window = config_.windows[group];
    return window == 0 || position < window ? 0 : static_cast<int32_t>((position - window + 1) / config_.block_size);
  }
  // Blocks of all groups for a table with `total_blocks` entries, of which those before `first` are not held.
  int64_t held_blocks(const BlockTable& table, int32_t total_blocks) const;
  BlockStats stats() const;

  // Ready a table for a sequence with no blocks: its root and the cache's present epoch.
  void open(BlockTable& table, uint32_t root) const;

  // Longest cached chain of full blocks of tokens[0, num_tokens - 1): at least one token is left to compute. A prompt whose
  // last block is full and cached thus computes that whole block again, and no shared block is ever written. Of a group with a window
  // only the blocks have to be cached that the first query after the chain sees.
  PrefixMatch match_prefix(BlockTable& table, const int32_t* tokens, int64_t num_tokens) const;

  // Slots of the tiers with the full blocks of tokens[0, num_tokens - 1) that follow those of the match.
  void match_tiers(const BlockTable& table, const PrefixMatch& match, const int32_t* tokens, int64_t num_tokens,
                   std::vector<TierSlot>& slots) const;
  // Stores in the host's tier what is cached on the device: as much as it has room for, of the most worth. `running`: tables of running
  // sequences, the most important first.
  void store_cached(const std::vector<const BlockTable*>& running);

  // Admission: the watermark is kept free, unless no block is in use, so that nothing that fits the pool waits forever.
  AllocStatus can_take(int64_t num_blocks) const;
  AllocStatus can_allocate(const PrefixMatch& match, int32_t total_blocks) const {
    const int64_t groups = num_groups_;
    return groups * total_blocks > device_.size() ? AllocStatus::never
                                                  : can_take(groups * (total_blocks - match.num_blocks) + match.num_free);
  }
  // Requires that the blocks are free, and that the table is empty and was just matched.
  void allocate(BlockTable& table, const PrefixMatch& match, int32_t total_blocks);
  void count_lookup(int64_t num_tokens, const PrefixMatch& match);

  // Free blocks that it takes to write from `position` on with total_blocks in all, the copy of a shared block included.
  int32_t growth(const BlockTable& table, int64_t position, int32_t total_blocks) const {
    const int32_t appended = total_blocks > table.num_blocks ? total_blocks - table.num_blocks : 0;
    return num_groups_ * (appended + (shares_block(table, position) ? 1 : 0));
  }
  // Requires growth() free blocks. Copies to be done on the device are appended to `copies`.
  void grow(BlockTable& table, int64_t position, int32_t total_blocks, std::vector<BlockPair>& copies);

  // The keys and values of tokens[0, num_computed) are in the blocks: full ones enter the prefix cache. Where equal contents
  // are cached already, the table takes the cached block and gives its own back.
  void register_computed(BlockTable& table, const int32_t* tokens, int64_t num_computed);
  // Brings into the processor's cache what register_computed() will touch of the next block.
  void prefetch_registration(const BlockTable& table, const int32_t* tokens, int64_t num_computed) const {
    const int64_t first = static_cast<int64_t>(table.num_registered) * config_.block_size;
    if (!config_.enable_prefix_caching || first + config_.block_size > num_computed) return;
    cache_.prefetch_slot(cache_.extend_hash(table.chain_hash, tokens + first));
    cache_.prefetch_insertion(table.blocks[table.num_registered]);
  }

  // The first num_computed tokens are done: gives back the blocks that no later query sees.
  void free_unseen(BlockTable& table, int64_t num_computed);

  // The child gets the blocks of the first num_computed positions; the last one, if partly filled, is copied on write.
  void fork(BlockTable& parent, BlockTable& child, int64_t num_computed);

  // Each table gets the blocks of the first num_computed positions of that of index parents[i], as by fork(); those that none gets are
  // given back.
  void reassign(const std::vector<BlockTable*>& tables, const std::vector<int32_t>& parents, int64_t num_computed);
  // The block of the position, which is to be written, has other owners.
  bool shares_block(const BlockTable& table, int64_t position) const {
    if (!table.may_share_tail || position % config_.block_size == 0) return false;
    const int64_t index = position / config_.block_size;
    return index < table.num_blocks && device_.ref_count(table.blocks[index]) > 1;
  }

  // Blocks are freed from the last to the first, so that a chain is evicted from its end.
  void free(BlockTable& table);

  // Swap moves the held ones of a sequence's first `keep` blocks, which hold computed contents, to the host; the others are given back.
  // A block that other sequences share is copied, and stays theirs.
  AllocStatus can_swap_out(const BlockTable& table, int32_t keep) const;
  void swap_out(BlockTable& table, int32_t keep, std::vector<BlockId>& host_blocks, std::vector<BlockPair>& moves);
  // Requires can_take(held_blocks(table, total_blocks)).
  void swap_in(BlockTable& table, std::vector<BlockId>& host_blocks, int32_t total_blocks, std::vector<BlockPair>& moves);
  void free_host(std::vector<BlockId>& host_blocks);

  // What was computed before is never hit again in device blocks, and where `tiers` says so, nowhere. Sequences keep the blocks that they
  // hold.
  void reset_prefix_cache(bool tiers);

  // The first invariant that does not hold for these tables (all that exist), or an empty string.
  std::string check(const std::vector<const BlockTable*>& tables,
                    const std::vector<const std::vector<BlockId>*>& host_tables) const;

 private:
  BlockId take_device_block();
  void release_device_block(BlockId block);
  // False where the table can register nothing any more.
  bool register_block(BlockTable& table, int32_t index, const int32_t* tokens);
  void register_companions(BlockTable& table, int32_t index);
  void detach_companions(BlockId node);
  BlockId& companion(BlockId node, int32_t group) {
    return companions_[static_cast<size_t>(node) * (num_groups_ - 1) + group - 1];
  }
  BlockId companion(BlockId node, int32_t group) const { return const_cast<BlockManager*>(this)->companion(node, group); }
  BlockId* table_of(const BlockTable& table, int32_t group) const { return table.blocks + group * table.group_stride; }

  BlockManagerConfig config_;
  int32_t watermark_blocks_;
  uint32_t epoch_ = 0;
  int64_t queried_tokens_ = 0, hit_tokens_ = 0, evictions_ = 0;
  int32_t num_groups_;
  bool has_windows_;
  BlockPool device_;
  BlockPool host_;
  PrefixNames names_;
  PrefixCache cache_;
  PrefixTiers tiers_;
  // With several groups, of each block: the cached blocks of the other groups that go with it where it is a node of the trie, and the
  // node that it goes with.
  Array<BlockId> companions_, owners_;
  int32_t num_companions_ = 0;
};

}  // namespace hardpoint::kv
