// The HIP runtime API as far as it is simulated: types, values, and how a call finds its device.
//
// Names, values and layouts are those of hip_runtime_api.h 6.4 to 7.1. Prototypes use plain integers where the header has enums or
// opaque pointers of the same size.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/simulator.hpp"

namespace hardpoint::simulators::hip {

struct MemLocation {
  int type;
  int id;
};

struct MemAllocationProp {
  int type;
  int requested_handle_type;
  MemLocation location;
  void* win32_handle_metadata;
  struct {
    unsigned char compression_type;
    unsigned char gpu_direct_rdma_capable;
    unsigned short usage;
  } flags;
};
static_assert(sizeof(MemAllocationProp) == 32 && offsetof(MemAllocationProp, flags) == 24);

struct MemAccessDesc {
  MemLocation location;
  int flags;
};
static_assert(sizeof(MemAccessDesc) == 12);

enum : int {
  kAllocationPinned = 1,
  kLocationDevice = 1,
  kHandlePosix = 1,
  kAccessNone = 0,
  kAccessRead = 1,
  kAccessReadWrite = 3,
  kMemoryTypeHost = 1,
  kMemoryTypeDevice = 2,
};

// hipError_t of what a call ends in.
struct Codes {
  // hipErrorNotInitialized: the runtime does not survive fork.
  static constexpr int forked = 3;
  static int of(Result result);
};

// The calling thread's device, 0 until it sets another (HIP, device management).
int current_device();
void set_current_device(int device);

// Keep an error for hipGetLastError, which is a thread's own; returns it.
int remember(int code);

// A call; `body` takes the simulator and the thread's device. The runtime initialises itself on the first call.
template <class Body>
int hip_call(CallSite& site, Body&& body) noexcept {
  return remember(serve<Codes>(site, [&](Simulator& machine) {
    machine.initialized = true;
    if (!machine.settings.devices) return Result::NoDevice;
    return body(machine, current_device());
  }));
}

inline Address address_of(const void* pointer) { return reinterpret_cast<Address>(pointer); }

}  // namespace hardpoint::simulators::hip

// Opens the definition of a runtime function, and makes it known to counting and fault injection.
#define HIP_CALL(name)                                            \
  static hardpoint::simulators::CallSite site_of_##name(#name);   \
  extern "C" __attribute__((visibility("default"))) int name
