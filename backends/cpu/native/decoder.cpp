#include "decoder.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "thread_pool.hpp"

namespace hp {
namespace {

constexpr int64_t kAdaptedRows = 256;  // computed together: the more, the less often weights are read, and the more memory their sums take
constexpr int64_t kFewTokens = 8;  // up to here row work is shorter than handing it to another thread

std::string text(int64_t value) { return std::to_string(value); }

int64_t qkv_width(const AttentionLayer& a) { return int64_t{a.num_heads + 2 * a.num_kv_heads} * a.head_dim; }
int64_t attention_width(const AttentionLayer& a) { return int64_t{a.num_heads} * a.head_dim; }

template <class F>
void for_tokens(int64_t tokens, F&& f) {
  ThreadPool& pool = ThreadPool::global();
  const int64_t grain = tokens <= kFewTokens ? tokens : std::max<int64_t>(kFewTokens, ceil_div(tokens, 8 * pool.num_threads()));
  pool.parallel_for(tokens, grain, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) f(t);
  });
}

// The normalisation that precedes a linear layer, as its producer of rows.
struct NormedRows {
  const OpKernels* kernels;
  const float* residual;
  const int32_t* rows;  // null: all, in order
  const float* norm;
  int64_t hidden;
  float eps;
  DType dtype;

  static void fill(const void* context, int64_t i, void* row) {
    const auto& c = *static_cast<const NormedRows*>(context);
    const int64_t token = c.rows ? c.rows[i] : i;
    c.kernels->rms_norm(c.residual + token * c.hidden, DType::F32, c.norm, c.hidden, c.eps, row, c.dtype);
  }
  RowProducer producer() const { return {fill, this}; }
};

}  // namespace

Decoder::Decoder(DecoderConfig config) : config_(std::move(config)) {
  if (config_.layers.empty()) throw std::invalid_argument("a decoder needs at least one layer");
  for (const DecoderLayer& layer : config_.layers) {
    if (config_.rotary_dim < 0 || config_.rotary_dim % 2 || config_.rotary_dim > layer.attention.head_dim)
      throw std::invalid_argument("rotary dimension " + text(config_.rotary_dim) + " must be even and at most the head dimension " +
                                  text(layer.attention.head_dim));
    if (!layer.attention_out_norm != !layer.mlp_out_norm || !layer.q_norm != !layer.k_norm)
      throw std::invalid_argument("norms of attention and feed-forward output, and of queries and keys, come in pairs");
    sandwich_ = sandwich_ || layer.attention_out_norm;
    for (const PackedWeight* weight : {&layer.qkv, &layer.o, &layer.gate_up, &layer.down}) in_blocks_ = in_blocks_ || weight->blocks != BlockFormat::None;
  }
  in_blocks_ = in_blocks_ || config_.head.blocks != BlockFormat::None;
  if (config_.adapted) adapters_.resize(config_.layers.size() * kLinears);
  Scratch unused{};
  scratch_bytes_ = lay_out(nullptr, unused);
}

int64_t Decoder::lay_out(char* base, Scratch& s) const {
  const int64_t tokens = config_.max_tokens, hidden = config_.hidden, size = itemsize(config_.dtype);
  int64_t widest_qkv = 0, widest_attention = 0, workspace = 0;
  for (const DecoderLayer& layer : config_.layers) {
    widest_qkv = std::max(widest_qkv, qkv_width(layer.attention));
    widest_attention = std::max(widest_attention, attention_width(layer.attention));
  }
  for (const int64_t k : {hidden, widest_attention, config_.intermediate})
    workspace = std::max(workspace, linear_workspace_bytes(std::max(tokens, config_.max_rows), k, config_.dtype, in_blocks_));

  int64_t used = 0;
  auto take = [&](int64_t bytes) {
    char* p = base ? base + used : nullptr;
    used += aligned(bytes);
    return p;
  };
  s.residual = reinterpret_cast<float*>(take(tokens * hidden * 4));
  s.branch = reinterpret_cast<float*>(take(sandwich_ ? tokens * hidden * 4 : 0));
  s.normed = take(std::max(tokens, config_.max_rows) * hidden * size);
  s.qkv = take(tokens * widest_qkv * size);
  s.attended = take(tokens * widest_attention * size);
  s.activated = take(tokens * config_.intermediate * size);
  int64_t widest = 0;
  for (const DecoderLayer& layer : config_.layers)
    for (const PackedWeight* weight : {&layer.qkv, &layer.o, &layer.gate_up, &layer.down}) widest = std::max(widest, num_tiles(weight->n) * kTileColumns);
  s.added = reinterpret_cast<float*>(take(config_.adapted ? std::min(tokens, kAdaptedRows) * widest * 4 : 0));
  s.workspace = {take(workspace), workspace};
  return used;
}

