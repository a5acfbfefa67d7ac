// Kernels of adapters.hpp, compiled once per instruction set.
#include "adapters.hpp"

#include <type_traits>

#include "activations.hpp"
#include "gemm.hpp"
#include "simd.hpp"

namespace hp {
namespace HP_ISA {
namespace {

constexpr int kRanks = 4, kTokens = 4, kVectors = 4;  // register blocking: at most 16 sums at a time
constexpr int kLine = 64;

// Elements are multiplied two at a time, as pairs.
template <class T>
constexpr bool kDotsPairs = false;
#if defined(HP_SIMD_AVX512BF16)
template <>
constexpr bool kDotsPairs<Bf16> = true;
#endif

// Lines of `vectors` vectors of elements E.
template <class E, int vectors>
constexpr int kLines = vectors * kLanes * static_cast<int>(sizeof(E)) < 64 ? 1 : vectors * kLanes * static_cast<int>(sizeof(E)) / 64;

// Brings what comes after one part of an adapter to the second-level cache, a few lines at a time: matrices are mostly read for a few tokens
// alone, in pieces too short for the processor to foresee.
class Ahead {
 public:
  // Of A and B of a part.
  template <class E>
  void aim(const AdapterMatrices& m, int slot, int64_t part) {
    const int64_t rank = m.ranks[slot * m.parts_stride + part], begin = m.spans[2 * part];
    a_ = reinterpret_cast<const char*>(static_cast<const E*>(m.down) + slot * m.down_stride + part * m.max_rank * m.columns);
    a_end_ = a_ + rank * m.columns * static_cast<int64_t>(sizeof(E));
    row_ = reinterpret_cast<const char*>(static_cast<const E*>(m.up) + slot * m.up_stride + begin);
    row_bytes_ = (m.spans[2 * part + 1] - begin) * static_cast<int64_t>(sizeof(E));
    stride_ = m.rows * static_cast<int64_t>(sizeof(E));
    rows_ = rank;
    at_ = 0;
  }

  HP_INLINE_MEMBER void bring(int lines) {
    for (; lines > 0 && a_ < a_end_; --lines, a_ += kLine) __builtin_prefetch(a_, 0, 2);
    for (; lines > 0 && rows_ > 0; --lines) {
      __builtin_prefetch(row_ + at_, 0, 2);
      at_ += kLine;
      if (at_ >= row_bytes_) {
        at_ = 0;
        row_ += stride_;
        --rows_;
      }
    }
  }

