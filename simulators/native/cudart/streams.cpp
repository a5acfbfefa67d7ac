// Streams and events of the CUDA runtime API.
#include "cudart/api.hpp"

using namespace hardpoint::simulators::cudart;

CUDART_CALL(cudaStreamCreate)(Stream* stream) {
  return call_in_context(call_of_cudaStreamCreate, [&] { return cuStreamCreate(stream, 0); });
}

CUDART_CALL(cudaStreamCreateWithFlags)(Stream* stream, unsigned flags) {
  return call_in_context(call_of_cudaStreamCreateWithFlags, [&] { return cuStreamCreate(stream, flags); });
}

CUDART_CALL(cudaStreamCreateWithPriority)(Stream* stream, unsigned flags, int) {
  return call_in_context(call_of_cudaStreamCreateWithPriority, [&] { return cuStreamCreate(stream, flags); });
}

CUDART_CALL(cudaStreamDestroy)(Stream stream) {
  return call_in_context(call_of_cudaStreamDestroy, [&] { return cuStreamDestroy_v2(stream); });
}

CUDART_CALL(cudaStreamSynchronize)(Stream stream) {
  return call_in_context(call_of_cudaStreamSynchronize, [&] { return cuStreamSynchronize(stream); });
}

CUDART_CALL(cudaStreamQuery)(Stream stream) {
  return call_in_context(call_of_cudaStreamQuery, [&] { return cuStreamQuery(stream); });
}

CUDART_CALL(cudaStreamWaitEvent)(Stream stream, Event event, unsigned flags) {
  return call_in_context(call_of_cudaStreamWaitEvent, [&] { return cuStreamWaitEvent(stream, event, flags); });
}

CUDART_CALL(cudaStreamGetPriority)(Stream, int* priority) {
  return call_in_context(call_of_cudaStreamGetPriority, [&] {
    if (priority) *priority = 0;
    return int{kSuccess};
  });
}

CUDART_CALL(cudaEventCreate)(Event* event) {
  return call_in_context(call_of_cudaEventCreate, [&] { return cuEventCreate(event, 0); });
}

CUDART_CALL(cudaEventCreateWithFlags)(Event* event, unsigned flags) {
  return call_in_context(call_of_cudaEventCreateWithFlags, [&] { return cuEventCreate(event, flags); });
}

CUDART_CALL(cudaEventDestroy)(Event event) {
  return call_in_context(call_of_cudaEventDestroy, [&] { return cuEventDestroy_v2(event); });
}

CUDART_CALL(cudaEventRecord)(Event event, Stream stream) {
  return call_in_context(call_of_cudaEventRecord, [&] { return cuEventRecord(event, stream); });
}

CUDART_CALL(cudaEventRecordWithFlags)(Event event, Stream stream, unsigned) {
  return call_in_context(call_of_cudaEventRecordWithFlags, [&] { return cuEventRecord(event, stream); });
}

CUDART_CALL(cudaEventSynchronize)(Event event) {
  return call_in_context(call_of_cudaEventSynchronize, [&] { return cuEventSynchronize(event); });
}

CUDART_CALL(cudaEventQuery)(Event event) {
  return call_in_context(call_of_cudaEventQuery, [&] { return cuEventQuery(event); });
}

CUDART_CALL(cudaEventElapsedTime)(float* milliseconds, Event start, Event end) {
  return call_in_context(call_of_cudaEventElapsedTime, [&] { return cuEventElapsedTime_v2(milliseconds, start, end); });
}
