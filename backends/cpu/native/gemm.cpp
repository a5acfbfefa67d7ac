#include "gemm.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "block_gemm.hpp"
#include "thread_pool.hpp"

namespace hp {
namespace {

constexpr int64_t kDotRows = 2;  // up to here even a slow dot product of bf16 is the faster one

// x in fp32, padded to whole pairs, or quantised, which takes the least; one row set per thread for a producer; running maxima per thread.
int64_t row_bytes(int64_t k, DType dtype) { return aligned(k_padded(k, dtype) * 4); }
int64_t thread_rows_bytes(int64_t m, int64_t k, DType dtype) { return std::min(m, kFewRows) * row_bytes(k, dtype) + kAlignment; }
int64_t thread_best_bytes(int64_t m) { return 2 * aligned(m * 4); }

int64_t converted_bytes(int64_t m, int64_t k, DType dtype, bool in_blocks) {
  return dtype == DType::F32 && !in_blocks ? 0 : m * row_bytes(k, dtype) + kAlignment;
}
int64_t thread_bytes(int64_t m, int64_t k, DType dtype) {
  return 2 * thread_rows_bytes(m, k, dtype) + thread_best_bytes(m) + kAlignment;
}
int64_t workspace_bytes(int64_t m, int64_t k, DType dtype, bool in_blocks, int threads) {
  return converted_bytes(m, k, dtype, in_blocks) + threads * thread_bytes(m, k, dtype);
}

const LinearKernels& linear_kernels_for(int64_t rows) {
  // Few rows wait for the weights: with fewer instructions the processor looks further ahead.
  if (rows <= kDotRows && active_isa() == Isa::Avx512Vnni && has_slow_bf16_dot()) return HP_KERNELS_AT(Isa::Avx512Bf16, linear_kernels);
  return HP_KERNELS(linear_kernels);
}

template <class F>
void for_tiles(int64_t tiles, int64_t tile_bytes, F&& f) {
  if (tiles * tile_bytes <= kPackedAlone) return f(0, tiles);
  ThreadPool::global().parallel_for(tiles, 4, [&](int64_t begin, int64_t end, int) { f(begin, end); });
}

template <class T>
void pack_rows(const T* src, int64_t src_stride, int64_t rows, int64_t k, int64_t group, const PackPlacement& at, T* tiles) {
  const int64_t groups = ceil_div(k, group), tile_elements = groups * group * kTileColumns;
  const int64_t first = at.first_row, last = first + rows;
  const auto pack_tile = HP_KERNELS(linear_kernels).pack_tile;
  for_tiles(ceil_div(last, kTileColumns) - first / kTileColumns, tile_elements * static_cast<int64_t>(sizeof(T)), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin + first / kTileColumns; i < end + first / kTileColumns; ++i) {
      T* tile = tiles + (at.first_tile + at.tile_step * i) * tile_elements;
      const int64_t lane_begin = std::max(first - i * kTileColumns, int64_t{0});
      const int64_t lane_end = std::min(last - i * kTileColumns, int64_t{kTileColumns});
      const T* row = src + (i * kTileColumns - first) * src_stride;
      if constexpr (sizeof(T) == 4) {
        if (lane_begin == 0 && lane_end == kTileColumns) {
          pack_tile(row, src_stride, groups, tile);
          continue;
        }
      }
      for (int64_t g = 0; g < groups; ++g)
        for (int64_t lane = lane_begin; lane < lane_end; ++lane)
          for (int64_t j = 0; j < group; ++j) {
            const int64_t column = g * group + j;
            tile[(g * kTileColumns + lane) * group + j] = column < k ? row[lane * src_stride + column] : T{};
          }
    }
  });
}

template <class T>
void unpack_rows(const T* tiles, int64_t rows, int64_t k, int64_t group, const PackPlacement& at, T* dst, int64_t dst_stride) {
  const int64_t tile_elements = ceil_div(k, group) * group * kTileColumns;
  ThreadPool::global().parallel_for(rows, kTileColumns, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t stored = at.first_row + r;
      const T* tile = tiles + (at.first_tile + at.tile_step * (stored / kTileColumns)) * tile_elements;
      for (int64_t column = 0; column < k; ++column)
        dst[r * dst_stride + column] = tile[(column / group * kTileColumns + stored % kTileColumns) * group + column % group];
    }
  });
}

struct Split {
  int64_t tiles_per_item, column_items, row_parts, grain;
};

