// Vectors of HP_VW fp32 lanes over the compiler's vector extensions, for units compiled once per instruction set.
//
// Everything here is internal to the unit (static, always inlined, in the namespace of its instruction set): a function that
// the linker could merge with another unit's copy would carry instructions to processors that lack them. For the same reason
// such units use no containers or algorithms of the standard library.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>  // alone: the whole takes the compiler half a second
#endif

#if !defined(HP_ISA) || !defined(HP_VW)
#error "simd.hpp is for units compiled by isa.cmake"
#endif

#define HP_INLINE static inline __attribute__((always_inline))
#define HP_INLINE_MEMBER inline __attribute__((always_inline))
// Builds with sanitizers are not optimised but for these functions, in which they would spend a sixth of the tests' time.
#if defined(__SANITIZE_ADDRESS__)
#define HP_HOT __attribute__((optimize("O1")))
#else
#define HP_HOT
#endif

#if defined(__AVX512F__) && HP_VW == 16
#define HP_SIMD_AVX512 1
#if defined(__AVX512BF16__)
#define HP_SIMD_AVX512BF16 1
#endif
#elif defined(__AVX2__) && HP_VW == 8
#define HP_SIMD_AVX2 1
#elif defined(__SSE2__) && HP_VW == 4
#define HP_SIMD_SSE2 1
#endif

#if HP_VW == 16 && !defined(HP_SIMD_AVX512)
#error "16 lanes need AVX-512"
#endif

namespace hp {
namespace HP_ISA {

constexpr int kLanes = HP_VW;

typedef float vf __attribute__((vector_size(HP_VW * 4)));
typedef int32_t vi __attribute__((vector_size(HP_VW * 4)));
typedef uint32_t vu __attribute__((vector_size(HP_VW * 4)));
typedef uint16_t vh __attribute__((vector_size(HP_VW * 2)));
typedef int8_t vc __attribute__((vector_size(HP_VW)));

// Storage of the element types; the caches and activations hold these.
struct F32 { using type = float; };
struct Bf16 { using type = uint16_t; };
struct F16 { using type = uint16_t; };

// Subtracting zero changes no number, so that the compiler leaves it out; adding it would change -0.
HP_INLINE vf splat(float x) { return x - vf{}; }
HP_INLINE vf bits_to_float(vu x) { return reinterpret_cast<vf>(x); }
HP_INLINE vu float_to_bits(vf x) { return reinterpret_cast<vu>(x); }

HP_INLINE vi iota() {
  vi x;
  for (int i = 0; i < kLanes; ++i) x[i] = i;
  return x;
}

// The compiler does not load the value again for another use.
HP_INLINE void keep_in_register(vu& x) {
#if defined(__x86_64__)
  asm("" : "+v"(x));
#else
  static_cast<void>(x);
#endif
}

HP_INLINE vf load(const float* p) {
  vf x;
  std::memcpy(&x, p, sizeof(x));
  return x;
}
HP_INLINE void store(float* p, vf x) { std::memcpy(p, &x, sizeof(x)); }

// The larger of each pair; b where either is NaN.
HP_INLINE vf max(vf a, vf b) {
#if defined(HP_SIMD_AVX512)
  return reinterpret_cast<vf>(_mm512_max_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b)));
#elif defined(HP_SIMD_AVX2)
  return reinterpret_cast<vf>(_mm256_max_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b)));
#elif defined(HP_SIMD_SSE2)
  return reinterpret_cast<vf>(_mm_max_ps(reinterpret_cast<__m128>(a), reinterpret_cast<__m128>(b)));
#else
  return a > b ? a : b;
#endif
}
HP_INLINE vf min(vf a, vf b) {
#if defined(HP_SIMD_AVX512)
  return reinterpret_cast<vf>(_mm512_min_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b)));
#elif defined(HP_SIMD_AVX2)
  return reinterpret_cast<vf>(_mm256_min_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b)));
#elif defined(HP_SIMD_SSE2)
  return reinterpret_cast<vf>(_mm_min_ps(reinterpret_cast<__m128>(a), reinterpret_cast<__m128>(b)));
#else
  return a < b ? a : b;
#endif
}

// counts + 1 in each lane where a > b.
HP_INLINE vi count_greater(vi counts, vf a, vf b) {
#if defined(HP_SIMD_AVX512)
  const __m512i before = reinterpret_cast<__m512i>(counts);
  const __mmask16 greater = _mm512_cmp_ps_mask(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), _CMP_GT_OQ);
  return reinterpret_cast<vi>(_mm512_mask_sub_epi32(before, greater, before, _mm512_set1_epi32(-1)));
