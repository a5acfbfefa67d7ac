#include "sampler.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

#include "ops.hpp"
#include "thread_pool.hpp"

namespace hp {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int kTopPBits = 24, kDrawBits = 48;
constexpr int64_t kNucleus = 256;  // best tokens among which top_p is looked for first

// Buckets of falling logits: 48 to each unit of (logit - best) / temperature, over all that weigh anything (e^-21 * 2^30 < 1).
constexpr int kBuckets = 1024;
constexpr float kBucketsPerUnit = 48.0f;
constexpr uint16_t kWeightless = kBuckets;

// `total * draw / 2^48`, rounded down.
int64_t target_of(int64_t total, int64_t draw) {
  return static_cast<int64_t>(static_cast<unsigned __int128>(total) * static_cast<uint64_t>(draw) >> kDrawBits);
}
// How much top_p keeps of a sum of weights: `total * top_p / 2^24`, rounded up.
int64_t top_p_goal(int64_t total, int32_t top_p) {
  const unsigned __int128 product = static_cast<unsigned __int128>(total) * static_cast<uint32_t>(top_p);
  return std::max<int64_t>(1, static_cast<int64_t>((product + ((1u << kTopPBits) - 1)) >> kTopPBits));
}

}  // namespace

std::vector<RowSampler::Scratch>& RowSampler::prepared(int64_t n) {
  const size_t threads = static_cast<size_t>(ThreadPool::global().num_threads()), blocks = static_cast<size_t>(sample_blocks(n));
  if (scratch_.size() < threads) scratch_.resize(threads);
  for (Scratch& scratch : scratch_) {
    if (scratch.block_max.size() >= blocks) continue;
    scratch.block_max.resize(blocks);
    scratch.ranked_max.resize(blocks);
    scratch.block_sums.resize(blocks);
  }
  return scratch_;
}

void RowSampler::sample(const SampleCall& call) {
  const SamplerKernels& kernels = HP_KERNELS(sampler_kernels);
  std::vector<Scratch>& scratch = prepared(call.n);
  ThreadPool::global().parallel_for(call.rows, 1, [&](int64_t begin, int64_t end, int thread) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t token = sample_row(kernels, call, i, scratch[static_cast<size_t>(thread)]);
      const int64_t row = call.step[i];
      call.tokens[i] = token;
      // A row with drafted tokens stands several times, and its last token is not asked for.
      __atomic_store_n(&call.last_tokens[row], std::max<int64_t>(token, 0), __ATOMIC_RELAXED);
      if (call.table[row].history >= 0 && token >= 0) call.history[call.table[row].history * call.n + token] += 2;
    }
  }, static_cast<int>(scratch.size()));
}

int64_t RowSampler::sample_row(const SamplerKernels& kernels, const SampleCall& call, int64_t i, Scratch& scratch) {
  const int64_t n = call.n;
  const float* x = call.logits + i * call.stride;
  const SamplingRow& row = call.table[call.step[i]];
  const bool early = call.step[call.rows + i] < row.min_tokens;
  if (row.allowed_mask >= 0 || row.bias >= 0 || row.history >= 0 || (early && row.stop_mask >= 0)) {
    const int64_t words = (n + 31) / 32;
    const Edits edits{{row.allowed_mask >= 0 ? call.masks + row.allowed_mask * words : nullptr,
                       early && row.stop_mask >= 0 ? call.masks + row.stop_mask * words : nullptr},
                      row.bias >= 0 ? call.biases + row.bias * n : nullptr,
                      row.history >= 0 ? call.history + row.history * n : nullptr,
                      row.repetition,
                      row.frequency,
                      row.presence};
    scratch.edited.resize(static_cast<size_t>(n));
    kernels.edit(x, n, edits, scratch.edited.data());
    x = scratch.edited.data();
  }
  const float* block_max = scratch.block_max.data();
  const int64_t blocks = sample_blocks(n);
  if (kernels.summarise(x, n, scratch.block_max.data())) return kNotFinite;
  const float* best_block = std::max_element(block_max, block_max + blocks);
  const float best = *best_block;
  if (best == kInfinity) return kNotFinite;
  if (best == -kInfinity) return kNoToken;
  if (row.inverse_temperature == 0.0f) {
    const int64_t first = (best_block - block_max) * kSampleBlock;
    return std::find(x + first, x + std::min(n, first + kSampleBlock), best) - x;
  }
  const Scale scale{best, row.inverse_temperature, row.log_min_p};
  const int64_t draw = call.step[2 * call.rows + i];
  const bool is_ranked = row.top_k < n || row.top_p < 1 << kTopPBits;
  return is_ranked ? draw_ranked(kernels, x, n, row, scale, draw, scratch) : draw_from_all(kernels, x, n, scale, draw, scratch);
}

