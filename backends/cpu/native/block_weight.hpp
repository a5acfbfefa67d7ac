// Weights in quantised blocks, multiplied as they are stored, and the arithmetic of their products.
//
// A block is 32 numbers of a row with one scale, and in some formats one minimum, in binary16 (ggml's formats, hardpoint/gguf_blocks.hpp); or,
// in Int4 and Int8, with a scale in float32 and a zero point, a whole number of 16 bits (hardpoint.interfaces.BlockFormat), which in Int4_128 and
// Int8_128 four blocks share. A packed weight has the same bytes in another order, tiles of 16 rows ("columns" of the product) with all numbers
// before all scales:
//   numbers  [k / 32][4][16][4]   of 4 bits: the low halves of vector j are terms 4 j to 4 j + 3 of the block, the high halves those 16 later
//            [k / 32][8][16][4]   of 8 bits, Q8_0's with 128 added: vector j has terms 4 j to 4 j + 3
//            and then for each block [1][16][4]: the fifth bits (Q5_0, Q5_1, Q5_K), byte t of bit j for term 4 j + t; or [2][16][4]: two more bits
//            (Q6_K), of each half of the terms byte t of bits 2 j for term 4 j + t of it
//   scales   [k / 32 or 128][16], and after each 16 scales, in formats with minima or zero points, those 16
//            of ggml's K formats, for every 256 terms: [16] binary16, with minima [16] more, and for each of their 8 blocks two rows of
//            [16] bytes: its scale and minimum (Q4_K, Q5_K), or the scales of its two halves (Q6_K)
// so that one vector of memory is the operand of the processor's dot products of bytes, and the whole a tile register's.
//
// Arithmetic. Of a row of activations those beyond kOutlier root mean squares of it are set aside, and the others quantised, each 32 terms for
// themselves: q = round(x * 127 / max|x|) in 8 bits, and s = max|x| / 127 in float32. A block's integers n and the row's q give one sum of
// products, exact in 32 bits, and
//   y += (scale * s) * sum(n q)            formats without a minimum; n is signed
//   y += (scale * s) * sum(n q);  y += minimum * (s * sum q + the sum of its outliers)
//   y += (scale * s) * (sum(n q) - zero * sum q)     with zero points; in whole numbers
// Q4_K and Q5_K are of the second kind, with scale = d * (6 bits) and minimum = -dmin * (6 bits), both exact in float32. Q6_K is
//   y += (d * s) * (scale0 * sum0(n q) + scale1 * sum1(n q))     of a block's halves; in whole numbers
// in ascending order of blocks; and then for each outlier x, in ascending order,
//   y += (scale * n) * x                   n less the zero point, and times the scale of its half
// each line one fused multiply-add. Since the sums of integers are exact, it makes no difference which instructions form them: one row takes
// dot products, many rows take tile registers, and both give the same bits. The alternative, to expand blocks to bf16 in registers, costs three
// times the instructions of a row alone and four times the bytes of a register.
//
// What it costs in accuracy: an activation's error is at most half a step, min(max|x| of its block, kOutlier * rms of its row) / 254. Without
// outliers being set aside, a few large activations take the precision of all that share their blocks, which is most of what rounding to 8 bits
// costs a language model. Activations below 2^-100 of a block that has no greater ones count as zero; a block with one that is not finite makes
// the row's results NaN. A row whose sum of squares float32 does not hold as a normal number has no outliers.
#pragma once
#include <cstddef>
#include <cstdint>

namespace hp {

// ggml's numbers of its formats, and our own beyond them.
enum class BlockFormat : int { None = -1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14, Int4 = 1004, Int8 = 1008, Int4_128 = 1104, Int8_128 = 1108 };

constexpr int kBlockTerms = 32;
constexpr float kOutlier = 4;             // root mean squares of a row
constexpr int64_t kTermsForOutlier = 8;  // room for outliers; of k numbers fewer than k / kOutlier^2 are so large

struct BlockLayout {
  int number_bytes;  // of one block's numbers
  int scale_bytes;
  bool has_minimum;
  bool has_zero;  // a zero point
  int zero;       // what a stored number of zero means, negated: the stored ones are not negative; with zero points 1, by which each is multiplied
  int together = 1;        // blocks that share a scale
  bool has_bytes = false;  // of their own, two rows of 16 for each block, beside the shared scale
  bool has_halves = false;  // with scales of their own

