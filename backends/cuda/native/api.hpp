// The part of NVIDIA's driver API that the memory driver calls, declared by us, so that it builds without an SDK. `make test-headers` compares
// every line with the vendor's own cuda.h. Source: CUDA Driver API reference, chapters 6.2 to 6.16 (initialisation to virtual memory).
#pragma once
#include <cstddef>
#include <cstdint>

#include "hardpoint/driver_support.hpp"

namespace hardpoint::cuda {

using Result = int;
using DeviceHandle = int;
using Address = unsigned long long;
using Allocation = unsigned long long;  // CUmemGenericAllocationHandle
using Context = struct ContextObject *;
using Stream = struct StreamObject *;

struct MemLocation {
  int type;
  int id;
};

struct MemAllocationProp {
  int type;
  int requested_handle_types;
  MemLocation location;
  void *win32_handle_meta_data;
  struct {
    unsigned char compression_type;
    unsigned char gpu_direct_rdma_capable;
    unsigned short usage;
    unsigned char reserved[4];
  } alloc_flags;
};

struct MemAccessDesc {
  MemLocation location;
  int flags;
};

// X(our name, value, the vendor's name)
#define HARDPOINT_CUDA_VALUES(X)                                                                                    \
  X(success, 0, CUDA_SUCCESS)                                                                                       \
  X(invalid_value, 1, CUDA_ERROR_INVALID_VALUE)                                                                     \
  X(out_of_memory, 2, CUDA_ERROR_OUT_OF_MEMORY)                                                                     \
  X(deinitialized, 4, CUDA_ERROR_DEINITIALIZED)                                                                     \
  X(stub_library, 34, CUDA_ERROR_STUB_LIBRARY)                                                                      \
  X(no_device, 100, CUDA_ERROR_NO_DEVICE)                                                                           \
  X(invalid_device, 101, CUDA_ERROR_INVALID_DEVICE)                                                                 \
  X(invalid_handle, 400, CUDA_ERROR_INVALID_HANDLE)                                                                 \
  X(not_permitted, 800, CUDA_ERROR_NOT_PERMITTED)                                                                   \
  X(not_supported, 801, CUDA_ERROR_NOT_SUPPORTED)                                                                   \
  X(attribute_integrated, 18, CU_DEVICE_ATTRIBUTE_INTEGRATED)                                                       \
  X(attribute_virtual_memory, 102, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)                         \
  X(attribute_posix_handles, 103, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)                  \
  X(attribute_rdma, 110, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED)                               \
  X(attribute_fabric_handles, 128, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED)                                \
  X(allocation_pinned, 1, CU_MEM_ALLOCATION_TYPE_PINNED)                                                            \
  X(location_device, 1, CU_MEM_LOCATION_TYPE_DEVICE)                                                                \
  X(access_read_write, 3, CU_MEM_ACCESS_FLAGS_PROT_READWRITE)                                                       \
  X(granularity_minimum, 0, CU_MEM_ALLOC_GRANULARITY_MINIMUM)                                                       \
  X(granularity_recommended, 1, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED)                                               \
  X(handle_none, 0, CU_MEM_HANDLE_TYPE_NONE)                                                                        \
  X(handle_posix, 1, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)                                                      \
  X(handle_fabric, 8, CU_MEM_HANDLE_TYPE_FABRIC)                                                                    \
  X(stream_non_blocking, 1, CU_STREAM_NON_BLOCKING)                                                                 \
  X(host_register_portable, 1, CU_MEMHOSTREGISTER_PORTABLE)                                                         \
  X(host_register_mapped, 2, CU_MEMHOSTREGISTER_DEVICEMAP)

HARDPOINT_CUDA_VALUES(HP_DECLARE_VALUE)

// X(function, exported symbol, required or optional, result, arguments)
#define HARDPOINT_CUDA_FUNCTIONS(X)                                                                                                             \
  X(cuGetErrorName, "cuGetErrorName", required, Result, Result, const char **)                                                                  \
  X(cuGetErrorString, "cuGetErrorString", required, Result, Result, const char **)                                                              \
  X(cuInit, "cuInit", required, Result, unsigned)                                                                                               \
  X(cuDriverGetVersion, "cuDriverGetVersion", required, Result, int *)                                                                          \
  X(cuDeviceGetCount, "cuDeviceGetCount", required, Result, int *)                                                                              \
  X(cuDeviceGet, "cuDeviceGet", required, Result, DeviceHandle *, int)                                                                          \
  X(cuDeviceGetName, "cuDeviceGetName", required, Result, char *, int, DeviceHandle)                                                            \
  X(cuDeviceGetAttribute, "cuDeviceGetAttribute", required, Result, int *, int, DeviceHandle)                                                   \
  X(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", required, Result, Context *, DeviceHandle)                                            \
  X(cuDevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2", required, Result, DeviceHandle)                                                  \
  X(cuCtxGetCurrent, "cuCtxGetCurrent", required, Result, Context *)                                                                            \
  X(cuCtxSetCurrent, "cuCtxSetCurrent", required, Result, Context)                                                                              \
  X(cuCtxSynchronize, "cuCtxSynchronize", required, Result, void)                                                                               \
  X(cuMemGetInfo, "cuMemGetInfo_v2", required, Result, size_t *, size_t *)                                                                      \
  X(cuMemGetAllocationGranularity, "cuMemGetAllocationGranularity", required, Result, size_t *, const MemAllocationProp *, int)                 \
  X(cuMemAddressReserve, "cuMemAddressReserve", required, Result, Address *, size_t, size_t, Address, unsigned long long)                       \
  X(cuMemAddressFree, "cuMemAddressFree", required, Result, Address, size_t)                                                                    \
  X(cuMemCreate, "cuMemCreate", required, Result, Allocation *, size_t, const MemAllocationProp *, unsigned long long)                          \
  X(cuMemRelease, "cuMemRelease", required, Result, Allocation)                                                                                 \
  X(cuMemMap, "cuMemMap", required, Result, Address, size_t, size_t, Allocation, unsigned long long)                                            \
  X(cuMemUnmap, "cuMemUnmap", required, Result, Address, size_t)                                                                                \
  X(cuMemSetAccess, "cuMemSetAccess", required, Result, Address, size_t, const MemAccessDesc *, size_t)                                         \
  X(cuStreamCreate, "cuStreamCreate", required, Result, Stream *, unsigned)                                                                     \
  X(cuStreamDestroy, "cuStreamDestroy_v2", required, Result, Stream)                                                                            \
  X(cuStreamSynchronize, "cuStreamSynchronize", required, Result, Stream)                                                                       \
  X(cuMemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2", required, Result, Address, const void *, size_t, Stream)                                         \
  X(cuMemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2", required, Result, void *, Address, size_t, Stream)                                               \
  X(cuMemsetD8Async, "cuMemsetD8Async", required, Result, Address, unsigned char, size_t, Stream)                                               \
  X(cuMemHostRegister, "cuMemHostRegister_v2", required, Result, void *, size_t, unsigned)                                                      \
  X(cuMemHostUnregister, "cuMemHostUnregister", required, Result, void *)

HP_DEFINE_API(Api, HARDPOINT_CUDA_FUNCTIONS);

}  // namespace hardpoint::cuda
