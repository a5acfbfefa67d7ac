#include "kv_block_manager.hpp"

#include <algorithm>
#include <unordered_map>

namespace hardpoint::kv {
namespace {

// Hashes run this far ahead of the lookups, so that slots and nodes are in the processor's cache when they are compared.
constexpr int32_t kSlotDistance = 16;
constexpr int32_t kNodeDistance = 8;

}  // namespace

BlockManager::BlockManager(const BlockManagerConfig& config)
    : config_(config),
      watermark_blocks_(static_cast<int32_t>(config.watermark * config.num_device_blocks)),
      num_groups_(static_cast<int32_t>(config.windows.size())),
      has_windows_(std::any_of(config.windows.begin(), config.windows.end(), [](int32_t window) { return window > 0; })),
      device_(config.num_device_blocks),
      host_(config.num_host_blocks),
      cache_(config.enable_prefix_caching ? config.num_device_blocks : 0, config.block_size, config.hash_bits, names_),
      tiers_(config.num_tier_host_blocks, config.num_tier_disk_blocks, config.block_size, config.hash_bits, names_) {
  if (num_groups_ == 1 || !config.enable_prefix_caching) return;
  const auto num_blocks = static_cast<size_t>(config.num_device_blocks);
  companions_ = Array<BlockId>(num_blocks * (num_groups_ - 1));
  owners_ = Array<BlockId>(num_blocks);
  std::fill_n(companions_.data(), companions_.size(), kNoBlock);
  std::fill_n(owners_.data(), owners_.size(), kNoBlock);
}

int64_t BlockManager::held_blocks(const BlockTable& table, int32_t total_blocks) const {
  int64_t held = 0;
  for (int32_t group = 0; group < num_groups_; ++group) held += total_blocks - table.first[group];
  return held;
}

BlockStats BlockManager::stats() const {
  BlockStats s;
  s.device_free = device_.num_free();
  s.device_used = device_.size() - device_.num_free();
  s.host_free = host_.num_free();
  s.host_used = host_.size() - host_.num_free();
  s.cached = cache_.size() + num_companions_;
  s.queried_tokens = queried_tokens_;
  s.hit_tokens = hit_tokens_;
  s.evictions = evictions_;
  return s;
}

BlockId BlockManager::take_device_block() {
  const BlockId block = device_.take_free();
  if (config_.enable_prefix_caching && cache_.contains(block)) {
    if (tiers_.is_on()) tiers_.store(cache_, block);
    cache_.erase(block);
    if (num_groups_ > 1) detach_companions(block);
    ++evictions_;
  } else if (is_cached(block)) {
    const BlockId node = owners_[block];
    for (int32_t group = 1; group < num_groups_; ++group)
      if (companion(node, group) == block) companion(node, group) = kNoBlock;
    owners_[block] = kNoBlock;
    --num_companions_;
    ++evictions_;
  }
  return block;
}

// Without their node they can never be found again.
void BlockManager::detach_companions(BlockId node) {
  for (int32_t group = 1; group < num_groups_; ++group) {
    BlockId& block = companion(node, group);
    if (block == kNoBlock) continue;
    owners_[block] = kNoBlock;
    block = kNoBlock;
    --num_companions_;
  }
}

void BlockManager::release_device_block(BlockId block) {
  if (!device_.drop_ref(block)) return;
  if (is_cached(block)) {
    device_.put_back(block);
  } else {
    device_.put_front(block);
  }
}

void BlockManager::open(BlockTable& table, uint32_t root) const {
  table.num_blocks = table.num_registered = 0;
  table.first = {};
  table.root = root;
  table.epoch = epoch_;
  table.parent = names_.root_node(root);
  table.chain_hash = 0;
  table.may_share_tail = false;
}

PrefixMatch BlockManager::match_prefix(BlockTable& table, const int32_t* tokens, int64_t num_tokens) const {
  PrefixMatch match;
  match.parent = table.parent;
  if (!config_.enable_prefix_caching || cache_.size() == 0) return match;
  const int32_t size = config_.block_size;
  const auto limit = static_cast<int32_t>(std::min<int64_t>((num_tokens - 1) / size, table.max_blocks));
  uint64_t hashes[kSlotDistance];
  uint64_t ahead = 0;
  NodeId parent = table.parent;
  std::array<int32_t, kMaxGroups> missing{};  // of each group, the blocks up to the last one that is not cached
  for (int32_t i = 0; i < limit + kSlotDistance; ++i) {
    const int32_t at = i - kSlotDistance;
    if (at >= 0) {
      const uint64_t hash = hashes[at % kSlotDistance];
      const BlockId block = cache_.find(hash, parent, tokens + static_cast<int64_t>(at) * size);
      if (block == kNoBlock) break;
      table.blocks[at] = block;
      parent = cache_.node_id(block);
      bool all_groups = true;
      for (int32_t group = 1; group < num_groups_; ++group) {
        if (companion(block, group) == kNoBlock) missing[group] = at + 1;
        all_groups &= missing[group] <= first_seen(group, static_cast<int64_t>(at + 1) * size);
      }
      if (all_groups) {
        match.parent = parent;
        match.chain_hash = hash;
        match.num_blocks = at + 1;
      }
      if (!has_windows_) match.num_free += device_.ref_count(block) == 0;
    }
    if (i < limit) {
      ahead = cache_.extend_hash(ahead, tokens + static_cast<int64_t>(i) * size);
      hashes[i % kSlotDistance] = ahead;
      cache_.prefetch_slot(ahead);
    }
    const int32_t node = i - kNodeDistance;
    if (node >= 0 && node < limit) cache_.prefetch_node(hashes[node % kSlotDistance]);
  }
  if (!has_windows_) return match;
  for (int32_t group = 0; group < num_groups_; ++group)
    for (int32_t i = first_seen(group, static_cast<int64_t>(match.num_blocks) * size); i < match.num_blocks; ++i)
      match.num_free += device_.ref_count(group == 0 ? table.blocks[i] : companion(table.blocks[i], group)) == 0;
  return match;
}

void BlockManager::match_tiers(const BlockTable& table, const PrefixMatch& match, const int32_t* tokens, int64_t num_tokens,
                               std::vector<TierSlot>& slots) const {
  const int32_t size = config_.block_size;
  const auto limit = static_cast<int32_t>(std::min<int64_t>((num_tokens - 1) / size, table.max_blocks));
  uint64_t hash = match.chain_hash;
  NodeId parent = match.parent;
  for (int32_t i = match.num_blocks; i < limit; ++i) {
    const int32_t* block = tokens + static_cast<int64_t>(i) * size;
    hash = cache_.extend_hash(hash, block);
    const TierSlot slot = tiers_.find(hash, parent, block);
    if (slot == kNoBlock) return;
    slots.push_back(slot);
    parent = tiers_.node_id(slot);
  }
}

void BlockManager::store_cached(const std::vector<const BlockTable*>& running) {
  std::vector<BlockId> blocks;  // in rising order of worth
  const auto add = [&](BlockId block) {
    if (cache_.contains(block)) blocks.push_back(block);
  };
  for (BlockId block = device_.peek_free(); block != device_.size(); block = device_.next_free(block)) add(block);
  for (auto table = running.rbegin(); table != running.rend(); ++table)
    for (int32_t i = (*table)->num_blocks - 1; i >= 0; --i) add((*table)->blocks[i]);
  const auto room = static_cast<size_t>(tiers_.host_size());
  for (size_t i = blocks.size() > room ? blocks.size() - room : 0; i < blocks.size(); ++i) tiers_.store(cache_, blocks[i]);
}

AllocStatus BlockManager::can_take(int64_t num_blocks) const {
  if (num_blocks > device_.size()) return AllocStatus::never;
  const bool idle = device_.num_free() == device_.size();
  return device_.num_free() - num_blocks >= (idle ? 0 : watermark_blocks_) ? AllocStatus::ok : AllocStatus::later;
}

void BlockManager::allocate(BlockTable& table, const PrefixMatch& match, int32_t total_blocks) {
  const auto position = static_cast<int64_t>(match.num_blocks) * config_.block_size;
  // From the last to the first: the first group's entries lead to the other groups' blocks.
  for (int32_t group = num_groups_ - 1; group >= 0; --group) {
    BlockId* blocks = table_of(table, group);
    table.first[group] = first_seen(group, position);
    for (int32_t i = table.first[group]; i < match.num_blocks; ++i) {
      if (group > 0) blocks[i] = companion(table.blocks[i], group);
      device_.add_ref(blocks[i]);
    }
    std::fill_n(blocks, table.first[group], 0);
  }
  // Looks ahead on the free list, so that what the eviction of a block touches is in the processor's cache by its turn.
  BlockId slot_ahead = device_.peek_free(), node_ahead = slot_ahead;
  for (int32_t i = 0; config_.enable_prefix_caching && i < kSlotDistance; ++i) {
    node_ahead = device_.next_free(node_ahead);
    if (i >= kNodeDistance) slot_ahead = device_.next_free(slot_ahead);
  }
  for (int32_t group = 0; group < num_groups_; ++group) {
    BlockId* blocks = table_of(table, group);
    for (int32_t i = match.num_blocks; i < total_blocks; ++i) {
      if (config_.enable_prefix_caching) {
        cache_.prefetch_entry(node_ahead);
        cache_.prefetch_slot_of(slot_ahead);
        node_ahead = device_.next_free(node_ahead);
        slot_ahead = device_.next_free(slot_ahead);
      }
      blocks[i] = take_device_block();
    }
  }
  table.num_blocks = total_blocks;
  table.num_registered = match.num_blocks;
  table.parent = match.parent;
  table.chain_hash = match.chain_hash;
}

void BlockManager::count_lookup(int64_t num_tokens, const PrefixMatch& match) {
  queried_tokens_ += num_tokens;
  hit_tokens_ += static_cast<int64_t>(match.num_blocks) * config_.block_size;
}

void BlockManager::grow(BlockTable& table, int64_t position, int32_t total_blocks, std::vector<BlockPair>& copies) {
  const bool shares = shares_block(table, position);
  for (int32_t group = 0; group < num_groups_; ++group) {
    BlockId* blocks = table_of(table, group);
    if (shares) {
      BlockId& tail = blocks[position / config_.block_size];
      const BlockId copy = take_device_block();
      copies.emplace_back(tail, copy);
      release_device_block(tail);
      tail = copy;
    }
    for (int32_t i = table.num_blocks; i < total_blocks; ++i) blocks[i] = take_device_block();
  }
  table.may_share_tail = false;
  table.num_blocks = std::max(table.num_blocks, total_blocks);
}

void BlockManager::register_computed(BlockTable& table, const int32_t* tokens, int64_t num_computed) {
  if (!config_.enable_prefix_caching || table.epoch != epoch_) return;
  const int32_t size = config_.block_size;
  const auto full = static_cast<int32_t>(num_computed / size);
  const int32_t first = table.num_registered;
  if (full == first + 1) {
    const int32_t* block = tokens + static_cast<int64_t>(first) * size;
    table.chain_hash = cache_.extend_hash(table.chain_hash, block);
    register_block(table, first, block);
    return;
  }
  uint64_t hashes[kSlotDistance];
  uint64_t ahead = table.chain_hash;
  for (int32_t i = first; i < full + kSlotDistance; ++i) {
    const int32_t at = i - kSlotDistance;
    if (at >= first) {
      table.chain_hash = hashes[at % kSlotDistance];
      if (!register_block(table, at, tokens + static_cast<int64_t>(at) * size)) return;
    }
    if (i < full) {
      ahead = cache_.extend_hash(ahead, tokens + static_cast<int64_t>(i) * size);
      hashes[i % kSlotDistance] = ahead;
      cache_.prefetch_slot(ahead);
    }
  }
}

bool BlockManager::register_block(BlockTable& table, int32_t index, const int32_t* tokens) {
  BlockId& own = table.blocks[index];
  const bool is_held = !has_windows_ || index >= table.first[0];
  const BlockId cached = cache_.find(table.chain_hash, table.parent, tokens);
  if (cached == kNoBlock && !is_held) {
    // After a swap the blocks before the window are gone, and nothing can be appended to a chain that lacks them.
    table.epoch = epoch_ - 1;
    return false;
  }
  table.num_registered = index + 1;
  if (cached == kNoBlock) {
    // Blocks below this one, in the tiers, know it by the identity that it has there.
    const TierSlot slot = tiers_.is_on() ? tiers_.find(table.chain_hash, table.parent, tokens) : kNoBlock;
    const NodeId id = slot == kNoBlock ? 0 : tiers_.node_id(slot);
    table.parent = cache_.insert(own, table.chain_hash, table.parent, table.root, tokens, id);
  } else {
    table.parent = cache_.node_id(cached);
    if (is_held && cached != own) {
      device_.add_ref(cached);
      release_device_block(own);
      own = cached;
    }
  }
  if (num_groups_ > 1 && is_held) register_companions(table, index);
  return true;
}

void BlockManager::register_companions(BlockTable& table, int32_t index) {
  const BlockId node = table.blocks[index];
  for (int32_t group = 1; group < num_groups_; ++group) {
    if (index < table.first[group]) continue;
    BlockId &own = table_of(table, group)[index], &cached = companion(node, group);
    if (cached == kNoBlock) {
      cached = own;
      owners_[own] = node;
      ++num_companions_;
    } else if (cached != own) {
      device_.add_ref(cached);
      release_device_block(own);
      own = cached;
    }
  }
}

void BlockManager::free_unseen(BlockTable& table, int64_t num_computed) {
  for (int32_t group = 0; group < num_groups_; ++group) {
    BlockId* blocks = table_of(table, group);
    const int32_t first = std::min(first_seen(group, num_computed), table.num_blocks);
    for (int32_t& i = table.first[group]; i < first; ++i) {
      release_device_block(blocks[i]);
      blocks[i] = 0;
    }
  }
}

void BlockManager::fork(BlockTable& parent, BlockTable& child, int64_t num_computed) {
  BlockId* blocks = child.blocks;
  const int32_t max_blocks = child.max_blocks;
  const int32_t shared = blocks_for(num_computed);
  parent.may_share_tail = true;
  child = parent;
  child.blocks = blocks;
  child.max_blocks = max_blocks;
  child.num_blocks = shared;
  for (int32_t group = 0; group < num_groups_; ++group) {
    std::copy_n(table_of(parent, group), shared, table_of(child, group));
    for (int32_t i = child.first[group]; i < shared; ++i) device_.add_ref(table_of(child, group)[i]);
  }
}

void BlockManager::reassign(const std::vector<BlockTable*>& tables, const std::vector<int32_t>& parents, int64_t num_computed) {
  const int32_t shared = blocks_for(num_computed);
  std::vector<BlockTable> before;
  std::vector<std::vector<BlockId>> blocks;  // of each table, the groups one after the other
  for (const BlockTable* table : tables) {
    before.push_back(*table);
    blocks.emplace_back();
    for (int32_t group = 0; group < num_groups_; ++group)
      blocks.back().insert(blocks.back().end(), table_of(*table, group), table_of(*table, group) + table->num_blocks);
  }
  // Those that are passed on get their new owners first, so that none is free in between.
  for (const int32_t parent : parents)
    for (int32_t group = 0; group < num_groups_; ++group)
      for (int32_t i = before[parent].first[group]; i < shared; ++i)
        device_.add_ref(blocks[parent][static_cast<size_t>(group) * before[parent].num_blocks + i]);
  for (BlockTable* table : tables) free(*table);
  for (size_t t = 0; t < tables.size(); ++t) {
    BlockTable& table = *tables[t];
    const BlockTable& parent = before[parents[t]];
    BlockId* own = table.blocks;
    table = parent;
    table.blocks = own;
    table.num_blocks = shared;
    table.may_share_tail = true;
    for (int32_t group = 0; group < num_groups_; ++group)
      std::copy_n(blocks[parents[t]].data() + static_cast<size_t>(group) * parent.num_blocks, shared, table_of(table, group));
  }
}

void BlockManager::free(BlockTable& table) {
  for (int32_t i = table.num_blocks - 1; i >= 0; --i)
    for (int32_t group = 0; group < num_groups_; ++group)
      if (i >= table.first[group]) release_device_block(table_of(table, group)[i]);
  table.num_blocks = table.num_registered = 0;
  table.may_share_tail = false;
}

AllocStatus BlockManager::can_swap_out(const BlockTable& table, int32_t keep) const {
  const int64_t held = held_blocks(table, keep);
  if (held > host_.size()) return AllocStatus::never;
  return held <= host_.num_free() ? AllocStatus::ok : AllocStatus::later;
}

void BlockManager::swap_out(BlockTable& table, int32_t keep, std::vector<BlockId>& host_blocks, std::vector<BlockPair>& moves) {
  host_blocks.clear();
  host_blocks.reserve(static_cast<size_t>(held_blocks(table, keep)));
  for (int32_t group = 0; group < num_groups_; ++group) {
    for (int32_t i = table.first[group]; i < keep; ++i) {
      host_blocks.push_back(host_.take_free());
      moves.emplace_back(table_of(table, group)[i], host_blocks.back());
    }
  }
  free(table);
}

void BlockManager::swap_in(BlockTable& table, std::vector<BlockId>& host_blocks, int32_t total_blocks,
                           std::vector<BlockPair>& moves) {
  // Each group has the same number of entries, of which the first ones may not be held.
  const auto keep = static_cast<int32_t>((static_cast<int64_t>(host_blocks.size()) - held_blocks(table, 0)) / num_groups_);
  auto host_block = host_blocks.begin();
  for (int32_t group = 0; group < num_groups_; ++group) {
    BlockId* blocks = table_of(table, group);
    std::fill_n(blocks, table.first[group], 0);
    for (int32_t i = table.first[group]; i < total_blocks; ++i) {
      blocks[i] = take_device_block();
      if (i < keep) moves.emplace_back(*host_block++, blocks[i]);
    }
  }
  table.num_blocks = total_blocks;
  // The blocks are new ones: they join the cache, or give way to equal cached ones, with the next registration.
  table.num_registered = 0;
  table.parent = names_.root_node(table.root);
  table.chain_hash = 0;
  table.may_share_tail = false;
  free_host(host_blocks);
}

void BlockManager::free_host(std::vector<BlockId>& host_blocks) {
  for (auto it = host_blocks.rbegin(); it != host_blocks.rend(); ++it)
    if (host_.drop_ref(*it)) host_.put_front(*it);
  host_blocks.clear();
}

void BlockManager::reset_prefix_cache(bool tiers) {
  if (!config_.enable_prefix_caching) return;
  if (tiers) tiers_.clear();
  cache_.clear();
  std::fill_n(companions_.data(), companions_.size(), kNoBlock);
  std::fill_n(owners_.data(), owners_.size(), kNoBlock);
  num_companions_ = 0;
  ++epoch_;
}

std::string BlockManager::check(const std::vector<const BlockTable*>& tables,
                                const std::vector<const std::vector<BlockId>*>& host_tables) const {
  if (!device_.is_consistent()) return "the free list of the device pool is broken";
  if (!host_.is_consistent()) return "the free list of the host pool is broken";
  if (!cache_.is_consistent()) return "the prefix cache's index is broken";
  if (!tiers_.is_consistent()) return "the tiers below the prefix cache are broken";
  std::unordered_map<BlockId, int32_t> device_refs, host_refs;
  std::unordered_map<BlockId, const BlockTable*> writers;
  for (const BlockTable* table : tables) {
    if (table->num_blocks > table->max_blocks) return "a table has more blocks than room";
    const bool is_registered = table->epoch == epoch_ && config_.enable_prefix_caching;
    NodeId parent = names_.root_node(table->root);
    for (int32_t i = 0; i < table->num_blocks; ++i) {
      for (int32_t group = 0; group < num_groups_; ++group) {
        const BlockId block = table_of(*table, group)[i];
        if (i < table->first[group]) {
          if (block != 0) return "an entry before the window is not 0";
          continue;
        }
        if (block < 0 || block >= device_.size()) return "a table names a block outside the pool";
        ++device_refs[block];
        if (i >= table->num_registered || !is_registered) continue;
        if (group > 0) {
          if (i >= table->first[0] && companion(table->blocks[i], group) != block) return "a registered block is not its node's";
          continue;
        }
        if (!cache_.contains(block)) return "a registered block of a live table is not cached";
        if ((i == 0 || i > table->first[0]) && cache_.parent_id(block) != parent) return "a registered chain is broken";
        parent = cache_.node_id(block);
      }
    }
    const bool is_known = table->first[0] == 0 || table->num_registered > table->first[0];
    if (is_registered && is_known && table->num_blocks > 0 && parent != table->parent)
      return "a table does not continue the chain of its registered blocks";
  }
  int32_t num_companions = 0;
  for (BlockId b = 0; num_groups_ > 1 && config_.enable_prefix_caching && b < device_.size(); ++b) {
    for (int32_t group = 1; group < num_groups_; ++group) {
      const BlockId block = companion(b, group);
      if (block == kNoBlock) continue;
      ++num_companions;
      if (!cache_.contains(b) || owners_[block] != b || cache_.contains(block)) return "a node and its companions disagree";
    }
  }
  if (num_companions != num_companions_) return "cached blocks of other groups are miscounted";
  for (const std::vector<BlockId>* blocks : host_tables)
    for (const BlockId block : *blocks) ++host_refs[block];
  for (BlockId b = 0; b < device_.size(); ++b) {
    const auto it = device_refs.find(b);
    if (device_.ref_count(b) != (it == device_refs.end() ? 0 : it->second))
      return "device block " + std::to_string(b) + " has a wrong reference count";
  }
  for (BlockId b = 0; b < host_.size(); ++b) {
    const auto it = host_refs.find(b);
    if (host_.ref_count(b) != (it == host_refs.end() ? 0 : it->second))
      return "host block " + std::to_string(b) + " has a wrong reference count";
  }
  return {};
}

}  // namespace hardpoint::kv
