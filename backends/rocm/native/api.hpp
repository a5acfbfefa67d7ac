// The part of AMD's HIP runtime that the memory driver calls, declared by us, so that it builds without an SDK. `make test-headers` compares every
// line with the vendor's own hip_runtime_api.h. Source: HIP runtime API reference (device, stream, memory and virtual memory management), HIP 6.4 and later;
// hipMemAllocationProp had another layout before.
#pragma once
#include <cstddef>
#include <cstdint>

#include "hardpoint/driver_support.hpp"

namespace hardpoint::rocm {

using Result = int;
using DeviceHandle = int;
using Allocation = struct AllocationObject *;  // hipMemGenericAllocationHandle_t
using Stream = struct StreamObject *;

struct MemLocation {
  int type;
  int id;
};

struct MemAllocationProp {
  int type;
  int requested_handle_type;
  MemLocation location;
  void *win32_handle_meta_data;
  struct {
    unsigned char compression_type;
    unsigned char gpu_direct_rdma_capable;
    unsigned short usage;
  } alloc_flags;
};

struct MemAccessDesc {
  MemLocation location;
  int flags;
};

// X(our name, value, the vendor's name)
#define HARDPOINT_ROCM_VALUES(X)                                                        \
  X(success, 0, hipSuccess)                                                             \
  X(invalid_value, 1, hipErrorInvalidValue)                                             \
  X(out_of_memory, 2, hipErrorOutOfMemory)                                              \
  X(no_device, 100, hipErrorNoDevice)                                                   \
  X(invalid_device, 101, hipErrorInvalidDevice)                                         \
  X(invalid_handle, 400, hipErrorInvalidHandle)                                         \
  X(not_supported, 801, hipErrorNotSupported)                                           \
  X(attribute_integrated, 16, hipDeviceAttributeIntegrated)                             \
  X(attribute_virtual_memory, 89, hipDeviceAttributeVirtualMemoryManagementSupported)   \
  X(allocation_pinned, 1, hipMemAllocationTypePinned)                                   \
  X(location_device, 1, hipMemLocationTypeDevice)                                       \
  X(access_read_write, 3, hipMemAccessFlagsProtReadWrite)                               \
  X(granularity_minimum, 0, hipMemAllocationGranularityMinimum)                         \
  X(granularity_recommended, 1, hipMemAllocationGranularityRecommended)                 \
  X(copy_host_to_device, 1, hipMemcpyHostToDevice)                                      \
  X(copy_device_to_host, 2, hipMemcpyDeviceToHost)                                      \
  X(stream_non_blocking, 1, hipStreamNonBlocking)                                       \
  X(host_register_portable, 1, hipHostRegisterPortable)                                 \
  X(host_register_mapped, 2, hipHostRegisterMapped)

HARDPOINT_ROCM_VALUES(HP_DECLARE_VALUE)

// X(function, exported symbol, required or optional, result, arguments)
#define HARDPOINT_ROCM_FUNCTIONS(X)                                                                                                        \
  X(hipGetErrorName, "hipGetErrorName", required, const char *, Result)                                                                    \
  X(hipGetErrorString, "hipGetErrorString", required, const char *, Result)                                                                \
  X(hipGetLastError, "hipGetLastError", optional, Result, void)                                                                            \
  X(hipDriverGetVersion, "hipDriverGetVersion", required, Result, int *)                                                                   \
  X(hipGetDeviceCount, "hipGetDeviceCount", required, Result, int *)                                                                       \
  X(hipDeviceGet, "hipDeviceGet", required, Result, DeviceHandle *, int)                                                                   \
  X(hipDeviceGetName, "hipDeviceGetName", required, Result, char *, int, DeviceHandle)                                                     \
  X(hipDeviceGetAttribute, "hipDeviceGetAttribute", required, Result, int *, int, int)                                                     \
  X(hipGetDevice, "hipGetDevice", required, Result, int *)                                                                                 \
  X(hipSetDevice, "hipSetDevice", required, Result, int)                                                                                   \
  X(hipDeviceSynchronize, "hipDeviceSynchronize", required, Result, void)                                                                  \
  X(hipMemGetInfo, "hipMemGetInfo", required, Result, size_t *, size_t *)                                                                  \
  X(hipMemGetAllocationGranularity, "hipMemGetAllocationGranularity", required, Result, size_t *, const MemAllocationProp *, int)          \
  X(hipMemAddressReserve, "hipMemAddressReserve", required, Result, void **, size_t, size_t, void *, unsigned long long)                   \
  X(hipMemAddressFree, "hipMemAddressFree", required, Result, void *, size_t)                                                              \
  X(hipMemCreate, "hipMemCreate", required, Result, Allocation *, size_t, const MemAllocationProp *, unsigned long long)                   \
  X(hipMemRelease, "hipMemRelease", required, Result, Allocation)                                                                          \
  X(hipMemMap, "hipMemMap", required, Result, void *, size_t, size_t, Allocation, unsigned long long)                                      \
  X(hipMemUnmap, "hipMemUnmap", required, Result, void *, size_t)                                                                          \
  X(hipMemSetAccess, "hipMemSetAccess", required, Result, void *, size_t, const MemAccessDesc *, size_t)                                   \
  X(hipStreamCreateWithFlags, "hipStreamCreateWithFlags", required, Result, Stream *, unsigned)                                            \
  X(hipStreamDestroy, "hipStreamDestroy", required, Result, Stream)                                                                        \
  X(hipStreamSynchronize, "hipStreamSynchronize", required, Result, Stream)                                                                \
  X(hipMemcpyAsync, "hipMemcpyAsync", required, Result, void *, const void *, size_t, int, Stream)                                         \
  X(hipMemsetAsync, "hipMemsetAsync", required, Result, void *, int, size_t, Stream)                                                       \
  X(hipHostRegister, "hipHostRegister", required, Result, void *, size_t, unsigned)                                                        \
  X(hipHostUnregister, "hipHostUnregister", required, Result, void *)

HP_DEFINE_API(Api, HARDPOINT_ROCM_FUNCTIONS);

}  // namespace hardpoint::rocm
