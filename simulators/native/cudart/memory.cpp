// Memory, copies and fills of the CUDA runtime API.
#include "cudart/api.hpp"

using namespace hardpoint::simulators::cudart;

namespace {

// cudaPointerAttributes.
struct PointerAttributes {
  int type;
  int device;
  void* device_pointer;
  void* host_pointer;
  long reserved[8];
};
static_assert(sizeof(PointerAttributes) == 88);

constexpr int kTypeUnregistered = 0, kTypeHost = 1, kTypeDevice = 2;

enum CopyKind { kHostToHost, kHostToDevice, kDeviceToHost, kDeviceToDevice, kDefault };

int copy(void* target, const void* source, std::size_t size, int kind) {
  switch (kind) {
    case kHostToDevice:
      return cuMemcpyHtoD_v2(address_of(target), source, size);
    case kDeviceToHost:
      return cuMemcpyDtoH_v2(target, address_of(source), size);
    case kDeviceToDevice:
      return cuMemcpyDtoD_v2(address_of(target), address_of(source), size);
    case kHostToHost:
    case kDefault:
      return cuMemcpy(address_of(target), address_of(source), size);
    default:
      return kInvalidDirection;
  }
}

int copy_on_stream(void* target, const void* source, std::size_t size, int kind, Stream stream) {
  switch (kind) {
    case kHostToDevice:
      return cuMemcpyHtoDAsync_v2(address_of(target), source, size, stream);
    case kDeviceToHost:
      return cuMemcpyDtoHAsync_v2(target, address_of(source), size, stream);
    case kDeviceToDevice:
      return cuMemcpyDtoDAsync_v2(address_of(target), address_of(source), size, stream);
    case kHostToHost:
    case kDefault:
      return cuMemcpyAsync(address_of(target), address_of(source), size, stream);
    default:
      return kInvalidDirection;
  }
}

}  // namespace

CUDART_CALL(cudaMalloc)(void** pointer, std::size_t size) {
  return call_in_context(call_of_cudaMalloc, [&] {
    if (!pointer) return int{kInvalidValue};
    *pointer = nullptr;
    unsigned long long address = 0;
    const int code = size ? cuMemAlloc_v2(&address, size) : kSuccess;
    if (!code) *pointer = reinterpret_cast<void*>(address);
    return code;
  });
}

CUDART_CALL(cudaFree)(void* pointer) {
  return call_in_context(call_of_cudaFree, [&] { return pointer ? cuMemFree_v2(address_of(pointer)) : kSuccess; });
}

CUDART_CALL(cudaHostAlloc)(void** pointer, std::size_t size, unsigned flags) {
  return call_in_context(call_of_cudaHostAlloc, [&] { return cuMemHostAlloc(pointer, size, flags); });
}

CUDART_CALL(cudaFreeHost)(void* pointer) {
  return call_in_context(call_of_cudaFreeHost, [&] { return pointer ? cuMemFreeHost(pointer) : kSuccess; });
}

CUDART_CALL(cudaHostRegister)(void* pointer, std::size_t size, unsigned flags) {
  return call_in_context(call_of_cudaHostRegister, [&] { return cuMemHostRegister_v2(pointer, size, flags); });
}

CUDART_CALL(cudaHostUnregister)(void* pointer) {
  return call_in_context(call_of_cudaHostUnregister, [&] { return cuMemHostUnregister(pointer); });
}

CUDART_CALL(cudaHostGetDevicePointer)(void** device_pointer, void* pointer, unsigned flags) {
  return call_in_context(call_of_cudaHostGetDevicePointer, [&] {
    unsigned long long address = 0;
    const int code = cuMemHostGetDevicePointer_v2(&address, pointer, flags);
    if (!code && device_pointer) *device_pointer = reinterpret_cast<void*>(address);
    return code;
  });
}

CUDART_CALL(cudaMemGetInfo)(std::size_t* free, std::size_t* total) {
  return call_in_context(call_of_cudaMemGetInfo, [&] { return cuMemGetInfo_v2(free, total); });
}

CUDART_CALL(cudaMemcpy)(void* target, const void* source, std::size_t size, int kind) {
  return call_in_context(call_of_cudaMemcpy, [&] { return copy(target, source, size, kind); });
}

CUDART_CALL(cudaMemcpyAsync)(void* target, const void* source, std::size_t size, int kind, Stream stream) {
  return call_in_context(call_of_cudaMemcpyAsync, [&] { return copy_on_stream(target, source, size, kind, stream); });
}

CUDART_CALL(cudaMemcpyPeerAsync)(void* target, int, const void* source, int, std::size_t size, Stream stream) {
  return call_in_context(call_of_cudaMemcpyPeerAsync,
                         [&] { return copy_on_stream(target, source, size, kDeviceToDevice, stream); });
}

CUDART_CALL(cudaMemcpy2DAsync)(void* target, std::size_t target_pitch, const void* source, std::size_t source_pitch,
                               std::size_t width, std::size_t height, int kind, Stream stream) {
  return call_in_context(call_of_cudaMemcpy2DAsync, [&] {
    if (width > target_pitch || width > source_pitch) return int{kInvalidValue};
    for (std::size_t row = 0; row < height; ++row) {
      char* to = static_cast<char*>(target) + row * target_pitch;
      const char* from = static_cast<const char*>(source) + row * source_pitch;
      if (const int code = copy_on_stream(to, from, width, kind, stream)) return code;
    }
    return int{kSuccess};
  });
}

CUDART_CALL(cudaMemset)(void* target, int value, std::size_t size) {
  return call_in_context(call_of_cudaMemset, [&] {
    return cuMemsetD8_v2(address_of(target), static_cast<unsigned char>(value), size);
  });
}

CUDART_CALL(cudaMemsetAsync)(void* target, int value, std::size_t size, Stream stream) {
  return call_in_context(call_of_cudaMemsetAsync, [&] {
    return cuMemsetD8Async(address_of(target), static_cast<unsigned char>(value), size, stream);
  });
}

// Memory that is neither on a device nor pinned is unregistered, which is an answer and no error (since CUDA 11.0).
CUDART_CALL(cudaPointerGetAttributes)(PointerAttributes* attributes, const void* pointer) {
  return call_in_context(call_of_cudaPointerGetAttributes, [&] {
    if (!attributes) return int{kInvalidValue};
    *attributes = PointerAttributes{};
    attributes->device = -2;  // cudaInvalidDeviceId
    attributes->type = kTypeUnregistered;
    unsigned type = 0;
    if (cuPointerGetAttribute(&type, 2, address_of(pointer))) return int{kSuccess};
    attributes->type = type == 2 ? kTypeDevice : kTypeHost;
    attributes->device_pointer = const_cast<void*>(pointer);
    attributes->host_pointer = type == 2 ? nullptr : const_cast<void*>(pointer);
    return cuPointerGetAttribute(&attributes->device, 9, address_of(pointer));
  });
}