void Decoder::set_scratch(void* data, int64_t bytes) {
  if (bytes < scratch_bytes_)
    throw std::invalid_argument("decoder scratch must have " + text(scratch_bytes_) + " bytes, got " + text(bytes));
  lay_out(static_cast<char*>(data), scratch_);
}

void Decoder::set_rope_tables(std::vector<RopeTable> tables) {
  for (const DecoderLayer& layer : config_.layers)
    if (layer.rope_table < 0 || layer.rope_table >= static_cast<int>(tables.size()))
      throw std::invalid_argument("a layer uses rotary table " + text(layer.rope_table) + " of " + text(tables.size()));
  rope_tables_ = std::move(tables);
}

void Decoder::set_adapters(int64_t layer, DecoderLinear linear, const AdapterMatrices& matrices) {
  if (!config_.adapted) throw std::invalid_argument("the decoder was made without adapters");
  const DecoderLayer& owner = config_.layers.at(static_cast<size_t>(layer));
  const PackedWeight& weight = *std::array{&owner.qkv, &owner.o, &owner.gate_up, &owner.down}[static_cast<size_t>(linear)];
  if (matrices.columns != weight.k || matrices.rows > weight.n || matrices.dtype != config_.dtype)
    throw std::invalid_argument("adapters of [" + text(matrices.rows) + ", " + text(matrices.columns) + "] do not fit a linear layer of [" + text(weight.n) +
                                ", " + text(weight.k) + "]");
  adapters_[number_of({&owner, linear, nullptr})] = matrices;
}

void Decoder::check(const DecoderStep& step, const AttentionBatch& batch) const {
  if (!scratch_.residual) throw std::invalid_argument("the decoder has no scratch memory yet");
  if (rope_tables_.empty()) throw std::invalid_argument("the decoder has no rotary tables yet");
  if (batch.num_tokens > config_.max_tokens)
    throw std::invalid_argument("a step of " + text(batch.num_tokens) + " tokens exceeds the decoder's " + text(config_.max_tokens));
  int64_t positions = rope_tables_[0].max_positions;
  for (const RopeTable& table : rope_tables_) positions = std::min(positions, table.max_positions);
  for (int64_t t = 0; t < batch.num_tokens; ++t) {
    if (step.token_ids[t] < 0 || step.token_ids[t] >= config_.vocab)
      throw std::out_of_range("token id " + text(step.token_ids[t]) + " is not in the vocabulary of " + text(config_.vocab));
    if (step.positions[t] < 0 || step.positions[t] >= positions)
      throw std::out_of_range("position " + text(step.positions[t]) + " is not in the rotary tables of " + text(positions) + " rows");
  }
  for (int64_t i = 0; i < step.num_rows; ++i)
    if (step.rows[i] < 0 || step.rows[i] >= batch.num_tokens)
      throw std::out_of_range("row " + text(step.rows[i]) + " is not one of the step's " + text(batch.num_tokens) + " tokens");
  for (int64_t i = 0; i < step.num_embedded; ++i)
    if (step.embedded_rows[i] < 0 || step.embedded_rows[i] >= batch.num_tokens)
      throw std::out_of_range("embedded row " + text(step.embedded_rows[i]) + " is not one of the step's " + text(batch.num_tokens) + " tokens");
  if (step.num_adapters && !config_.adapted) throw std::invalid_argument("the decoder was made without adapters");
  for (int64_t i = 0; i < step.num_adapters; ++i) {
    for (const AdapterMatrices& one : adapters_)
      if (one.down && (step.adapter_slots[i] < 0 || step.adapter_slots[i] >= one.slots))
        throw std::out_of_range("slot " + text(step.adapter_slots[i]) + " is not one of " + text(one.slots) + " of adapters");
    for (int32_t t = step.adapter_starts[i]; t < step.adapter_starts[i + 1]; ++t)
      if (step.adapted_tokens[t] < 0 || step.adapted_tokens[t] >= batch.num_tokens)
        throw std::out_of_range("adapted token " + text(step.adapted_tokens[t]) + " is not one of the step's " + text(batch.num_tokens));
  }
}

