#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace hp {

// Tells the processor that this thread spins.
inline void pause_cpu() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace hp
