// Vectors of HP_VW fp32 lanes for the translation units of one instruction set.
//
// Everything is in the unit's own namespace and internal: a function compiled for a newer instruction set must never be the
// copy that the linker keeps for all.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace hp::HP_ISA {
namespace {

constexpr int kLanes = HP_VW;
typedef float vf __attribute__((vector_size(HP_VW * 4)));
typedef int32_t vi __attribute__((vector_size(HP_VW * 4)));
typedef uint32_t vu __attribute__((vector_size(HP_VW * 4)));
typedef uint16_t vh __attribute__((vector_size(HP_VW * 2)));
typedef float vf_mem __attribute__((vector_size(HP_VW * 4), aligned(4), may_alias));
typedef uint32_t vu_mem __attribute__((vector_size(HP_VW * 4), aligned(4), may_alias));
typedef uint16_t vh_mem __attribute__((vector_size(HP_VW * 2), aligned(2), may_alias));

struct Bf16 { uint16_t bits; };
struct Half { uint16_t bits; };

inline vf splat(float x) { return x - vf{}; }

inline vf load(const float* p) { return *reinterpret_cast<const vf_mem*>(p); }
inline vf load(const Bf16* p) {
  return (vf)(__builtin_convertvector(*reinterpret_cast<const vh_mem*>(p), vu) << 16);
}
inline vf load(const Half* p) {
#if HP_VW == 16 && defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif HP_VW == 8 && defined(__F16C__)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  // Exponent and mantissa are moved into place and the exponent's bias is corrected by a multiplication, which also
  // normalises subnormals; infinities and NaNs get the full exponent.
  const vu h = __builtin_convertvector(*reinterpret_cast<const vh_mem*>(p), vu);
  const vu magnitude = (h & 0x7fffu) << 13;
  const vf scaled = (vf)magnitude * splat(0x1p112f);
  const vu special = (vu)((h & 0x7c00u) == 0x7c00u) & 0x7f800000u;
  return (vf)(((vu)scaled | special) | ((h & 0x8000u) << 16));
#endif
}

inline void store(float* p, vf x) { *reinterpret_cast<vf_mem*>(p) = x; }
inline void store(Bf16* p, vf x) {
#if HP_VW == 16 && defined(__AVX512BF16__)
  const __m256bh narrow = _mm512_cvtneps_pbh((__m512)x);
  std::memcpy(p, &narrow, sizeof narrow);
#else
  const vu u = (vu)x;
  const vu rounded = (u + (((u >> 16) & 1u) + 0x7fffu)) >> 16;
  const vu nan = (vu)(x != x);
  *reinterpret_cast<vh_mem*>(p) = __builtin_convertvector((rounded & ~nan) | (((u >> 16) | 0x40u) & nan), vh);
#endif
}
inline void store(Half* p, vf x) {
#if HP_VW == 16 && defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
#elif HP_VW == 8 && defined(__F16C__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < kLanes; ++i) {
    const _Float16 h = static_cast<_Float16>(x[i]);
    std::memcpy(p + i, &h, 2);
  }
#endif
}

// The first n lanes (0 < n <= kLanes); the others read as zero and are not written.
template <class T>
inline vf load_first(const T* p, int n) {
  T tmp[kLanes] = {};
  std::memcpy(tmp, p, n * sizeof(T));
  return load(tmp);
}
template <class T>
inline void store_first(T* p, vf x, int n) {
  T tmp[kLanes];
  store(tmp, x);
  std::memcpy(p, tmp, n * sizeof(T));
}

// One rounding where the instruction set has FMA, two where it has not, and never a mixture: results must not depend on which
// code shape the compiler chose.
inline vf fma(vf a, vf b, vf c) {
#if HP_VW == 16 && defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif HP_VW == 8 && defined(__FMA__)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

inline vf select(vi mask, vf a, vf b) { return (vf)(((vi)a & mask) | ((vi)b & ~mask)); }
inline vf vmax(vf a, vf b) { return select(a > b, a, b); }
inline vf vmin(vf a, vf b) { return select(a < b, a, b); }

// Relative error below 2e-7 on [-87, 88]; saturates to 0 and infinity outside. Cephes' polynomial (Moshier, expf).
inline vf exp(vf x) {
  const vi low = x < splat(-87.3f), high = x > splat(88.7f), nan = x != x;
  const vf c = vmin(vmax(x, splat(-87.3f)), splat(88.7f));
  const vf shifted = fma(c, splat(1.44269504088896341f), splat(12582912.f));
  const vf n = shifted - splat(12582912.f);
  vf r = fma(n, splat(-0.693359375f), c);
  r = fma(n, splat(2.12194440e-4f), r);
  vf p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r + splat(1.f));
  // 2^n in two factors: n reaches 128, one more than the exponent field holds.
  const vi k = __builtin_convertvector(n, vi), half = k >> 1;
  vf y = p * (vf)((half + 127) << 23) * (vf)((k - half + 127) << 23);
  y = select(low, vf{}, y);
  y = select(high, splat(__builtin_inff()), y);
  return select(nan, x, y);
}

inline vf sigmoid(vf x) { return splat(1.f) / (splat(1.f) + exp(-x)); }
inline vf silu(vf x) { return x / (splat(1.f) + exp(-x)); }

// 1 - 2 / (exp(2|x|) + 1), and the odd Taylor polynomial where that cancels.
inline vf tanh(vf x) {
  const vf a = select(x < vf{}, -x, x), x2 = x * x;
  vf big = splat(1.f) - splat(2.f) / (exp(a + a) + splat(1.f));
  big = select(x < vf{}, -big, big);
  vf p = splat(62.f / 2835.f);
  p = fma(p, x2, splat(-17.f / 315.f));
  p = fma(p, x2, splat(2.f / 15.f));
  p = fma(p, x2, splat(-1.f / 3.f));
  const vf small = fma(p * x2, x, x);
  return select(a < splat(0.15f), small, big);
}

// Hendrycks and Gimpel, "Gaussian Error Linear Units": 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), which is
// x * sigmoid of twice the argument.
inline vf gelu_tanh(vf x) {
  const vf inner = x * fma(x * x, splat(0.0713548162726f), splat(1.5957691216057308f));
  return x * sigmoid(inner);
}

inline vf soft_cap(vf x, float cap) { return cap > 0 ? splat(cap) * tanh(x / splat(cap)) : x; }

inline float reduce_add(vf x) {
  alignas(sizeof(vf)) float lane[kLanes];
  std::memcpy(lane, &x, sizeof x);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
  return lane[0];
}
inline float reduce_max(vf x) {
  alignas(sizeof(vf)) float lane[kLanes];
  std::memcpy(lane, &x, sizeof x);
  float best = lane[0];
  for (int i = 1; i < kLanes; ++i) best = lane[i] > best ? lane[i] : best;
  return best;
}

}  // namespace
}  // namespace hp::HP_ISA
