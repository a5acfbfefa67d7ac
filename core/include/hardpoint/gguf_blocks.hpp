// Blocks of quantised weights as GGUF files have them, and their values in float32: the same, bit for bit, as those of the `gguf` library.
//
// Layouts: ggml, ggml-common.h (block_q4_0 and those after it). Every product of a scale and a number is exact in float32, except Q6_K's last one,
// to which nothing is added: it makes no difference whether a compiler fuses multiplication and addition.
#pragma once
#include <cstdint>
#include <cstring>

namespace hardpoint::gguf {

// Numbers of ggml_type.
enum class Format : int { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13, Q6_K = 14 };

// HARDPOINT_KEEP_LOOP: a loop that GCC unrolls as a whole is not one that it makes vectors of.
#if defined(__GNUC__)
#define HARDPOINT_INLINE inline __attribute__((always_inline))
#define HARDPOINT_KEEP_LOOP _Pragma("GCC unroll 1")
#else
#define HARDPOINT_KEEP_LOOP
#define HARDPOINT_INLINE inline
#endif

HARDPOINT_INLINE float half_to_float(const uint8_t* at) {
  uint16_t half;
  std::memcpy(&half, at, 2);
  uint32_t bits = static_cast<uint32_t>(half & 0x7fff) << 13;
  const uint32_t exponent = bits & 0x0f800000u;
  bits += 112u << 23;
  float value;
  if (exponent == 0x0f800000u) {
    bits += 112u << 23;  // infinite, or no number
  } else if (exponent == 0) {
    // Subnormal: the difference of two normal numbers.
    bits += 1u << 23;
    std::memcpy(&value, &bits, 4);
    value -= 6.103515625e-05f;
    std::memcpy(&bits, &value, 4);
  }
  bits |= static_cast<uint32_t>(half & 0x8000) << 16;
  std::memcpy(&value, &bits, 4);
  return value;
}

struct Q4_0 {
  static constexpr int kElements = 32, kBytes = 18, kHalves[] = {0};
  static HARDPOINT_INLINE void expand(const uint8_t* __restrict block, float* __restrict out) {
    const float d = half_to_float(block);
    HARDPOINT_KEEP_LOOP
    for (int j = 0; j < 16; ++j) {
      out[j] = d * static_cast<float>((block[2 + j] & 15) - 8);
      out[j + 16] = d * static_cast<float>((block[2 + j] >> 4) - 8);
    }
  }
};

struct Q4_1 {
  static constexpr int kElements = 32, kBytes = 20, kHalves[] = {0, 2};
  static HARDPOINT_INLINE void expand(const uint8_t* __restrict block, float* __restrict out) {
    const float d = half_to_float(block), m = half_to_float(block + 2);
    HARDPOINT_KEEP_LOOP
    for (int j = 0; j < 16; ++j) {
      out[j] = d * static_cast<float>(block[4 + j] & 15) + m;
      out[j + 16] = d * static_cast<float>(block[4 + j] >> 4) + m;
    }
  }
};

HARDPOINT_INLINE int fifth_bit(uint32_t bits, int j) { return static_cast<int>((bits >> j & 1) << 4); }

struct Q5_0 {
  static constexpr int kElements = 32, kBytes = 22, kHalves[] = {0};
  static HARDPOINT_INLINE void expand(const uint8_t* __restrict block, float* __restrict out) {
    const float d = half_to_float(block);
    uint32_t high;
    std::memcpy(&high, block + 2, 4);
    HARDPOINT_KEEP_LOOP
    for (int j = 0; j < 16; ++j) {
      out[j] = d * static_cast<float>(((block[6 + j] & 15) | fifth_bit(high, j)) - 16);
      out[j + 16] = d * static_cast<float>(((block[6 + j] >> 4) | fifth_bit(high, j + 16)) - 16);
    }
  }
};

struct Q5_1 {
  static constexpr int kElements = 32, kBytes = 24, kHalves[] = {0, 2};
  static HARDPOINT_INLINE void expand(const uint8_t* __restrict block, float* __restrict out) {
    const float d = half_to_float(block), m = half_to_float(block + 2);
    uint32_t high;
    std::memcpy(&high, block + 4, 4);
    HARDPOINT_KEEP_LOOP
    for (int j = 0; j < 16; ++j) {
      out[j] = d * static_cast<float>((block[8 + j] & 15) | fifth_bit(high, j)) + m;
      out[j + 16] = d * static_cast<float>((block[8 + j] >> 4) | fifth_bit(high, j + 16)) + m;
    }
  }
};

struct Q8_0 {
  static constexpr int kElements = 32, kBytes = 34, kHalves[] = {0};
  static HARDPOINT_INLINE void expand(const uint8_t* __restrict block, float* __restrict out) {
    const float d = half_to_float(block);
    HARDPOINT_KEEP_LOOP
    for (int j = 0; j < 32; ++j) out[j] = static_cast<float>(static_cast<int8_t>(block[2 + j])) * d;
  }
};

struct Q2_K {
  static constexpr int kElements = 256, kBytes = 84, kHalves[] = {80, 82};
  static HARDPOINT_INLINE void expand(const uint8_t* __restrict block, float* __restrict out) {
    const float d = half_to_float(block + 80), dmin = half_to_float(block + 82);
    for (int group = 0; group < 16; ++group) {
      const float scale = d * static_cast<float>(block[group] & 15), least = dmin * static_cast<float>(block[group] >> 4);
      const uint8_t* q = block + 16 + group / 8 * 32 + group % 2 * 16;
      const int shift = group / 2 % 4 * 2;
      HARDPOINT_KEEP_LOOP
      for (int j = 0; j < 16; ++j) out[group * 16 + j] = scale * static_cast<float>(q[j] >> shift & 3) - least;
    }
  }
};

struct Q3_K {
  static constexpr int kElements = 256, kBytes = 110, kHalves[] = {108};
  static HARDPOINT_INLINE void expand(const uint8_t* __restrict block, float* __restrict out) {
    const float d = half_to_float(block + 108);
    const uint8_t* scales = block + 96;
    for (int group = 0; group < 16; ++group) {
      const int low = scales[group % 8] >> group / 8 * 4 & 15, high = scales[8 + group % 4] >> group / 4 * 2 & 3;
      const float scale = d * static_cast<float>((low | high << 4) - 32);
      const uint8_t* q = block + 32 + group / 8 * 32 + group % 2 * 16;
      const uint8_t* mask = block + group % 2 * 16;
      const int shift = group / 2 % 4 * 2, bit = group / 2;
      HARDPOINT_KEEP_LOOP
      for (int j = 0; j < 16; ++j) {
        const int value = (q[j] >> shift & 3) - (mask[j] >> bit & 1 ? 0 : 4);
        out[group * 16 + j] = scale * static_cast<float>(value);
      }
    }
  }
};

// Six bits each of the scale and the minimum of group 0 to 7; returns them as (scale, minimum).
struct ScaleMin {
  int scale, least;
};
HARDPOINT_INLINE ScaleMin scale_min(const uint8_t* packed, int group) {
  if (group < 4) return {packed[group] & 63, packed[4 + group] & 63};
  return {(packed[4 + group] & 15) | (packed[group - 4] >> 2 & 48), (packed[4 + group] >> 4) | (packed[group] >> 2 & 48)};
}

struct Q4_K {
  static constexpr int kElements = 256, kBytes = 144, kHalves[] = {0, 2};
  static HARDPOINT_INLINE void expand(const uint8_t* __restrict block, float* __restrict out) {
    const float d = half_to_float(block), dmin = half_to_float(block + 2);
    for (int group = 0; group < 8; ++group) {
      const ScaleMin of = scale_min(block + 4, group);
      const float scale = d * static_cast<float>(of.scale), least = dmin * static_cast<float>(of.least);
      const uint8_t* q = block + 16 + group / 2 * 32;
      const int shift = group % 2 * 4;
      HARDPOINT_KEEP_LOOP
      for (int j = 0; j < 32; ++j) out[group * 32 + j] = scale * static_cast<float>(q[j] >> shift & 15) - least;
    }
  }
};

struct Q5_K {
  static constexpr int kElements = 256, kBytes = 176, kHalves[] = {0, 2};
  static HARDPOINT_INLINE void expand(const uint8_t* __restrict block, float* __restrict out) {
    const float d = half_to_float(block), dmin = half_to_float(block + 2);
    const uint8_t* high = block + 16;
    for (int group = 0; group < 8; ++group) {
      const ScaleMin of = scale_min(block + 4, group);
      const float scale = d * static_cast<float>(of.scale), least = dmin * static_cast<float>(of.least);
      const uint8_t* q = block + 48 + group / 2 * 32;
      const int shift = group % 2 * 4;
      HARDPOINT_KEEP_LOOP
      for (int j = 0; j < 32; ++j) {
        const int value = (q[j] >> shift & 15) | (high[j] >> group & 1) << 4;
        out[group * 32 + j] = scale * static_cast<float>(value) - least;
      }
    }
  }
};

struct Q6_K {
  static constexpr int kElements = 256, kBytes = 210, kHalves[] = {208};
  static HARDPOINT_INLINE void expand(const uint8_t* __restrict block, float* __restrict out) {
    const float d = half_to_float(block + 208);
    for (int group = 0; group < 16; ++group) {
      const float scale = d * static_cast<float>(static_cast<int8_t>(block[192 + group]));
      const int part = group / 2;  // of 32 elements: two halves of four
      const uint8_t* low = block + part / 4 * 64 + part % 2 * 32 + group % 2 * 16;
      const uint8_t* high = block + 128 + part / 4 * 32 + group % 2 * 16;
      const int low_shift = part % 4 / 2 * 4, high_shift = part % 4 * 2;
      HARDPOINT_KEEP_LOOP
      for (int j = 0; j < 16; ++j) {
        const int value = ((low[j] >> low_shift & 15) | (high[j] >> high_shift & 3) << 4) - 32;
        out[group * 16 + j] = scale * static_cast<float>(value);
      }
    }
  }
};

// kHalves: where a block has its scales and minima in binary16.

// Calls `f` with a value of the format's type; returns false for a format that is not known here.
template <class F>
HARDPOINT_INLINE bool with_format(Format format, F&& f) {
  switch (format) {
    case Format::Q4_0: return f(Q4_0{}), true;
    case Format::Q4_1: return f(Q4_1{}), true;
    case Format::Q5_0: return f(Q5_0{}), true;
    case Format::Q5_1: return f(Q5_1{}), true;
    case Format::Q8_0: return f(Q8_0{}), true;
    case Format::Q2_K: return f(Q2_K{}), true;
    case Format::Q3_K: return f(Q3_K{}), true;
    case Format::Q4_K: return f(Q4_K{}), true;
    case Format::Q5_K: return f(Q5_K{}), true;
    case Format::Q6_K: return f(Q6_K{}), true;
  }
  return false;
}

}  // namespace hardpoint::gguf