// Items are groups of tiles times, for many rows, ranges of rows: a group stays in the level-2 cache while the item's rows pass over
// it. Where there would be too few items to share evenly, few rows get narrower groups and many rows get more ranges.
Split split_work(const LinearCall& call, int threads) {
  const int64_t tiles = num_tiles(call.weight.n), wanted = kItemsPerThread * threads;
  int64_t narrowest = kGroupTiles;
  if (call.m < 2 * kMinItemRows) narrowest = 2;
  if (call.m <= kFewRows && !is_gated(call.epilogue)) narrowest = 1;
  // A sum over groups of columns has the same bits for any number of rows.
  if (call.epilogue == Epilogue::Summary) narrowest = kGroupTiles;
  Split s{kGroupTiles, 0, 1, 1};
  while (s.tiles_per_item > narrowest && ceil_div(tiles, s.tiles_per_item) < wanted) s.tiles_per_item /= 2;
  s.column_items = ceil_div(tiles, s.tiles_per_item);
  if (s.column_items < wanted) {
    const int64_t most = std::max<int64_t>(1, call.m / kMinItemRows);
    s.row_parts = std::min(ceil_div(2 * wanted, s.column_items), most);
    // Where one thread has an item more, the others wait for it.
    for (int64_t parts = s.row_parts; parts <= std::min(most, s.row_parts + threads); ++parts) {
      if (s.column_items * parts % threads != 0) continue;
      s.row_parts = parts;
      break;
    }
  }
  if (call.m <= kFewRows) s.grain = std::max<int64_t>(1, s.column_items / (8 * wanted));
  return s;
}

struct ThreadRows {
  char* data = nullptr;
  bool filled = false;
};

}  // namespace

void pack_weight(const void* src, int64_t src_stride, int64_t rows, int64_t k, DType dtype, const PackPlacement& at, void* tiles) {
  // Pairs of bf16 are moved as one number where none is cut in two.
  const bool pairs = dtype == DType::BF16 && k % 2 == 0 && src_stride % 2 == 0 && reinterpret_cast<uintptr_t>(src) % 4 == 0;
  const int64_t width = pairs ? 2 : 1;
  if (dtype == DType::F32 || pairs)
    pack_rows(static_cast<const uint32_t*>(src), src_stride / width, rows, k / width, 1, at, static_cast<uint32_t*>(tiles));
  else
    pack_rows(static_cast<const uint16_t*>(src), src_stride, rows, k, dtype == DType::BF16 ? 2 : 1, at,
              static_cast<uint16_t*>(tiles));
}

void unpack_weight(const void* tiles, int64_t rows, int64_t k, DType dtype, const PackPlacement& at, void* dst,
                   int64_t dst_stride) {
  if (dtype == DType::F32)
    unpack_rows(static_cast<const uint32_t*>(tiles), rows, k, 1, at, static_cast<uint32_t*>(dst), dst_stride);
  else
    unpack_rows(static_cast<const uint16_t*>(tiles), rows, k, dtype == DType::BF16 ? 2 : 1, at, static_cast<uint16_t*>(dst),
                dst_stride);
}

int64_t linear_workspace_bytes(int64_t m, int64_t k, DType dtype, bool in_blocks) {
  // Asked once: it is read from a file, which takes as long as a small product.
  static const int cores = static_cast<int>(std::thread::hardware_concurrency());
  return workspace_bytes(m, k, dtype, in_blocks, std::max(ThreadPool::global().num_threads(), cores));
}

int64_t spare_lines(const LinearCall& call) {
  const PackedWeight& weight = call.weight;
  if (weight.blocks != BlockFormat::None) return 0;
  const int64_t steps = linear_kernels_for(call.m).fetching_steps(weight, call.m);
  return std::max<int64_t>(0, steps - num_tiles(weight.n) * weight.tile_stride() / kLineBytes);
}

void linear(const LinearCall& call) { linear(call, RowProducer{}); }

