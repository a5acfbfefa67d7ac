// The CUDA runtime API as far as it is simulated: written over the driver's public functions, so that both are one machine.
//
// Names, values and layouts are those of cuda_runtime_api.h and driver_types.h 13.0 to 13.5. A CUresult that a driver function
// answers is the cudaError_t of the same meaning.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/extension.h"

extern "C" {
int cuInit(unsigned flags);
int cuDriverGetVersion(int* version);
int cuDeviceGetCount(int* count);
int cuDeviceGetName(char* name, int length, int device);
int cuDeviceTotalMem_v2(std::size_t* bytes, int device);
int cuDeviceGetAttribute(int* value, int attribute, int device);
int cuDeviceGetPCIBusId(char* bus, int length, int device);
int cuDeviceGetUuid_v2(unsigned char* uuid, int device);
int cuDeviceCanAccessPeer(int* can_access, int device, int peer);
int cuDevicePrimaryCtxRetain(void** context, int device);
int cuCtxGetCurrent(void** context);
int cuCtxSetCurrent(void* context);
int cuCtxGetDevice(int* device);
int cuCtxSynchronize();
int cuMemGetInfo_v2(std::size_t* free, std::size_t* total);
int cuMemAlloc_v2(unsigned long long* address, std::size_t size);
int cuMemFree_v2(unsigned long long address);
int cuMemHostAlloc(void** pointer, std::size_t size, unsigned flags);
int cuMemFreeHost(void* pointer);
int cuMemHostRegister_v2(void* pointer, std::size_t size, unsigned flags);
int cuMemHostUnregister(void* pointer);
int cuMemHostGetDevicePointer_v2(unsigned long long* address, void* pointer, unsigned flags);
int cuMemcpy(unsigned long long target, unsigned long long source, std::size_t size);
int cuMemcpyHtoD_v2(unsigned long long target, const void* source, std::size_t size);
int cuMemcpyDtoH_v2(void* target, unsigned long long source, std::size_t size);
int cuMemcpyDtoD_v2(unsigned long long target, unsigned long long source, std::size_t size);
int cuMemcpyAsync(unsigned long long target, unsigned long long source, std::size_t size, std::uintptr_t stream);
int cuMemcpyHtoDAsync_v2(unsigned long long target, const void* source, std::size_t size, std::uintptr_t stream);
int cuMemcpyDtoHAsync_v2(void* target, unsigned long long source, std::size_t size, std::uintptr_t stream);
int cuMemcpyDtoDAsync_v2(unsigned long long target, unsigned long long source, std::size_t size,
                         std::uintptr_t stream);
int cuMemsetD8_v2(unsigned long long target, unsigned char value, std::size_t size);
int cuMemsetD8Async(unsigned long long target, unsigned char value, std::size_t size, std::uintptr_t stream);
int cuPointerGetAttribute(void* data, int attribute, unsigned long long address);
int cuStreamCreate(std::uintptr_t* stream, unsigned flags);
int cuStreamDestroy_v2(std::uintptr_t stream);
int cuStreamSynchronize(std::uintptr_t stream);
int cuStreamQuery(std::uintptr_t stream);
int cuStreamWaitEvent(std::uintptr_t stream, std::uintptr_t event, unsigned flags);
int cuEventCreate(std::uintptr_t* event, unsigned flags);
int cuEventDestroy_v2(std::uintptr_t event);
int cuEventRecord(std::uintptr_t event, std::uintptr_t stream);
int cuEventSynchronize(std::uintptr_t event);
int cuEventQuery(std::uintptr_t event);
int cuEventElapsedTime_v2(float* milliseconds, std::uintptr_t start, std::uintptr_t end);
int cuStreamBeginCapture_v2(std::uintptr_t stream, int mode);
int cuStreamEndCapture(std::uintptr_t stream, void** graph);
int cuStreamIsCapturing(std::uintptr_t stream, int* status);
int cuStreamGetCaptureInfo_v3(std::uintptr_t stream, int* status, unsigned long long* id, void** graph, const void** dependencies,
                              const void** edges, std::size_t* count);
int cuThreadExchangeStreamCaptureMode(int* mode);
int cuGraphGetNodes(void* graph, void** nodes, std::size_t* count);
int cuGraphInstantiateWithFlags(void** executable, void* graph, unsigned long long flags);
int cuGraphLaunch(void* executable, std::uintptr_t stream);
int cuGraphDestroy(void* graph);
int cuGraphExecDestroy(void* executable);
int cuGetErrorString(int code, const char** text);
}

namespace hardpoint::simulators::cudart {

enum : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kInvalidDirection = 21,
  kInvalidDevice = 101,
  kNotSupported = 801,
};

using Stream = std::uintptr_t;
using Event = std::uintptr_t;

// The device that the calling thread uses: that of its current context, or else the one it chose (0 at first).
int current_device();

// Choose a device for the calling thread and make its primary context current, which the runtime retains once per process.
int use_device(int device);

// Make sure that the calling thread has a context: its own, or the primary one of its device.
int ensure_context();

// Keep an error for cudaGetLastError, which is a thread's own; returns it.
int remember(int code);

inline unsigned long long address_of(const void* pointer) { return reinterpret_cast<unsigned long long>(pointer); }

// A function that needs no context. `body` returns a code.
template <class Body>
int call_without_context(void* call, Body&& body) noexcept {
  const int injected = hp_sim_cuda_begin_call(call);
  return remember(injected ? injected : body());
}

// A function that works in the thread's context.
template <class Body>
int call_in_context(void* call, Body&& body) noexcept {
  return call_without_context(call, [&] {
    const int missing = ensure_context();
    return missing ? missing : body();
  });
}

}  // namespace hardpoint::simulators::cudart

#define CUDART_EXPORT extern "C" __attribute__((visibility("default")))

// Opens the definition of a runtime function, and makes it known to counting and fault injection.
#define CUDART_CALL(name)                                            \
  static void* const call_of_##name = hp_sim_cuda_add_call(#name);   \
  CUDART_EXPORT int name
