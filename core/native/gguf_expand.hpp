// Expansion of quantised blocks to float32 on the host, for every backend that loads a GGUF file as dense weights.
#pragma once
#include <cstdint>

#include "hardpoint/gguf_blocks.hpp"

namespace hardpoint {

// Expands `blocks` blocks; false for a format that is not known.
bool expand_gguf(gguf::Format format, const uint8_t* source, int64_t blocks, float* out);

// Sizes of a format's blocks; false for a format that is not known.
bool gguf_block(gguf::Format format, int64_t* elements, int64_t* bytes);

}  // namespace hardpoint
