#include "core/captures.hpp"

#include <utility>

namespace hardpoint::simulators {

namespace {

thread_local CaptureMode mode_of_thread = CaptureMode::Global;

}  // namespace

Result Captures::begin(StreamId stream, int device, CaptureMode mode) {
  if (stream <= 1) return violations_.note(Result::CaptureUnsupported, "the default stream cannot be captured");
  if (captures_.count(stream)) return violations_.note(Result::IllegalState, "the stream is being captured already");
  captures_.emplace(stream, Capture{++next_capture_, device, mode, std::this_thread::get_id()});
  return Result::Ok;
}

Result Captures::end(StreamId stream, GraphId* graph) {
  *graph = 0;
  const auto it = captures_.find(stream);
  if (it == captures_.end()) return violations_.note(Result::IllegalState, "the stream is not being captured");
  if (it->second.mode != CaptureMode::Relaxed && it->second.thread != std::this_thread::get_id()) {
    return violations_.note(Result::CaptureWrongThread, "a capture that is not relaxed was ended by another thread");
  }
  const bool valid = it->second.valid;
  std::vector<Node> nodes = std::move(it->second.nodes);
  captures_.erase(it);
  if (!valid) return Result::CaptureInvalidated;
  graphs_.emplace(*graph = next_graph_ += kIdStep, std::move(nodes));
  return Result::Ok;
}

CaptureStatus Captures::status(StreamId stream, std::uint64_t* id) const {
  const auto it = captures_.find(stream);
  if (it == captures_.end()) return CaptureStatus::None;
  if (id) *id = it->second.id;
  return it->second.valid ? CaptureStatus::Active : CaptureStatus::Invalidated;
}

CaptureMode Captures::exchange(CaptureMode mode) { return std::exchange(mode_of_thread, mode); }

Result Captures::check_wait(StreamId stream) {
  const auto it = captures_.find(stream);
  return it == captures_.end() ? Result::Ok : invalidate(it->second, "a stream is waited for while it is captured");
}

Result Captures::check_wait_for_device(int device) {
  Result result = Result::Ok;
  for (auto& [stream, capture] : captures_) {
    if (capture.device == device) result = invalidate(capture, "a device is waited for while a stream of it is captured");
  }
  return result;
}

Result Captures::check_unsafe() {
  if (mode_of_thread == CaptureMode::Relaxed) return Result::Ok;
  Result result = Result::Ok;
  for (auto& [stream, capture] : captures_) {
    const bool own = capture.thread == std::this_thread::get_id() && capture.mode != CaptureMode::Relaxed;
    const bool others = capture.mode == CaptureMode::Global && mode_of_thread == CaptureMode::Global;
    if (own || others) result = invalidate(capture, "an unsafe call was made during a capture that is not relaxed");
  }
  return result;
}

Result Captures::check_work(StreamId stream) const { return captures_.count(stream) ? Result::NotSupported : Result::Ok; }

Result Captures::instantiate(GraphId graph, const DeviceMemory& memory, GraphId* executable) {
  if (!has_graph(graph)) return violations_.note(Result::InvalidValue, "unknown graph");
  std::vector<Node> nodes = graphs_.at(graph);
  for (Node& node : nodes) {
    node.target = memory.memory_at(node.transfer.target);
    node.source = memory.memory_at(node.transfer.source);
  }
  executables_.emplace(*executable = next_graph_ += kIdStep, std::move(nodes));
  return Result::Ok;
}

const std::vector<Captures::Node>* Captures::nodes_of(GraphId executable) {
  const auto it = executables_.find(executable);
  return it == executables_.end() ? nullptr : &it->second;
}

Result Captures::destroy(GraphId graph) {
  return graphs_.erase(graph) ? Result::Ok : violations_.note(Result::InvalidValue, "unknown graph");
}

Result Captures::destroy_executable(GraphId executable) {
  return executables_.erase(executable) ? Result::Ok : violations_.note(Result::InvalidValue, "unknown executable graph");
}

void Captures::reset() {
  captures_.clear();
  graphs_.clear();
  executables_.clear();
}

Result Captures::invalidate(Capture& capture, const char* rule) {
  capture.valid = false;
  return violations_.note(Result::CaptureUnsupported, rule);
}

}  // namespace hardpoint::simulators
