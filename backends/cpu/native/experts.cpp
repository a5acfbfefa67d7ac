#include "experts.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "ops.hpp"
#include "thread_pool.hpp"

namespace hp {
namespace {

constexpr int64_t kMaxRows = 4096;          // rows (tokens times experts of a token) that are under way at a time; bounds the workspace
constexpr int64_t kInlineElements = 65536;  // row work below this is shorter than handing it to another thread

// Elements between rows of a kernel's input, which may be fp32 or whole pairs.
int64_t row_stride(int64_t k) { return ceil_div(k, 16) * 16; }

int64_t tokens_at_once(int64_t tokens, int64_t top_k) { return std::min(tokens, std::max<int64_t>(1, kMaxRows / top_k)); }

// Calls f(row) for all rows, which the threads share out where that pays.
template <class F>
void share_rows(int64_t rows, int64_t elements, F&& f) {
  ThreadPool& pool = ThreadPool::global();
  const int64_t inline_rows = std::max<int64_t>(1, kInlineElements / std::max<int64_t>(1, elements));
  const int64_t grain = rows <= inline_rows ? rows : std::max<int64_t>(1, ceil_div(rows, kItemsPerThread * pool.num_threads()));
  pool.parallel_for(rows, grain, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) f(i);
  });
}

// The rows of one expert, and one of its two products.
struct Share {
  LinearCall call;
  const char* x;
};

// All experts' products of one kind. Items are groups of tiles of an expert times its rows, those of the experts with the most rows
// first.
void run_products(const std::vector<Share>& shares, int64_t x_stride, bool gated) {
  ThreadPool& pool = ThreadPool::global();
  const LinearKernels& kernels = HP_KERNELS(linear_kernels);
  const PackedWeight& any = shares.front().call.weight;
  const int64_t most_rows = shares.front().call.m, count = static_cast<int64_t>(shares.size());
  const int64_t tiles = num_tiles(any.n), stride = tile_bytes(any.k, any.dtype);
  const int threads = pool.num_threads();
  const int64_t wanted = kItemsPerThread * threads;

  const int64_t narrowest = most_rows >= 2 * kMinItemRows ? kGroupTiles : most_rows <= kFewRows && !gated ? 1 : 2;
  int64_t width = kGroupTiles;
  while (width > narrowest && count * ceil_div(tiles, width) < wanted) width /= 2;
  const int64_t per_share = ceil_div(tiles, width), items = count * per_share;
  const int64_t grain = most_rows <= kFewRows ? std::max<int64_t>(1, items / (8 * wanted)) : 1;

  pool.parallel_for(items, grain, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const Share& share = shares[i / per_share];
      const int64_t tile = i % per_share * width;
      // The item after the others' chunks is the likeliest next one when this chunk ends.
      const int64_t next = i + 1 < end ? i + 1 : i + 1 + (threads - 1) * grain;
      const int64_t next_tile = next % per_share * width;
      const bool fetch = next < items && next_tile + width <= tiles;
      LinearItem item{&share.call, share.x, x_stride, tile, static_cast<int>(std::min(width, tiles - tile)), 0, share.call.m,
                      fetch ? static_cast<const char*>(shares[next / per_share].call.weight.tiles) + next_tile * stride : nullptr,
                      0, 0, nullptr, nullptr};
      kernels.run_item(item);
    }
  });
}

// One expert's rows among the sorted ones.
struct Group {
  int64_t expert, first_row, rows;
};

