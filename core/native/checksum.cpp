#include "checksum.hpp"

#include <algorithm>
#include <cstring>

namespace hardpoint {
namespace {

constexpr uint64_t kPrime1 = 0x9E3779B185EBCA87u;
constexpr uint64_t kPrime2 = 0xC2B2AE3D27D4EB4Fu;
constexpr uint64_t kPrime3 = 0x165667B19E3779F9u;
constexpr uint64_t kPrime4 = 0x85EBCA77C2B2AE63u;
constexpr uint64_t kPrime5 = 0x27D4EB2F165667C5u;

uint64_t rotate_left(uint64_t value, int bits) { return (value << bits) | (value >> (64 - bits)); }

template <typename Integer>
Integer load_little_endian(const unsigned char* bytes) {
  Integer value;
  std::memcpy(&value, bytes, sizeof value);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  return sizeof value == 8 ? static_cast<Integer>(__builtin_bswap64(value)) : static_cast<Integer>(__builtin_bswap32(value));
#else
  return value;
#endif
}

uint64_t round(uint64_t lane, uint64_t input) { return rotate_left(lane + input * kPrime2, 31) * kPrime1; }

uint64_t merge_lane(uint64_t hash, uint64_t lane) { return (hash ^ round(0, lane)) * kPrime1 + kPrime4; }

// Takes whole stripes. The lanes live in registers, so that their four multiplications run side by side.
const unsigned char* consume_stripes(uint64_t (&lanes)[4], const unsigned char* bytes, size_t stripes) {
  uint64_t a = lanes[0], b = lanes[1], c = lanes[2], d = lanes[3];
  for (; stripes > 0; --stripes, bytes += 32) {
    a = round(a, load_little_endian<uint64_t>(bytes));
    b = round(b, load_little_endian<uint64_t>(bytes + 8));
    c = round(c, load_little_endian<uint64_t>(bytes + 16));
    d = round(d, load_little_endian<uint64_t>(bytes + 24));
  }
  lanes[0] = a, lanes[1] = b, lanes[2] = c, lanes[3] = d;
  return bytes;
}

uint64_t merge_lanes(const uint64_t (&lanes)[4]) {
  uint64_t hash =
      rotate_left(lanes[0], 1) + rotate_left(lanes[1], 7) + rotate_left(lanes[2], 12) + rotate_left(lanes[3], 18);
  for (uint64_t lane : lanes) hash = merge_lane(hash, lane);
  return hash;
}

uint64_t consume_rest(uint64_t hash, const unsigned char* bytes, size_t size) {
  for (; size >= 8; bytes += 8, size -= 8)
    hash = rotate_left(hash ^ round(0, load_little_endian<uint64_t>(bytes)), 27) * kPrime1 + kPrime4;
  if (size >= 4) {
    hash = rotate_left(hash ^ (load_little_endian<uint32_t>(bytes) * kPrime1), 23) * kPrime2 + kPrime3;
    bytes += 4, size -= 4;
  }
  for (; size > 0; ++bytes, --size) hash = rotate_left(hash ^ (*bytes * kPrime5), 11) * kPrime1;
  return hash;
}

uint64_t avalanche(uint64_t hash) {
  hash = (hash ^ (hash >> 33)) * kPrime2;
  hash = (hash ^ (hash >> 29)) * kPrime3;
  return hash ^ (hash >> 32);
}

}  // namespace

Xxh64::Xxh64(uint64_t seed) : lanes_{seed + kPrime1 + kPrime2, seed + kPrime2, seed, seed - kPrime1}, seed_(seed) {}

void Xxh64::update(const void* data, size_t size) {
  if (size == 0) return;
  auto bytes = static_cast<const unsigned char*>(data);
  const size_t pending = size_ % kStripe;
  size_ += size;
  if (pending > 0) {
    const size_t taken = std::min(size, kStripe - pending);
    std::memcpy(pending_ + pending, bytes, taken);
    if (pending + taken < kStripe) return;
    consume_stripes(lanes_, pending_, 1);
    bytes += taken, size -= taken;
  }
  bytes = consume_stripes(lanes_, bytes, size / kStripe);
  std::memcpy(pending_, bytes, size % kStripe);
}

uint64_t Xxh64::digest() const {
  const uint64_t hash = size_ >= kStripe ? merge_lanes(lanes_) : seed_ + kPrime5;
  return avalanche(consume_rest(hash + size_, pending_, size_ % kStripe));
}

uint64_t xxh64(const void* data, size_t size, uint64_t seed) {
  Xxh64 hash(seed);
  hash.update(data, size);
  return hash.digest();
}

}  // namespace hardpoint