#else
  return counts - (a > b);
#endif
}

HP_INLINE float bf16_to_float(uint16_t x) {
  const uint32_t bits = uint32_t{x} << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

HP_INLINE uint16_t float_to_bf16(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// IEEE binary16. Multiplying by 2^112 moves the exponent's bias and normalises subnormals in one exact step.
HP_INLINE float f16_to_float(uint16_t x) {
  const uint32_t sign = (uint32_t{x} & 0x8000u) << 16, magnitude = x & 0x7fffu;
  uint32_t bits;
  if (magnitude >= 0x7c00u) {
    bits = 0x7f800000u | (magnitude & 0x3ffu) << 13 | (magnitude > 0x7c00u ? 0x400000u : 0u);
  } else {
    const uint32_t shifted = magnitude << 13;
    float f;
    std::memcpy(&f, &shifted, 4);
    f *= 0x1p112f;
    std::memcpy(&bits, &f, 4);
  }
  bits |= sign;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

HP_INLINE uint16_t float_to_f16(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | ((bits >> 13) & 0x3ffu));
  if (bits >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (bits < 0x38800000u) {
    // Adding 0.5 leaves the subnormal's significand, rounded to nearest even, in the lowest bits.
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;
    std::memcpy(&bits, &magnitude, 4);
    return static_cast<uint16_t>(sign | (bits - 0x3f000000u));
  }
  return static_cast<uint16_t>(sign | ((bits - 0x38000000u + 0xfffu + ((bits >> 13) & 1u)) >> 13));
}

HP_INLINE float to_float(F32, float x) { return x; }
HP_INLINE float to_float(Bf16, uint16_t x) { return bf16_to_float(x); }
HP_INLINE float to_float(F16, uint16_t x) { return f16_to_float(x); }
HP_INLINE float from_float(F32, float x) { return x; }
HP_INLINE uint16_t from_float(Bf16, float x) { return float_to_bf16(x); }
HP_INLINE uint16_t from_float(F16, float x) { return float_to_f16(x); }

// GCC splits these conversions of whole vectors into halves and joins them again.
HP_INLINE vu widen_halves(vh x) {
#if defined(HP_SIMD_AVX512)
  return reinterpret_cast<vu>(_mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(x)));
#elif defined(HP_SIMD_AVX2)
  return reinterpret_cast<vu>(_mm256_cvtepu16_epi32(reinterpret_cast<__m128i>(x)));
#else
  return __builtin_convertvector(x, vu);
#endif
}
HP_INLINE vh low_halves(vu x) {
#if defined(HP_SIMD_AVX512)
  return reinterpret_cast<vh>(_mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(x)));
#else
  return __builtin_convertvector(x, vh);
#endif
}
HP_INLINE vi widen_bytes(vc x) {
#if defined(HP_SIMD_AVX512)
  return reinterpret_cast<vi>(_mm512_cvtepi8_epi32(reinterpret_cast<__m128i>(x)));
#else
  return __builtin_convertvector(x, vi);
#endif
}
HP_INLINE vc low_bytes(vi x) {
#if defined(HP_SIMD_AVX512)
  return reinterpret_cast<vc>(_mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(x)));
#else
  return __builtin_convertvector(x, vc);
#endif
}

HP_INLINE vf widen_bf16(vh x) { return bits_to_float(widen_halves(x) << 16); }

HP_INLINE vf widen_f16(vh x) {
#if defined(HP_SIMD_AVX512)
  return reinterpret_cast<vf>(_mm512_cvtph_ps(reinterpret_cast<__m256i>(x)));
#elif defined(HP_SIMD_AVX2)
  return reinterpret_cast<vf>(_mm256_cvtph_ps(reinterpret_cast<__m128i>(x)));
#else
  // As f16_to_float, without branches. Compared as signed numbers, which is what SSE2 has.
  const vu wide = widen_halves(x), magnitude = wide & 0x7fffu;
  const vu is_special = reinterpret_cast<vu>(reinterpret_cast<vi>(magnitude) > 0x7bff);
  const vu is_nan = reinterpret_cast<vu>(reinterpret_cast<vi>(magnitude) > 0x7c00);
  const vu bits = float_to_bits(bits_to_float(magnitude << 13) * 0x1p112f);
  return bits_to_float(bits | (wide & 0x8000u) << 16 | (is_special & 0x7f800000u) | (is_nan & 0x400000u));
#endif
}

