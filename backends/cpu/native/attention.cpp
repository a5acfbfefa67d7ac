#include "attention.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>

#include "attention_kernels.hpp"
#include "thread_pool.hpp"

namespace hp {
namespace {

// A tile with at most this many rows is split over its context: its work is bound by reading keys and values, and there may be
// no other item to keep the threads busy.
constexpr int kSplitRows = 48;
// With this many items for each thread, a decode item takes up to kDecodeHeads key heads together.
constexpr int kManyItemsPerThread = 4;
constexpr int kDecodeHeads = 8;
// Below this many bytes a copy is faster than sharing it out.
constexpr int64_t kInlineCopyBytes = 128 << 10;

// A thread's memory for kernels, 64-byte aligned; grows and is reused.
class Scratch {
 public:
  char* reserve(int64_t bytes) {
    if (bytes > size_) {
      data_.reset();
      size_ = 0;
      const int64_t rounded = (bytes + 63) / 64 * 64;
      data_.reset(static_cast<char*>(std::aligned_alloc(64, static_cast<size_t>(rounded))));
      if (!data_) throw std::bad_alloc();
      size_ = rounded;
    }
    return data_.get();
  }

 private:
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  std::unique_ptr<char, Free> data_;
  int64_t size_ = 0;
};

char* thread_scratch(int64_t bytes) {
  static thread_local Scratch scratch;
  return scratch.reserve(bytes);
}

char* partials_scratch(int64_t bytes) {
  static thread_local Scratch scratch;
  return scratch.reserve(bytes);
}

int64_t key_count(const AttentionPlan::Item& item) { return item.key_end - item.key_begin; }
int64_t cost(const AttentionPlan::Item& item) { return key_count(item) * (item.q_end - item.q_begin); }

void check_blocks(const AttentionBatch& batch, int seq, int64_t key_begin, int64_t key_end) {
  const int32_t* table = batch.block_table + batch.rows[seq] * batch.table_stride;
  for (int64_t i = key_begin / batch.block_size; i <= (key_end - 1) / batch.block_size; ++i) {
    if (table[i] < 0 || table[i] >= batch.num_blocks)
      throw std::out_of_range("block table entry " + std::to_string(i) + " of sequence " + std::to_string(seq) + " is " +
                              std::to_string(table[i]) + "; the cache has blocks 0 to " +
                              std::to_string(batch.num_blocks - 1));
  }
}

}  // namespace

void check_batch(const AttentionBatch& batch) {
  const auto text = [](int64_t x) { return std::to_string(x); };
  if (batch.block_size < 1) throw std::invalid_argument("block size must be positive, not " + text(batch.block_size));
  if (batch.num_seqs > 0 && batch.query_start[0] != 0)
    throw std::invalid_argument("query_start must begin with 0, not " + text(batch.query_start[0]));
  for (int s = 0; s < batch.num_seqs; ++s) {
    const int64_t queries = int64_t{batch.query_start[s + 1]} - batch.query_start[s], context = batch.context_lens[s];
    if (queries < 0 || batch.query_start[s + 1] > batch.num_tokens)
      throw std::invalid_argument("query_start of sequence " + text(s) + " runs from " + text(batch.query_start[s]) + " to " +
                                  text(batch.query_start[s + 1]) + "; it must not fall, and the batch has " +
                                  text(batch.num_tokens) + " tokens");
    if (queries == 0) continue;
    if (context < queries)
      throw std::invalid_argument("sequence " + text(s) + " has " + text(queries) + " query tokens but a context length of " +
                                  text(context) + "; the context includes them");
    if (batch.bidirectional) {
      if (context != queries)
        throw std::invalid_argument("sequence " + text(s) + " has " + text(queries) + " of its " + text(context) +
                                    " tokens in the step; attention to both sides needs all of them");
      continue;
    }
    if (batch.rows[s] < 0 || batch.rows[s] >= batch.table_rows)
      throw std::out_of_range("sequence " + text(s) + " uses row " + text(batch.rows[s]) + " of a block table with " +
                              text(batch.table_rows) + " rows");
    if ((context + batch.block_size - 1) / batch.block_size > batch.table_stride)
      throw std::out_of_range("sequence " + text(s) + " has a context length of " + text(context) + ", more than the " +
                              text(batch.table_stride) + " blocks of " + text(batch.block_size) +
                              " tokens that its block table row holds");
  }
  if (batch.bidirectional) return;
  const int64_t slots = batch.num_blocks * batch.block_size;
  for (int t = 0; t < batch.num_tokens; ++t) {
    if (batch.slot_mapping[t] < -1 || batch.slot_mapping[t] >= slots)
      throw std::out_of_range("slot " + text(batch.slot_mapping[t]) + " of token " + text(t) + " is not in the cache of " +
                              text(slots) + " slots (-1 means: do not write)");
  }
}

void check_layer(const AttentionLayer& layer, int block_size) {
  const auto text = [](int64_t x) { return std::to_string(x); };
  if (layer.num_kv_heads < 1 || layer.num_heads < 1 || layer.num_heads % layer.num_kv_heads != 0)
    throw std::invalid_argument(text(layer.num_heads) + " query heads cannot share " + text(layer.num_kv_heads) +
                                " key heads: the first must be a positive multiple of the second");
  if (layer.head_dim < 8 || layer.head_dim > kMaxHeadDim || layer.head_dim % 8 != 0)
    throw std::invalid_argument("head dimension must be a multiple of 8 from 8 to " + text(kMaxHeadDim) + ", not " +
                                text(layer.head_dim));
  if (block_size < 1) throw std::invalid_argument("block size must be positive, not " + text(block_size));
  if (layer.window < 0)
    throw std::invalid_argument("window must be a number of visible keys, or 0 for all, not " + text(layer.window));
  if (!(layer.k_scale > 0 && layer.v_scale > 0)) throw std::invalid_argument("scales of the cache must be positive");
  if (!(layer.soft_cap >= 0)) throw std::invalid_argument("soft cap must be positive, or 0 for none");
}

AttentionPlan plan_attention(const AttentionBatch& batch, const AttentionLayer& layer) {
  AttentionPlan plan;
  const int group = layer.num_heads / layer.num_kv_heads;
  const int tile_tokens = std::max(1, kTileRows / group);
  for (int s = 0; s < batch.num_seqs; ++s) {
    const int queries = batch.query_start[s + 1] - batch.query_start[s], offset = batch.context_lens[s] - queries;
    for (int begin = 0; begin < queries; begin += tile_tokens) {
      const int end = std::min(queries, begin + tile_tokens), tokens = end - begin;
      if (batch.bidirectional) {
        // One item whatever its size: whole sequences give the threads enough of them.
        const int64_t reach = layer.window > 0 ? layer.window - 1 : queries;
        plan.prefills.push_back({s, begin, end, static_cast<int32_t>(std::max<int64_t>(0, begin - reach)),
                                 static_cast<int32_t>(std::min<int64_t>(queries, end + reach)), -1});
        continue;
      }
      const int key_end = offset + end;
      const int key_begin = layer.window > 0 ? std::max(0, offset + begin - layer.window + 1) : 0;
      check_blocks(batch, s, key_begin, key_end);
      const int first = key_begin / kPartitionKeys, last = (key_end - 1) / kPartitionKeys;
      std::vector<AttentionPlan::Item>& items = tokens == 1 ? plan.decodes : plan.prefills;
      if (first == last || (tokens > 1 && tokens * group > kSplitRows)) {
        items.push_back({s, begin, end, key_begin, key_end, -1});
        continue;
      }
      plan.merges.push_back({s, begin, end, plan.num_partials, last - first + 1});
      for (int p = first; p <= last; ++p) {
        items.push_back({s, begin, end, std::max(key_begin, p * kPartitionKeys), std::min(key_end, (p + 1) * kPartitionKeys),
                              plan.num_partials});
        plan.num_partials += tokens;
      }
    }
  }
  // Long items first: the short ones then fill the gaps at the end.
  for (auto* items : {&plan.prefills, &plan.decodes})
    std::stable_sort(items->begin(), items->end(),
                     [](const AttentionPlan::Item& a, const AttentionPlan::Item& b) { return cost(a) > cost(b); });
  return plan;
}

void write_kv(const AttentionBatch& batch, const AttentionLayer& layer, const void* k, int64_t k_stride, const void* v,
              int64_t v_stride, const KvLayer& kv) {
  const AttentionKernels& kernels = HP_KERNELS(attention_kernels);
  const int64_t size = itemsize(kv.dtype), head_bytes = layer.head_dim * size;
  const int64_t row_bytes = layer.head_dim * itemsize(kv.format, kv.dtype);
  const int64_t token_bytes = row_bytes * layer.num_kv_heads;
  const auto put = [&](char* to, const char* from, float scale) {
    if (kv.format == KvFormat::E4m3) kernels.narrow(from, kv.dtype, scale, layer.head_dim, reinterpret_cast<uint8_t*>(to));
    else std::memcpy(to, from, static_cast<size_t>(row_bytes));
  };
  const auto write = [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t slot = batch.slot_mapping[t];
      if (slot < 0) continue;
      const int64_t block = slot / batch.block_size, in_block = slot - block * batch.block_size;
      const char* from_k = static_cast<const char*>(k) + t * k_stride * size;
      const char* from_v = static_cast<const char*>(v) + t * v_stride * size;
      int64_t offset = block * batch.block_size * token_bytes + in_block * row_bytes;
      for (int h = 0; h < layer.num_kv_heads; ++h, offset += batch.block_size * row_bytes) {
        put(static_cast<char*>(kv.k) + offset, from_k + h * head_bytes, layer.k_scale);
        put(static_cast<char*>(kv.v) + offset, from_v + h * head_bytes, layer.v_scale);
      }
    }
  };
  if (2 * token_bytes * batch.num_tokens <= kInlineCopyBytes) return write(0, batch.num_tokens, 0);
  ThreadPool::global().parallel_for(batch.num_tokens, std::max<int64_t>(1, kInlineCopyBytes / (4 * token_bytes)), write);
}

