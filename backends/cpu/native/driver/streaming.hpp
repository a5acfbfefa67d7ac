// Copies and fills of large memory that bypass the caches: +30 % where the bytes are not read again soon, because a plain store first
// reads the line that it is about to overwrite.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace hp::driver {

struct Streaming {
  const char* name;
  void (*copy)(unsigned char* to, const unsigned char* from, size_t size);
  void (*fill)(unsigned char* to, uint8_t value, size_t size);
};

// The best that this processor has.
const Streaming& best_streaming();

// "avx512", "avx2", "sse2" or "portable"; null when this build or processor does not have it.
const Streaming* find_streaming(const std::string& name);

}  // namespace hp::driver
