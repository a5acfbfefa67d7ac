// What LoRA adapters add to the outputs of a linear layer, for rows that go through unlike ones (KernelSet.add_adapters).
//
// A row's sums are taken in an order that depends on the layer's shape and the adapter's rank alone: its result does not depend on the
// rows beside it, bit for bit.
#pragma once
#include <cstdint>

#include "attention.hpp"
#include "isa.hpp"

namespace hp {

constexpr int kAdapterTokens = 16;  // rows that one work item computes together: a rank's row of A stays in the first-level cache

// Strides are in elements.
struct AdapterCall {
  DType dtype = DType::F32;
  const void* x = nullptr;
  int64_t x_stride = 0;
  int64_t columns = 0;
  void* out = nullptr;
  int64_t out_stride = 0;
  const void* down = nullptr;  // [slots][parts * max_rank][columns]
  int64_t down_stride = 0;     // of a slot
  const void* up = nullptr;    // [slots][max_rank][rows]
  int64_t up_stride = 0;       // of a slot
  int64_t rows = 0;
  int64_t max_rank = 0;
  const int32_t* ranks = nullptr;  // [slots][parts]
  const float* scales = nullptr;
  int64_t parts_stride = 0;  // of a slot, in ranks and scales
  const int32_t* spans = nullptr;  // [parts][2]
  int64_t parts = 0;
  const int64_t* tokens = nullptr;
  const int32_t* slots = nullptr;   // [groups]
  const int32_t* starts = nullptr;  // [groups + 1]
  int64_t groups = 0;
};

struct AdapterKernels {
  // The rows `tokens`, at most kAdapterTokens, of the adapter in `slot`. inner: [count][parts * max_rank].
  void (*add)(const AdapterCall& call, int slot, const int64_t* tokens, int count, float* inner);
};

// Items are spread over the thread pool. Tokens and slots are not checked.
void add_adapters(const AdapterCall& call);

}  // namespace hp

HP_DECLARE_PER_ISA(const AdapterKernels& adapter_kernels_here())
