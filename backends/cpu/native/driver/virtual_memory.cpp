#include "virtual_memory.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <limits>
#include <string>
#include <system_error>

#include "hardpoint/driver_support.hpp"
#include "host.hpp"

// Headers of older C libraries lack these; the values are part of the kernel's interface.
#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4
#endif
#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif

namespace hp::driver {
namespace {

using hardpoint::driver::check_multiple;
using hardpoint::driver::check_size;
using hardpoint::driver::Failure;
using hardpoint::driver::may_fail;
using hardpoint::driver::refuse;
using hardpoint::driver::Undo;

constexpr size_t kGranularity = VirtualMemory::kGranularity;
constexpr int kMove = MREMAP_MAYMOVE | MREMAP_FIXED;
constexpr int kMoveAndKeep = kMove | MREMAP_DONTUNMAP;  // the source stays reserved, empty and accessible
constexpr int kNoAccess = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

void* pointer(uint64_t address) { return reinterpret_cast<void*>(static_cast<uintptr_t>(address)); }
uint64_t integer(const void* address) { return reinterpret_cast<uintptr_t>(address); }

std::string hexadecimal(uint64_t value) {
  char text[19];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(value));
  return text;
}

std::string range_text(uint64_t address, size_t size) {
  return std::to_string(size) + " bytes at " + hexadecimal(address);
}

[[noreturn]] void fail_system(const char* call, int error) {
  const std::string text = std::system_category().message(error);
  if (error == ENOMEM) throw Failure{HP_OUT_OF_MEMORY, error, call, text + ": " + describe_shortage()};
  throw Failure{HP_FAILED, error, call, text};
}

void unmap_range(uint64_t address, size_t size) {
  may_fail("munmap");
  if (size > 0 && ::munmap(pointer(address), size) != 0) fail_system("munmap", errno);
}

// Takes address space where the kernel likes, at a multiple of the granularity.
uint64_t reserve_anywhere(size_t size) {
  may_fail("mmap");
  void* found = ::mmap(nullptr, size, PROT_NONE, kNoAccess, -1, 0);
  if (found == MAP_FAILED) fail_system("mmap", errno);
  if (integer(found) % kGranularity == 0) return integer(found);
  unmap_range(integer(found), size);

  if (size > std::numeric_limits<size_t>::max() - kGranularity) fail_system("mmap", ENOMEM);
  found = ::mmap(nullptr, size + kGranularity, PROT_NONE, kNoAccess, -1, 0);
  if (found == MAP_FAILED) fail_system("mmap", errno);
  const uint64_t start = integer(found);
  const uint64_t address = (start + kGranularity - 1) / kGranularity * kGranularity;
  unmap_range(start, address - start);
  unmap_range(address + size, start + kGranularity - address);
  return address;
}

// Takes exactly this range if it is free. Kernels before 4.17 take the address as a wish and may give another one.
bool reserve_at(uint64_t address, size_t size) {
  void* found = ::mmap(pointer(address), size, PROT_NONE, kNoAccess | MAP_FIXED_NOREPLACE, -1, 0);
  if (found == MAP_FAILED) return false;
  if (integer(found) == address) return true;
  ::munmap(found, size);
  return false;
}

// Address space for the time until it is used.
class ReservedRange {
 public:
  explicit ReservedRange(size_t size) : address_(reserve_anywhere(size)), size_(size) {}
  ReservedRange(const ReservedRange&) = delete;
  ReservedRange& operator=(const ReservedRange&) = delete;
  ~ReservedRange() {
    if (size_ > 0) ::munmap(pointer(address_), size_);
  }
  uint64_t address() const { return address_; }
  uint64_t keep() {
    size_ = 0;
    return address_;
  }

 private:
  uint64_t address_;
  size_t size_;
};

// Replaces whatever is in the range by memory without access and without pages, in one step.
void make_inaccessible(uint64_t address, size_t size) {
  may_fail("mmap");
  if (::mmap(pointer(address), size, PROT_NONE, kNoAccess | MAP_FIXED, -1, 0) == MAP_FAILED) fail_system("mmap", errno);
}

// Replaces a range of ours by memory that takes pages as it is touched, huge ones where the kernel has them.
void make_accessible(uint64_t address, size_t size) {
  may_fail("mmap");
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
  if (::mmap(pointer(address), size, PROT_READ | PROT_WRITE, flags, -1, 0) == MAP_FAILED) fail_system("mmap", errno);
  ::madvise(pointer(address), size, MADV_HUGEPAGE);
}

// Moves pages over a range of ours. On success the range is replaced in one step. On failure the kernel may have emptied it already; then it
// is taken again, which succeeds unless another thread was given it in this very moment.
void move_pages(uint64_t from, uint64_t to, size_t size, int flags) {
  may_fail("mremap");
  if (::mremap(pointer(from), size, size, flags, pointer(to)) != MAP_FAILED) return;
  const int error = errno;
  reserve_at(to, size);
  fail_system("mremap", error);
}

// Linux 5.7 and later; sandboxes may refuse it.
bool kernel_keeps_addresses() {
  const size_t size = kGranularity;
  void* from = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (from == MAP_FAILED) return false;
  void* to = ::mremap(from, size, size, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, nullptr);
  ::munmap(from, size);
  if (to == MAP_FAILED) return false;
  ::munmap(to, size);
  return true;
}

}  // namespace