int64_t RowSampler::draw_from_all(const SamplerKernels& kernels, const float* x, int64_t n, const Scale& scale, int64_t draw,
                                  Scratch& scratch) {
  const int64_t blocks = sample_blocks(n);
  int64_t* sums = scratch.block_sums.data();
  kernels.weigh(x, n, scale, scratch.block_max.data(), nullptr, sums);
  int64_t total = 0;
  for (int64_t b = 0; b < blocks; ++b) total += sums[b];
  int64_t target = target_of(total, draw), block = 0;
  while (target >= sums[block]) target -= sums[block++];
  int32_t weights[kSampleBlock];
  int64_t sum;
  const int64_t begin = block * kSampleBlock;
  kernels.weigh(x + begin, std::min(kSampleBlock, n - begin), scale, nullptr, weights, &sum);
  int64_t within = 0;
  while (target >= weights[within]) target -= weights[within++];
  return begin + within;
}

// Collects, in the order of ids, all tokens whose logit is not below some value that at least `count` logits reach.
void RowSampler::collect_best(const float* x, int64_t n, int64_t count, Scratch& scratch) {
  const int64_t blocks = sample_blocks(n);
  const float* block_max = scratch.block_max.data();
  float least = -kInfinity;
  if (count <= blocks) {
    // Each of `count` blocks holds its own greatest.
    float* ranked = scratch.ranked_max.data();
    std::copy_n(block_max, blocks, ranked);
    std::nth_element(ranked, ranked + count - 1, ranked + blocks, [](float a, float b) { return a > b; });
    least = ranked[count - 1];
  }
  scratch.candidates.clear();
  for (int64_t b = 0; b < blocks; ++b) {
    if (block_max[b] < least) continue;
    const int64_t end = std::min(n, (b + 1) * kSampleBlock);
    for (int64_t i = b * kSampleBlock; i < end; ++i)
      if (x[i] >= least) scratch.candidates.push_back({x[i], static_cast<int32_t>(i)});
  }
}

int64_t RowSampler::draw_ranked(const SamplerKernels& kernels, const float* x, int64_t n, const SamplingRow& row, const Scale& scale,
                                int64_t draw, Scratch& scratch) {
  const auto canonical = [](const Candidate& a, const Candidate& b) { return a.value > b.value || (a.value == b.value && a.id < b.id); };
  const int64_t blocks = sample_blocks(n);
  const bool is_limited = row.top_k < n, has_top_p = row.top_p < 1 << kTopPBits;
  std::vector<Candidate>& candidates = scratch.candidates;
  int64_t total = 0;
  if (is_limited) {
    if (row.top_k > blocks / 2) return draw_by_buckets(kernels, x, n, row, scale, draw, scratch);
    collect_best(x, n, row.top_k, scratch);
    if (static_cast<int64_t>(candidates.size()) > row.top_k) {
      std::nth_element(candidates.begin(), candidates.begin() + row.top_k, candidates.end(), canonical);
      candidates.resize(static_cast<size_t>(row.top_k));
    }
  } else {
    if (kNucleus > blocks / 2) return draw_by_buckets(kernels, x, n, row, scale, draw, scratch);
    kernels.weigh(x, n, scale, scratch.block_max.data(), nullptr, scratch.block_sums.data());
    for (int64_t b = 0; b < blocks; ++b) total += scratch.block_sums[static_cast<size_t>(b)];
    collect_best(x, n, kNucleus, scratch);
  }
  std::sort(candidates.begin(), candidates.end(), canonical);

  const int64_t count = static_cast<int64_t>(candidates.size());
  scratch.values.resize(candidates.size());
  scratch.weights.resize(std::max(scratch.weights.size(), candidates.size()));
  for (int64_t i = 0; i < count; ++i) scratch.values[static_cast<size_t>(i)] = candidates[static_cast<size_t>(i)].value;
  int32_t* weights = scratch.weights.data();
  // The sums of the blocks are not needed any more, and there are at least as many.
  if (sample_blocks(count) > static_cast<int64_t>(scratch.block_sums.size())) scratch.block_sums.resize(static_cast<size_t>(sample_blocks(count)));
  kernels.weigh(scratch.values.data(), count, scale, nullptr, weights, scratch.block_sums.data());
  if (is_limited) {
    for (int64_t i = 0; i < count; ++i) total += weights[i];
  }
  int64_t kept = count, sum = 0;
  if (has_top_p) {
    const int64_t goal = top_p_goal(total, row.top_p);
    kept = 0;
    while (kept < count && sum < goal) sum += weights[kept++];
    if (sum < goal) return draw_by_buckets(kernels, x, n, row, scale, draw, scratch);
  } else {
    sum = total;
  }
  // The draw takes tokens in the order of their ids.
  std::vector<std::pair<int32_t, int32_t>>& by_id = scratch.by_id;
  by_id.clear();
  for (int64_t i = 0; i < kept; ++i) by_id.emplace_back(candidates[static_cast<size_t>(i)].id, weights[i]);
  std::sort(by_id.begin(), by_id.end());
  int64_t target = target_of(sum, draw);
  size_t chosen = 0;
  while (target >= by_id[chosen].second) target -= by_id[chosen++].second;
  return by_id[chosen].first;
}

