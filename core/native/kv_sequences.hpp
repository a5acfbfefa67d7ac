// Block manager addressed by sequence ids, for callers without a scheduler. It keeps each sequence's tokens and block table.
#pragma once
#include <cstdint>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "kv_block_manager.hpp"

namespace hardpoint::kv {

class NotEnoughBlocks : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

class SequenceBlocks {
 public:
  explicit SequenceBlocks(const BlockManagerConfig& config) : manager_(config) {}

  // Unknown ids raise std::out_of_range; a call that the state forbids raises std::invalid_argument. Calls that take
  // blocks raise NotEnoughBlocks when the matching can_... would not answer `ok`. Nothing has changed after an error.
  AllocStatus can_allocate(const std::vector<int32_t>& tokens, const std::string& salt, bool use_cache, int32_t lookahead);
  int64_t allocate(int64_t id, std::vector<int32_t> tokens, const std::string& salt, bool use_cache, int32_t lookahead);
  int32_t num_new_blocks(int64_t id, int64_t num_tokens, int32_t lookahead) const;
  AllocStatus can_append(int64_t id, int64_t num_tokens, int32_t lookahead) const;
  std::vector<BlockPair> append_slots(int64_t id, const std::vector<int32_t>& tokens, int32_t lookahead);
  void mark_computed(int64_t id, int64_t num_computed);
  void fork(int64_t parent, int64_t child);
  void free(int64_t id);
  AllocStatus can_swap_out(const std::vector<int64_t>& ids) const;
  std::vector<BlockPair> swap_out(const std::vector<int64_t>& ids);
  AllocStatus can_swap_in(const std::vector<int64_t>& ids) const;
  std::vector<BlockPair> swap_in(const std::vector<int64_t>& ids);

  bool contains(int64_t id) const { return sequences_.count(id) != 0; }
  bool is_swapped(int64_t id) const { return at(id).swapped; }
  std::vector<BlockId> block_table(int64_t id) const;
  int64_t num_tokens(int64_t id) const { return static_cast<int64_t>(at(id).tokens.size()); }
  int32_t ref_count(BlockId block) const;
  BlockStats stats() const { return manager_.stats(); }
  int32_t watermark_blocks() const { return manager_.watermark_blocks(); }
  void reset_prefix_cache() { manager_.reset_prefix_cache(); }
  std::string check() const;

 private:
  struct Sequence {
    std::vector<int32_t> tokens;
    std::vector<BlockId> device_blocks;  // memory of `table`
    std::vector<BlockId> host_blocks;
    BlockTable table;
    int64_t num_computed = 0;
    bool swapped = false;

    void make_room(int32_t num_blocks);
  };

  const Sequence& at(int64_t id) const { return sequences_.at(id); }
  Sequence& at(int64_t id) { return sequences_.at(id); }
  const Sequence& resident(int64_t id) const;
  std::vector<const Sequence*> group(const std::vector<int64_t>& ids, bool swapped) const;

  BlockManager manager_;
  std::unordered_map<int64_t, Sequence> sequences_;
};

}  // namespace hardpoint::kv
