// The AscendCL runtime API as far as it is simulated: types, values, and how a call finds its device.
//
// Names, values and layouts are those of acl_rt.h 1.15 to 1.17. Prototypes use plain integers where the header has enums or
// opaque pointers of the same size.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/simulator.hpp"

namespace hardpoint::simulators::acl {

struct MemLocation {
  std::uint32_t id;
  int type;
};

struct PhysicalMemProp {
  int handle_type;
  int allocation_type;
  int attribute;
  MemLocation location;
  std::uint64_t reserve;
};
static_assert(sizeof(PhysicalMemProp) == 32 && offsetof(PhysicalMemProp, reserve) == 24);

struct MemAccessDesc {
  int flags;
  MemLocation location;
  std::uint8_t reserved[12];
};
static_assert(sizeof(MemAccessDesc) == 24);

enum : int {
  kHandleNone = 0,
  kHandlePosix = 2,
  kAllocationPinned = 0,
  kLocationHost = 0,
  kLocationDevice = 1,
  kAccessReadWrite = 3,
};

// aclError of what a call ends in.
struct Codes {
  static constexpr int forked = 100001;
  static int of(Result result);
};

// A context; aclrtContext points to one.
struct Context {
  int device;
  bool is_default;  // the device's own, made by aclrtSetDevice
};

// The calling thread's context as it was set; may be gone by now.
Context* thread_context();
void set_thread_context(Context* context);

// Why the thread's context cannot be used, or Ok and its device.
Result current_device(Simulator& machine, int* device);

// Keep a failure's text for aclGetRecentErrMsg, which is a thread's own; returns the code.
int remember(const CallSite& site, int code) noexcept;

// A call that needs aclInit and no more. `body` takes the simulator.
template <class Body>
int acl_call(CallSite& site, Body&& body) noexcept {
  return remember(site, serve<Codes>(site, [&](Simulator& machine) {
                    return machine.initialized ? body(machine) : Result::NotInitialized;
                  }));
}

// A call that needs a current context. `body` takes the simulator and the context's device.
template <class Body>
int context_call(CallSite& site, Body&& body) noexcept {
  return acl_call(site, [&](Simulator& machine) {
    int device = 0;
    const Result found = current_device(machine, &device);
    return found == Result::Ok ? body(machine, device) : found;
  });
}

// A virtual memory call. Contexts other than the device's default one are refused: memory is managed in the context that the
// framework uses (AscendCL, aclrtSetDevice). `body` takes the simulator and the current device, -1 where the rule is off.
template <class Body>
int virtual_memory_call(CallSite& site, Body&& body) noexcept {
  return acl_call(site, [&](Simulator& machine) {
    if (!machine.settings.virtual_memory) return Result::NotSupported;
    int device = -1;
    if (machine.settings.context_rule) {
      const Result found = current_device(machine, &device);
      if (found != Result::Ok) return found;
      if (!thread_context()->is_default) {
        return machine.violations.note(Result::InvalidContext, "the current context is not the device's default one");
      }
    }
    return body(machine, device);
  });
}

// Whether the properties make memory that exists; breaks a rule otherwise.
Result check_properties(Simulator& machine, const PhysicalMemProp* properties);

// Registers host memory of the caller's own, to be mapped for the device or pinned. With kernels up to 5.10 "using non-page-locked memory will
// cause exceptions" (AscendCL, aclrtHostRegister and aclrtHostRegisterV2).
Result register_host(Simulator& machine, void* pointer, std::size_t size, bool pins);

std::size_t granularity_of(const Settings& settings, const PhysicalMemProp& properties);

inline Address address_of(const void* pointer) { return reinterpret_cast<Address>(pointer); }

}  // namespace hardpoint::simulators::acl

#define ACL_EXPORT extern "C" __attribute__((visibility("default")))

// Opens the definition of a runtime function, and makes it known to counting and fault injection.
#define ACL_CALL(name)                                          \
  static hardpoint::simulators::CallSite site_of_##name(#name); \
  ACL_EXPORT int name
