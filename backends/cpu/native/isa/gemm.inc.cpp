// Micro-kernels of the linear layers, compiled once per instruction set.
#include <utility>

#include "activations.hpp"
#include "gemm.hpp"
#include "simd.hpp"
#if defined(__AMX_BF16__)
#include "amx.hpp"
#endif

namespace hp::HP_ISA {
namespace {

constexpr int kTileVectors = kTileColumns / kLanes;
constexpr int kGroupColumns = kGroupTiles * kTileColumns;

// Rows and tiles of one register block. The accumulators (rows x tiles x vectors of a tile) must hide the latency of the
// multiply-add (6 cycles for the BF16 dot product on Zen 5, two per cycle) and leave registers for operands.
#if HP_VW == 16
constexpr int kRows = 12, kTiles = 2;
#elif HP_VW == 8
constexpr int kRows = 6, kTiles = 1;
#else
constexpr int kRows = 2, kTiles = 1;
#endif

// How far ahead of what it multiplies an item of one block of rows brings its weights (measured on Zen 3, one and two threads: 2048 is better
// than 1024 and 4096); 0: it brings the next item's.
constexpr int64_t kAheadBytes = HP_VW == 8 ? 2048 : 0;

#if defined(HP_SIMD_AVX512BF16)
constexpr bool kBf16Dot = true;
#else
constexpr bool kBf16Dot = false;
#endif

// Rows of x, addressed from every third one: base + {0, 1, 2} * stride are addressing modes, so that twelve rows need four
// registers and not twelve.
template <class X, int MR>
struct Rows {
  const X* base[(MR + 2) / 3];
  int64_t stride;
  Rows(const X* x, int64_t stride) : stride(stride) {
    for (int b = 0; b < (MR + 2) / 3; ++b) base[b] = x + 3 * b * stride;
  }
  const X* at(int row, int64_t i) const { return base[row / 3] + row % 3 * stride + i; }
};

// For formats whose arithmetic takes subnormal numbers as they are.
struct AllNumbers {};

#if defined(HP_SIMD_AVX512)
// While one lives, its thread computes as the BF16 dot product does: subnormal operands count as zeros, and subnormal results become zeros.
class NormalNumbers {
 public:
  NormalNumbers() : before_(_mm_getcsr()) { _mm_setcsr(before_ | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON); }
  ~NormalNumbers() { _mm_setcsr(before_); }
  NormalNumbers(const NormalNumbers&) = delete;

