// Virtual memory management of the CUDA driver API.
#include "cuda/api.hpp"

using namespace hardpoint::simulators;
using namespace hardpoint::simulators::cuda;

namespace {

constexpr int kGranularityMinimum = 0, kGranularityRecommended = 1;

// A call of the group; `body` takes the simulator and the current device, -1 where the rule that demands one is off. cuda.h lists no
// INVALID_CONTEXT for these calls, but an allocator that does not care for the right device's context breaks at its copies.
template <class Body>
int virtual_memory_call(CallSite& site, Body&& body) noexcept {
  return driver_call(site, [&](Simulator& machine) {
    if (!machine.settings.virtual_memory) return Result::NotSupported;
    int device = -1;
    if (machine.settings.context_rule) {
      const Result found = current_device(machine, &device);
      if (found != Result::Ok) return found;
    }
    return body(machine, device);
  });
}

// A call of the group that concerns address space or handles only, which belong to no context.
template <class Body>
int contextless_call(CallSite& site, Body&& body) noexcept {
  return driver_call(site, [&](Simulator& machine) {
    return machine.settings.virtual_memory ? body(machine) : Result::NotSupported;
  });
}

Result right_context(Simulator& machine, int current, int owner) {
  if (!machine.settings.context_rule || current == owner) return Result::Ok;
  return machine.violations.note(Result::InvalidContext, "the current context is of another device than the memory");
}

Result check_properties(Simulator& machine, const MemAllocationProp* properties) {
  Violations& violations = machine.violations;
  if (!properties) return violations.note(Result::InvalidValue, "no properties");
  if (properties->type != kAllocationPinned || properties->location.type != kLocationDevice) {
    return violations.note(Result::InvalidValue, "memory is neither pinned nor on a device");
  }
  if (properties->win32_handle_metadata || properties->flags.compression_type || properties->flags.usage) {
    return violations.note(Result::InvalidValue, "properties that this system does not have");
  }
  if (!machine.device_exists(properties->location.id)) {
    return violations.note(Result::InvalidDevice, "no device of that number");
  }
  return Result::Ok;
}

Result check_sharing(const Settings& settings, const MemAllocationProp& properties) {
  const int handles = properties.requested_handle_types;
  if (handles & ~(kHandlePosix | kHandleFabric)) return Result::NotSupported;
  if ((handles & kHandlePosix) && !settings.posix_handles) return Result::NotSupported;
  if ((handles & kHandleFabric) && !settings.fabric_handles) return Result::NotSupported;
  // Without a channel of the fabric's daemon, creating is not permitted although the device has the attribute (cuda.h, cuMemCreate).
  if ((handles & kHandleFabric) && settings.fabric_handles == 2) return Result::NotPermitted;
  if (properties.flags.gpu_direct_rdma_capable && !settings.rdma) return Result::NotSupported;
  return Result::Ok;
}

// The granularity depends on the properties: it has to be asked for with those that memory is created with.
std::size_t minimum_granularity(const Settings& settings, const MemAllocationProp& properties) {
  const bool shareable = properties.requested_handle_types || properties.flags.gpu_direct_rdma_capable;
  return shareable && settings.shareable_granularity ? settings.shareable_granularity : settings.granularity;
}

}  // namespace

CUDA_CALL(cuMemGetAllocationGranularity)(std::size_t* granularity, const MemAllocationProp* properties, int option) {
  return contextless_call(site_of_cuMemGetAllocationGranularity, [&](Simulator& machine) {
    if (!granularity || (option != kGranularityMinimum && option != kGranularityRecommended)) {
      return machine.violations.note(Result::InvalidValue, "no result pointer, or unknown option");
    }
    const Result allowed = check_properties(machine, properties);
    if (allowed != Result::Ok) return allowed;
    const std::size_t minimum = minimum_granularity(machine.settings, *properties);
    const std::size_t recommended = machine.settings.recommended_granularity;
    *granularity = option == kGranularityRecommended && recommended > minimum ? recommended : minimum;
    return Result::Ok;
  });
}

CUDA_CALL(cuMemAddressReserve)(DevicePointer* address, std::size_t size, std::size_t alignment, DevicePointer hint,
                               unsigned long long flags) {
  return contextless_call(site_of_cuMemAddressReserve, [&](Simulator& machine) {
    if (!address || flags) return machine.violations.note(Result::InvalidValue, "no result pointer, or flags not 0");
    Address start = 0;
    const Result result = machine.memory.reserve(size, alignment, hint, PageType::Huge, &start);
    if (result == Result::Ok) *address = start;
    return result;
  });
}