  constexpr bool has_second() const { return has_minimum || has_zero; }  // two bytes beside the scale
};

constexpr BlockLayout block_layout(BlockFormat format) {
  switch (format) {
    case BlockFormat::Q4_0: return {16, 2, false, false, 8};
    case BlockFormat::Q4_1: return {16, 2, true, false, 0};
    case BlockFormat::Q5_0: return {20, 2, false, false, 16};
    case BlockFormat::Q5_1: return {20, 2, true, false, 0};
    case BlockFormat::Q4_K: return {16, 2, true, false, 0, 8, true};
    case BlockFormat::Q5_K: return {20, 2, true, false, 0, 8, true};
    case BlockFormat::Q6_K: return {24, 2, false, false, 32, 8, true, true};
    case BlockFormat::Int4: return {16, 4, false, true, 1};
    case BlockFormat::Int8: return {32, 4, false, true, 1};
    case BlockFormat::Int4_128: return {16, 4, false, true, 1, 4};
    case BlockFormat::Int8_128: return {32, 4, false, true, 1, 4};
    default: return {32, 2, false, false, 128};
  }
}

// Of what files have as one block: its terms; the bytes of its scale and what is beside it, and of the whole.
constexpr int64_t block_terms(BlockFormat format) { return kBlockTerms * block_layout(format).together; }
constexpr int64_t block_scale_bytes(BlockFormat format) { return block_layout(format).scale_bytes + (block_layout(format).has_second() ? 2 : 0); }
constexpr int64_t block_bytes(BlockFormat format) {
  const BlockLayout layout = block_layout(format);
  return layout.number_bytes * layout.together + block_scale_bytes(format) + (!layout.has_bytes ? 0 : layout.has_halves ? 16 : 12);
}
// Bytes of 16 blocks' numbers, of 16 scales with what is beside them and under them, and of a tile.
constexpr int64_t tile_number_bytes(BlockFormat format) { return 16 * block_layout(format).number_bytes; }
constexpr int64_t tile_scale_bytes(BlockFormat format) {
  return 16 * block_scale_bytes(format) + (block_layout(format).has_bytes ? 8 * 32 : 0);
}
constexpr int64_t block_tile_bytes(BlockFormat format, int64_t k) {
  return (k / kBlockTerms * tile_number_bytes(format) + k / block_terms(format) * tile_scale_bytes(format) + 63) / 64 * 64;
}

// A term of a row that is multiplied as it is.
struct Outlier {
  int32_t term;
  float value;
};

// Where m quantised rows of activations stand from `base` on, which takes at most 4 k bytes for each and 64 more: the bytes [m][row_bytes], then the
// scales [k / 32][stride] float32, then the offsets [k / 32][stride]: float32 s * sum q and the outliers where the format has a minimum, else
// int32 -zero * sum q; where blocks have halves, the offsets of the first halves, and then of the second ones; then the outliers
// [m][k / kTermsForOutlier], and how many of them there are [m]. A tile register's 16 rows have their scales of a block side by side.
struct BlockRows {
  char* bytes;
  float* scales;
  float* offsets;
  float* second_offsets;
  Outlier* outliers;
  int32_t* outlier_counts;
  int64_t row_bytes, stride, row_outliers;

  BlockRows(void* base, int64_t m, int64_t k)
      : bytes(static_cast<char*>(base)), row_bytes(k), stride(m < 16 ? m : (m + 15) / 16 * 16), row_outliers(k / kTermsForOutlier) {
    scales = reinterpret_cast<float*>(bytes + m * row_bytes);
    offsets = scales + k / kBlockTerms * stride;
    second_offsets = offsets + k / kBlockTerms * stride;
    outliers = reinterpret_cast<Outlier*>(second_offsets + k / kBlockTerms * stride);
    outlier_counts = reinterpret_cast<int32_t*>(outliers + m * row_outliers);
  }
};

struct PackPlacement;

// src: rows of whole blocks as a GGUF file has them, row after row; k is a multiple of the format's terms. See pack_weight for the rest.
void pack_blocks(const void* src, int64_t rows, int64_t k, BlockFormat format, const PackPlacement& at, void* tiles);
void unpack_blocks(const void* tiles, int64_t rows, int64_t k, BlockFormat format, const PackPlacement& at, void* dst);

// Writes the k values of one row of a packed weight.
void expand_block_row(const void* tiles, int64_t row, int64_t k, BlockFormat format, float* out);

}  // namespace hp
