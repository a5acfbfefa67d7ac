// Plain device memory, host memory, copies and fills of the AscendCL runtime API.
#include <cstring>

#include "acl/api.hpp"

using namespace hardpoint::simulators;
using namespace hardpoint::simulators::acl;

namespace {

// aclrtPtrAttributes.
struct PointerAttributes {
  MemLocation location;
  std::uint32_t page_size;
  std::uint32_t reserved[4];
};

constexpr int kLocationUnregistered = 2;

// aclrtMemcpyKind.
enum CopyKind { kHostToHost = 0, kHostToDevice, kDeviceToHost, kDeviceToDevice, kDefault, kHostToBuffer, kInner, kInter };

bool describe_direction(const Simulator& machine, Address target, Address source, int kind, Direction* out) {
  const bool to_device = machine.memory.contains(target), from_device = machine.memory.contains(source);
  switch (kind) {
    case kHostToHost:
      *out = Direction::HostToHost;
      return true;
    case kHostToDevice:
    case kHostToBuffer:
      *out = Direction::HostToDevice;
      return true;
    case kDeviceToHost:
      *out = Direction::DeviceToHost;
      return true;
    case kDeviceToDevice:
    case kInner:
    case kInter:
      *out = Direction::DeviceToDevice;
      return true;
    case kDefault:
      *out = to_device ? (from_device ? Direction::DeviceToDevice : Direction::HostToDevice)
                       : (from_device ? Direction::DeviceToHost : Direction::HostToHost);
      return true;
    default:
      return false;
  }
}

// `capacity` says how much fits at the target: a size, and not an address.
Result check_capacity(Simulator& machine, Address target, std::size_t capacity, std::size_t size) {
  if (size > capacity) return machine.violations.note(Result::InvalidValue, "more bytes than fit at the target");
  Address start = 0;
  std::size_t length = 0;
  machine.memory.reservation_range(target, &start, &length);
  if (length && capacity > start + length - target) {
    return machine.violations.note(Result::InvalidValue, "the target's size goes beyond its reservation");
  }
  return Result::Ok;
}

Result describe_copy(Simulator& machine, void* target, std::size_t capacity, const void* source, std::size_t size,
                     int kind, int device, Transfer* out) {
  Direction direction{};
  if (!describe_direction(machine, address_of(target), address_of(source), kind, &direction)) {
    return machine.violations.note(Result::InvalidDirection, "unknown kind of copy");
  }
  *out = {direction, address_of(target), address_of(source), size, device};
  return check_capacity(machine, address_of(target), capacity, size);
}

Transfer fill(void* target, std::int32_t value, std::size_t size, int device) {
  return {Direction::HostToDevice, address_of(target), 0, size, device, true, static_cast<std::uint8_t>(value)};
}

int allocate(CallSite& site, void** pointer, std::size_t size) {
  return context_call(site, [&](Simulator& machine, int device) {
    if (!pointer || !size) return machine.violations.note(Result::NullArgument, "no result pointer, or size 0");
    Address start = 0;
    const Result result = machine.memory.allocate(device, size, &start);
    if (result == Result::Ok) *pointer = reinterpret_cast<void*>(start);
    return result;
  });
}

}  // namespace

Result hardpoint::simulators::acl::register_host(Simulator& machine, void* pointer, std::size_t size, bool pins) {
  if (machine.settings.old_kernel && !machine.host.pinned(address_of(pointer), size)) {
    return machine.violations.note(Result::InvalidValue, "with kernels up to 5.10 only memory of aclrtMallocHost is registered");
  }
  return machine.host.register_range(pointer, size, pins);
}

ACL_CALL(aclrtGetMemInfo)(int, std::size_t* free, std::size_t* total) {
  return context_call(site_of_aclrtGetMemInfo, [&](Simulator& machine, int device) {
    if (!free || !total) return Result::NullArgument;
    *free = machine.memory.reported_free(device);
    *total = machine.settings.capacity;
    return Result::Ok;
  });
}

ACL_CALL(aclrtMalloc)(void** pointer, std::size_t size, int) { return allocate(site_of_aclrtMalloc, pointer, size); }

ACL_CALL(aclrtMallocAlign32)(void** pointer, std::size_t size, int) {
  return allocate(site_of_aclrtMallocAlign32, pointer, size);
}

