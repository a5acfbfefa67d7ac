// The address ranges, of device and host, that asynchronous work may still touch.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory_resource>

namespace hardpoint::simulators {

using Address = std::uintptr_t;

class InFlight {
 public:
  void add(Address start, std::size_t size) {
    longest_ = std::max(longest_, size);
    ranges_.emplace(start, size);
  }

  void remove(Address start, std::size_t size) {
    auto [it, end] = ranges_.equal_range(start);
    while (it != end && it->second != size) ++it;
    if (it != end) ranges_.erase(it);
    if (ranges_.empty()) longest_ = 0;
  }

  void clear() {
    ranges_.clear();
    longest_ = 0;
  }

  bool overlaps(Address start, std::size_t size) const {
    if (ranges_.empty()) return false;
    auto it = ranges_.lower_bound(start > longest_ ? start - longest_ : 0);
    for (; it != ranges_.end() && it->first < start + size; ++it) {
      if (it->first + it->second > start) return true;
    }
    return false;
  }

 private:
  std::pmr::unsynchronized_pool_resource nodes_;
  std::pmr::multimap<Address, std::size_t> ranges_{&nodes_};
  std::size_t longest_ = 0;  // no range in the map is longer
};

}  // namespace hardpoint::simulators
