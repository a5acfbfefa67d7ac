// Plain device memory, host memory, copies and fills of the HIP runtime API.
#include <cstring>

#include "hip/api.hpp"

using namespace hardpoint::simulators;
using namespace hardpoint::simulators::hip;

namespace {

// hipPointerAttribute_t.
struct PointerAttributes {
  int type;
  int device;
  void* device_pointer;
  void* host_pointer;
  int is_managed;
  unsigned allocation_flags;
};
static_assert(sizeof(PointerAttributes) == 32);

enum CopyKind { kHostToHost = 0, kHostToDevice = 1, kDeviceToHost = 2, kDeviceToDevice = 3, kDefault = 4 };

// Make a transfer of a copy; the kind "default" lets the addresses say which side is on a device.
Result describe_copy(const Simulator& machine, void* target, const void* source, std::size_t size, int kind, int device,
                     Transfer* out) {
  Direction direction = Direction::HostToHost;
  const bool to_device = machine.memory.contains(address_of(target));
  const bool from_device = machine.memory.contains(address_of(source));
  if (kind == kHostToDevice || (kind == kDefault && to_device && !from_device)) {
    direction = Direction::HostToDevice;
  } else if (kind == kDeviceToHost || (kind == kDefault && from_device && !to_device)) {
    direction = Direction::DeviceToHost;
  } else if (kind == kDeviceToDevice || (kind == kDefault && from_device && to_device)) {
    direction = Direction::DeviceToDevice;
  } else if (kind != kHostToHost && kind != kDefault) {
    return Result::InvalidDirection;
  }
  *out = {direction, address_of(target), address_of(source), size, device};
  return Result::Ok;
}

int copy_and_wait(CallSite& site, void* target, const void* source, std::size_t size, int kind) {
  return hip_call(site, [&](Simulator& machine, int device) {
    Transfer transfer{};
    const Result described = describe_copy(machine, target, source, size, kind, device, &transfer);
    return described == Result::Ok ? machine.streams.run(transfer) : described;
  });
}

int copy_on_stream(CallSite& site, void* target, const void* source, std::size_t size, int kind, StreamId stream) {
  return hip_call(site, [&](Simulator& machine, int device) {
    Transfer transfer{};
    const Result described = describe_copy(machine, target, source, size, kind, device, &transfer);
    return described == Result::Ok ? machine.streams.submit(stream, transfer) : described;
  });
}

Transfer fill(void* target, int value, std::size_t size, int device) {
  return {Direction::HostToDevice, address_of(target), 0, size, device, true, static_cast<std::uint8_t>(value)};
}

}  // namespace

HIP_CALL(hipMemGetInfo)(std::size_t* free, std::size_t* total) {
  return hip_call(site_of_hipMemGetInfo, [&](Simulator& machine, int device) {
    if (!free || !total) return Result::NullArgument;
    *free = machine.memory.reported_free(device);
    *total = machine.settings.capacity;
    return Result::Ok;
  });
}

HIP_CALL(hipMalloc)(void** pointer, std::size_t size) {
  return hip_call(site_of_hipMalloc, [&](Simulator& machine, int device) {
    if (!pointer) return Result::NullArgument;
    *pointer = nullptr;
    if (!size) return Result::Ok;
    Address start = 0;
    const Result result = machine.memory.allocate(device, size, &start);
    *pointer = reinterpret_cast<void*>(start);
    return result;
  });
}

HIP_CALL(hipFree)(void* pointer) {
  return hip_call(site_of_hipFree, [&](Simulator& machine, int device) {
    if (!pointer) return Result::Ok;
    const Result before = machine.streams.synchronize_device(device);
    const Result result = machine.memory.free_allocation(address_of(pointer));
    return result == Result::Ok ? before : result;
  });
}

HIP_CALL(hipHostMalloc)(void** pointer, std::size_t size, unsigned) {
  return hip_call(site_of_hipHostMalloc, [&](Simulator& machine, int) { return machine.host.allocate(size, pointer); });
}

HIP_CALL(hipHostFree)(void* pointer) {
  return hip_call(site_of_hipHostFree, [&](Simulator& machine, int) {
    return pointer ? machine.host.free(pointer) : Result::Ok;
  });
}

