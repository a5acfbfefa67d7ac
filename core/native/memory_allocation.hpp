// One reservation of device addresses with its memory, and the cutting of one into small blocks.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "memory_backup.hpp"

namespace hardpoint::memory {

enum class Policy { kPreserve, kDiscard, kZero, kRebuild, kResident };

enum class State {
  kMapped,     // usable
  kSaving,     // owned by a sleep under way
  kUnmapped,   // asleep
  kRestoring,  // owned by a wake under way
  kRebuilding,  // as before, mapped, and written by callbacks
  kLost,       // its address could not be taken again; its backup is readable, it can only be freed
};

// A stretch of physical memory, mapped whole.
struct Chunk {
  enum class State : uint8_t {
    kEmpty,     // no memory
    kDetached,  // memory with its bytes, not mapped
    kMapped,
  };
  uint64_t handle = 0;
  State state = State::kEmpty;
  bool intact = false;  // holds the allocation's bytes; false between `create` and the end of the wake that fills it
};

// Blocks within one allocation, for tensors much smaller than the granularity: first fit, neighbours merged, kAlignment.
class Blocks {
 public:
  static constexpr size_t kAlignment = 512;  // what torch promises for its own device tensors

  explicit Blocks(size_t size) : free_{{0, size}} {}

  // Returns the first byte of a block, or nothing when no gap is large enough.
  std::optional<uint64_t> take(size_t size);
  // Returns the bytes that were asked for the block at `start`; 0 when there is none. Where they are `in_use`, they are taken again only after
  // `reuse`.
  size_t give(uint64_t start, bool in_use);
  void reuse();
  bool empty() const { return used_.empty(); }
  size_t count() const { return used_.size(); }
  // Bytes in use, neighbours merged.
  std::vector<Range> live() const;
  size_t size_at(uint64_t start) const {
    const auto block = used_.find(start);
    return block == used_.end() ? 0 : block->second;
  }
  bool holds(uint64_t start) const { return used_.count(start) > 0; }
  // The block that the byte lies in; of no bytes when there is none.
  Range containing(uint64_t byte) const;
  uint64_t bytes() const { return bytes_; }  // asked for

 private:
  static size_t rounded(size_t size) { return (size + kAlignment - 1) / kAlignment * kAlignment; }
  void add_gap(const Range& gap);
  std::map<uint64_t, size_t> free_;
  std::map<uint64_t, size_t> used_;
  std::vector<Range> given_in_use_;
  uint64_t bytes_ = 0;
};

struct Allocation {
  uint64_t address = 0;
  size_t reserved = 0;    // bytes of addresses
  size_t mapped = 0;      // bytes of memory while awake: chunks of `chunk_size`, the last one may be smaller
  size_t size = 0;        // bytes asked for
  size_t chunk_size = 0;
  uint32_t tag = 0;
  Policy policy = Policy::kPreserve;
  State state = State::kMapped;
  bool elastic = false;         // has addresses to grow into
  bool free_requested = false;  // freed while a sleep or wake owned it, or bytes were copied
  bool address_lost = false;    // its range was taken by something else; an operation that ends makes it kLost
  bool keep_backup = false;     // the sleep's plan vouched for the tag's writers
  bool verify_wake = false;     // the sleep's plan asked for it
  Policy asleep_as = Policy::kPreserve;  // what the sleep did with it
  size_t transfers = 0;         // reads and writes under way, until whose end it stays mapped
  uint64_t writes = 0;          // together with the tag's: the generation of its content
  std::vector<Chunk> chunks;
  std::vector<Source> sources;  // by range, without overlap
  std::shared_ptr<Backup> backup;
  std::unique_ptr<Blocks> blocks;  // cut into small ones

  bool contains(uint64_t at) const { return at >= address && at - address < reserved; }
  bool is_owned_by_operation() const { return state == State::kSaving || state == State::kRestoring || state == State::kRebuilding; }
  // Bytes that belong with the one at `at`: its block's, or all that are mapped while awake.
  Range extent_of(uint64_t at) const { return blocks ? blocks->containing(at - address) : Range{0, mapped}; }
  // Chunks that `mapped` bytes take; `chunks` may hold more, whose memory the driver did not take back after a resize.
  size_t num_chunks() const { return (mapped + chunk_size - 1) / chunk_size; }
  Range chunk_range(size_t index) const {
    const uint64_t start = index * chunk_size;
    return {start, start < mapped ? std::min<uint64_t>(chunk_size, mapped - start) : chunk_size};
  }
  std::vector<Range> live() const { return blocks ? blocks->live() : std::vector<Range>{{0, size}}; }
  uint64_t live_bytes() const { return blocks ? blocks->bytes() : size; }
  size_t mapped_now() const;
  size_t detached_now() const;
  // Whether memory that it still has holds all of its bytes, so that no backup is needed.
  bool is_intact() const;
  // Forgets which files its bytes came from.
  void drop_files();
  // Bytes of `live()` that the sources cover.
  uint64_t sourced() const;

 private:
  size_t bytes_in(Chunk::State state) const;
};

}  // namespace hardpoint::memory
