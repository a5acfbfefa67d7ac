// Captures and graphs of the CUDA runtime API.
#include "cudart/api.hpp"

using namespace hardpoint::simulators::cudart;

CUDART_CALL(cudaStreamBeginCapture)(Stream stream, int mode) {
  return call_in_context(call_of_cudaStreamBeginCapture, [&] { return cuStreamBeginCapture_v2(stream, mode); });
}

CUDART_CALL(cudaStreamEndCapture)(Stream stream, void** graph) {
  return call_in_context(call_of_cudaStreamEndCapture, [&] { return cuStreamEndCapture(stream, graph); });
}

CUDART_CALL(cudaStreamIsCapturing)(Stream stream, int* status) {
  return call_in_context(call_of_cudaStreamIsCapturing, [&] { return cuStreamIsCapturing(stream, status); });
}

CUDART_CALL(cudaStreamGetCaptureInfo)(Stream stream, int* status, unsigned long long* id, void** graph, const void** dependencies,
                                      const void** edges, std::size_t* count) {
  return call_in_context(call_of_cudaStreamGetCaptureInfo,
                         [&] { return cuStreamGetCaptureInfo_v3(stream, status, id, graph, dependencies, edges, count); });
}

CUDART_CALL(cudaThreadExchangeStreamCaptureMode)(int* mode) {
  return call_without_context(call_of_cudaThreadExchangeStreamCaptureMode, [&] {
    const int code = cuInit(0);
    return code ? code : cuThreadExchangeStreamCaptureMode(mode);
  });
}

CUDART_CALL(cudaGraphGetNodes)(void* graph, void** nodes, std::size_t* count) {
  return call_without_context(call_of_cudaGraphGetNodes, [&] { return cuGraphGetNodes(graph, nodes, count); });
}

CUDART_CALL(cudaGraphInstantiateWithFlags)(void** executable, void* graph, unsigned long long flags) {
  return call_in_context(call_of_cudaGraphInstantiateWithFlags,
                         [&] { return cuGraphInstantiateWithFlags(executable, graph, flags); });
}

CUDART_CALL(cudaGraphLaunch)(void* executable, Stream stream) {
  return call_in_context(call_of_cudaGraphLaunch, [&] { return cuGraphLaunch(executable, stream); });
}

CUDART_CALL(cudaGraphDestroy)(void* graph) {
  return call_without_context(call_of_cudaGraphDestroy, [&] { return cuGraphDestroy(graph); });
}

CUDART_CALL(cudaGraphExecDestroy)(void* executable) {
  return call_without_context(call_of_cudaGraphExecDestroy, [&] { return cuGraphExecDestroy(executable); });
}
