// Host memory for backups: taken from the operating system in slabs, pinned once, used again by every later sleep.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "memory_driver.hpp"
#include "memory_workers.hpp"

namespace hardpoint::memory {

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

  // Returns spans of at least `size` bytes together. Throws kBudgetExceeded, before anything is taken, when all spans would have more than `budget`
  // bytes or the host has no room; kDriverCall when pinning fails. Nothing is taken then.
  std::vector<Span> take(size_t size, std::optional<uint64_t> budget);
  void give(const Span& span);
  // Fresh memory beside the slabs, pinned where the driver pins, which is given back by `release`. Throws kBudgetExceeded where the system refuses
  // it, kDriverCall when pinning fails.
  struct Region {
    std::byte* data;
    size_t size;  // as asked for, in whole pages
    bool registered;
  };
  Region map(size_t size) const;
  // Unpins memory, where it was registered with the driver, and gives it back to the operating system. What the driver does not unpin stays, since
  // the device may still use it: it counts as held, and is tried again by `take`, `release` and `trim`, and at the end.
  void release(std::byte* data, size_t size, bool registered) noexcept;

  // Says that copies from or to host memory may be under way after its owners are gone: before any is unpinned, the device is synchronised.
  void note_undrained() noexcept { undrained_ = true; }

  // Takes and pins slabs until `size` bytes are free, in a thread of its own; `take` waits for it. A failure there is met again by `take`,
  // and so is room that the host lacks where a budget is given. Throws kBudgetExceeded otherwise.
  void prepare(size_t size, std::optional<uint64_t> budget);
  // Gives slabs without a span back to the operating system.
  void trim();
  // Leaves everything as it is for the end of the process: no slab is given back, since a copy may be under way in another thread. In a forked
  // child (`forked`) neither mutexes nor the thread are touched, because what held them was not copied.
  void abandon(bool forked);

  uint64_t held() const;  // bytes of slabs, and of what the driver has not unpinned so far
  uint64_t used() const;  // bytes of spans

 private:
  struct Slab {
    std::byte* data;
    size_t size;
    bool registered;
    size_t used;
    std::map<size_t, size_t> free;  // offset -> size; neighbours are merged
  };

  void check_locked(size_t size, uint64_t limit, const char* whose, const char* way) const;
  void check_budget_locked(size_t size, std::optional<uint64_t> budget) const;
  void check_room_locked(size_t size) const;
  size_t free_locked() const { return held_ - used_; }
  void grow(size_t size);
  std::unique_ptr<Slab> make_slab(size_t size) const;
  void release_locked(std::byte* data, size_t size, bool registered) noexcept;
  bool unpin(std::byte* data, size_t size) noexcept;  // whether the driver did it
  void unpin_again_locked() noexcept;

  const Driver& driver_;
  mutable std::mutex mutex_;  // guards slabs_, pinned_, held_, used_; not held while a slab is made
  std::map<uint32_t, std::unique_ptr<Slab>> slabs_;
  std::map<std::byte*, size_t> pinned_;  // what is to be given back and was not unpinned yet, with its size
  uint32_t next_slab_ = 0;
  size_t held_ = 0, used_ = 0;
  std::atomic<bool> abandoned_{false}, undrained_{false};
  BackgroundThread background_;
};

}  // namespace hardpoint::memory
