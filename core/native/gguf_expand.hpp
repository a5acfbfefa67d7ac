// Quantised blocks to float32 and back on the host, for every backend.
#pragma once
#include <cstdint>

#include "hardpoint/gguf_blocks.hpp"

namespace hardpoint {

// Expands `blocks` blocks; false for a format that is not known.
bool expand_gguf(gguf::Format format, const uint8_t* source, int64_t blocks, float* out);

// Rounds `blocks` blocks to the nearest, as the `gguf` library does; false for a format without this here (others than Q4_0, Q4_1 and Q8_0).
bool round_to_gguf(gguf::Format format, const float* source, int64_t blocks, uint8_t* out);

// The same values rounded to bfloat16, to the nearest and of two such to the even one, as bits.
bool expand_gguf_to_bf16(gguf::Format format, const uint8_t* source, int64_t blocks, uint16_t* out);

// Rows of a matrix in blocks, in a file.
struct GgufRows {
  int file;
  int64_t offset;     // of row 0, in bytes
  int64_t row_bytes;  // whole blocks
  gguf::Format format;
};

// Expands `count` rows to float32 or bfloat16: those from `first` on, or, where `places` is not null, those whose numbers stand there from `first` on,
// which are near their own places. Returns 0, the error of a read, or -1 where the file is shorter; then some rows may be written.
template <class Value>
int read_gguf(const GgufRows& rows, const int64_t* places, int64_t first, int64_t count, Value* out);

// Sizes of a format's blocks; false for a format that is not known.
bool gguf_block(gguf::Format format, int64_t* elements, int64_t* bytes);

// Whether the scales and minima of all blocks, of a format that is known, are finite numbers.
bool gguf_is_finite(gguf::Format format, const uint8_t* source, int64_t blocks);

}  // namespace hardpoint
