// Streams and events of the CUDA driver API.
#include "cuda/api.hpp"

using namespace hardpoint::simulators;
using namespace hardpoint::simulators::cuda;

namespace {

constexpr unsigned kNonBlocking = 1;

Result create_stream(Simulator& machine, int device, StreamId* stream, unsigned flags) {
  if (!stream || (flags & ~kNonBlocking)) {
    return machine.violations.note(Result::InvalidValue, "no result pointer, or unknown flags");
  }
  *stream = machine.streams.create(device, !(flags & kNonBlocking));
  return Result::Ok;
}

}  // namespace

CUDA_CALL(cuStreamCreate)(StreamId* stream, unsigned flags) {
  return context_call(site_of_cuStreamCreate, [&](Simulator& machine, int device) {
    return create_stream(machine, device, stream, flags);
  });
}

CUDA_CALL(cuStreamCreateWithPriority)(StreamId* stream, unsigned flags, int) {
  return context_call(site_of_cuStreamCreateWithPriority, [&](Simulator& machine, int device) {
    return create_stream(machine, device, stream, flags);
  });
}

CUDA_CALL(cuStreamDestroy_v2)(StreamId stream) {
  return context_call(site_of_cuStreamDestroy_v2,
                      [&](Simulator& machine, int device) { return machine.streams.destroy(stream, device); });
}

CUDA_CALL(cuStreamSynchronize)(StreamId stream) {
  return context_call(site_of_cuStreamSynchronize,
                      [&](Simulator& machine, int device) { return machine.streams.synchronize(stream, device); });
}

CUDA_CALL(cuStreamQuery)(StreamId stream) {
  return context_call(site_of_cuStreamQuery,
                      [&](Simulator& machine, int device) { return machine.streams.query(stream, device); });
}

CUDA_CALL(cuStreamWaitEvent)(StreamId stream, EventId event, unsigned) {
  return context_call(site_of_cuStreamWaitEvent, [&](Simulator& machine, int device) {
    return machine.streams.wait_event(stream, device, event);
  });
}

CUDA_CALL(cuEventCreate)(EventId* event, unsigned) {
  return context_call(site_of_cuEventCreate, [&](Simulator& machine, int device) {
    if (!event) return Result::InvalidValue;
    *event = machine.streams.create_event(device);
    return Result::Ok;
  });
}

CUDA_CALL(cuEventDestroy_v2)(EventId event) {
  return context_call(site_of_cuEventDestroy_v2,
                      [&](Simulator& machine, int) { return machine.streams.destroy_event(event); });
}

CUDA_CALL(cuEventRecord)(EventId event, StreamId stream) {
  return context_call(site_of_cuEventRecord, [&](Simulator& machine, int device) {
    return machine.streams.record(event, stream, device);
  });
}

CUDA_CALL(cuEventSynchronize)(EventId event) {
  return context_call(site_of_cuEventSynchronize,
                      [&](Simulator& machine, int) { return machine.streams.synchronize_event(event); });
}

CUDA_CALL(cuEventQuery)(EventId event) {
  return context_call(site_of_cuEventQuery,
                      [&](Simulator& machine, int) { return machine.streams.query_event(event); });
}

CUDA_CALL(cuEventElapsedTime_v2)(float* milliseconds, EventId start, EventId end) {
  return context_call(site_of_cuEventElapsedTime_v2, [&](Simulator& machine, int) {
    if (!milliseconds) return Result::InvalidValue;
    return machine.streams.elapsed(start, end, milliseconds);
  });
}
