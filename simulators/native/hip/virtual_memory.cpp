// Virtual memory management of the HIP runtime API.
#include "hip/api.hpp"

using namespace hardpoint::simulators;
using namespace hardpoint::simulators::hip;

namespace {

constexpr int kGranularityMinimum = 0, kGranularityRecommended = 1;

template <class Body>
int virtual_memory_call(CallSite& site, Body&& body) noexcept {
  return hip_call(site, [&](Simulator& machine, int) {
    return machine.settings.virtual_memory ? body(machine) : Result::NotSupported;
  });
}

Result check_properties(Simulator& machine, const MemAllocationProp* properties) {
  Violations& violations = machine.violations;
  if (!properties) return violations.note(Result::NullArgument, "no properties");
  if (properties->type != kAllocationPinned || properties->location.type != kLocationDevice) {
    return violations.note(Result::InvalidValue, "memory is neither pinned nor on a device");
  }
  if (!machine.device_exists(properties->location.id)) {
    return violations.note(Result::InvalidDevice, "no device of that number");
  }
  return Result::Ok;
}

// Older releases share no memory at all (ROCm/clr, hip_vm.cpp: hipErrorNotSupported).
Result check_sharing(const Settings& settings, const MemAllocationProp& properties) {
  const bool posix = properties.requested_handle_type == kHandlePosix && settings.posix_handles;
  return !properties.requested_handle_type || posix ? Result::Ok : Result::NotSupported;
}

}  // namespace

HIP_CALL(hipMemGetAllocationGranularity)(std::size_t* granularity, const MemAllocationProp* properties, int option) {
  return virtual_memory_call(site_of_hipMemGetAllocationGranularity, [&](Simulator& machine) {
    if (!granularity || (option != kGranularityMinimum && option != kGranularityRecommended)) {
      return machine.violations.note(Result::InvalidValue, "no result pointer, or unknown option");
    }
    const Result allowed = check_properties(machine, properties);
    if (allowed != Result::Ok) return allowed;
    const Settings& settings = machine.settings;
    const bool recommended = option == kGranularityRecommended && settings.recommended_granularity;
    *granularity = recommended ? settings.recommended_granularity : settings.granularity;
    return Result::Ok;
  });
}

HIP_CALL(hipMemAddressReserve)(void** address, std::size_t size, std::size_t alignment, void* hint,
                               unsigned long long flags) {
  return virtual_memory_call(site_of_hipMemAddressReserve, [&](Simulator& machine) {
    if (!address || flags) return machine.violations.note(Result::NullArgument, "no result pointer, or flags not 0");
    Address start = 0;
    const Result result = machine.memory.reserve(size, alignment, address_of(hint), PageType::Huge, &start);
    if (result == Result::Ok) *address = reinterpret_cast<void*>(start);
    // A size or alignment that it does not take is hipErrorOutOfMemory here (ROCm/clr, hip_vm.cpp).
    return result == Result::InvalidValue ? Result::OutOfMemory : result;
  });
}

HIP_CALL(hipMemAddressFree)(void* address, std::size_t size) {
  return virtual_memory_call(site_of_hipMemAddressFree, [&](Simulator& machine) {
    return machine.memory.free_address(address_of(address), size);
  });
}

HIP_CALL(hipMemCreate)(HandleId* handle, std::size_t size, const MemAllocationProp* properties,
                       unsigned long long flags) {
  return virtual_memory_call(site_of_hipMemCreate, [&](Simulator& machine) {
    if (!handle || flags) return machine.violations.note(Result::NullArgument, "no result pointer, or flags not 0");
    Result allowed = check_properties(machine, properties);
    if (allowed == Result::Ok) allowed = check_sharing(machine.settings, *properties);
    if (allowed != Result::Ok) return allowed;
    HandleId id = 0;
    const std::size_t granularity = machine.settings.granularity;
    const Result result = machine.memory.create(properties->location.id, size, granularity, PageType::Huge, &id);
    if (result == Result::Ok) *handle = id;
    return result;
  });
}

HIP_CALL(hipMemRelease)(HandleId handle) {
  return virtual_memory_call(site_of_hipMemRelease, [&](Simulator& machine) { return machine.memory.release(handle); });
}

HIP_CALL(hipMemMap)(void* address, std::size_t size, std::size_t offset, HandleId handle, unsigned long long flags) {
  return virtual_memory_call(site_of_hipMemMap, [&](Simulator& machine) {
    if (flags) return machine.violations.note(Result::NullArgument, "flags must be 0");
    return machine.memory.map(address_of(address), size, offset, handle);
  });
}

HIP_CALL(hipMemUnmap)(void* address, std::size_t size) {
  return virtual_memory_call(site_of_hipMemUnmap, [&](Simulator& machine) {
    const std::optional<int> device = machine.memory.mapped_device(address_of(address));
    const Result result = machine.memory.unmap(address_of(address), size);
    // rocm-systems, hip_vm.cpp: all streams of the devices with access are waited for.
    if (result != Result::Ok || !machine.settings.unmap_waits || machine.streams.pending() == 0) return result;
    ++machine.unmaps_waited;
    return machine.streams.synchronize_device(*device);
  });
}

HIP_CALL(hipMemSetAccess)(void* address, std::size_t size, const MemAccessDesc* descriptors, std::size_t count) {
  return virtual_memory_call(site_of_hipMemSetAccess, [&](Simulator& machine) {
    Violations& violations = machine.violations;
    if (!descriptors || !count) return violations.note(Result::NullArgument, "no descriptors");
    Result result = Result::Ok;
    for (std::size_t index = 0; index < count && result == Result::Ok; ++index) {
      const MemAccessDesc& wanted = descriptors[index];
      if (wanted.location.type != kLocationDevice) return violations.note(Result::InvalidValue, "not a device");
      if (!machine.device_exists(wanted.location.id)) {
        return violations.note(Result::InvalidDevice, "no device of that number");
      }
      if (wanted.flags != kAccessNone && wanted.flags != kAccessRead && wanted.flags != kAccessReadWrite) {
        return violations.note(Result::InvalidValue, "unknown access flags");
      }
      const Access access = static_cast<Access>(wanted.flags);
      result = machine.memory.set_access(address_of(address), size, wanted.location.id, access);
    }
    return result;
  });
}

HIP_CALL(hipMemGetAccess)(unsigned long long* flags, const MemLocation* location, void* address) {
  return virtual_memory_call(site_of_hipMemGetAccess, [&](Simulator& machine) {
    if (!flags || !location || location->type != kLocationDevice) return Result::InvalidValue;
    if (!machine.device_exists(location->id)) return Result::InvalidDevice;
    Access access = Access::None;
    const Result result = machine.memory.get_access(address_of(address), location->id, &access);
    if (result == Result::Ok) *flags = static_cast<unsigned long long>(access);
    return result;
  });
}
