// One step's batch with the plans that its layers share.
#pragma once
#include <list>

#include "attention.hpp"

namespace hp {

// Holds pointers only: whoever made it keeps the arrays alive. Used by one thread at a time.
class PreparedBatch {
 public:
  // Checks the batch; throws as check_batch does.
  explicit PreparedBatch(const AttentionBatch& batch) : batch_(batch) { check_batch(batch_); }

  const AttentionBatch& batch() const { return batch_; }

  // The plan for layers with this group size and window, made at first use.
  const AttentionPlan& plan_for(const AttentionLayer& layer) {
    const int group = layer.num_heads / layer.num_kv_heads;
    for (const Entry& entry : plans_)
      if (entry.group == group && entry.window == layer.window) return entry.plan;
    plans_.push_back({group, layer.window, plan_attention(batch_, layer)});
    return plans_.back().plan;
  }

 private:
  struct Entry {
    int group, window;
    AttentionPlan plan;
  };
  AttentionBatch batch_;
  std::list<Entry> plans_;  // a list, so that references stay valid
};

}  // namespace hp
