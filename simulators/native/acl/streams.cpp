// Streams and events of the AscendCL runtime API. A stream is not ordered with the default stream.
#include "acl/api.hpp"

using namespace hardpoint::simulators;
using namespace hardpoint::simulators::acl;

namespace {

constexpr int kStreamComplete = 0, kStreamNotReady = 1;
constexpr int kEventNotReady = 0, kEventComplete = 1;
constexpr int kWaitComplete = 0, kWaitNotReady = 1;

int create_stream(CallSite& site, StreamId* stream) {
  return context_call(site, [&](Simulator& machine, int device) {
    if (!stream) return Result::NullArgument;
    *stream = machine.streams.create(device, false);
    return Result::Ok;
  });
}

int destroy_stream(CallSite& site, StreamId stream) {
  return context_call(site, [&](Simulator& machine, int device) { return machine.streams.destroy(stream, device); });
}

int synchronize_stream(CallSite& site, StreamId stream) {
  return context_call(site,
                      [&](Simulator& machine, int device) { return machine.streams.synchronize(stream, device); });
}

int create_event(CallSite& site, EventId* event) {
  return context_call(site, [&](Simulator& machine, int device) {
    if (!event) return Result::NullArgument;
    *event = machine.streams.create_event(device);
    return Result::Ok;
  });
}

int synchronize_event(CallSite& site, EventId event) {
  return context_call(site, [&](Simulator& machine, int) { return machine.streams.synchronize_event(event); });
}

// A question whose answer "not ready" is a value and no error.
Result tell(Result result, int* status, int ready, int not_ready) {
  if (!status) return Result::NullArgument;
  if (result != Result::Ok && result != Result::NotReady) return result;
  *status = result == Result::Ok ? ready : not_ready;
  return Result::Ok;
}

}  // namespace

ACL_CALL(aclrtCreateStream)(StreamId* stream) { return create_stream(site_of_aclrtCreateStream, stream); }

ACL_CALL(aclrtCreateStreamWithConfig)(StreamId* stream, std::uint32_t, std::uint32_t) {
  return create_stream(site_of_aclrtCreateStreamWithConfig, stream);
}

ACL_CALL(aclrtDestroyStream)(StreamId stream) { return destroy_stream(site_of_aclrtDestroyStream, stream); }

ACL_CALL(aclrtDestroyStreamForce)(StreamId stream) { return destroy_stream(site_of_aclrtDestroyStreamForce, stream); }

ACL_CALL(aclrtSynchronizeStream)(StreamId stream) {
  return synchronize_stream(site_of_aclrtSynchronizeStream, stream);
}

ACL_CALL(aclrtSynchronizeStreamWithTimeout)(StreamId stream, std::int32_t) {
  return synchronize_stream(site_of_aclrtSynchronizeStreamWithTimeout, stream);
}

ACL_CALL(aclrtStreamQuery)(StreamId stream, int* status) {
  return context_call(site_of_aclrtStreamQuery, [&](Simulator& machine, int device) {
    return tell(machine.streams.query(stream, device), status, kStreamComplete, kStreamNotReady);
  });
}

ACL_CALL(aclrtStreamGetId)(StreamId stream, std::int32_t* id) {
  return context_call(site_of_aclrtStreamGetId, [&](Simulator& machine, int) {
    if (!id) return Result::NullArgument;
    if (!machine.streams.known_stream(stream)) return Result::InvalidHandle;
    *id = static_cast<std::int32_t>(stream & 0x7fffffff);
    return Result::Ok;
  });
}

ACL_CALL(aclrtStreamWaitEvent)(StreamId stream, EventId event) {
  return context_call(site_of_aclrtStreamWaitEvent, [&](Simulator& machine, int device) {
    return machine.streams.wait_event(stream, device, event);
  });
}

ACL_CALL(aclrtCreateEvent)(EventId* event) { return create_event(site_of_aclrtCreateEvent, event); }

ACL_CALL(aclrtCreateEventWithFlag)(EventId* event, std::uint32_t) {
  return create_event(site_of_aclrtCreateEventWithFlag, event);
}

ACL_CALL(aclrtCreateEventExWithFlag)(EventId* event, std::uint32_t) {
  return create_event(site_of_aclrtCreateEventExWithFlag, event);
}

ACL_CALL(aclrtDestroyEvent)(EventId event) {
  return context_call(site_of_aclrtDestroyEvent,
                      [&](Simulator& machine, int) { return machine.streams.destroy_event(event); });
}

ACL_CALL(aclrtRecordEvent)(EventId event, StreamId stream) {
  return context_call(site_of_aclrtRecordEvent,
                      [&](Simulator& machine, int device) { return machine.streams.record(event, stream, device); });
}

ACL_CALL(aclrtResetEvent)(EventId event, StreamId) {
  return context_call(site_of_aclrtResetEvent,
                      [&](Simulator& machine, int) { return machine.streams.reset_event(event); });
}

ACL_CALL(aclrtSynchronizeEvent)(EventId event) { return synchronize_event(site_of_aclrtSynchronizeEvent, event); }

ACL_CALL(aclrtSynchronizeEventWithTimeout)(EventId event, std::int32_t) {
  return synchronize_event(site_of_aclrtSynchronizeEventWithTimeout, event);
}

ACL_CALL(aclrtQueryEventStatus)(EventId event, int* status) {
  return context_call(site_of_aclrtQueryEventStatus, [&](Simulator& machine, int) {
    return tell(machine.streams.query_event(event), status, kEventComplete, kEventNotReady);
  });
}

ACL_CALL(aclrtQueryEventWaitStatus)(EventId event, int* status) {
  return context_call(site_of_aclrtQueryEventWaitStatus, [&](Simulator& machine, int) {
    return tell(machine.streams.query_event(event), status, kWaitComplete, kWaitNotReady);
  });
}

ACL_CALL(aclrtEventElapsedTime)(float* milliseconds, EventId start, EventId end) {
  return context_call(site_of_aclrtEventElapsedTime, [&](Simulator& machine, int) {
    if (!milliseconds) return Result::NullArgument;
    return machine.streams.elapsed(start, end, milliseconds);
  });
}