 private:
  unsigned before_;
};
#endif

// Weight formats: X is the element of a row of x, kStep the k terms that one step consumes.
struct F32Format {
  using X = float;
  using Numbers = AllNumbers;
  static constexpr int kStep = 1, kStepBytes = 64;
  template <int MR, int NT>
  HP_HOT static inline void step(const Rows<X, MR>& x, int64_t i, const char* const* w, vf (&acc)[MR][NT][kTileVectors]) {
    vf b[NT][kTileVectors];
#pragma GCC unroll 16
    for (int t = 0; t < NT; ++t)
#pragma GCC unroll 4
      for (int v = 0; v < kTileVectors; ++v) b[t][v] = load(reinterpret_cast<const float*>(w[t] + i * kStepBytes) + v * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r) {
      const vf a = splat(*x.at(r, i));
#pragma GCC unroll 16
      for (int t = 0; t < NT; ++t)
#pragma GCC unroll 4
        for (int v = 0; v < kTileVectors; ++v) acc[r][t][v] = fma(a, b[t][v], acc[r][t][v]);
    }
  }
};

struct F16Format {
  using X = float;
  using Numbers = AllNumbers;
  static constexpr int kStep = 1, kStepBytes = 32;
  template <int MR, int NT>
  HP_HOT static inline void step(const Rows<X, MR>& x, int64_t i, const char* const* w, vf (&acc)[MR][NT][kTileVectors]) {
    vf b[NT][kTileVectors];
#pragma GCC unroll 16
    for (int t = 0; t < NT; ++t)
#pragma GCC unroll 4
      for (int v = 0; v < kTileVectors; ++v) b[t][v] = load(F16{}, reinterpret_cast<const uint16_t*>(w[t] + i * kStepBytes) + v * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r) {
      const vf a = splat(*x.at(r, i));
#pragma GCC unroll 16
      for (int t = 0; t < NT; ++t)
#pragma GCC unroll 4
        for (int v = 0; v < kTileVectors; ++v) acc[r][t][v] = fma(a, b[t][v], acc[r][t][v]);
    }
  }
};

#if defined(HP_SIMD_AVX512BF16)
struct Bf16Format {
  using X = uint16_t;
  using Numbers = AllNumbers;
  static constexpr int kStep = 2, kStepBytes = 64;
  template <int MR, int NT>
  HP_HOT static inline void step(const Rows<X, MR>& x, int64_t i, const char* const* w, vf (&acc)[MR][NT][kTileVectors]) {
    vu b[NT];
#pragma GCC unroll 16
    for (int t = 0; t < NT; ++t) b[t] = load_pairs(reinterpret_cast<const uint16_t*>(w[t] + i * kStepBytes));
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r) {
      uint32_t pair;
      std::memcpy(&pair, x.at(r, 2 * i), 4);
      const vu a = vu{} + pair;
#pragma GCC unroll 16
      for (int t = 0; t < NT; ++t) acc[r][t][0] = dot_bf16(acc[r][t][0], a, b[t]);
    }
  }
};
#else
// The same, bit for bit, where the vectors are of the dot product's width.
struct Bf16Format {
  using X = float;
#if defined(HP_SIMD_AVX512)
  using Numbers = NormalNumbers;
#else
  using Numbers = AllNumbers;
#endif
  static constexpr int kStep = 2, kStepBytes = 64;
  template <int MR, int NT>
  HP_HOT static inline void step(const Rows<X, MR>& x, int64_t i, const char* const* w, vf (&acc)[MR][NT][kTileVectors]) {
    vu pairs[NT][kTileVectors];
#pragma GCC unroll 16
    for (int t = 0; t < NT; ++t)
#pragma GCC unroll 4
      for (int v = 0; v < kTileVectors; ++v) {
        pairs[t][v] = load_pairs(reinterpret_cast<const uint16_t*>(w[t] + i * kStepBytes) + v * kLanes * 2);
        // Where registers are left: a second load of it would take the place of one that looks further ahead.
        if constexpr (MR <= 2) keep_in_register(pairs[t][v]);
      }
#pragma GCC unroll 2
    for (int odd = 1; odd >= 0; --odd) {
      vf b[NT][kTileVectors];
#pragma GCC unroll 16
      for (int t = 0; t < NT; ++t)
#pragma GCC unroll 4
        for (int v = 0; v < kTileVectors; ++v) b[t][v] = bits_to_float(odd ? pairs[t][v] & 0xffff0000u : pairs[t][v] << 16);
#pragma GCC unroll 16
      for (int r = 0; r < MR; ++r) {
        const vf a = splat(*x.at(r, 2 * i + odd));
#pragma GCC unroll 16
        for (int t = 0; t < NT; ++t)
#pragma GCC unroll 4
          for (int v = 0; v < kTileVectors; ++v) acc[r][t][v] = fma(a, b[t][v], acc[r][t][v]);
      }
    }
  }
};
#endif

// Lines that a micro-kernel brings to the second-level cache: `per_step` in each of its first steps.
struct Fetched {
  const char* data = nullptr;
  int64_t steps = 0;
  int per_step = 0;
  bool far = false;  // nothing has read their pages lately
};

constexpr int64_t kPageBytes = 4096;

HP_INLINE void read_line(const char* line) { asm volatile("" : : "r"(*line)); }

// The lines that an item's micro-kernels bring, in their order: first those of weights, then the call's lines ahead.
class Fetching {
 public:
  // `lines`: of weights, from `tiles` on (or null) in the order in which they are read. `steps`: of all the item's micro-kernels.
  Fetching(const LinearItem& item, const char* tiles, int64_t lines, int64_t steps)
      : tiles_(tiles), per_step_(static_cast<int>(ceil_div(lines, steps))), tile_steps_(tiles ? lines / per_step_ : 0),
        at_(item.ahead_begin), end_(item.ahead_end) {
    if (at_ == end_) return;
    span_ = item.call->ahead;
    while (span_->end <= at_) ++span_;
  }

  // Those of a micro-kernel of so many steps.
  Fetched next(int64_t steps) {
    if (tile_steps_ > 0) {
      const Fetched found{tiles_, tile_steps_ < steps ? tile_steps_ : steps, per_step_, false};
      tiles_ += found.steps * per_step_ * kLineBytes;
      tile_steps_ -= found.steps;
      return found;
    }
    if (at_ == end_) return {};
    const int64_t left = (span_->end < end_ ? span_->end : end_) - at_;
    const Fetched found{span_->data + (at_ - span_->begin) * kLineBytes, left < steps ? left : steps, 1, true};
    at_ += found.steps;
    if (at_ == span_->end) ++span_;
    return found;
  }

