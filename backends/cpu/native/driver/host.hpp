// Facts about the host, read when asked.
#pragma once
#include <string>

#include "hardpoint/host_memory.hpp"

namespace hp::driver {

using hardpoint::host::available_memory;
using hardpoint::host::total_memory;

std::string processor_name();
std::string kernel_version();

// Cores that this process may run on.
int usable_cores();

// Which limit a call met that ended with ENOMEM, in words.
std::string describe_shortage();

}  // namespace hp::driver
