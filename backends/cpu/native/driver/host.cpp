#include "host.hpp"

#include <sched.h>
#include <sys/resource.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>
#include <vector>

namespace hp::driver {
namespace {

constexpr uint64_t kUnlimited = std::numeric_limits<uint64_t>::max();

std::optional<uint64_t> number_in(const std::string& path) {
  std::ifstream file(path);
  uint64_t number;
  if (file >> number) return number;
  return std::nullopt;
}

// The number after `key` in a file of lines "key number ...".
std::optional<uint64_t> number_after(const std::string& path, const std::string& key) {
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

uint64_t meminfo(const char* key) {
  const auto kibibytes = number_after("/proc/meminfo", key);
  if (kibibytes) return *kibibytes * 1024;
  return static_cast<uint64_t>(::sysconf(_SC_PAGE_SIZE)) * static_cast<uint64_t>(::sysconf(_SC_PHYS_PAGES));
}

// Pages that were freed lately and wait on lists of processors to be used again (Linux 6.7 and later may leave an eighth of the memory
// there). MemAvailable leaves them out, although whoever needs memory gets them.
uint64_t freed_lately() {
  std::ifstream file("/proc/zoneinfo");
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
struct Group {
  std::string folder;
  const char* limit;
  const char* usage;
  const char* reclaimable;  // key in memory.stat of page cache that goes when memory is short

  uint64_t limit_bytes() const { return number_in(folder + limit).value_or(kUnlimited); }
  uint64_t free_bytes() const {
    const uint64_t most = limit_bytes();
    const auto used = number_in(folder + usage);
    if (most == kUnlimited || !used) return kUnlimited;
    const uint64_t cache = number_after(folder + "memory.stat", reclaimable).value_or(0);
    const uint64_t taken = *used - std::min(*used, cache);
    return most - std::min(most, taken);
  }
};

Group group_v1(const std::string& path) {
  return {"/sys/fs/cgroup/memory" + path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"};
}
Group group_v2(const std::string& path) { return {"/sys/fs/cgroup" + path, "memory.max", "memory.current", "inactive_file"}; }

// Adds the group of a path such as "/a/b" and those above it: each has a limit. In a container the path may belong to the host, and only
// the root is there to be read.
void add_with_parents(std::vector<Group>& groups, std::string path, Group (*group)(const std::string&)) {
  while (path.size() > 1) {
    groups.push_back(group(path + "/"));
    path.resize(path.rfind('/'));
  }
  groups.push_back(group("/"));
}

std::vector<Group> memory_groups() {
  std::vector<Group> groups;
  std::ifstream file("/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {  // "4:memory:/path" in version 1, "0::/path" in version 2
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (controllers == "memory") add_with_parents(groups, line.substr(second + 1), group_v1);
    if (controllers.empty()) add_with_parents(groups, line.substr(second + 1), group_v2);
  }
  return groups;
}

uint64_t count_lines(const char* path) {
  std::ifstream file(path);
  uint64_t lines = 0;
  for (std::string line; std::getline(file, line);) ++lines;
  return lines;
}

}  // namespace

uint64_t total_memory() {
  uint64_t total = meminfo("MemTotal:");
  for (const Group& group : memory_groups()) total = std::min(total, group.limit_bytes());
  return total;
}

uint64_t available_memory() {
  uint64_t available = meminfo("MemAvailable:") + freed_lately();
  for (const Group& group : memory_groups()) available = std::min(available, group.free_bytes());
  return available;
}

std::string processor_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(':');
    if (line.rfind("model name", 0) == 0 && colon + 2 < line.size()) return line.substr(colon + 2);
  }
  utsname names;
  return ::uname(&names) == 0 ? names.machine : "CPU";
}

std::string kernel_version() {
  utsname names;
  return ::uname(&names) == 0 ? std::string(names.sysname) + " " + names.release : "unknown";
}

int usable_cores() {
  cpu_set_t cores;
  if (::sched_getaffinity(0, sizeof cores, &cores) == 0) return CPU_COUNT(&cores);
  return static_cast<int>(std::max(1L, ::sysconf(_SC_NPROCESSORS_ONLN)));
}

std::string describe_shortage() {
  const uint64_t areas = count_lines("/proc/self/maps");
  const uint64_t most_areas = number_in("/proc/sys/vm/max_map_count").value_or(kUnlimited);
  // A move may need a few areas besides its own.
  if (areas + 8 >= most_areas)
    return "this process has " + std::to_string(areas) + " memory areas and may have " + std::to_string(most_areas) +
           " (vm.max_map_count)";
  rlimit limit;
  if (::getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
    return "the address space of this process is limited to " + std::to_string(limit.rlim_cur) + " bytes (RLIMIT_AS)";
  if (number_in("/proc/sys/vm/overcommit_memory").value_or(0) == 2)
    return "the host does not overcommit memory (vm.overcommit_memory is 2) and has promised all it has";
  return std::to_string(available_memory()) + " bytes of memory are available";
}

}  // namespace hp::driver