LinearCall Decoder::call(const PackedWeight& weight, const void* x, int64_t x_stride, int64_t m) const {
  LinearCall c;
  c.weight = weight;
  c.x = x;
  c.x_stride = x_stride;
  c.m = m;
  c.workspace = scratch_.workspace;
  return c;
}

size_t Decoder::number_of(const Place& place) const {
  return static_cast<size_t>((place.layer - config_.layers.data()) * kLinears) + static_cast<size_t>(place.linear);
}

// Null where no row's adapter has anything for the layer.
const AdapterMatrices* Decoder::adapters_of(const Place& place) const {
  if (!place.rows) return nullptr;
  const AdapterMatrices& found = adapters_[number_of(place)];
  if (!found.down) return nullptr;
  for (const AdaptedRows::Range& range : place.rows->ranges)
    for (const AdapterItem& item : range.items)
      if (found.has(item.slot)) return &found;
  return nullptr;
}

// Which rows of a step go through which adapter. `kept`, where it is not null: the m tokens, rising, that are the rows from here on.
Decoder::AdaptedRows Decoder::adapted_rows(const DecoderStep& step, int64_t tokens, const int32_t* kept, int64_t m) {
  std::vector<int64_t> row_of;
  if (kept) {
    row_of.assign(static_cast<size_t>(tokens), -1);
    for (int64_t i = 0; i < m; ++i) row_of[static_cast<size_t>(kept[i])] = i;
  }
  AdaptedRows found;
  found.slots.assign(step.adapter_slots, step.adapter_slots + step.num_adapters);
  std::sort(found.slots.begin(), found.slots.end());
  found.slots.erase(std::unique(found.slots.begin(), found.slots.end()), found.slots.end());
  for (int64_t first = 0; first < m; first += kAdaptedRows) {
    const int64_t count = std::min(m - first, kAdaptedRows);
    found.ranges.push_back({first, count, {}, {}});
    AdaptedRows::Range& range = found.ranges.back();
    std::vector<uint8_t> is_adapted(static_cast<size_t>(count));
    // Items point to the tokens, which therefore stay where they are.
    range.tokens.reserve(static_cast<size_t>(count));
    for (int64_t i = 0; i < step.num_adapters; ++i) {
      const size_t begin = range.tokens.size();
      for (int32_t t = step.adapter_starts[i]; t < step.adapter_starts[i + 1]; ++t) {
        const int64_t token = step.adapted_tokens[t], row = (kept ? row_of[static_cast<size_t>(token)] : token) - first;
        if (row < 0 || row >= count || is_adapted[static_cast<size_t>(row)]) continue;
        is_adapted[static_cast<size_t>(row)] = 1;
        range.tokens.push_back(row);
      }
      append_items(step.adapter_slots[i], range.tokens.data() + begin, static_cast<int64_t>(range.tokens.size() - begin), range.items);
    }
  }
  return found;
}

// The first lines of what a step's adapters have for the linear layer after one.
std::vector<LineSpan> Decoder::lines_after(const Place& place, int64_t most) const {
  std::vector<LineSpan> found;
  const size_t next = number_of(place) + 1;
  if (next == adapters_.size() || !adapters_[next].down) return found;
  const AdapterMatrices& m = adapters_[next];
  const int64_t size = itemsize(m.dtype);
  int64_t count = 0;
  const auto append = [&](const void* matrices, int64_t offset, int64_t elements) {
    const char* data = static_cast<const char*>(matrices) + offset * size;
    const int64_t lines = std::min(ceil_div(elements * size, kLineBytes), most - count);
    if (lines == 0) return;
    if (!found.empty() && found.back().data + (found.back().end - found.back().begin) * kLineBytes == data) found.back().end += lines;
    else found.push_back({data, count, count + lines});
    count += lines;
  };
  for (const int slot : place.rows->slots) {
    int64_t most_rank = 0;
    for (int64_t part = 0; part < m.parts; ++part) {
      const int64_t rank = m.ranks[slot * m.parts_stride + part];
      append(m.down, slot * m.down_stride + part * m.max_rank * m.columns, rank * m.columns);
      most_rank = std::max(most_rank, rank);
    }
    append(m.up, slot * m.up_stride, most_rank * m.rows);
  }
  return found;
}

