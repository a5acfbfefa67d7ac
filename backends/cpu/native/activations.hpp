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

HP_INLINE vf silu(vf x) { return x / (1.0f + exp(-x)); }

// Hendrycks and Gimpel, "Gaussian Error Linear Units": 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), which is x times the
// logistic function of twice tanh's argument.
HP_INLINE vf gelu_tanh(vf x) {
  const vf argument = x * fma(x * x, splat(0.07135481627159615f), splat(1.5957691216057308f));
  return x / (1.0f + exp(-argument));
}

HP_INLINE vf soft_cap(vf x, float cap) { return cap > 0 ? cap * tanh(x / cap) : x; }

// GPT-OSS's model code: (up + 1) * gate * sigmoid(1.702 gate), gate at most 7 and up within 7 of zero. A NaN stays one.
HP_INLINE vf clamped_swiglu(vf gate, vf up) {
  gate = min(splat(7.0f), gate);
  up = max(splat(-7.0f), min(splat(7.0f), up));
  return (up + 1.0f) * gate / (1.0f + exp(-1.702f * gate));
}

HP_INLINE vf gated(vf gate, vf up, Epilogue kind) {
  if (kind == Epilogue::ClampedSwiGluMul) return clamped_swiglu(gate, up);
  return (kind == Epilogue::SiluMul ? silu(gate) : gelu_tanh(gate)) * up;
}

}  // namespace HP_ISA
}  // namespace hp