// Round to nearest even; a NaN stays a (quiet) NaN.
HP_INLINE vh narrow_bf16(vf x) {
  const vu bits = float_to_bits(x);
  const vu rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  const vu quiet = bits | 0x400000u;
  const vu is_nan = reinterpret_cast<vu>((bits & 0x7fffffffu) > 0x7f800000u);
  return low_halves(((rounded & ~is_nan) | (quiet & is_nan)) >> 16);
}

HP_INLINE vh narrow_f16(vf x) {
#if defined(HP_SIMD_AVX512)
  return reinterpret_cast<vh>(_mm512_cvtps_ph(reinterpret_cast<__m512>(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(HP_SIMD_AVX2)
  return reinterpret_cast<vh>(_mm256_cvtps_ph(reinterpret_cast<__m256>(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
  // As float_to_f16, without branches.
  const vu bits = float_to_bits(x), magnitude = bits & 0x7fffffffu;
  const vi size = reinterpret_cast<vi>(magnitude);
  const vu normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const vu subnormal = float_to_bits(bits_to_float(magnitude) + 0.5f) - 0x3f000000u;
  const vu is_nan = reinterpret_cast<vu>(size > 0x7f800000), is_special = reinterpret_cast<vu>(size > 0x477fefff);
  const vu special = 0x7c00u | (is_nan & (0x200u | ((magnitude >> 13) & 0x3ffu)));
  const vu is_subnormal = reinterpret_cast<vu>(size < 0x38800000);
  const vu finite = (subnormal & is_subnormal) | (normal & ~is_subnormal);
  return low_halves((special & is_special) | (finite & ~is_special) | ((bits >> 16) & 0x8000u));
#endif
}

HP_INLINE vh load_halves(const uint16_t* p) {
  vh x;
  std::memcpy(&x, p, sizeof(x));
  return x;
}

// kLanes consecutive elements as fp32, from any address.
HP_INLINE vf load(F32, const float* p) { return load(p); }
HP_INLINE vf load(Bf16, const uint16_t* p) { return widen_bf16(load_halves(p)); }
HP_INLINE vf load(F16, const uint16_t* p) { return widen_f16(load_halves(p)); }

HP_INLINE void store(F32, float* p, vf x) { store(p, x); }
HP_INLINE void store(Bf16, uint16_t* p, vf x) {
  const vh y = narrow_bf16(x);
  std::memcpy(p, &y, sizeof(y));
}
HP_INLINE void store(F16, uint16_t* p, vf x) {
  const vh y = narrow_f16(x);
  std::memcpy(p, &y, sizeof(y));
}

// The first n < kLanes elements, the other lanes zero; nothing beyond them is read or written.
HP_INLINE vf load_first(F32, const float* p, int n) {
#if defined(HP_SIMD_AVX512)
  return reinterpret_cast<vf>(_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), p));
#else
  vf x{};
  for (int i = 0; i < n; ++i) x[i] = p[i];
  return x;
#endif
}
HP_INLINE vh load_first_halves(const uint16_t* p, int n) {
#if defined(HP_SIMD_AVX512)
  return reinterpret_cast<vh>(_mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << n) - 1), p));
#else
  vh x{};
  for (int i = 0; i < n; ++i) x[i] = p[i];
  return x;
#endif
}
HP_INLINE vf load_first(Bf16, const uint16_t* p, int n) { return widen_bf16(load_first_halves(p, n)); }
HP_INLINE vf load_first(F16, const uint16_t* p, int n) { return widen_f16(load_first_halves(p, n)); }

HP_INLINE void store_first(F32, float* p, vf x, int n) { std::memcpy(p, &x, static_cast<size_t>(n) * 4); }
HP_INLINE void store_first(Bf16, uint16_t* p, vf x, int n) {
  const vh y = narrow_bf16(x);
  std::memcpy(p, &y, static_cast<size_t>(n) * 2);
}
HP_INLINE void store_first(F16, uint16_t* p, vf x, int n) {
  const vh y = narrow_f16(x);
  std::memcpy(p, &y, static_cast<size_t>(n) * 2);
}

// All lanes, or the first n < kLanes.
template <class T>
HP_INLINE vf load_some(T type, const typename T::type* p, int n) { return n == kLanes ? load(type, p) : load_first(type, p, n); }
template <class T>
HP_INLINE void store_some(T type, typename T::type* p, vf x, int n) {
  if (n == kLanes) store(type, p, x);
  else store_first(type, p, x, n);
}

// Calls f(offset, count) for whole vectors, and then once for the rest, if any.
template <class F>
HP_INLINE void for_vectors(int64_t n, F&& f) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) f(i, kLanes);
  if (i < n) f(i, static_cast<int>(n - i));
}