 private:
  const char *a_ = nullptr, *a_end_ = nullptr, *row_ = nullptr;
  int64_t row_bytes_ = 0, stride_ = 0, rows_ = 0, at_ = 0;
};

// inner[t][r] = x[tokens[t]] . a[r] * scale, for N tokens and R rows of A: each sum has one vector of partial sums.
template <int N, int R, class T>
HP_INLINE void shrink(T type, const AdapterCall& call, const typename T::type* a, const int64_t* tokens, float scale, float* inner,
                      int64_t stride, Ahead* ahead) {
  using E = typename T::type;
  const int64_t columns = call.matrices.columns;
  const E* x[N];
  for (int t = 0; t < N; ++t) x[t] = static_cast<const E*>(call.x) + tokens[t] * call.x_stride;
  vf sums[(N * R + kLanes - 1) / kLanes * kLanes] = {};
  const auto multiply = [&](int64_t i, auto get, auto add) {
    decltype(get(a)) row[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) row[r] = get(a + r * columns + i);
#pragma GCC unroll 4
    for (int t = 0; t < N; ++t) {
      const auto v = get(x[t] + i);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) sums[t * R + r] = add(sums[t * R + r], v, row[r]);
    }
  };
  if constexpr (kDotsPairs<T>) {
    int64_t i = 0;
    for (; i + 2 * kLanes <= columns; i += 2 * kLanes) {
      if (ahead) ahead->bring(kLines<E, 2 * R>);
      multiply(i, [](const E* p) { return load_pairs(p); }, [](vf sum, auto v, auto w) { return dot_bf16(sum, v, w); });
    }
    const int left = static_cast<int>(columns - i);
    if (left) multiply(i, [left](const E* p) { return load_first_pairs(p, left); }, [](vf sum, auto v, auto w) { return dot_bf16(sum, v, w); });
  } else {
    for_vectors(columns, [&](int64_t i, int count) {
      if (ahead) ahead->bring(kLines<E, R>);
      multiply(i, [&](const E* p) { return load_some(type, p, count); }, [](vf sum, vf v, vf w) { return fma(v, w, sum); });
    });
  }
  float found[sizeof(sums) / sizeof(vf)];
#pragma GCC unroll 4
  for (int i = 0; i < N * R; i += kLanes) store(found + i, hsum_rows(sums + i) * splat(scale));
  for (int t = 0; t < N; ++t)
    for (int r = 0; r < R; ++r) inner[t * stride + r] = found[t * R + r];
}

// Where a column stands in a row of sums. A vector of columns stands together, since it is in one half of a gated pair and does not reach over
// the end of a tile there.
HP_INLINE int64_t place(const AdapterCall& call, int64_t column) {
  if (!call.gated_pair) return column;
  const int64_t half = call.matrices.rows / 2, up = column >= half, own = column - up * half;
  return (own / kTileColumns * 2 + up) * kTileColumns + own % kTileColumns;
}

// y[tokens[t]][column...] += inner[t] . b, for N tokens and V vectors of columns, the last of them with `count` elements; or, of the
// call's sums, = inner[t] . b.
template <int N, int V, class T>
HP_INLINE void expand(T type, const AdapterCall& call, const typename T::type* b, int64_t rank, const int64_t* tokens,
                      const float* inner, int64_t stride, int64_t column, int count, Ahead* ahead) {
  using E = typename T::type;
  vf sums[N][V] = {};
  for (int64_t r = 0; r < rank; ++r) {
    if (ahead) ahead->bring(kLines<E, V>);
    const E* row = b + r * call.matrices.rows + column;
    vf values[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) values[v] = load_some(type, row + v * kLanes, v + 1 < V ? kLanes : count);
#pragma GCC unroll 4
    for (int t = 0; t < N; ++t) {
      const vf h = splat(inner[t * stride + r]);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sums[t][v] = fma(h, values[v], sums[t][v]);
    }
  }
  if (call.sums) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      const int64_t at = place(call, column + v * kLanes);
      const int n = v + 1 < V ? kLanes : count;
#pragma GCC unroll 4
      for (int t = 0; t < N; ++t) {
        float* y = call.sums + tokens[t] * call.sums_stride + at;
        store_some(F32{}, y, sums[t][v], n);
      }
    }
    return;
  }
#pragma GCC unroll 4
  for (int t = 0; t < N; ++t) {
    E* y = static_cast<E*>(call.out) + tokens[t] * call.out_stride + column;
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      const int n = v + 1 < V ? kLanes : count;
      const vf sum = load_some(type, y + v * kLanes, n) + sums[t][v];
      store_some(type, y + v * kLanes, sum, n);
    }
  }
}

// Calls f(first token, how many as a constant, ahead or null) for all tokens, in the largest blocks. The first ones bring what comes after an item,
// while they bring the matrices themselves.
template <class F>
HP_INLINE void for_tokens(int count, Ahead& ahead, F&& f) {
  const auto of_first = [&](int t) { return t == 0 ? &ahead : nullptr; };
  int t = 0;
  for (; t + kTokens <= count; t += kTokens) f(t, std::integral_constant<int, kTokens>{}, of_first(t));
  if (t + 2 <= count) f(t, std::integral_constant<int, 2>{}, of_first(t)), t += 2;
  if (t < count) f(t, std::integral_constant<int, 1>{}, of_first(t));
}

// As many columns as there are blocks of V vectors from `column` on, which moves.
template <int V, class T>
HP_INLINE void expand_blocks(T type, const AdapterCall& call, const typename T::type* up, int64_t rank, const AdapterItem& item,
                             const float* inner, int64_t stride, int64_t& column, int64_t end, Ahead& ahead) {
  for (; column + V * kLanes <= end; column += V * kLanes)
    for_tokens(item.count, ahead, [&](int t, auto n, Ahead* first) {
      constexpr int tokens = n * V > kTokens * kVectors ? 1 : n;
      expand<tokens, V>(type, call, up, rank, item.tokens + t, inner + t * stride, stride, column, kLanes, first);
    });
}

