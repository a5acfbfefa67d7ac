// Our declarations of the HIP runtime against the vendor's own. Compiles, or says which differs.
#define __HIP_PLATFORM_AMD__ 1
#include <hip/hip_runtime_api.h>

#include "abi.hpp"
#include "api.hpp"

using namespace hardpoint::rocm;

HARDPOINT_ROCM_FUNCTIONS(ABI_SAME_FUNCTION)
HARDPOINT_ROCM_VALUES(ABI_SAME_VALUE)

ABI_SAME_SIZE(hipMemLocation, MemLocation);
ABI_SAME_FIELD(hipMemLocation, type, MemLocation, type);
ABI_SAME_FIELD(hipMemLocation, id, MemLocation, id);

ABI_SAME_SIZE(hipMemAllocationProp, MemAllocationProp);
ABI_SAME_FIELD(hipMemAllocationProp, type, MemAllocationProp, type);
ABI_SAME_FIELD(hipMemAllocationProp, requestedHandleType, MemAllocationProp, requested_handle_type);
ABI_SAME_FIELD(hipMemAllocationProp, location, MemAllocationProp, location);
ABI_SAME_FIELD(hipMemAllocationProp, win32HandleMetaData, MemAllocationProp, win32_handle_meta_data);
ABI_SAME_FIELD(hipMemAllocationProp, allocFlags, MemAllocationProp, alloc_flags);
ABI_SAME_FIELD(hipMemAllocationProp, allocFlags.compressionType, MemAllocationProp, alloc_flags.compression_type);
ABI_SAME_FIELD(hipMemAllocationProp, allocFlags.gpuDirectRDMACapable, MemAllocationProp, alloc_flags.gpu_direct_rdma_capable);
ABI_SAME_FIELD(hipMemAllocationProp, allocFlags.usage, MemAllocationProp, alloc_flags.usage);

ABI_SAME_SIZE(hipMemAccessDesc, MemAccessDesc);
ABI_SAME_FIELD(hipMemAccessDesc, location, MemAccessDesc, location);
ABI_SAME_FIELD(hipMemAccessDesc, flags, MemAccessDesc, flags);

static_assert(sizeof(hipMemGenericAllocationHandle_t) == sizeof(Allocation));

static_assert(HIP_VERSION_MAJOR == MAJOR_VERSION && HIP_VERSION_MINOR == MINOR_VERSION, "version of the headers");