void run_tokens(const ExpertsCall& call, int64_t first_token, int64_t tokens) {
  const LinearKernels& kernels = HP_KERNELS(linear_kernels);
  const OpKernels& ops = op_kernels();
  const int64_t rows = tokens * call.top_k, size = itemsize(call.dtype);
  const bool pairs = call.dtype == DType::BF16 && kernels.bf16_dot;
  // The kernels' input: BF16 pairs for their dot product, else fp32.
  const DType in_dtype = pairs ? DType::BF16 : DType::F32;
  const int64_t in_size = itemsize(in_dtype), x_stride = row_stride(call.hidden), inner_stride = row_stride(call.intermediate);
  const int32_t* experts = call.experts + first_token * call.top_k;

  char* scratch = static_cast<char*>(call.workspace.data);
  auto take = [&scratch](int64_t bytes) {
    char* p = scratch;
    scratch += aligned(bytes);
    return p;
  };
  char* sorted_x = take(rows * x_stride * in_size);
  char* inner = take(rows * inner_stride * in_size);
  float* outputs = reinterpret_cast<float*>(take(rows * call.hidden * 4));

  // Counting sort: row r of a token and one of its experts goes to place[r], after all rows of experts before its own.
  std::vector<int64_t> next(call.num_experts, 0), place(rows);
  for (int64_t r = 0; r < rows; ++r) ++next[experts[r]];
  std::vector<Group> groups;
  for (int64_t e = 0, first = 0; e < call.num_experts; ++e) {
    const int64_t count = next[e];
    if (count) groups.push_back({e, first, count});
    next[e] = first;
    first += count;
  }
  for (int64_t r = 0; r < rows; ++r) place[r] = next[experts[r]]++;
  std::stable_sort(groups.begin(), groups.end(), [](const Group& a, const Group& b) { return a.rows > b.rows; });

  share_rows(rows, call.hidden, [&](int64_t r) {
    const char* from = static_cast<const char*>(call.x) + (first_token + r / call.top_k) * call.x_stride * size;
    char* to = sorted_x + place[r] * x_stride * in_size;
    char* activated = inner + place[r] * inner_stride * in_size;
    if (pairs) std::memcpy(to, from, call.hidden * size);
    else kernels.widen(from, call.dtype, call.hidden, reinterpret_cast<float*>(to));
    std::memset(to + call.hidden * in_size, 0, (x_stride - call.hidden) * in_size);
    std::memset(activated + call.intermediate * in_size, 0, (inner_stride - call.intermediate) * in_size);
  });

  const int64_t columns = gated_columns(call.intermediate);
  // Biases of the experts in use, in fp32, those of gate and up in the order of the gated pair's columns.
  const bool biased = call.gate_up_bias || call.down_bias;
  float* biases = biased ? reinterpret_cast<float*>(take(static_cast<int64_t>(groups.size()) * (columns + call.hidden) * 4)) : nullptr;
  const auto gate_up_bias = [&](size_t group) { return call.gate_up_bias ? biases + group * (columns + call.hidden) : nullptr; };
  const auto down_bias = [&](size_t group) { return call.down_bias ? biases + group * (columns + call.hidden) + columns : nullptr; };
  for (size_t i = 0; biased && i < groups.size(); ++i) {
    if (call.gate_up_bias) {
      const char* gates = static_cast<const char*>(call.gate_up_bias) + groups[i].expert * 2 * call.intermediate * size;
      for (int64_t j = 0; j < call.intermediate; j += kTileColumns) {
        const int64_t n = std::min<int64_t>(kTileColumns, call.intermediate - j);
        kernels.widen(gates + j * size, call.dtype, n, gate_up_bias(i) + 2 * j);
        kernels.widen(gates + (call.intermediate + j) * size, call.dtype, n, gate_up_bias(i) + 2 * j + kTileColumns);
      }
    }
    if (call.down_bias)
      kernels.widen(static_cast<const char*>(call.down_bias) + groups[i].expert * call.hidden * size, call.dtype, call.hidden, down_bias(i));
  }

  const int64_t gate_up_bytes = packed_bytes(columns, call.hidden, call.dtype);
  const int64_t down_bytes = packed_bytes(call.hidden, call.intermediate, call.dtype);
  std::vector<Share> shares;
  shares.reserve(groups.size());
  for (size_t i = 0; i < groups.size(); ++i) {
    const Group& g = groups[i];
    LinearCall c;
    c.weight = {static_cast<const char*>(call.gate_up) + g.expert * gate_up_bytes, columns, call.hidden, call.dtype};
    c.m = g.rows;
    c.bias = gate_up_bias(i);
    c.epilogue = call.activation;
    c.out = inner + g.first_row * inner_stride * in_size;
    c.out_stride = inner_stride;
    c.out_dtype = in_dtype;
    c.out_columns = call.intermediate;
    shares.push_back({c, sorted_x + g.first_row * x_stride * in_size});
  }
  run_products(shares, x_stride, true);

  shares.clear();
  for (size_t i = 0; i < groups.size(); ++i) {
    const Group& g = groups[i];
    LinearCall c;
    c.weight = {static_cast<const char*>(call.down) + g.expert * down_bytes, call.hidden, call.intermediate, call.dtype};
    c.m = g.rows;
    c.bias = down_bias(i);
    c.out = outputs + g.first_row * call.hidden;
    c.out_stride = call.hidden;
    shares.push_back({c, inner + g.first_row * inner_stride * in_size});
  }
  run_products(shares, inner_stride, false);

  share_rows(tokens, call.top_k * call.hidden, [&](int64_t t) {
    char* out = static_cast<char*>(call.out) + (first_token + t) * call.out_stride * size;
    ops.weighted_sum(outputs, call.hidden, place.data() + t * call.top_k, call.weights + (first_token + t) * call.top_k, call.top_k,
                     call.hidden, out, call.dtype);
  });
}

}  // namespace