void attention(const AttentionPlan& plan, const AttentionBatch& batch, const AttentionLayer& layer, const void* q,
               int64_t q_stride, const KvLayer& kv, void* out, int64_t out_stride) {
  const AttentionKernels& kernels = HP_KERNELS(attention_kernels);
  AttentionCall call{&batch, &layer, &kv, q, q_stride, out, out_stride, nullptr};
  const int64_t partial_floats = int64_t{layer.num_heads} * (layer.head_dim + 2);
  if (plan.num_partials > 0) call.partials = reinterpret_cast<float*>(partials_scratch(plan.num_partials * partial_floats * 4));
  ThreadPool& pool = ThreadPool::global();
  // Heads of one decode item lie side by side and are read in one go, unless the threads need smaller portions.
  const int64_t kv_heads = layer.num_kv_heads, prefills = static_cast<int64_t>(plan.prefills.size()) * kv_heads;
  const int64_t decodes = static_cast<int64_t>(plan.decodes.size());
  const bool many = prefills + decodes >= int64_t{kManyItemsPerThread} * pool.num_threads();
  const int64_t heads_at_once = many ? std::min<int64_t>(kv_heads, kDecodeHeads) : 1;
  const int64_t portions = (kv_heads + heads_at_once - 1) / heads_at_once;
  const int64_t scratch_bytes = kernels.scratch_bytes(static_cast<int>(heads_at_once), layer.num_heads / layer.num_kv_heads, layer.head_dim);

  const auto decode_portion = [&](int64_t i) {
    const int64_t item = (i - prefills) / portions, first = (i - prefills) % portions * heads_at_once;
    return DecodePortion{&plan.decodes[static_cast<size_t>(item)], static_cast<int>(first),
                         static_cast<int>(std::min(kv_heads, first + heads_at_once))};
  };
  const int64_t total = prefills + decodes * portions;

  pool.parallel_for(total, 1, [&](int64_t begin, int64_t end, int) {
    char* scratch = thread_scratch(scratch_bytes);
    for (int64_t i = begin; i < end; ++i) {
      if (i < prefills) {
        kernels.prefill(call, plan.prefills[static_cast<size_t>(i / kv_heads)], static_cast<int>(i % kv_heads), scratch);
        continue;
      }
      // Threads that take portions in turn make this one's next; where they do not, a few rows are fetched in vain.
      const int64_t guess = i + pool.num_threads();
      const DecodePortion portion = decode_portion(i), next = guess < total ? decode_portion(guess) : portion;
      kernels.decode(call, portion, guess < total ? &next : nullptr, scratch);
    }
  });
  if (plan.merges.empty()) return;
  pool.parallel_for(static_cast<int64_t>(plan.merges.size()) * kv_heads, 4, [&](int64_t begin, int64_t end, int) {
    char* scratch = thread_scratch(scratch_bytes);
    for (int64_t i = begin; i < end; ++i)
      kernels.merge(call, plan.merges[static_cast<size_t>(i / kv_heads)], static_cast<int>(i % kv_heads), scratch);
  });
}

