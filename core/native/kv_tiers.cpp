#include "kv_tiers.hpp"

namespace hardpoint::kv {

PrefixTiers::PrefixTiers(int32_t num_host, int32_t num_disk, int32_t block_size, int hash_bits, PrefixNames& names)
    : host_(num_host),
      disk_(num_disk),
      index_(num_host + num_disk, block_size, hash_bits, names),
      tags_(static_cast<size_t>(num_host) + num_disk) {}

void PrefixTiers::store(const PrefixCache& cache, BlockId block) {
  const TierSlot found = find(cache.hash_of(block), cache.parent_id(block), cache.tokens_of(block));
  if (found != kNoBlock && (!is_on_disk(found) || is_in_use(found))) {
    touch(found);
    return;
  }
  if (host_.num_free() == 0) return;
  if (found != kNoBlock) erase(found);
  const TierSlot slot = host_.take_free();
  if (index_.contains(slot)) {
    demote(slot);
    erase(slot);
  }
  index_.insert(slot, cache.hash_of(block), cache.parent_id(block), cache.root_of(block), cache.tokens_of(block),
                cache.node_id(block));
  tags_[slot] = next_tag_++;
  stored_.push_back(slot);
  stores.push_back({block, slot, tags_[slot]});
  ++stats_.stores;
}

// Moves what a slot of the host holds to the disk, where there is one; the slot itself is left as it is.
void PrefixTiers::demote(TierSlot slot) {
  if (disk_.num_free() == 0) {
    ++stats_.evictions;
    return;
  }
  const BlockId place = disk_.take_free();
  const TierSlot to = host_.size() + place;
  if (index_.contains(to)) {
    erase(to);
    ++stats_.evictions;
  }
  const NodeId id = index_.node_id(slot), parent = index_.parent_id(slot);
  const uint32_t hash = index_.hash_of(slot), root = index_.root_of(slot);
  // Twice in the index until the caller erases the other: its root must not be without a user in between.
  const std::vector<int32_t> tokens(index_.tokens_of(slot), index_.tokens_of(slot) + index_.block_size());
  index_.insert(to, hash, parent, root, tokens.data(), id);
  ++num_on_disk_;
  tags_[to] = tags_[slot];
  disk_.drop_ref(place);
  disk_.put_back(place);
  demotions.push_back({slot, to, tags_[slot]});
  ++stats_.demotions;
}

void PrefixTiers::count_lookup(int64_t queries, const std::vector<TierSlot>& found) {
  stats_.queries += queries;
  for (const TierSlot slot : found) ++(is_on_disk(slot) ? stats_.disk_hits : stats_.host_hits);
}

void PrefixTiers::release(TierSlot slot) {
  BlockPool& pool = pool_of(slot);
  if (!pool.drop_ref(place_of(slot))) return;
  if (index_.contains(slot)) {
    pool.put_back(place_of(slot));
  } else {
    pool.put_front(place_of(slot));
  }
}

void PrefixTiers::touch(TierSlot slot) {
  hold(slot);
  release(slot);
}

void PrefixTiers::erase(TierSlot slot) {
  index_.erase(slot);
  num_on_disk_ -= is_on_disk(slot);
  if (!is_in_use(slot)) touch(slot);
}

void PrefixTiers::drop(TierSlot slot, int64_t tag) {
  if (index_.contains(slot) && tags_[slot] == tag) erase(slot);
}

void PrefixTiers::clear() {
  index_.clear();
  num_on_disk_ = 0;
}

void PrefixTiers::begin_plan() {
  demotions.clear();
  stores.clear();
  loads.clear();
}

void PrefixTiers::end_plan() {
  for (const TierSlot slot : stored_) release(slot);
  stored_.clear();
}

TierStats PrefixTiers::stats() const {
  TierStats stats = stats_;
  stats.disk_blocks = num_on_disk_;
  stats.host_blocks = index_.size() - num_on_disk_;
  return stats;
}

bool PrefixTiers::is_consistent() const {
  int64_t on_disk = 0;
  for (TierSlot slot = host_.size(); slot < host_.size() + disk_.size(); ++slot) on_disk += index_.contains(slot);
  return on_disk == num_on_disk_ && host_.is_consistent() && disk_.is_consistent() && index_.is_consistent();
}

}  // namespace hardpoint::kv
