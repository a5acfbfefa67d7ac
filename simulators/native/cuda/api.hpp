// The CUDA driver API as far as it is simulated: types, values, and how a call finds its device.
//
// Names, values and layouts are those of cuda.h 12.9 to 13.5. Prototypes use plain integers where the header has enums or opaque
// pointers of the same size.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/simulator.hpp"

namespace hardpoint::simulators::cuda {

using DevicePointer = unsigned long long;
using MemoryHandle = unsigned long long;

struct MemLocation {
  int type;
  int id;
};

struct MemAllocationProp {
  int type;
  int requested_handle_types;
  MemLocation location;
  void* win32_handle_metadata;
  struct {
    unsigned char compression_type;
    unsigned char gpu_direct_rdma_capable;
    unsigned short usage;
    unsigned char reserved[4];
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
  kHandleFabric = 8,
  kAccessNone = 0,
  kAccessRead = 1,
  kAccessReadWrite = 3,
  kMemoryTypeHost = 1,
  kMemoryTypeDevice = 2,
};

// CUresult of what a call ends in.
struct Codes {
  static constexpr int success = 0, invalid_value = 1;
  // A context does not survive fork: the child's calls answer CUDA_ERROR_NOT_INITIALIZED (CUDA C++ programming guide, processes).
  static constexpr int forked = 3;
  static int of(Result result);
};

// A device's primary context; CUcontext points to one.
struct Context {
  int device;
};

// The context on top of the calling thread's stack; null if there is none.
Context* current_context();

// A call that needs the driver to be initialised, and no more. `body` takes the simulator.
template <class Body>
int driver_call(CallSite& site, Body&& body) noexcept {
  return serve<Codes>(site, [&](Simulator& machine) {
    return machine.initialized ? body(machine) : Result::NotInitialized;
  });
}

// The device of the current context, or why there is none.
inline Result current_device(Simulator& machine, int* device) {
  const Context* context = current_context();
  if (!context) return machine.violations.note(Result::InvalidContext, "no context is current");
  *device = context->device;
  if (machine.contexts[*device]) return Result::Ok;
  return machine.violations.note(Result::ContextDestroyed, "the current context was released");
}

// A call that needs a current context. `body` takes the simulator and the context's device.
template <class Body>
int context_call(CallSite& site, Body&& body) noexcept {
  return driver_call(site, [&](Simulator& machine) {
    int device = 0;
    const Result found = current_device(machine, &device);
    return found == Result::Ok ? body(machine, device) : found;
  });
}

}  // namespace hardpoint::simulators::cuda

// Opens the definition of a driver function, and makes it known to counting and fault injection.
#define CUDA_CALL(name)                                           \
  static hardpoint::simulators::CallSite site_of_##name(#name);   \
  extern "C" __attribute__((visibility("default"))) int name
