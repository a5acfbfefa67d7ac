// What the options of hp_open_request say to this driver.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "hardpoint/driver_support.hpp"

namespace hp::driver {

struct Settings {
  struct Fault {
    std::string entry;
    int64_t nth;
    int64_t times;
  };

  uint64_t budget = 0;        // budget=<bytes>: size of the device's memory; 0 = the host's
  std::string streaming;      // streaming=avx512|avx2|sse2|portable: how large memory is copied; the best there is unless given
  bool keep_address = true;   // keep_address=0, for tests: as on a kernel without MREMAP_DONTUNMAP
  std::vector<Fault> faults;  // fail=<entry>:<nth>[:<times>], for tests: see Faults::set

  static Settings from(hardpoint::driver::Options &options);
};

}  // namespace hp::driver
