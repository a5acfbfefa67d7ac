// CUresult codes, their names and texts.
#include <algorithm>
#include <iterator>

#include "cuda/api.hpp"

namespace hardpoint::simulators {

// Comments of cuda.h: a new mapping has no access; unmapping takes whole mappings, several at a time if they are contiguous;
// setting access takes a range of whole mappings; alignment is a power of two or 0.
const Vendor& vendor() {
  static const Vendor cuda = [] {
    Vendor made{"cuda", {}, {}};
    made.rules = {/*access_on_map=*/false,       /*map_whole_handle=*/false, /*unmap_one_mapping=*/false,
                  /*access_one_mapping=*/false,  /*alignment_must_be_zero=*/false,
                  /*one_device_per_reservation=*/false};
    return made;
  }();
  return cuda;
}

namespace cuda {

namespace {

struct ErrorText {
  int code;
  const char* name;
  const char* text;
};

constexpr ErrorText kErrors[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {4, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    {34, "CUDA_ERROR_STUB_LIBRARY", "CUDA driver is a stub library"},
    {46, "CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA-capable device(s) is/are busy or unavailable"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {401, "CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"},
    {500, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {600, "CUDA_ERROR_NOT_READY", "device not ready"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {709, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "part or all of the requested memory range is already mapped"},
    {713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "pointer does not correspond to a registered memory region"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {800, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {802, "CUDA_ERROR_SYSTEM_NOT_READY", "system not yet initialized"},
    {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
    {901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "operation failed due to a previous error during capture"},
    {908, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", "attempt to terminate a thread-local capture sequence from another thread"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

const ErrorText* find_error(int code) {
  const auto* end = std::end(kErrors);
  const auto* found = std::find_if(std::begin(kErrors), end, [&](const ErrorText& error) { return error.code == code; });
  return found == end ? nullptr : found;
}

}  // namespace

int Codes::of(Result result) {
  switch (result) {
    case Result::Ok:
    case Result::AlreadyInitialized:
      return success;
    case Result::InvalidValue:
    case Result::InvalidDirection:
    case Result::NullArgument:
      return invalid_value;
    case Result::OutOfMemory:
      return 2;
    case Result::NotInitialized:
      return 3;
    case Result::NoDevice:
      return 100;
    case Result::InvalidDevice:
      return 101;
    case Result::InvalidContext:
      return 201;
    case Result::InvalidHandle:
      return 400;
    case Result::NotReady:
      return 600;
    case Result::IllegalAddress:
      return 700;
    case Result::ContextDestroyed:
      return 709;
    case Result::HostAlreadyRegistered:
      return 712;
    case Result::HostNotRegistered:
      return 713;
    case Result::NotPermitted:
      return 800;
    case Result::NotSupported:
      return 801;
    case Result::IllegalState:
      return 401;
    case Result::CaptureUnsupported:
      return 900;
    case Result::CaptureInvalidated:
      return 901;
    case Result::CaptureWrongThread:
      return 908;
  }
  return 999;
}

}  // namespace cuda
}  // namespace hardpoint::simulators

using namespace hardpoint::simulators::cuda;

// The two functions below are not counted and never fail by injection: they are how a program tells of a failure.
extern "C" __attribute__((visibility("default"))) int cuGetErrorName(int code, const char** name) {
  const ErrorText* error = find_error(code);
  if (!name) return Codes::invalid_value;
  *name = error ? error->name : nullptr;
  return error ? Codes::success : Codes::invalid_value;
}

extern "C" __attribute__((visibility("default"))) int cuGetErrorString(int code, const char** text) {
  const ErrorText* error = find_error(code);
  if (!text) return Codes::invalid_value;
  *text = error ? error->text : nullptr;
  return error ? Codes::success : Codes::invalid_value;
}