 private:
  const char* tiles_;
  int per_step_;
  int64_t tile_steps_;
  int64_t at_, end_;
  const LineSpan* span_ = nullptr;
};

// c: [MR, kGroupColumns].
template <class Format, int MR, int NT>
void micro_kernel(const typename Format::X* x, int64_t x_stride, const char* tiles, int64_t tile_stride, int64_t steps,
                  const Fetched& fetched, float* c) {
  vf acc[MR][NT][kTileVectors];
  const Rows<typename Format::X, MR> rows(x, x_stride);
  const char* w[NT];
#pragma GCC unroll 16
  for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 16
    for (int t = 0; t < NT; ++t)
#pragma GCC unroll 4
      for (int v = 0; v < kTileVectors; ++v) acc[r][t][v] = vf{};
  }
#pragma GCC unroll 16
  for (int t = 0; t < NT; ++t) w[t] = tiles + t * tile_stride;

  const char* line = fetched.data;
  const int64_t fetching = fetched.steps;
  const int per_step = kTiles == 1 ? 1 : fetched.per_step;  // of one tile a step reads one line at most: known to the compiler, no loop
  int64_t i = 0;
  while (i < fetching) {
    int64_t end = fetching;
    if (fetched.far) {
      // A processor may drop requests where it has no translation of the page's address at hand (Zen 5 does): a read brings that.
      read_line(line);
      const int64_t left = (kPageBytes - reinterpret_cast<uintptr_t>(line) % kPageBytes + kLineBytes - 1) / kLineBytes;
      if (i + left < end) end = i + left;
    }
    for (; i < end; ++i) {
      for (int p = 0; p < per_step; ++p, line += kLineBytes) __builtin_prefetch(line, 0, 2);
      Format::template step<MR, NT>(rows, i, w, acc);
    }
  }
  for (; i < steps; ++i) Format::template step<MR, NT>(rows, i, w, acc);

#pragma GCC unroll 16
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 16
    for (int t = 0; t < NT; ++t)
#pragma GCC unroll 4
      for (int v = 0; v < kTileVectors; ++v) store(c + r * kGroupColumns + t * kTileColumns + v * kLanes, acc[r][t][v]);
}

template <class Format>
using MicroKernel = void (*)(const typename Format::X*, int64_t, const char*, int64_t, int64_t, const Fetched&, float*);

template <class Format>
struct MicroKernelTable {
  MicroKernel<Format> entry[kRows][kTiles];
};

template <class Format, int... R>
constexpr MicroKernelTable<Format> micro_kernel_table(std::integer_sequence<int, R...>) {
  if constexpr (kTiles == 2) return {{{micro_kernel<Format, R + 1, 1>, micro_kernel<Format, R + 1, 2>}...}};
  else return {{{micro_kernel<Format, R + 1, 1>}...}};
}

template <class Format>
MicroKernel<Format> micro_kernel_for(int rows, int tiles) {
  static constexpr auto table = micro_kernel_table<Format>(std::make_integer_sequence<int, kRows>());
  return table.entry[rows - 1][tiles - 1];
}

// Stores rows of an item's sums, [rows, kGroupColumns], after bias, cap and an activation, in one pass.
template <class T, class F>
HP_INLINE void store_activated(T type, const LinearItem& item, int64_t row, int rows, int columns, const float* c, F&& activation) {
  const LinearCall& call = *item.call;
  const int64_t first = item.tile * kTileColumns;
  const float* bias = call.bias ? call.bias + first : nullptr;
  for (int r = 0; r < rows; ++r) {
    typename T::type* out = static_cast<typename T::type*>(call.out) + (row + r) * call.out_stride + first;
    for (int j = 0; j < columns; j += kLanes) {
      const int n = columns - j < kLanes ? columns - j : kLanes;
      vf value = load(c + r * kGroupColumns + j);
      if (bias) value += n == kLanes ? load(bias + j) : load_first(F32{}, bias + j, n);
      value = activation(soft_cap(value, call.soft_cap));
      if (n == kLanes) store(type, out + j, value);
      else store_first(type, out + j, value, n);
    }
  }
}

template <class T>
void store_rows(T type, const LinearItem& item, int64_t row, int rows, int columns, const float* c) {
  switch (item.call->epilogue) {
    case Epilogue::Gelu: return store_activated(type, item, row, rows, columns, c, [&](vf y) { return gelu(type, y); });
    case Epilogue::GeluTanh: return store_activated(type, item, row, rows, columns, c, [&](vf y) { return gelu_tanh(type, y); });
    case Epilogue::Silu: return store_activated(type, item, row, rows, columns, c, [&](vf y) { return silu(type, y); });
    default: return store_activated(type, item, row, rows, columns, c, [](vf y) { return y; });
  }
}

