#include "gguf_expand.hpp"

namespace hardpoint {
namespace {

template <class Block>
HARDPOINT_INLINE void expand_blocks(const uint8_t* source, int64_t blocks, float* out) {
  for (int64_t i = 0; i < blocks; ++i) Block::expand(source + i * Block::kBytes, out + i * Block::kElements);
}

HARDPOINT_INLINE bool expand(gguf::Format format, const uint8_t* source, int64_t blocks, float* out) {
  return gguf::with_format(format, [=](auto block) __attribute__((always_inline)) { expand_blocks<decltype(block)>(source, blocks, out); });
}

#if defined(__x86_64__) && defined(__GNUC__)
#define HARDPOINT_HAS_AVX2 1
__attribute__((target("avx2"))) bool expand_avx2(gguf::Format format, const uint8_t* source, int64_t blocks, float* out) {
  return expand(format, source, blocks, out);
}
#endif

}  // namespace

bool expand_gguf(gguf::Format format, const uint8_t* source, int64_t blocks, float* out) {
#ifdef HARDPOINT_HAS_AVX2
  if (__builtin_cpu_supports("avx2")) return expand_avx2(format, source, blocks, out);
#endif
  return expand(format, source, blocks, out);
}

bool gguf_block(gguf::Format format, int64_t* elements, int64_t* bytes) {
  return gguf::with_format(format, [=](auto block) { *elements = block.kElements, *bytes = block.kBytes; });
}

}  // namespace hardpoint
