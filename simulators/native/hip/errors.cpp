// hipError_t codes, their names and texts.
#include <algorithm>
#include <iterator>

#include "hip/api.hpp"

namespace hardpoint::simulators {

// The driver itself checks little (ROCm/clr, hip_vm.cpp); these rules are what its users found to be needed: each mapping is
// unmapped on its own (ROCR-Runtime#285), and before its handle is released (ROCR-Runtime#257).
const Vendor& vendor() {
  static const Vendor hip = [] {
    Vendor made{"rocm", {}, {}};
    made.rules = {/*access_on_map=*/false,       /*map_whole_handle=*/false, /*unmap_one_mapping=*/true,
                  /*access_one_mapping=*/false,  /*alignment_must_be_zero=*/false,
                  /*one_device_per_reservation=*/false};
    // An MI300X under ROCm 7.2, as its sources and users have it.
    made.defaults.granularity = 4096;
    made.defaults.recommended_granularity = std::uint64_t{2} << 20;
    made.defaults.access_from_first = 1;
    made.defaults.hold_until_address_free = 1;
    made.defaults.unmap_waits = 1;
    made.defaults.release_needs_unmap = 1;
    made.defaults.posix_handles = 0;
    return made;
  }();
  return hip;
}

namespace hip {

namespace {

struct ErrorText {
  int code;
  const char* name;
  const char* text;
};

constexpr ErrorText kErrors[] = {
    {0, "hipSuccess", "no error"},
    {1, "hipErrorInvalidValue", "invalid argument"},
    {2, "hipErrorOutOfMemory", "out of memory"},
    {3, "hipErrorNotInitialized", "initialization error"},
    {4, "hipErrorDeinitialized", "driver shutting down"},
    {21, "hipErrorInvalidMemcpyDirection", "invalid copy direction for memcpy"},
    {100, "hipErrorNoDevice", "no ROCm-capable device is detected"},
    {101, "hipErrorInvalidDevice", "invalid device ordinal"},
    {201, "hipErrorInvalidContext", "invalid device context"},
    {400, "hipErrorInvalidHandle", "invalid resource handle"},
    {600, "hipErrorNotReady", "device not ready"},
    {700, "hipErrorIllegalAddress", "an illegal memory access was encountered"},
    {709, "hipErrorContextIsDestroyed", "context is destroyed"},
    {712, "hipErrorHostMemoryAlreadyRegistered", "part or all of the requested memory range is already mapped"},
    {713, "hipErrorHostMemoryNotRegistered", "pointer does not correspond to a registered memory region"},
    {719, "hipErrorLaunchFailure", "unspecified launch failure"},
    {801, "hipErrorNotSupported", "operation not supported"},
};

constexpr ErrorText kUnknown = {999, "hipErrorUnknown", "unknown error"};

const ErrorText& find_error(int code) {
  const auto* end = std::end(kErrors);
  const auto* found = std::find_if(std::begin(kErrors), end, [&](const ErrorText& error) { return error.code == code; });
  return found == end ? kUnknown : *found;
}

thread_local int last_error = 0;

}  // namespace

int Codes::of(Result result) {
  switch (result) {
    case Result::Ok:
    case Result::AlreadyInitialized:
      return 0;
    case Result::InvalidValue:
    case Result::NullArgument:
      return 1;
    case Result::OutOfMemory:
      return 2;
    case Result::NotInitialized:
      return 3;
    case Result::InvalidDirection:
      return 21;
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
  return kUnknown.code;
}

int remember(int code) {
  if (code) last_error = code;
  return code;
}

}  // namespace hip
}  // namespace hardpoint::simulators

using namespace hardpoint::simulators::hip;

// The functions below are not counted and never fail by injection: they are how a program tells of a failure.
#define HIP_EXPORT extern "C" __attribute__((visibility("default")))

HIP_EXPORT const char* hipGetErrorName(int code) { return find_error(code).name; }

HIP_EXPORT const char* hipGetErrorString(int code) { return find_error(code).text; }

HIP_EXPORT int hipDrvGetErrorName(int code, const char** name) {
  if (!name) return 1;
  *name = find_error(code).name;
  return 0;
}

HIP_EXPORT int hipDrvGetErrorString(int code, const char** text) {
  if (!text) return 1;
  *text = find_error(code).text;
  return 0;
}

HIP_EXPORT int hipGetLastError() {
  const int code = last_error;
  last_error = 0;
  return code;
}

HIP_EXPORT int hipPeekAtLastError() { return last_error; }