bool is_stored(Epilogue e) {
  return e == Epilogue::Store || e == Epilogue::Gelu || e == Epilogue::GeluTanh || e == Epilogue::Silu;
}

// Stores rows of an item's gated pairs of tiles.
template <class T>
void store_gated(T type, const LinearItem& item, int64_t row, int rows, const float* c) {
  const LinearCall& call = *item.call;
  const int64_t first = item.tile / 2 * kTileColumns, left = call.out_columns - first;
  const int width = item.tile_count / 2 * kTileColumns, columns = left < width ? static_cast<int>(left) : width;
  for (int r = 0; r < rows; ++r) {
    typename T::type* out = static_cast<typename T::type*>(call.out) + (row + r) * call.out_stride + first;
    const float* y = c + r * kGroupColumns;
    for (int j = 0; j < columns; j += kLanes) {
      const float* gates = y + j / kTileColumns * 2 * kTileColumns + j % kTileColumns;
      const vf value = gated(type, load(gates), load(gates + kTileColumns), call.epilogue);
      if (columns - j >= kLanes) store(type, out + j, value);
      else store_first(type, out + j, value, columns - j);
    }
  }
}

float greatest(const float* y, int columns) {
  float top = -__builtin_inff();
  if (columns == kGroupColumns) {
    vf m = splat(top);
    for (int j = 0; j < kGroupColumns; j += kLanes) m = max(load(y + j), m);
    top = hmax(m);
  } else {
    for (int j = 0; j < columns; ++j) top = y[j] > top ? y[j] : top;
  }
  return top;
}

void update_arg_max(const float* y, int columns, int64_t first_column, float top, float* best, int32_t* best_column) {
  // Work items come in any order: on equal values the lower column wins explicitly. A NaN never wins.
  if (!(top >= *best)) return;
  for (int j = 0; j < columns; ++j)
    if (y[j] == top) {
      const int32_t column = static_cast<int32_t>(first_column + j);
      if (top > *best || column < *best_column) *best_column = column;
      *best = top;
      return;
    }
}

HP_INLINE bool is_finite(float x) { return __builtin_fabsf(x) < __builtin_inff(); }

// Adds e^x, for x <= 0, to a sum: the term's relative error is below 3e-7, and of x below -87, minus infinity too, it is below 2e-38.
// A NaN stays one. A minimax polynomial of 2^f over [-0.5, 0.5], 1 at 0; the shift leaves 2^n of n + 127 in the lowest bits.
HP_INLINE vf add_exp(vf sum, vf x) {
  constexpr float kLog2E = 1.44269504088896341f, kRound = 12582912.0f + 127.0f;
  x = max(splat(-87.0f), x);
  const vf shifted = fma(x, splat(kLog2E), splat(kRound));
  const vf f = fma(x, splat(kLog2E), kRound - shifted);
  vf p = splat(1.32764725e-3f);
  p = fma(p, f, splat(9.67554096e-3f));
  p = fma(p, f, splat(5.55071309e-2f));
  p = fma(p, f, splat(2.40221202e-1f));
  p = fma(p, f, splat(6.93146944e-1f));
  p = fma(p, f, splat(1.0f));
  return fma(p, bits_to_float(float_to_bits(shifted) << 23), sum);
}

// Of a row whose greatest value is not finite.
float sum_of_exp(const float* y) {
  vf sum{};
  for (int j = 0; j < kGroupColumns; j += kLanes) sum += exp(load(y + j));
  return hsum(sum);
}

