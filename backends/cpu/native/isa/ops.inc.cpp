// Row kernels of ops.hpp, compiled once per instruction set.
#include "ops.hpp"

#include "activations.hpp"
#include "simd.hpp"

namespace hp {
namespace HP_ISA {
namespace {

constexpr int kSums = 4;  // independent partial sums, to hide the latency of the addition

template <class F>
HP_INLINE auto with_type(DType dtype, F&& f) {
  switch (dtype) {
    case DType::BF16: return f(Bf16{});
    case DType::F16: return f(F16{});
    default: return f(F32{});
  }
}

template <class T>
const typename T::type* typed(T, const void* p) { return static_cast<const typename T::type*>(p); }
template <class T>
typename T::type* typed(T, void* p) { return static_cast<typename T::type*>(p); }

template <class T>
HP_INLINE float inverse_rms(T type, const typename T::type* x, int64_t n, float eps) {
  vf sums[kSums] = {};
  int64_t i = 0;
  for (; i + kSums * kLanes <= n; i += kSums * kLanes)
#pragma GCC unroll 4
    for (int s = 0; s < kSums; ++s) {
      const vf v = load(type, x + i + s * kLanes);
      sums[s] = fma(v, v, sums[s]);
    }
  for_vectors(n - i, [&](int64_t j, int count) {
    const vf v = load_some(type, x + i + j, count);
    sums[0] = fma(v, v, sums[0]);
  });
  return 1.0f / __builtin_sqrtf(hsum((sums[0] + sums[1]) + (sums[2] + sums[3])) / static_cast<float>(n) + eps);
}

void rms_norm(const void* x, DType x_dtype, const float* weight, int64_t n, float eps, void* out, DType out_dtype) {
  with_type(x_dtype, [&](auto in) {
    const auto* row = typed(in, x);
    const float scale = inverse_rms(in, row, n, eps);
    with_type(out_dtype, [&](auto to) {
      auto* y = typed(to, out);
      for_vectors(n, [&](int64_t i, int count) {
        store_some(to, y + i, load_some(in, row + i, count) * scale * load_some(F32{}, weight + i, count), count);
      });
    });
  });
}

// Sum of f(i, count) over a row's vectors, in kSums independent ones; f gives zero in the lanes from `count` on.
template <class F>
HP_INLINE float row_sum(int64_t n, F&& f) {
  vf sums[kSums] = {};
  int64_t i = 0;
  for (; i + kSums * kLanes <= n; i += kSums * kLanes)
#pragma GCC unroll 4
    for (int s = 0; s < kSums; ++s) sums[s] += f(i + s * kLanes, kLanes);
  for_vectors(n - i, [&](int64_t j, int count) { sums[0] += f(i + j, count); });
  return hsum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

void layer_norm(const void* x, const void* branch, DType dtype, const float* weight, const float* bias, int64_t n, float eps,
                float* sums, void* out) {
  with_type(dtype, [&](auto type) {
    const auto* row = typed(type, x);
    const auto* added = typed(type, branch);
    const float mean = row_sum(n, [&](int64_t i, int count) {
      vf y = load_some(type, row + i, count);
      if (added) y += load_some(type, added + i, count);
      store_some(F32{}, sums + i, y, count);
      return y;
    }) / static_cast<float>(n);
    // Lanes beyond the row would add the mean's square.
    const vi lane = iota();
    const float squares = row_sum(n, [&](int64_t i, int count) {
      vf y = load_some(F32{}, sums + i, count) - mean;
      if (count < kLanes) y = lane < count ? y : vf{};
      return y * y;
    });
    const float scale = 1.0f / __builtin_sqrtf(squares / static_cast<float>(n) + eps);
    auto* to = typed(type, out);
    for_vectors(n, [&](int64_t i, int count) {
      const vf y = (load_some(F32{}, sums + i, count) - mean) * scale;
      store_some(type, to + i, fma(y, load_some(F32{}, weight + i, count), bias ? load_some(F32{}, bias + i, count) : vf{}), count);
    });
  });
}

void accumulate_rms_norm(const void* x, DType x_dtype, const float* weight, int64_t n, float eps, float* sum) {
  with_type(x_dtype, [&](auto in) {
    const auto* row = typed(in, x);
    const float scale = inverse_rms(in, row, n, eps);
    for_vectors(n, [&](int64_t i, int count) {
      const vf y = load_some(in, row + i, count) * scale * load_some(F32{}, weight + i, count);
      store_some(F32{}, sum + i, load_some(F32{}, sum + i, count) + y, count);
    });
  });
}

void add(const void* x, int64_t n, void* residual, DType dtype) {
  with_type(dtype, [&](auto type) {
    const auto* from = typed(type, x);
    auto* to = typed(type, residual);
    for_vectors(n, [&](int64_t i, int count) {
      store_some(type, to + i, load_some(type, to + i, count) + load_some(type, from + i, count), count);
    });
  });
}

void rotate(void* heads, int64_t num_heads, DType dtype, const Rotary& rotary, const float* norm, const float* cos,
            const float* sin) {
  const int half = rotary.rotary_dim / 2, dim = rotary.head_dim;
  with_type(dtype, [&](auto type) {
    for (int64_t h = 0; h < num_heads; ++h) {
      auto* x = typed(type, heads) + h * dim;
      const float scale = norm ? inverse_rms(type, x, dim, rotary.norm_eps) : 1.0f;
      const auto value = [&](int i, int count) {
        const vf v = load_some(type, x + i, count);
        return norm ? v * scale * load_some(F32{}, norm + i, count) : v;
      };
      for_vectors(half, [&](int64_t i, int count) {
        const vf a = value(i, count), b = value(half + i, count);
        const vf c = load_some(F32{}, cos + i, count), s = load_some(F32{}, sin + i, count);
        store_some(type, x + i, fma(a, c, -(b * s)), count);
        store_some(type, x + half + i, fma(b, c, a * s), count);
      });
      if (norm)
        for_vectors(dim - rotary.rotary_dim, [&](int64_t i, int count) {
          store_some(type, x + rotary.rotary_dim + i, value(rotary.rotary_dim + static_cast<int>(i), count), count);
        });
    }
  });
}

void gate(const void* gate, const void* up, int64_t n, DType dtype, Epilogue activation, void* out) {
  with_type(dtype, [&](auto type) {
    for_vectors(n, [&](int64_t i, int count) {
      const vf g = load_some(type, typed(type, gate) + i, count), u = load_some(type, typed(type, up) + i, count);
      store_some(type, typed(type, out) + i, gated(type, g, u, activation), count);
    });
  });
}

float row_max(const float* x, int64_t n) {
  vf best = splat(-__builtin_inff());
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) best = max(load(x + i), best);
  float top = hmax(best);
  for (; i < n; ++i) top = x[i] > top ? x[i] : top;
  return top;
}

int64_t arg_max(const float* x, int64_t n) {
  const float top = row_max(x, n);
  for (int64_t i = 0; i < n; ++i)
    if (x[i] == top) return i;
  return 0;
}

float sum_exp(const float* x, int64_t n, float top) {
  vf sum{};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) sum += exp(load(x + i) - top);
  if (i < n) {
    float last[kLanes] = {};
    store(last, exp(load_first(F32{}, x + i, static_cast<int>(n - i)) - top));
    for (int64_t j = n - i; j < kLanes; ++j) last[j] = 0;
    sum += load(last);
  }
  return hsum(sum);
}

float log_sum_exp(const float* x, int64_t n) {
  const float top = row_max(x, n);
  if (top == -__builtin_inff() || top == __builtin_inff()) return top;
  return top + __builtin_logf(sum_exp(x, n, top));
}

void top_k_softmax(float* x, int64_t n, int64_t k, bool renormalise, int32_t* chosen, float* weights) {
  const float top = row_max(x, n);
  float total = renormalise ? 0 : sum_exp(x, n, top);
  for (int64_t j = 0; j < k; ++j) {
    const float best = row_max(x, n);
    int64_t found = 0;
    while (found < n && x[found] != best) ++found;
    weights[j] = best;
    if (found == n) {
      // Only NaNs are left: those of the row, and the marks of what was chosen.
      weights[j] = __builtin_nanf("");
      for (found = 0; found < n; ++found) {
        bool taken = false;
        for (int64_t i = 0; i < j; ++i) taken = taken || chosen[i] == found;
        if (!taken) break;
      }
    }
    chosen[j] = static_cast<int32_t>(found);
    x[found] = __builtin_nanf("");
  }
  for (int64_t j = 0; j < k; ++j) {
    float value[kLanes];
    store(value, exp(splat(weights[j] - top)));
    weights[j] = value[0];
    if (renormalise) total += value[0];
  }
  for (int64_t j = 0; j < k; ++j) weights[j] /= total;
}

void weighted_sum(const float* rows, int64_t stride, const int64_t* places, const float* weights, int64_t count, int64_t n, void* out,
                  DType out_dtype) {
  with_type(out_dtype, [&](auto to) {
    for_vectors(n, [&](int64_t i, int width) {
      vf sum{};
      for (int64_t j = 0; j < count; ++j) sum = fma(splat(weights[j]), load_some(F32{}, rows + places[j] * stride + i, width), sum);
      store_some(to, typed(to, out) + i, sum, width);
    });
  });
}

}  // namespace

const OpKernels& op_kernels_here() {
  static constexpr OpKernels kernels = {rms_norm, layer_norm, accumulate_rms_norm, add,          rotate,
                                        gate,     arg_max,    log_sum_exp,         top_k_softmax, weighted_sum};
  return kernels;
}

}  // namespace HP_ISA
}  // namespace hp