HIP_CALL(hipHostRegister)(void* pointer, std::size_t size, unsigned flags) {
  return hip_call(site_of_hipHostRegister, [&](Simulator& machine, int) {
    constexpr unsigned known = 0xf;  // Portable, Mapped, IoMemory, ReadOnly
    if (flags & ~known) return machine.violations.note(Result::InvalidValue, "unknown flags");
    return machine.host.register_range(pointer, size);
  });
}

HIP_CALL(hipHostUnregister)(void* pointer) {
  return hip_call(site_of_hipHostUnregister,
                  [&](Simulator& machine, int) { return machine.host.unregister(pointer); });
}

HIP_CALL(hipHostGetDevicePointer)(void** device_pointer, void* pointer, unsigned flags) {
  return hip_call(site_of_hipHostGetDevicePointer, [&](Simulator& machine, int) {
    if (!device_pointer || flags || !machine.host.pinned(address_of(pointer), 1)) return Result::InvalidValue;
    *device_pointer = pointer;
    return Result::Ok;
  });
}

HIP_CALL(hipMemcpy)(void* target, const void* source, std::size_t size, int kind) {
  return copy_and_wait(site_of_hipMemcpy, target, source, size, kind);
}

HIP_CALL(hipMemcpyHtoD)(void* target, const void* source, std::size_t size) {
  return copy_and_wait(site_of_hipMemcpyHtoD, target, source, size, kHostToDevice);
}

HIP_CALL(hipMemcpyDtoH)(void* target, void* source, std::size_t size) {
  return copy_and_wait(site_of_hipMemcpyDtoH, target, source, size, kDeviceToHost);
}

HIP_CALL(hipMemcpyDtoD)(void* target, void* source, std::size_t size) {
  return copy_and_wait(site_of_hipMemcpyDtoD, target, source, size, kDeviceToDevice);
}

HIP_CALL(hipMemcpyAsync)(void* target, const void* source, std::size_t size, int kind, StreamId stream) {
  return copy_on_stream(site_of_hipMemcpyAsync, target, source, size, kind, stream);
}

HIP_CALL(hipMemcpyHtoDAsync)(void* target, const void* source, std::size_t size, StreamId stream) {
  return copy_on_stream(site_of_hipMemcpyHtoDAsync, target, source, size, kHostToDevice, stream);
}

HIP_CALL(hipMemcpyDtoHAsync)(void* target, void* source, std::size_t size, StreamId stream) {
  return copy_on_stream(site_of_hipMemcpyDtoHAsync, target, source, size, kDeviceToHost, stream);
}

HIP_CALL(hipMemcpyDtoDAsync)(void* target, void* source, std::size_t size, StreamId stream) {
  return copy_on_stream(site_of_hipMemcpyDtoDAsync, target, source, size, kDeviceToDevice, stream);
}

HIP_CALL(hipMemset)(void* target, int value, std::size_t size) {
  return hip_call(site_of_hipMemset, [&](Simulator& machine, int device) {
    return machine.streams.run(fill(target, value, size, device));
  });
}

HIP_CALL(hipMemsetAsync)(void* target, int value, std::size_t size, StreamId stream) {
  return hip_call(site_of_hipMemsetAsync, [&](Simulator& machine, int device) {
    return machine.streams.submit(stream, fill(target, value, size, device));
  });
}

HIP_CALL(hipPointerGetAttributes)(PointerAttributes* attributes, const void* pointer) {
  return hip_call(site_of_hipPointerGetAttributes, [&](Simulator& machine, int) {
    const Address address = address_of(pointer);
    const bool device = machine.memory.contains(address), host = machine.host.pinned(address, 1);
    if (!attributes || (!device && !host)) return Result::InvalidValue;
    std::memset(attributes, 0, sizeof *attributes);
    attributes->type = device ? kMemoryTypeDevice : kMemoryTypeHost;
    attributes->device = device ? machine.memory.mapped_device(address).value_or(0) : 0;
    attributes->device_pointer = const_cast<void*>(pointer);
    attributes->host_pointer = device ? nullptr : const_cast<void*>(pointer);
    return Result::Ok;
  });
}
