// The whole simulated machine of one vendor library, and how a vendor's call enters it.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <new>
#include <string>

#include "core/calls.hpp"
#include "core/captures.hpp"
#include "core/device_memory.hpp"
#include "core/host_memory.hpp"
#include "core/in_flight.hpp"
#include "core/result.hpp"
#include "core/settings.hpp"
#include "core/streams.hpp"
#include "core/violations.hpp"

namespace hardpoint::simulators {

// What a front end says of its vendor.
struct Vendor {
  const char* name;
  MemoryRules rules;
  Settings defaults;
};

// Defined by each front end.
const Vendor& vendor();

class Simulator {
 public:
  Simulator();
  Simulator(const Simulator&) = delete;
  Simulator& operator=(const Simulator&) = delete;

  // True in a child that was forked after the vendor's initialisation: nothing of it survives a fork, and every call must say so. The child of
  // a process that has only loaded the library begins afresh.
  bool forked() const { return forked_.load(std::memory_order_relaxed); }

  // Count a call and prepare the log for it; returns the vendor code that it is to fail with, 0 for none.
  int begin(CallSite& site) {
    violations.set_call(site.name());
    return calls.begin(site);
  }

  bool device_exists(int device) const {
    return device >= 0 && static_cast<std::uint64_t>(device) < settings.devices;
  }

  // Change a setting by name; false if there is none of that name or the value makes no sense.
  bool set(const char* name, std::uint64_t value);

  // Free everything, forget all counts, faults and violations, and take the settings of the environment again. What
  // the vendor's initialisation established (contexts, current devices) stays.
  void reset();

  // Lines that say what is left; empty when nothing is.
  std::string leaks();

  // Guards every member below and CallSite::count.
  std::mutex mutex;

  Settings settings;
  Violations violations;
  Calls calls;
  InFlight in_flight;
  DeviceMemory memory;
  HostMemory host;
  Captures captures;
  Streams streams;
  std::uint64_t unmaps_waited = 0;                    // for work of the device on other memory
  bool initialized = false;                           // by the vendor's initialisation call
  std::array<std::uint32_t, kMaxDevices> contexts{};  // references to each device's own context

 private:
  friend void before_fork();
  friend void after_fork_in_parent();
  friend void after_fork_in_child();

  std::atomic<bool> forked_{false};
};

// The one machine of this library. A vendor's C API has no handle for the driver itself, so its state is the process's. It is
// never destroyed: programs call drivers from exit handlers.
Simulator& simulator();

// Serve one vendor call. `Codes` gives the vendor's codes: `of(Result)`, and `forked` for a child process. `body` takes the
// simulator, whose mutex is held, and returns a Result.
template <class Codes, class Body>
int serve(CallSite& site, Body&& body) noexcept {
  Simulator& machine = simulator();
  if (machine.forked()) return Codes::forked;
  site.pause();
  std::lock_guard<std::mutex> lock(machine.mutex);
  if (const int code = machine.begin(site)) return code;
  try {
    return Codes::of(body(machine));
  } catch (const std::bad_alloc&) {
    return Codes::of(Result::OutOfMemory);
  }
}

}  // namespace hardpoint::simulators