VirtualMemory::VirtualMemory(uint64_t budget, bool keep_address)
    : budget_(budget),
      total_(budget > 0 ? budget : total_memory()),
      keep_address_(keep_address && kernel_keeps_addresses()) {}

uint64_t VirtualMemory::reserve(size_t size, uint64_t hint) {
  check_size("reserve", size, kGranularity, 0);
  if (hint != 0) check_multiple("reserve", "the address wanted,", hint, kGranularity);
  const std::lock_guard<std::mutex> guard(mutex_);
  const uint64_t address = hint != 0 && reserve_at(hint, size) ? hint : reserve_anywhere(size);
  Undo give_back([&] { ::munmap(pointer(address), size); });
  reservations_.emplace(address, size);
  give_back.dismiss();
  return address;
}

void VirtualMemory::release_address(uint64_t address, size_t size) {
  const std::lock_guard<std::mutex> guard(mutex_);
  const auto found = reservations_.find(address);
  if (found == reservations_.end() || found->second != size)
    refuse("release_address", range_text(address, size) + " are not a reservation");
  if (overlaps_mapping(address, size)) refuse("release_address", "memory is mapped in " + range_text(address, size));
  unmap_range(address, size);
  reservations_.erase(found);
  small_pages_.erase(small_pages_.lower_bound(address), small_pages_.lower_bound(address + size));
}

uint64_t VirtualMemory::create(size_t size) {
  check_size("create", size, kGranularity, kMaxChunk);
  const std::lock_guard<std::mutex> guard(mutex_);
  take_budget(size);
  Undo give_back([&] { used_ -= size; });
  ReservedRange range(size);
  make_accessible(range.address(), size);
  memory_.emplace(next_handle_, Memory{size, range.address(), false});
  range.keep();
  give_back.dismiss();
  return next_handle_++;
}

void VirtualMemory::release(uint64_t handle, size_t size) {
  std::unordered_map<uint64_t, Memory>::node_type taken;
  {
    const std::lock_guard<std::mutex> guard(mutex_);
    const auto found = memory_.find(handle);
    if (found == memory_.end()) refuse("release", "handle " + std::to_string(handle) + " is unknown");
    if (found->second.size != size) refuse("release", "the handle has " + std::to_string(found->second.size) + " bytes");
    if (found->second.mapped) refuse("release", "the handle is mapped at " + hexadecimal(found->second.address));
    taken = memory_.extract(found);
  }
  // Giving pages back takes milliseconds per GiB: others map and unmap meanwhile.
  const int result = ::munmap(pointer(taken.mapped().address), size);
  const int error = errno;
  const std::lock_guard<std::mutex> guard(mutex_);
  if (result == 0) {
    used_ -= size;
    return;
  }
  memory_.insert(std::move(taken));
  fail_system("munmap", error);
}

void VirtualMemory::map(uint64_t address, size_t size, uint64_t handle) {
  check_multiple("map", "address", address, kGranularity);
  check_size("map", size, kGranularity, kMaxChunk);
  const std::lock_guard<std::mutex> guard(mutex_);
  const auto found = memory_.find(handle);
  if (found == memory_.end()) refuse("map", "handle " + std::to_string(handle) + " is unknown");
  Memory& memory = found->second;
  if (memory.size != size) refuse("map", "the handle has " + std::to_string(memory.size) + " bytes and is mapped whole");
  if (memory.mapped) refuse("map", "the handle is mapped already, at " + hexadecimal(memory.address));
  if (!is_reserved(address, size)) refuse("map", range_text(address, size) + " are not within one reservation");
  if (overlaps_mapping(address, size)) refuse("map", "memory is mapped already in " + range_text(address, size));

  const auto mapping = mappings_.emplace(address, Mapping{size, handle}).first;
  Undo forget([&] { mappings_.erase(mapping); });
  move_pages(memory.address, address, size, kMove);
  forget.dismiss();
  memory.address = address;
  memory.mapped = true;
  if (has_small_pages(address)) ::madvise(pointer(address), size, MADV_NOHUGEPAGE);
}

