// Devices, errors and versions of the CUDA runtime API.
#include <dlfcn.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <string>

#include "cudart/api.hpp"

namespace hardpoint::simulators::cudart {

namespace {

constexpr int kRuntimeVersion = 13000;
constexpr int kMaxDevices = 64;

thread_local int chosen_device = 0;
thread_local int last_error = kSuccess;

// The primary contexts that the runtime holds. Process-wide, as in the real runtime, which has no object to keep them in.
struct PrimaryContexts {
  std::mutex mutex;                                // guards `held`
  std::array<void*, kMaxDevices> held{};
};

PrimaryContexts& primary_contexts() {
  static auto* contexts = new PrimaryContexts;
  return *contexts;
}

int retain_once(int device, void** context) {
  if (device < 0 || device >= kMaxDevices) return kInvalidDevice;
  PrimaryContexts& contexts = primary_contexts();
  std::lock_guard<std::mutex> lock(contexts.mutex);
  if (!contexts.held[device]) {
    int code = cuInit(0);
    if (!code) code = cuDevicePrimaryCtxRetain(&contexts.held[device], device);
    if (code) return code;
  }
  *context = contexts.held[device];
  return kSuccess;
}

// cudaDeviceProp.
struct DeviceProperties {
  char name[256];
  unsigned char uuid[16];
  char other_ids[16];
  std::size_t total_global_memory;
  std::size_t shared_memory_per_block;
  int registers_per_block;
  int warp_size;
  std::size_t memory_pitch;
  int max_threads_per_block;
  int max_threads_dim[3];
  int max_grid_size[3];
  std::size_t total_constant_memory;
  int major;
  int minor;
  std::size_t texture_alignment;
  std::size_t texture_pitch_alignment;
  int multiprocessor_count;
  int integrated;
  int can_map_host_memory;
  int textures_and_surfaces[39];
  std::size_t surface_alignment;
  int concurrent_kernels;
  int ecc_enabled;
  int pci_bus_id;
  int pci_device_id;
  int pci_domain_id;
  int tcc_driver;
  int async_engine_count;
  int unified_addressing;
  int memory_bus_width;
  int l2_cache_size;
  int persisting_l2_cache_max_size;
  int max_threads_per_multiprocessor;
  int caches_and_priorities[3];
  std::size_t shared_memory_per_multiprocessor;
  int registers_per_multiprocessor;
  int managed_memory_and_boards[8];
  std::size_t shared_memory_per_block_optin;
  int page_tables[2];
  int max_blocks_per_multiprocessor;
  int access_policy_max_window_size;
  std::size_t reserved_shared_memory_per_block;
  int host_register_supported;
  int features[19];
  int reserved[56];
};
static_assert(sizeof(DeviceProperties) == 1008);
static_assert(offsetof(DeviceProperties, total_global_memory) == 288 && offsetof(DeviceProperties, major) == 360);
static_assert(offsetof(DeviceProperties, multiprocessor_count) == 384);
static_assert(offsetof(DeviceProperties, concurrent_kernels) == 560);
static_assert(offsetof(DeviceProperties, l2_cache_size) == 596);
static_assert(offsetof(DeviceProperties, max_threads_per_multiprocessor) == 604);
static_assert(offsetof(DeviceProperties, shared_memory_per_multiprocessor) == 624);
static_assert(offsetof(DeviceProperties, shared_memory_per_block_optin) == 672);
static_assert(offsetof(DeviceProperties, max_blocks_per_multiprocessor) == 688);
static_assert(offsetof(DeviceProperties, host_register_supported) == 704);
static_assert(offsetof(DeviceProperties, reserved) == 784);

int attribute(int number, int device) {
  int value = 0;
  cuDeviceGetAttribute(&value, number, device);
  return value;
}

// Figures of compute capability 9.0 (CUDA C++ programming guide, technical specifications per compute capability).
void fill_properties(DeviceProperties* properties, int device) {
  *properties = DeviceProperties{};
  cuDeviceGetName(properties->name, sizeof properties->name, device);
  cuDeviceGetUuid_v2(properties->uuid, device);
  cuDeviceTotalMem_v2(&properties->total_global_memory, device);
  properties->shared_memory_per_block = 48 << 10;
  properties->shared_memory_per_block_optin = 227 << 10;
  properties->shared_memory_per_multiprocessor = 228 << 10;
  properties->reserved_shared_memory_per_block = 1 << 10;
  properties->registers_per_block = properties->registers_per_multiprocessor = 65536;
  properties->warp_size = attribute(10, device);
  properties->memory_pitch = 0x7fffffff;
  properties->max_threads_per_block = attribute(1, device);
  properties->max_threads_per_multiprocessor = attribute(39, device);
  properties->max_blocks_per_multiprocessor = 32;
  const int block[3] = {1024, 1024, 64}, grid[3] = {2147483647, 65535, 65535};
  std::memcpy(properties->max_threads_dim, block, sizeof block);
  std::memcpy(properties->max_grid_size, grid, sizeof grid);
  properties->total_constant_memory = 64 << 10;
  properties->major = attribute(75, device);
  properties->minor = attribute(76, device);
  properties->texture_alignment = 512;
  properties->multiprocessor_count = attribute(16, device);
  properties->integrated = attribute(18, device);
  properties->can_map_host_memory = properties->concurrent_kernels = 1;
  properties->pci_bus_id = device + 1;
  properties->async_engine_count = attribute(40, device);
  properties->unified_addressing = properties->host_register_supported = 1;
  properties->l2_cache_size = 50 << 20;
}

struct ErrorName {
  int code;
  const char* name;
};

constexpr ErrorName kNames[] = {
    {0, "cudaSuccess"},
    {1, "cudaErrorInvalidValue"},
    {2, "cudaErrorMemoryAllocation"},
    {3, "cudaErrorInitializationError"},
    {4, "cudaErrorCudartUnloading"},
    {21, "cudaErrorInvalidMemcpyDirection"},
    {34, "cudaErrorStubLibrary"},
    {100, "cudaErrorNoDevice"},
    {101, "cudaErrorInvalidDevice"},
    {201, "cudaErrorDeviceUninitialized"},
    {400, "cudaErrorInvalidResourceHandle"},
    {401, "cudaErrorIllegalState"},
    {500, "cudaErrorSymbolNotFound"},
    {600, "cudaErrorNotReady"},
    {700, "cudaErrorIllegalAddress"},
    {709, "cudaErrorContextIsDestroyed"},
    {712, "cudaErrorHostMemoryAlreadyRegistered"},
    {713, "cudaErrorHostMemoryNotRegistered"},
    {719, "cudaErrorLaunchFailure"},
    {800, "cudaErrorNotPermitted"},
    {801, "cudaErrorNotSupported"},
    {900, "cudaErrorStreamCaptureUnsupported"},
    {901, "cudaErrorStreamCaptureInvalidated"},
    {908, "cudaErrorStreamCaptureWrongThread"},
};

// The newest version of a driver function that the simulated driver has; null if there is none.
void* find_driver_function(const char* name) {
  // Loaded already, since this library needs it.
  static void* const driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  if (!driver || !name) return nullptr;
  for (const char* version : {"_v4", "_v3", "_v2", ""}) {
    if (void* found = dlsym(driver, (std::string(name) + version).c_str())) return found;
  }
  return nullptr;
}

}  // namespace

int current_device() {
  void* context = nullptr;
  int device = 0;
  if (!cuCtxGetCurrent(&context) && context && !cuCtxGetDevice(&device)) return device;
  return chosen_device;
}

int use_device(int device) {
  void* context = nullptr;
  int code = retain_once(device, &context);
  if (!code) code = cuCtxSetCurrent(context);
  if (!code) chosen_device = device;
  return code;
}

int ensure_context() {
  void* context = nullptr;
  if (!cuCtxGetCurrent(&context) && context) return kSuccess;
  return use_device(chosen_device);
}

int remember(int code) {
  if (code) last_error = code;
  return code;
}

}  // namespace hardpoint::simulators::cudart

