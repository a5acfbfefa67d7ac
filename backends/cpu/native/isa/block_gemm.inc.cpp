// Products with weights in blocks, compiled once per instruction set; the arithmetic is that of block_weight.hpp.
#include <utility>

#include "activations.hpp"
#include "block_gemm.hpp"
#include "simd.hpp"
#if defined(__AMX_INT8__)
#include "amx.hpp"
#endif

namespace hp::HP_ISA {
namespace {

constexpr int kTileVectors = kTileColumns / kLanes;
constexpr int kGroupColumns = kGroupTiles * kTileColumns;
constexpr int kVectorBytes = kLanes * 4;
constexpr int kSteps = kBlockTerms / 4;  // dot products of four terms in a block

#if defined(__AVX512VNNI__)
constexpr int kRows = 8;
constexpr int kRowsOfPair = 6;  // with two tiles: more products are under way than one takes cycles, and a load of activations serves two
#elif HP_VW >= 8
constexpr int kRows = 4;  // a dot product is several instructions: more rows have no fewer for each
#else
constexpr int kRows = 2;
#endif

HP_INLINE vi load_ints(const void* p) {
  vi x;
  std::memcpy(&x, p, sizeof(x));
  return x;
}
HP_INLINE vi splat_int(int32_t x) { return vi{} + x; }
HP_INLINE vf to_floats(vi x) { return __builtin_convertvector(x, vf); }

// The sums of two products of 16-bit numbers in each lane.
typedef int16_t vs __attribute__((vector_size(HP_VW * 4)));
HP_INLINE vi multiply_pairs(vs a, vs b) {
#if defined(HP_SIMD_AVX512)
  return reinterpret_cast<vi>(_mm512_madd_epi16(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(HP_SIMD_AVX2)
  return reinterpret_cast<vi>(_mm256_madd_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#elif defined(HP_SIMD_SSE2)
  return reinterpret_cast<vi>(_mm_madd_epi16(reinterpret_cast<__m128i>(a), reinterpret_cast<__m128i>(b)));
#else
  vi sums;
  for (int i = 0; i < kLanes; ++i) sums[i] = int32_t{a[2 * i]} * b[2 * i] + int32_t{a[2 * i + 1]} * b[2 * i + 1];
  return sums;
#endif
}

HP_INLINE vf load_halves_as_floats(const char* p) { return load(F16{}, reinterpret_cast<const uint16_t*>(p)); }

HP_INLINE vi load_bytes(const char* p) {
  vc bytes;
  std::memcpy(&bytes, p, sizeof(bytes));
  return widen_bytes(bytes);
}

// The scales of block b of 16 rows, and what is beside them, from a tile's first scale on.
template <BlockFormat F>
HP_INLINE const char* scales_of(const char* scales, int64_t b) {
  return scales + b / block_layout(F).together * tile_scale_bytes(F);
}
template <BlockFormat F>
HP_INLINE const char* seconds(const char* of_block, int v) {
  return of_block + 16 * block_layout(F).scale_bytes + v * kLanes * 2;
}
// Vector v of the bytes that group b of 8 has beside the scales: the first or the second row of them.
template <BlockFormat F>
HP_INLINE vi group_bytes(const char* of_block, int64_t b, int row, int v) {
  return load_bytes(of_block + 16 * block_scale_bytes(F) + b % 8 * 32 + row * 16 + v * kLanes);
}

template <BlockFormat F>
HP_INLINE vf block_scale(const char* scales, int64_t b, int v) {
  const char* of_block = scales_of<F>(scales, b);
  if constexpr (block_layout(F).scale_bytes == 4) {
    return reinterpret_cast<vf>(load_ints(of_block + v * kVectorBytes));
  } else {
    const vf scale = load_halves_as_floats(of_block + v * kLanes * 2);
    if constexpr (block_layout(F).has_bytes && !block_layout(F).has_halves) return scale * to_floats(group_bytes<F>(of_block, b, 0, v));
    return scale;
  }
}

template <BlockFormat F>
HP_INLINE vf block_minimum(const char* scales, int64_t b, int v) {
  const char* of_block = scales_of<F>(scales, b);
  const vf minimum = load_halves_as_floats(seconds<F>(of_block, v));
  if constexpr (block_layout(F).has_bytes) return -minimum * to_floats(group_bytes<F>(of_block, b, 1, v));
  return minimum;
}

HP_INLINE int32_t as_integer(const float* p) {
  int32_t value;
  std::memcpy(&value, p, 4);
  return value;
}

// Vector v of 16 blocks' zero points, their 16 bits without the sign's extension; times a row's sum, negated, of the block, which 16 bits hold.
template <BlockFormat F>
HP_INLINE vi zeros(const char* scales, int v) {
  return reinterpret_cast<vi>(widen_halves(load_halves(reinterpret_cast<const uint16_t*>(seconds<F>(scales, v)))));
}
HP_INLINE vi times_zeros(vi zeros, int32_t sum) { return multiply_pairs(reinterpret_cast<vs>(zeros), reinterpret_cast<vs>(splat_int(sum))); }
HP_INLINE vi with_sign(vi halves) { return halves << 16 >> 16; }

// Vector v of the numbers of step j of a block.
template <BlockFormat F>
HP_INLINE vi numbers(const char* block, int j, int v) {
  if constexpr (block_layout(F).number_bytes < 32) {
    const vu packed = reinterpret_cast<vu>(load_ints(block + j % 4 * 64 + v * kVectorBytes));
    vu low = (j < 4 ? packed : packed >> 4) & 0x0f0f0f0fu;
    if constexpr (block_layout(F).number_bytes == 20) {
      low |= (reinterpret_cast<vu>(load_ints(block + 4 * 64 + v * kVectorBytes)) >> j & 0x01010101u) << 4;
    } else if constexpr (block_layout(F).number_bytes == 24) {
      low |= (reinterpret_cast<vu>(load_ints(block + (4 + j / 4) * 64 + v * kVectorBytes)) >> (2 * (j % 4)) & 0x03030303u) << 4;
    }
    return reinterpret_cast<vi>(low);
  } else {
    return load_ints(block + j * 64 + v * kVectorBytes);
  }
}

// Vector v of the numbers of one term of a block.
template <BlockFormat F>
HP_INLINE vi numbers_of_term(const char* block, int term, int v) {
  const int j = term / 4, byte = term % 4 * 8;
  if constexpr (block_layout(F).number_bytes < 32) {
    vu number = reinterpret_cast<vu>(load_ints(block + j % 4 * 64 + v * kVectorBytes)) >> (byte + j / 4 * 4) & 0xfu;
    if constexpr (block_layout(F).number_bytes == 20) {
      number |= (reinterpret_cast<vu>(load_ints(block + 4 * 64 + v * kVectorBytes)) >> (byte + j) & 0x1u) << 4;
    } else if constexpr (block_layout(F).number_bytes == 24) {
      number |= (reinterpret_cast<vu>(load_ints(block + (4 + j / 4) * 64 + v * kVectorBytes)) >> (byte + 2 * (j % 4)) & 0x3u) << 4;
    }
    return reinterpret_cast<vi>(number);
  } else {
    return reinterpret_cast<vi>(reinterpret_cast<vu>(load_ints(block + j * 64 + v * kVectorBytes)) >> byte & 0xffu);
  }
}

#if defined(__AVX512VNNI__) && !defined(__AMX_INT8__)
HP_INLINE const LinearKernels& plain_kernels() { return avx512::linear_kernels(); }  // this level has none
#else
HP_INLINE const LinearKernels& plain_kernels() { return linear_kernels(); }
#endif

BlockRows rows_of(const LinearItem& item) { return {const_cast<void*>(item.x), item.call->m, item.call->weight.k}; }

// Vector v of the weights of one term of a tile.
template <BlockFormat F>
HP_INLINE vf weights_of_term(const char* tile, int64_t k, int32_t term, int v) {
  const int32_t b = term / kBlockTerms, in_block = term % kBlockTerms;
  const char* scales = tile + k / kBlockTerms * tile_number_bytes(F);
  vi n = numbers_of_term<F>(tile + b * tile_number_bytes(F), in_block, v);
  n -= block_layout(F).has_zero ? with_sign(zeros<F>(scales_of<F>(scales, b), v)) : splat_int(block_layout(F).zero);
  if constexpr (block_layout(F).has_halves) n *= group_bytes<F>(scales_of<F>(scales, b), b, in_block / 16, v);
  return block_scale<F>(scales, b, v) * to_floats(n);
}

// Adds the products with a row's outliers to c: [kTiles * kTileColumns]. of_term(term)(v) is vector v of the term's weights.
template <int kTiles, class OfTerm>
HP_INLINE void add_outliers(const BlockRows& rows, int64_t row, OfTerm of_term, float* c) {
  const Outlier* one = rows.outliers + row * rows.row_outliers;
  const Outlier* const end = one + rows.outlier_counts[row];
  if (one == end) return;
  vf acc[kTiles * kTileVectors];
#pragma GCC unroll 16
  for (int v = 0; v < kTiles * kTileVectors; ++v) acc[v] = load(c + v * kLanes);
  for (; one != end; ++one) {
    const auto weights = of_term(one->term);
    const vf value = splat(one->value);
#pragma GCC unroll 16
    for (int v = 0; v < kTiles * kTileVectors; ++v) acc[v] = fma(weights(v), value, acc[v]);
  }
#pragma GCC unroll 16
  for (int v = 0; v < kTiles * kTileVectors; ++v) store(c + v * kLanes, acc[v]);
}

// Adds the products of an item's tiles with outliers of its rows. The rows have them mostly of the same terms, whose weights are expanded once.
template <BlockFormat F>
class OutlierProducts {
 public:
  OutlierProducts(const LinearItem& item, const char* tiles)
      : tiles_(tiles), k_(item.call->weight.k), stride_(block_tile_bytes(F, k_)), count_(item.tile_count),
        keeps_(item.row_end - item.row_begin >= kFewestRows) {
    if (!keeps_) return;
    std::memset(places_, 0, sizeof(places_));
    terms_[0] = -1;
  }

  // Of `count` rows from `first` on; c: [count, kGroupColumns].
  void add(const BlockRows& rows, int64_t first, int count, float* c) {
    for (int64_t row = first; row < first + count; ++row, c += kGroupColumns) {
      if (keeps_ && count_ == kGroupTiles) {
        add_outliers<kGroupTiles>(rows, row, [&](int32_t term) {
          return [from = weights_of(term)](int v) { return load(from + v * kLanes); };
        }, c);
        continue;
      }
      for (int t = 0; t < count_; ++t)
        add_outliers<1>(rows, row, [&](int32_t term) {
          return [=, tile = tiles_ + t * stride_](int v) { return weights_of_term<F>(tile, k_, term, v); };
        }, c + t * kTileColumns);
    }
  }

 private:
  static constexpr int kFewestRows = 4, kPlaces = 128, kHashes = 2048;

  HP_INLINE_MEMBER const float* weights_of(int32_t term) {
    const int place = places_[static_cast<uint32_t>(term) % kHashes];
    return terms_[place] == term ? weights_[place] : expand(term);
  }

  __attribute__((noinline)) const float* expand(int32_t term) {
    const int place = next_++ % kPlaces;
    places_[static_cast<uint32_t>(term) % kHashes] = static_cast<uint8_t>(place);
    terms_[place] = term;
    for (int v = 0; v < kGroupTiles * kTileVectors; ++v)
      store(weights_[place] + v * kLanes, weights_of_term<F>(tiles_ + v / kTileVectors * stride_, k_, term, v % kTileVectors));
    return weights_[place];
  }

  const char* tiles_;
  int64_t k_, stride_;
  int count_, next_ = 0;
  bool keeps_;
  uint8_t places_[kHashes];  // of the last term with this hash: where its weights are, if terms_ says so
  int32_t terms_[kPlaces];
  alignas(64) float weights_[kPlaces][kGroupColumns];
};

#if !defined(__AMX_INT8__)
// acc + the sum of four products: bytes of w, not negative, with those of x, signed, in each lane.
#if defined(__AVX512VNNI__)
struct Terms {
  vi x;
  HP_INLINE_MEMBER explicit Terms(const int8_t* four) {
    int32_t word;
    std::memcpy(&word, four, 4);
    x = splat_int(word);
  }
};
HP_INLINE vi dot(vi acc, vi w, const Terms& t) {
  return reinterpret_cast<vi>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(acc), reinterpret_cast<__m512i>(w), reinterpret_cast<__m512i>(t.x)));
}
#else
// Even and odd bytes as numbers of 16 bits.
struct Terms {
  vs even, odd;
  HP_INLINE_MEMBER explicit Terms(const int8_t* four) {
    even = reinterpret_cast<vs>(splat_int((four[0] & 0xffff) | four[2] * 65536));
    odd = reinterpret_cast<vs>(splat_int((four[1] & 0xffff) | four[3] * 65536));
  }
};
HP_INLINE vi dot(vi acc, vi w, const Terms& t) {
  const vs even = reinterpret_cast<vs>(w & 0x00ff00ff), odd = reinterpret_cast<vs>(reinterpret_cast<vi>(reinterpret_cast<vu>(w) >> 8) & 0x00ff00ff);
  return acc + multiply_pairs(even, t.even) + multiply_pairs(odd, t.odd);
}
#endif

HP_INLINE vi larger(vi a, vi b) { return a > b ? a : b; }
HP_INLINE int32_t largest(vi x) {
#if defined(HP_SIMD_AVX512)
  return _mm512_reduce_max_epi32(reinterpret_cast<__m512i>(x));
#else
  int32_t most = x[0];
  for (int i = 1; i < kLanes; ++i) most = x[i] > most ? x[i] : most;
  return most;
#endif
}
HP_INLINE int32_t sum_of(vi x) {
#if defined(HP_SIMD_AVX512)
  return _mm512_reduce_add_epi32(reinterpret_cast<__m512i>(x));
#else
  int32_t sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += x[i];
  return sum;
#endif
}

// The bits of the magnitude above which numbers of a row are outliers; where there are none, what is above those of every number.
template <class T>
int32_t outlier_limit(T type, const typename T::type* x, int64_t k) {
  constexpr int kSums = 4 > kBlockTerms / kLanes ? 4 : kBlockTerms / kLanes, kTerms = kSums * kLanes;
  vf squares[kSums] = {};
  int64_t i = 0;
  for (; i + kTerms <= k; i += kTerms)
#pragma GCC unroll 8
    for (int v = 0; v < kSums; ++v) {
      const vf values = load(type, x + i + v * kLanes);
      squares[v] = fma(values, values, squares[v]);
    }
  for (; i < k; i += kLanes) {
    const vf values = load(type, x + i);
    squares[0] = fma(values, values, squares[0]);
  }
  float sum = 0;
  for (const vf& lanes : squares) sum += hsum(lanes);
  if (!(sum > 1e-30f && sum < 1e38f)) return 0x7fffffff;
  const float limit = kOutlier * __builtin_sqrtf(sum / static_cast<float>(k));
  return as_integer(&limit);
}

// A bit for each lane that is greater.
HP_INLINE uint32_t lanes_above(vi x, int32_t limit) {
#if defined(HP_SIMD_AVX512)
  return _mm512_cmpgt_epi32_mask(reinterpret_cast<__m512i>(x), _mm512_set1_epi32(limit));
#else
  uint32_t found = 0;
  for (int i = 0; i < kLanes; ++i) found |= static_cast<uint32_t>(x[i] > limit) << i;
  return found;
#endif
}

// Appends the outliers of a block to row i's; returns their sum.
template <class T>
float set_aside(T type, const typename T::type* x, int64_t block, int32_t limit, const BlockRows& rows, int64_t i) {
  float sum = 0;
  int32_t count = rows.outlier_counts[i];
  for (int64_t first = block * kBlockTerms; first < (block + 1) * kBlockTerms; first += kLanes) {
    uint32_t lanes = lanes_above(reinterpret_cast<vi>(float_to_bits(load(type, x + first)) & 0x7fffffffu), limit);
    for (; lanes != 0; lanes &= lanes - 1) {
      const int64_t term = first + __builtin_ctz(lanes);
      const float value = to_float(type, x[term]);
      rows.outliers[i * rows.row_outliers + count++] = {static_cast<int32_t>(term), value};
      sum += value;
    }
  }
  rows.outlier_counts[i] = count;
  return sum;
}

template <class T>
void quantise_as(T type, const typename T::type* x, int64_t k, BlockFormat format, const BlockRows& rows, int64_t i) {
  constexpr int kVectors = kBlockTerms / kLanes;
  const BlockLayout layout = block_layout(format);
  const int64_t blocks = k / kBlockTerms;
  char* to = rows.bytes + i * rows.row_bytes;
  const int32_t limit = outlier_limit(type, x, k);
  rows.outlier_counts[i] = 0;
  const auto magnitudes = [&](int64_t block, int v) {
    return reinterpret_cast<vi>(float_to_bits(load(type, x + block * kBlockTerms + v * kLanes)) & 0x7fffffffu);
  };
  // A vector has one number of each of so many blocks.
  for (int64_t first = 0; first < blocks; first += kLanes) {
    const int count = static_cast<int>(blocks - first < kLanes ? blocks - first : kLanes);
    // Of numbers that are not negative the bits have their order, and what is not finite is above all others.
    vf greatest[kLanes], firsts[kLanes], second[kLanes];
    for (int b = 0; b < kLanes; ++b) {
      vi most{};
#pragma GCC unroll 8
      for (int v = 0; v < kVectors && b < count; ++v) most = larger(most, magnitudes(first + b, v));
      greatest[b] = reinterpret_cast<vf>(most);
    }
    vi top = hmax_bits_of_rows(greatest);
    alignas(64) float outlying[kLanes] = {};
    bool have_outliers[kLanes] = {};
    if (largest(top) > limit) {
      for (int b = 0; b < count; ++b) {
        if (top[b] <= limit) continue;
        vi most{};
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
          const vi bits = magnitudes(first + b, v);
          most = larger(most, bits > limit ? vi{} : bits);
        }
        have_outliers[b] = true;
        outlying[b] = set_aside(type, x, first + b, limit, rows, i);
        top[b] = largest(most);
      }
    }
    constexpr int32_t kInfinite = 0x7f800000, kLeast = 0x0d800000;  // 2^-100
    const vi none = top < kLeast, endless = top >= kInfinite;
    // Of a block without a greatest number that can be divided by, one: it and its quotient are masked.
    const vf most = reinterpret_cast<vf>((top & ~(none | endless)) | (0x3f800000 & (none | endless)));
    const vf scale = reinterpret_cast<vf>((reinterpret_cast<vi>(most / splat(127.0f)) & ~(none | endless)) | (0x7fc00000 & endless));
    alignas(64) float steps[kLanes];
    store(steps, reinterpret_cast<vf>(reinterpret_cast<vi>(splat(127.0f) / most) & ~(none | endless)));
    // Sums of each block, or of its halves.
    for (int b = 0; b < kLanes; ++b) {
      const vf step = splat(steps[b]);
      vi sums[2] = {};
#pragma GCC unroll 8
      for (int v = 0; v < kVectors && b < count; ++v) {
        vi q{};
        if (steps[b] > 0) {
          q = __builtin_convertvector(round_nearest(load(type, x + (first + b) * kBlockTerms + v * kLanes) * step), vi);
          if (have_outliers[b]) q &= ~(magnitudes(first + b, v) > limit);
        }
        sums[v * kLanes / 16] += q;
        const vc bytes = low_bytes(q);
        std::memcpy(to + (first + b) * kBlockTerms + v * kLanes, &bytes, sizeof(bytes));
      }
      firsts[b] = to_floats(layout.has_halves ? sums[0] : sums[0] + sums[1]);
      if (layout.has_halves) second[b] = to_floats(sums[1]);
    }
    // Whole numbers, which are exact.
    const vf total = hsum_rows(firsts);
    alignas(64) float scales[kLanes], offsets[kLanes], seconds[kLanes];
    store(scales, scale);
    store(offsets, layout.has_minimum ? scale * total + load(outlying) : reinterpret_cast<vf>(-layout.zero * __builtin_convertvector(total, vi)));
    if (layout.has_halves) store(seconds, reinterpret_cast<vf>(-layout.zero * __builtin_convertvector(hsum_rows(second), vi)));
    for (int b = 0; b < count; ++b) {
      const int64_t at = (first + b) * rows.stride + i;
      rows.scales[at] = scales[b];
      std::memcpy(rows.offsets + at, offsets + b, 4);
      if (layout.has_halves) std::memcpy(rows.second_offsets + at, seconds + b, 4);
    }
  }
}

void quantise(const void* x, DType dtype, int64_t k, BlockFormat format, const BlockRows& rows, int64_t i) {
  switch (dtype) {
    case DType::F32: return quantise_as(F32{}, static_cast<const float*>(x), k, format, rows, i);
    case DType::BF16: return quantise_as(Bf16{}, static_cast<const uint16_t*>(x), k, format, rows, i);
    case DType::F16: return quantise_as(F16{}, static_cast<const uint16_t*>(x), k, format, rows, i);
  }
}

// c: [MR, kGroupColumns], of NT tiles, `stride` bytes apart, but for outliers; from row `first` on. The memory of the tiles from `next` on
// is asked for meanwhile.
template <BlockFormat F, int MR, int NT>
void dot_kernel(const BlockRows& rows, int64_t first, const char* tile, int64_t stride, const char* next, int64_t k, float* c) {
  constexpr bool kMinimum = block_layout(F).has_minimum, kZero = block_layout(F).has_zero, kHalves = block_layout(F).has_halves;
  constexpr int kVectors = NT * kTileVectors;
  // Sums of all vectors at once where registers hold them, else of one after the other.
  constexpr int kAtOnce = NT > 1 ? kVectors : 1;
  const int64_t blocks = k / kBlockTerms, to_next = next - tile;
  const char* scales = tile + blocks * tile_number_bytes(F);
  const int8_t* x = reinterpret_cast<const int8_t*>(rows.bytes) + first * rows.row_bytes;
  const float* row_scales = rows.scales + first;
  const float* row_offsets = rows.offsets + first;
  const float* row_seconds = rows.second_offsets + first;
  vf acc[MR][kVectors];
  [[maybe_unused]] vi first_sum[MR][kAtOnce];
#pragma GCC unroll 16
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) acc[r][v] = vf{};
  for (int64_t b = 0; b < blocks; ++b) {
    if (to_next != 0) {
#pragma GCC unroll 2
      for (int t = 0; t < NT; ++t) {
#pragma GCC unroll 8
        for (int64_t line = 0; line < tile_number_bytes(F); line += 64) __builtin_prefetch(tile + t * stride + to_next + line);
        __builtin_prefetch(scales + t * stride + to_next + b * tile_scale_bytes(F) / block_layout(F).together);
      }
    }
#pragma GCC unroll 4
    for (int begin = 0; begin < kVectors; begin += kAtOnce) {
      const auto numbers_at = [&](int i) { return tile + (begin + i) / kTileVectors * stride; };
      const auto scales_at = [&](int i) { return scales_of<F>(scales + (begin + i) / kTileVectors * stride, b); };
      vi sum[MR][kAtOnce];
#pragma GCC unroll 2
      for (int i = 0; i < kAtOnce; ++i) {
        const int v = (begin + i) % kTileVectors;
#pragma GCC unroll 16
        for (int r = 0; r < MR; ++r) {
          if constexpr (kZero) {
            sum[r][i] = times_zeros(zeros<F>(scales_at(i), v), as_integer(row_offsets + r));
          } else {
            sum[r][i] = kMinimum ? vi{} : splat_int(as_integer(row_offsets + r));
          }
        }
      }
#pragma GCC unroll 8
      for (int j = 0; j < kSteps; ++j) {
        if constexpr (kHalves) {
          if (j == kSteps / 2) {
#pragma GCC unroll 2
            for (int i = 0; i < kAtOnce; ++i) {
              const vi by = group_bytes<F>(scales_at(i), b, 0, (begin + i) % kTileVectors);
#pragma GCC unroll 16
              for (int r = 0; r < MR; ++r) first_sum[r][i] = sum[r][i] * by, sum[r][i] = splat_int(as_integer(row_seconds + r));
            }
          }
        }
        vi w[kAtOnce];
#pragma GCC unroll 2
        for (int i = 0; i < kAtOnce; ++i) w[i] = numbers<F>(numbers_at(i), j, (begin + i) % kTileVectors);
#pragma GCC unroll 16
        for (int r = 0; r < MR; ++r) {
          const Terms terms(x + r * rows.row_bytes + j * 4);
#pragma GCC unroll 2
          for (int i = 0; i < kAtOnce; ++i) sum[r][i] = dot(sum[r][i], w[i], terms);
        }
      }
#pragma GCC unroll 2
      for (int i = 0; i < kAtOnce; ++i) {
        const int v = (begin + i) % kTileVectors;
        const char* of_tile = scales + (begin + i) / kTileVectors * stride;
        if constexpr (kHalves) {
          const vi by = group_bytes<F>(scales_at(i), b, 1, v);
#pragma GCC unroll 16
          for (int r = 0; r < MR; ++r) sum[r][i] = first_sum[r][i] + sum[r][i] * by;
        }
        const vf scale = block_scale<F>(of_tile, b, v);
#pragma GCC unroll 16
        for (int r = 0; r < MR; ++r) {
          vf& to = acc[r][begin + i];
          to = fma(scale * splat(row_scales[r]), to_floats(sum[r][i]), to);
          if constexpr (kMinimum) to = fma(block_minimum<F>(of_tile, b, v), splat(row_offsets[r]), to);
        }
      }
    }
    tile += tile_number_bytes(F);
    x += kBlockTerms, row_scales += rows.stride, row_offsets += rows.stride, row_seconds += rows.stride;
  }
#pragma GCC unroll 16
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store(c + r * kGroupColumns + v * kLanes, acc[r][v]);
}

using DotKernel = void (*)(const BlockRows&, int64_t, const char*, int64_t, const char*, int64_t, float*);

template <BlockFormat F, int NT, int Fewest, int... R>
DotKernel dot_kernel_for(int rows, std::integer_sequence<int, R...>) {
  static constexpr DotKernel table[] = {dot_kernel<F, R + Fewest, NT>...};
  return table[rows - Fewest];
}

// Rows in parts as equal as possible; tiles one after the other, or, where registers hold the sums of a part of many rows, two at a time.
template <BlockFormat F>
void run_format(const LinearItem& item) {
  const PackedWeight& weight = item.call->weight;
  const int64_t stride = block_tile_bytes(F, weight.k);
  const char* tiles = static_cast<const char*>(weight.tiles) + item.tile * stride;
  const BlockRows x = rows_of(item);
  const int64_t rows = item.row_end - item.row_begin;
  // Pairs of tiles take registers that a sum for each half of a block needs.
#if defined(__AVX512VNNI__)
  // 9 rows are 4 and 5, and no more than 8 are so many parts that one is smaller.
  constexpr int kFewestOfPair = 4, kSizesOfPair = kRowsOfPair - kFewestOfPair + 1;
  const bool pairs = !block_layout(F).has_halves && rows > kRows && item.tile_count > 1;
  const int64_t parts = ceil_div(rows, pairs ? kRowsOfPair : kRows);
#else
  const int64_t parts = ceil_div(rows, kRows);
#endif
  alignas(64) float c[kRows * kGroupColumns];
  OutlierProducts<F> outliers(item, tiles);
  for (int64_t p = 0; p < parts; ++p) {
    const int64_t begin = item.row_begin + rows * p / parts, end = item.row_begin + rows * (p + 1) / parts;
    const int count = static_cast<int>(end - begin);
    for (int64_t r = begin; r < end; ++r) __builtin_prefetch(x.outliers + r * x.row_outliers);
    const auto run = [&](DotKernel kernel, int t, int together) {
      const char* tile = tiles + t * stride;
      const char* next = t + together < item.tile_count ? tile + together * stride : item.prefetch;
      kernel(x, begin, tile, stride, p == 0 && next != nullptr ? next : tile, weight.k, c + t * kTileColumns);
    };
    int t = 0;
#if defined(__AVX512VNNI__)
    if constexpr (!block_layout(F).has_halves) {
      for (; pairs && t + 1 < item.tile_count; t += 2)
        run(dot_kernel_for<F, 2, kFewestOfPair>(count, std::make_integer_sequence<int, kSizesOfPair>()), t, 2);
    }
#endif
    for (; t < item.tile_count; ++t) run(dot_kernel_for<F, 1, 1>(count, std::make_integer_sequence<int, kRows>()), t, 1);
    outliers.add(x, begin, count, c);
    plain_kernels().finish(item, begin, count, c);
  }
}
#else
// Tile registers change nothing but products of many rows: the rest is what the level below has, and is not compiled once more.
HP_INLINE const BlockKernels& below() { return avx512vnni::block_kernels(); }

void quantise(const void* x, DType dtype, int64_t k, BlockFormat format, const BlockRows& rows, int64_t i) {
  below().quantise(x, dtype, k, format, rows, i);
}

constexpr int kFewestTileRows = 12;   // below, dot products are faster
constexpr int kPanelRows = 128;       // whose sums are under way at a time
constexpr int64_t kPanelBlocks = 64;  // of a tile, expanded to bytes at a time
constexpr int kLag = 2;               // blocks between a product of tiles being stored and being read

struct WeightPanel {
  alignas(64) uint8_t numbers[kPanelBlocks][kSteps][64];
  alignas(64) float scales[kPanelBlocks][16];
  union {
    alignas(64) float minima[kPanelBlocks][16];
    alignas(64) int32_t zeros[kPanelBlocks][16];
  };
};

template <BlockFormat F>
void expand(const char* tile, int64_t k, int64_t first, int64_t count, WeightPanel& panel) {
  const char* block = tile + first * tile_number_bytes(F);
  const char* scales = tile + k / kBlockTerms * tile_number_bytes(F);
  for (int64_t b = 0; b < count; ++b, block += tile_number_bytes(F)) {
#pragma GCC unroll 8
    for (int j = 0; j < kSteps; ++j) {
      const vi w = numbers<F>(block, j, 0);
      std::memcpy(panel.numbers[b][j], &w, 64);
    }
    store(panel.scales[b], block_scale<F>(scales, first + b, 0));
    if constexpr (block_layout(F).has_minimum) store(panel.minima[b], block_minimum<F>(scales, first + b, 0));
    if constexpr (block_layout(F).has_zero) {
      const vi points = zeros<F>(scales_of<F>(scales, first + b), 0);
      std::memcpy(panel.zeros[b], &points, 64);
    }
  }
}

// Adds `count` blocks from `first` on to c: [16, kGroupColumns], of one tile, for rows from `row` on. The registers have the shape of the rows that
// there are; what c gets for the others has no meaning. A block's product is begun two blocks before it is stored, and stored two before it is read, so that
// neither is waited for.
template <BlockFormat F, bool kWhole>
void tile_rows(const BlockRows& rows, int64_t row, int64_t first, int64_t count, const WeightPanel& panel, float* c) {
  constexpr bool kMinimum = block_layout(F).has_minimum, kZero = block_layout(F).has_zero;
  constexpr int kRing = 4;
  const char* x = rows.bytes + row * rows.row_bytes + first * kBlockTerms;
  const int64_t x_stride = rows.row_bytes, stride = rows.stride;
  const float* row_scales = rows.scales + first * stride + row;
  const float* row_offsets = rows.offsets + first * stride + row;
  alignas(64) int32_t sums[kRing][16][16];
  if constexpr (!kWhole) std::memset(sums, 0, sizeof(sums));
  vf acc[16];
#pragma GCC unroll 16
  for (int r = 0; r < 16; ++r) acc[r] = load(c + r * kGroupColumns);
  const auto add = [&](int64_t b) __attribute__((always_inline)) {
    if (b < 0 || b >= count) return;
    const vf scale = load(panel.scales[b]), minimum = kMinimum ? load(panel.minima[b]) : vf{};
    const float* s = row_scales + b * stride;
    const float* o = row_offsets + b * stride;
#pragma GCC unroll 16
    for (int r = 0; r < 16; ++r) {
      vi sum = load_ints(sums[b % kRing][r]);
      if constexpr (kZero) {
        sum += times_zeros(load_ints(panel.zeros[b]), as_integer(o + r));
      } else if constexpr (!kMinimum) {
        sum += splat_int(as_integer(o + r));
      }
      acc[r] = fma(scale * splat(s[r]), to_floats(sum), acc[r]);
      if constexpr (kMinimum) acc[r] = fma(minimum, splat(o[r]), acc[r]);
    }
  };
  // Blocks after the last are begun as the last one again, and not read.
#define HP_BEGIN_BLOCK(sum, a, b, block)                                                     \
  {                                                                                          \
    const int64_t at = (block) < count ? (block) : count - 1;                                \
    _tile_zero(sum);                                                                         \
    _tile_loadd(a, x + at * kBlockTerms, x_stride);                                          \
    _tile_loadd(b, panel.numbers[at], kTileRegisterBytes);                                   \
    _tile_dpbsud(sum, a, b);                                                                 \
  }
#define HP_BLOCK(stored, begun, a, b, block)                                                 \
  HP_BEGIN_BLOCK(begun, a, b, (block) + kLag)                                                \
  _tile_stored(stored, sums[(block) % kRing], kTileRegisterBytes);                           \
  TileRegisters::settle_memory();                                                            \
  add((block)-kLag);
  TileRegisters::settle_memory();
  HP_BEGIN_BLOCK(0, 4, 6, 0)
  HP_BEGIN_BLOCK(1, 5, 7, 1)
  for (int64_t block = 0; block < count + kLag; block += kRing) {
    HP_BLOCK(0, 2, 4, 6, block)
    HP_BLOCK(1, 3, 5, 7, block + 1)
    HP_BLOCK(2, 0, 4, 6, block + 2)
    HP_BLOCK(3, 1, 5, 7, block + 3)
  }
#undef HP_BLOCK
#undef HP_BEGIN_BLOCK
#pragma GCC unroll 16
  for (int r = 0; r < 16; ++r) store(c + r * kGroupColumns, acc[r]);
}
template <BlockFormat F>
void run_format(const LinearItem& item) {
  const int64_t all = item.row_end - item.row_begin;
  // A product of tiles has one sum for a block, not one for each half.
  if (block_layout(F).has_halves || all < kFewestTileRows) return below().run_item(item);
  const PackedWeight& weight = item.call->weight;
  const int64_t stride = block_tile_bytes(F, weight.k), blocks = weight.k / kBlockTerms;
  const char* tiles = static_cast<const char*>(weight.tiles) + item.tile * stride;
  alignas(64) float c[kPanelRows * kGroupColumns];
  OutlierProducts<F> outliers(item, tiles);
  WeightPanel panel;
  const BlockRows x = rows_of(item);
  TileRegisters registers;
  registers.shape(6, 2, kSteps);
  int shaped = 0;
  for (int64_t begin = item.row_begin; begin < item.row_end; begin += kPanelRows) {
    const int rows = static_cast<int>(item.row_end - begin < kPanelRows ? item.row_end - begin : kPanelRows);
    std::memset(c, 0, sizeof(float) * kGroupColumns * static_cast<size_t>(ceil_div(rows, 16) * 16));
    for (int64_t first = 0; first < blocks; first += kPanelBlocks) {
      const int64_t count = blocks - first < kPanelBlocks ? blocks - first : kPanelBlocks;
      for (int t = 0; t < item.tile_count; ++t) {
        expand<F>(tiles + t * stride, weight.k, first, count, panel);
        for (int r = 0; r < rows; r += kTileRegisterRows) {
          const int part = rows - r < kTileRegisterRows ? rows - r : kTileRegisterRows;
          if (part != shaped) {
            registers.shape(0, 4, part);
            registers.shape(4, 2, part, kBlockTerms);
            registers.load();
            shaped = part;
          }
          const auto add = part == kTileRegisterRows ? tile_rows<F, true> : tile_rows<F, false>;
          add(x, begin + r, first, count, panel, c + r * kGroupColumns + t * kTileColumns);
        }
      }
    }
    outliers.add(x, begin, rows, c);
    plain_kernels().finish(item, begin, rows, c);
  }
}
#endif

void run_item(const LinearItem& item) {
  switch (item.call->weight.blocks) {
    case BlockFormat::Q4_0: return run_format<BlockFormat::Q4_0>(item);
    case BlockFormat::Q4_1: return run_format<BlockFormat::Q4_1>(item);
    case BlockFormat::Q5_0: return run_format<BlockFormat::Q5_0>(item);
    case BlockFormat::Q5_1: return run_format<BlockFormat::Q5_1>(item);
    case BlockFormat::Q4_K: return run_format<BlockFormat::Q4_K>(item);
    case BlockFormat::Q5_K: return run_format<BlockFormat::Q5_K>(item);
    case BlockFormat::Q6_K: return run_format<BlockFormat::Q6_K>(item);
    case BlockFormat::Int4: return run_format<BlockFormat::Int4>(item);
    case BlockFormat::Int8: return run_format<BlockFormat::Int8>(item);
    case BlockFormat::Int4_128: return run_format<BlockFormat::Int4_128>(item);
    case BlockFormat::Int8_128: return run_format<BlockFormat::Int8_128>(item);
    default: return run_format<BlockFormat::Q8_0>(item);
  }
}

}  // namespace

const BlockKernels& block_kernels() {
  static constexpr BlockKernels kernels = {quantise, run_item};
  return kernels;
}

}  // namespace hp::HP_ISA
