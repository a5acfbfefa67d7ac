// Linear layers of the CPU backend: y = x W^T over packed weights.
//
// A weight [N, K] is stored as tiles of 16 output columns, in the order in which the micro-kernels read it:
//   F32, F16  [ceil(N / 16)][K][16]
//   BF16      [ceil(N / 16)][ceil(K / 2)][16][2]    (pairs of k, the operand order of the BF16 dot product instruction)
// with a zero after an odd K; columns beyond N may hold anything, since no result takes from another column. The size equals the
// plain tensor's when N is a multiple of 16 (and K even for BF16). A gated pair (gate and up projections) is stored as one weight
// whose even tiles are gate columns and whose odd tiles are up columns.
//
// Every output element is one fp32 accumulator that takes its k terms in ascending order (of a pair of bf16, the second one first, as the
// dot product instruction has it), whatever the number of rows, threads or columns: a row's result does not depend on the batch it is
// computed in, bit for bit. It does depend on the instruction set. At the level `amx` BF16 weights are multiplied by tiles, which take
// 32 terms at a time (amx.hpp): the sums differ from those of avx512bf16, so even one row alone is multiplied by tiles.
#pragma once
#include <cstddef>
#include <cstdint>

#include "attention.hpp"
#include "block_weight.hpp"
#include "isa.hpp"

namespace hp {

constexpr int kTileColumns = 16;
constexpr int kGroupTiles = 4;  // tiles that one work item computes together

// How products are cut into work items.
constexpr int64_t kFewRows = 8;         // up to here a product is bound by the weights' bytes
constexpr int64_t kMinItemRows = 48;
constexpr int64_t kItemsPerThread = 8;  // enough that one item more or less per thread is a small difference

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t k_padded(int64_t k, DType dtype) { return dtype == DType::BF16 ? (k + 1) / 2 * 2 : k; }
static inline int64_t num_tiles(int64_t n) { return ceil_div(n, kTileColumns); }
static inline int64_t num_groups(int64_t n) { return ceil_div(n, kTileColumns * kGroupTiles); }
static inline int64_t tile_bytes(int64_t k, DType dtype) { return k_padded(k, dtype) * kTileColumns * itemsize(dtype); }
static inline int64_t packed_bytes(int64_t n, int64_t k, DType dtype) { return num_tiles(n) * tile_bytes(k, dtype); }

struct PackedWeight {
  const void* tiles = nullptr;
  int64_t n = 0;  // stored columns; for a gated pair 2 * 16 * ceil(intermediate / 16)
  int64_t k = 0;
  DType dtype = DType::F32;  // of x, and of the weight where it is not stored in blocks
  BlockFormat blocks = BlockFormat::None;

  int64_t tile_stride() const { return blocks == BlockFormat::None ? tile_bytes(k, dtype) : block_tile_bytes(blocks, k); }
};

// Where rows of a plain weight stand in a packed one: row r is lane (first_row + r) % 16 of tile
// first_tile + tile_step * ((first_row + r) / 16). Stacked projections use first_row; a gated pair uses tile_step 2.
struct PackPlacement {
  int64_t first_row = 0;
  int64_t first_tile = 0;
  int64_t tile_step = 1;
};

// Bytes up to which the thread that calls packs alone: it has them in its cache, and other threads bring theirs at the same time, where jobs
// of the pool wait for one another.
constexpr int64_t kPackedAlone = 4 << 20;

// src: [rows, k], row stride in elements. Other lanes of the first and last tile are left alone.
void pack_weight(const void* src, int64_t src_stride, int64_t rows, int64_t k, DType dtype, const PackPlacement& at, void* tiles);
void unpack_weight(const void* tiles, int64_t rows, int64_t k, DType dtype, const PackPlacement& at, void* dst, int64_t dst_stride);

enum class Epilogue {
  Store,             // out = y
  AddResidual,       // out (fp32) += y
  SiluMul,           // out[:, j] = silu(gate_j) * up_j; out has n / 2 columns
  GeluTanhMul,       // the same with the tanh form of GELU
  ArgMax,            // arg_max[row] = lowest column of the greatest y; nothing else is stored
  ClampedSwiGluMul,  // as SiluMul, with the clamped form of GPT-OSS
  Pick,              // picked[row] = y of column targets[row]; nothing else is stored
  Summary,           // as ArgMax, after Pick, and summaries of each row and group of columns; no value of y is stored
  GeluMul,           // as SiluMul, with GELU
  Gelu,              // out = gelu(y)
  GeluTanh,          // the same in its tanh form
  Silu,              // out = silu(y)
};

// What a softmax over each row and the rank of its picked column need of each kGroupTiles tiles of columns: [num_groups(n), m] each.
struct GroupSummaries {
  float* best = nullptr;     // greatest y, NaN left out
  float* sum = nullptr;      // of e^(y - best), or of e^y where best is not finite; NaN where some y is
  int32_t* above = nullptr;  // columns whose y is greater than the picked one

  static constexpr int64_t kBytes = 12;  // of a row and group