// The product alone. For a batch of some rows it computes for longer than it reads, while adapters for a few rows each are bound by the
// memory: it brings those of the next layer meanwhile. Of several ranges each would bring them again, and there computing takes the time.
void Decoder::run_linear(LinearCall c, const RowProducer& producer, const Place& place) const {
  if (!place.rows || place.rows->ranges.size() != 1) return linear(c, producer);
  const std::vector<LineSpan> ahead = lines_after(place, spare_lines(c));
  if (!ahead.empty()) {
    c.ahead = ahead.data();
    c.ahead_lines = ahead.back().end;
  }
  linear(c, producer);
}

// What adapters add comes first, and is added to the product's sums before they are rounded: a row whose adapter has nothing for the layer has the
// bits that it has in a step without any.
void Decoder::adapted_linear(LinearCall c, const Place& place) const {
  const AdapterMatrices* matrices = adapters_of(place);
  if (!matrices) return run_linear(c, {}, place);
  const int64_t out_size = itemsize(c.out_dtype);
  AdapterCall adding;
  adding.matrices = *matrices;
  adding.x_stride = c.x_stride;
  adding.sums = scratch_.added;
  adding.sums_stride = num_tiles(c.weight.n) * kTileColumns;
  adding.gated_pair = is_gated(c.epilogue);
  std::vector<AdapterItem> items;
  std::vector<uint8_t> has_added;
  for (const AdaptedRows::Range& range : place.rows->ranges) {
    items.clear();
    has_added.assign(static_cast<size_t>(range.count), 0);
    for (const AdapterItem& item : range.items) {
      if (!matrices->has(item.slot)) continue;
      items.push_back(item);
      for (int i = 0; i < item.count; ++i) has_added[static_cast<size_t>(item.tokens[i])] = 1;
    }
    LinearCall part = c;
    part.x = static_cast<const char*>(c.x) + range.first * c.x_stride * itemsize(config_.dtype);
    part.m = range.count;
    part.out = static_cast<char*>(c.out) + range.first * c.out_stride * out_size;
    if (!items.empty()) {
      adding.x = part.x;
      add_adapters(adding, items);
      part.added = adding.sums;
      part.added_stride = adding.sums_stride;
      part.has_added = has_added.data();
    }
    run_linear(part, {}, place);
  }
}

void Decoder::normed_linear(LinearCall c, const float* norm, const Place& place) const {
  const NormedRows rows{&op_kernels(), scratch_.residual, nullptr, norm, config_.hidden, config_.norm_eps, config_.dtype};
  if (!adapters_of(place)) return run_linear(c, rows.producer(), place);
  for_tokens(c.m, [&](int64_t t) { NormedRows::fill(&rows, t, scratch_.normed + t * config_.hidden * itemsize(config_.dtype)); });
  adapted_linear(c, place);
}

// residual += y, or residual += norm(y).
void Decoder::add_branch(LinearCall c, const float* norm, const Place& place) const {
  const int64_t hidden = config_.hidden;
  c.out = norm ? scratch_.branch : scratch_.residual;
  c.out_stride = hidden;
  c.epilogue = norm ? Epilogue::Store : Epilogue::AddResidual;
  adapted_linear(c, place);
  if (!norm) return;
  const OpKernels& kernels = op_kernels();
  for_tokens(c.m, [&](int64_t t) {
    kernels.accumulate_rms_norm(scratch_.branch + t * hidden, DType::F32, norm, hidden, config_.norm_eps,
                                scratch_.residual + t * hidden);
  });
}

