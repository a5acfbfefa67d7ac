// Initialisation, devices and contexts of the AscendCL runtime API.
#include <array>
#include <cstdio>
#include <cstring>
#include <memory>
#include <set>

#include "acl/api.hpp"

namespace hardpoint::simulators::acl {

namespace {

constexpr std::uint64_t kCannVersion = 9010;

thread_local Context* current = nullptr;

Context* default_context(int device) {
  static std::array<Context, kMaxDevices> contexts = [] {
    std::array<Context, kMaxDevices> made{};
    for (int index = 0; index < static_cast<int>(made.size()); ++index) made[index] = {index, true};
    return made;
  }();
  return &contexts[device];
}

// Contexts made by aclrtCreateContext; they belong to the process, as the API has no object that could own them. Guarded by the
// simulator's mutex.
std::set<Context*>& created_contexts() {
  static auto* contexts = new std::set<Context*>;
  return *contexts;
}

bool live(const Simulator& machine, Context* context) {
  if (created_contexts().count(context)) return true;
  for (int device = 0; device < static_cast<int>(kMaxDevices); ++device) {
    if (context == default_context(device)) return machine.contexts[device] != 0;
  }
  return false;
}

void drop_device(Simulator& machine, int device) {
  machine.streams.drop_device(device);
  machine.memory.free_allocations(device);
}

// aclCANNPackageVersion.
struct PackageVersion {
  char version[128];
  char major[64];
  char minor[64];
  char release[64];
  char patch[64];
  char reserved[128];
};

}  // namespace

Context* thread_context() { return current; }

void set_thread_context(Context* context) { current = context; }

Result current_device(Simulator& machine, int* device) {
  if (!current || !live(machine, current)) {
    return machine.violations.note(Result::InvalidContext, "no context is current");
  }
  *device = current->device;
  return Result::Ok;
}

}  // namespace hardpoint::simulators::acl

using namespace hardpoint::simulators;
using namespace hardpoint::simulators::acl;

ACL_CALL(aclInit)(const char*) {
  return remember(site_of_aclInit, serve<Codes>(site_of_aclInit, [&](Simulator& machine) {
                    if (machine.initialized) return Result::AlreadyInitialized;
                    if (!machine.settings.devices) return Result::NoDevice;
                    machine.initialized = true;
                    return Result::Ok;
                  }));
}

ACL_CALL(aclFinalize)() {
  return acl_call(site_of_aclFinalize, [](Simulator& machine) {
    machine.initialized = false;
    return Result::Ok;
  });
}

ACL_CALL(aclrtGetVersion)(std::int32_t* major, std::int32_t* minor, std::int32_t* patch) {
  return acl_call(site_of_aclrtGetVersion, [&](Simulator&) {
    if (!major || !minor || !patch) return Result::NullArgument;
    *major = 1;
    *minor = 17;
    *patch = 0;
    return Result::Ok;
  });
}

ACL_CALL(aclsysGetCANNVersion)(int, PackageVersion* version) {
  return acl_call(site_of_aclsysGetCANNVersion, [&](Simulator& machine) {
    if (!version) return Result::NullArgument;
    const std::uint64_t number = machine.settings.version ? machine.settings.version : kCannVersion;
    const int major = static_cast<int>(number / 1000), minor = static_cast<int>(number % 1000 / 10);
    *version = PackageVersion{};
    std::snprintf(version->version, sizeof version->version, "%d.%d.0", major, minor);
    std::snprintf(version->major, sizeof version->major, "%d", major);
    std::snprintf(version->minor, sizeof version->minor, "%d", minor);
    version->release[0] = version->patch[0] = '0';
    return Result::Ok;
  });
}

ACL_EXPORT const char* aclrtGetSocName() { return "Ascend910B2"; }

// Before aclInit too: torch_npu counts the devices before it initialises the runtime.
ACL_CALL(aclrtGetDeviceCount)(std::uint32_t* count) {
  CallSite& site = site_of_aclrtGetDeviceCount;
  return remember(site, serve<Codes>(site, [&](Simulator& machine) {
                    if (!count) return Result::NullArgument;
                    *count = static_cast<std::uint32_t>(machine.settings.devices);
                    return Result::Ok;
                  }));
}

ACL_CALL(aclrtSetDevice)(std::int32_t device) {
  return acl_call(site_of_aclrtSetDevice, [&](Simulator& machine) {
    if (!machine.device_exists(device)) return Result::InvalidDevice;
    ++machine.contexts[device];
    set_thread_context(default_context(device));
    return Result::Ok;
  });
}

