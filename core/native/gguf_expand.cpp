#include "gguf_expand.hpp"

#if defined(__x86_64__) && defined(__GNUC__)
#define HARDPOINT_HAS_AVX2 1
#include <immintrin.h>
#endif

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <vector>

namespace hardpoint {
namespace {

template <class Block>
HARDPOINT_INLINE void expand_blocks(const uint8_t* source, int64_t blocks, float* out) {
  for (int64_t i = 0; i < blocks; ++i) Block::expand(source + i * Block::kBytes, out + i * Block::kElements);
}

HARDPOINT_INLINE bool expand(gguf::Format format, const uint8_t* source, int64_t blocks, float* out) {
  return gguf::with_format(format, [=](auto block) __attribute__((always_inline)) { expand_blocks<decltype(block)>(source, blocks, out); });
}

constexpr uint16_t kNoNumber = 0x7fc0;

void round_to_bf16(const float* values, int64_t count, uint16_t* out) {
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, &values[i], 4);
    const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    out[i] = (bits & 0x7fffffffu) <= 0x7f800000u ? static_cast<uint16_t>(rounded) : kNoNumber;
  }
}

#ifdef HARDPOINT_HAS_AVX2
__attribute__((target("avx2"))) bool expand_avx2(gguf::Format format, const uint8_t* source, int64_t blocks, float* out) {
  return expand(format, source, blocks, out);
}

__attribute__((target("avx2"))) inline __m256i rounded_avx2(const float* values) {
  const __m256 value = _mm256_loadu_ps(values);
  const __m256i bits = _mm256_castps_si256(value);
  const __m256i last = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i sum = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), last);
  const __m256i no_number = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(_mm256_srli_epi32(sum, 16), _mm256_set1_epi32(kNoNumber), no_number);
}

// Of a multiple of 16 values.
__attribute__((target("avx2"))) void round_to_bf16_avx2(const float* values, int64_t count, uint16_t* out) {
  for (int64_t i = 0; i < count; i += 16) {
    const __m256i pairs = _mm256_packus_epi32(rounded_avx2(values + i), rounded_avx2(values + i + 8));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), _mm256_permute4x64_epi64(pairs, 0xd8));  // packed within halves of a vector
  }
}
#endif

// To the nearest, ties to even.
uint16_t float_to_half(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
  if (size >= 0x7f800000) return static_cast<uint16_t>(sign | (size > 0x7f800000 ? 0x7e00 : 0x7c00));
  if (size >= 0x38800000) {  // 2^-14: a normal number, or one that becomes infinite
    const uint32_t rounded = size - 0x38000000 + 0xfff + (size >> 13 & 1);
    return static_cast<uint16_t>(sign | (rounded >= 0x0f800000 ? 0x7c00 : rounded >> 13));
  }
  // A subnormal number counts in units of 2^-24, which a sum with 0.5 leaves in the last bits.
  float units;
  std::memcpy(&units, &size, 4);
  units += 0.5f;
  std::memcpy(&bits, &units, 4);
  return static_cast<uint16_t>(sign | (bits - 0x3f000000));
}

void store_half(float value, uint8_t* at) {
  const uint16_t half = float_to_half(value);
  std::memcpy(at, &half, 2);
}

// Numbers 0 to 15 in half bytes, as blocks of 32 have them.
template <class F>
HARDPOINT_INLINE void store_halves(F&& number, uint8_t* out) {
  const auto clipped = [&](int j) {
    const int q = static_cast<int>(number(j));
    return q < 0 ? 0 : q > 15 ? 15 : q;
  };
  for (int j = 0; j < 16; ++j) out[j] = static_cast<uint8_t>(clipped(j) | clipped(j + 16) << 4);
}

// Of a step that is zero, or too small to divide by, zero.
HARDPOINT_INLINE float inverse(float step) { return std::fabs(step) < 0x1p-126f ? 0 : 1 / step; }

HARDPOINT_INLINE void round_block(gguf::Q4_0, const float* x, uint8_t* out) {
  float most = 0;
  for (int j = 0; j < 32; ++j)
    if (std::fabs(x[j]) > std::fabs(most)) most = x[j];
  const float step = most / -8, by = inverse(step);
  store_half(step, out);
  store_halves([=](int j) { return x[j] * by + 8.5f; }, out + 2);
}

HARDPOINT_INLINE void round_block(gguf::Q4_1, const float* x, uint8_t* out) {
  float least = x[0], most = x[0];
  for (int j = 1; j < 32; ++j) least = std::min(least, x[j]), most = std::max(most, x[j]);
  const float step = (most - least) / 15, by = inverse(step);
  store_half(step, out);
  store_half(least, out + 2);
  store_halves([=](int j) { return (x[j] - least) * by + 0.5f; }, out + 4);
}

HARDPOINT_INLINE void round_block(gguf::Q8_0, const float* x, uint8_t* out) {
  float most = 0;
  for (int j = 0; j < 32; ++j) most = std::max(most, std::fabs(x[j]));
  const float step = most / 127, by = inverse(step);
  store_half(step, out);
  for (int j = 0; j < 32; ++j) {
    // Halves go away from zero.
    const float scaled = std::fabs(x[j] * by), whole = static_cast<float>(static_cast<int>(scaled));
    const int q = static_cast<int>(whole) + (scaled - whole >= 0.5f);
    out[2 + j] = static_cast<uint8_t>(x[j] * by < 0 ? -q : q);
  }
}

