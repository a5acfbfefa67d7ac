// Kernels of adapters.hpp, compiled once per instruction set.
#include "adapters.hpp"

#include "activations.hpp"
#include "simd.hpp"

namespace hp {
namespace HP_ISA {
namespace {

constexpr int kRanks = 4, kTokens = 4, kVectors = 4;  // register blocking: at most 16 sums at a time

template <class T>
HP_INLINE vf load_some(T type, const typename T::type* p, int n) { return n == kLanes ? load(type, p) : load_first(type, p, n); }

template <class F>
HP_INLINE void for_vectors(int64_t n, F&& f) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) f(i, kLanes);
  if (i < n) f(i, static_cast<int>(n - i));
}

// inner[t][r] = x[tokens[t]] . a[r] * scale, for N tokens and R rows of A: each sum has one vector of partial sums.
template <int N, int R, class T>
HP_INLINE void shrink(T type, const AdapterCall& call, const typename T::type* a, const int64_t* tokens, float scale, float* inner,
                      int64_t stride) {
  using E = typename T::type;
  const E* x[N];
  for (int t = 0; t < N; ++t) x[t] = static_cast<const E*>(call.x) + tokens[t] * call.x_stride;
  vf sums[N][R] = {};
  for_vectors(call.columns, [&](int64_t i, int count) {
    vf row[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) row[r] = load_some(type, a + r * call.columns + i, count);
#pragma GCC unroll 4
    for (int t = 0; t < N; ++t) {
      const vf v = load_some(type, x[t] + i, count);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sums[t][r] = fma(v, row[r], sums[t][r]);
    }
  });
  for (int t = 0; t < N; ++t)
    for (int r = 0; r < R; ++r) inner[t * stride + r] = hsum(sums[t][r]) * scale;
}

// out[tokens[t]][column...] += inner[t] . b, for N tokens and V vectors of columns, the last of them with `count` elements.
template <int N, int V, class T>
HP_INLINE void expand(T type, const AdapterCall& call, const typename T::type* b, int64_t rank, const int64_t* tokens,
                      const float* inner, int64_t stride, int64_t column, int count) {
  using E = typename T::type;
  vf sums[N][V] = {};
  for (int64_t r = 0; r < rank; ++r) {
    const E* row = b + r * call.rows + column;
    vf values[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) values[v] = load_some(type, row + v * kLanes, v + 1 < V ? kLanes : count);
#pragma GCC unroll 4
    for (int t = 0; t < N; ++t) {
      const vf h = splat(inner[t * stride + r]);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sums[t][v] = fma(h, values[v], sums[t][v]);
    }
  }
  for (int t = 0; t < N; ++t) {
    E* y = static_cast<E*>(call.out) + tokens[t] * call.out_stride + column;
    for (int v = 0; v < V; ++v) {
      const int n = v + 1 < V ? kLanes : count;
      const vf sum = load_some(type, y + v * kLanes, n) + sums[t][v];
      if (n == kLanes) store(type, y + v * kLanes, sum);
      else store_first(type, y + v * kLanes, sum, n);
    }
  }
}

template <int N>
struct Count {
  static constexpr int value = N;
};

// Calls f(first token, how many as a constant) for all tokens, in the largest blocks.
template <class F>
HP_INLINE void for_tokens(int count, F&& f) {
  int t = 0;
  for (; t + kTokens <= count; t += kTokens) f(t, Count<kTokens>{});
  if (t + 2 <= count) {
    f(t, Count<2>{});
    t += 2;
  }
  if (t < count) f(t, Count<1>{});
}

template <class T>
void add_typed(T type, const AdapterCall& call, int slot, const int64_t* tokens, int count, float* inner) {
  using E = typename T::type;
  const int64_t stride = call.parts * call.max_rank;
  const E* down = static_cast<const E*>(call.down) + slot * call.down_stride;
  const E* up = static_cast<const E*>(call.up) + slot * call.up_stride;
  for (int64_t part = 0; part < call.parts; ++part) {
    const int64_t rank = call.ranks[slot * call.parts_stride + part];
    const float scale = call.scales[slot * call.parts_stride + part];
    if (rank == 0) continue;
    const E* a = down + part * call.max_rank * call.columns;
    float* own = inner + part * call.max_rank;
    int64_t r = 0;
    for (; r + kRanks <= rank; r += kRanks)
      for_tokens(count, [&](int t, auto n) {
        shrink<decltype(n)::value, kRanks>(type, call, a + r * call.columns, tokens + t, scale, own + t * stride + r, stride);
      });
    for (; r < rank; ++r)
      for_tokens(count, [&](int t, auto n) {
        shrink<decltype(n)::value, 1>(type, call, a + r * call.columns, tokens + t, scale, own + t * stride + r, stride);
      });
    int64_t column = call.spans[2 * part];
    const int64_t end = call.spans[2 * part + 1];
    for (; column + kVectors * kLanes <= end; column += kVectors * kLanes)
      for_tokens(count, [&](int t, auto n) {
        expand<decltype(n)::value, kVectors>(type, call, up, rank, tokens + t, own + t * stride, stride, column, kLanes);
      });
    for (; column < end; column += kLanes) {
      const int left = end - column < kLanes ? static_cast<int>(end - column) : kLanes;
      for_tokens(count, [&](int t, auto n) {
        expand<decltype(n)::value, 1>(type, call, up, rank, tokens + t, own + t * stride, stride, column, left);
      });
    }
  }
}

void add(const AdapterCall& call, int slot, const int64_t* tokens, int count, float* inner) {
  switch (call.dtype) {
    case DType::BF16: return add_typed(Bf16{}, call, slot, tokens, count, inner);
    case DType::F16: return add_typed(F16{}, call, slot, tokens, count, inner);
    default: return add_typed(F32{}, call, slot, tokens, count, inner);
  }
}

}  // namespace

const AdapterKernels& adapter_kernels_here() {
  static constexpr AdapterKernels kernels{add};
  return kernels;
}

}  // namespace HP_ISA
}  // namespace hp
