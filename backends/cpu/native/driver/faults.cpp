#include "faults.hpp"

#include <string_view>

#include "hardpoint/driver_support.hpp"

namespace hp::driver {

std::map<std::string, Faults::Entry, std::less<>> Faults::all_entries() {
  std::map<std::string, Entry, std::less<>> entries;
  for (const char* name :
       {"open", "close", "geometry", "memory_info", "device_count", "device_name", "driver_version", "reserve",
        "release_address", "create", "release", "map", "unmap", "stream_create", "stream_destroy", "copy_to_host",
        "copy_to_device", "fill", "stream_synchronize", "device_synchronize"})
    entries.emplace(name, Entry{});
  return entries;
}

bool Faults::set(const std::string& entry, int64_t nth, int64_t times) {
  const std::lock_guard<std::mutex> guard(mutex_);
  const auto found = entries_.find(entry);
  if (found == entries_.end() || nth < 1) return false;
  found->second.skips = nth - 1;
  found->second.times = times;
  return true;
}

int64_t Faults::calls(const std::string& entry) const {
  const std::lock_guard<std::mutex> guard(mutex_);
  const auto found = entries_.find(entry);
  return found == entries_.end() ? -1 : found->second.calls;
}

void Faults::enter(const char* entry) {
  const std::lock_guard<std::mutex> guard(mutex_);
  Entry& state = entries_.find(std::string_view(entry))->second;
  ++state.calls;
  if (state.times == 0) return;
  if (state.skips > 0) {
    --state.skips;
    return;
  }
  if (state.times > 0) --state.times;
  const hp_status status = std::string_view(entry) == "create" ? HP_OUT_OF_MEMORY : HP_FAILED;
  throw hardpoint::driver::Failure{status, 0, entry, "failure injected by a test"};
}

}  // namespace hp::driver