using namespace hardpoint::simulators::cudart;

CUDART_EXPORT int cudaGetLastError() {
  const int code = last_error;
  last_error = kSuccess;
  return code;
}

CUDART_EXPORT int cudaPeekAtLastError() { return last_error; }

CUDART_EXPORT const char* cudaGetErrorName(int code) {
  for (const ErrorName& known : kNames) {
    if (known.code == code) return known.name;
  }
  return "cudaErrorUnknown";
}

CUDART_EXPORT const char* cudaGetErrorString(int code) {
  const char* text = nullptr;
  if (code == kInvalidDirection) return "invalid copy direction for memcpy";
  return cuGetErrorString(code, &text) || !text ? "unrecognized error code" : text;
}

CUDART_CALL(cudaDriverGetVersion)(int* version) {
  return call_without_context(call_of_cudaDriverGetVersion, [&] { return cuDriverGetVersion(version); });
}

CUDART_CALL(cudaRuntimeGetVersion)(int* version) {
  return call_without_context(call_of_cudaRuntimeGetVersion, [&] {
    if (!version) return int{kInvalidValue};
    *version = kRuntimeVersion;
    return int{kSuccess};
  });
}

CUDART_CALL(cudaGetDeviceCount)(int* count) {
  if (count) *count = 0;
  return call_without_context(call_of_cudaGetDeviceCount, [&] {
    const int code = cuInit(0);
    return code ? code : cuDeviceGetCount(count);
  });
}