// Writes the summaries of `rows` rows of values c, of which `columns` are of the weight.
void summarise(const LinearItem& item, int64_t row, int rows, int columns, float* c) {
  const LinearCall& call = *item.call;
  const int64_t first = item.tile * kTileColumns, at = item.tile / kGroupTiles * call.m + row;
  for (int begin = 0; begin < rows; begin += kLanes) {
    const int count = rows - begin < kLanes ? rows - begin : kLanes;
    const int64_t first_row = row + begin;
    float* values = c + begin * kGroupColumns;
    vf of_rows[kLanes], counts[kLanes];
    for (int r = 0; r < kLanes; ++r) {
      of_rows[r] = splat(-__builtin_inff());
      counts[r] = vf{};
    }
    for (int r = 0; r < count; ++r) {
      float* y = values + r * kGroupColumns;
      for (int j = columns; j < kGroupColumns; ++j) y[j] = -__builtin_inff();
#pragma GCC unroll 16
      for (int j = 0; j < kGroupColumns; j += kLanes) of_rows[r] = max(load(y + j), of_rows[r]);
    }
    float top[kLanes], sums[kLanes];
    const vf best = hmax_rows(of_rows);
    store(top, best);
    for (int r = 0; r < count; ++r) {
      const float* y = values + r * kGroupColumns;
      update_arg_max(y, columns, first, top[r], item.best + first_row + r, item.best_column + first_row + r);
      const vf reference = splat(top[r]), picked = splat(call.picked[first_row + r]);
      vf sum{};
      vi above{};
#pragma GCC unroll 16
      for (int j = 0; j < kGroupColumns; j += kLanes) {
        const vf v = load(y + j);
        sum = add_exp(sum, v - reference);
        above = count_greater(above, v, picked);
      }
      of_rows[r] = sum;
      counts[r] = __builtin_convertvector(above, vf);
    }
    store(sums, hsum_rows(of_rows));
    for (int r = 0; r < count; ++r)
      if (!is_finite(top[r])) sums[r] = sum_of_exp(values + r * kGroupColumns);
    const vi above = __builtin_convertvector(hsum_rows(counts), vi);
    const size_t bytes = static_cast<size_t>(count) * 4;
    std::memcpy(call.summaries.best + at + begin, top, bytes);
    std::memcpy(call.summaries.sum + at + begin, sums, bytes);
    std::memcpy(call.summaries.above + at + begin, &above, bytes);
  }
}

void join_summaries(const GroupSummaries& groups, int64_t num_groups, int64_t m, int64_t begin, int64_t end, const RowSummaries& out) {
  for (int64_t i = begin; i < end; i += kLanes) {
    const int count = static_cast<int>(end - i < kLanes ? end - i : kLanes);
    const auto of_group = [&](const float* values, int64_t g) {
      const float* from = values + g * m + i;
      return count == kLanes ? load(from) : load_first(F32{}, from, count);
    };
    vf top = splat(-__builtin_inff());
    for (int64_t g = 0; g < num_groups; ++g) top = max(of_group(groups.best, g), top);
    const vf reference = bits_to_float(float_to_bits(top) & reinterpret_cast<vu>(top > -__builtin_inff() & top < __builtin_inff()));
    vf total{};
    vi above{};
    for (int64_t g = 0; g < num_groups; ++g) {
      total += of_group(groups.sum, g) * exp(of_group(groups.best, g) - reference);
      vi counts{};
      std::memcpy(&counts, groups.above + g * m + i, static_cast<size_t>(count) * 4);
      above += counts;
    }
    for (int r = 0; r < count; ++r) {
      const bool has_nan = total[r] != total[r];
      out.best[i + r] = top[r];
      out.log_sum[i + r] = has_nan ? total[r] : is_finite(top[r]) ? top[r] + __builtin_logf(total[r]) : top[r];
      out.above[i + r] = above[r];
    }
  }
}

// c: [rows, kGroupColumns] sums of the item's tiles; row 0 is row `row` of the call.
void finish(const LinearItem& item, int64_t row, int rows, float* c) {
  const LinearCall& call = *item.call;
  const int tiles = item.tile_count;
  const int64_t first = item.tile * kTileColumns;
  const int width = tiles * kTileColumns;
  const int64_t remaining = call.weight.n - first;
  const int columns = remaining < width ? static_cast<int>(remaining) : width;
  for (int r = 0; call.added && r < rows; ++r) {
    if (!call.has_added[row + r]) continue;
    float* y = c + r * kGroupColumns;
    const float* added = call.added + (row + r) * call.added_stride + first;
    for (int j = 0; j < width; j += kLanes) store(y + j, load(y + j) + load(added + j));
  }
  if (is_stored(call.epilogue)) {
    switch (call.out_dtype) {
      case DType::F32: return store_rows(F32{}, item, row, rows, columns, c);
      case DType::BF16: return store_rows(Bf16{}, item, row, rows, columns, c);
      case DType::F16: return store_rows(F16{}, item, row, rows, columns, c);
    }
  }
  if (call.bias || call.soft_cap > 0) {
    for (int r = 0; r < rows; ++r) {
      float* y = c + r * kGroupColumns;
      for (int j = 0; j < columns; j += kLanes) {
        const int n = columns - j < kLanes ? columns - j : kLanes;
        vf value = load(y + j);
        if (call.bias) value += n == kLanes ? load(call.bias + first + j) : load_first(F32{}, call.bias + first + j, n);
        store(y + j, soft_cap(value, call.soft_cap));
      }
    }
  }
  if (is_gated(call.epilogue)) {
    switch (call.out_dtype) {
      case DType::F32: return store_gated(F32{}, item, row, rows, c);
      case DType::BF16: return store_gated(Bf16{}, item, row, rows, c);
      case DType::F16: return store_gated(F16{}, item, row, rows, c);
    }
  }
  if (call.epilogue == Epilogue::Summary) return summarise(item, row, rows, columns, c);
  for (int r = 0; r < rows; ++r) {
    float* y = c + r * kGroupColumns;
    const int64_t out_row = (row + r) * call.out_stride;
    switch (call.epilogue) {
      case Epilogue::Store:
      case Epilogue::Gelu:
      case Epilogue::GeluTanh:
      case Epilogue::Silu: break;
      case Epilogue::AddResidual: {
        float* out = static_cast<float*>(call.out) + out_row + first;
        int j = 0;
        for (; j + kLanes <= columns; j += kLanes) store(out + j, load(out + j) + load(y + j));
        for (; j < columns; ++j) out[j] += y[j];
        break;
      }
      case Epilogue::SiluMul:
      case Epilogue::GeluMul:
      case Epilogue::GeluTanhMul:
      case Epilogue::ClampedSwiGluMul: break;
      case Epilogue::ArgMax: {
        update_arg_max(y, columns, first, greatest(y, columns), item.best + row + r, item.best_column + row + r);
        break;
      }
      case Epilogue::Pick: {
        const int64_t column = call.targets[row + r] - first;
        if (column >= 0 && column < columns) call.picked[row + r] = y[column];
        break;
      }
      case Epilogue::Summary: break;
    }
  }
}