void copy_blocks(const std::vector<BlockPool>& from, const std::vector<BlockPool>& to, int64_t block_bytes,
                 const int64_t* pairs, int64_t num_pairs) {
  if (from.size() != to.size()) throw std::invalid_argument("source and destination must have the same number of pools");
  for (size_t i = 0; i < from.size(); ++i) {
    for (int64_t p = 0; p < num_pairs; ++p) {
      const int64_t source = pairs[2 * p], target = pairs[2 * p + 1];
      if (source < 0 || source >= from[i].num_blocks || target < 0 || target >= to[i].num_blocks)
        throw std::out_of_range("cannot copy block " + std::to_string(source) + " to block " + std::to_string(target) +
                                ": the source has " + std::to_string(from[i].num_blocks) + " blocks, the destination " +
                                std::to_string(to[i].num_blocks));
    }
  }
  // Pairs run in order within a pool, since one may read what an earlier one wrote; pools are independent.
  ThreadPool::global().parallel_for(static_cast<int64_t>(from.size()), 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t p = 0; p < num_pairs; ++p) {
        const char* source = from[static_cast<size_t>(i)].data + pairs[2 * p] * block_bytes;
        std::memmove(to[static_cast<size_t>(i)].data + pairs[2 * p + 1] * block_bytes, source, static_cast<size_t>(block_bytes));
      }
    }
  });
}

uint64_t read_bandwidth(const void* p, int64_t bytes) { return HP_KERNELS(attention_kernels).read_words(p, bytes); }

}  // namespace hp
