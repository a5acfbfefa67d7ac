// XXH64, the 64-bit xxHash: finds damaged bytes of backups. Not for adversaries.
// Source: xxHash fast digest algorithm, "XXH64 Algorithm Description" (github.com/Cyan4973/xxHash, doc/xxhash_spec.md).
#pragma once
#include <cstddef>
#include <cstdint>

namespace hardpoint {

// Hash of a stream that arrives in pieces; how it is cut does not change the result.
class Xxh64 {
 public:
  explicit Xxh64(uint64_t seed = 0);

  void update(const void* data, size_t size);
  // Hash of the bytes so far; more may follow.
  uint64_t digest() const;

 private:
  static constexpr size_t kStripe = 32;  // bytes that one round over the four lanes takes

  uint64_t lanes_[4];
  uint64_t seed_;
  uint64_t size_ = 0;               // bytes so far
  unsigned char pending_[kStripe];  // the last size_ % kStripe bytes, not yet in the lanes
};

uint64_t xxh64(const void* data, size_t size, uint64_t seed = 0);

}  // namespace hardpoint