template <class Format>
void run_item_as(const LinearItem& item) {
  const PackedWeight& weight = item.call->weight;
  const int64_t stride = tile_bytes(weight.k, weight.dtype);
  const int64_t steps = ceil_div(weight.k, Format::kStep);
  const char* tiles = static_cast<const char*>(weight.tiles) + item.tile * stride;
  const int count = item.tile_count;
  const auto* x = static_cast<const typename Format::X*>(item.x);

  // Blocks as equal as possible: 14 rows are 7 + 7, not 12 + 2, which would not hide the latency.
  const int64_t rows = item.row_end - item.row_begin;
  const int64_t blocks = ceil_div(rows, kRows);
  const int64_t bytes = stride * count, own_ahead = blocks == 1 && Format::kStepBytes == kLineBytes && bytes > kAheadBytes ? kAheadBytes : 0;
  Fetching fetching(item, own_ahead ? tiles + own_ahead : item.prefetch, (bytes - own_ahead) / kLineBytes, blocks * ceil_div(count, kTiles) * steps);

  alignas(64) float c[kRows * kGroupColumns];
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t begin = item.row_begin + rows * b / blocks, end = item.row_begin + rows * (b + 1) / blocks;
    const int block_rows = static_cast<int>(end - begin);
    for (int t = 0; t < count; t += kTiles) {
      const int block_tiles = count - t < kTiles ? count - t : kTiles;
      [[maybe_unused]] const typename Format::Numbers numbers{};
      micro_kernel_for<Format>(block_rows, block_tiles)(x + begin * item.x_stride, item.x_stride, tiles + t * stride, stride, steps,
                                                        fetching.next(steps), c + t * kTileColumns);
    }
    if (item.prefetch)
      for (int64_t line = 0; line < own_ahead; line += kLineBytes) __builtin_prefetch(item.prefetch + line, 0, 2);
    finish(item, begin, block_rows, c);
  }
}

#if defined(__AMX_BF16__)
constexpr int kStepTerms = 32;  // of k, that one tile multiplication consumes
constexpr int kStepBytes = kStepTerms * kTileColumns * 2;
constexpr int kBlockRows = 2 * kTileRegisterRows;
constexpr int kPanelBlocks = 8;
constexpr int64_t kNearBytes = 40 << 10;  // of the first-level cache, for weights

// One step of a block of 16 * RT rows at x and NT tiles of columns at w. Registers 0 to 3 hold the sums, [RT][NT], 4 and 5 rows of x,
// 5 (where it is free) to 7 weights.
template <int RT, int NT>
HP_INLINE void tile_step(const char* x, int64_t x_stride, const char* const* w, int64_t offset) {
  static_assert(RT * NT <= 4 && (RT == 1 || NT <= 2));
  // Of two tiles of rows other blocks follow: their bytes must not take the weights' place in the first-level cache.
  if constexpr (RT == 2)
    _tile_stream_loadd(4, x, x_stride);
  else
    _tile_loadd(4, x, x_stride);
  _tile_loadd(6, w[0] + offset, kTileRegisterBytes);
  _tile_dpbf16ps(0, 4, 6);
  if constexpr (NT > 1) {
    _tile_loadd(7, w[1] + offset, kTileRegisterBytes);
    _tile_dpbf16ps(1, 4, 7);
  }
  if constexpr (RT == 2) {
    _tile_stream_loadd(5, x + kTileRegisterRows * x_stride, x_stride);
    _tile_dpbf16ps(2, 5, 6);
    if constexpr (NT > 1) _tile_dpbf16ps(3, 5, 7);
  } else {
    if constexpr (NT > 2) {
      _tile_loadd(5, w[2] + offset, kTileRegisterBytes);
      _tile_dpbf16ps(2, 4, 5);
    }
    if constexpr (NT > 3) {
      _tile_loadd(6, w[3] + offset, kTileRegisterBytes);
      _tile_dpbf16ps(3, 4, 6);
    }
  }
}

