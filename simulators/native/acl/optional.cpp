// Functions that older CANN releases do not have; the minimal variant of the library is built without this file.
#include "acl/api.hpp"

using namespace hardpoint::simulators;
using namespace hardpoint::simulators::acl;

namespace {

constexpr int kGranularityMinimum = 0, kGranularityRecommended = 1;
constexpr std::uint32_t kRegisterMapped = 0x2, kRegisterPinned = 0x10000000;  // ACL_HOST_REG_*; the others are reserved

}  // namespace

ACL_CALL(aclrtHostRegisterV2)(void* pointer, std::uint64_t size, std::uint32_t flags) {
  return context_call(site_of_aclrtHostRegisterV2, [&](Simulator& machine, int) {
    if (!flags || flags & ~(kRegisterMapped | kRegisterPinned)) {
      return machine.violations.note(Result::InvalidValue, "host memory is registered as mapped, as pinned, or as both");
    }
    return register_host(machine, pointer, size, flags & kRegisterPinned);
  });
}

ACL_CALL(aclrtMemGetAllocationGranularity)(PhysicalMemProp* properties, int option, std::size_t* granularity) {
  return virtual_memory_call(site_of_aclrtMemGetAllocationGranularity, [&](Simulator& machine, int) {
    if (!granularity || (option != kGranularityMinimum && option != kGranularityRecommended)) {
      return machine.violations.note(Result::NullArgument, "no result pointer, or unknown option");
    }
    const Result allowed = check_properties(machine, properties);
    if (allowed != Result::Ok) return allowed;
    const std::size_t minimum = granularity_of(machine.settings, *properties);
    const std::size_t recommended = machine.settings.recommended_granularity;
    *granularity = option == kGranularityRecommended && recommended > minimum ? recommended : minimum;
    return Result::Ok;
  });
}

ACL_CALL(aclrtMemSetAccess)(void* address, std::size_t size, MemAccessDesc* descriptors, std::size_t count) {
  return virtual_memory_call(site_of_aclrtMemSetAccess, [&](Simulator& machine, int) {
    Violations& violations = machine.violations;
    if (!descriptors || count != 1) return violations.note(Result::NullArgument, "there must be one descriptor");
    if (descriptors->flags != kAccessReadWrite || descriptors->location.type != kLocationDevice) {
      return violations.note(Result::InvalidValue, "access must be read and write, of a device");
    }
    const int device = static_cast<int>(descriptors->location.id);
    if (!machine.device_exists(device)) return violations.note(Result::InvalidDevice, "no device of that number");
    return machine.memory.set_access(address_of(address), size, device, Access::ReadWrite);
  });
}

ACL_CALL(aclrtMemGetAccess)(void* address, MemLocation* location, std::uint64_t* flags) {
  return virtual_memory_call(site_of_aclrtMemGetAccess, [&](Simulator& machine, int) {
    if (!flags || !location || location->type != kLocationDevice) return Result::NullArgument;
    if (!machine.device_exists(static_cast<int>(location->id))) return Result::InvalidDevice;
    Access access = Access::None;
    const Result result = machine.memory.get_access(address_of(address), static_cast<int>(location->id), &access);
    if (result == Result::Ok) *flags = static_cast<std::uint64_t>(access);
    return result;
  });
}
