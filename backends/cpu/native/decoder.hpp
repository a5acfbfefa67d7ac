// A whole decoder step in one call: embedding, layers, final norm, head.
//
// The residual stream is fp32 whatever the model's dtype: it costs nothing measurable here and rounds less. Every row's result
// is independent of the other rows of the step, bit for bit, which also lets the last layer run only for the rows asked for.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "adapters.hpp"
#include "attention.hpp"
#include "gemm.hpp"
#include "ops.hpp"
#include "prepared_batch.hpp"

namespace hp {

// Norm weights and biases are fp32; pointers that a layer does not use are null.
struct DecoderLayer {
  AttentionLayer attention{};
  int kv_group = 0;         // of the step's prepared batches
  int64_t cache_layer = 0;  // of the KV cache
  int rope_table = 0;
  const float* input_norm = nullptr;          // [hidden]
  PackedWeight qkv;                           // [(heads + 2 kv_heads) * head_dim, hidden]
  const float* qkv_bias = nullptr;            // [(heads + 2 kv_heads) * head_dim]
  const float* q_norm = nullptr;              // [head_dim]
  const float* k_norm = nullptr;              // [head_dim]
  PackedWeight o;                             // [hidden, heads * head_dim]
  const float* o_bias = nullptr;              // [hidden]
  const float* attention_out_norm = nullptr;  // [hidden]
  const float* mlp_norm = nullptr;            // [hidden]
  PackedWeight gate_up;                       // gated pair [2 * intermediate, hidden]
  PackedWeight down;                          // [hidden, intermediate]
  const float* mlp_out_norm = nullptr;        // [hidden]
};

// The linear layers of a DecoderLayer, in the order of use.
enum class DecoderLinear : int { Qkv = 0, O = 1, GateUp = 2, Down = 3 };
constexpr int64_t kLinears = 4;

struct RopeTable {
  const float* cos = nullptr;  // [max_positions, rotary_dim / 2]
  const float* sin = nullptr;
  int64_t max_positions = 0;
};

struct DecoderConfig {
  DType dtype = DType::F32;
  KvFormat kv_format = KvFormat::Same;
  int64_t vocab = 0;
  int64_t hidden = 0;
  int64_t intermediate = 0;
  int rotary_dim = 0;
  float norm_eps = 0;
  Epilogue activation = Epilogue::SiluMul;
  float embed_scale = 1;
  float logit_soft_cap = 0;  // 0 = off
  int64_t max_tokens = 0;    // of one step
  int64_t max_rows = 0;      // of logits, of one step
  bool adapted = false;      // set_adapters is called before the first step
  PackedWeight embed;        // [vocab, hidden]
  PackedWeight head;         // [vocab, hidden]; may be the embedding
  const float* final_norm = nullptr;
  std::vector<DecoderLayer> layers;
};

enum class DecoderOutput : int {
  Logits = 0,  // float [rows, vocab]
  ArgMax = 1,  // int64_t [rows]
};

struct LogprobsOutput {
  const int64_t* tokens = nullptr;  // [rows]
  bool with_best = false;
  void* summaries = nullptr;  // [rows, summary_bytes()], working memory
  int64_t* ids = nullptr;     // [rows, 1 + with_best]
  float* values = nullptr;    // [rows, 1 + with_best]
  int64_t* ranks = nullptr;   // [rows] from 1
};

struct DecoderStep {
  const int64_t* token_ids = nullptr;  // [tokens]
  const int64_t* positions = nullptr;  // [tokens]
  char* kv_cache = nullptr;            // [layers of the largest group, 2, blocks, kv_heads, block_size, head_dim]
  const int32_t* rows = nullptr;       // [num_rows] tokens whose hidden states are wanted
  int64_t num_rows = 0;
  void* out = nullptr;  // [num_rows, hidden] in the model's dtype, after the final norm
  const int64_t* embedded_rows = nullptr;  // [num_embedded] tokens whose embeddings are given
  int64_t num_embedded = 0;
  const float* embedded = nullptr;  // [num_embedded, hidden]
  const int64_t* adapted_tokens = nullptr;  // those that go through adapters, by adapter
  const int32_t* adapter_slots = nullptr;   // [num_adapters]
  const int32_t* adapter_starts = nullptr;  // [num_adapters + 1], in adapted_tokens
  int64_t num_adapters = 0;
};

class Decoder {
 public:
  // Throws std::invalid_argument when the configuration contradicts itself.
  explicit Decoder(DecoderConfig config);

