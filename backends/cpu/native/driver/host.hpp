// Facts about the host, read when asked.
#pragma once
#include <cstdint>
#include <string>

namespace hp::driver {

// Bytes that this process may use: the host's memory, or the tightest limit of its control groups.
uint64_t total_memory();

// Bytes that can be taken without swapping, pages freed a moment ago among them, within the limits of the control groups.
uint64_t available_memory();

std::string processor_name();
std::string kernel_version();

// Cores that this process may run on.
int usable_cores();

// Which limit a call met that ended with ENOMEM, in words.
std::string describe_shortage();

}  // namespace hp::driver
