// What of the simulated device can be chosen: by HARDPOINT_SIM_<NAME> before the library is loaded, by name afterwards.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace hardpoint::simulators {

struct Settings {
  std::uint64_t capacity = std::uint64_t{4} << 30;           // bytes of device memory, per device
  std::uint64_t devices = 1;                                 // at most kMaxDevices
  std::uint64_t granularity = std::uint64_t{2} << 20;        // minimum granularity of virtual memory, bytes
  std::uint64_t recommended_granularity = 0;                 // 0: the same as the minimum
  std::uint64_t shareable_granularity = 0;                   // minimum for shareable or RDMA memory; 0: the same
  std::uint64_t strict_host = 0;                             // host code that dereferences device memory faults
  std::uint64_t deferred = 0;                                // asynchronous work runs only when it is waited for
  std::uint64_t max_chunk = 0;                               // largest physical allocation, bytes; 0: none
  std::uint64_t max_reservation = 0;                         // largest reservation, bytes; 0: none
  std::uint64_t context_rule = 1;                            // virtual memory calls need the right current context
  std::uint64_t release_needs_unmap = 0;                     // a mapped handle must not be released
  std::uint64_t hold_until_address_free = 0;                 // physical memory returns only with its address range, or (1,
                                                             // not 2) when the host maps something else there
  std::uint64_t access_from_first = 0;                       // setting access is checked against the sizes of the reservation's first mappings
  std::uint64_t unmap_waits = 0;                             // unmapping waits for all work on the device
  std::uint64_t late_mapping = 0;                            // so many writes to a new mapping are lost
  std::uint64_t thief = 0;                                   // another thread's memory takes every range that is freed
  std::uint64_t refuse_alignment = 0;                        // reserving with an explicit alignment fails
  std::uint64_t stale_pages = 1;                             // new physical memory holds a pattern, not zeros
  std::uint64_t free_counter_lag = 0;                        // queries of free memory until a release shows
  std::uint64_t match_page_type = 0;                         // reservation and memory must be of the same page type
  std::uint64_t virtual_memory = 1;                          // the device supports virtual memory management
  std::uint64_t posix_handles = 1;                           // memory can be shared by file descriptor
  std::uint64_t fabric_handles = 0;                          // 1: supported; 2: claimed, but creating is not permitted
  std::uint64_t rdma = 0;                                    // memory can be made for RDMA
  std::uint64_t unified_memory = 0;                          // the device shares the host's memory
  std::uint64_t graphs_keep_memory = 0;                      // copies in graphs do not follow what is mapped at their addresses later
  std::uint64_t old_kernel = 0;                              // the host's kernel is 5.10 or earlier: only CANN's own host memory can be registered
  std::uint64_t version = 0;                                 // of the CUDA driver or of CANN, 1000 * major + 10 * minor; 0: the vendor's own default
};

constexpr std::size_t kMaxDevices = 64;

struct SettingName {
  const char* name;
  std::uint64_t Settings::* field;
};

// All settings, in a fixed order.
const std::vector<SettingName>& setting_names();

// The field of a setting, or null if there is none of that name.
std::uint64_t* find_setting(Settings& settings, const char* name);

// Whether the values make a device that can be simulated.
bool valid(const Settings& settings);

// `defaults` with what the environment asks for; values that make no sense are left out.
Settings from_environment(const Settings& defaults);

}  // namespace hardpoint::simulators
