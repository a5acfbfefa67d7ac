// Row kernels of sampler.hpp, compiled once per instruction set.
#include "sampler.hpp"

#include "simd.hpp"

namespace hp {
namespace HP_ISA {
namespace {

typedef int64_t vl __attribute__((vector_size(HP_VW * 8)));

constexpr int kWord = 32;  // tokens in a word of a mask
constexpr float kUnit = 1073741824.0f;  // 2^30, the greatest weight
constexpr float kWeightless = -21.0f;   // e^-21 * 2^30 < 1
constexpr float kInfinity = __builtin_inff();

HP_INLINE vi load_ints(const int32_t* p) {
  vi x;
  std::memcpy(&x, p, sizeof(x));
  return x;
}

HP_INLINE vi lane_numbers() {
  vi lanes;
  for (int i = 0; i < kLanes; ++i) lanes[i] = i;
  return lanes;
}

// Changes 32 logits in place; bits are those of the tokens that are left.
HP_INLINE void edit_word(float* x, uint32_t bits, const float* bias, const int32_t* history, const Edits& edits) {
  if (bits != 0xffffffffu) {
    const vi lanes = lane_numbers();
    for (int i = 0; i < kWord; i += kLanes) {
      const vu left = (vu{} + bits >> reinterpret_cast<vu>(lanes + i)) & 1u;
      store(x + i, left != 0u ? load(x + i) : splat(-kInfinity));
    }
  }
  if (bias)
    for (int i = 0; i < kWord; i += kLanes) {
      const vf v = load(x + i);
      store(x + i, v != -kInfinity ? v + load(bias + i) : v);
    }
  if (!history) return;
  vi any{};
  for (int i = 0; i < kWord; i += kLanes) any |= load_ints(history + i);
  int32_t seen = 0;
  for (int i = 0; i < kLanes; ++i) seen |= any[i];
  if (!seen) return;
  for (int i = 0; i < kWord; i += kLanes) {
    const vf v = load(x + i);
    const vi times = load_ints(history + i);
    vf y = v > 0.0f ? v / edits.repetition : v * edits.repetition;
    y = y - edits.frequency * __builtin_convertvector(times >> 1, vf);
    y = y - (times > 1 ? splat(edits.presence) : vf{});
    store(x + i, times > 0 ? y : v);
  }
}

void edit(const float* x, int64_t n, const Edits& edits, float* out) {
  for (int64_t i = 0; i < n; i += kWord) {
    uint32_t bits = 0xffffffffu;
    for (const uint32_t* mask : edits.masks)
      if (mask) bits &= mask[i / kWord];
    const int64_t count = n - i < kWord ? n - i : kWord;
    if (count == kWord) {
      std::memcpy(out + i, x + i, kWord * sizeof(float));
      edit_word(out + i, bits, edits.bias ? edits.bias + i : nullptr, edits.history ? edits.history + i : nullptr, edits);
    } else {
      float values[kWord] = {}, bias[kWord] = {};
      int32_t history[kWord] = {};
      const size_t bytes = static_cast<size_t>(count) * 4;
      std::memcpy(values, x + i, bytes);
      if (edits.bias) std::memcpy(bias, edits.bias + i, bytes);
      if (edits.history) std::memcpy(history, edits.history + i, bytes);
      edit_word(values, bits, bias, history, edits);
      std::memcpy(out + i, values, bytes);
    }
  }
}

// A whole block: x itself, or the last few logits and minus infinity.
HP_INLINE const float* whole_block(const float* x, int64_t count, float* padded) {
  if (count >= kSampleBlock) return x;
  for (int64_t i = 0; i < kSampleBlock; ++i) padded[i] = i < count ? x[i] : -kInfinity;
  return padded;
}

bool summarise(const float* x, int64_t n, float* block_max) {
  vi nan{};
  for (int64_t b = 0; b * kSampleBlock < n; ++b) {
    float padded[kSampleBlock];
    const float* block = whole_block(x + b * kSampleBlock, n - b * kSampleBlock, padded);
    vf best = splat(-kInfinity);
#pragma GCC unroll 4
    for (int i = 0; i < kSampleBlock; i += kLanes) {
      const vf v = load(block + i);
      best = max(v, best);
      nan |= v != v;
    }
    block_max[b] = hmax(best);
  }
  int32_t found = 0;
  for (int i = 0; i < kLanes; ++i) found |= nan[i];
  return found != 0;
}

void weigh(const float* x, int64_t n, const Scale& scale, const float* block_max, int32_t* weights, int64_t* block_sums) {
  for (int64_t b = 0; b * kSampleBlock < n; ++b) {
    const int64_t begin = b * kSampleBlock, count = n - begin < kSampleBlock ? n - begin : kSampleBlock;
    const size_t bytes = static_cast<size_t>(count) * 4;
    if (block_max && (block_max[b] - scale.best) * scale.inverse_temperature < kWeightless) {
      block_sums[b] = 0;
      if (weights) std::memset(weights + begin, 0, bytes);
      continue;
    }
    float padded[kSampleBlock];
    int32_t found[kSampleBlock];
    const float* block = whole_block(x + begin, count, padded);
    vl sum{};
#pragma GCC unroll 4
    for (int i = 0; i < kSampleBlock; i += kLanes) {
      const vf scaled = (load(block + i) - scale.best) * scale.inverse_temperature;
      const vi weight = __builtin_convertvector(exp(scaled) * kUnit, vi) & (scaled >= scale.log_min_p);
      if (weights) std::memcpy(found + i, &weight, sizeof(weight));
      sum += __builtin_convertvector(weight, vl);
    }
    int64_t total = 0;
    for (int i = 0; i < kLanes; ++i) total += sum[i];
    block_sums[b] = total;
    if (weights) std::memcpy(weights + begin, found, bytes);
  }
}

}  // namespace

const SamplerKernels& sampler_kernels() {
  static constexpr SamplerKernels kernels = {edit, summarise, weigh};
  return kernels;
}

}  // namespace HP_ISA
}  // namespace hp
