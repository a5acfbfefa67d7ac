// Initialisation, devices and contexts of the CUDA driver API.
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>

#include "cuda/api.hpp"

namespace hardpoint::simulators::cuda {

namespace {

constexpr std::uint64_t kDriverVersion = 13000;

// The stack of current contexts is a thread's own (CUDA driver API, context management).
struct ContextStack {
  static constexpr int kDepth = 32;
  std::array<Context*, kDepth> contexts{};
  int size = 0;

  Context* top() const { return size ? contexts[size - 1] : nullptr; }

  bool push(Context* context) {
    if (size == kDepth) return false;
    contexts[size++] = context;
    return true;
  }
};

thread_local ContextStack context_stack;

Context* primary_context(int device) {
  static std::array<Context, kMaxDevices> contexts = [] {
    std::array<Context, kMaxDevices> made{};
    for (int index = 0; index < static_cast<int>(made.size()); ++index) made[index].device = index;
    return made;
  }();
  return &contexts[device];
}

bool live(const Simulator& machine, const Context* context) {
  for (int device = 0; device < static_cast<int>(kMaxDevices); ++device) {
    if (context == primary_context(device)) return machine.contexts[device] != 0;
  }
  return false;
}

// A call about a device that must exist; `body` takes the simulator.
template <class Body>
int device_call(CallSite& site, int device, Body&& body) noexcept {
  return driver_call(site, [&](Simulator& machine) {
    return machine.device_exists(device) ? body(machine) : Result::InvalidDevice;
  });
}

// Values of CUdevice_attribute; what is not listed is 0.
int attribute_value(const Settings& settings, int attribute) {
  switch (attribute) {
    case 1:  // MAX_THREADS_PER_BLOCK
      return 1024;
    case 10:  // WARP_SIZE
      return 32;
    case 16:  // MULTIPROCESSOR_COUNT
      return 132;
    case 18:  // INTEGRATED
      return settings.unified_memory != 0;
    case 31:  // CONCURRENT_KERNELS
    case 41:  // UNIFIED_ADDRESSING
    case 91:  // CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
    case 99:  // HOST_REGISTER_SUPPORTED
      return 1;
    case 39:  // MAX_THREADS_PER_MULTIPROCESSOR
      return 2048;
    case 40:  // ASYNC_ENGINE_COUNT
      return 2;
    case 75:  // COMPUTE_CAPABILITY_MAJOR
      return 9;
    case 102:  // VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
      return settings.virtual_memory != 0;
    case 103:  // HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
      return settings.posix_handles != 0;
    case 110:  // GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
      return settings.rdma != 0;
    case 128:  // HANDLE_TYPE_FABRIC_SUPPORTED
      return settings.fabric_handles != 0;
    default:
      return 0;
  }
}

constexpr int kLastAttribute = 170;

}  // namespace

Context* current_context() { return context_stack.top(); }

}  // namespace hardpoint::simulators::cuda

using namespace hardpoint::simulators;
using namespace hardpoint::simulators::cuda;

CUDA_CALL(cuInit)(unsigned flags) {
  return serve<Codes>(site_of_cuInit, [&](Simulator& machine) {
    if (flags) return machine.violations.note(Result::InvalidValue, "flags must be 0");
    if (!machine.settings.devices) return Result::NoDevice;
    machine.initialized = true;
    return Result::Ok;
  });
}

CUDA_CALL(cuDriverGetVersion)(int* version) {
  return serve<Codes>(site_of_cuDriverGetVersion, [&](Simulator& machine) {
    if (!version) return Result::InvalidValue;
    *version = static_cast<int>(machine.settings.version ? machine.settings.version : kDriverVersion);
    return Result::Ok;
  });
}

CUDA_CALL(cuDeviceGetCount)(int* count) {
  return driver_call(site_of_cuDeviceGetCount, [&](Simulator& machine) {
    if (!count) return Result::InvalidValue;
    *count = static_cast<int>(machine.settings.devices);
    return Result::Ok;
  });
}

CUDA_CALL(cuDeviceGet)(int* device, int ordinal) {
  return device_call(site_of_cuDeviceGet, ordinal, [&](Simulator&) {
    if (!device) return Result::InvalidValue;
    *device = ordinal;
    return Result::Ok;
  });
}

CUDA_CALL(cuDeviceGetName)(char* name, int length, int device) {
  return device_call(site_of_cuDeviceGetName, device, [&](Simulator&) {
    if (!name || length < 1) return Result::InvalidValue;
    std::snprintf(name, static_cast<std::size_t>(length), "Simulated CUDA device");
    return Result::Ok;
  });
}

CUDA_CALL(cuDeviceTotalMem_v2)(std::size_t* bytes, int device) {
  return device_call(site_of_cuDeviceTotalMem_v2, device, [&](Simulator& machine) {
    if (!bytes) return Result::InvalidValue;
    *bytes = machine.settings.capacity;
    return Result::Ok;
  });
}

CUDA_CALL(cuDeviceGetAttribute)(int* value, int attribute, int device) {
  return device_call(site_of_cuDeviceGetAttribute, device, [&](Simulator& machine) {
    if (!value || attribute < 1 || attribute > kLastAttribute) return Result::InvalidValue;
    *value = attribute_value(machine.settings, attribute);
    return Result::Ok;
  });
}