void linear(const LinearCall& call, const RowProducer& producer) {
  if (call.m == 0) return;
  ThreadPool& pool = ThreadPool::global();
  const LinearKernels& kernels = linear_kernels_for(call.m);
  const BlockKernels& blocks = HP_KERNELS(block_kernels);
  const PackedWeight& weight = call.weight;
  const bool in_blocks = weight.blocks != BlockFormat::None;
  const int64_t needed = workspace_bytes(call.m, weight.k, weight.dtype, in_blocks, 1);
  if (call.workspace.bytes < needed)
    throw std::invalid_argument("linear layer of " + std::to_string(call.m) + " rows needs a workspace of " + std::to_string(needed) +
                                " bytes at least, got " + std::to_string(call.workspace.bytes));
  // The pool may have grown since the workspace was measured, and may grow now: another engine's.
  const int64_t served = (call.workspace.bytes - converted_bytes(call.m, weight.k, weight.dtype, in_blocks)) / thread_bytes(call.m, weight.k, weight.dtype);
  const int threads = static_cast<int>(std::min<int64_t>(pool.num_threads(), served));

  const bool to_pairs = !in_blocks && weight.dtype == DType::BF16 && kernels.bf16_dot;
  const bool widens = !in_blocks && weight.dtype != DType::F32 && !to_pairs;
  const bool converts = in_blocks || widens || (to_pairs && weight.k % 2 != 0);
  const int64_t in_size = itemsize(weight.dtype), k = weight.k, padded = k_padded(k, weight.dtype);
  const int64_t kernel_row = padded * (widens ? 4 : in_size);  // bytes

  char* scratch = static_cast<char*>(call.workspace.data);
  auto take = [&scratch](int64_t bytes) {
    char* p = scratch;
    scratch += aligned(bytes);
    return p;
  };
  // Row i of those from `to` on.
  auto convert_row = [&](const void* from, char* to, int64_t i) {
    if (in_blocks) {
      blocks.quantise(from, weight.dtype, k, weight.blocks, BlockRows(to, call.m, k), i);
      return;
    }
    to += i * kernel_row;
    if (widens) {
      kernels.widen(from, weight.dtype, k, reinterpret_cast<float*>(to));
      if (padded != k) reinterpret_cast<float*>(to)[k] = 0;
    } else {
      std::memcpy(to, from, k * in_size);
      std::memset(to + k * in_size, 0, (padded - k) * in_size);
    }
  };

  const void* x = call.x;
  int64_t x_stride = call.x_stride;
  const bool per_thread = producer.fill && call.m <= kFewRows;
  std::vector<ThreadRows> own(per_thread ? threads : 0);
  if (per_thread) {
    for (auto& rows : own) rows.data = take(2 * thread_rows_bytes(call.m, k, weight.dtype));
    x_stride = padded;
  } else if (producer.fill || converts) {
    char* converted = converts ? take(call.m * row_bytes(k, weight.dtype)) : nullptr;
    pool.parallel_for(call.m, std::max<int64_t>(1, ceil_div(call.m, kItemsPerThread * threads)), [&](int64_t b, int64_t e, int) {
      for (int64_t i = b; i < e; ++i) {
        char* row = const_cast<char*>(static_cast<const char*>(call.x)) + i * call.x_stride * in_size;
        if (producer.fill) producer.fill(producer.context, i, row);
        if (converts) convert_row(row, converted, i);
      }
    });
    if (converts) x = converted, x_stride = padded;
  }

  struct Best {
    float* value;
    int32_t* column;
  };
  const bool is_summary = call.epilogue == Epilogue::Summary;
  std::vector<Best> best(is_summary || call.epilogue == Epilogue::ArgMax ? threads : 0);
  for (auto& b : best) {
    b.value = reinterpret_cast<float*>(take(call.m * 4));
    b.column = reinterpret_cast<int32_t*>(take(call.m * 4));
    std::fill_n(b.value, call.m, -std::numeric_limits<float>::infinity());
    std::fill_n(b.column, call.m, std::numeric_limits<int32_t>::max());
  }

  const Split split = split_work(call, threads);
  const int64_t items = split.column_items * split.row_parts;
  const int64_t stride = weight.tile_stride(), tiles = num_tiles(weight.n);
  const auto run_item = in_blocks ? blocks.run_item : kernels.run_item;
  if (is_summary) {
    LinearCall picking = call;
    picking.epilogue = Epilogue::Pick;
    pool.parallel_for(call.m, 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i)
        run_item(LinearItem{&picking, x, x_stride, call.targets[i] / kTileColumns, 1, i, i + 1, nullptr, 0, 0, nullptr, nullptr});
    }, threads);
  }
  pool.parallel_for(items, split.grain, [&](int64_t begin, int64_t end, int thread) {
    const void* rows = x;
    if (per_thread) {
      ThreadRows& mine = own[thread];
      if (!mine.filled) {
        char* raw = converts ? mine.data + thread_rows_bytes(call.m, k, weight.dtype) : mine.data;
        for (int64_t i = 0; i < call.m; ++i) {
          producer.fill(producer.context, i, raw + i * k * in_size);
          if (converts) convert_row(raw + i * k * in_size, mine.data, i);
        }
        mine.filled = true;
      }
      rows = mine.data;
    }
    for (int64_t i = begin; i < end; ++i) {
      const int64_t column = i / split.row_parts, part = i % split.row_parts, tile = column * split.tiles_per_item;
      // The item after the others' chunks is the likeliest next one when this chunk ends.
      const int64_t next = (i + 1 < end ? i + 1 : i + 1 + (threads - 1) * split.grain) / split.row_parts;
      const int64_t next_tile = next * split.tiles_per_item;
      const bool fetch = next != column && next_tile + split.tiles_per_item <= tiles;
      LinearItem item{&call, rows, x_stride, tile, static_cast<int>(std::min(split.tiles_per_item, tiles - tile)),
                      call.m * part / split.row_parts, call.m * (part + 1) / split.row_parts,
                      fetch ? static_cast<const char*>(weight.tiles) + next_tile * stride : nullptr,
                      call.ahead_lines * i / items, call.ahead_lines * (i + 1) / items,
                      best.empty() ? nullptr : best[thread].value, best.empty() ? nullptr : best[thread].column};
      run_item(item);
    }
  }, threads);

  for (int64_t i = 0; !best.empty() && i < call.m; ++i) {
    Best top = best[0];
    float value = top.value[i];
    int32_t column = top.column[i];
    for (const Best& b : best)
      if (b.value[i] > value || (b.value[i] == value && b.column[i] < column)) value = b.value[i], column = b.column[i];
    call.arg_max[i] = column == std::numeric_limits<int32_t>::max() ? 0 : column;
  }
}

}  // namespace hp
