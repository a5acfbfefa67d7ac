// What each instruction set offers to attention.cpp.
#pragma once
#include "attention.hpp"
#include "isa.hpp"

namespace hp {

struct AttentionCall {
  const AttentionBatch* batch;
  const AttentionLayer* layer;
  const KvLayer* kv;
  const void* q;
  int64_t q_stride;  // elements from token to token
  void* out;
  int64_t out_stride;
  float* partials;  // [num_partials, num_heads, head_dim + 2]: running maximum (base 2), sum, weighted values
};

// The share of a decode item that is worked off in one go: key heads [kv_begin, kv_end).
struct DecodePortion {
  const AttentionPlan::Item* item;
  int kv_begin, kv_end;
};

// Scratch is 64-byte aligned, scratch_bytes() long and private to the thread.
struct AttentionKernels {
  int64_t (*scratch_bytes)(int decode_kv_heads, int group, int head_dim);
  // One query token: the keys and values of the portion's heads, at most decode_kv_heads of them, are read once and in place,
  // and serve all query heads of a group. The first rows of `next`, which may be null, are fetched meanwhile.
  void (*decode)(const AttentionCall&, const DecodePortion&, const DecodePortion* next, void* scratch);
  // Several query tokens: keys and values are packed tile by tile, and matrix kernels run over them.
  void (*prefill)(const AttentionCall&, const AttentionPlan::Item&, int kv_head, void* scratch);
  void (*merge)(const AttentionCall&, const AttentionPlan::Merge&, int kv_head, void* scratch);
  // Writes n numbers divided by `scale` as e4m3, as write_kv says.
  void (*narrow)(const void* from, DType dtype, float scale, int64_t n, uint8_t* to);
  // Sum of the 32-bit words at p, read as fast as one thread can.
  uint64_t (*read_words)(const void* p, int64_t bytes);
};

}  // namespace hp

HP_DECLARE_PER_ISA(const ::hp::AttentionKernels&, attention_kernels)
