#include "host.hpp"

#include <sched.h>
#include <sys/resource.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <fstream>

namespace hp::driver {
namespace {

namespace host = hardpoint::host;

uint64_t count_lines(const char* path) {
  std::ifstream file(path);
  uint64_t lines = 0;
  for (std::string line; std::getline(file, line);) ++lines;
  return lines;
}

}  // namespace

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
  const uint64_t most_areas = host::number_in("/proc/sys/vm/max_map_count").value_or(host::kUnlimited);
  // A move may need a few areas besides its own.
  if (areas + 8 >= most_areas)
    return "this process has " + std::to_string(areas) + " memory areas and may have " + std::to_string(most_areas) +
           " (vm.max_map_count)";
  rlimit limit;
  if (::getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
    return "the address space of this process is limited to " + std::to_string(limit.rlim_cur) + " bytes (RLIMIT_AS)";
  if (host::number_in("/proc/sys/vm/overcommit_memory").value_or(0) == 2)
    return "the host does not overcommit memory (vm.overcommit_memory is 2) and has promised all it has";
  return std::to_string(available_memory()) + " bytes of memory are available";
}

}  // namespace hp::driver
