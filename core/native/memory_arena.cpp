#include "memory_arena.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <numeric>
#include <string>
#include <system_error>

#include "hardpoint/host_memory.hpp"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14
#endif

namespace hardpoint::memory {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kHugePage = size_t{2} << 20;
// A slab is at most this large, so that a failed pinning loses little and unused slabs can be given back.
constexpr size_t kMaxSlab = size_t{1} << 30;
constexpr size_t kTouchSlice = size_t{64} << 20;

// Takes the pages of fresh memory by several threads: page faults, not bandwidth, are what pinning large memory waits for.
void touch(std::byte* data, size_t size) {
  const unsigned threads = std::clamp(std::thread::hardware_concurrency(), 1u, 8u);
  const auto slice = [=](unsigned index) {
    for (size_t start = index * kTouchSlice; start < size; start += threads * kTouchSlice) {
      const size_t length = std::min(kTouchSlice, size - start);
      if (madvise(data + start, length, MADV_POPULATE_WRITE) == 0) continue;
      for (size_t at = 0; at < length; at += kPage) static_cast<volatile std::byte*>(data)[start + at] = std::byte{0};
    }
  };
  std::vector<std::thread> helpers;
  try {
    for (unsigned index = 1; index < threads && index * kTouchSlice < size; ++index) helpers.emplace_back(slice, index);
  } catch (const std::system_error&) {
    // No more threads: what they would have touched is touched by pinning, only slower.
  }
  slice(0);
  for (std::thread& helper : helpers) helper.join();
}

}  // namespace

HostArena::~HostArena() {
  if (abandoned_) return;
  background_.wait();
  std::lock_guard lock(mutex_);
  for (auto& [id, slab] : slabs_) release_locked(slab->data, slab->size, slab->registered);
  unpin_again_locked();
}

std::vector<HostArena::Span> HostArena::take(size_t size, std::optional<uint64_t> budget) {
  background_.wait();
  const size_t asked = size;
  size = round_up(size, kPage);
  for (;;) {
    std::unique_lock lock(mutex_);
    unpin_again_locked();
    check_budget_locked(asked, budget);
    check_room_locked(asked);
    if (free_locked() >= size) {
      std::vector<Span> spans;
      for (auto& [id, slab] : slabs_) {
        while (size > 0 && !slab->free.empty()) {
          auto [offset, length] = *slab->free.begin();
          slab->free.erase(slab->free.begin());
          const size_t taken = std::min(length, size);
          if (taken < length) slab->free.emplace(offset + taken, length - taken);
          spans.push_back({slab->data + offset, taken, id});
          slab->used += taken;
          used_ += taken;
          size -= taken;
        }
        if (size == 0) break;
      }
      return spans;
    }
    const size_t missing = size - free_locked();
    lock.unlock();
    grow(missing);
  }
}

void HostArena::give(const Span& span) {
  if (abandoned_) return;
  std::lock_guard lock(mutex_);
  Slab& slab = *slabs_.at(span.slab);
  auto [range, inserted] = slab.free.emplace(static_cast<size_t>(span.data - slab.data), span.size);
  slab.used -= span.size;
  used_ -= span.size;
  if (range != slab.free.begin()) {
    const auto before = std::prev(range);
    if (before->first + before->second == range->first) {
      before->second += range->second;
      slab.free.erase(range);
      range = before;
    }
  }
  const auto after = std::next(range);
  if (after != slab.free.end() && range->first + range->second == after->first) {
    range->second += after->second;
    slab.free.erase(after);
  }
}

void HostArena::check_locked(size_t size, uint64_t limit, const char* whose, const char* way) const {
  if (size <= limit && used_ <= limit - size) return;
  throw MemoryFault(Fault::kBudgetExceeded, "backups need " + std::to_string(size) + " bytes of host memory",
                    std::to_string(used_) + " bytes are in use by other backups, and the " + whose + std::to_string(limit) + " bytes",
                    std::string(way) + ", use the disk or source tier, or discard (level 2)");
}

void HostArena::check_budget_locked(size_t size, std::optional<uint64_t> budget) const {
  if (budget) check_locked(size, *budget, "budget is ", "Raise the host budget");
}

// A budget is no room: a process that takes more than the host has is killed. What is held already needs none.
void HostArena::check_room_locked(size_t size) const {
  if (size > free_locked()) check_locked(size, held_ + host::available_memory(), "host has room for ", "Make room on the host");
}