HP_INLINE float hsum(vf x) {
#if defined(HP_SIMD_AVX512)
  return _mm512_reduce_add_ps(reinterpret_cast<__m512>(x));
#elif HP_VW == 8
  x += __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3);
  x += __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5);
  return x[0] + x[1];
#else
  x += __builtin_shufflevector(x, x, 2, 3, 0, 1);
  return x[0] + x[1];
#endif
}

HP_INLINE float hmax(vf x) {
#if defined(HP_SIMD_AVX512)
  return _mm512_reduce_max_ps(reinterpret_cast<__m512>(x));
#elif HP_VW == 8
  x = max(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3));
  x = max(x, __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5));
  return x[0] > x[1] ? x[0] : x[1];
#else
  x = max(x, __builtin_shufflevector(x, x, 2, 3, 0, 1));
  return x[0] > x[1] ? x[0] : x[1];
#endif
}

struct Sum {
  HP_INLINE_MEMBER vf operator()(vf a, vf b) const { return a + b; }
};
struct Greatest {
  HP_INLINE_MEMBER vf operator()(vf a, vf b) const { return max(a, b); }
};
struct GreatestBits {
  HP_INLINE_MEMBER vf operator()(vf a, vf b) const {
    const vi x = reinterpret_cast<vi>(a), y = reinterpret_cast<vi>(b);
    return reinterpret_cast<vf>(x > y ? x : y);
  }
};

// Lane i of the result is what is left of rows[i] when its lanes are joined, for kLanes rows: a transposition and a reduction in one.
template <class Join>
HP_INLINE vf reduce_rows(const vf* rows, Join join) {
  vf quads[kLanes / 4];
#pragma GCC unroll 4
  for (int i = 0; i < kLanes / 4; ++i) {
    const vf a = rows[4 * i], b = rows[4 * i + 1], c = rows[4 * i + 2], d = rows[4 * i + 3];
#if HP_VW == 16
    const vf ab = join(__builtin_shufflevector(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29),
                       __builtin_shufflevector(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31));
    const vf cd = join(__builtin_shufflevector(c, d, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29),
                       __builtin_shufflevector(c, d, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31));
    quads[i] = join(__builtin_shufflevector(ab, cd, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
                    __builtin_shufflevector(ab, cd, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31));
#elif HP_VW == 8
    const vf ab = join(__builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13), __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15));
    const vf cd = join(__builtin_shufflevector(c, d, 0, 8, 1, 9, 4, 12, 5, 13), __builtin_shufflevector(c, d, 2, 10, 3, 11, 6, 14, 7, 15));
    quads[i] = join(__builtin_shufflevector(ab, cd, 0, 1, 8, 9, 4, 5, 12, 13), __builtin_shufflevector(ab, cd, 2, 3, 10, 11, 6, 7, 14, 15));
#else
    const vf ab = join(__builtin_shufflevector(a, b, 0, 4, 1, 5), __builtin_shufflevector(a, b, 2, 6, 3, 7));
    const vf cd = join(__builtin_shufflevector(c, d, 0, 4, 1, 5), __builtin_shufflevector(c, d, 2, 6, 3, 7));
    quads[i] = join(__builtin_shufflevector(ab, cd, 0, 1, 4, 5), __builtin_shufflevector(ab, cd, 2, 3, 6, 7));
#endif
  }
#if HP_VW == 16
  const vf low = join(__builtin_shufflevector(quads[0], quads[1], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27),
                      __builtin_shufflevector(quads[0], quads[1], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31));
  const vf high = join(__builtin_shufflevector(quads[2], quads[3], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27),
                       __builtin_shufflevector(quads[2], quads[3], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31));
  return join(__builtin_shufflevector(low, high, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27),
              __builtin_shufflevector(low, high, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31));
