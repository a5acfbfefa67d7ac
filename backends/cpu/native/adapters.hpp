// What LoRA adapters add to the outputs of a linear layer, for rows that go through unlike ones (KernelSet.add_adapters).
//
// A row's sums are taken in an order that depends on the layer's shape and the adapter's rank alone: its result does not depend on the
// rows beside it, bit for bit.
#pragma once
#include <cstdint>
#include <vector>

#include "attention.hpp"
#include "isa.hpp"

namespace hp {

constexpr int kAdapterTokens = 16;  // rows that one work item computes together: a rank's row of A stays in the first-level cache

// The adapters of one linear layer, in slots. Strides are in elements.
struct AdapterMatrices {
  DType dtype = DType::F32;
  int64_t columns = 0;
  int64_t rows = 0;
  int64_t max_rank = 0;
  int64_t slots = 0;
  const void* down = nullptr;  // [slots][parts * max_rank][columns]
  int64_t down_stride = 0;     // of a slot
  const void* up = nullptr;    // [slots][max_rank][rows]
  int64_t up_stride = 0;       // of a slot
  const int32_t* ranks = nullptr;  // [slots][parts]
  const float* scales = nullptr;
  int64_t parts_stride = 0;  // of a slot, in ranks and scales
  const int32_t* spans = nullptr;  // [parts][2]
  int64_t parts = 0;

  // Whether the adapter in a slot adds anything to this layer.
  bool has(int slot) const {
    for (int64_t part = 0; part < parts; ++part)
      if (ranks[slot * parts_stride + part]) return true;
    return false;
  }
};

// Tokens of one adapter, at most kAdapterTokens.
struct AdapterItem {
  int slot;
  const int64_t* tokens;
  int count;
};

struct AdapterCall {
  AdapterMatrices matrices;
  const void* x = nullptr;
  int64_t x_stride = 0;
  void* out = nullptr;  // [tokens][rows] in the matrices' dtype, which is added to
  int64_t out_stride = 0;
  float* sums = nullptr;    // instead of out: [tokens][sums_stride], which is written whole, rows where there is no adapter too
  int64_t sums_stride = 0;
  bool gated_pair = false;  // of sums: columns stand as in a packed gated pair (gemm.hpp)
};

struct AdapterKernels {
  // inner: [count][parts * max_rank]. `next`: the item that this thread will compute then, or null.
  void (*add)(const AdapterCall& call, const AdapterItem& item, const AdapterItem* next, float* inner);
};

// Appends the items of tokens of one adapter.
void append_items(int slot, const int64_t* tokens, int64_t count, std::vector<AdapterItem>& items);

// Items are spread over the thread pool. Tokens and slots are not checked.
void add_adapters(const AdapterCall& call, const std::vector<AdapterItem>& items);

}  // namespace hp

HP_DECLARE_PER_ISA(const AdapterKernels&, adapter_kernels_here)
