#include "block_weight.hpp"

#include <algorithm>
#include <cstring>

#include "gemm.hpp"
#include "hardpoint/gguf_blocks.hpp"
#include "thread_pool.hpp"

namespace hp {
namespace {

// One row's place in a tile: its numbers in vectors of 16 dwords, its scales, and the two bytes beside them.
template <class Byte>
struct Lane {
  Byte* numbers;
  Byte* scales;
  Byte* seconds;
};

template <class Byte>
Lane<Byte> lane_of(Byte* tiles, int64_t row, int64_t k, BlockFormat format, const PackPlacement& at) {
  const int64_t stored = at.first_row + row, lane = stored % kTileColumns;
  Byte* tile = tiles + (at.first_tile + at.tile_step * (stored / kTileColumns)) * block_tile_bytes(format, k);
  const int scale = block_layout(format).scale_bytes;
  Byte* scales = tile + k / kBlockTerms * tile_number_bytes(format);
  return {tile + lane * 4, scales + lane * scale, scales + 16 * scale + lane * 2};
}

// Eight-bit numbers are stored with 128 added.
constexpr uint32_t kSigns = 0x80808080u;

// The fifth bits of a block's numbers: files have bit i of number i, tiles byte t of bit j for number 4 j + t.
bool has_fifth_bits(BlockFormat format) { return format == BlockFormat::Q5_0 || format == BlockFormat::Q5_1; }

uint32_t fifth_bits_of_tile(uint32_t bits) {
  uint32_t found = 0;
  for (int i = 0; i < kBlockTerms; ++i) found |= (bits >> i & 1u) << (i % 4 * 8 + i / 4);
  return found;
}

uint32_t fifth_bits_of_file(uint32_t bits) {
  uint32_t found = 0;
  for (int i = 0; i < kBlockTerms; ++i) found |= (bits >> (i % 4 * 8 + i / 4) & 1u) << i;
  return found;
}

// Blocks stand in files as scale, minimum or zero point, fifth bits, numbers; of those that share a scale the numbers of each.
void read_block(const Lane<const char>& from, int64_t block, BlockFormat format, char* out) {
  const BlockLayout layout = block_layout(format);
  const int64_t scales = block * tile_scale_bytes(format);
  std::memcpy(out, from.scales + scales, static_cast<size_t>(layout.scale_bytes));
  if (layout.has_second()) std::memcpy(out + layout.scale_bytes, from.seconds + scales, 2);
  out += block_scale_bytes(format);
  const char* numbers = from.numbers + block * layout.together * tile_number_bytes(format);
  int words = layout.number_bytes / 4;
  if (has_fifth_bits(format)) {
    uint32_t bits;
    std::memcpy(&bits, numbers + --words * 64, 4);
    bits = fifth_bits_of_file(bits);
    std::memcpy(out, &bits, 4);
    out += 4;
  }
  // The vectors of one block after another's are in a tile as they are in a block.
  for (int j = 0; j < words * layout.together; ++j) {
    uint32_t word;
    std::memcpy(&word, numbers + j * 64, 4);
    if (layout.zero == 128) word ^= kSigns;
    std::memcpy(out + j * 4, &word, 4);
  }
}

void write_block(const char* in, const Lane<char>& to, int64_t block, BlockFormat format) {
  const BlockLayout layout = block_layout(format);
  const int64_t scales = block * tile_scale_bytes(format);
  std::memcpy(to.scales + scales, in, static_cast<size_t>(layout.scale_bytes));
  if (layout.has_second()) std::memcpy(to.seconds + scales, in + layout.scale_bytes, 2);
  in += block_scale_bytes(format);
  char* numbers = to.numbers + block * layout.together * tile_number_bytes(format);
  int words = layout.number_bytes / 4;
  if (has_fifth_bits(format)) {
    uint32_t bits;
    std::memcpy(&bits, in, 4);
    bits = fifth_bits_of_tile(bits);
    std::memcpy(numbers + --words * 64, &bits, 4);
    in += 4;
  }
  for (int j = 0; j < words * layout.together; ++j) {
    uint32_t word;
    std::memcpy(&word, in + j * 4, 4);
    if (layout.zero == 128) word ^= kSigns;
    std::memcpy(numbers + j * 64, &word, 4);
  }
}

// Where a block of 256 has number j of its group g of 32: four bits in a byte, and in some formats more of them in another.
struct NumberPlace {
  int low, low_shift, high, high_shift, high_mask;
};

NumberPlace number_place(BlockFormat format, int g, int j) {
  switch (format) {
    case BlockFormat::Q4_K: return {16 + g / 2 * 32 + j, g % 2 * 4, 0, 0, 0};
    case BlockFormat::Q5_K: return {48 + g / 2 * 32 + j, g % 2 * 4, 16 + j, g, 1};
    default: return {g / 4 * 64 + g % 2 * 32 + j, g % 4 / 2 * 4, 128 + g / 4 * 32 + j, g % 4 * 2, 3};
  }
}

// Where a group's packed bytes have the bits above the lowest four of number j.
struct HighPlace {
  int at, shift;
};

HighPlace high_place(BlockFormat format, int j) {
  if (format == BlockFormat::Q5_K) return {16 + j % 4, j / 4};
  return {16 + j / 16 * 4 + j % 4, j / 4 % 4 * 2};
}

constexpr int kGroups = 8;
constexpr int kQ6Scales = 192, kQ6Scale = 208;  // bytes of a block of Q6_K

// The bytes under a tile's scales of 256 terms, of one row: two for each group, 16 apart.
template <class Byte>
Byte* group_bytes(Byte* scales, BlockFormat format, int64_t lane) {
  return scales - lane * 2 + 16 * block_scale_bytes(format) + lane;
}

void write_groups(const char* in, const Lane<char>& to, int64_t block, int64_t lane, BlockFormat format) {
  const BlockLayout layout = block_layout(format);
  const uint8_t* source = reinterpret_cast<const uint8_t*>(in);
  const int64_t at = block * tile_scale_bytes(format);
  char* bytes = group_bytes(to.scales + at, format, lane);
  std::memcpy(to.scales + at, in + (layout.has_halves ? kQ6Scale : 0), 2);
  if (layout.has_minimum) std::memcpy(to.seconds + at, in + 2, 2);
  for (int g = 0; g < kGroups; ++g) {
    if (layout.has_halves) {
      bytes[g * 32] = in[kQ6Scales + 2 * g], bytes[g * 32 + 16] = in[kQ6Scales + 2 * g + 1];
    } else {
      const auto of = hardpoint::gguf::scale_min(source + 4, g);
      bytes[g * 32] = static_cast<char>(of.scale), bytes[g * 32 + 16] = static_cast<char>(of.least);
    }
    uint8_t packed[24] = {};
    for (int j = 0; j < kBlockTerms; ++j) {
      const NumberPlace from = number_place(format, g, j);
      packed[j % 16] |= static_cast<uint8_t>((source[from.low] >> from.low_shift & 15) << j / 16 * 4);
      if (from.high_mask == 0) continue;
      const HighPlace high = high_place(format, j);
      packed[high.at] |= static_cast<uint8_t>((source[from.high] >> from.high_shift & from.high_mask) << high.shift);
    }
    char* numbers = to.numbers + (block * kGroups + g) * tile_number_bytes(format);
    for (int w = 0; w < layout.number_bytes / 4; ++w) std::memcpy(numbers + w * 64, packed + w * 4, 4);
  }
}

void read_groups(const Lane<const char>& from, int64_t block, int64_t lane, BlockFormat format, char* out) {
  const BlockLayout layout = block_layout(format);
  uint8_t* to = reinterpret_cast<uint8_t*>(out);
  std::memset(out, 0, static_cast<size_t>(block_bytes(format)));
  const int64_t at = block * tile_scale_bytes(format);
  const char* bytes = group_bytes(from.scales + at, format, lane);
  std::memcpy(out + (layout.has_halves ? kQ6Scale : 0), from.scales + at, 2);
  if (layout.has_minimum) std::memcpy(out + 2, from.seconds + at, 2);
  for (int g = 0; g < kGroups; ++g) {
    const auto first = static_cast<uint8_t>(bytes[g * 32]), second = static_cast<uint8_t>(bytes[g * 32 + 16]);
    uint8_t* scales = to + 4;
    if (layout.has_halves) {
      to[kQ6Scales + 2 * g] = first, to[kQ6Scales + 2 * g + 1] = second;
    } else if (g < 4) {
      scales[g] = first, scales[4 + g] = second;
    } else {
      scales[g - 4] |= static_cast<uint8_t>(first >> 4 << 6), scales[g] |= static_cast<uint8_t>(second >> 4 << 6);
      scales[4 + g] = static_cast<uint8_t>((first & 15) | (second & 15) << 4);
    }
    uint8_t packed[24];
    const char* numbers = from.numbers + (block * kGroups + g) * tile_number_bytes(format);
    for (int w = 0; w < layout.number_bytes / 4; ++w) std::memcpy(packed + w * 4, numbers + w * 64, 4);
    for (int j = 0; j < kBlockTerms; ++j) {
      const NumberPlace place = number_place(format, g, j);
      to[place.low] |= static_cast<uint8_t>((packed[j % 16] >> j / 16 * 4 & 15) << place.low_shift);
      if (place.high_mask == 0) continue;
      const HighPlace high = high_place(format, j);
      to[place.high] |= static_cast<uint8_t>((packed[high.at] >> high.shift & place.high_mask) << place.high_shift);
    }
  }
}

// scale * (number - zero point).
void expand_integers(const uint8_t* block, BlockFormat format, float* out) {
  float scale;
  int16_t zero;
  std::memcpy(&scale, block, 4);
  std::memcpy(&zero, block + 4, 2);
  const uint8_t* numbers = block + 6;
  const bool in_half_bytes = block_layout(format).number_bytes == 16;
  for (int j = 0; j < block_terms(format); ++j) {
    const int number = in_half_bytes ? numbers[j / 32 * 16 + j % 16] >> j % 32 / 16 * 4 & 15 : numbers[j];
    out[j] = scale * static_cast<float>(number - zero);
  }
}

// One block of a row as files have it.
void read_stored(const void* tiles, int64_t row, int64_t k, int64_t block, BlockFormat format, const PackPlacement& at, char* out) {
  const auto lane = lane_of(static_cast<const char*>(tiles), row, k, format, at);
  if (block_layout(format).has_bytes) return read_groups(lane, block, (at.first_row + row) % kTileColumns, format, out);
  read_block(lane, block, format, out);
}

}  // namespace

void pack_blocks(const void* src, int64_t rows, int64_t k, BlockFormat format, const PackPlacement& at, void* tiles) {
  const int64_t blocks = k / block_terms(format), size = block_bytes(format);
  const bool in_groups = block_layout(format).has_bytes;
  const auto pack = [&](int64_t begin, int64_t end, int) {
    // A tile's rows are written block by block, so that a cache line is filled at once.
    for (int64_t first = begin; first < end;) {
      const int64_t last = std::min(end, first + kTileColumns - (at.first_row + first) % kTileColumns);
      for (int64_t b = 0; b < blocks; ++b)
        for (int64_t r = first; r < last; ++r) {
          const char* block = static_cast<const char*>(src) + (r * blocks + b) * size;
          const auto lane = lane_of(static_cast<char*>(tiles), r, k, format, at);
          if (in_groups) {
            write_groups(block, lane, b, (at.first_row + r) % kTileColumns, format);
          } else {
            write_block(block, lane, b, format);
          }
        }
      first = last;
    }
  };
  if (rows * blocks * size <= kPackedAlone) return pack(0, rows, 0);
  ThreadPool::global().parallel_for(rows, kTileColumns, pack);
}

void unpack_blocks(const void* tiles, int64_t rows, int64_t k, BlockFormat format, const PackPlacement& at, void* dst) {
  const int64_t blocks = k / block_terms(format), size = block_bytes(format);
  ThreadPool::global().parallel_for(rows, kTileColumns, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r)
      for (int64_t b = 0; b < blocks; ++b) read_stored(tiles, r, k, b, format, at, static_cast<char*>(dst) + (r * blocks + b) * size);
  });
}

void expand_block_row(const void* tiles, int64_t row, int64_t k, BlockFormat format, float* out) {
  namespace gguf = hardpoint::gguf;
  uint8_t block[256];
  for (int64_t b = 0; b < k / block_terms(format); ++b, out += block_terms(format)) {
    read_stored(tiles, row, k, b, format, {}, reinterpret_cast<char*>(block));
    switch (format) {
      case BlockFormat::Int4:
      case BlockFormat::Int8:
      case BlockFormat::Int4_128:
      case BlockFormat::Int8_128: expand_integers(block, format, out); break;
      default: gguf::with_format(static_cast<gguf::Format>(format), [&](auto known) { known.expand(block, out); });
    }
  }
}

}  // namespace hp
