#include "core/control.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "core/simulator.hpp"

namespace hardpoint::simulators {
namespace {

constexpr int kRefused = -1;

template <class Body>
auto control(Body&& body) noexcept -> decltype(body(simulator())) {
  Simulator& machine = simulator();
  if (machine.forked()) return kRefused;
  std::lock_guard<std::mutex> lock(machine.mutex);
  try {
    return body(machine);
  } catch (const std::bad_alloc&) {
    return kRefused;
  }
}

std::int64_t copy_out(const std::string& text, char* buffer, std::size_t size) {
  if (buffer && size) {
    const std::size_t length = std::min(text.size(), size - 1);
    std::memcpy(buffer, text.data(), length);
    buffer[length] = 0;
  }
  return static_cast<std::int64_t>(text.size());
}

int refused_unless(bool done) { return done ? 0 : kRefused; }

void fill(Simulator& machine, hp_sim_statistics& out) {
  const MemoryTotals totals = machine.memory.totals();
  out.reservations = totals.reservations;
  out.address_space = totals.address_space;
  out.handles = totals.handles;
  out.mappings = totals.mappings;
  out.mapped_bytes = totals.mapped_bytes;
  out.allocations = totals.allocations;
  out.streams = machine.streams.streams();
  out.events = machine.streams.events();
  out.pending = machine.streams.pending();
  out.host_ranges = machine.host.ranges();
  out.host_bytes = machine.host.bytes();
  out.context_references = 0;
  out.used = 0;
  for (std::size_t device = 0; device < kMaxDevices; ++device) {
    out.context_references += machine.contexts[device];
    out.used += machine.memory.used(static_cast<int>(device));
  }
  out.calls = machine.calls.total();
  out.violations = machine.violations.count();
  out.pageable_copies = machine.streams.pageable_copies();
  out.unmaps_waited = machine.unmaps_waited;
}

}  // namespace
}  // namespace hardpoint::simulators

using namespace hardpoint::simulators;

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT const char* hardpoint_simulated_driver(void) { return vendor().name; }

EXPORT int hp_sim_stats(hp_sim_statistics* out) {
  if (!out || out->struct_size != sizeof *out) return kRefused;
  return control([&](Simulator& machine) {
    fill(machine, *out);
    return 0;
  });
}

EXPORT int64_t hp_sim_used(int device) {
  if (device < 0 || device >= static_cast<int>(kMaxDevices)) return kRefused;
  return control([&](Simulator& machine) { return static_cast<std::int64_t>(machine.memory.used(device)); });
}

EXPORT int hp_sim_set(const char* name, uint64_t value) {
  return control([&](Simulator& machine) { return refused_unless(machine.set(name, value)); });
}

EXPORT int hp_sim_get(const char* name, uint64_t* value) {
  return control([&](Simulator& machine) {
    const std::uint64_t* field = find_setting(machine.settings, name);
    if (!field || !value) return kRefused;
    *value = *field;
    return 0;
  });
}

EXPORT int hp_sim_fail(const char* call, uint64_t nth, int code, int64_t times) {
  return control([&](Simulator& machine) { return refused_unless(call && machine.calls.fail(call, nth, code, times)); });
}

EXPORT int hp_sim_clear_faults(void) {
  return control([](Simulator& machine) {
    machine.calls.clear_faults();
    return 0;
  });
}

EXPORT int hp_sim_delay(const char* call, uint32_t microseconds) {
  return control([&](Simulator&) { return refused_unless(call && Calls::delay(call, microseconds)); });
}

EXPORT int64_t hp_sim_call_count(const char* call) {
  return control([&](Simulator&) {
    const CallSite* site = call ? Calls::find(call) : nullptr;
    return site ? static_cast<std::int64_t>(site->count) : std::int64_t{kRefused};
  });
}

EXPORT int64_t hp_sim_calls(char* buffer, size_t size) {
  return control([&](Simulator&) { return copy_out(Calls::text(), buffer, size); });
}

EXPORT int64_t hp_sim_violations(char* buffer, size_t size) {
  return control([&](Simulator& machine) {
    std::string text;
    for (const std::string& line : machine.violations.texts()) text += line + "\n";
    return copy_out(text, buffer, size);
  });
}

EXPORT int64_t hp_sim_leaks(char* buffer, size_t size) {
  return control([&](Simulator& machine) { return copy_out(machine.leaks(), buffer, size); });
}

EXPORT int hp_sim_reset(void) {
  return control([](Simulator& machine) {
    machine.reset();
    return 0;
  });
}