  // Working memory for the largest step; see linear_workspace_bytes for the number of threads that it serves.
  int64_t scratch_bytes() const { return scratch_bytes_; }
  // 64-byte aligned; kept by the caller for as long as steps run.
  void set_scratch(void* data, int64_t bytes);
  void set_rope_tables(std::vector<RopeTable> tables);
  // Throws std::invalid_argument for matrices that do not fit the layer. Layers that are never named have no adapters.
  void set_adapters(int64_t layer, DecoderLinear linear, const AdapterMatrices& matrices);

  // Throws std::invalid_argument or std::out_of_range for a step beyond the configured sizes or a token, position or row that
  // does not exist, before any work. One step at a time.
  // `prepared`: the step's batch as each KV cache group sees it.
  void run(const DecoderStep& step, const std::vector<PreparedBatch*>& prepared);

  // Logits, or the tokens of the highest ones, of hidden states [rows, hidden] that `run` gave.
  void head(const void* hidden, int64_t rows, DecoderOutput output, void* out) const;

  // Of a row, for `logprobs`.
  int64_t summary_bytes() const { return num_groups(config_.vocab) * GroupSummaries::kBytes; }

  // Log probabilities of a token of each of those rows and, where `with_best`, of the most probable one, and the token's rank, for as many
  // rows as a step has tokens. The logits are never in memory. Throws std::out_of_range for a token outside the vocabulary.
  void logprobs(const void* hidden, int64_t rows, const LogprobsOutput& out) const;

 private:
  struct Scratch {
    float* residual;  // [max_tokens, hidden]
    float* branch;    // [max_tokens, hidden], output of attention or feed-forward before its own norm
    char* normed;     // [max_tokens, hidden]
    char* qkv;        // [max_tokens, largest qkv width]
    char* attended;   // [max_tokens, largest attention width]
    char* activated;  // [max_tokens, intermediate]
    float* added;     // [rows computed together, widest linear layer], what adapters add
    Workspace workspace;
  };

  // Rows that go through adapters, in ranges that are computed together.
  struct AdaptedRows {
    struct Range {
      int64_t first, count;
      std::vector<AdapterItem> items;
      std::vector<int64_t> tokens;  // from `first` on, by adapter
    };
    std::vector<Range> ranges;
    std::vector<int> slots;  // rising, of all ranges
  };

  // A linear layer, and the rows that go through adapters; null where none does.
  struct Place {
    const DecoderLayer* layer;
    DecoderLinear linear;
    const AdaptedRows* rows;
  };

  int64_t lay_out(char* base, Scratch& scratch) const;
  size_t number_of(const Place& place) const;
  const AdapterMatrices* adapters_of(const Place& place) const;
  std::vector<LineSpan> lines_after(const Place& place, int64_t most) const;
  void run_linear(LinearCall call, const RowProducer& producer, const Place& place) const;
  static AdaptedRows adapted_rows(const DecoderStep& step, int64_t tokens, const int32_t* kept, int64_t m);
  void check(const DecoderStep& step, const AttentionBatch& batch) const;
  LinearCall head_call(const void* hidden, int64_t rows, int64_t most) const;
  LinearCall call(const PackedWeight& weight, const void* x, int64_t x_stride, int64_t m) const;
  void adapted_linear(LinearCall call, const Place& place) const;
  void normed_linear(LinearCall call, const float* norm, const Place& place) const;
  void add_branch(LinearCall call, const float* norm, const Place& place) const;
  void attend(const DecoderLayer& layer, const DecoderStep& step, PreparedBatch& prepared, const AdaptedRows* adapted) const;
  int64_t keep_rows(const DecoderLayer& layer, const DecoderStep& step) const;
  void feed_forward(const DecoderLayer& layer, int64_t m, const AdaptedRows* adapted) const;
  void write_hidden(const DecoderStep& step, bool compacted) const;

  DecoderConfig config_;
  std::vector<RopeTable> rope_tables_;
  std::vector<AdapterMatrices> adapters_;  // [layers][kLinears], where the configuration says that there are any
  Scratch scratch_{};
  int64_t scratch_bytes_ = 0;
  bool sandwich_ = false;
  bool in_blocks_ = false;  // some weight is
};

}  // namespace hp