CUDA_CALL(cuMemAddressFree)(DevicePointer address, std::size_t size) {
  return contextless_call(site_of_cuMemAddressFree,
                          [&](Simulator& machine) { return machine.memory.free_address(address, size); });
}

CUDA_CALL(cuMemCreate)(MemoryHandle* handle, std::size_t size, const MemAllocationProp* properties,
                       unsigned long long flags) {
  return virtual_memory_call(site_of_cuMemCreate, [&](Simulator& machine, int device) {
    if (!handle || flags) return machine.violations.note(Result::InvalidValue, "no result pointer, or flags not 0");
    Result allowed = machine.captures.check_unsafe();
    if (allowed == Result::Ok) allowed = check_properties(machine, properties);
    if (allowed == Result::Ok) allowed = check_sharing(machine.settings, *properties);
    if (allowed == Result::Ok) allowed = right_context(machine, device, properties->location.id);
    if (allowed != Result::Ok) return allowed;
    HandleId id = 0;
    const std::size_t granularity = minimum_granularity(machine.settings, *properties);
    const Result result = machine.memory.create(properties->location.id, size, granularity, PageType::Huge, &id);
    if (result == Result::Ok) *handle = id;
    return result;
  });
}

CUDA_CALL(cuMemRelease)(MemoryHandle handle) {
  return contextless_call(site_of_cuMemRelease, [&](Simulator& machine) { return machine.memory.release(handle); });
}

CUDA_CALL(cuMemMap)(DevicePointer address, std::size_t size, std::size_t offset, MemoryHandle handle,
                    unsigned long long flags) {
  return virtual_memory_call(site_of_cuMemMap, [&](Simulator& machine, int device) {
    if (flags) return machine.violations.note(Result::InvalidValue, "flags must be 0");
    const auto owner = machine.memory.handle_device(handle);
    const Result allowed = owner ? right_context(machine, device, *owner) : Result::Ok;
    // As a driver for CUDA 13.0 answers on an H200 (misuse/h200-13.0.json).
    const auto whole = machine.memory.handle_size(handle);
    if (whole && offset) return machine.violations.note(Result::NotSupported, "offset must be 0");
    if (whole && size != *whole) {
      const bool larger = size > *whole;
      return machine.violations.note(Result::NotSupported, larger ? "larger than the physical memory" : "a part of a handle");
    }
    return allowed == Result::Ok ? machine.memory.map(address, size, offset, handle) : allowed;
  });
}

CUDA_CALL(cuMemUnmap)(DevicePointer address, std::size_t size) {
  return virtual_memory_call(site_of_cuMemUnmap, [&](Simulator& machine, int device) {
    const auto owner = machine.memory.mapped_device(address);
    const Result allowed = owner ? right_context(machine, device, *owner) : Result::Ok;
    return allowed == Result::Ok ? machine.memory.unmap(address, size) : allowed;
  });
}

CUDA_CALL(cuMemSetAccess)(DevicePointer address, std::size_t size, const MemAccessDesc* descriptors, std::size_t count) {
  return virtual_memory_call(site_of_cuMemSetAccess, [&](Simulator& machine, int device) {
    Violations& violations = machine.violations;
    if (!descriptors || !count) return violations.note(Result::InvalidValue, "no descriptors");
    const auto owner = machine.memory.mapped_device(address);
    Result result = owner ? right_context(machine, device, *owner) : Result::Ok;
    for (std::size_t index = 0; index < count && result == Result::Ok; ++index) {
      const MemAccessDesc& wanted = descriptors[index];
      if (wanted.location.type != kLocationDevice) return violations.note(Result::InvalidValue, "not a device");
      if (!machine.device_exists(wanted.location.id)) {
        return violations.note(Result::InvalidValue, "no device of that number");
      }
      if (wanted.flags != kAccessNone && wanted.flags != kAccessRead && wanted.flags != kAccessReadWrite) {
        return violations.note(Result::InvalidValue, "unknown access flags");
      }
      result = machine.memory.set_access(address, size, wanted.location.id, static_cast<Access>(wanted.flags));
    }
    return result;
  });
}

CUDA_CALL(cuMemGetAccess)(unsigned long long* flags, const MemLocation* location, DevicePointer address) {
  return contextless_call(site_of_cuMemGetAccess, [&](Simulator& machine) {
    if (!flags || !location || location->type != kLocationDevice) return Result::InvalidValue;
    if (!machine.device_exists(location->id)) return Result::InvalidDevice;
    Access access = Access::None;
    const Result result = machine.memory.get_access(address, location->id, &access);
    if (result == Result::Ok) *flags = static_cast<unsigned long long>(access);
    return result;
  });
}