template <class Block>
HARDPOINT_INLINE bool round_blocks(Block block, const float* source, int64_t blocks, uint8_t* out) {
  for (int64_t i = 0; i < blocks; ++i) round_block(block, source + i * Block::kElements, out + i * Block::kBytes);
  return true;
}

HARDPOINT_INLINE bool round_known(gguf::Format format, const float* source, int64_t blocks, uint8_t* out) {
  switch (format) {
    case gguf::Format::Q4_0: return round_blocks(gguf::Q4_0{}, source, blocks, out);
    case gguf::Format::Q4_1: return round_blocks(gguf::Q4_1{}, source, blocks, out);
    case gguf::Format::Q8_0: return round_blocks(gguf::Q8_0{}, source, blocks, out);
    default: return false;
  }
}

#ifdef HARDPOINT_HAS_AVX2
__attribute__((target("avx2"))) bool round_avx2(gguf::Format format, const float* source, int64_t blocks, uint8_t* out) {
  return round_known(format, source, blocks, out);
}
#endif

}  // namespace

bool round_to_gguf(gguf::Format format, const float* source, int64_t blocks, uint8_t* out) {
#ifdef HARDPOINT_HAS_AVX2
  if (__builtin_cpu_supports("avx2")) return round_avx2(format, source, blocks, out);
#endif
  return round_known(format, source, blocks, out);
}

bool expand_gguf(gguf::Format format, const uint8_t* source, int64_t blocks, float* out) {
#ifdef HARDPOINT_HAS_AVX2
  if (__builtin_cpu_supports("avx2")) return expand_avx2(format, source, blocks, out);
#endif
  return expand(format, source, blocks, out);
}

bool expand_gguf_to_bf16(gguf::Format format, const uint8_t* source, int64_t blocks, uint16_t* out) {
  int64_t elements, bytes;
  if (!gguf_block(format, &elements, &bytes)) return false;
  alignas(32) float values[2048];  // stays in the processor's nearest cache
  const int64_t step = static_cast<int64_t>(sizeof(values) / sizeof(float)) / elements;
  auto round = round_to_bf16;
#ifdef HARDPOINT_HAS_AVX2
  if (__builtin_cpu_supports("avx2")) round = round_to_bf16_avx2;
#endif
  for (int64_t first = 0; first < blocks; first += step) {
    const int64_t count = std::min(step, blocks - first);
    expand_gguf(format, source + first * bytes, count, values);
    round(values, count * elements, out + first * elements);
  }
  return true;
}

namespace {

constexpr int64_t kReadBytes = 64 << 10;

bool expand_rows(gguf::Format format, const uint8_t* source, int64_t blocks, float* out) { return expand_gguf(format, source, blocks, out); }
bool expand_rows(gguf::Format format, const uint8_t* source, int64_t blocks, uint16_t* out) { return expand_gguf_to_bf16(format, source, blocks, out); }

int read_at(int file, int64_t offset, int64_t size, uint8_t* to) {
  while (size > 0) {
    const ssize_t got = ::pread(file, to, static_cast<size_t>(size), offset);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return got < 0 ? errno : -1;
    offset += got, to += got, size -= got;
  }
  return 0;
}

}  // namespace

template <class Value>
int read_gguf(const GgufRows& rows, const int64_t* places, int64_t first, int64_t count, Value* out) {
  int64_t elements, bytes;
  gguf_block(rows.format, &elements, &bytes);
  const int64_t blocks = rows.row_bytes / bytes, step = std::max<int64_t>(1, kReadBytes / rows.row_bytes);
  std::vector<uint8_t> raw;
  for (int64_t begin = first; begin < first + count; begin += step) {
    const int64_t end = std::min(begin + step, first + count);
    int64_t low = begin, high = end;
    if (places != nullptr) {
      const auto [least, greatest] = std::minmax_element(places + begin, places + end);
      low = *least, high = *greatest + 1;
    }
    raw.resize(std::max(raw.size(), static_cast<size_t>((high - low) * rows.row_bytes)));
    if (const int error = read_at(rows.file, rows.offset + low * rows.row_bytes, (high - low) * rows.row_bytes, raw.data())) return error;
    Value* to = out + (begin - first) * blocks * elements;
    if (places == nullptr) {
      expand_rows(rows.format, raw.data(), (end - begin) * blocks, to);
      continue;
    }
    for (int64_t row = begin; row < end; ++row, to += blocks * elements)
      expand_rows(rows.format, raw.data() + (places[row] - low) * rows.row_bytes, blocks, to);
  }
  return 0;
}

template int read_gguf<float>(const GgufRows&, const int64_t*, int64_t, int64_t, float*);
template int read_gguf<uint16_t>(const GgufRows&, const int64_t*, int64_t, int64_t, uint16_t*);

bool gguf_block(gguf::Format format, int64_t* elements, int64_t* bytes) {
  return gguf::with_format(format, [=](auto block) { *elements = block.kElements, *bytes = block.kBytes; });
}

bool gguf_is_finite(gguf::Format format, const uint8_t* source, int64_t blocks) {
  bool finite = true;
  gguf::with_format(format, [=, &finite](auto block) {
    for (int64_t i = 0; i < blocks; ++i)
      for (const int at : block.kHalves) finite &= (source[i * block.kBytes + at + 1] & 0x7c) != 0x7c;  // the exponent's bits
  });
  return finite;
}

}  // namespace hardpoint
