// Virtual memory management of the AscendCL runtime API, as every release has it.
#include "acl/api.hpp"

namespace hardpoint::simulators::acl {

namespace {

constexpr std::size_t kGiB = std::size_t{1} << 30;

// aclrtMemAttr of memory that a device has; those of DDR are refused there.
enum Attribute {
  kHbmHuge = 4,
  kHbmNormal = 5,
  kHbmP2pHuge = 8,
  kHbmP2pNormal = 9,
  kHbmHuge1G = 10,
  kHbmP2pHuge1G = 11,
  kNormal = 12,
  kHuge = 13,
  kHuge1G = 14,
  kP2pNormal = 15,
  kP2pHuge = 16,
  kP2pHuge1G = 17,
};

bool on_device(int attribute) {
  return attribute == kHbmHuge || attribute == kHbmNormal || (attribute >= kHbmP2pHuge && attribute <= kP2pHuge1G);
}

bool normal_pages(int attribute) {
  return attribute == kHbmNormal || attribute == kHbmP2pNormal || attribute == kNormal || attribute == kP2pNormal;
}

bool gigabyte_pages(int attribute) {
  return attribute == kHbmHuge1G || attribute == kHbmP2pHuge1G || attribute == kHuge1G || attribute == kP2pHuge1G;
}

PageType page_type(const PhysicalMemProp& properties) {
  return normal_pages(properties.attribute) ? PageType::Normal : PageType::Huge;
}

}  // namespace

Result check_properties(Simulator& machine, const PhysicalMemProp* properties) {
  Violations& violations = machine.violations;
  if (!properties) return violations.note(Result::NullArgument, "no properties");
  if (properties->handle_type == kHandlePosix && !machine.settings.posix_handles) return Result::NotSupported;
  if (properties->handle_type != kHandleNone && properties->handle_type != kHandlePosix) {
    return violations.note(Result::InvalidValue, "handle type must be none");
  }
  if (properties->allocation_type != kAllocationPinned || properties->reserve) {
    return violations.note(Result::InvalidValue, "allocation type must be pinned, and the reserved field 0");
  }
  if (properties->location.type != kLocationDevice || !on_device(properties->attribute)) {
    return violations.note(Result::InvalidValue, "location or attribute is not that of device memory");
  }
  if (!machine.device_exists(static_cast<int>(properties->location.id))) {
    return violations.note(Result::InvalidDevice, "no device of that number");
  }
  return Result::Ok;
}

std::size_t granularity_of(const Settings& settings, const PhysicalMemProp& properties) {
  return gigabyte_pages(properties.attribute) ? kGiB : settings.granularity;
}

}  // namespace hardpoint::simulators::acl

using namespace hardpoint::simulators;
using namespace hardpoint::simulators::acl;

ACL_CALL(aclrtReserveMemAddress)(void** address, std::size_t size, std::size_t alignment, void* expected,
                                 std::uint64_t flags) {
  return virtual_memory_call(site_of_aclrtReserveMemAddress, [&](Simulator& machine, int) {
    Violations& violations = machine.violations;
    if (!address || flags > 1) return violations.note(Result::NullArgument, "no result pointer, or flags not 0 or 1");
    if (expected) return violations.note(Result::InvalidValue, "an expected address is not supported");
    const std::size_t granularity = machine.settings.granularity;
    if (size > SIZE_MAX - granularity) return Result::OutOfMemory;
    const std::size_t rounded = (size + granularity - 1) / granularity * granularity;
    Address start = 0;
    const PageType pages = flags ? PageType::Huge : PageType::Normal;
    const Result result = machine.memory.reserve(rounded, alignment, 0, pages, &start);
    if (result == Result::Ok) *address = reinterpret_cast<void*>(start);
    return result;
  });
}

ACL_CALL(aclrtReleaseMemAddress)(void* address) {
  return virtual_memory_call(site_of_aclrtReleaseMemAddress, [&](Simulator& machine, int) {
    return machine.memory.free_address(address_of(address), std::nullopt);
  });
}

ACL_CALL(aclrtMallocPhysical)(HandleId* handle, std::size_t size, const PhysicalMemProp* properties,
                              std::uint64_t flags) {
  return virtual_memory_call(site_of_aclrtMallocPhysical, [&](Simulator& machine, int device) {
    if (!handle || flags) return machine.violations.note(Result::NullArgument, "no result pointer, or flags not 0");
    const Result allowed = check_properties(machine, properties);
    if (allowed != Result::Ok) return allowed;
    const int owner = static_cast<int>(properties->location.id);
    if (machine.settings.context_rule && owner != device) {
      return machine.violations.note(Result::InvalidContext, "the current context is of another device than the memory");
    }
    HandleId id = 0;
    const std::size_t granularity = granularity_of(machine.settings, *properties);
    const Result result = machine.memory.create(owner, size, granularity, page_type(*properties), &id);
    if (result == Result::Ok) *handle = id;
    return result;
  });
}

ACL_CALL(aclrtFreePhysical)(HandleId handle) {
  return virtual_memory_call(site_of_aclrtFreePhysical,
                             [&](Simulator& machine, int) { return machine.memory.release(handle); });
}

ACL_CALL(aclrtMapMem)(void* address, std::size_t size, std::size_t offset, HandleId handle, std::uint64_t flags) {
  return virtual_memory_call(site_of_aclrtMapMem, [&](Simulator& machine, int) {
    if (flags) return machine.violations.note(Result::NullArgument, "flags must be 0");
    return machine.memory.map(address_of(address), size, offset, handle);
  });
}

ACL_CALL(aclrtUnmapMem)(void* address) {
  return virtual_memory_call(site_of_aclrtUnmapMem, [&](Simulator& machine, int) {
    return machine.memory.unmap(address_of(address), std::nullopt);
  });
}
