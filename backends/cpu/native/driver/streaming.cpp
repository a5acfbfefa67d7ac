#include "streaming.hpp"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace hp::driver {
namespace {

void copy_portable(unsigned char* to, const unsigned char* from, size_t size) { std::memcpy(to, from, size); }
void fill_portable(unsigned char* to, uint8_t value, size_t size) { std::memset(to, value, size); }

constexpr Streaming kPortable{"portable", copy_portable, fill_portable};

#if defined(__x86_64__)

constexpr size_t kLine = 64;

size_t bytes_to_next_line(const unsigned char* address) { return (0 - reinterpret_cast<uintptr_t>(address)) % kLine; }

// The parts before the first and after the last whole line of the target are copied plainly, the lines between by `copy_lines`. Streaming
// stores are not ordered with other stores: the fence makes the bytes visible before whatever the thread does next.
template <typename CopyLines>
void copy_streaming(unsigned char* to, const unsigned char* from, size_t size, CopyLines copy_lines) {
  const size_t head = std::min(size, bytes_to_next_line(to));
  std::memcpy(to, from, head);
  const size_t lines = (size - head) / kLine;
  copy_lines(to + head, from + head, lines);
  const size_t done = head + lines * kLine;
  std::memcpy(to + done, from + done, size - done);
  _mm_sfence();
}

template <typename FillLines>
void fill_streaming(unsigned char* to, uint8_t value, size_t size, FillLines fill_lines) {
  const size_t head = std::min(size, bytes_to_next_line(to));
  std::memset(to, value, head);
  const size_t lines = (size - head) / kLine;
  fill_lines(to + head, value, lines);
  const size_t done = head + lines * kLine;
  std::memset(to + done, value, size - done);
  _mm_sfence();
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
__attribute__((optimize("O1")))  // the rest of such a build is not optimised, and its tests copy much
#endif
void copy_lines_sse2(unsigned char* to, const unsigned char* from, size_t lines) {
  for (; lines > 0; --lines, to += kLine, from += kLine)
    for (size_t i = 0; i < kLine; i += 16)
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
}

void fill_lines_sse2(unsigned char* to, uint8_t value, size_t lines) {
  const __m128i vector = _mm_set1_epi8(static_cast<char>(value));
  for (; lines > 0; --lines, to += kLine)
    for (size_t i = 0; i < kLine; i += 16) _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), vector);
}

void copy_sse2(unsigned char* to, const unsigned char* from, size_t size) { copy_streaming(to, from, size, copy_lines_sse2); }
void fill_sse2(unsigned char* to, uint8_t value, size_t size) { fill_streaming(to, value, size, fill_lines_sse2); }

constexpr Streaming kSse2{"sse2", copy_sse2, fill_sse2};

#if !defined(HARDPOINT_PORTABLE)

__attribute__((target("avx2"))) void copy_lines_avx2(unsigned char* to, const unsigned char* from, size_t lines) {
  for (; lines > 0; --lines, to += kLine, from += kLine) {
    const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 32));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), low);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + 32), high);
  }
}

__attribute__((target("avx2"))) void fill_lines_avx2(unsigned char* to, uint8_t value, size_t lines) {
  const __m256i vector = _mm256_set1_epi8(static_cast<char>(value));
  for (; lines > 0; --lines, to += kLine) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), vector);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + 32), vector);
  }
}

void copy_avx2(unsigned char* to, const unsigned char* from, size_t size) { copy_streaming(to, from, size, copy_lines_avx2); }
void fill_avx2(unsigned char* to, uint8_t value, size_t size) { fill_streaming(to, value, size, fill_lines_avx2); }

constexpr Streaming kAvx2{"avx2", copy_avx2, fill_avx2};

__attribute__((target("avx512f"))) void copy_lines_avx512(unsigned char* to, const unsigned char* from, size_t lines) {
  for (; lines > 0; --lines, to += kLine, from += kLine)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
}

__attribute__((target("avx512f"))) void fill_lines_avx512(unsigned char* to, uint8_t value, size_t lines) {
  const __m512i vector = _mm512_set1_epi32(static_cast<int>(0x01010101u * value));
  for (; lines > 0; --lines, to += kLine) _mm512_stream_si512(reinterpret_cast<__m512i*>(to), vector);
}

void copy_avx512(unsigned char* to, const unsigned char* from, size_t size) { copy_streaming(to, from, size, copy_lines_avx512); }
void fill_avx512(unsigned char* to, uint8_t value, size_t size) { fill_streaming(to, value, size, fill_lines_avx512); }

constexpr Streaming kAvx512{"avx512", copy_avx512, fill_avx512};

#endif
#endif

}  // namespace

const Streaming* find_streaming(const std::string& name) {
#if defined(__x86_64__)
#if !defined(HARDPOINT_PORTABLE)
  __builtin_cpu_init();
  if (name == kAvx512.name && __builtin_cpu_supports("avx512f")) return &kAvx512;
  if (name == kAvx2.name && __builtin_cpu_supports("avx2")) return &kAvx2;
#endif
  if (name == kSse2.name) return &kSse2;
#endif
  return name == kPortable.name ? &kPortable : nullptr;
}

const Streaming& best_streaming() {
  for (const char* name : {"avx512", "avx2", "sse2"})
    if (const Streaming* found = find_streaming(name)) return *found;
  return kPortable;
}

}  // namespace hp::driver