CUDA_CALL(cuDeviceGetPCIBusId)(char* bus, int length, int device) {
  return device_call(site_of_cuDeviceGetPCIBusId, device, [&](Simulator&) {
    if (!bus || length < 13) return Result::InvalidValue;
    std::snprintf(bus, static_cast<std::size_t>(length), "0000:%02x:00.0", device + 1);
    return Result::Ok;
  });
}

CUDA_CALL(cuDeviceGetUuid_v2)(unsigned char* uuid, int device) {
  return device_call(site_of_cuDeviceGetUuid_v2, device, [&](Simulator&) {
    if (!uuid) return Result::InvalidValue;
    std::memcpy(uuid, "hardpoint-sim-", 14);
    uuid[14] = 0;
    uuid[15] = static_cast<unsigned char>(device);
    return Result::Ok;
  });
}

CUDA_CALL(cuDeviceCanAccessPeer)(int* can_access, int device, int peer) {
  return device_call(site_of_cuDeviceCanAccessPeer, device, [&](Simulator& machine) {
    if (!can_access) return Result::InvalidValue;
    if (!machine.device_exists(peer)) return Result::InvalidDevice;
    *can_access = 0;
    return Result::Ok;
  });
}

CUDA_CALL(cuDevicePrimaryCtxRetain)(Context** context, int device) {
  return device_call(site_of_cuDevicePrimaryCtxRetain, device, [&](Simulator& machine) {
    if (!context) return Result::InvalidValue;
    ++machine.contexts[device];
    *context = primary_context(device);
    return Result::Ok;
  });
}

CUDA_CALL(cuDevicePrimaryCtxRelease_v2)(int device) {
  return device_call(site_of_cuDevicePrimaryCtxRelease_v2, device, [&](Simulator& machine) {
    if (!machine.contexts[device]) {
      return machine.violations.note(Result::InvalidContext, "the primary context is not retained");
    }
    // The last release resets the context: its streams, events and allocations go with it (cuda.h, cuDevicePrimaryCtxRelease).
    if (--machine.contexts[device] == 0) {
      machine.streams.drop_device(device);
      machine.memory.free_allocations(device);
    }
    return Result::Ok;
  });
}

CUDA_CALL(cuDevicePrimaryCtxGetState)(int device, unsigned* flags, int* active) {
  return device_call(site_of_cuDevicePrimaryCtxGetState, device, [&](Simulator& machine) {
    if (!flags || !active) return Result::InvalidValue;
    *flags = 0;
    *active = machine.contexts[device] != 0;
    return Result::Ok;
  });
}

CUDA_CALL(cuDevicePrimaryCtxSetFlags_v2)(int device, unsigned) {
  return device_call(site_of_cuDevicePrimaryCtxSetFlags_v2, device, [](Simulator&) { return Result::Ok; });
}

CUDA_CALL(cuDevicePrimaryCtxReset_v2)(int device) {
  return device_call(site_of_cuDevicePrimaryCtxReset_v2, device, [&](Simulator& machine) {
    machine.streams.drop_device(device);
    machine.memory.free_allocations(device);
    machine.contexts[device] = 0;
    return Result::Ok;
  });
}

CUDA_CALL(cuCtxGetCurrent)(Context** context) {
  return driver_call(site_of_cuCtxGetCurrent, [&](Simulator&) {
    if (!context) return Result::InvalidValue;
    *context = current_context();
    return Result::Ok;
  });
}

CUDA_CALL(cuCtxSetCurrent)(Context* context) {
  return driver_call(site_of_cuCtxSetCurrent, [&](Simulator& machine) {
    if (context && !live(machine, context)) {
      return machine.violations.note(Result::InvalidContext, "not a context, or one that was released");
    }
    // Replaces the top of the stack; null pops it (cuda.h, cuCtxSetCurrent).
    if (context_stack.size) --context_stack.size;
    if (context) context_stack.push(context);
    return Result::Ok;
  });
}

CUDA_CALL(cuCtxPushCurrent_v2)(Context* context) {
  return driver_call(site_of_cuCtxPushCurrent_v2, [&](Simulator& machine) {
    if (!live(machine, context)) {
      return machine.violations.note(Result::InvalidContext, "not a context, or one that was released");
    }
    return context_stack.push(context) ? Result::Ok : Result::OutOfMemory;
  });
}

CUDA_CALL(cuCtxPopCurrent_v2)(Context** context) {
  return driver_call(site_of_cuCtxPopCurrent_v2, [&](Simulator& machine) {
    if (!context_stack.size) return machine.violations.note(Result::InvalidContext, "no context is current");
    if (context) *context = context_stack.top();
    --context_stack.size;
    return Result::Ok;
  });
}

CUDA_CALL(cuCtxGetDevice)(int* device) {
  return context_call(site_of_cuCtxGetDevice, [&](Simulator&, int current) {
    if (!device) return Result::InvalidValue;
    *device = current;
    return Result::Ok;
  });
}

CUDA_CALL(cuCtxSynchronize)() {
  return context_call(site_of_cuCtxSynchronize,
                      [](Simulator& machine, int device) { return machine.streams.synchronize_device(device); });
}
