// Host memory for backups: taken from the operating system in slabs, pinned once, used again by every later sleep.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "memory_driver.hpp"

namespace hardpoint::memory {

// Bytes that this process can still take from the host without swapping, within its control group's limit.
uint64_t host_memory_available();

class HostArena {
 public:
  struct Span {
    std::byte* data;
    size_t size;
    uint32_t slab;
  };

  explicit HostArena(const Driver& driver) : driver_(driver) {}
  ~HostArena();
  HostArena(const HostArena&) = delete;
  HostArena& operator=(const HostArena&) = delete;

  // Returns spans of `size` bytes together. Throws kBudgetExceeded, before anything is taken, when the arena would hold more than `budget`
  // bytes; kOutOfMemory when the host has none; kDriverCall when pinning fails. Nothing is taken then.
  std::vector<Span> take(size_t size, std::optional<uint64_t> budget);
  void give(const Span& span);

  // Whether `take(size, budget)` would fit, as a kBudgetExceeded fault when it would not.
  void check(size_t size, std::optional<uint64_t> budget);
  // Takes and pins slabs until `size` bytes are free, in a thread of its own; `take` waits for it. A failure there is met again by `take`.
  void prepare(size_t size, std::optional<uint64_t> budget);
  // Gives slabs without a span back to the operating system.
  void trim();
  // Waits for the background thread and drops every slab without a driver call: for a process that ends, or a forked child.
  void abandon();

  uint64_t held() const;  // bytes of slabs
  uint64_t used() const;  // bytes of spans

 private:
  struct Slab {
    std::byte* data;
    size_t size;
    bool registered;
    size_t used;
    std::map<size_t, size_t> free;  // offset -> size; neighbours are merged
  };

  void check_locked(size_t size, std::optional<uint64_t> budget) const;
  size_t free_locked() const { return held_ - used_; }
  void grow(size_t size);
  std::unique_ptr<Slab> make_slab(size_t size) const;
  void destroy(Slab& slab) const noexcept;
  void join_background();

  const Driver& driver_;
  mutable std::mutex mutex_;  // guards slabs_, held_, used_; not held while a slab is made
  std::map<uint32_t, std::unique_ptr<Slab>> slabs_;
  uint32_t next_slab_ = 0;
  size_t held_ = 0, used_ = 0;
  std::mutex background_mutex_;  // guards background_
  std::thread background_;
};

}  // namespace hardpoint::memory
