// Kernels of linear layers over weights in blocks (block_weight.hpp), one set per instruction set.
#pragma once
#include "block_weight.hpp"
#include "gemm.hpp"

namespace hp {

struct BlockKernels {
  // Quantises row i of k activations for products with a format.
  void (*quantise)(const void* x, DType dtype, int64_t k, BlockFormat format, const BlockRows& to, int64_t i);
  // An item whose x are the BlockRows of all rows of the call.
  void (*run_item)(const LinearItem& item);
};

}  // namespace hp

HP_DECLARE_PER_ISA(const BlockKernels&, block_kernels)