// Any top_k and top_p, in two passes over the row: tokens are counted and weighed by buckets of falling logits, and only the bucket in
// which the last token lies is sorted.
int64_t RowSampler::draw_by_buckets(const SamplerKernels& kernels, const float* x, int64_t n, const SamplingRow& row, const Scale& scale,
                                    int64_t draw, Scratch& scratch) {
  const int64_t blocks = sample_blocks(n);
  scratch.weights.resize(std::max(scratch.weights.size(), static_cast<size_t>(n)));
  scratch.buckets.resize(static_cast<size_t>(n));
  int32_t* weights = scratch.weights.data();
  uint16_t* buckets = scratch.buckets.data();
  int64_t* sums = scratch.block_sums.data();
  kernels.weigh(x, n, scale, scratch.block_max.data(), weights, sums);
  // The last of each is for what weighs nothing, and never drawn from.
  int64_t counts[kBuckets + 1] = {}, masses[kBuckets + 1] = {};
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t end = std::min(n, (b + 1) * kSampleBlock);
    for (int64_t i = b * kSampleBlock; i < end; ++i) {
      const float depth = (scale.best - x[i]) * scale.inverse_temperature * kBucketsPerUnit;
      buckets[i] = weights[i] ? static_cast<uint16_t>(std::min(depth, kBuckets - 1.0f)) : kWeightless;
    }
    if (sums[b])
      for (int64_t i = b * kSampleBlock; i < end; ++i) {
        ++counts[buckets[i]];
        masses[buckets[i]] += weights[i];
      }
  }

  std::vector<Candidate>& bucket = scratch.candidates;
  int sorted = -1;
  const auto sort_bucket = [&](int wanted) {
    if (sorted == wanted) return;
    sorted = wanted;
    bucket.clear();
    for (int64_t i = 0; i < n; ++i)
      if (buckets[i] == wanted) bucket.push_back({x[i], static_cast<int32_t>(i)});
    std::sort(bucket.begin(), bucket.end(),
              [](const Candidate& a, const Candidate& b) { return a.value > b.value || (a.value == b.value && a.id < b.id); });
  };

  int64_t total = 0, left = row.top_k;
  for (int b = 0; b < kBuckets && left > 0; ++b) {
    if (counts[b] <= left) {
      total += masses[b];
      left -= counts[b];
      continue;
    }
    sort_bucket(b);
    for (int64_t i = 0; i < left; ++i) total += weights[bucket[static_cast<size_t>(i)].id];
    break;
  }
  const int64_t goal = row.top_p < 1 << kTopPBits ? top_p_goal(total, row.top_p) : total;
  int64_t sum = 0;
  int last = 0;
  while (sum + masses[last] < goal) sum += masses[last++];
  sort_bucket(last);
  // Whole buckets before the last one are kept, and this number of tokens of it.
  size_t kept = 0;
  while (sum < goal) sum += weights[bucket[kept++].id];
  for (; kept < bucket.size(); ++kept) weights[bucket[kept].id] = 0;

  int64_t target = target_of(sum, draw);
  for (int64_t i = 0;; ++i) {
    if (buckets[i] > last) continue;
    if (target < weights[i]) return i;
    target -= weights[i];
  }
}

void RowSampler::logprobs(const LogprobsCall& call) {
  const SamplerKernels& kernels = HP_KERNELS(sampler_kernels);
  std::vector<Scratch>& scratch = prepared(call.n);
  ThreadPool::global().parallel_for(call.rows, 1, [&](int64_t begin, int64_t end, int thread) {
    Scratch& own = scratch[static_cast<size_t>(thread)];
    for (int64_t i = begin; i < end; ++i) {
      const float* x = call.logits + i * call.stride;
      int64_t* ids = call.ids + i * (1 + call.count);
      float* values = call.values + i * (1 + call.count);
      ids[0] = std::max<int64_t>(call.tokens[i], 0);
      const bool has_nan = kernels.summarise(x, call.n, own.block_max.data());
      const float sum = has_nan ? std::numeric_limits<float>::quiet_NaN() : op_kernels().log_sum_exp(x, call.n);
      if (call.count && !has_nan) {
        collect_best(x, call.n, call.count, own);
        std::vector<Candidate>& best = own.candidates;
        std::partial_sort(best.begin(), best.begin() + call.count, best.end(), [](const Candidate& a, const Candidate& b) {
          return a.value > b.value || (a.value == b.value && a.id < b.id);
        });
        for (int64_t k = 0; k < call.count; ++k) ids[1 + k] = best[static_cast<size_t>(k)].id;
      } else {
        std::fill(ids + 1, ids + 1 + call.count, 0);
      }
      const float own_value = x[ids[0]];
      int64_t rank = 1;
      for (int64_t j = 0; j < call.n; ++j) rank += x[j] > own_value;
      call.ranks[i] = rank;
      for (int64_t k = 0; k <= call.count; ++k) values[k] = x[ids[k]] - sum;
    }
  }, static_cast<int>(scratch.size()));
}

}  // namespace hp
