// Counts the vendor calls, and makes chosen ones fail or take time.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

namespace hardpoint::simulators {

// One vendor function. Declared beside the function, so that every function of the library is known by name from the start.
class CallSite {
 public:
  explicit CallSite(const char* name);
  CallSite(const CallSite&) = delete;
  CallSite& operator=(const CallSite&) = delete;

  const char* name() const { return name_; }
  CallSite* next() const { return next_; }

  // Take the time that was asked for; called without a lock, so that other threads' calls go on.
  void pause() const;

  std::uint64_t count = 0;                        // guarded by the simulator's mutex
  std::atomic<std::uint32_t> delay_microseconds{0};

 private:
  const char* name_;
  CallSite* next_;
};

class Calls {
 public:
  // Count a call; returns the vendor code it is to fail with, 0 for none.
  int begin(CallSite& site) {
    ++total_;
    ++site.count;
    return faults_.empty() ? 0 : injected(site);
  }

  // From now on let the nth call (1 is the next one) of a function fail with a vendor code, and the `times - 1` calls after it;
  // negative `times` means all of them. "*" counts the calls of all functions. Returns false for an unknown function or nth = 0.
  bool fail(const char* call, std::uint64_t nth, int code, std::int64_t times);

  // Take commands of the form call:nth:code[:times], separated by commas; what cannot be read is left out.
  void fail_from(const char* commands);

  void clear_faults() { faults_.clear(); }

  // Returns false for an unknown function.
  static bool delay(const char* call, std::uint32_t microseconds);

  // The function of that name, with or without the suffix of its version; null if there is none.
  static CallSite* find(const char* call);

  std::uint64_t total() const { return total_; }

  // "name count" of every function that was called, one per line.
  static std::string text();

  void reset();

 private:
  struct Fault {
    const CallSite* site;  // null: the calls of all functions
    std::uint64_t first;   // value of the count at which it begins
    std::int64_t times;
    int code;
  };

  int injected(const CallSite& site) const;

  std::uint64_t total_ = 0;
  std::vector<Fault> faults_;
};

}  // namespace hardpoint::simulators
