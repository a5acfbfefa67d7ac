// Elementwise and row operators of the CPU backend, and the same as row kernels for the fused decoder.
//
// Row sums are taken in an order that depends on the row's length alone, so a row's result does not depend on its batch.
#pragma once
#include <cstdint>

#include "attention.hpp"
#include "gemm.hpp"
#include "isa.hpp"

namespace hp {

struct Rotary {
  int head_dim = 0;
  int rotary_dim = 0;  // leading elements that rotate, element i with i + rotary_dim / 2; even
  float norm_eps = 0;  // of the heads' normalisation, where there is one
};

struct OpKernels {
  // out = x / sqrt(mean(x^2) + eps) * weight, in fp32.
  void (*rms_norm)(const void* x, DType x_dtype, const float* weight, int64_t n, float eps, void* out, DType out_dtype);
  // out = (y - mean(y)) / sqrt(variance(y) + eps) * weight + bias of y = x + branch, in fp32; branch and bias may be null. sums: [n].
  void (*layer_norm)(const void* x, const void* branch, DType dtype, const float* weight, const float* bias, int64_t n, float eps,
                     float* sums, void* out);
  // sum (fp32) += rms_norm(x).
  void (*accumulate_rms_norm)(const void* x, DType x_dtype, const float* weight, int64_t n, float eps, float* sum);
  // residual += x, both of one dtype.
  void (*add)(const void* x, int64_t n, void* residual, DType dtype);
  // Normalises each head (where norm is not null), then rotates it by one position's angles; heads contiguous, in place.
  void (*rotate)(void* heads, int64_t num_heads, DType dtype, const Rotary& rotary, const float* norm, const float* cos,
                 const float* sin);
  // out = activation(gate) * up.
  void (*gate)(const void* gate, const void* up, int64_t n, DType dtype, Epilogue activation, void* out);
  int64_t (*arg_max)(const float* x, int64_t n);
  float (*log_sum_exp)(const float* x, int64_t n);
  // The k greatest of x, in order, and their softmax; see route(). Overwrites x.
  void (*top_k_softmax)(float* x, int64_t n, int64_t k, bool renormalise, int32_t* chosen, float* weights);
  // out = the sum of weights[i] * rows[places[i]], in ascending i, of rows [*, n].
  void (*weighted_sum)(const float* rows, int64_t stride, const int64_t* places, const float* weights, int64_t count, int64_t n,
                       void* out, DType out_dtype);
};

// The kernels of the active instruction set.
const OpKernels& op_kernels();

// Strides are in elements of the tensor that they belong to; rows are spread over the thread pool.
void rms_norm(const void* x, int64_t x_stride, int64_t rows, int64_t n, DType dtype, const float* weight, float eps, void* out,
              int64_t out_stride);

// residual += x; out = rms_norm(residual).
void add_rms_norm(const void* x, int64_t x_stride, void* residual, int64_t residual_stride, int64_t rows, int64_t n, DType dtype,
                  const float* weight, float eps, void* out, int64_t out_stride);

// out = layer_norm(x + branch); branch (of x's dtype) and bias may be null.
void layer_norm(const void* x, int64_t x_stride, const void* branch, int64_t branch_stride, int64_t rows, int64_t n, DType dtype,
                const float* weight, const float* bias, float eps, void* out, int64_t out_stride);

struct HeadRows {
  void* data = nullptr;
  int64_t stride = 0;  // elements between tokens
  int64_t num_heads = 0;
  const float* norm = nullptr;  // [head_dim], or null
};

// cos, sin: [max positions, rotary_dim / 2]. Positions are not checked.
void rotary(const HeadRows& q, const HeadRows& k, int64_t tokens, DType dtype, const Rotary& rotary, const int64_t* positions,
            const float* cos, const float* sin);

// x: [rows, 2n] (gate, then up); out: [rows, n].
void gated_activation(const void* x, int64_t x_stride, int64_t rows, int64_t n, DType dtype, Epilogue activation, void* out,
                      int64_t out_stride);

// Lowest index of the greatest value; a NaN is never the greatest, and a row of NaNs gives 0.
void arg_max_rows(const float* x, int64_t x_stride, int64_t rows, int64_t n, int64_t* out);

// out[i] = weight row ids[i] * scale in fp32. Ids are not checked.
void gather_rows(const PackedWeight& weight, const int64_t* ids, int64_t count, float scale, float* out, int64_t out_stride);

}  // namespace hp

HP_DECLARE_PER_ISA(const OpKernels&, op_kernels_here)
