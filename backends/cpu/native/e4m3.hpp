// Numbers in e4m3, as an 8-bit KV cache holds them, for units compiled once per instruction set (see simd.hpp).
#pragma once
#include "simd.hpp"

namespace hp {
namespace HP_ISA {

typedef uint8_t vb __attribute__((vector_size(HP_VW)));

struct E4m3 { using type = uint8_t; };

// e4m3 as fp32, exactly: subnormal numbers are counts of 2^-9, the bits of others have their exponent's bias raised by 120.
HP_INLINE vf widen_e4m3(vb x) {
  // The sign is extended beyond the bits that count.
  const vu bits = reinterpret_cast<vu>(widen_bytes(reinterpret_cast<vc>(x))), magnitude = bits & 0x7fu;
  const vu small = float_to_bits(__builtin_convertvector(reinterpret_cast<vi>(magnitude), vf) * 0x1p-9f);
  const vu widened = magnitude < 8u ? small : (magnitude << 20) + (120u << 23);
  const vu number = magnitude == 0x7fu ? vu{} + 0x7fc00000u : widened;
  return bits_to_float(number | (bits & 0x80u) << 24);
}

// Rounded to the nearest e4m3, ties to even; beyond 448 the largest, and NaN stays NaN. At 2^14 the last bit of fp32 is worth 2^-9, the
// smallest subnormal number.
HP_INLINE vb narrow_e4m3(vf x) {
  const vu bits = float_to_bits(x), absolute = bits & 0x7fffffffu;
  const vf clipped = min(bits_to_float(absolute), splat(448.0f));
  const vu whole = float_to_bits(clipped);
  const vu normal = ((whole + 0x7ffffu + ((whole >> 20) & 1u)) >> 20) - (120u << 3);
  const vu small = float_to_bits(clipped + 16384.0f) - 0x46800000u;
  const vu number = whole < 0x3c800000u ? small : normal;
  const vu held = absolute > 0x7f800000u ? vu{} + 0x7fu : number;
  return reinterpret_cast<vb>(low_bytes(reinterpret_cast<vi>(held | ((bits >> 24) & 0x80u))));
}

HP_INLINE vf load(E4m3, const uint8_t* p) {
  vb x;
  std::memcpy(&x, p, sizeof(x));
  return widen_e4m3(x);
}
HP_INLINE vf load_first(E4m3, const uint8_t* p, int n) {
  vb x{};
  std::memcpy(&x, p, static_cast<size_t>(n));
  return widen_e4m3(x);
}
HP_INLINE void store(E4m3, uint8_t* p, vf x) {
  const vb y = narrow_e4m3(x);
  std::memcpy(p, &y, sizeof(y));
}
HP_INLINE void store_first(E4m3, uint8_t* p, vf x, int n) {
  const vb y = narrow_e4m3(x);
  std::memcpy(p, &y, static_cast<size_t>(n));
}

#if defined(HP_SIMD_AVX512BF16)
// 32 numbers in e4m3 as bf16. Those of the subnormal numbers, m * 2^-9, stand in a table.
HP_INLINE __m512i widen_e4m3_words(__m256i x) {
  constexpr int kMantissa = 7, kBias = 120;  // bits of a mantissa, and by how much greater the exponent's bias is
  constexpr uint32_t kOne = static_cast<uint32_t>(kBias + 7) << kMantissa;  // the bits of 1.0
  constexpr uint32_t kStep = 1u << kMantissa, kHalf = kStep / 2, kQuarter = kStep / 4;
  constexpr uint32_t m1 = kOne - 9 * kStep, m2 = m1 + kStep, m4 = m2 + kStep;
  // Pairs of words, the first one low: 0 and 1, 2 and 3, and so on.
  const __m512i table = _mm512_zextsi128_si512(_mm_set_epi32(
      static_cast<int>((m4 + kHalf + kQuarter) << 16 | (m4 + kHalf)), static_cast<int>((m4 + kQuarter) << 16 | m4),
      static_cast<int>((m2 + kHalf) << 16 | m2), static_cast<int>(m1 << 16)));
  const __m512i words = _mm512_cvtepu8_epi16(x), magnitude = _mm512_and_si512(words, _mm512_set1_epi16(0x7f));
  const __m512i sign = _mm512_slli_epi16(_mm512_andnot_si512(_mm512_set1_epi16(0x7f), words), 8);
  __m512i number = _mm512_add_epi16(_mm512_slli_epi16(magnitude, kMantissa - 3), _mm512_set1_epi16(static_cast<short>(kBias << kMantissa)));
  const __mmask32 small = _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(8));
  number = _mm512_mask_permutexvar_epi16(number, small, magnitude, table);
  const __mmask32 nan = _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(0x7f));
  number = _mm512_mask_blend_epi16(nan, number, _mm512_set1_epi16(0x7fff));
  return _mm512_or_si512(number, sign);
}
#endif

// n numbers in e4m3, a multiple of 8, in fp32 or, where the processor multiplies those, in bf16.
template <class E>
HP_INLINE void widen_e4m3(const uint8_t* from, int n, typename E::type* to) {
  int d = 0;
#if defined(HP_SIMD_AVX512BF16)
  if constexpr (sizeof(typename E::type) == 2) {
    for (; d + 32 <= n; d += 32) {
      const __m512i x = widen_e4m3_words(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + d)));
      _mm512_storeu_si512(to + d, x);
    }
  }
#endif
  for (; d + kLanes <= n; d += kLanes) store(E{}, to + d, load(E4m3{}, from + d));
  if (d < n) store_first(E{}, to + d, load_first(E4m3{}, from + d, n - d), n - d);
}

}  // namespace HP_ISA
}  // namespace hp
