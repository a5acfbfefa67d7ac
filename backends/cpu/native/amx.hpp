// The tile registers of AMX, for units compiled by isa.cmake at the level `amx`: eight of up to 16 rows of 64 bytes. A thread gives them
// their shapes before it uses them and gives them back after: no shape outlives the work that set it, for other libraries have their own.
//
// TDPBF16PS (_tile_dpbf16ps(c, a, b)) takes a: [rows, 32] bf16, row-major, and b: [16][16][2] bf16, which is 32 terms of k of a tile
// packed by pack_weight, contiguous, and adds their product to c: [rows, 16] fp32. From zero it sums the even terms of the 32, in order,
// and the odd ones, adds the two sums, and adds the result to c, each step rounded once: other bits than those of the dot product of
// AVX-512. Denormals count as zero.
#pragma once
#include "simd.hpp"

namespace hp {
namespace HP_ISA {

constexpr int kTileRegisterRows = 16, kTileRegisterBytes = 64;

class TileRegisters {
 public:
  TileRegisters() = default;
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;
  HP_INLINE_MEMBER ~TileRegisters() { _tile_release(); }

  // Registers first, first + 1, ... first + count - 1 get `rows` rows, and `load` makes it so and clears all registers.
  HP_INLINE_MEMBER void shape(int first, int count, int rows, int row_bytes = kTileRegisterBytes) {
    for (int i = first; i < first + count; ++i) {
      shapes_.row_bytes[i] = static_cast<uint16_t>(row_bytes);
      shapes_.rows[i] = static_cast<uint8_t>(rows);
    }
  }
  HP_INLINE_MEMBER void load() {
    settle_memory();
    _tile_loadconfig(&shapes_);
  }

  // GCC 12 does not say that its tile loads and LDTILECFG read memory: what was just written needs this before one of them.
  HP_INLINE void settle_memory() { __asm__ volatile("" ::: "memory"); }

 private:
  struct alignas(64) Shapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  };
  Shapes shapes_;
};

}  // namespace HP_ISA
}  // namespace hp
