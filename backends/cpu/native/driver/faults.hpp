// Counts the calls of each entry, and makes chosen ones fail: for tests, which have to see what the core does after any failure.
#pragma once
#include <cstdint>
#include <map>
#include <mutex>
#include <string>

namespace hp::driver {

class Faults {
 public:
  // The nth call from here on (1 = the next), and the `times` - 1 after it, fail; negative `times` = all after it. Takes the place of
  // what was set for the entry before. False when there is no such entry.
  bool set(const std::string& entry, int64_t nth, int64_t times);
  // Calls so far, failed ones included; -1 when there is no such entry.
  int64_t calls(const std::string& entry) const;

  // Counts a call; throws when it is to fail. `entry` is one of the names of hp_driver's members.
  void enter(const char* entry);

 private:
  struct Entry {
    int64_t calls = 0;
    int64_t skips = 0;
    int64_t times = 0;
  };
  static std::map<std::string, Entry, std::less<>> all_entries();

  mutable std::mutex mutex_;  // entries_, whose keys never change
  std::map<std::string, Entry, std::less<>> entries_ = all_entries();
};

}  // namespace hp::driver