// c: [rows, kGroupColumns]. x: rows of `terms` elements. `prefetch_lines` cache lines are prefetched per step from `prefetch` on.
template <int RT, int NT>
void tile_kernel(const char* x, int64_t x_stride, int rows, int64_t terms, const char* tiles, int64_t tile_stride, const char* prefetch,
                 int prefetch_lines, float* c) {
  const char* w[NT];
  for (int t = 0; t < NT; ++t) w[t] = tiles + t * tile_stride;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const int64_t steps = terms / kStepTerms, rest = terms % kStepTerms;
  for (int64_t i = 0; i < steps; ++i) {
    for (int p = 0; p < prefetch_lines; ++p, prefetch += 64) __builtin_prefetch(prefetch, 0, 2);
    tile_step<RT, NT>(x + i * kTileRegisterBytes, x_stride, w, i * kStepBytes);
  }
  if (rest) {
    // The last step's terms with zeros after them.
    alignas(64) char last_x[RT * kTileRegisterRows][kTileRegisterBytes] = {};
    alignas(64) char last_w[NT][kStepBytes] = {};
    for (int r = 0; r < rows; ++r)
      std::memcpy(last_x[r], x + r * x_stride + steps * kTileRegisterBytes, static_cast<size_t>(rest) * 2);
    for (int t = 0; t < NT; ++t) {
      std::memcpy(last_w[t], w[t] + steps * kStepBytes, static_cast<size_t>(rest) * kTileColumns * 2);
      w[t] = last_w[t];
    }
    TileRegisters::settle_memory();
    tile_step<RT, NT>(last_x[0], kTileRegisterBytes, w, 0);
  }
  constexpr int64_t kStride = kGroupColumns * 4;
  _tile_stored(0, c, kStride);
  if constexpr (NT > 1) _tile_stored(1, c + kTileColumns, kStride);
  if constexpr (RT == 2) {
    _tile_stored(2, c + kTileRegisterRows * kGroupColumns, kStride);
    if constexpr (NT > 1) _tile_stored(3, c + kTileRegisterRows * kGroupColumns + kTileColumns, kStride);
  } else {
    if constexpr (NT > 2) _tile_stored(2, c + 2 * kTileColumns, kStride);
    if constexpr (NT > 3) _tile_stored(3, c + 3 * kTileColumns, kStride);
  }
}

using TileKernel = void (*)(const char*, int64_t, int, int64_t, const char*, int64_t, const char*, int, float*);

