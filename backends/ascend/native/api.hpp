// The part of Huawei's CANN runtime (AscendCL) that the memory driver calls, declared by us, so that it builds without an SDK. `make test-headers`
// compares every line with the vendor's own acl.h. Source: AscendCL API reference (device, context, stream, memory and virtual memory management).
#pragma once
#include <cstddef>
#include <cstdint>

#include "hardpoint/driver_support.hpp"

namespace hardpoint::ascend {

using Result = int;
using Allocation = void *;  // aclrtDrvMemHandle
using Context = void *;
using Stream = void *;

// The location's fields stand in the other order than those of other vendors.
struct MemLocation {
  uint32_t id;
  int type;
};

struct PhysicalMemProp {
  int handle_type;
  int allocation_type;
  int mem_attr;
  MemLocation location;
  uint64_t reserve;
};

struct MemAccessDesc {
  int flags;
  MemLocation location;
  uint8_t rsv[12];
};

// X(our name, value, the vendor's name)
#define HARDPOINT_ASCEND_CODES(X)                                              \
  X(success, 0, ACL_SUCCESS)                                                   \
  X(invalid_param, 100000, ACL_ERROR_INVALID_PARAM)                            \
  X(repeat_initialize, 100002, ACL_ERROR_REPEAT_INITIALIZE)                    \
  X(runtime_param_invalid, 107000, ACL_ERROR_RT_PARAM_INVALID)                 \
  X(invalid_device, 107001, ACL_ERROR_RT_INVALID_DEVICEID)                     \
  X(context_null, 107002, ACL_ERROR_RT_CONTEXT_NULL)                           \
  X(address_unaligned, 107008, ACL_ERROR_RT_ADDR_UNALIGNED)                    \
  X(invalid_handle, 107017, ACL_ERROR_RT_INVALID_HANDLE)                       \
  X(bad_alloc, 200000, ACL_ERROR_BAD_ALLOC)                                    \
  X(api_not_supported, 200001, ACL_ERROR_API_NOT_SUPPORT)                      \
  X(feature_not_supported, 207000, ACL_ERROR_RT_FEATURE_NOT_SUPPORT)           \
  X(memory_allocation, 207001, ACL_ERROR_RT_MEMORY_ALLOCATION)                 \
  X(no_device, 207004, ACL_ERROR_RT_NO_DEVICE)                                 \
  X(device_out_of_memory, 207018, ACL_ERROR_RT_DEVICE_OOM)

#define HARDPOINT_ASCEND_VALUES(X)                                             \
  HARDPOINT_ASCEND_CODES(X)                                                    \
  X(hbm_memory, 1, ACL_HBM_MEM)                                                \
  X(hbm_memory_huge, 4, ACL_HBM_MEM_HUGE)                                      \
  X(handle_none, 0, ACL_MEM_HANDLE_TYPE_NONE)                                  \
  X(allocation_pinned, 0, ACL_MEM_ALLOCATION_TYPE_PINNED)                      \
  X(location_device, 1, ACL_MEM_LOCATION_TYPE_DEVICE)                          \
  X(access_read_write, 3, ACL_RT_MEM_ACCESS_FLAGS_READWRITE)                   \
  X(granularity_minimum, 0, ACL_RT_MEM_ALLOC_GRANULARITY_MINIMUM)              \
  X(granularity_recommended, 1, ACL_RT_MEM_ALLOC_GRANULARITY_RECOMMENDED)      \
  X(huge_pages, 1, HUGE_PAGE_TYPE)                                             \
  X(copy_host_to_device, 1, ACL_MEMCPY_HOST_TO_DEVICE)                         \
  X(copy_device_to_host, 2, ACL_MEMCPY_DEVICE_TO_HOST)                         \
  X(host_pinned, 0x10000000, ACL_HOST_REG_PINNED)

HARDPOINT_ASCEND_VALUES(HP_DECLARE_VALUE)

// X(function, exported symbol, required or optional, result, arguments)
#define HARDPOINT_ASCEND_FUNCTIONS(X)                                                                                                      \
  X(aclGetRecentErrMsg, "aclGetRecentErrMsg", optional, const char *, void)                                                                \
  X(aclInit, "aclInit", required, Result, const char *)                                                                                    \
  X(aclrtGetVersion, "aclrtGetVersion", required, Result, int32_t *, int32_t *, int32_t *)                                                 \
  X(aclrtGetSocName, "aclrtGetSocName", required, const char *, void)                                                                      \
  X(aclrtGetDeviceCount, "aclrtGetDeviceCount", required, Result, uint32_t *)                                                              \
  X(aclrtSetDevice, "aclrtSetDevice", required, Result, int32_t)                                                                           \
  X(aclrtResetDevice, "aclrtResetDevice", required, Result, int32_t)                                                                       \
  X(aclrtGetCurrentContext, "aclrtGetCurrentContext", required, Result, Context *)                                                         \
  X(aclrtSetCurrentContext, "aclrtSetCurrentContext", required, Result, Context)                                                           \
  X(aclrtSynchronizeDevice, "aclrtSynchronizeDevice", required, Result, void)                                                              \
  X(aclrtGetMemInfo, "aclrtGetMemInfo", required, Result, int, size_t *, size_t *)                                                         \
  X(aclrtMemGetAllocationGranularity, "aclrtMemGetAllocationGranularity", optional, Result, PhysicalMemProp *, int, size_t *)              \
  X(aclrtReserveMemAddress, "aclrtReserveMemAddress", required, Result, void **, size_t, size_t, void *, uint64_t)                         \
  X(aclrtReleaseMemAddress, "aclrtReleaseMemAddress", required, Result, void *)                                                            \
  X(aclrtMallocPhysical, "aclrtMallocPhysical", required, Result, Allocation *, size_t, const PhysicalMemProp *, uint64_t)                 \
  X(aclrtFreePhysical, "aclrtFreePhysical", required, Result, Allocation)                                                                  \
  X(aclrtMapMem, "aclrtMapMem", required, Result, void *, size_t, size_t, Allocation, uint64_t)                                            \
  X(aclrtUnmapMem, "aclrtUnmapMem", required, Result, void *)                                                                              \
  X(aclrtMemSetAccess, "aclrtMemSetAccess", optional, Result, void *, size_t, MemAccessDesc *, size_t)                                     \
  X(aclrtCreateStream, "aclrtCreateStream", required, Result, Stream *)                                                                    \
  X(aclrtDestroyStream, "aclrtDestroyStream", required, Result, Stream)                                                                    \
  X(aclrtSynchronizeStream, "aclrtSynchronizeStream", required, Result, Stream)                                                            \
  X(aclrtMemcpyAsync, "aclrtMemcpyAsync", required, Result, void *, size_t, const void *, size_t, int, Stream)                             \
  X(aclrtMemsetAsync, "aclrtMemsetAsync", required, Result, void *, size_t, int32_t, size_t, Stream)                                       \
  X(aclrtHostRegisterV2, "aclrtHostRegisterV2", optional, Result, void *, uint64_t, uint32_t)                                              \
  X(aclrtHostUnregister, "aclrtHostUnregister", optional, Result, void *)

HP_DEFINE_API(Api, HARDPOINT_ASCEND_FUNCTIONS);

}  // namespace hardpoint::ascend
