// How much memory this process may use and can still take, read when asked: the host's, and the limits of the control groups that the process
// is in. Header only, for the core and for drivers whose device is the host. A `root` other than "" stands before every path; tests give one.
#pragma once
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <limits>
#include <optional>
#include <string>
#include <vector>

namespace hardpoint::host {

constexpr uint64_t kUnlimited = std::numeric_limits<uint64_t>::max();

inline std::optional<uint64_t> number_in(const std::string &path) {
  std::ifstream file(path);
  uint64_t number;
  if (file >> number) return number;
  return std::nullopt;
}

// The number after `key` in a file of lines "key number ...".
inline std::optional<uint64_t> number_after(const std::string &path, const std::string &key) {
  std::ifstream file(path);
  std::string word;
  while (file >> word) {
    uint64_t number;
    if (word == key && file >> number) return number;
    file.clear();
    file.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return std::nullopt;
}

inline uint64_t meminfo(const std::string &root, const char *key) {
  const auto kibibytes = number_after(root + "/proc/meminfo", key);
  if (kibibytes) return *kibibytes * 1024;
  return static_cast<uint64_t>(::sysconf(_SC_PAGE_SIZE)) * static_cast<uint64_t>(::sysconf(_SC_PHYS_PAGES));
}

// Pages that were freed lately and wait on lists of processors to be used again (Linux 6.7 and later may leave an eighth of the memory
// there). MemAvailable leaves them out, although whoever needs memory gets them.
inline uint64_t freed_lately(const std::string &root) {
  std::ifstream file(root + "/proc/zoneinfo");
  uint64_t pages = 0;
  for (std::string word; file >> word;) {
    uint64_t count;
    if (word == "count:" && file >> count) pages += count;
    file.clear();
    file.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return pages * static_cast<uint64_t>(::sysconf(_SC_PAGE_SIZE));
}

// One control group: a folder, and its files' names in the version of the hierarchy.
struct ControlGroup {
  std::string folder;
  const char *limit;
  const char *usage;
  const char *reclaimable;  // key in memory.stat of page cache that goes when memory is short: what was read from a checkpoint, say

  // Version 1 says no limit by a number, too: the whole pages below 2^63.
  uint64_t limit_bytes() const {
    const uint64_t most = number_in(folder + limit).value_or(kUnlimited);
    return most < kUnlimited / 4 ? most : kUnlimited;
  }
  uint64_t free_bytes() const {
    const uint64_t most = limit_bytes();
    if (most == kUnlimited) return kUnlimited;
    const auto used = number_in(folder + usage);
    if (!used) return kUnlimited;
    const uint64_t cache = number_after(folder + "memory.stat", reclaimable).value_or(0);
    const uint64_t taken = *used - std::min(*used, cache);
    return most - std::min(most, taken);
  }
};

inline ControlGroup group_v1(const std::string &root, const std::string &path) {
  return {root + "/sys/fs/cgroup/memory" + path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"};
}
inline ControlGroup group_v2(const std::string &root, const std::string &path) {
  return {root + "/sys/fs/cgroup" + path, "memory.max", "memory.current", "inactive_file"};
}

// The groups of this process and those above them, each of which has a limit. In a container the path of a group may belong to the host, and
// only the root is there to be read.
inline std::vector<ControlGroup> control_groups(const std::string &root) {
  std::vector<ControlGroup> groups;
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {  // "4:memory:/path" in version 1, "0::/path" in version 2
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    // Version 1 may mount several controllers as one hierarchy: "4:cpuset,memory:/path".
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const bool is_v2 = controllers == ",,";
    if (!is_v2 && controllers.find(",memory,") == std::string::npos) continue;
    const auto group = is_v2 ? group_v2 : group_v1;
    std::string path = line.substr(second + 1);
    for (; path.size() > 1; path.resize(path.rfind('/'))) groups.push_back(group(root, path + "/"));
    groups.push_back(group(root, "/"));
  }
  return groups;
}

// Bytes that this process may use: the host's memory, or the tightest limit of its control groups.
inline uint64_t total_memory(const std::string &root = "") {
  uint64_t total = meminfo(root, "MemTotal:");
  for (const ControlGroup &group : control_groups(root)) total = std::min(total, group.limit_bytes());
  return total;
}

// Bytes that can be taken without swapping, pages freed a moment ago among them, within the limits of the control groups.
inline uint64_t available_memory(const std::string &root = "") {
  uint64_t available = meminfo(root, "MemAvailable:") + freed_lately(root);
  for (const ControlGroup &group : control_groups(root)) available = std::min(available, group.free_bytes());
  return available;
}

}  // namespace hardpoint::host
