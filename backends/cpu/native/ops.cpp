#include "ops.hpp"

#include <algorithm>
#include <vector>

#include "thread_pool.hpp"

namespace hp {
namespace {

constexpr int64_t kElementsPerChunk = 16384;  // a few microseconds, well above the cost of handing out a chunk

template <class F>
void for_rows(int64_t rows, int64_t elements_per_row, F&& f) {
  const int64_t grain = std::max<int64_t>(1, kElementsPerChunk / std::max<int64_t>(1, elements_per_row));
  ThreadPool::global().parallel_for(rows, grain, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) f(i);
  });
}

const char* row(const void* base, int64_t index, int64_t stride, DType dtype) {
  return static_cast<const char*>(base) + index * stride * itemsize(dtype);
}
char* row(void* base, int64_t index, int64_t stride, DType dtype) {
  return static_cast<char*>(base) + index * stride * itemsize(dtype);
}

}  // namespace

const OpKernels& op_kernels() { return HP_KERNELS(op_kernels_here); }

void rms_norm(const void* x, int64_t x_stride, int64_t rows, int64_t n, DType dtype, const float* weight, float eps, void* out,
              int64_t out_stride) {
  const OpKernels& kernels = op_kernels();
  for_rows(rows, n, [&](int64_t i) {
    kernels.rms_norm(row(x, i, x_stride, dtype), dtype, weight, n, eps, row(out, i, out_stride, dtype), dtype);
  });
}

void add_rms_norm(const void* x, int64_t x_stride, void* residual, int64_t residual_stride, int64_t rows, int64_t n, DType dtype,
                  const float* weight, float eps, void* out, int64_t out_stride) {
  const OpKernels& kernels = op_kernels();
  for_rows(rows, n, [&](int64_t i) {
    char* sum = row(residual, i, residual_stride, dtype);
    kernels.add(row(x, i, x_stride, dtype), n, sum, dtype);
    kernels.rms_norm(sum, dtype, weight, n, eps, row(out, i, out_stride, dtype), dtype);
  });
}

void layer_norm(const void* x, int64_t x_stride, const void* branch, int64_t branch_stride, int64_t rows, int64_t n, DType dtype,
                const float* weight, const float* bias, float eps, void* out, int64_t out_stride) {
  const OpKernels& kernels = op_kernels();
  for_rows(rows, n, [&](int64_t i) {
    static thread_local std::vector<float> sums;
    if (sums.size() < static_cast<size_t>(n)) sums.resize(static_cast<size_t>(n));
    kernels.layer_norm(row(x, i, x_stride, dtype), branch ? row(branch, i, branch_stride, dtype) : nullptr, dtype, weight, bias, n, eps,
                       sums.data(), row(out, i, out_stride, dtype));
  });
}

void rotary(const HeadRows& q, const HeadRows& k, int64_t tokens, DType dtype, const Rotary& rotary, const int64_t* positions,
            const float* cos, const float* sin) {
  const OpKernels& kernels = op_kernels();
  const int64_t half = rotary.rotary_dim / 2;
  for_rows(tokens, (q.num_heads + k.num_heads) * rotary.head_dim, [&](int64_t t) {
    const int64_t angle = positions[t] * half;
    kernels.rotate(row(q.data, t, q.stride, dtype), q.num_heads, dtype, rotary, q.norm, cos + angle, sin + angle);
    kernels.rotate(row(k.data, t, k.stride, dtype), k.num_heads, dtype, rotary, k.norm, cos + angle, sin + angle);
  });
}

void gated_activation(const void* x, int64_t x_stride, int64_t rows, int64_t n, DType dtype, Epilogue activation, void* out,
                      int64_t out_stride) {
  const OpKernels& kernels = op_kernels();
  for_rows(rows, n, [&](int64_t i) {
    const char* gate = row(x, i, x_stride, dtype);
    kernels.gate(gate, gate + n * itemsize(dtype), n, dtype, activation, row(out, i, out_stride, dtype));
  });
}

void arg_max_rows(const float* x, int64_t x_stride, int64_t rows, int64_t n, int64_t* out) {
  const OpKernels& kernels = op_kernels();
  for_rows(rows, n, [&](int64_t i) { out[i] = kernels.arg_max(x + i * x_stride, n); });
}

void gather_rows(const PackedWeight& weight, const int64_t* ids, int64_t count, float scale, float* out, int64_t out_stride) {
  const LinearKernels& kernels = HP_KERNELS(linear_kernels);
  const int64_t tile_size = weight.tile_stride(), k = weight.k;
  const auto gather_row = [&](int64_t i) {
    float* y = out + i * out_stride;
    if (weight.blocks != BlockFormat::None) return expand_block_row(weight.tiles, ids[i], k, weight.blocks, y);
    const char* tile = static_cast<const char*>(weight.tiles) + ids[i] / kTileColumns * tile_size;
    const int64_t lane = ids[i] % kTileColumns;
    switch (weight.dtype) {
      case DType::F32: {
        const float* from = reinterpret_cast<const float*>(tile) + lane;
        for (int64_t j = 0; j < k; ++j) y[j] = from[j * kTileColumns];
        break;
      }
      case DType::BF16: {
        // Widening a bf16 value is a shift, so the pairs need no kernel.
        const uint32_t* from = reinterpret_cast<const uint32_t*>(tile) + lane;
        uint32_t* bits = reinterpret_cast<uint32_t*>(y);
        for (int64_t j = 0; j + 1 < k; j += 2) {
          const uint32_t pair = from[j / 2 * kTileColumns];
          bits[j] = pair << 16;
          bits[j + 1] = pair & 0xffff0000u;
        }
        if (k % 2) bits[k - 1] = from[k / 2 * kTileColumns] << 16;
        break;
      }
      case DType::F16: {
        const uint16_t* from = reinterpret_cast<const uint16_t*>(tile) + lane;
        constexpr int64_t kPiece = 256;
        uint16_t piece[kPiece];
        for (int64_t j = 0; j < k; j += kPiece) {
          const int64_t n = std::min(kPiece, k - j);
          for (int64_t l = 0; l < n; ++l) piece[l] = from[(j + l) * kTileColumns];
          kernels.widen(piece, DType::F16, n, y + j);
        }
        break;
      }
    }
  };
  for_rows(count, k, [&](int64_t i) {
    gather_row(i);
    float* y = out + i * out_stride;
    if (scale != 1.0f)
      for (int64_t j = 0; j < k; ++j) y[j] *= scale;
  });
}

}  // namespace hp
