// What is put on a stream: a copy or a fill.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/device_memory.hpp"

namespace hardpoint::simulators {

// Which side of a copy is on a device.
enum class Direction { HostToHost, HostToDevice, DeviceToHost, DeviceToDevice };

// One copy or fill.
struct Transfer {
  Direction direction;
  Address target;
  Address source;        // of a copy
  std::size_t size;
  int device;            // that moves the bytes, and needs the access
  bool fills = false;
  std::uint8_t value = 0;
};

}  // namespace hardpoint::simulators
