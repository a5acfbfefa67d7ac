// Captures and graphs of the CUDA driver API. Graphs hold copies and fills: nothing else that would be recorded exists here.
#include "cuda/api.hpp"

using namespace hardpoint::simulators;
using namespace hardpoint::simulators::cuda;

using GraphId = Captures::GraphId;

namespace {

constexpr int kLastMode = static_cast<int>(CaptureMode::Relaxed);

}  // namespace

CUDA_CALL(cuStreamBeginCapture_v2)(StreamId stream, int mode) {
  return context_call(site_of_cuStreamBeginCapture_v2, [&](Simulator& machine, int device) {
    if (mode < 0 || mode > kLastMode) return machine.violations.note(Result::InvalidValue, "unknown mode");
    if (!machine.streams.known_stream(stream)) return machine.violations.note(Result::InvalidHandle, "unknown stream");
    return machine.captures.begin(stream, device, static_cast<CaptureMode>(mode));
  });
}

CUDA_CALL(cuStreamEndCapture)(StreamId stream, GraphId* graph) {
  return context_call(site_of_cuStreamEndCapture, [&](Simulator& machine, int) {
    return graph ? machine.captures.end(stream, graph) : Result::InvalidValue;
  });
}

CUDA_CALL(cuStreamIsCapturing)(StreamId stream, int* status) {
  return context_call(site_of_cuStreamIsCapturing, [&](Simulator& machine, int) {
    if (!status) return Result::InvalidValue;
    *status = static_cast<int>(machine.captures.status(stream, nullptr));
    return Result::Ok;
  });
}

CUDA_CALL(cuStreamGetCaptureInfo_v3)(StreamId stream, int* status, unsigned long long* id, void** graph, const void** dependencies,
                                     const void** edges, std::size_t* count) {
  return context_call(site_of_cuStreamGetCaptureInfo_v3, [&](Simulator& machine, int) {
    if (!status) return Result::InvalidValue;
    std::uint64_t found = 0;
    *status = static_cast<int>(machine.captures.status(stream, &found));
    if (id) *id = found;
    for (const void** nothing : {const_cast<const void**>(graph), dependencies, edges}) {
      if (nothing) *nothing = nullptr;
    }
    if (count) *count = 0;
    return Result::Ok;
  });
}

CUDA_CALL(cuThreadExchangeStreamCaptureMode)(int* mode) {
  return driver_call(site_of_cuThreadExchangeStreamCaptureMode, [&](Simulator& machine) {
    if (!mode || *mode < 0 || *mode > kLastMode) return machine.violations.note(Result::InvalidValue, "unknown mode");
    *mode = static_cast<int>(Captures::exchange(static_cast<CaptureMode>(*mode)));
    return Result::Ok;
  });
}

CUDA_CALL(cuGraphGetNodes)(GraphId graph, void**, std::size_t* count) {
  return driver_call(site_of_cuGraphGetNodes, [&](Simulator& machine) {
    if (!count || !machine.captures.has_graph(graph)) return machine.violations.note(Result::InvalidValue, "unknown graph");
    *count = machine.captures.size(graph);
    return Result::Ok;
  });
}

CUDA_CALL(cuGraphInstantiateWithFlags)(GraphId* executable, GraphId graph, unsigned long long) {
  return context_call(site_of_cuGraphInstantiateWithFlags, [&](Simulator& machine, int) {
    return executable ? machine.captures.instantiate(graph, machine.memory, executable) : Result::InvalidValue;
  });
}

CUDA_CALL(cuGraphLaunch)(GraphId executable, StreamId stream) {
  return context_call(site_of_cuGraphLaunch, [&](Simulator& machine, int) {
    if (!machine.streams.known_stream(stream)) return machine.violations.note(Result::InvalidHandle, "unknown stream");
    return machine.streams.launch(executable, stream);
  });
}

CUDA_CALL(cuGraphDestroy)(GraphId graph) {
  return driver_call(site_of_cuGraphDestroy, [&](Simulator& machine) { return machine.captures.destroy(graph); });
}

CUDA_CALL(cuGraphExecDestroy)(GraphId executable) {
  return driver_call(site_of_cuGraphExecDestroy,
                     [&](Simulator& machine) { return machine.captures.destroy_executable(executable); });
}
