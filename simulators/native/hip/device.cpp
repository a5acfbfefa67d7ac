// Initialisation and devices of the HIP runtime API.
#include <cstdio>
#include <cstring>

#include "hip/api.hpp"

namespace hardpoint::simulators::hip {

namespace {

constexpr int kVersion = 70200000;  // HIP 7.2.0

thread_local int thread_device = 0;

// A call about a device that must exist; `body` takes the simulator.
template <class Body>
int device_call(CallSite& site, int device, Body&& body) noexcept {
  return hip_call(site, [&](Simulator& machine, int) {
    return machine.device_exists(device) ? body(machine) : Result::InvalidDevice;
  });
}

// Values of hipDeviceAttribute_t; what is not listed is 0.
int attribute_value(const Settings& settings, int attribute) {
  switch (attribute) {
    case 2:  // AsyncEngineCount
      return 2;
    case 8:   // ConcurrentKernels
    case 85:  // UnifiedAddressing
    case 90:  // HostRegisterSupported
      return 1;
    case 16:  // Integrated
      return settings.unified_memory != 0;
    case 23:  // ComputeCapabilityMajor
      return 9;
    case 61:  // ComputeCapabilityMinor
      return 4;
    case 63:  // MultiprocessorCount
      return 304;
    case 87:  // WarpSize
      return 64;
    case 89:  // VirtualMemoryManagementSupported
      return settings.virtual_memory != 0;
    default:
      return 0;
  }
}

}  // namespace

int current_device() { return thread_device; }

void set_current_device(int device) { thread_device = device; }

}  // namespace hardpoint::simulators::hip

using namespace hardpoint::simulators;
using namespace hardpoint::simulators::hip;

HIP_CALL(hipInit)(unsigned flags) {
  return hip_call(site_of_hipInit, [&](Simulator& machine, int) {
    return flags ? machine.violations.note(Result::InvalidValue, "flags must be 0") : Result::Ok;
  });
}

HIP_CALL(hipDriverGetVersion)(int* version) {
  return hip_call(site_of_hipDriverGetVersion, [&](Simulator&, int) {
    if (!version) return Result::NullArgument;
    *version = kVersion;
    return Result::Ok;
  });
}

HIP_CALL(hipRuntimeGetVersion)(int* version) {
  return hip_call(site_of_hipRuntimeGetVersion, [&](Simulator&, int) {
    if (!version) return Result::NullArgument;
    *version = kVersion;
    return Result::Ok;
  });
}

HIP_CALL(hipGetDeviceCount)(int* count) {
  if (count) *count = 0;
  return hip_call(site_of_hipGetDeviceCount, [&](Simulator& machine, int) {
    if (!count) return Result::NullArgument;
    *count = static_cast<int>(machine.settings.devices);
    return Result::Ok;
  });
}

HIP_CALL(hipSetDevice)(int device) {
  return device_call(site_of_hipSetDevice, device, [&](Simulator&) {
    set_current_device(device);
    return Result::Ok;
  });
}

HIP_CALL(hipGetDevice)(int* device) {
  return hip_call(site_of_hipGetDevice, [&](Simulator&, int current) {
    if (!device) return Result::NullArgument;
    *device = current;
    return Result::Ok;
  });
}

HIP_CALL(hipDeviceGet)(int* device, int ordinal) {
  return device_call(site_of_hipDeviceGet, ordinal, [&](Simulator&) {
    if (!device) return Result::NullArgument;
    *device = ordinal;
    return Result::Ok;
  });
}

HIP_CALL(hipDeviceGetName)(char* name, int length, int device) {
  return device_call(site_of_hipDeviceGetName, device, [&](Simulator&) {
    if (!name || length < 1) return Result::NullArgument;
    std::snprintf(name, static_cast<std::size_t>(length), "Simulated ROCm device");
    return Result::Ok;
  });
}

HIP_CALL(hipDeviceGetUuid)(char* uuid, int device) {
  return device_call(site_of_hipDeviceGetUuid, device, [&](Simulator&) {
    if (!uuid) return Result::NullArgument;
    std::memcpy(uuid, "hardpoint-sim-", 14);
    uuid[14] = 0;
    uuid[15] = static_cast<char>(device);
    return Result::Ok;
  });
}

HIP_CALL(hipDeviceTotalMem)(std::size_t* bytes, int device) {
  return device_call(site_of_hipDeviceTotalMem, device, [&](Simulator& machine) {
    if (!bytes) return Result::NullArgument;
    *bytes = machine.settings.capacity;
    return Result::Ok;
  });
}

HIP_CALL(hipDeviceGetPCIBusId)(char* bus, int length, int device) {
  return device_call(site_of_hipDeviceGetPCIBusId, device, [&](Simulator&) {
    if (!bus || length < 13) return Result::NullArgument;
    std::snprintf(bus, static_cast<std::size_t>(length), "0000:%02x:00.0", device + 1);
    return Result::Ok;
  });
}

HIP_CALL(hipDeviceGetAttribute)(int* value, int attribute, int device) {
  return device_call(site_of_hipDeviceGetAttribute, device, [&](Simulator& machine) {
    if (!value || attribute < 0) return Result::InvalidValue;
    *value = attribute_value(machine.settings, attribute);
    return Result::Ok;
  });
}

HIP_CALL(hipDeviceCanAccessPeer)(int* can_access, int device, int peer) {
  return device_call(site_of_hipDeviceCanAccessPeer, device, [&](Simulator& machine) {
    if (!can_access) return Result::NullArgument;
    if (!machine.device_exists(peer)) return Result::InvalidDevice;
    *can_access = 0;
    return Result::Ok;
  });
}

HIP_CALL(hipDeviceSynchronize)() {
  return hip_call(site_of_hipDeviceSynchronize,
                  [](Simulator& machine, int device) { return machine.streams.synchronize_device(device); });
}

HIP_CALL(hipDeviceReset)() {
  return hip_call(site_of_hipDeviceReset, [](Simulator& machine, int device) {
    machine.streams.drop_device(device);
    machine.memory.free_allocations(device);
    return Result::Ok;
  });
}