  GroupSummaries() = default;
  GroupSummaries(void* memory, int64_t count)
      : best(static_cast<float*>(memory)), sum(best + count), above(reinterpret_cast<int32_t*>(sum + count)) {}
};

// The same of whole rows, [rows] each.
struct RowSummaries {
  float* best;
  float* log_sum;  // log of the sum of e^y; NaN where some y is
  int64_t* above;
};

static inline bool is_gated(Epilogue e) {
  return e == Epilogue::SiluMul || e == Epilogue::GeluMul || e == Epilogue::GeluTanhMul || e == Epilogue::ClampedSwiGluMul;
}

constexpr int64_t kAlignment = 64;  // of scratch memory, and of what it is divided into
static inline int64_t aligned(int64_t bytes) { return ceil_div(bytes, kAlignment) * kAlignment; }

// Scratch that the caller lends for the length of a call: at least linear_workspace_bytes(...) bytes, aligned to kAlignment.
struct Workspace {
  void* data = nullptr;
  int64_t bytes = 0;
};

constexpr int64_t kLineBytes = 64;

// Lines of memory, which count from `begin` to `end` among those of several spans.
struct LineSpan {
  const char* data;
  int64_t begin, end;
};

struct LinearCall {
  PackedWeight weight;
  const void* x = nullptr;  // [m, k], the weight's dtype
  int64_t x_stride = 0;     // elements
  int64_t m = 0;
  const float* bias = nullptr;  // [n] in stored column order, or null
  const float* added = nullptr;  // [m, added_stride] in stored column order: added to the sums of the rows that are marked; or null
  int64_t added_stride = 0;      // whole tiles
  const uint8_t* has_added = nullptr;  // [m]
  const LineSpan* ahead = nullptr;     // brought to the caches meanwhile, for what comes after: ahead_lines in all, at most spare_lines
  int64_t ahead_lines = 0;
  Epilogue epilogue = Epilogue::Store;
  float soft_cap = 0;  // y becomes cap * tanh(y / cap) before the epilogue; 0 = off
  void* out = nullptr;
  int64_t out_stride = 0;  // elements
  DType out_dtype = DType::F32;
  int64_t out_columns = 0;     // of a gated pair: the intermediate size
  int64_t* arg_max = nullptr;  // [m]
  const int64_t* targets = nullptr;   // [m] columns
  float* picked = nullptr;            // [m]
  GroupSummaries summaries;
  Workspace workspace;
};

// Computes rows of x just before a linear layer reads them: a normalisation then runs inside the layer's own parallel region.
// `fill` writes row i (k elements of the weight's dtype) to `row`; it must give the same bits every time.
struct RowProducer {
  void (*fill)(const void* context, int64_t i, void* row) = nullptr;
  const void* context = nullptr;
};

// Bytes of workspace for up to m rows, whatever the instruction set, on as many threads as the machine has cores or, where those
// are more, as the thread pool has now. With less, fewer threads work.
int64_t linear_workspace_bytes(int64_t m, int64_t k, DType dtype, bool in_blocks = false);

// How many lines a product can bring along beside its own weights: none where these alone keep the memory busy.
int64_t spare_lines(const LinearCall& call);

// Throws std::invalid_argument when the workspace is too small for one thread.
void linear(const LinearCall& call);

// Like `linear`, with x computed by `producer`. call.x must be writable scratch [m, k]: all threads fill it first when there are
// many rows, while for few rows each thread fills a copy of its own, which saves a barrier.
void linear(const LinearCall& call, const RowProducer& producer);

// One work item: `tile_count` <= kGroupTiles tiles (an even number of a gated pair) times a range of rows.
struct LinearItem {
  const LinearCall* call;
  const void* x;  // [m, k] in the kernel's input dtype; 16-bit pairs need an even row length. Of a weight in blocks: BlockRows
  int64_t x_stride;
  int64_t tile;
  int tile_count;
  int64_t row_begin, row_end;
  const char* prefetch;  // tiles that this thread will probably read next, or null
  int64_t ahead_begin, ahead_end;  // its part of the call's lines ahead
  float* best;           // [m] running maximum of this thread (ArgMax, Summary)
  int32_t* best_column;  // [m]
};

struct LinearKernels {
  // Steps of a product with m rows, each of which may bring a line; 0 where the weight's kernels bring none.
  int64_t (*fetching_steps)(const PackedWeight& weight, int64_t m);
  bool bf16_dot;  // BF16 weights take BF16 rows; otherwise every 16-bit row is widened to fp32 first
  void (*run_item)(const LinearItem& item);
  void (*widen)(const void* src, DType dtype, int64_t n, float* dst);
  // Applies the call's bias, cap and epilogue to c: [rows, 16 * kGroupTiles] sums of the item's tiles, whose row 0 is row `row` of the call.
  void (*finish)(const LinearItem& item, int64_t row, int rows, float* c);
  // Packs one tile of 16 rows of 32-bit elements (of bf16: pairs): tile[g][lane] = rows[lane * stride + g].
  void (*pack_tile)(const uint32_t* rows, int64_t stride, int64_t groups, uint32_t* tile);
  // Joins the groups' summaries of rows [begin, end) of m.
  void (*join_summaries)(const GroupSummaries& groups, int64_t num_groups, int64_t m, int64_t begin, int64_t end, const RowSummaries& out);
};

}  // namespace hp

HP_DECLARE_PER_ISA(const LinearKernels&, linear_kernels)