// The columns from `column` on of one part, which in a gated pair are of one half.
template <class T>
HP_INLINE void expand_columns(T type, const AdapterCall& call, const typename T::type* up, int64_t rank, const AdapterItem& item,
                              const float* inner, int64_t stride, int64_t column, int64_t end, Ahead& ahead) {
  // Few tokens have room for more columns, where there are registers for them.
  if (HP_VW == 16 && item.count <= kTokens / 2) expand_blocks<2 * kVectors>(type, call, up, rank, item, inner, stride, column, end, ahead);
  expand_blocks<kVectors>(type, call, up, rank, item, inner, stride, column, end, ahead);
  for (; column < end; column += kLanes) {
    const int left = end - column < kLanes ? static_cast<int>(end - column) : kLanes;
    for_tokens(item.count, ahead, [&](int t, auto n, Ahead* first) {
      expand<n, 1>(type, call, up, rank, item.tokens + t, inner + t * stride, stride, column, left, first);
    });
  }
}

template <class T>
void add_typed(T type, const AdapterCall& call, const AdapterItem& item, const AdapterItem* next, float* inner) {
  using E = typename T::type;
  const AdapterMatrices& m = call.matrices;
  const int64_t stride = m.parts * m.max_rank, half = m.rows / 2;
  const E* down = static_cast<const E*>(m.down) + item.slot * m.down_stride;
  const E* up = static_cast<const E*>(m.up) + item.slot * m.up_stride;
  Ahead ahead;
  for (int64_t part = 0; part < m.parts; ++part) {
    const int64_t rank = m.ranks[item.slot * m.parts_stride + part];
    const float scale = m.scales[item.slot * m.parts_stride + part];
    if (rank == 0 && !call.sums) continue;
    const E* a = down + part * m.max_rank * m.columns;
    float* own = inner + part * m.max_rank;
    int64_t r = 0;
    if (part + 1 < m.parts) ahead.aim<E>(m, item.slot, part + 1);
    else if (next) ahead.aim<E>(m, next->slot, 0);
    // Few tokens have room for more ranks.
    const int64_t few = item.count <= kTokens / 2 ? rank : 0;
    for (; r + 2 * kRanks <= few; r += 2 * kRanks)
      for_tokens(item.count, ahead, [&](int t, auto n, Ahead* first) {
        constexpr int tokens = n < kTokens ? n : 1;
        shrink<tokens, 2 * kRanks>(type, call, a + r * m.columns, item.tokens + t, scale, own + t * stride + r, stride, first);
      });
    for (; r + kRanks <= rank; r += kRanks)
      for_tokens(item.count, ahead, [&](int t, auto n, Ahead* first) {
        shrink<n, kRanks>(type, call, a + r * m.columns, item.tokens + t, scale, own + t * stride + r, stride, first);
      });
    for (; r < rank; ++r)
      for_tokens(item.count, ahead, [&](int t, auto n, Ahead* first) {
        shrink<n, 1>(type, call, a + r * m.columns, item.tokens + t, scale, own + t * stride + r, stride, first);
      });
    const int64_t begin = m.spans[2 * part], end = m.spans[2 * part + 1];
    const int64_t cut = call.gated_pair && begin < half && half < end ? half : end;
    const int64_t ends[] = {cut, end};
    int64_t column = begin;
    for (const int64_t to : ends) {
      expand_columns(type, call, up, rank, item, own, stride, column, to, ahead);
      column = to;
    }
  }
}

void add(const AdapterCall& call, const AdapterItem& item, const AdapterItem* next, float* inner) {
  switch (call.matrices.dtype) {
    case DType::BF16: return add_typed(Bf16{}, call, item, next, inner);
#if defined(HP_SIMD_AVX512BF16)
    // For them this level has no other instructions than the one below, whose code is not compiled once more.
    default: return avx512::adapter_kernels_here().add(call, item, next, inner);
#else
    case DType::F16: return add_typed(F16{}, call, item, next, inner);
    default: return add_typed(F32{}, call, item, next, inner);
#endif
  }
}

}  // namespace

const AdapterKernels& adapter_kernels_here() {
  static constexpr AdapterKernels kernels{add};
  return kernels;
}

}  // namespace HP_ISA
}  // namespace hp