void Decoder::attend(const DecoderLayer& layer, const DecoderStep& step, PreparedBatch& prepared, const AdaptedRows* adapted) const {
  const AttentionBatch& batch = prepared.batch();
  const AttentionLayer& a = layer.attention;
  const int64_t tokens = batch.num_tokens, size = itemsize(config_.dtype), width = qkv_width(a);
  const int64_t k_offset = attention_width(a), v_offset = k_offset + int64_t{a.num_kv_heads} * a.head_dim;

  LinearCall qkv = call(layer.qkv, scratch_.normed, config_.hidden, tokens);
  qkv.bias = layer.qkv_bias;
  qkv.out = scratch_.qkv;
  qkv.out_stride = width;
  qkv.out_dtype = config_.dtype;
  normed_linear(qkv, layer.input_norm, {&layer, DecoderLinear::Qkv, adapted});

  const OpKernels& kernels = op_kernels();
  const RopeTable& table = rope_tables_[layer.rope_table];
  const Rotary rotary{a.head_dim, config_.rotary_dim, config_.norm_eps};
  for_tokens(tokens, [&](int64_t t) {
    char* q = scratch_.qkv + t * width * size;
    const int64_t angle = step.positions[t] * (config_.rotary_dim / 2);
    const float *cos = table.cos + angle, *sin = table.sin + angle;
    kernels.rotate(q, a.num_heads, config_.dtype, rotary, layer.q_norm, cos, sin);
    kernels.rotate(q + k_offset * size, a.num_kv_heads, config_.dtype, rotary, layer.k_norm, cos, sin);
  });

  const int64_t cache_bytes = batch.num_blocks * a.num_kv_heads * batch.block_size * a.head_dim * itemsize(config_.kv_format, config_.dtype);
  char* k_cache = step.kv_cache + 2 * layer.cache_layer * cache_bytes;
  const KvLayer kv{k_cache, k_cache + cache_bytes, config_.dtype, 0, 0, config_.kv_format};
  write_kv(batch, a, scratch_.qkv + k_offset * size, width, scratch_.qkv + v_offset * size, width, kv);
  attention(prepared.plan_for(a), batch, a, scratch_.qkv, width, kv, scratch_.attended, attention_width(a));
}

// After the last attention only the rows of output matter: moves them to the front. Rows must ascend, since they move in place.
int64_t Decoder::keep_rows(const DecoderLayer& layer, const DecoderStep& step) const {
  const int64_t hidden = config_.hidden, width = attention_width(layer.attention) * itemsize(config_.dtype);
  for (int64_t i = 0; i < step.num_rows; ++i) {
    const int64_t from = step.rows[i];
    if (from == i) continue;
    std::memcpy(scratch_.residual + i * hidden, scratch_.residual + from * hidden, hidden * 4);
    std::memcpy(scratch_.attended + i * width, scratch_.attended + from * width, width);
  }
  return step.num_rows;
}

void Decoder::feed_forward(const DecoderLayer& layer, int64_t m, const AdaptedRows* adapted) const {
  LinearCall gate_up = call(layer.gate_up, scratch_.normed, config_.hidden, m);
  gate_up.epilogue = config_.activation;
  gate_up.out = scratch_.activated;
  gate_up.out_stride = config_.intermediate;
  gate_up.out_columns = config_.intermediate;
  gate_up.out_dtype = config_.dtype;
  normed_linear(gate_up, layer.mlp_norm, {&layer, DecoderLinear::GateUp, adapted});
  add_branch(call(layer.down, scratch_.activated, config_.intermediate, m), layer.mlp_out_norm, {&layer, DecoderLinear::Down, adapted});
}

void Decoder::write_hidden(const DecoderStep& step, bool compacted) const {
  const int64_t hidden = config_.hidden, size = itemsize(config_.dtype);
  const NormedRows rows{&op_kernels(),   scratch_.residual, compacted ? nullptr : step.rows, config_.final_norm, hidden,
                        config_.norm_eps, config_.dtype};
  for_tokens(step.num_rows, [&](int64_t i) { NormedRows::fill(&rows, i, static_cast<char*>(step.out) + i * hidden * size); });
}

LinearCall Decoder::head_call(const void* hidden, int64_t rows, int64_t most) const {
  if (!scratch_.residual) throw std::invalid_argument("the decoder has no scratch memory yet");
  if (rows > most) throw std::invalid_argument(text(rows) + " rows of the head exceed the decoder's " + text(most));
  LinearCall head = call(config_.head, hidden, config_.hidden, rows);
  head.soft_cap = config_.logit_soft_cap;
  return head;
}

void Decoder::head(const void* hidden, int64_t rows, DecoderOutput output, void* out) const {
  LinearCall head = head_call(hidden, rows, config_.max_rows);
  if (output == DecoderOutput::ArgMax) {
    head.epilogue = Epilogue::ArgMax;
    head.arg_max = static_cast<int64_t*>(out);
  } else {
    head.out = out;
    head.out_stride = config_.vocab;
  }
  linear(head);
}