void run_bf16_item(const LinearItem& item) {
  static constexpr TileKernel kOneTileOfRows[] = {tile_kernel<1, 1>, tile_kernel<1, 2>, tile_kernel<1, 3>, tile_kernel<1, 4>};
  static constexpr TileKernel kTwoTilesOfRows[] = {tile_kernel<2, 1>, tile_kernel<2, 2>};
  const PackedWeight& weight = item.call->weight;
  const int64_t terms = k_padded(weight.k, weight.dtype), stride = tile_bytes(weight.k, weight.dtype), x_stride = item.x_stride * 2;
  const char* tiles = static_cast<const char*>(weight.tiles) + item.tile * stride;
  const int count = item.tile_count;
  // Blocks as equal as possible, for the registers are given another shape where the last one is smaller.
  const int64_t all = item.row_end - item.row_begin, blocks = ceil_div(all, kBlockRows), block_rows = ceil_div(all, blocks);
  const int width = block_rows > kTileRegisterRows ? 2 : kGroupTiles;
  // Where they fit, a pair of tiles of columns stays in the first-level cache while all rows of a panel pass by it.
  const int64_t panel_rows = (width * stride <= kNearBytes ? kPanelBlocks : 1) * block_rows, panel_lines = stride * count / 64;
  // One tile of rows is bound by the weights' bytes, which the processor's own prefetcher brings in order: ours would take its place.
  const char* prefetch = all > kTileRegisterRows ? item.prefetch : nullptr;
  const char* const prefetch_end = prefetch ? prefetch + panel_lines * 64 : nullptr;
  const int lines = static_cast<int>(ceil_div(panel_lines, blocks * ceil_div(count, width) * ceil_div(terms, kStepTerms)));

  TileRegisters registers;
  registers.shape(5, 3, kTileRegisterRows);
  int shaped_rows = 0;
  alignas(64) float c[kPanelBlocks * kBlockRows * kGroupColumns];
  for (int64_t panel = item.row_begin; panel < item.row_end; panel += panel_rows) {
    const int64_t end = item.row_end - panel < panel_rows ? item.row_end : panel + panel_rows;
    for (int t = 0; t < count; t += width) {
      const int n = count - t < width ? count - t : width;
      for (int64_t begin = panel; begin < end; begin += block_rows) {
        const int rows = static_cast<int>(end - begin < block_rows ? end - begin : block_rows);
        const bool two = rows > kTileRegisterRows;
        if (rows != shaped_rows) {
          registers.shape(0, two ? 2 : 5, two ? kTileRegisterRows : rows);
          if (two) {
            registers.shape(2, 2, rows - kTileRegisterRows);
            registers.shape(4, 1, kTileRegisterRows);
            registers.shape(5, 1, rows - kTileRegisterRows);
          } else {
            registers.shape(5, 1, kTileRegisterRows);
          }
          registers.load();
          shaped_rows = rows;
        }
        const TileKernel kernel = two ? kTwoTilesOfRows[n - 1] : kOneTileOfRows[n - 1];
        kernel(static_cast<const char*>(item.x) + begin * x_stride, x_stride, rows, terms, tiles + t * stride, stride, prefetch,
               prefetch < prefetch_end ? lines : 0, c + (begin - panel) * kGroupColumns + t * kTileColumns);
        if (prefetch) prefetch += lines * (terms / kStepTerms) * 64;
      }
    }
    finish(item, panel, static_cast<int>(end - panel), c);
  }
}
#else
void run_bf16_item(const LinearItem& item) { run_item_as<Bf16Format>(item); }
#endif

int64_t fetching_steps(const PackedWeight& weight, int64_t m) {
#if defined(__AMX_BF16__)
  if (weight.dtype == DType::BF16) return 0;
#endif
  const int64_t step = weight.dtype == DType::BF16 ? Bf16Format::kStep : 1;
  return ceil_div(m, kRows) * ceil_div(num_tiles(weight.n), kTiles) * ceil_div(weight.k, step);
}

void run_item(const LinearItem& item) {
  switch (item.call->weight.dtype) {
    case DType::BF16: return run_bf16_item(item);
#if defined(HP_SIMD_AVX512BF16)
    // For them this level has no other instructions than avx512, whose code is not compiled once more.
    default: return avx512::linear_kernels().run_item(item);
#else
    case DType::F32: return run_item_as<F32Format>(item);
    case DType::F16: return run_item_as<F16Format>(item);
#endif
  }
}

template <class T>
void widen_as(T type, const typename T::type* src, int64_t n, float* dst) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(dst + i, load(type, src + i));
  if (i < n) store_first(F32{}, dst + i, load_first(type, src + i, static_cast<int>(n - i)), static_cast<int>(n - i));
}

void widen(const void* src, DType dtype, int64_t n, float* dst) {
  switch (dtype) {
    case DType::F32: return widen_as(F32{}, static_cast<const float*>(src), n, dst);
    case DType::BF16: return widen_as(Bf16{}, static_cast<const uint16_t*>(src), n, dst);
    case DType::F16: return widen_as(F16{}, static_cast<const uint16_t*>(src), n, dst);
  }
}

void pack_tile(const uint32_t* rows, int64_t stride, int64_t groups, uint32_t* tile) {
  int64_t g = 0;
  for (; g + kLanes <= groups; g += kLanes)
    for (int first = 0; first < kTileColumns; first += kLanes) {
      vf square[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) std::memcpy(&square[i], rows + (first + i) * stride + g, sizeof(vf));
      transpose(square);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) std::memcpy(tile + (g + i) * kTileColumns + first, &square[i], sizeof(vf));
    }
  for (; g < groups; ++g)
    for (int lane = 0; lane < kTileColumns; ++lane) tile[g * kTileColumns + lane] = rows[lane * stride + g];
}

}  // namespace

const LinearKernels& linear_kernels() {
  static constexpr LinearKernels kernels = {fetching_steps, kBf16Dot, run_item, widen, finish, pack_tile, join_summaries};
  return kernels;
}

}  // namespace hp::HP_ISA
