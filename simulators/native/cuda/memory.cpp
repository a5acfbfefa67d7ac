// Plain device memory, host memory, copies and fills of the CUDA driver API.
#include "cuda/api.hpp"

using namespace hardpoint::simulators;
using namespace hardpoint::simulators::cuda;

namespace {

Transfer copy(Direction direction, Address target, Address source, std::size_t size, int device) {
  return {direction, target, source, size, device};
}

Transfer fill(Address target, unsigned char value, std::size_t size, int device) {
  return {Direction::HostToDevice, target, 0, size, device, true, value};
}

// With unified addressing the addresses say which side is on a device.
Direction direction_of(const Simulator& machine, Address target, Address source) {
  if (machine.memory.contains(target)) {
    return machine.memory.contains(source) ? Direction::DeviceToDevice : Direction::HostToDevice;
  }
  return machine.memory.contains(source) ? Direction::DeviceToHost : Direction::HostToHost;
}

Address address_of(const void* pointer) { return reinterpret_cast<Address>(pointer); }

template <class Value>
Result answer(void* data, Value value) {
  *static_cast<Value*>(data) = value;
  return Result::Ok;
}

}  // namespace

CUDA_CALL(cuMemGetInfo_v2)(std::size_t* free, std::size_t* total) {
  return context_call(site_of_cuMemGetInfo_v2, [&](Simulator& machine, int device) {
    if (!free || !total) return Result::InvalidValue;
    *free = machine.memory.reported_free(device);
    *total = machine.settings.capacity;
    return Result::Ok;
  });
}

CUDA_CALL(cuMemAlloc_v2)(DevicePointer* address, std::size_t size) {
  return context_call(site_of_cuMemAlloc_v2, [&](Simulator& machine, int device) {
    if (!address) return Result::InvalidValue;
    Address start = 0;
    Result result = machine.captures.check_unsafe();
    if (result == Result::Ok) result = machine.memory.allocate(device, size, &start);
    if (result == Result::Ok) *address = start;
    return result;
  });
}

CUDA_CALL(cuMemFree_v2)(DevicePointer address) {
  return context_call(site_of_cuMemFree_v2, [&](Simulator& machine, int device) {
    if (!address) return Result::Ok;
    const Result allowed = machine.captures.check_unsafe();
    if (allowed != Result::Ok) return allowed;
    const Result before = machine.streams.finish_device(device);
    const Result result = machine.memory.free_allocation(address);
    return result == Result::Ok ? before : result;
  });
}

CUDA_CALL(cuMemHostAlloc)(void** pointer, std::size_t size, unsigned) {
  return context_call(site_of_cuMemHostAlloc,
                      [&](Simulator& machine, int) { return machine.host.allocate(size, pointer); });
}

CUDA_CALL(cuMemFreeHost)(void* pointer) {
  return context_call(site_of_cuMemFreeHost, [&](Simulator& machine, int) { return machine.host.free(pointer); });
}

CUDA_CALL(cuMemHostRegister_v2)(void* pointer, std::size_t size, unsigned flags) {
  return context_call(site_of_cuMemHostRegister_v2, [&](Simulator& machine, int) {
    constexpr unsigned known = 0xf;  // PORTABLE, DEVICEMAP, IOMEMORY, READ_ONLY
    if (flags & ~known) return machine.violations.note(Result::InvalidValue, "unknown flags");
    return machine.host.register_range(pointer, size);
  });
}

CUDA_CALL(cuMemHostUnregister)(void* pointer) {
  return context_call(site_of_cuMemHostUnregister,
                      [&](Simulator& machine, int) { return machine.host.unregister(pointer); });
}

CUDA_CALL(cuMemHostGetDevicePointer_v2)(DevicePointer* address, void* pointer, unsigned flags) {
  return context_call(site_of_cuMemHostGetDevicePointer_v2, [&](Simulator& machine, int) {
    if (!address || flags || !machine.host.pinned(address_of(pointer), 1)) return Result::InvalidValue;
    *address = address_of(pointer);
    return Result::Ok;
  });
}

CUDA_CALL(cuMemcpy)(DevicePointer target, DevicePointer source, std::size_t size) {
  return context_call(site_of_cuMemcpy, [&](Simulator& machine, int device) {
    return machine.streams.run(copy(direction_of(machine, target, source), target, source, size, device));
  });
}

CUDA_CALL(cuMemcpyAsync)(DevicePointer target, DevicePointer source, std::size_t size, StreamId stream) {
  return context_call(site_of_cuMemcpyAsync, [&](Simulator& machine, int device) {
    return machine.streams.submit(stream, copy(direction_of(machine, target, source), target, source, size, device));
  });
}