void HostArena::prepare(size_t size, std::optional<uint64_t> budget) {
  background_.wait();
  size_t missing = 0;
  {
    std::lock_guard lock(mutex_);
    check_budget_locked(size, budget);
    try {
      check_room_locked(size);
    } catch (const MemoryFault&) {
      if (!budget) throw;
      return;  // the budget is kept to; whether there is room when it sleeps, the sleep will say
    }
    if (round_up(size, kPage) > free_locked()) missing = round_up(size, kPage) - free_locked();
  }
  if (missing == 0) return;
  // Without a thread for it, the sleep takes the memory itself; if it fails, the sleep asks again and reports what it meets.
  background_.begin([this, missing] {
    try {
      grow(missing);
    } catch (const std::exception&) {
    }
  });
}

void HostArena::grow(size_t size) {
  while (size > 0) {
    const size_t length = std::min(round_up(size, kHugePage), kMaxSlab);
    std::unique_ptr<Slab> slab = make_slab(length);
    std::lock_guard lock(mutex_);
    held_ += slab->size;
    slabs_.emplace(next_slab_++, std::move(slab));
    size -= std::min(size, length);
  }
}

std::unique_ptr<HostArena::Slab> HostArena::make_slab(size_t size) const {
  const Region region = map(size);
  return std::make_unique<Slab>(Slab{region.data, size, region.registered, 0, {{0, size}}});
}

HostArena::Region HostArena::map(size_t size) const {
  size = round_up(size, kPage);
  // One huge page more than needed, so that the memory can begin at a huge page's boundary.
  void* raw = mmap(nullptr, size + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) {
    throw MemoryFault(Fault::kBudgetExceeded, "cannot take " + std::to_string(size) + " more bytes of host memory",
                      std::strerror(errno), "Lower the host budget, or use the disk or source tier");
  }
  auto* first = static_cast<std::byte*>(raw);
  auto* data = reinterpret_cast<std::byte*>(round_up(reinterpret_cast<uintptr_t>(first), kHugePage));
  if (data > first) munmap(first, data - first);
  if (first + kHugePage > data) munmap(data + size, first + kHugePage - data);
  madvise(data, size, MADV_HUGEPAGE);
  if (!driver_.registers_host_memory()) return {data, size, false};
  touch(data, size);
  try {
    return {data, size, driver_.host_register(data, size)};
  } catch (...) {
    munmap(data, size);
    throw;
  }
}

void HostArena::release(std::byte* data, size_t size, bool registered) noexcept {
  if (abandoned_) return;
  std::lock_guard lock(mutex_);
  unpin_again_locked();
  release_locked(data, size, registered);
}

void HostArena::release_locked(std::byte* data, size_t size, bool registered) noexcept {
  if (registered && !unpin(data, size)) {
    try {
      pinned_.emplace(data, size);
    } catch (const std::bad_alloc&) {
    }
    return;
  }
  munmap(data, size);
}

bool HostArena::unpin(std::byte* data, size_t size) noexcept {
  try {
    if (undrained_) {
      driver_.device_synchronize();
      undrained_ = false;
    }
    driver_.host_unregister(data, size);
    return true;
  } catch (const MemoryFault&) {
    return false;
  }
}

void HostArena::unpin_again_locked() noexcept {
  for (auto range = pinned_.begin(); range != pinned_.end();) {
    if (!unpin(range->first, range->second)) {
      ++range;
      continue;
    }
    munmap(range->first, range->second);
    range = pinned_.erase(range);
  }
}

void HostArena::trim() {
  background_.wait();
  std::lock_guard lock(mutex_);
  unpin_again_locked();
  for (auto slab = slabs_.begin(); slab != slabs_.end();) {
    if (slab->second->used > 0) {
      ++slab;
      continue;
    }
    held_ -= slab->second->size;
    release_locked(slab->second->data, slab->second->size, slab->second->registered);
    slab = slabs_.erase(slab);
  }
}

void HostArena::abandon(bool forked) {
  abandoned_ = true;
  if (forked) {
    background_.leave();
  } else {
    background_.wait();
  }
}

uint64_t HostArena::held() const {
  std::lock_guard lock(mutex_);
  return std::accumulate(pinned_.begin(), pinned_.end(), uint64_t{held_}, [](uint64_t sum, const auto& range) { return sum + range.second; });
}

uint64_t HostArena::used() const {
  std::lock_guard lock(mutex_);
  return used_;
}

}  // namespace hardpoint::memory
