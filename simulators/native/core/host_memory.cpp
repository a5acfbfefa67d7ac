#include "core/host_memory.hpp"

#include <sys/mman.h>

namespace hardpoint::simulators {

namespace {

constexpr Address kPage = 4096;

// msync fails on a range with holes, and has nothing to do on one without.
bool exists(Address start, std::size_t size) {
  const Address page = start & ~(kPage - 1);
  return msync(reinterpret_cast<void*>(page), start + size - page, MS_ASYNC) == 0;
}

}  // namespace

Result HostMemory::allocate(std::size_t size, void** out) {
  if (!out || !size) return violations_.note(Result::InvalidValue, "no result pointer, or size 0");
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return Result::OutOfMemory;
  ranges_.emplace(reinterpret_cast<Address>(memory), Range{size, true, true});
  bytes_ += size;
  *out = memory;
  return Result::Ok;
}

Result HostMemory::free(void* pointer) { return remove(pointer, true, Result::InvalidValue); }

Result HostMemory::register_range(void* pointer, std::size_t size, bool pins) {
  const Address start = reinterpret_cast<Address>(pointer);
  if (!start || !size || start + size < start) {
    return violations_.note(Result::InvalidValue, "null pointer, size 0, or beyond the end of the address space");
  }
  if (overlaps(start, size)) {
    return violations_.note(Result::HostAlreadyRegistered, "part of the range is already registered");
  }
  if (!exists(start, size)) return violations_.note(Result::InvalidValue, "part of the range is not host memory");
  ranges_.emplace(start, Range{size, false, pins});
  bytes_ += size;
  return Result::Ok;
}

Result HostMemory::unregister(void* pointer) { return remove(pointer, false, Result::HostNotRegistered); }

Result HostMemory::remove(void* pointer, bool owned, Result unknown) {
  const auto it = ranges_.find(reinterpret_cast<Address>(pointer));
  if (it == ranges_.end() || it->second.owned != owned) {
    return violations_.note(unknown, "not the start of such a range of pinned host memory");
  }
  const std::size_t size = it->second.size;
  if (in_flight_.overlaps(it->first, size)) {
    return violations_.note(Result::IllegalAddress, "asynchronous work on the range has not been synchronised");
  }
  if (owned) munmap(pointer, size);
  bytes_ -= size;
  ranges_.erase(it);
  return Result::Ok;
}

bool HostMemory::pinned(Address address, std::size_t size) const {
  auto it = ranges_.upper_bound(address);
  if (it == ranges_.begin()) return false;
  --it;
  const Address end = it->first + it->second.size;
  return it->second.pinned && address < end && size <= end - address;
}

bool HostMemory::overlaps(Address start, std::size_t size) const {
  auto it = ranges_.lower_bound(start);
  if (it != ranges_.end() && it->first < start + size) return true;
  return it != ranges_.begin() && (--it)->first + it->second.size > start;
}

void HostMemory::reset() {
  for (const auto& [address, range] : ranges_) {
    if (range.owned) munmap(reinterpret_cast<void*>(address), range.size);
  }
  ranges_.clear();
  bytes_ = 0;
}

}  // namespace hardpoint::simulators