CUDA_CALL(cuMemcpyHtoD_v2)(DevicePointer target, const void* source, std::size_t size) {
  return context_call(site_of_cuMemcpyHtoD_v2, [&](Simulator& machine, int device) {
    return machine.streams.run(copy(Direction::HostToDevice, target, address_of(source), size, device));
  });
}

CUDA_CALL(cuMemcpyDtoH_v2)(void* target, DevicePointer source, std::size_t size) {
  return context_call(site_of_cuMemcpyDtoH_v2, [&](Simulator& machine, int device) {
    return machine.streams.run(copy(Direction::DeviceToHost, address_of(target), source, size, device));
  });
}

CUDA_CALL(cuMemcpyDtoD_v2)(DevicePointer target, DevicePointer source, std::size_t size) {
  return context_call(site_of_cuMemcpyDtoD_v2, [&](Simulator& machine, int device) {
    return machine.streams.run(copy(Direction::DeviceToDevice, target, source, size, device));
  });
}

CUDA_CALL(cuMemcpyHtoDAsync_v2)(DevicePointer target, const void* source, std::size_t size, StreamId stream) {
  return context_call(site_of_cuMemcpyHtoDAsync_v2, [&](Simulator& machine, int device) {
    return machine.streams.submit(stream, copy(Direction::HostToDevice, target, address_of(source), size, device));
  });
}

CUDA_CALL(cuMemcpyDtoHAsync_v2)(void* target, DevicePointer source, std::size_t size, StreamId stream) {
  return context_call(site_of_cuMemcpyDtoHAsync_v2, [&](Simulator& machine, int device) {
    return machine.streams.submit(stream, copy(Direction::DeviceToHost, address_of(target), source, size, device));
  });
}

CUDA_CALL(cuMemcpyDtoDAsync_v2)(DevicePointer target, DevicePointer source, std::size_t size, StreamId stream) {
  return context_call(site_of_cuMemcpyDtoDAsync_v2, [&](Simulator& machine, int device) {
    return machine.streams.submit(stream, copy(Direction::DeviceToDevice, target, source, size, device));
  });
}

CUDA_CALL(cuMemsetD8_v2)(DevicePointer target, unsigned char value, std::size_t size) {
  return context_call(site_of_cuMemsetD8_v2, [&](Simulator& machine, int device) {
    return machine.streams.run(fill(target, value, size, device));
  });
}

CUDA_CALL(cuMemsetD8Async)(DevicePointer target, unsigned char value, std::size_t size, StreamId stream) {
  return context_call(site_of_cuMemsetD8Async, [&](Simulator& machine, int device) {
    return machine.streams.submit(stream, fill(target, value, size, device));
  });
}

CUDA_CALL(cuPointerGetAttribute)(void* data, int attribute, DevicePointer address) {
  return driver_call(site_of_cuPointerGetAttribute, [&](Simulator& machine) {
    const bool device = machine.memory.contains(address), host = machine.host.pinned(address, 1);
    if (!data || (!device && !host)) return Result::InvalidValue;
    Address start = 0;
    std::size_t size = 0;
    switch (attribute) {
      case 2:  // MEMORY_TYPE
        return answer<unsigned>(data, device ? kMemoryTypeDevice : kMemoryTypeHost);
      case 3:  // DEVICE_POINTER
        return answer<DevicePointer>(data, address);
      case 4:  // HOST_POINTER
        if (device) return Result::InvalidValue;
        return answer<DevicePointer>(data, address);
      case 8:  // IS_MANAGED
        return answer<unsigned char>(data, 0);
      case 9:  // DEVICE_ORDINAL
        return answer<int>(data, machine.memory.mapped_device(address).value_or(0));
      case 11:  // RANGE_START_ADDR
        machine.memory.reservation_range(address, &start, &size);
        return answer<DevicePointer>(data, start);
      case 12:  // RANGE_SIZE
        machine.memory.reservation_range(address, &start, &size);
        return answer<std::size_t>(data, size);
      case 13:  // MAPPED
        return answer<unsigned char>(data, host || machine.memory.mapped_device(address).has_value());
      case 18:  // MAPPING_SIZE
        machine.memory.mapping_range(address, &start, &size);
        return answer<std::size_t>(data, size);
      case 19:  // MAPPING_BASE_ADDR
        machine.memory.mapping_range(address, &start, &size);
        return answer<DevicePointer>(data, start);
      default:
        return Result::NotSupported;
    }
  });
}
