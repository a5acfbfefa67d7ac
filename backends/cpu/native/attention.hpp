// Paged attention of the CPU backend: what the kernels take, independent of the instruction set that runs them.
//
// Key and value caches of one layer: [num_blocks, num_kv_heads, block_size, head_dim], contiguous.
// Query i of a sequence with context length n and query length m stands at position n - m + i and sees the keys at positions
// p <= its own; with window w > 0 only the last w of them, itself included. In a bidirectional batch it sees the keys on both
// sides of it, with a window those at less than w positions from its own.
#pragma once
#include <cstdint>
#include <vector>

namespace hp {

enum class DType : int { F32 = 0, BF16 = 1, F16 = 2 };
constexpr int itemsize(DType t) { return t == DType::F32 ? 4 : 2; }

// What a KV cache holds: numbers in the dtype of keys and values, or e4m3 (1 sign, 4 exponent and 3 mantissa bits, bias 7, no
// infinities), which are keys divided by the layer's k_scale and values divided by its v_scale.
enum class KvFormat : int { Same = 0, E4m3 = 1 };
constexpr int itemsize(KvFormat format, DType t) { return format == KvFormat::E4m3 ? 1 : itemsize(t); }

struct AttentionLayer {
  int num_heads, num_kv_heads, head_dim;
  float scale;
  int window = 0;             // visible keys, self included; 0 = all
  float soft_cap = 0;         // logits become cap * tanh(logit / cap); 0 = off
  const float* sinks = nullptr;   // [num_heads] extra logit in the denominator, or null
  const float* alibi = nullptr;   // [num_heads] slopes: slope * (key position - query position) is added, or null
  float k_scale = 1, v_scale = 1; // of a cache in e4m3
};

struct AttentionBatch {
  int num_seqs = 0;
  int num_tokens = 0;
  int block_size = 0;
  int64_t num_blocks = 0;                 // of the cache
  int64_t table_rows = 0;                 // of block_table
  const int32_t* query_start = nullptr;   // [num_seqs + 1], cumulative
  const int32_t* context_lens = nullptr;  // [num_seqs] keys visible after this step, new ones included
  const int32_t* block_table = nullptr;   // [*, table_stride]
  int64_t table_stride = 0;
  const int32_t* rows = nullptr;          // [num_seqs] row of each sequence in block_table
  const int32_t* slot_mapping = nullptr;  // [num_tokens] block * block_size + offset; -1 = do not write
  // Sequences are whole, queries see both sides, and keys are the step's own: there is no cache, and none of its numbers are used.
  bool bidirectional = false;
};

// Keys and values of a layer: its cache, or for a bidirectional batch those of the step, [num_tokens, num_kv_heads, head_dim] with
// strides from token to token in elements.
struct KvLayer {
  void* k;
  void* v;
  DType dtype;  // of queries, and of keys and values before they are written
  int64_t k_stride = 0, v_stride = 0;
  KvFormat format = KvFormat::Same;
};

// Few query rows leave the threads idle, so their context is split at multiples of this many keys. Fixed positions, rather than
// a share per thread, make a sequence's result independent of the batch around it and of the number of threads.
constexpr int kPartitionKeys = 512;
// Query rows (tokens times heads that share a key head) of one tile: enough to pay for packing the keys and values.
constexpr int kTileRows = 192;
constexpr int kMaxHeadDim = 256;

// The split of one step's work, made once per step and used by every layer with the same head counts and window.
struct AttentionPlan {
  // Queries [q_begin, q_end) of a sequence against its keys [key_begin, key_end), for every key head. `partial` is -1 where the
  // item sees all keys of its queries and writes the output, else the first of its q_end - q_begin partial results.
  struct Item { int32_t seq, q_begin, q_end, key_begin, key_end, partial; };
  // The partial results of queries [q_begin, q_end): `count` partitions, each with q_end - q_begin of them, in order of keys.
  struct Merge { int32_t seq, q_begin, q_end, partial, count; };
  std::vector<Item> prefills;  // more than one query; longest first
  std::vector<Item> decodes;   // one query; longest first
  std::vector<Merge> merges;
  int num_partials = 0;
};

// Throws std::invalid_argument for lengths that contradict each other and std::out_of_range for a row or slot outside its bounds:
// the kernels trust them.
void check_batch(const AttentionBatch& batch);

// Throws std::invalid_argument when the kernels cannot run the layer with this block size.
void check_layer(const AttentionLayer& layer, int block_size);

// Throws std::out_of_range when a block that the layer would read is not in the cache; entries of blocks before every window
// and after the context may hold anything.
AttentionPlan plan_attention(const AttentionBatch& batch, const AttentionLayer& layer);

// k, v: [num_tokens, num_kv_heads, head_dim] of the layer's dtype with row stride in elements (heads and dims contiguous). In e4m3
// numbers are rounded to the nearest, ties to even; beyond the largest one they become that, and NaN stays NaN.
void write_kv(const AttentionBatch& batch, const AttentionLayer& layer, const void* k, int64_t k_stride, const void* v,
              int64_t v_stride, const KvLayer& kv);

// q, out: [num_tokens, num_heads, head_dim] of kv's dtype with row strides in elements.
void attention(const AttentionPlan& plan, const AttentionBatch& batch, const AttentionLayer& layer, const void* q,
               int64_t q_stride, const KvLayer& kv, void* out, int64_t out_stride);

// One pool of key or value blocks: `num_blocks` blocks of `block_bytes` each, contiguous.
struct BlockPool {
  char* data;
  int64_t num_blocks;
};

// Copies block pairs[2i] of `from` to block pairs[2i + 1] of `to`, in order, in each pool of the two lists (as a rule keys and
// values of all layers). The lists may be the same. Throws std::out_of_range, before any copy, for a block outside its pool.
void copy_blocks(const std::vector<BlockPool>& from, const std::vector<BlockPool>& to, int64_t block_bytes,
                 const int64_t* pairs, int64_t num_pairs);

// Reads `bytes` bytes from p with the calling thread only and returns a checksum: the read bandwidth against which decode
// attention is measured.
uint64_t read_bandwidth(const void* p, int64_t bytes);

}  // namespace hp
