#include "kv_sequences.hpp"

#include <algorithm>
#include <unordered_set>

namespace hardpoint::kv {
namespace {

[[noreturn]] void refuse(const char* why) { throw std::invalid_argument(why); }
[[noreturn]] void out_of_blocks() { throw NotEnoughBlocks("not enough free blocks"); }

void require_counts(int64_t num_tokens, int32_t lookahead) {
  if (num_tokens < 0 || lookahead < 0) refuse("numbers of tokens and lookahead slots are not negative");
}

}  // namespace

void SequenceBlocks::Sequence::make_room(int32_t num_blocks) {
  if (static_cast<size_t>(num_blocks) > device_blocks.size())
    device_blocks.resize(std::max<size_t>(num_blocks, 2 * device_blocks.size()));
  table.blocks = device_blocks.data();
  table.max_blocks = static_cast<int32_t>(device_blocks.size());
}

const SequenceBlocks::Sequence& SequenceBlocks::resident(int64_t id) const {
  const Sequence& sequence = at(id);
  if (sequence.swapped) refuse("the sequence is swapped out");
  return sequence;
}

std::vector<const SequenceBlocks::Sequence*> SequenceBlocks::group(const std::vector<int64_t>& ids, bool swapped) const {
  std::unordered_set<int64_t> seen;
  std::vector<const Sequence*> members;
  for (const int64_t id : ids) {
    if (!seen.insert(id).second) refuse("a sequence is named twice");
    members.push_back(&at(id));
    if (members.back()->swapped != swapped)
      refuse(swapped ? "a sequence is not swapped out" : "a sequence is swapped out already");
  }
  return members;
}

AllocStatus SequenceBlocks::can_allocate(const std::vector<int32_t>& tokens, const std::string& salt, bool use_cache,
                                         int32_t lookahead) {
  require_counts(0, lookahead);
  Sequence probe;
  const int32_t total = manager_.blocks_for(static_cast<int64_t>(tokens.size()) + lookahead);
  probe.make_room(total);
  const uint32_t root = manager_.cache().acquire_root(salt);
  manager_.open(probe.table, root);
  PrefixMatch match;
  if (use_cache) match = manager_.match_prefix(probe.table, tokens.data(), static_cast<int64_t>(tokens.size()));
  manager_.cache().release_root(root);
  return manager_.can_allocate(match, total);
}

int64_t SequenceBlocks::allocate(int64_t id, std::vector<int32_t> tokens, const std::string& salt, bool use_cache,
                                 int32_t lookahead) {
  if (contains(id)) refuse("the sequence has blocks already");
  if (tokens.empty()) refuse("a sequence needs at least one token");
  require_counts(0, lookahead);
  const auto num_tokens = static_cast<int64_t>(tokens.size());
  const int32_t total = manager_.blocks_for(num_tokens + lookahead);
  Sequence sequence;
  sequence.make_room(total);
  const uint32_t root = manager_.cache().acquire_root(salt);
  manager_.open(sequence.table, root);
  PrefixMatch match;
  match.parent = sequence.table.parent;
  if (use_cache) match = manager_.match_prefix(sequence.table, tokens.data(), num_tokens);
  if (manager_.can_allocate(match, total) != AllocStatus::ok) {
    manager_.cache().release_root(root);
    out_of_blocks();
  }
  manager_.allocate(sequence.table, match, total);
  if (use_cache) manager_.count_lookup(num_tokens, match);
  sequence.tokens = std::move(tokens);
  sequence.num_computed = static_cast<int64_t>(match.num_blocks) * manager_.config().block_size;
  const int64_t num_cached = sequence.num_computed;
  sequences_.emplace(id, std::move(sequence));
  return num_cached;
}

int32_t SequenceBlocks::num_new_blocks(int64_t id, int64_t num_tokens, int32_t lookahead) const {
  require_counts(num_tokens, lookahead);
  const Sequence& s = resident(id);
  const auto position = static_cast<int64_t>(s.tokens.size());
  return manager_.growth(s.table, position, manager_.blocks_for(position + num_tokens + lookahead));
}

AllocStatus SequenceBlocks::can_append(int64_t id, int64_t num_tokens, int32_t lookahead) const {
  const int32_t needed = num_new_blocks(id, num_tokens, lookahead);
  if (manager_.blocks_for(this->num_tokens(id) + num_tokens + lookahead) > manager_.config().num_device_blocks)
    return AllocStatus::never;
  return needed <= manager_.num_free_device() ? AllocStatus::ok : AllocStatus::later;
}

std::vector<BlockPair> SequenceBlocks::append_slots(int64_t id, const std::vector<int32_t>& tokens, int32_t lookahead) {
  const auto count = static_cast<int64_t>(tokens.size());
  if (can_append(id, count, lookahead) != AllocStatus::ok) out_of_blocks();
  Sequence& s = at(id);
  const auto position = static_cast<int64_t>(s.tokens.size());
  const int32_t total = manager_.blocks_for(position + count + lookahead);
  s.make_room(total);
  std::vector<BlockPair> copies;
  if (count + lookahead > 0) manager_.grow(s.table, position, total, copies);
  s.tokens.insert(s.tokens.end(), tokens.begin(), tokens.end());
  return copies;
}

void SequenceBlocks::mark_computed(int64_t id, int64_t num_computed) {
  resident(id);
  Sequence& s = at(id);
  if (num_computed < s.num_computed || num_computed > static_cast<int64_t>(s.tokens.size()))
    refuse("the number of computed tokens can only grow, up to the number of tokens");
  s.num_computed = num_computed;
  manager_.register_computed(s.table, s.tokens.data(), num_computed);
}

void SequenceBlocks::fork(int64_t parent, int64_t child) {
  if (contains(child)) refuse("the sequence has blocks already");
  const Sequence& source = resident(parent);
  if (source.num_computed != static_cast<int64_t>(source.tokens.size()))
    refuse("a sequence can be forked only when all its tokens are computed");
  Sequence copy;
  copy.tokens = source.tokens;
  copy.num_computed = source.num_computed;
  copy.make_room(source.table.num_blocks);
  Sequence& target = sequences_.emplace(child, std::move(copy)).first->second;
  Sequence& from = at(parent);
  manager_.fork(from.table, target.table, from.num_computed);
  manager_.cache().share_root(target.table.root);
}

void SequenceBlocks::free(int64_t id) {
  Sequence& s = at(id);
  if (s.swapped) {
    manager_.free_host(s.host_blocks);
  } else {
    manager_.free(s.table);
  }
  manager_.cache().release_root(s.table.root);
  sequences_.erase(id);
}

AllocStatus SequenceBlocks::can_swap_out(const std::vector<int64_t>& ids) const {
  std::vector<const BlockTable*> tables;
  std::vector<int32_t> keep;
  for (const Sequence* s : group(ids, false)) {
    tables.push_back(&s->table);
    keep.push_back(manager_.blocks_for(s->num_computed));
  }
  return manager_.can_swap_out(tables, keep);
}

std::vector<BlockPair> SequenceBlocks::swap_out(const std::vector<int64_t>& ids) {
  if (can_swap_out(ids) != AllocStatus::ok) out_of_blocks();
  std::vector<BlockTable*> tables;
  std::vector<int32_t> keep;
  for (const int64_t id : ids) {
    tables.push_back(&at(id).table);
    keep.push_back(manager_.blocks_for(at(id).num_computed));
  }
  std::vector<std::vector<BlockId>> host_blocks;
  std::vector<BlockPair> moves;
  manager_.swap_out(tables, keep, host_blocks, moves);
  for (size_t i = 0; i < ids.size(); ++i) {
    at(ids[i]).host_blocks = std::move(host_blocks[i]);
    at(ids[i]).swapped = true;
  }
  return moves;
}

AllocStatus SequenceBlocks::can_swap_in(const std::vector<int64_t>& ids) const {
  std::vector<const std::vector<BlockId>*> host_blocks;
  std::vector<int32_t> totals;
  for (const Sequence* s : group(ids, true)) {
    host_blocks.push_back(&s->host_blocks);
    totals.push_back(manager_.blocks_for(static_cast<int64_t>(s->tokens.size())));
  }
  return manager_.can_swap_in(host_blocks, totals);
}

std::vector<BlockPair> SequenceBlocks::swap_in(const std::vector<int64_t>& ids) {
  if (can_swap_in(ids) != AllocStatus::ok) out_of_blocks();
  std::vector<BlockTable*> tables;
  std::vector<std::vector<BlockId>*> host_blocks;
  std::vector<int32_t> totals;
  for (const int64_t id : ids) {
    Sequence& s = at(id);
    totals.push_back(manager_.blocks_for(static_cast<int64_t>(s.tokens.size())));
    s.make_room(totals.back());
    tables.push_back(&s.table);
    host_blocks.push_back(&s.host_blocks);
    s.swapped = false;
  }
  std::vector<BlockPair> moves;
  manager_.swap_in(tables, host_blocks, totals, moves);
  return moves;
}

std::vector<BlockId> SequenceBlocks::block_table(int64_t id) const {
  const Sequence& s = at(id);
  if (s.swapped) return s.host_blocks;
  return {s.table.blocks, s.table.blocks + s.table.num_blocks};
}

int32_t SequenceBlocks::ref_count(BlockId block) const {
  if (block < 0 || block >= manager_.config().num_device_blocks) refuse("no such block");
  return manager_.device_ref_count(block);
}

std::string SequenceBlocks::check() const {
  std::vector<const BlockTable*> tables;
  std::vector<const std::vector<BlockId>*> host_tables;
  for (const auto& [id, s] : sequences_) {
    if (s.swapped) {
      host_tables.push_back(&s.host_blocks);
    } else {
      tables.push_back(&s.table);
    }
  }
  return manager_.check(tables, host_tables);
}

}  // namespace hardpoint::kv
