#include "core/device_memory.hpp"

#include <sys/mman.h>

#include <algorithm>

namespace hardpoint::simulators {

namespace {

constexpr std::uint8_t kStaleByte = 0xa5;
// Bytes at each end of new memory that are filled with it: more would cost the host too much.
constexpr std::size_t kStaleBytes = std::size_t{16} << 10;
constexpr int kReservedFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

std::uint64_t bit(int device) { return std::uint64_t{1} << device; }

std::size_t round_up(std::size_t size, std::size_t unit) { return (size + unit - 1) / unit * unit; }

void* pointer(Address address) { return reinterpret_cast<void*>(address); }

// Address space that faults on access; zero if the host refuses.
Address host_reserve(std::size_t size, std::size_t alignment, Address hint) {
  void* exact = mmap(pointer(hint), size, PROT_NONE, kReservedFlags, -1, 0);
  if (exact == MAP_FAILED) return 0;
  if (reinterpret_cast<Address>(exact) % alignment == 0) return reinterpret_cast<Address>(exact);
  munmap(exact, size);

  void* wide = mmap(nullptr, size + alignment, PROT_NONE, kReservedFlags, -1, 0);
  if (wide == MAP_FAILED) return 0;
  const Address begin = reinterpret_cast<Address>(wide), end = begin + size + alignment;
  const Address start = round_up(begin, alignment);
  if (start > begin) munmap(wide, start - begin);
  if (end > start + size) munmap(pointer(start + size), end - (start + size));
  return start;
}

}  // namespace

Result DeviceMemory::reserve(std::size_t size, std::size_t alignment, Address hint, PageType pages, Address* out) {
  const std::size_t granularity = settings_.granularity;
  if (!out || !size) return broken(Result::InvalidValue, "no result pointer, or size 0");
  // Mapping needs multiples, so a range of another size cannot be used up; cuda.h itself asks for the host's page size only.
  if (size % granularity) return broken(Result::InvalidValue, "size is not a multiple of the granularity");
  // CANN: alignment must be 0. cuda.h, cuMemAddressReserve: a power of two, or 0.
  if (rules_.alignment_must_be_zero && alignment) return broken(Result::InvalidValue, "alignment must be 0");
  if (alignment & (alignment - 1)) return broken(Result::InvalidValue, "alignment is not a power of two");
  // ROCm: an explicit alignment may fail where 0 works (vLLM #43022).
  if (alignment && settings_.refuse_alignment) return Result::InvalidValue;
  // CANN: 128 GiB on parts of the 910B class.
  if (settings_.max_reservation && size > settings_.max_reservation) {
    return broken(Result::InvalidValue, "larger than one reservation may be");
  }
  const Address start = host_reserve(size, std::max(alignment, granularity), hint);
  if (!start) return Result::OutOfMemory;
  reservations_.emplace(start, Reservation{size, pages});
  *out = start;
  return Result::Ok;
}

Result DeviceMemory::free_address(Address address, std::optional<std::size_t> size) {
  const auto it = reservations_.find(address);
  if (it == reservations_.end() || it->second.allocation) {
    return broken(Result::InvalidValue, "not the start of a reservation");
  }
  const Reservation& reservation = it->second;
  // cuda.h, cuMemAddressFree: address and size are those of the reservation, and all of it is unmapped.
  if (size && *size != reservation.size) return broken(Result::InvalidValue, "not the size of the reservation");
  if (reservation.mappings) return broken(Result::InvalidValue, "memory is still mapped in the reservation");
  const std::size_t freed = reservation.size;
  munmap(pointer(address), freed);
  reservations_.erase(it);
  drop_lingering([&](Address start, const Lingering&) { return start >= address && start < address + freed; });
  if (settings_.thief) steal(address, freed);
  return Result::Ok;
}

// What any thread's mmap may do: the range is not what the next reservation gets, whatever it asks for.
void DeviceMemory::steal(Address address, std::size_t size) {
  const void* taken = mmap(pointer(address), size, PROT_NONE, kReservedFlags | MAP_FIXED_NOREPLACE, -1, 0);
  if (taken != MAP_FAILED) stolen_.emplace_back(address, size);
}

Result DeviceMemory::create(int device, std::size_t size, std::size_t granularity, PageType pages, HandleId* out) {
  if (!out || !size) return broken(Result::InvalidValue, "no result pointer, or size 0");
  // cuda.h, cuMemCreate: a multiple of the minimum granularity.
  if (size % granularity) return broken(Result::InvalidValue, "size is not a multiple of the granularity");
  // ROCm 6.x: one large hipMemCreate fails where several small ones work (vLLM #12695).
  if (settings_.max_chunk && size > settings_.max_chunk) return Result::OutOfMemory;
  Accounting& books = books_[device];
  const auto has_room = [&] { return books.used <= settings_.capacity && size <= settings_.capacity - books.used; };
  if (!has_room()) drop_replaced();
  if (!has_room()) return Result::OutOfMemory;
  off_t offset = 0;
  if (!file_.allocate(size, &offset)) return Result::OutOfMemory;
  // ROCm: memory may hold what was there before (vLLM #44972).
  if (settings_.stale_pages) {
    const std::size_t ends = std::min(size, kStaleBytes);
    if (!file_.fill(offset, kStaleByte, ends)) return Result::OutOfMemory;
    const std::size_t tail = std::min(size - ends, kStaleBytes);
    if (tail && !file_.fill(offset + static_cast<off_t>(size - tail), kStaleByte, tail)) return Result::OutOfMemory;
  }
  handles_.emplace_hint(handles_.end(), next_handle_, Handle{size, offset, device, pages});
  books.used += size;
  *out = next_handle_++;
  return Result::Ok;
}

Result DeviceMemory::release(HandleId id) {
  const auto it = handles_.find(id);
  // Undefined by cuda.h, cuMemRelease; an error here.
  if (it == handles_.end() || it->second.released) {
    return broken(Result::InvalidValue, "unknown handle, or one that was released before");
  }
  // ROCm: unmap before release (ROCR-Runtime#257). Elsewhere the mapping keeps the memory (cuda.h, cuMemRelease; CANN: deferred).
  if (settings_.release_needs_unmap && it->second.mappings) {
    return broken(Result::InvalidValue, "the handle is still mapped");
  }
  it->second.released = true;
  drop_if_unused(it);
  return Result::Ok;
}

Result DeviceMemory::map(Address address, std::size_t size, std::size_t offset, HandleId id) {
  // cuda.h, cuMemMap: offset 0, inside a reservation, multiples of the minimum granularity, onto a range that is not mapped.
  if (offset) return broken(Result::InvalidValue, "offset must be 0");
  const auto handle = handles_.find(id);
  if (handle == handles_.end() || handle->second.released) return broken(Result::InvalidValue, "unknown handle");
  const auto found = reservation_of(address);
  if (found == reservations_.end() || found->second.allocation ||
      size > found->first + found->second.size - address) {
    return broken(Result::InvalidValue, "range is not inside a reservation");
  }
  if (address % settings_.granularity || !size || size % settings_.granularity) {
    return broken(Result::InvalidValue, "address or size is not a multiple of the granularity");
  }
  const Result allowed = check_mappable(found->second, handle->second, size, offset);
  if (allowed != Result::Ok) return allowed;
  const auto next = mappings_.lower_bound(address);
  if ((next != mappings_.end() && next->first < address + size) || mapping_of(address) != mappings_.end()) {
    return broken(Result::InvalidValue, "range is already mapped");
  }
  return map_checked(address, size, id, handle->second, found->first);
}

Result DeviceMemory::check_mappable(const Reservation& reservation, const Handle& handle, std::size_t size,
                                    std::size_t offset) {
  if (size > handle.size - offset) return broken(Result::InvalidValue, "range is larger than the physical memory");
  // CANN, aclrtMapMem: a handle cannot be split.
  if (rules_.map_whole_handle && size != handle.size) {
    return broken(Result::InvalidValue, "size is not that of the physical memory");
  }
  // CANN: a reservation must not mix devices.
  if (rules_.one_device_per_reservation && reservation.device >= 0 && reservation.device != handle.device) {
    return broken(Result::InvalidValue, "the reservation holds memory of another device");
  }
  // CANN: reserve flags 0 are for normal pages, 1 for huge ones; releases differ in whether they insist.
  if (settings_.match_page_type && reservation.pages != handle.pages) {
    return broken(Result::InvalidValue, "reservation and physical memory are of different page types");
  }
  return Result::Ok;
}

Result DeviceMemory::map_checked(Address address, std::size_t size, HandleId id, Handle& handle, Address reservation) {
  Mapping mapping{size, handle.offset, id, reservation, ++last_order_, settings_.late_mapping};
  if (rules_.access_on_map) {
    mapping.readable = mapping.writable = bit(handle.device);
    if (!show(address, mapping)) return Result::OutOfMemory;
  }
  drop_lingering([&](Address start, const Lingering& one) {
    return !one.until_address_free && start < address + size && start + one.size > address;
  });
  mappings_.emplace(address, mapping);
  Reservation& home = reservations_.find(reservation)->second;
  ++home.mappings;
  home.device = handle.device;
  ++handle.mappings;
  return Result::Ok;
}

Result DeviceMemory::unmap(Address address, std::optional<std::size_t> size) {
  const auto first = mappings_.find(address);
  if (first == mappings_.end() || reservations_.find(first->second.reservation)->second.allocation) {
    return broken(Result::InvalidValue, "not the start of a mapping");
  }
  const Address end = address + size.value_or(first->second.size);
  // ROCm: unmap each mapping separately (ROCR-Runtime#285).
  if (rules_.unmap_one_mapping && end != address + first->second.size) {
    return broken(Result::InvalidValue, "range is not one mapping with its own size");
  }
  const Result allowed = check_unmappable(first, end);
  if (allowed != Result::Ok) return allowed;
  for (auto it = first; it != mappings_.end() && it->first < end;) it = erase_mapping(it);
  return Result::Ok;
}

Result DeviceMemory::check_unmappable(Mappings::iterator first, Address end) {
  Address covered = first->first;
  for (auto it = first; it != mappings_.end() && it->first == covered && covered < end; ++it) {
    covered += it->second.size;
  }
  // cuda.h, cuMemUnmap: the entire range that was mapped to, no part of it.
  if (covered != end) return broken(Result::InvalidValue, "range is not made of whole mappings");
  // Unmapping does not wait for the streams that may touch the range (vLLM #43020, #45552).
  if (in_flight_.overlaps(first->first, end - first->first)) {
    return broken(Result::IllegalAddress, "asynchronous work on the range has not been synchronised");
  }
  return Result::Ok;
}

Result DeviceMemory::set_access(Address address, std::size_t size, int device, Access access) {
  if (!size) return broken(Result::InvalidValue, "size 0");
  const Address end = address + size;
  const auto first = mapping_of(address);
  const Result allowed = check_access_range(first, address, end);
  if (allowed != Result::Ok) return allowed;
  for (auto it = first; it != mappings_.end() && it->first < end; ++it) {
    Mapping changed = it->second;
    changed.readable = access == Access::None ? changed.readable & ~bit(device) : changed.readable | bit(device);
    changed.writable = access == Access::ReadWrite ? changed.writable | bit(device) : changed.writable & ~bit(device);
    if (!show(it->first, changed)) return Result::OutOfMemory;
    it->second = changed;
  }
  return Result::Ok;
}

Result DeviceMemory::check_access_range(Mappings::iterator first, Address address, Address end) {
  // cuda.h, cuMemSetAccess: a fully mapped range of whole allocations.
  if (first == mappings_.end()) return broken(Result::InvalidValue, "range is not fully mapped");
  if (first->first != address) return broken(Result::InvalidValue, "range does not begin with a mapping");
  // CANN, aclrtMemSetAccess: exactly the range that was mapped.
  if (rules_.access_one_mapping && end != address + first->second.size) {
    return broken(Result::InvalidValue, "range is not the one that was mapped");
  }
  Address covered = address;
  for (auto it = first; it != mappings_.end() && it->first == covered && covered < end; ++it) {
    covered += it->second.size;
  }
  if (covered < end) return broken(Result::InvalidValue, "range is not fully mapped");
  if (covered > end) return broken(Result::InvalidValue, "range ends inside a mapping");
  if (settings_.access_from_first && !adds_up_from_first(first->second.reservation, end - address)) {
    return Result::InvalidValue;
  }
  return Result::Ok;
}

// ROCm 7.0 to 7.2: hipMemSetAccess adds up the sizes of the reservation's mappings from the one that was made first, whatever its address argument
// is, and wants the sum to meet `size` (rocm-systems #2516, #2451, #6977).
bool DeviceMemory::adds_up_from_first(Address reservation, std::size_t size) const {
  std::map<std::uint64_t, std::size_t> sizes;  // by the order of mapping
  for (auto it = mappings_.lower_bound(reservation); it != mappings_.end() && it->second.reservation == reservation; ++it) {
    sizes.emplace(it->second.order, it->second.size);
  }
  std::size_t sum = 0;
  for (auto it = sizes.begin(); it != sizes.end() && sum < size; ++it) sum += it->second;
  return sum == size;
}

Result DeviceMemory::get_access(Address address, int device, Access* out) {
  const auto it = mapping_of(address);
  if (it == mappings_.end()) return broken(Result::InvalidValue, "address is not mapped");
  const bool readable = it->second.readable & bit(device), writable = it->second.writable & bit(device);
  *out = writable ? Access::ReadWrite : readable ? Access::Read : Access::None;
  return Result::Ok;
}

Result DeviceMemory::allocate(int device, std::size_t size, Address* out) {
  if (!out || !size) return broken(Result::InvalidValue, "no result pointer, or size 0");
  if (size > settings_.capacity) return Result::OutOfMemory;
  const std::size_t rounded = round_up(size, settings_.granularity);
  const Address start = host_reserve(rounded, settings_.granularity, 0);
  if (!start) return Result::OutOfMemory;
  HandleId id = 0;
  Result result = create(device, rounded, settings_.granularity, PageType::Huge, &id);
  if (result != Result::Ok) {
    munmap(pointer(start), rounded);
    return result;
  }
  Reservation reservation{rounded, PageType::Huge};
  reservation.allocation = true;
  reservations_.emplace(start, reservation);
  Handle& handle = handles_.find(id)->second;
  handle.released = true;
  result = map_checked(start, rounded, id, handle, start);
  if (result == Result::Ok) {
    Mapping& mapping = mappings_.find(start)->second;
    mapping.readable = mapping.writable = bit(device);
    if (show(start, mapping)) {
      *out = start;
      return Result::Ok;
    }
    erase_mapping(mappings_.find(start));
  } else {
    drop_if_unused(handles_.find(id));
  }
  munmap(pointer(start), rounded);
  reservations_.erase(start);
  return Result::OutOfMemory;
}

Result DeviceMemory::free_allocation(Address address) {
  const auto it = reservations_.find(address);
  if (it == reservations_.end() || !it->second.allocation) {
    return broken(Result::InvalidValue, "not the start of an allocation");
  }
  erase_mapping(mappings_.find(address));
  munmap(pointer(address), it->second.size);
  reservations_.erase(it);
  return Result::Ok;
}

void DeviceMemory::free_allocations(int device) {
  for (auto it = reservations_.begin(); it != reservations_.end();) {
    const Address address = it->first;
    const bool chosen = it->second.allocation && it->second.device == device;
    ++it;
    if (chosen) free_allocation(address);
  }
}

DeviceMemory::Reservations::const_iterator DeviceMemory::reservation_of(Address address) const {
  auto it = reservations_.upper_bound(address);
  if (it == reservations_.begin()) return reservations_.end();
  --it;
  return address < it->first + it->second.size ? it : reservations_.end();
}

DeviceMemory::Mappings::const_iterator DeviceMemory::mapping_of(Address address) const {
  auto it = mappings_.upper_bound(address);
  if (it == mappings_.begin()) return mappings_.end();
  --it;
  return address < it->first + it->second.size ? it : mappings_.end();
}

DeviceMemory::Mappings::iterator DeviceMemory::mapping_of(Address address) {
  auto it = mappings_.upper_bound(address);
  if (it == mappings_.begin()) return mappings_.end();
  --it;
  return address < it->first + it->second.size ? it : mappings_.end();
}

bool DeviceMemory::in_allocation(Address address) const {
  const auto it = reservation_of(address);
  return it != reservations_.end() && it->second.allocation;
}

std::optional<int> DeviceMemory::mapped_device(Address address) const {
  const auto it = mapping_of(address);
  if (it == mappings_.end()) return std::nullopt;
  return handles_.find(it->second.handle)->second.device;
}

std::optional<int> DeviceMemory::handle_device(HandleId handle) const {
  const auto it = handles_.find(handle);
  if (it == handles_.end()) return std::nullopt;
  return it->second.device;
}

std::optional<std::size_t> DeviceMemory::handle_size(HandleId handle) const {
  const auto it = handles_.find(handle);
  if (it == handles_.end()) return std::nullopt;
  return it->second.size;
}

void DeviceMemory::reservation_range(Address address, Address* start, std::size_t* size) const {
  const auto it = reservation_of(address);
  *start = it == reservations_.end() ? 0 : it->first;
  *size = it == reservations_.end() ? 0 : it->second.size;
}

void DeviceMemory::mapping_range(Address address, Address* start, std::size_t* size) const {
  const auto it = mapping_of(address);
  *start = it == mappings_.end() ? 0 : it->first;
  *size = it == mappings_.end() ? 0 : it->second.size;
}

HandleId DeviceMemory::memory_at(Address address) const {
  const auto it = mapping_of(address);
  return it == mappings_.end() ? 0 : it->second.handle;
}

bool DeviceMemory::show(Address address, Mapping& mapping) {
  const bool visible = !settings_.strict_host && mapping.readable;
  if (!visible) {
    if (mapping.shown) hide(address, mapping.size);
    mapping.shown = false;
    return true;
  }
  const int protection = mapping.writable ? PROT_READ | PROT_WRITE : PROT_READ;
  mapping.shown = file_.show(address, mapping.size, mapping.offset, protection);
  return mapping.shown;
}

void DeviceMemory::hide(Address address, std::size_t size) {
  mmap(pointer(address), size, PROT_NONE, kReservedFlags | MAP_FIXED, -1, 0);
}

DeviceMemory::Mappings::iterator DeviceMemory::erase_mapping(Mappings::iterator mapping) {
  const auto [address, gone] = *mapping;
  Reservation& home = reservations_.find(gone.reservation)->second;
  const auto handle = handles_.find(gone.handle);
  // ROCm: memory does not return while its address range stays reserved (ROCm/hip#3781, vLLM #37533), because the process's map still has the
  // memory's dma-buf there, without access.
  if (settings_.hold_until_address_free && !home.allocation) {
    file_.show(address, gone.size, gone.offset, PROT_NONE);
    lingering_.emplace(address, Lingering{gone.size, gone.handle, settings_.hold_until_address_free > 1});
    ++handle->second.lingering;
  } else if (gone.shown) {
    hide(address, gone.size);
  }
  --home.mappings;
  --handle->second.mappings;
  drop_if_unused(handle);
  return mappings_.erase(mapping);
}

void DeviceMemory::drop_if_unused(Handles::iterator it) {
  const Handle& handle = it->second;
  if (!handle.released || handle.mappings || handle.lingering) return;
  file_.discard(handle.offset, handle.size);
  give_back(handle.device, handle.size);
  handles_.erase(it);
}

void DeviceMemory::give_back(int device, std::size_t size) {
  Accounting& books = books_[device];
  books.used -= size;
  // Free-memory counters lag behind (vLLM polls ROCm's for up to five seconds).
  if (settings_.free_counter_lag) {
    books.unreported += size;
    books.queries_left = settings_.free_counter_lag;
  }
}

template <class Chosen>
void DeviceMemory::drop_lingering(Chosen chosen) {
  for (auto it = lingering_.begin(); it != lingering_.end();) {
    if (!chosen(it->first, it->second)) {
      ++it;
      continue;
    }
    const auto handle = handles_.find(it->second.handle);
    --handle->second.lingering;
    drop_if_unused(handle);
    it = lingering_.erase(it);
  }
}

void DeviceMemory::drop_replaced() {
  // To read what the process maps takes longer than all else here.
  if (std::all_of(lingering_.begin(), lingering_.end(), [](const auto& one) { return one.second.until_address_free; })) return;
  const std::map<std::uintptr_t, std::uintptr_t> shown = file_.shown();
  drop_lingering([&](Address start, const Lingering& one) {
    if (one.until_address_free) return false;
    const auto after = shown.upper_bound(start + one.size - 1);
    return after == shown.begin() || std::prev(after)->second <= start;
  });
}

Result DeviceMemory::check(Address address, std::size_t size, int device, Access needed) {
  for (std::size_t done = 0; done < size;) {
    const auto it = mapping_of(address + done);
    if (it == mappings_.end()) return broken(Result::IllegalAddress, "device memory is not mapped");
    // cuda.h, cuMemMap: mapping alone does not make an address accessible.
    const std::uint64_t granted = needed == Access::ReadWrite ? it->second.writable : it->second.readable;
    if (!(granted & bit(device))) return broken(Result::IllegalAddress, "the device has no access to the memory");
    done = it->first + it->second.size - address;
  }
  return Result::Ok;
}

template <class Step>
Result DeviceMemory::for_each_part(Address address, std::size_t size, bool writes, Step step) {
  for (std::size_t done = 0; done < size;) {
    const auto it = mapping_of(address + done);
    if (it == mappings_.end()) return broken(Result::IllegalAddress, "device memory is not mapped");
    const std::size_t inside = address + done - it->first;
    const std::size_t part = std::min(size - done, it->second.size - inside);
    // ROCm: a mapping may be used before the device sees it (vLLM #52478, rocm-systems #11693).
    const bool lost = writes && it->second.unseen_writes > 0;
    if (lost) --it->second.unseen_writes;
    if (!lost && !step(it->second.offset + static_cast<off_t>(inside), done, part)) {
      return broken(Result::InvalidValue, "host memory cannot be read or written");
    }
    done += part;
  }
  return Result::Ok;
}

Result DeviceMemory::write(Address address, const void* source, std::size_t size) {
  return for_each_part(address, size, true, [&](off_t offset, std::size_t done, std::size_t part) {
    return file_.write(offset, static_cast<const char*>(source) + done, part);
  });
}

Result DeviceMemory::read(Address address, void* target, std::size_t size) {
  return for_each_part(address, size, false, [&](off_t offset, std::size_t done, std::size_t part) {
    return file_.read(offset, static_cast<char*>(target) + done, part);
  });
}

Result DeviceMemory::fill(Address address, std::uint8_t value, std::size_t size) {
  return for_each_part(address, size, true, [&](off_t offset, std::size_t, std::size_t part) {
    return file_.fill(offset, value, part);
  });
}

std::size_t DeviceMemory::used(int device) {
  drop_replaced();
  return books_[device].used;
}

std::size_t DeviceMemory::reported_free(int device) {
  drop_replaced();
  Accounting& books = books_[device];
  const std::size_t shown_used = books.used + books.unreported;
  if (books.queries_left && --books.queries_left == 0) books.unreported = 0;
  return settings_.capacity > shown_used ? settings_.capacity - shown_used : 0;
}

MemoryTotals DeviceMemory::totals() {
  drop_replaced();
  MemoryTotals totals{};
  for (const auto& [address, reservation] : reservations_) {
    totals.address_space += reservation.size;
    ++(reservation.allocation ? totals.allocations : totals.reservations);
  }
  for (const auto& [address, mapping] : mappings_) totals.mapped_bytes += mapping.size;
  totals.mappings = mappings_.size() - totals.allocations;
  totals.handles = handles_.size() - totals.allocations;
  return totals;
}

void DeviceMemory::apply_host_visibility() {
  for (auto& [address, mapping] : mappings_) show(address, mapping);
}

void DeviceMemory::hide_everything() {
  for (const auto& [address, reservation] : reservations_) hide(address, reservation.size);
}

void DeviceMemory::reset() {
  for (const auto& [id, handle] : handles_) file_.discard(handle.offset, handle.size);
  for (const auto& [address, reservation] : reservations_) munmap(pointer(address), reservation.size);
  mappings_.clear();
  handles_.clear();
  reservations_.clear();
  lingering_.clear();
  for (const auto& [address, size] : stolen_) munmap(pointer(address), size);
  stolen_.clear();
  books_ = {};
}

}  // namespace hardpoint::simulators
