// Virtual and physical memory of the simulated devices: reservations, handles, mappings, and the rules that tie them.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory_resource>
#include <optional>
#include <utility>
#include <vector>

#include "core/backing_file.hpp"
#include "core/in_flight.hpp"
#include "core/result.hpp"
#include "core/settings.hpp"
#include "core/violations.hpp"

namespace hardpoint::simulators {

using HandleId = std::uint64_t;

enum class Access : std::uint8_t { None = 0, Read = 1, ReadWrite = 3 };

enum class PageType : std::uint8_t { Normal, Huge };

// What a vendor's documents say of virtual memory where vendors differ; nothing a user would switch.
struct MemoryRules {
  bool access_on_map;                  // the owning device may read and write as soon as memory is mapped
  bool map_whole_handle;               // a mapping covers its handle exactly
  bool unmap_one_mapping;              // an unmap covers one mapping, with its own size
  bool access_one_mapping;             // setting access covers one mapping, exactly
  bool alignment_must_be_zero;         // reserving takes no alignment
  bool one_device_per_reservation;     // a reservation holds the memory of one device
};

struct MemoryTotals {
  std::uint64_t reservations, address_space, handles, mappings, mapped_bytes, allocations;
};

class DeviceMemory {
 public:
  DeviceMemory(const MemoryRules& rules, const Settings& settings, Violations& violations, const InFlight& in_flight)
      : rules_(rules), settings_(settings), violations_(violations), in_flight_(in_flight) {}
  ~DeviceMemory() = default;
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  Result reserve(std::size_t size, std::size_t alignment, Address hint, PageType pages, Address* out);

  // Without a size, whatever the reservation has.
  Result free_address(Address address, std::optional<std::size_t> size);

  // `granularity` is the one that holds for the properties asked for.
  Result create(int device, std::size_t size, std::size_t granularity, PageType pages, HandleId* out);
  Result release(HandleId handle);

  Result map(Address address, std::size_t size, std::size_t offset, HandleId handle);

  // Without a size, the one mapping at the address.
  Result unmap(Address address, std::optional<std::size_t> size);
  Result set_access(Address address, std::size_t size, int device, Access access);
  Result get_access(Address address, int device, Access* out);

  // Memory of the vendor's plain allocation call: one reservation, one mapping, access for the owner.
  Result allocate(int device, std::size_t size, Address* out);
  Result free_allocation(Address address);

  // Free every plain allocation of a device, as a device reset does.
  void free_allocations(int device);

  bool contains(Address address) const { return reservation_of(address) != reservations_.end(); }
  bool in_allocation(Address address) const;
  std::optional<int> mapped_device(Address address) const;
  std::optional<int> handle_device(HandleId handle) const;
  std::optional<std::size_t> handle_size(HandleId handle) const;

  // The range that an address belongs to; zero size where there is none.
  void reservation_range(Address address, Address* start, std::size_t* size) const;
  void mapping_range(Address address, Address* start, std::size_t* size) const;
  // The memory that is mapped at an address; 0 for none.
  HandleId memory_at(Address address) const;

  // Whether a device may read or write all of a range; breaks a rule otherwise.
  Result check(Address address, std::size_t size, int device, Access needed);

  // Move bytes; the range was checked.
  Result write(Address address, const void* source, std::size_t size);
  Result read(Address address, void* target, std::size_t size);
  Result fill(Address address, std::uint8_t value, std::size_t size);

  // Free bytes as the device's counter shows them, which may lag behind.
  std::size_t reported_free(int device);
  std::size_t used(int device);
  MemoryTotals totals();

  // Make all mappings visible to host code, or hide them, as the settings say.
  void apply_host_visibility();

  // In a forked child: no device memory may be seen or shared with the parent.
  void hide_everything();

  void reset();

 private:
  struct Reservation {
    std::size_t size;
    PageType pages;
    bool allocation = false;          // made by allocate(): not the user's to map or to free by parts
    int device = -1;                  // of the memory mapped into it
    std::size_t mappings = 0;
  };
  struct Handle {
    std::size_t size;
    off_t offset;
    int device;
    PageType pages;
    bool released = false;
    std::size_t mappings = 0;
    std::size_t lingering = 0;        // ranges that hold its memory although it is not mapped there any more
  };
  struct Mapping {
    std::size_t size;
    off_t offset;
    HandleId handle;
    Address reservation;
    std::uint64_t order;              // mappings that were made before it have smaller ones
    std::uint64_t unseen_writes;      // writes that are still to be lost
    std::uint64_t readable = 0;       // one bit per device
    std::uint64_t writable = 0;
    bool shown = false;               // host code sees it at its address
  };
  // A range that was unmapped and still holds its memory.
  struct Lingering {
    std::size_t size;
    HandleId handle;
    bool until_address_free;          // not even another mapping of the host ends it
  };
  struct Accounting {
    std::size_t used = 0;
    std::size_t unreported = 0;       // released, and not yet visible in the counter
    std::uint64_t queries_left = 0;
  };
  using Reservations = std::pmr::map<Address, Reservation>;
  using Handles = std::pmr::map<HandleId, Handle>;
  using Mappings = std::pmr::map<Address, Mapping>;

  Result broken(Result result, const char* rule) { return violations_.note(result, rule); }
  Reservations::const_iterator reservation_of(Address address) const;
  Mappings::const_iterator mapping_of(Address address) const;
  Mappings::iterator mapping_of(Address address);

  Result check_mappable(const Reservation& reservation, const Handle& handle, std::size_t size, std::size_t offset);
  Result check_unmappable(Mappings::iterator first, Address end);
  Result check_access_range(Mappings::iterator first, Address address, Address end);
  Result map_checked(Address address, std::size_t size, HandleId id, Handle& handle, Address reservation);
  bool adds_up_from_first(Address reservation, std::size_t size) const;
  bool show(Address address, Mapping& mapping);
  void hide(Address address, std::size_t size);
  Mappings::iterator erase_mapping(Mappings::iterator mapping);
  void drop_if_unused(Handles::iterator handle);
  void give_back(int device, std::size_t size);
  void steal(Address address, std::size_t size);

  template <class Chosen>
  void drop_lingering(Chosen chosen);
  // Where the host shows something else now, nothing is held any more.
  void drop_replaced();

  template <class Step>
  Result for_each_part(Address address, std::size_t size, bool writes, Step step);

  const MemoryRules rules_;
  const Settings& settings_;
  Violations& violations_;
  const InFlight& in_flight_;
  BackingFile file_;
  // Nodes are recycled, so that the common path allocates nothing.
  std::pmr::unsynchronized_pool_resource nodes_;
  Reservations reservations_{&nodes_};
  Handles handles_{&nodes_};
  Mappings mappings_{&nodes_};
  std::multimap<Address, Lingering> lingering_;
  std::vector<std::pair<Address, std::size_t>> stolen_;
  std::uint64_t last_order_ = 0;
  std::array<Accounting, kMaxDevices> books_{};
  HandleId next_handle_ = 0x51d00001;
};

}  // namespace hardpoint::simulators