ACL_CALL(aclrtFree)(void* pointer) {
  return context_call(site_of_aclrtFree, [&](Simulator& machine, int device) {
    const Result before = machine.streams.synchronize_device(device);
    const Result result = machine.memory.free_allocation(address_of(pointer));
    return result == Result::Ok ? before : result;
  });
}

ACL_CALL(aclrtMallocHost)(void** pointer, std::size_t size) {
  return context_call(site_of_aclrtMallocHost,
                      [&](Simulator& machine, int) { return machine.host.allocate(size, pointer); });
}

ACL_CALL(aclrtFreeHost)(void* pointer) {
  return context_call(site_of_aclrtFreeHost, [&](Simulator& machine, int) { return machine.host.free(pointer); });
}

ACL_CALL(aclrtHostRegister)(void* pointer, std::uint64_t size, int, void** device_pointer) {
  return context_call(site_of_aclrtHostRegister, [&](Simulator& machine, int) {
    if (!device_pointer) return machine.violations.note(Result::NullArgument, "no result pointer");
    const Result result = register_host(machine, pointer, size, false);
    if (result == Result::Ok) *device_pointer = pointer;
    return result;
  });
}

ACL_CALL(aclrtHostUnregister)(void* pointer) {
  return context_call(site_of_aclrtHostUnregister,
                      [&](Simulator& machine, int) { return machine.host.unregister(pointer); });
}

ACL_CALL(aclrtMemcpy)(void* target, std::size_t capacity, const void* source, std::size_t size, int kind) {
  return context_call(site_of_aclrtMemcpy, [&](Simulator& machine, int device) {
    Transfer transfer{};
    const Result described = describe_copy(machine, target, capacity, source, size, kind, device, &transfer);
    if (described != Result::Ok) return described;
    const bool both_mapped = transfer.direction == Direction::DeviceToDevice &&
                             !machine.memory.in_allocation(transfer.target) &&
                             !machine.memory.in_allocation(transfer.source);
    if (both_mapped) {
      return machine.violations.note(Result::NotSupported, "between mapped addresses only aclrtMemcpyAsync copies");
    }
    return machine.streams.run(transfer);
  });
}

ACL_CALL(aclrtMemcpyAsync)(void* target, std::size_t capacity, const void* source, std::size_t size, int kind,
                           StreamId stream) {
  return context_call(site_of_aclrtMemcpyAsync, [&](Simulator& machine, int device) {
    Transfer transfer{};
    const Result described = describe_copy(machine, target, capacity, source, size, kind, device, &transfer);
    return described == Result::Ok ? machine.streams.submit(stream, transfer) : described;
  });
}

ACL_CALL(aclrtMemset)(void* target, std::size_t capacity, std::int32_t value, std::size_t size) {
  return context_call(site_of_aclrtMemset, [&](Simulator& machine, int device) {
    const Result fits = check_capacity(machine, address_of(target), capacity, size);
    return fits == Result::Ok ? machine.streams.run(fill(target, value, size, device)) : fits;
  });
}

ACL_CALL(aclrtMemsetAsync)(void* target, std::size_t capacity, std::int32_t value, std::size_t size, StreamId stream) {
  return context_call(site_of_aclrtMemsetAsync, [&](Simulator& machine, int device) {
    const Result fits = check_capacity(machine, address_of(target), capacity, size);
    return fits == Result::Ok ? machine.streams.submit(stream, fill(target, value, size, device)) : fits;
  });
}

ACL_CALL(aclrtPointerGetAttributes)(const void* pointer, PointerAttributes* attributes) {
  return acl_call(site_of_aclrtPointerGetAttributes, [&](Simulator& machine) {
    if (!attributes) return Result::NullArgument;
    std::memset(attributes, 0, sizeof *attributes);
    const Address address = address_of(pointer);
    const bool host = machine.host.pinned(address, 1);
    attributes->location.type = host ? kLocationHost : kLocationUnregistered;
    if (machine.memory.contains(address)) {
      const int device = machine.memory.mapped_device(address).value_or(0);
      attributes->location = {static_cast<std::uint32_t>(device), kLocationDevice};
      attributes->page_size = static_cast<std::uint32_t>(machine.settings.granularity);
    }
    return Result::Ok;
  });
}