#elif HP_VW == 8
  return join(__builtin_shufflevector(quads[0], quads[1], 0, 1, 2, 3, 8, 9, 10, 11),
              __builtin_shufflevector(quads[0], quads[1], 4, 5, 6, 7, 12, 13, 14, 15));
#else
  return quads[0];
#endif
}

HP_INLINE vf hsum_rows(const vf* rows) { return reduce_rows(rows, Sum{}); }
HP_INLINE vf hmax_rows(const vf* rows) { return reduce_rows(rows, Greatest{}); }
// Of rows whose bits are compared as whole numbers.
HP_INLINE vi hmax_bits_of_rows(const vf* rows) { return reinterpret_cast<vi>(reduce_rows(rows, GreatestBits{})); }

// Transposes a kLanes x kLanes matrix in place.
HP_INLINE void transpose(vf* m) {
#if HP_VW == 16
  vf t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = __builtin_shufflevector(m[2 * i], m[2 * i + 1], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
    t[2 * i + 1] = __builtin_shufflevector(m[2 * i], m[2 * i + 1], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      const vf a = t[4 * i + h], b = t[4 * i + 2 + h];
      m[4 * i + 2 * h] = __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
      m[4 * i + 2 * h + 1] = __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    }
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const vf a = __builtin_shufflevector(m[j], m[4 + j], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    const vf b = __builtin_shufflevector(m[j], m[4 + j], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    const vf c = __builtin_shufflevector(m[8 + j], m[12 + j], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    const vf d = __builtin_shufflevector(m[8 + j], m[12 + j], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    t[j] = __builtin_shufflevector(a, c, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    t[8 + j] = __builtin_shufflevector(a, c, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    t[4 + j] = __builtin_shufflevector(b, d, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    t[12 + j] = __builtin_shufflevector(b, d, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) m[i] = t[i];
#elif HP_VW == 8
  vf t[8];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = __builtin_shufflevector(m[2 * i], m[2 * i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    t[2 * i + 1] = __builtin_shufflevector(m[2 * i], m[2 * i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      const vf a = t[4 * i + h], b = t[4 * i + 2 + h];
      m[4 * i + 2 * h] = __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13);
      m[4 * i + 2 * h + 1] = __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
    }
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    t[j] = __builtin_shufflevector(m[j], m[4 + j], 0, 1, 2, 3, 8, 9, 10, 11);
    t[4 + j] = __builtin_shufflevector(m[j], m[4 + j], 4, 5, 6, 7, 12, 13, 14, 15);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) m[i] = t[i];
#else
  const vf a = __builtin_shufflevector(m[0], m[1], 0, 4, 1, 5), b = __builtin_shufflevector(m[0], m[1], 2, 6, 3, 7);
  const vf c = __builtin_shufflevector(m[2], m[3], 0, 4, 1, 5), d = __builtin_shufflevector(m[2], m[3], 2, 6, 3, 7);
  m[0] = __builtin_shufflevector(a, c, 0, 1, 4, 5);
  m[1] = __builtin_shufflevector(a, c, 2, 3, 6, 7);
  m[2] = __builtin_shufflevector(b, d, 0, 1, 4, 5);
  m[3] = __builtin_shufflevector(b, d, 2, 3, 6, 7);
#endif
}

// Nearest integer, ties to even, for |x| < 2^22.
HP_INLINE vf round_nearest(vf x) {
#if defined(HP_SIMD_AVX512)
  return reinterpret_cast<vf>(_mm512_roundscale_ps(reinterpret_cast<__m512>(x), 8));
#elif defined(HP_SIMD_AVX2)
  return reinterpret_cast<vf>(_mm256_round_ps(reinterpret_cast<__m256>(x), 8));
#else
  return (x + 12582912.0f) - 12582912.0f;
#endif
}

// p * 2^n for integral n in [-160, 160].
HP_INLINE vf scale_by_power_of_two(vf p, vf n) {
#if defined(HP_SIMD_AVX512)
  return reinterpret_cast<vf>(_mm512_scalef_ps(reinterpret_cast<__m512>(p), reinterpret_cast<__m512>(n)));
#else
  // Two steps, because 2^n alone leaves the normal range where the result is subnormal.
  const vi whole = __builtin_convertvector(n, vi);
  const vi half = whole >> 1;
  return p * reinterpret_cast<vf>((half + 127) << 23) * reinterpret_cast<vf>((whole - half + 127) << 23);
#endif
}

// 2^x: 0 below -150, infinity above 128, NaN for NaN; relative error below 2e-7. Polynomial of Cephes' exp2f.
HP_INLINE vf exp2(vf x) {
  x = min(splat(130.0f), max(splat(-152.0f), x));
  const vf n = round_nearest(x);
  const vf f = x - n;
  vf p = splat(1.535336188319500e-4f);
  p = p * f + 1.339887440266574e-3f;
  p = p * f + 9.618437357674640e-3f;
  p = p * f + 5.550332471162809e-2f;
  p = p * f + 2.402264791363012e-1f;
  p = p * f + 6.931472028550421e-1f;
  p = p * f + 1.0f;
  return scale_by_power_of_two(p, n);
}

#if defined(HP_SIMD_AVX512)
// 2^x for results that are rounded to bf16: relative error below 3e-6. 0 for minus infinity, NaN for NaN. A minimax polynomial of
// 2^f over [0, 1); VSCALEFPS takes the floor of its exponent itself.
HP_INLINE vf exp2_for_bf16(vf x) {
  constexpr int kFloorWithoutExceptions = 9;
  const vf f = reinterpret_cast<vf>(_mm512_reduce_ps(reinterpret_cast<__m512>(x), kFloorWithoutExceptions));
  vf p = splat(1.35341679e-2f);
  p = p * f + 5.20114606e-2f;
  p = p * f + 2.41442757e-1f;
  p = p * f + 6.93003834e-1f;
  p = p * f + 1.00000259f;
  return reinterpret_cast<vf>(_mm512_scalef_ps(reinterpret_cast<__m512>(p), reinterpret_cast<__m512>(x)));
}
#endif

// e^x with the same conventions as exp2. ln 2 is subtracted in two parts so that large |x| lose nothing (Cephes' expf).
HP_INLINE vf exp(vf x) {
  x = min(splat(90.0f), max(splat(-106.0f), x));
  const vf n = round_nearest(x * 1.44269504088896341f);
  vf f = x - n * 0.693359375f;
  f = f + n * 2.12194440e-4f;
  vf p = splat(1.9875691500e-4f);
  p = p * f + 1.3981999507e-3f;
  p = p * f + 8.3334519073e-3f;
  p = p * f + 4.1665795894e-2f;
  p = p * f + 1.6666665459e-1f;
  p = p * f + 5.0000001201e-1f;
  p = p * (f * f) + f + 1.0f;
  return scale_by_power_of_two(p, n);
}

// Relative error below 3e-7. Near zero a polynomial (Cephes' tanhf), since 1 - e^-2x cancels there.
HP_INLINE vf tanh(vf x) {
  const vu sign = float_to_bits(x) & 0x80000000u;
  const vf magnitude = bits_to_float(float_to_bits(x) ^ sign);
  const vf z = x * x;
  vf p = splat(-5.70498872745e-3f);
  p = p * z + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  const vf near_zero = p * z * x + x;
  const vf far = 1.0f - 2.0f / (exp(2.0f * magnitude) + 1.0f);
  const vf signed_far = bits_to_float(float_to_bits(far) | sign);
  return magnitude < 0.625f ? near_zero : signed_far;
}

#if defined(HP_SIMD_AVX512BF16)
// acc[i] += a[2i] * b[2i] + a[2i+1] * b[2i+1], for vectors of 2 * kLanes bf16 values held as vu.
HP_INLINE vf dot_bf16(vf acc, vu a, vu b) {
  return reinterpret_cast<vf>(
      _mm512_dpbf16_ps(reinterpret_cast<__m512>(acc), reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b)));
}
#endif

HP_INLINE vu load_pairs(const uint16_t* p) {
  vu x;
  std::memcpy(&x, p, sizeof(x));
  return x;
}
HP_INLINE void store_pairs(uint16_t* p, vu x) { std::memcpy(p, &x, sizeof(x)); }

// The first n < 2 * kLanes bf16 values, the others zero.
HP_INLINE vu load_first_pairs(const uint16_t* p, int n) {
#if defined(HP_SIMD_AVX512)
  return reinterpret_cast<vu>(_mm512_maskz_loadu_epi16(static_cast<__mmask32>((uint64_t{1} << n) - 1), p));
#else
  vu x{};
  std::memcpy(&x, p, static_cast<size_t>(n) * 2);
  return x;
#endif
}

}  // namespace HP_ISA
}  // namespace hp
