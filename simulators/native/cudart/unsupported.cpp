// What a machine without a processor cannot do. Kernels and what else computes answer cudaErrorNotSupported, which
// cudaGetLastError tells too: success would let wrong results pass for right ones.
#include "cudart/api.hpp"

using namespace hardpoint::simulators::cudart;

// Callers pass arguments, which the platform's C calling convention lets a function without parameters leave alone.
#define CUDART_UNSUPPORTED(name) \
  CUDART_CALL(name)() { return call_without_context(call_of_##name, [] { return int{kNotSupported}; }); }

CUDART_UNSUPPORTED(__cudaGetKernel)
CUDART_UNSUPPORTED(__cudaLaunchKernel)
CUDART_UNSUPPORTED(cudaDeviceEnablePeerAccess)
CUDART_UNSUPPORTED(cudaDeviceGetDefaultMemPool)
CUDART_UNSUPPORTED(cudaFreeAsync)
CUDART_UNSUPPORTED(cudaFuncGetAttributes)
CUDART_UNSUPPORTED(cudaFuncSetAttribute)
CUDART_UNSUPPORTED(cudaGetSymbolAddress)
CUDART_UNSUPPORTED(cudaGraphAddNode)
CUDART_UNSUPPORTED(cudaGraphConditionalHandleCreate)
CUDART_UNSUPPORTED(cudaGraphDebugDotPrint)
CUDART_UNSUPPORTED(cudaGraphNodeGetDependencies)
CUDART_UNSUPPORTED(cudaIpcCloseMemHandle)
CUDART_UNSUPPORTED(cudaIpcGetEventHandle)
CUDART_UNSUPPORTED(cudaIpcGetMemHandle)
CUDART_UNSUPPORTED(cudaIpcOpenEventHandle)
CUDART_UNSUPPORTED(cudaIpcOpenMemHandle)
CUDART_UNSUPPORTED(cudaKernelSetAttributeForDevice)
CUDART_UNSUPPORTED(cudaLaunchCooperativeKernel)
CUDART_UNSUPPORTED(cudaLaunchHostFunc)
CUDART_UNSUPPORTED(cudaLaunchKernel)
CUDART_UNSUPPORTED(cudaLaunchKernelExC)
CUDART_UNSUPPORTED(cudaLibraryGetKernel)
CUDART_UNSUPPORTED(cudaLibraryLoadData)
CUDART_UNSUPPORTED(cudaLibraryUnload)
CUDART_UNSUPPORTED(cudaMallocAsync)
CUDART_UNSUPPORTED(cudaMemPoolGetAttribute)
CUDART_UNSUPPORTED(cudaMemPoolSetAccess)
CUDART_UNSUPPORTED(cudaMemPoolSetAttribute)
CUDART_UNSUPPORTED(cudaMemPoolTrimTo)
CUDART_UNSUPPORTED(cudaMemcpyToSymbol)
CUDART_UNSUPPORTED(cudaOccupancyMaxActiveBlocksPerMultiprocessor)
CUDART_UNSUPPORTED(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags)
CUDART_UNSUPPORTED(cudaStreamAddCallback)
CUDART_UNSUPPORTED(cudaStreamBeginCaptureToGraph)
CUDART_UNSUPPORTED(cudaStreamUpdateCaptureDependencies)

// Registration of compiled kernels happens while a program is loaded: it is taken note of, and the launch fails.
CUDART_EXPORT void** __cudaRegisterFatBinary(void*) {
  static void* registered = nullptr;
  return &registered;
}

CUDART_EXPORT void __cudaRegisterFatBinaryEnd(void**) {}

CUDART_EXPORT void __cudaUnregisterFatBinary(void**) {}

CUDART_EXPORT void __cudaRegisterFunction() {}

CUDART_EXPORT void __cudaRegisterVar() {}

CUDART_EXPORT char __cudaInitModule(void**) { return 1; }

CUDART_EXPORT unsigned __cudaPushCallConfiguration() { return kSuccess; }

CUDART_EXPORT int __cudaPopCallConfiguration() { return kSuccess; }
