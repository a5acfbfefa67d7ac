// Streams and events of the HIP runtime API.
#include "hip/api.hpp"

using namespace hardpoint::simulators;
using namespace hardpoint::simulators::hip;

namespace {

constexpr unsigned kNonBlocking = 1;

int create_stream(CallSite& site, StreamId* stream, unsigned flags) {
  return hip_call(site, [&](Simulator& machine, int device) {
    if (!stream || (flags & ~kNonBlocking)) {
      return machine.violations.note(Result::InvalidValue, "no result pointer, or unknown flags");
    }
    *stream = machine.streams.create(device, !(flags & kNonBlocking));
    return Result::Ok;
  });
}

int create_event(CallSite& site, EventId* event) {
  return hip_call(site, [&](Simulator& machine, int device) {
    if (!event) return Result::NullArgument;
    *event = machine.streams.create_event(device);
    return Result::Ok;
  });
}

}  // namespace

HIP_CALL(hipStreamCreate)(StreamId* stream) { return create_stream(site_of_hipStreamCreate, stream, 0); }

HIP_CALL(hipStreamCreateWithFlags)(StreamId* stream, unsigned flags) {
  return create_stream(site_of_hipStreamCreateWithFlags, stream, flags);
}

HIP_CALL(hipStreamCreateWithPriority)(StreamId* stream, unsigned flags, int) {
  return create_stream(site_of_hipStreamCreateWithPriority, stream, flags);
}

HIP_CALL(hipStreamDestroy)(StreamId stream) {
  return hip_call(site_of_hipStreamDestroy,
                  [&](Simulator& machine, int device) { return machine.streams.destroy(stream, device); });
}

HIP_CALL(hipStreamSynchronize)(StreamId stream) {
  return hip_call(site_of_hipStreamSynchronize,
                  [&](Simulator& machine, int device) { return machine.streams.synchronize(stream, device); });
}

HIP_CALL(hipStreamQuery)(StreamId stream) {
  return hip_call(site_of_hipStreamQuery,
                  [&](Simulator& machine, int device) { return machine.streams.query(stream, device); });
}

HIP_CALL(hipStreamWaitEvent)(StreamId stream, EventId event, unsigned) {
  return hip_call(site_of_hipStreamWaitEvent,
                  [&](Simulator& machine, int device) { return machine.streams.wait_event(stream, device, event); });
}

HIP_CALL(hipEventCreate)(EventId* event) { return create_event(site_of_hipEventCreate, event); }

HIP_CALL(hipEventCreateWithFlags)(EventId* event, unsigned) {
  return create_event(site_of_hipEventCreateWithFlags, event);
}

HIP_CALL(hipEventDestroy)(EventId event) {
  return hip_call(site_of_hipEventDestroy,
                  [&](Simulator& machine, int) { return machine.streams.destroy_event(event); });
}

HIP_CALL(hipEventRecord)(EventId event, StreamId stream) {
  return hip_call(site_of_hipEventRecord,
                  [&](Simulator& machine, int device) { return machine.streams.record(event, stream, device); });
}

HIP_CALL(hipEventSynchronize)(EventId event) {
  return hip_call(site_of_hipEventSynchronize,
                  [&](Simulator& machine, int) { return machine.streams.synchronize_event(event); });
}

HIP_CALL(hipEventQuery)(EventId event) {
  return hip_call(site_of_hipEventQuery, [&](Simulator& machine, int) { return machine.streams.query_event(event); });
}

HIP_CALL(hipEventElapsedTime)(float* milliseconds, EventId start, EventId end) {
  return hip_call(site_of_hipEventElapsedTime, [&](Simulator& machine, int) {
    if (!milliseconds) return Result::NullArgument;
    return machine.streams.elapsed(start, end, milliseconds);
  });
}
