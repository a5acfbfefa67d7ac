// Host memory that the device may reach without staging: allocated by the driver, or the user's own and registered.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

#include "core/in_flight.hpp"
#include "core/result.hpp"
#include "core/violations.hpp"

namespace hardpoint::simulators {

class HostMemory {
 public:
  HostMemory(Violations& violations, const InFlight& in_flight) : violations_(violations), in_flight_(in_flight) {}
  ~HostMemory() = default;
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  Result allocate(std::size_t size, void** out);
  Result free(void* pointer);

  // `pins`: the range's pages are locked, and not only mapped for the device.
  Result register_range(void* pointer, std::size_t size, bool pins = true);
  Result unregister(void* pointer);

  // Whether all of a range is of one pinned range.
  bool pinned(Address address, std::size_t size) const;

  std::uint64_t ranges() const { return ranges_.size(); }
  std::uint64_t bytes() const { return bytes_; }

  void reset();

 private:
  struct Range {
    std::size_t size;
    bool owned;  // allocated here, and unmapped when it is freed
    bool pinned;
  };

  Result remove(void* pointer, bool owned, Result unknown);
  bool overlaps(Address start, std::size_t size) const;

  Violations& violations_;
  const InFlight& in_flight_;
  std::map<Address, Range> ranges_;
  std::uint64_t bytes_ = 0;
};

}  // namespace hardpoint::simulators