void Decoder::logprobs(const void* hidden, int64_t rows, const LogprobsOutput& out) const {
  LinearCall head = head_call(hidden, rows, std::max(config_.max_tokens, config_.max_rows));
  for (int64_t i = 0; i < rows; ++i)
    if (out.tokens[i] < 0 || out.tokens[i] >= config_.vocab)
      throw std::out_of_range("token " + text(out.tokens[i]) + " is not in 0.." + text(config_.vocab - 1));
  std::vector<float> picked(static_cast<size_t>(rows));
  std::vector<int64_t> best(static_cast<size_t>(rows));
  head.epilogue = Epilogue::Summary;
  head.targets = out.tokens;
  head.picked = picked.data();
  head.arg_max = best.data();
  const int64_t groups = num_groups(config_.vocab), width = 1 + out.with_best;
  head.summaries = GroupSummaries(out.summaries, rows * groups);
  linear(head);
  const LinearKernels& kernels = HP_KERNELS(linear_kernels);
  std::vector<float> top(static_cast<size_t>(rows)), total(static_cast<size_t>(rows));
  const RowSummaries joined{top.data(), total.data(), out.ranks};
  ThreadPool::global().parallel_for(ceil_div(rows, kTileColumns), 1, [&](int64_t begin, int64_t end, int) {
    kernels.join_summaries(head.summaries, groups, rows, begin * kTileColumns, std::min(rows, end * kTileColumns), joined);
  });
  for (size_t i = 0; i < static_cast<size_t>(rows); ++i) {
    const size_t at = i * static_cast<size_t>(width);
    out.ids[at] = out.tokens[i];
    out.values[at] = picked[i] - total[i];
    out.ranks[i] += 1;
    if (out.with_best) {
      out.ids[at + 1] = total[i] == total[i] ? best[i] : 0;
      out.values[at + 1] = top[i] - total[i];
    }
  }
}

void Decoder::run(const DecoderStep& step, const std::vector<PreparedBatch*>& prepared) {
  for (const DecoderLayer& layer : config_.layers)
    if (layer.kv_group < 0 || static_cast<size_t>(layer.kv_group) >= prepared.size())
      throw std::invalid_argument("a layer is of KV cache group " + text(layer.kv_group) + " of " + text(static_cast<int64_t>(prepared.size())));
  const AttentionBatch& batch = prepared.front()->batch();
  for (const PreparedBatch* group : prepared)
    if (group->batch().num_tokens != batch.num_tokens) throw std::invalid_argument("KV cache groups disagree about a step's tokens");
  check(step, batch);
  const int64_t tokens = batch.num_tokens;
  if (tokens == 0) return;
  gather_rows(config_.embed, step.token_ids, tokens, config_.embed_scale, scratch_.residual, config_.hidden);
  for (int64_t i = 0; i < step.num_embedded; ++i)
    std::copy_n(step.embedded + i * config_.hidden, config_.hidden, scratch_.residual + step.embedded_rows[i] * config_.hidden);

  const bool compact = step.num_rows < tokens && std::is_sorted(step.rows, step.rows + step.num_rows) &&
                       std::adjacent_find(step.rows, step.rows + step.num_rows) == step.rows + step.num_rows;
  const int64_t last = static_cast<int64_t>(config_.layers.size()) - 1;
  AdaptedRows rows;
  if (step.num_adapters) rows = adapted_rows(step, tokens, nullptr, tokens);
  const AdaptedRows* adapted = step.num_adapters ? &rows : nullptr;
  for (int64_t i = 0; i <= last; ++i) {
    const DecoderLayer& layer = config_.layers[i];
    attend(layer, step, *prepared[layer.kv_group], adapted);
    const int64_t m = i == last && compact ? keep_rows(layer, step) : tokens;
    if (m == 0) return;
    if (m != tokens && adapted) rows = adapted_rows(step, tokens, step.rows, m);
    const int64_t width = attention_width(layer.attention);
    LinearCall o = call(layer.o, scratch_.attended, width, m);
    o.bias = layer.o_bias;
    add_branch(o, layer.attention_out_norm, {&layer, DecoderLinear::O, adapted});
    feed_forward(layer, m, adapted);
  }
  if (step.num_rows > 0) write_hidden(step, compact);
}

}  // namespace hp
