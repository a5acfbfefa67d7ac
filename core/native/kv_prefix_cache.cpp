#include "kv_prefix_cache.hpp"

#include <cstring>
#include <random>

namespace hardpoint::kv {
namespace {

uint64_t fold_multiply(uint64_t a, uint64_t b) {
  __extension__ using Wide = unsigned __int128;
  const Wide product = static_cast<Wide>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

uint64_t token_pair(const int32_t* tokens) {
  uint64_t pair;
  std::memcpy(&pair, tokens, sizeof pair);
  return pair;
}

constexpr uint64_t kOdd1 = 0x9E3779B97F4A7C15u;
constexpr uint64_t kOdd2 = 0xD6E8FEB86659FD93u;

}  // namespace

PrefixCache::PrefixCache(int32_t num_blocks, int32_t block_size, int hash_bits, PrefixNames& names)
    : block_size_(block_size),
      hash_mask_(hash_bits >= 64 ? ~uint64_t{0} : (uint64_t{1} << hash_bits) - 1),
      seed_(names.seed()),
      names_(names),
      nodes_(static_cast<size_t>(num_blocks) + 1),
      tokens_(static_cast<size_t>(num_blocks) * block_size) {
  size_t num_slots = 16;
  while (num_slots < 2 * static_cast<size_t>(num_blocks)) num_slots *= 2;
  mask_ = num_slots - 1;
  slots_ = Array<Slot>(num_slots);
  for (size_t i = 0; i < num_slots; ++i) slots_[i].block = kNoBlock;
}

PrefixNames::PrefixNames() {
  // A seed of this process keeps clients from choosing prompts that collide. Results do not depend on it.
  std::random_device random;
  seed_ = (static_cast<uint64_t>(random()) << 32) | random();
  roots_.push_back({std::string(), next_id_++, 1});
  root_of_salt_.emplace(std::string(), 0);
}

uint32_t PrefixNames::acquire_root(const std::string& salt) {
  const auto [it, is_new] = root_of_salt_.try_emplace(salt, 0);
  if (is_new) {
    if (free_roots_.empty()) {
      it->second = static_cast<uint32_t>(roots_.size());
      roots_.emplace_back();
    } else {
      it->second = free_roots_.back();
      free_roots_.pop_back();
    }
    roots_[it->second].salt = salt;
    roots_[it->second].node = next_id_++;
  }
  ++roots_[it->second].uses;
  return it->second;
}

void PrefixNames::release_root(uint32_t root) {
  Root& r = roots_[root];
  if (--r.uses > 0) return;
  root_of_salt_.erase(r.salt);
  r = Root{};
  free_roots_.push_back(root);
}

uint64_t PrefixCache::extend_hash(uint64_t chain_hash, const int32_t* tokens) const {
  uint64_t contents = seed_;
  uint64_t key = seed_ ^ kOdd1;
  int32_t i = 0;
  for (; i + 4 <= block_size_; i += 4) {
    contents ^= fold_multiply(token_pair(tokens + i) ^ key, token_pair(tokens + i + 2) ^ (key + kOdd2));
    key += kOdd1;
  }
  for (; i < block_size_; ++i) {
    contents ^= fold_multiply(static_cast<uint64_t>(tokens[i]) ^ key, key + kOdd2);
    key += kOdd1;
  }
  return fold_multiply(chain_hash ^ kOdd2, contents ^ seed_ ^ kOdd1) & hash_mask_;
}

BlockId PrefixCache::find(uint64_t chain_hash, NodeId parent, const int32_t* tokens) const {
  const auto hash = static_cast<uint32_t>(chain_hash);
  for (size_t i = hash & mask_;; i = (i + 1) & mask_) {
    const Slot& slot = slots_[i];
    if (slot.block == kNoBlock) return kNoBlock;
    if (slot.hash == hash && nodes_[slot.block].parent == parent &&
        std::memcmp(tokens_of(slot.block), tokens, sizeof(int32_t) * block_size_) == 0)
      return slot.block;
  }
}

void PrefixCache::prefetch_node(uint64_t chain_hash) const {
  const Slot& slot = slots_[chain_hash & mask_];
  if (slot.block == kNoBlock) return;
  __builtin_prefetch(&nodes_[slot.block]);
  __builtin_prefetch(tokens_of(slot.block));
}

NodeId PrefixCache::insert(BlockId block, uint64_t chain_hash, NodeId parent, uint32_t root, const int32_t* tokens,
                           NodeId id) {
  const auto hash = static_cast<uint32_t>(chain_hash);
  size_t i = hash & mask_;
  while (slots_[i].block != kNoBlock) i = (i + 1) & mask_;
  slots_[i] = {hash, block};
  if (id == 0) id = names_.new_node();
  nodes_[block] = {id, parent, hash, root};
  std::memcpy(tokens_.data() + static_cast<size_t>(block) * block_size_, tokens, sizeof(int32_t) * block_size_);
  names_.share_root(root);
  ++size_;
  return id;
}

size_t PrefixCache::slot_of(BlockId block) const {
  size_t i = nodes_[block].hash & mask_;
  while (slots_[i].block != block) i = (i + 1) & mask_;
  return i;
}

void PrefixCache::erase(BlockId block) {
  // Closing the gap keeps every probe sequence unbroken without tombstones, so lookups never slow down with age.
  size_t gap = slot_of(block);
  for (size_t i = (gap + 1) & mask_; slots_[i].block != kNoBlock; i = (i + 1) & mask_) {
    const size_t home = slots_[i].hash & mask_;
    if (((i - home) & mask_) >= ((i - gap) & mask_)) {
      slots_[gap] = slots_[i];
      gap = i;
    }
  }
  slots_[gap].block = kNoBlock;
  nodes_[block].id = 0;
  --size_;
  names_.release_root(nodes_[block].root);
}

void PrefixCache::clear() {
  for (size_t i = 0; i <= mask_; ++i) slots_[i].block = kNoBlock;
  for (size_t b = 0; b < nodes_.size(); ++b) {
    if (nodes_[b].id == 0) continue;
    nodes_[b].id = 0;
    names_.release_root(nodes_[b].root);
  }
  size_ = 0;
}

bool PrefixCache::is_consistent() const {
  int32_t cached = 0, taken = 0;
  for (size_t i = 0; i <= mask_; ++i) {
    const BlockId block = slots_[i].block;
    if (block == kNoBlock) continue;
    ++taken;
    const Node& node = nodes_[block];
    if (node.id == 0 || node.hash != slots_[i].hash) return false;
    if (find(node.hash, node.parent, tokens_of(block)) != block) return false;
  }
  for (size_t b = 0; b < nodes_.size(); ++b) cached += nodes_[b].id != 0;
  return cached == size_ && taken == size_;
}

}  // namespace hardpoint::kv
