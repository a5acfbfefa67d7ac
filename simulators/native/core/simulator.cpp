#include "core/simulator.hpp"

#include <pthread.h>

#include <cstdlib>
#include <fstream>

namespace hardpoint::simulators {

void before_fork() { simulator().mutex.lock(); }

void after_fork_in_parent() { simulator().mutex.unlock(); }

void after_fork_in_child() {
  Simulator& machine = simulator();
  if (machine.initialized) {
    machine.memory.hide_everything();
    machine.forked_.store(true, std::memory_order_relaxed);
  }
  machine.mutex.unlock();
}

namespace {

void line_if(std::string& text, std::uint64_t count, const char* what) {
  if (count) text += std::to_string(count) + " " + what + "\n";
}

}  // namespace

Simulator::Simulator()
    : settings(from_environment(vendor().defaults)),
      memory(vendor().rules, settings, violations, in_flight),
      host(violations, in_flight),
      captures(violations),
      streams(settings, violations, memory, host, in_flight, captures) {
  if (const char* faults = std::getenv("HARDPOINT_SIM_FAIL")) calls.fail_from(faults);
  pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

bool Simulator::set(const char* name, std::uint64_t value) {
  Settings changed = settings;
  std::uint64_t* field = find_setting(changed, name);
  if (!field) return false;
  *field = value;
  if (!valid(changed)) return false;
  settings = changed;
  if (field == &changed.strict_host) memory.apply_host_visibility();
  return true;
}

void Simulator::reset() {
  streams.reset();
  captures.reset();
  in_flight.clear();
  memory.reset();
  host.reset();
  violations.clear();
  unmaps_waited = 0;
  calls.reset();
  settings = from_environment(vendor().defaults);
}

std::string Simulator::leaks() {
  const MemoryTotals totals = memory.totals();
  std::string text;
  line_if(text, totals.reservations, "reservations not freed");
  line_if(text, totals.mappings, "mappings not unmapped");
  line_if(text, totals.handles, "physical memory handles not released");
  line_if(text, totals.allocations, "allocations not freed");
  line_if(text, host.ranges(), "pinned host ranges not freed or unregistered");
  line_if(text, streams.streams(), "streams not destroyed");
  line_if(text, streams.events(), "events not destroyed");
  std::uint64_t references = 0;
  for (const std::uint32_t count : contexts) references += count;
  line_if(text, references, "references to device contexts not released");
  return text;
}

Simulator& simulator() {
  static Simulator* machine = new Simulator;
  return *machine;
}

namespace {

// Runs after the exit handlers of the program and of other libraries, which may still free device memory.
__attribute__((destructor)) void report_at_exit() {
  const char* path = std::getenv("HARDPOINT_SIM_LEAK_REPORT");
  if (!path || !*path || simulator().forked()) return;
  std::lock_guard<std::mutex> lock(simulator().mutex);
  std::ofstream file(path);
  file << simulator().leaks();
  for (const std::string& text : simulator().violations.texts()) file << "violation: " << text << "\n";
}

}  // namespace

}  // namespace hardpoint::simulators