CUDART_CALL(cudaSetDevice)(int device) {
  return call_without_context(call_of_cudaSetDevice, [&] { return use_device(device); });
}

CUDART_CALL(cudaGetDevice)(int* device) {
  return call_without_context(call_of_cudaGetDevice, [&] {
    if (!device) return int{kInvalidValue};
    const int code = cuInit(0);
    *device = code ? 0 : current_device();
    return code;
  });
}

CUDART_CALL(cudaGetDeviceProperties)(DeviceProperties* properties, int device) {
  return call_without_context(call_of_cudaGetDeviceProperties, [&] {
    int count = 0;
    int code = cuInit(0);
    if (!code) code = cuDeviceGetCount(&count);
    if (code) return code;
    if (!properties) return int{kInvalidValue};
    if (device < 0 || device >= count) return int{kInvalidDevice};
    fill_properties(properties, device);
    return int{kSuccess};
  });
}

// The numbers of cudaDeviceAttr are those of CUdevice_attribute.
CUDART_CALL(cudaDeviceGetAttribute)(int* value, int number, int device) {
  return call_without_context(call_of_cudaDeviceGetAttribute, [&] {
    const int code = cuInit(0);
    return code ? code : cuDeviceGetAttribute(value, number, device);
  });
}

CUDART_CALL(cudaDeviceGetPCIBusId)(char* bus, int length, int device) {
  return call_without_context(call_of_cudaDeviceGetPCIBusId, [&] {
    const int code = cuInit(0);
    return code ? code : cuDeviceGetPCIBusId(bus, length, device);
  });
}

CUDART_CALL(cudaDeviceCanAccessPeer)(int* can_access, int device, int peer) {
  return call_without_context(call_of_cudaDeviceCanAccessPeer, [&] {
    const int code = cuInit(0);
    return code ? code : cuDeviceCanAccessPeer(can_access, device, peer);
  });
}

CUDART_CALL(cudaDeviceGetStreamPriorityRange)(int* least, int* greatest) {
  return call_in_context(call_of_cudaDeviceGetStreamPriorityRange, [&] {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return int{kSuccess};
  });
}

CUDART_CALL(cudaDeviceSynchronize)() {
  return call_in_context(call_of_cudaDeviceSynchronize, [] { return cuCtxSynchronize(); });
}

CUDART_CALL(cudaGetDriverEntryPointByVersion)(const char* name, void** function, unsigned, unsigned long long,
                                              int* status) {
  return call_without_context(call_of_cudaGetDriverEntryPointByVersion, [&] {
    if (!name || !function) return int{kInvalidValue};
    *function = find_driver_function(name);
    if (status) *status = *function ? 0 : 1;  // cudaDriverEntryPointSuccess, ...SymbolNotFound
    return int{*function ? kSuccess : kNotSupported};
  });
}

CUDART_EXPORT int cudaProfilerStart() { return kSuccess; }

CUDART_EXPORT int cudaProfilerStop() { return kSuccess; }
