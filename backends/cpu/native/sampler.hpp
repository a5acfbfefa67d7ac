// Sampling of tokens from rows of logits, as hardpoint_conformance.sampling_reference defines it, and log probabilities.
//
// A row's result depends on that row alone: weights are integers, so sums do not depend on how a row is cut.
#pragma once
#include <cstdint>
#include <utility>
#include <vector>

#include "isa.hpp"

namespace hp {

// A row of hardpoint.interfaces.SamplingTables.parameters; see hardpoint.interfaces.sampling.Column.
struct SamplingRow {
  float inverse_temperature;  // 0: greedy
  int32_t top_p;              // scaled by 2^24
  float log_min_p;
  int32_t top_k;
  float repetition, frequency, presence;
  int32_t min_tokens;
  int32_t allowed_mask, stop_mask, bias, history;  // -1: none
};
static_assert(sizeof(SamplingRow) == 48);

// In place of a token, why there is none (hardpoint.interfaces.SampleFailure).
constexpr int64_t kNoToken = -1, kNotFinite = -2;

constexpr int64_t kSampleBlock = 64;  // tokens whose greatest logit, and whose sum of weights, are kept
inline int64_t sample_blocks(int64_t n) { return (n + kSampleBlock - 1) / kSampleBlock; }

// What changes a row's logits; null for what the row does not have.
struct Edits {
  const uint32_t* masks[2];  // [ceil(n / 32)] bits of tokens that are left
  const float* bias;         // [n]
  int32_t* history;          // [n] 2 * times generated + (1 if in the prompt)
  float repetition, frequency, presence;
};

struct Scale {
  float best, inverse_temperature, log_min_p;
};

struct SamplerKernels {
  // out = x after masks, bias and penalties.
  void (*edit)(const float* x, int64_t n, const Edits& edits, float* out);
  // Writes the greatest logit of each block; returns whether there is a NaN.
  bool (*summarise)(const float* x, int64_t n, float* block_max);
  // Writes each block's sum of weights and, where not null, the weights. Skips blocks that weigh nothing where block_max is not null.
  void (*weigh)(const float* x, int64_t n, const Scale& scale, const float* block_max, int32_t* weights, int64_t* block_sums);
};

struct SampleCall {
  const float* logits = nullptr;  // [rows, n]
  int64_t stride = 0, rows = 0, n = 0;
  const int64_t* step = nullptr;  // [3, rows]: row of the tables, tokens so far, draw
  const SamplingRow* table = nullptr;
  const uint32_t* masks = nullptr;
  const float* biases = nullptr;
  int32_t* history = nullptr;
  int64_t* last_tokens = nullptr;
  int64_t* tokens = nullptr;  // [rows]
};

struct LogprobsCall {
  const float* logits = nullptr;  // [rows, n]
  int64_t stride = 0, rows = 0, n = 0;
  const int64_t* tokens = nullptr;  // [rows]
  int64_t count = 0;                // of the best, at most n
  int64_t* ids = nullptr;           // [rows, 1 + count]
  float* values = nullptr;          // [rows, 1 + count]
  int64_t* ranks = nullptr;         // [rows]
};

// Keeps working memory for each thread of the pool. One call at a time.
class RowSampler {
 public:
  void sample(const SampleCall& call);
  void logprobs(const LogprobsCall& call);

 private:
  struct Candidate {
    float value;
    int32_t id;
  };
  struct Scratch {
    std::vector<float> edited, block_max, ranked_max;
    std::vector<int64_t> block_sums;
    std::vector<int32_t> weights;
    std::vector<uint16_t> buckets;
    std::vector<Candidate> candidates;
    std::vector<float> values;
    std::vector<std::pair<int32_t, int32_t>> by_id;  // ids and weights
  };

  std::vector<Scratch>& prepared(int64_t n);
  static int64_t sample_row(const SamplerKernels& kernels, const SampleCall& call, int64_t i, Scratch& scratch);
  static int64_t draw_from_all(const SamplerKernels& kernels, const float* x, int64_t n, const Scale& scale, int64_t draw, Scratch& scratch);
  static int64_t draw_ranked(const SamplerKernels& kernels, const float* x, int64_t n, const SamplingRow& row, const Scale& scale,
                             int64_t draw, Scratch& scratch);
  static int64_t draw_by_buckets(const SamplerKernels& kernels, const float* x, int64_t n, const SamplingRow& row, const Scale& scale,
                                 int64_t draw, Scratch& scratch);
  static void collect_best(const float* x, int64_t n, int64_t count, Scratch& scratch);

  std::vector<Scratch> scratch_;
};

}  // namespace hp

HP_DECLARE_PER_ISA(const SamplerKernels&, sampler_kernels)
