// Tiers below the prefix cache: which slot of the host's memory, or of a file on disk, holds a block that the device gave up.
//
// The books alone: the worker owns the memory, and does the moves that are planned here, in this order: demotions (host to disk), stores
// (device to host), loads (host or disk to device). Least recently used blocks go from the host to the disk, and from there for good.
//
// A block keeps its identity (PrefixNames) wherever it is, so that chains may lie partly here and partly on the device. What a slot holds
// is told apart by a tag, which is never used twice: the worker keeps the tag with the bytes, and a load whose tag it does not find there
// fails, so that no mistake about what a slot holds gives a wrong block.
#pragma once
#include <cstdint>
#include <vector>

#include "kv_array.hpp"
#include "kv_block_pool.hpp"
#include "kv_prefix_cache.hpp"

namespace hardpoint::kv {

using TierSlot = BlockId;  // of the host first, then of the disk

struct TierMove {
  int64_t from, to, tag;
};

struct TierStats {
  int64_t host_blocks = 0, disk_blocks = 0;  // held
  int64_t queries = 0, host_hits = 0, disk_hits = 0;  // blocks of prompts that the device's cache did not have
  int64_t stores = 0, demotions = 0, evictions = 0, failed_loads = 0;
};

class PrefixTiers {
 public:
  PrefixTiers(int32_t num_host, int32_t num_disk, int32_t block_size, int hash_bits, PrefixNames& names);

  bool is_on() const { return host_.size() > 0; }
  int32_t host_size() const { return host_.size(); }
  bool is_on_disk(TierSlot slot) const { return slot >= host_.size(); }
  int64_t tag(TierSlot slot) const { return tags_[slot]; }
  NodeId node_id(TierSlot slot) const { return index_.node_id(slot); }

  TierSlot find(uint64_t chain_hash, NodeId parent, const int32_t* tokens) const {
    return index_.size() == 0 ? kNoBlock : index_.find(chain_hash, parent, tokens);
  }

  // Plans to store a cached block of the device on the host, unless it is there. Where all slots are in use, nothing is done.
  void store(const PrefixCache& cache, BlockId block);

  // Plans a load from a slot that is held: it stays as it is until it is released. Those of a chain are released from the last to the first.
  void hold(TierSlot slot) { pool_of(slot).add_ref(place_of(slot)); }
  void load(TierSlot slot, BlockId block) { loads.push_back({slot, block, tags_[slot]}); }
  void release(TierSlot slot);
  void count_lookup(int64_t queries, const std::vector<TierSlot>& found);
  void count_failed_load() { ++stats_.failed_loads; }

  // What was stored under this tag is not there: it was not done, or is damaged.
  void drop(TierSlot slot, int64_t tag);
  void clear();

  // Moves of the step that is planned. What was stored stays in its slot until the plan is made, so that the order of moves is right.
  void begin_plan();
  void end_plan();
  bool has_moves() const { return !(demotions.empty() && stores.empty() && loads.empty()); }
  std::vector<TierMove> demotions, stores, loads;

  TierStats stats() const;
  bool is_consistent() const;

 private:
  BlockPool& pool_of(TierSlot slot) { return is_on_disk(slot) ? disk_ : host_; }
  BlockId place_of(TierSlot slot) const { return is_on_disk(slot) ? slot - host_.size() : slot; }
  bool is_in_use(TierSlot slot) { return pool_of(slot).ref_count(place_of(slot)) > 0; }
  void touch(TierSlot slot);
  void erase(TierSlot slot);
  void demote(TierSlot slot);

  // Slots with contents that nothing uses are free in their pools, least recently used first.
  BlockPool host_, disk_;
  PrefixCache index_;
  Array<int64_t> tags_;
  int64_t next_tag_ = 1;
  int64_t num_on_disk_ = 0;
  std::vector<TierSlot> stored_;  // by the plan that is made
  TierStats stats_;
};

}  // namespace hardpoint::kv