int64_t gated_columns(int64_t intermediate) { return 2 * kTileColumns * ceil_div(intermediate, kTileColumns); }

int64_t experts_workspace_bytes(int64_t tokens, int64_t top_k, int64_t num_experts, int64_t hidden, int64_t intermediate) {
  const int64_t rows = tokens_at_once(tokens, top_k) * top_k;
  return aligned(rows * row_stride(hidden) * 4) + aligned(rows * row_stride(intermediate) * 4) + aligned(rows * hidden * 4) +
         aligned(std::min(rows, num_experts) * (gated_columns(intermediate) + hidden) * 4);
}

void run_experts(const ExpertsCall& call) {
  if (call.tokens == 0) return;
  const int64_t needed = experts_workspace_bytes(call.tokens, call.top_k, call.num_experts, call.hidden, call.intermediate);
  if (call.workspace.bytes < needed)
    throw std::invalid_argument("experts of " + std::to_string(call.tokens) + " tokens need a workspace of " + std::to_string(needed) +
                                " bytes, got " + std::to_string(call.workspace.bytes));
  for (int64_t r = 0; r < call.tokens * call.top_k; ++r)
    if (call.experts[r] < 0 || call.experts[r] >= call.num_experts)
      throw std::out_of_range("expert " + std::to_string(call.experts[r]) + " is not one of " + std::to_string(call.num_experts));
  const int64_t at_once = tokens_at_once(call.tokens, call.top_k);
  for (int64_t first = 0; first < call.tokens; first += at_once) run_tokens(call, first, std::min(at_once, call.tokens - first));
}

void route(const void* logits, int64_t stride, int64_t rows, int64_t n, DType dtype, int64_t k, bool renormalise, int32_t* experts,
           float* weights) {
  const LinearKernels& kernels = HP_KERNELS(linear_kernels);
  const OpKernels& ops = op_kernels();
  ThreadPool& pool = ThreadPool::global();
  const int64_t inline_rows = std::max<int64_t>(1, kInlineElements / (n * std::max<int64_t>(1, k)));
  const int64_t grain = rows <= inline_rows ? std::max<int64_t>(1, rows) : std::max(inline_rows, ceil_div(rows, kItemsPerThread * pool.num_threads()));
  pool.parallel_for(rows, grain, [&](int64_t begin, int64_t end, int) {
    std::vector<float> row(n);
    for (int64_t i = begin; i < end; ++i) {
      kernels.widen(static_cast<const char*>(logits) + i * stride * itemsize(dtype), dtype, n, row.data());
      ops.top_k_softmax(row.data(), n, k, renormalise, experts + i * k, weights + i * k);
    }
  });
}

}  // namespace hp
