// The experts of a mixture: gated feed-forwards of which each token takes a few.
//
// Rows are sorted by expert, so that an expert's weights are read once for all of its rows, and each product runs over the packed
// weights with the micro-kernels of the linear layers. A token's output is the sum of its experts' outputs in fp32, in the order in
// which the router named them. It does not depend on the other tokens, bit for bit.
#pragma once
#include <cstdint>

#include "attention.hpp"
#include "gemm.hpp"

namespace hp {

struct ExpertsCall {
  DType dtype = DType::F32;  // of weights, biases, x and out
  int64_t num_experts = 0;
  int64_t hidden = 0;
  int64_t intermediate = 0;
  Epilogue activation = Epilogue::SiluMul;  // a gated one
  const void* gate_up = nullptr;            // [experts] gated pairs [2 * 16 * ceil(intermediate / 16), hidden], one after the other
  const void* down = nullptr;               // [experts] packed weights [hidden, intermediate], one after the other
  const void* gate_up_bias = nullptr;       // [experts, 2 * intermediate], gate then up, or null
  const void* down_bias = nullptr;          // [experts, hidden], or null
  const void* x = nullptr;                  // [tokens, hidden]
  int64_t x_stride = 0;                     // elements
  int64_t tokens = 0;
  int64_t top_k = 0;
  const int32_t* experts = nullptr;  // [tokens, top_k]
  const float* weights = nullptr;    // [tokens, top_k], the experts' shares in the sum
  void* out = nullptr;               // [tokens, hidden]
  int64_t out_stride = 0;            // elements
  Workspace workspace;
};

int64_t gated_columns(int64_t intermediate);
int64_t experts_workspace_bytes(int64_t tokens, int64_t top_k, int64_t num_experts, int64_t hidden, int64_t intermediate);

// Throws std::invalid_argument where the workspace is too small, and std::out_of_range for an expert that does not exist, before
// any work.
void run_experts(const ExpertsCall& call);

// The k greatest of each row's n logits, the lower column first where two are equal, and their softmax: over all n columns, or
// over the chosen ones (`renormalise`). A NaN is chosen last, and makes the weights NaN that it is part of.
void route(const void* logits, int64_t stride, int64_t rows, int64_t n, DType dtype, int64_t k, bool renormalise, int32_t* experts,
           float* weights);

}  // namespace hp