void VirtualMemory::unmap(uint64_t address, size_t size) {
  const std::lock_guard<std::mutex> guard(mutex_);
  const auto mapping = mappings_.find(address);
  if (mapping == mappings_.end() || mapping->second.size != size)
    refuse("unmap", range_text(address, size) + " are not one mapping");
  ReservedRange parking(size);
  move_to_parking(address, parking.address(), size);
  Memory& memory = memory_.find(mapping->second.handle)->second;
  memory.address = parking.keep();
  memory.mapped = false;
  mappings_.erase(mapping);
}

void VirtualMemory::move_to_parking(uint64_t address, uint64_t parking, size_t size) const {
  if (keep_address_) {
    move_pages(address, parking, size, kMoveAndKeep);
    try {
      make_inaccessible(address, size);
    } catch (const Failure&) {
      if (::mremap(pointer(parking), size, size, kMoveAndKeep, pointer(address)) != MAP_FAILED) throw;
      // The pages can only stay where they are, which is what was asked for; that accesses fault is the best that is left to try.
      reserve_at(address, size);
      ::mprotect(pointer(address), size, PROT_NONE);
    }
    return;
  }
  // Without MREMAP_DONTUNMAP the address would be free for a moment, and the kernel could give it to another thread. Copying is slow and safe.
  make_accessible(parking, size);
  std::memcpy(pointer(parking), pointer(address), size);
  try {
    make_inaccessible(address, size);
  } catch (const Failure&) {
    // Where the kernel has emptied the range, the copy is all that is left of the pages, and the memory is unmapped.
    if (!reserve_at(address, size)) throw;
  }
}

void VirtualMemory::use_small_pages(uint64_t address, size_t size) {
  check_multiple("use_small_pages", "address", address, kGranularity);
  const std::lock_guard<std::mutex> guard(mutex_);
  if (!is_reserved(address, size)) refuse("use_small_pages", range_text(address, size) + " are not within one reservation");
  small_pages_[address] = size;
  for (auto mapping = mappings_.lower_bound(address); mapping != mappings_.end() && has_small_pages(mapping->first); ++mapping)
    ::madvise(pointer(mapping->first), mapping->second.size, MADV_NOHUGEPAGE);
}

void VirtualMemory::check_mapped(const char* call, uint64_t address, size_t size) const {
  if (size > std::numeric_limits<uint64_t>::max() - address) refuse(call, range_text(address, size) + " wrap around");
  const uint64_t end = address + size;
  const std::lock_guard<std::mutex> guard(mutex_);
  auto mapping = mappings_.upper_bound(address);
  if (mapping != mappings_.begin()) --mapping;
  uint64_t mapped_to = address;
  for (; mapping != mappings_.end() && mapping->first <= mapped_to && mapped_to < end; ++mapping)
    mapped_to = std::max(mapped_to, mapping->first + mapping->second.size);
  if (mapped_to < end) refuse(call, range_text(address, size) + " are not all mapped");
}

uint64_t VirtualMemory::free_bytes() const {
  const uint64_t available = available_memory();
  const std::lock_guard<std::mutex> guard(mutex_);
  return std::min(total_ - used_, available);
}

void VirtualMemory::take_budget(size_t size) {
  if (size > total_ - used_) {
    const char* whose = budget_ > 0 ? "the device's budget" : "the host's memory";
    throw Failure{HP_OUT_OF_MEMORY, 0, "create",
                  std::to_string(size) + " bytes asked of " + std::to_string(total_) + " (" + whose + "), of which " +
                      std::to_string(used_) + " are used"};
  }
  check_available(size);
  used_ += size;
}

// Asking costs about a hundred microseconds, more than all the rest: one answer serves until an eighth of it is used up.
void VirtualMemory::check_available(size_t size) {
  if (size > allowance_) {
    const uint64_t available = available_memory();
    if (size > available)
      throw Failure{HP_OUT_OF_MEMORY, 0, "create",
                    std::to_string(size) + " bytes asked, " + std::to_string(available) + " are available on the host"};
    allowance_ = std::max<uint64_t>(available / 8, size);
  }
  allowance_ -= size;
}

bool VirtualMemory::is_reserved(uint64_t address, size_t size) const {
  auto after = reservations_.upper_bound(address);
  if (after == reservations_.begin()) return false;
  const auto& [start, length] = *std::prev(after);
  return address - start < length && size <= length - (address - start);
}

bool VirtualMemory::has_small_pages(uint64_t address) const {
  const auto after = small_pages_.upper_bound(address);
  return after != small_pages_.begin() && address - std::prev(after)->first < std::prev(after)->second;
}

bool VirtualMemory::overlaps_mapping(uint64_t address, size_t size) const {
  const auto after = mappings_.lower_bound(address);
  if (after != mappings_.end() && after->first - address < size) return true;
  if (after == mappings_.begin()) return false;
  const auto& [start, before] = *std::prev(after);
  return address - start < before.size;
}

}  // namespace hp::driver