ACL_CALL(aclrtResetDevice)(std::int32_t device) {
  return acl_call(site_of_aclrtResetDevice, [&](Simulator& machine) {
    if (!machine.device_exists(device)) return Result::InvalidDevice;
    if (!machine.contexts[device]) return machine.violations.note(Result::InvalidContext, "the device was not set");
    // The call that matches the first aclrtSetDevice destroys the default context and what was made in it.
    if (--machine.contexts[device] == 0) drop_device(machine, device);
    return Result::Ok;
  });
}

ACL_CALL(aclrtResetDeviceForce)(std::int32_t device) {
  return acl_call(site_of_aclrtResetDeviceForce, [&](Simulator& machine) {
    if (!machine.device_exists(device)) return Result::InvalidDevice;
    machine.contexts[device] = 0;
    drop_device(machine, device);
    return Result::Ok;
  });
}

ACL_CALL(aclrtGetDevice)(std::int32_t* device) {
  return context_call(site_of_aclrtGetDevice, [&](Simulator&, int current_one) {
    if (!device) return Result::NullArgument;
    *device = current_one;
    return Result::Ok;
  });
}

ACL_CALL(aclrtCreateContext)(Context** context, std::int32_t device) {
  return acl_call(site_of_aclrtCreateContext, [&](Simulator& machine) {
    if (!context) return Result::NullArgument;
    if (!machine.device_exists(device)) return Result::InvalidDevice;
    auto made = std::make_unique<Context>(Context{device, false});
    created_contexts().insert(made.get());
    *context = made.release();
    set_thread_context(*context);
    return Result::Ok;
  });
}

ACL_CALL(aclrtDestroyContext)(Context* context) {
  return acl_call(site_of_aclrtDestroyContext, [&](Simulator& machine) {
    if (!created_contexts().erase(context)) {
      return machine.violations.note(Result::InvalidContext, "not a context of aclrtCreateContext");
    }
    if (thread_context() == context) set_thread_context(nullptr);
    delete context;
    return Result::Ok;
  });
}

ACL_CALL(aclrtSetCurrentContext)(Context* context) {
  return acl_call(site_of_aclrtSetCurrentContext, [&](Simulator& machine) {
    if (!live(machine, context)) return machine.violations.note(Result::InvalidContext, "no such context");
    set_thread_context(context);
    return Result::Ok;
  });
}

// To ask is no misuse: a thread without a context, or whose context is gone, is told so.
ACL_CALL(aclrtGetCurrentContext)(Context** context) {
  return acl_call(site_of_aclrtGetCurrentContext, [&](Simulator& machine) {
    if (!context) return Result::NullArgument;
    if (!live(machine, thread_context())) return Result::InvalidContext;
    *context = thread_context();
    return Result::Ok;
  });
}

ACL_CALL(aclrtGetPrimaryCtxState)(std::int32_t device, std::uint32_t* flags, std::int32_t* active) {
  return acl_call(site_of_aclrtGetPrimaryCtxState, [&](Simulator& machine) {
    if (!machine.device_exists(device)) return Result::InvalidDevice;
    if (flags) *flags = 0;
    if (active) *active = machine.contexts[device] != 0;
    return Result::Ok;
  });
}

ACL_CALL(aclrtDeviceCanAccessPeer)(std::int32_t* can_access, std::int32_t device, std::int32_t peer) {
  return acl_call(site_of_aclrtDeviceCanAccessPeer, [&](Simulator& machine) {
    if (!can_access) return Result::NullArgument;
    if (!machine.device_exists(device) || !machine.device_exists(peer)) return Result::InvalidDevice;
    *can_access = 0;
    return Result::Ok;
  });
}

ACL_CALL(aclrtGetRunMode)(int* mode) {
  return acl_call(site_of_aclrtGetRunMode, [&](Simulator&) {
    if (!mode) return Result::NullArgument;
    *mode = 1;  // ACL_HOST
    return Result::Ok;
  });
}

ACL_CALL(aclrtSynchronizeDevice)() {
  return context_call(site_of_aclrtSynchronizeDevice,
                      [](Simulator& machine, int device) { return machine.streams.synchronize_device(device); });
}

ACL_CALL(aclrtSynchronizeDeviceWithTimeout)(std::int32_t) {
  return context_call(site_of_aclrtSynchronizeDeviceWithTimeout,
                      [](Simulator& machine, int device) { return machine.streams.synchronize_device(device); });
}
