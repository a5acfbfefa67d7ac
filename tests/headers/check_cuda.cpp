// Our declarations of the CUDA driver API against the vendor's own. Compiles, or says which differs.
#include <cuda.h>

#include "abi.hpp"
#include "api.hpp"

using namespace hardpoint::cuda;

HARDPOINT_CUDA_FUNCTIONS(ABI_SAME_FUNCTION)
HARDPOINT_CUDA_VALUES(ABI_SAME_VALUE)

ABI_SAME_SIZE(CUmemLocation, MemLocation);
ABI_SAME_FIELD(CUmemLocation, type, MemLocation, type);
ABI_SAME_FIELD(CUmemLocation, id, MemLocation, id);

ABI_SAME_SIZE(CUmemAllocationProp, MemAllocationProp);
ABI_SAME_FIELD(CUmemAllocationProp, type, MemAllocationProp, type);
ABI_SAME_FIELD(CUmemAllocationProp, requestedHandleTypes, MemAllocationProp, requested_handle_types);
ABI_SAME_FIELD(CUmemAllocationProp, location, MemAllocationProp, location);
ABI_SAME_FIELD(CUmemAllocationProp, win32HandleMetaData, MemAllocationProp, win32_handle_meta_data);
ABI_SAME_FIELD(CUmemAllocationProp, allocFlags, MemAllocationProp, alloc_flags);
ABI_SAME_FIELD(CUmemAllocationProp, allocFlags.compressionType, MemAllocationProp, alloc_flags.compression_type);
ABI_SAME_FIELD(CUmemAllocationProp, allocFlags.gpuDirectRDMACapable, MemAllocationProp, alloc_flags.gpu_direct_rdma_capable);
ABI_SAME_FIELD(CUmemAllocationProp, allocFlags.usage, MemAllocationProp, alloc_flags.usage);

ABI_SAME_SIZE(CUmemAccessDesc, MemAccessDesc);
ABI_SAME_FIELD(CUmemAccessDesc, location, MemAccessDesc, location);
ABI_SAME_FIELD(CUmemAccessDesc, flags, MemAccessDesc, flags);

static_assert(sizeof(CUdeviceptr) == sizeof(Address) && sizeof(CUmemGenericAllocationHandle) == sizeof(Allocation));

static_assert(CUDA_VERSION / 1000 == MAJOR_VERSION && CUDA_VERSION % 1000 / 10 == MINOR_VERSION, "version of the headers");
