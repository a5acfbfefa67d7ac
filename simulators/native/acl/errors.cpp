// aclError codes, and the text of the latest failure.
#include <string>
#include <utility>

#include "acl/api.hpp"

namespace hardpoint::simulators {

// CANN's runtime documents and sources: a handle is mapped whole; the owner may read and write from the mapping on; setting access
// repeats the mapped range; reserving takes no alignment; a reservation holds memory of one device, and at most 128 GiB.
const Vendor& vendor() {
  static const Vendor ascend = [] {
    Vendor made{"ascend", {}, {}};
    made.rules = {/*access_on_map=*/true,       /*map_whole_handle=*/true, /*unmap_one_mapping=*/true,
                  /*access_one_mapping=*/true,  /*alignment_must_be_zero=*/true,
                  /*one_device_per_reservation=*/true};
    made.defaults.max_reservation = std::uint64_t{128} << 30;
    made.defaults.posix_handles = 0;
    return made;
  }();
  return ascend;
}

namespace acl {

namespace {

thread_local std::string latest_failure;
thread_local std::string told_failure;

}  // namespace

int Codes::of(Result result) {
  switch (result) {
    case Result::Ok:
      return 0;
    case Result::NullArgument:
      return 100000;
    case Result::NotInitialized:
      return 100001;
    case Result::AlreadyInitialized:
      return 100002;
    case Result::InvalidValue:
    case Result::InvalidDirection:
      return 107000;
    case Result::InvalidDevice:
      return 107001;
    case Result::InvalidContext:
    case Result::ContextDestroyed:
      return 107002;
    case Result::InvalidHandle:
      return 107017;
    case Result::NotSupported:
    case Result::IllegalState:  // captures are not simulated
    case Result::CaptureUnsupported:
    case Result::CaptureInvalidated:
    case Result::CaptureWrongThread:
      return 207000;
    case Result::OutOfMemory:
      return 207001;
    case Result::NoDevice:
      return 207004;
    case Result::NotPermitted:
      return 207006;
    case Result::NotReady:
      return 507006;
    case Result::IllegalAddress:
      return 507053;
    case Result::HostAlreadyRegistered:
      return 507910;
    case Result::HostNotRegistered:
      return 507911;
  }
  return 500000;
}

int remember(const CallSite& site, int code) noexcept {
  if (!code) return code;
  try {
    latest_failure = std::string("simulated driver: ") + site.name() + " answered " + std::to_string(code);
  } catch (const std::bad_alloc&) {
    latest_failure.clear();
  }
  return code;
}

}  // namespace acl
}  // namespace hardpoint::simulators

using namespace hardpoint::simulators::acl;

// Not counted, never fails by injection: it is how a program tells of a failure. Reading the text takes it away.
ACL_EXPORT const char* aclGetRecentErrMsg() {
  told_failure.swap(latest_failure);
  latest_failure.clear();
  return told_failure.empty() ? nullptr : told_failure.c_str();
}

ACL_EXPORT int aclrtGetLastError(int) { return 0; }

ACL_EXPORT int aclrtPeekAtLastError(int) { return 0; }
