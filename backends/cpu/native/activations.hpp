// Elementwise functions of the decoder over simd.hpp's vectors.
#pragma once
#include "gemm.hpp"
#include "simd.hpp"

namespace hp {
namespace HP_ISA {

// a * b + c with one rounding where the instruction set has it and two where it has not, never a mixture: a sum must not
// depend on the code shape that the compiler chose around it.
HP_INLINE vf fma(vf a, vf b, vf c) {
#if defined(HP_SIMD_AVX512)
  return reinterpret_cast<vf>(
      _mm512_fmadd_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), reinterpret_cast<__m512>(c)));
#elif defined(HP_SIMD_AVX2)
  return reinterpret_cast<vf>(
      _mm256_fmadd_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b), reinterpret_cast<__m256>(c)));
#else
  return a * b + c;
#endif
}

// x times the logistic function of y, for results of type T; for bf16 its relative error is below 1e-5.
template <class T>
HP_INLINE vf times_logistic(T, vf x, vf y) {
  return x / (1.0f + exp(-y));
}
#if defined(HP_SIMD_AVX512)
HP_INLINE vf times_logistic(Bf16, vf x, vf y) { return x / (1.0f + exp2_for_bf16(y * -1.44269504088896341f)); }
#endif

template <class T>
HP_INLINE vf silu(T type, vf x) {
  return times_logistic(type, x, x);
}

// Hendrycks and Gimpel, "Gaussian Error Linear Units": 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), which is x times the
// logistic function of twice tanh's argument.
template <class T>
HP_INLINE vf gelu_tanh(T type, vf x) {
  return times_logistic(type, x, x * fma(x * x, splat(0.07135481627159615f), splat(1.5957691216057308f)));
}

// The distribution function of the normal distribution at -y, for y in [0, 13]: e^(-y^2 / 2) times a polynomial of 1 / (1 + 0.26 y), in the
// form of Abramowitz and Stegun, "Handbook of Mathematical Functions", 7.1.26, its terms a minimax fit. Relative error below 1e-6 for y
// below 3, and below 1e-5 beyond.
HP_INLINE vf normal_tail(vf y) {
  const vf t = 1.0f / fma(y, splat(0.26f), splat(1.0f));
  vf p = splat(-7.527323812246323e-2f);
  p = fma(p, t, splat(2.3774942755699158e-1f));
  p = fma(p, t, splat(-1.1984410136938095e-1f));
  p = fma(p, t, splat(1.7690128087997437e-1f));
  p = fma(p, t, splat(6.891176104545593e-2f));
  p = fma(p, t, splat(1.0811664909124374e-1f));
  p = fma(p, t, splat(1.0343813896179199e-1f));
  return p * t * exp2(y * y * -0.72134752044f);
}

// The same without a division, for results that are rounded to bf16: its logarithm to base 2 is a polynomial of y, a minimax fit. Absolute
// error below 2e-7, relative error below 2e-6 for y below 1, 1e-4 for y below 3 and 2e-3 for y below 6.
HP_INLINE vf normal_tail_for_bf16(vf y) {
  vf log = splat(-1.0651458524080226e-6f);
  log = fma(log, y, splat(4.5767628762405366e-5f));
  log = fma(log, y, splat(-8.145321044139564e-4f));
  log = fma(log, y, splat(8.128268644213676e-3f));
  log = fma(log, y, splat(-5.337335169315338e-2f));
  log = fma(log, y, splat(-4.588700234889984e-1f));
  log = fma(log, y, splat(-1.1511492729187012f));
  log = fma(log, y, splat(-1.0000001192092896f));
#if defined(HP_SIMD_AVX512)
  return exp2_for_bf16(log);
#else
  return exp2(log);
#endif
}

// x times the distribution function of the normal distribution, as max(x, 0) - |x| times the function at -|x|, which at 13 is next to zero.
HP_INLINE vf gelu_magnitude(vf x) { return min(splat(13.0f), bits_to_float(float_to_bits(x) & 0x7fffffffu)); }
template <class T>
HP_INLINE vf gelu(T, vf x) {
  const vf y = gelu_magnitude(x);
  return fma(-y, normal_tail(y), max(splat(0.0f), x));
}
HP_INLINE vf gelu(Bf16, vf x) {
  const vf y = gelu_magnitude(x);
  return fma(-y, normal_tail_for_bf16(y), max(splat(0.0f), x));
}

HP_INLINE vf soft_cap(vf x, float cap) { return cap > 0 ? cap * tanh(x / cap) : x; }

// GPT-OSS's model code: (up + 1) * gate * sigmoid(1.702 gate), gate at most 7 and up within 7 of zero. A NaN stays one.
template <class T>
HP_INLINE vf clamped_swiglu(T type, vf gate, vf up) {
  gate = min(splat(7.0f), gate);
  up = max(splat(-7.0f), min(splat(7.0f), up));
  return times_logistic(type, (up + 1.0f) * gate, 1.702f * gate);
}

template <class T>
HP_INLINE vf gated(T type, vf gate, vf up, Epilogue kind) {
  switch (kind) {
    case Epilogue::ClampedSwiGluMul: return clamped_swiglu(type, gate, up);
    case Epilogue::SiluMul: return silu(type, gate) * up;
    case Epilogue::GeluMul: return gelu(type, gate) * up;
    default: return gelu_tanh(type, gate) * up;
  }
}

}  // namespace HP_ISA
}  // namespace hp
