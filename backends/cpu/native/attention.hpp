// Paged attention of the CPU backend: what the kernels take, independent of the instruction set that runs them.
//
// Key and value caches of one layer: [num_blocks, num_kv_heads, block_size, head_dim], contiguous.
// Query i of a sequence with context length n and query length m stands at position n - m + i and sees the keys at positions
// p <= its own; with window w > 0 only the last w of them, itself included.
#pragma once
#include <cstdint>
#include <vector>

namespace hp {

enum class DType : int { F32 = 0, BF16 = 1, F16 = 2 };
inline int itemsize(DType t) { return t == DType::F32 ? 4 : 2; }

struct AttentionLayer {
  int num_heads, num_kv_heads, head_dim;
  float scale;
  int window = 0;             // visible keys, self included; 0 = all
  float soft_cap = 0;         // logits become cap * tanh(logit / cap); 0 = off
  const float* sinks = nullptr;   // [num_heads] extra logit in the denominator, or null
  const float* alibi = nullptr;   // [num_heads] slopes: slope * (key position - query position) is added, or null
};

struct AttentionBatch {
  int num_seqs = 0;
  int num_tokens = 0;
  int block_size = 0;
  const int32_t* query_start = nullptr;   // [num_seqs + 1], cumulative
  const int32_t* context_lens = nullptr;  // [num_seqs] keys visible after this step, new ones included
  const int32_t* block_table = nullptr;   // [*, table_stride]
  int64_t table_stride = 0;
  const int32_t* rows = nullptr;          // [num_seqs] row of each sequence in block_table
  const int32_t* slot_mapping = nullptr;  // [num_tokens] block * block_size + offset; -1 = do not write
};

struct KvLayer {
  void* k;
  void* v;
  DType dtype;
};

// The split of one step's work, made once per step and used by every layer with the same head counts.
struct AttentionPlan {
  struct Item { int32_t seq, q_begin, q_end, key_begin, key_end, partial; };
  std::vector<Item> items;
  int num_partials = 0;
};

AttentionPlan plan_attention(const AttentionBatch& batch, const AttentionLayer& layer);

// k, v: [num_tokens, num_kv_heads, head_dim] with row stride in elements (heads and dims contiguous).
void write_kv(const AttentionBatch& batch, const AttentionLayer& layer, const void* k, int64_t k_stride, const void* v,
              int64_t v_stride, DType dtype, const KvLayer& kv);

// q, out: [num_tokens, num_heads, head_dim] with row strides in elements; dtype of q and out.
void attention(const AttentionPlan& plan, const AttentionBatch& batch, const AttentionLayer& layer, const void* q,
               int64_t q_stride, DType dtype, const KvLayer& kv, void* out, int64_t out_stride);

}  // namespace hp
