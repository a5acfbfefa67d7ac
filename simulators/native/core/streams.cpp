#include "core/streams.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace hardpoint::simulators {

namespace {

// A real queue is finite: submitting to a full one waits for its oldest work.
constexpr std::size_t kQueueDepth = 1024;
constexpr std::size_t kBounceSize = std::size_t{1} << 20;

}  // namespace

Streams::Stream* Streams::find(StreamId id, int device) {
  if (is_default(id)) {
    defaults_[device].device = device;
    return &defaults_[device];
  }
  const auto it = streams_.find(id);
  return it == streams_.end() ? nullptr : &it->second;
}

StreamId Streams::create(int device, bool blocking) {
  const StreamId id = next_id_ += kIdStep;
  Stream stream{};
  stream.device = device;
  stream.blocking = blocking;
  streams_.emplace_hint(streams_.end(), id, std::move(stream));
  return id;
}

Result Streams::destroy(StreamId id, int device) {
  Stream* stream = is_default(id) ? nullptr : find(id, device);
  if (!stream) return unknown_stream();
  // Work that was submitted still completes (CUDA driver API, cuStreamDestroy).
  finish_all(*stream);
  streams_.erase(id);
  return Result::Ok;
}

Result Streams::synchronize(StreamId id, int device) {
  Stream* stream = find(id, device);
  if (!stream) return unknown_stream();
  const Result allowed = captures_.check_wait(id);
  if (allowed != Result::Ok) return allowed;
  // The default stream waits for the blocking streams' work too.
  order_with_default(*stream, is_default(id));
  return finish_all(*stream);
}

Result Streams::query(StreamId id, int device) {
  Stream* stream = find(id, device);
  if (!stream) return unknown_stream();
  const Result allowed = captures_.check_wait(id);
  if (allowed != Result::Ok) return allowed;
  if (!settings_.deferred) return finish_all(*stream);
  if (stream->queue.empty()) return Result::Ok;
  // Each question lets one piece of work complete, so that a program that polls comes to an end.
  finish_one(*stream);
  return Result::NotReady;
}

Result Streams::wait_event(StreamId id, int device, EventId event) {
  Stream* stream = find(id, device);
  if (!stream) return unknown_stream();
  const auto it = events_.find(event);
  if (it == events_.end()) return unknown_event();
  const Result allowed = captures_.check_work(id);
  if (allowed != Result::Ok || !it->second.recorded) return allowed;
  Operation operation{};
  operation.waits = true;
  operation.mark = it->second.mark;
  enqueue(*stream, std::move(operation));
  return Result::Ok;
}

Result Streams::synchronize_device(int device) {
  const Result allowed = captures_.check_wait_for_device(device);
  return allowed == Result::Ok ? finish_device(device) : allowed;
}

Result Streams::finish_device(int device) {
  Result result = finish_all(*find(0, device));
  for (auto& [id, stream] : streams_) {
    if (stream.device != device) continue;
    const Result one = finish_all(stream);
    if (result == Result::Ok) result = one;
  }
  return result;
}

Result Streams::run(const Transfer& transfer) {
  Result allowed = captures_.check_unsafe();
  if (allowed == Result::Ok) allowed = check(transfer);
  if (allowed != Result::Ok) return allowed;
  pageable_copies_ += from_pageable(transfer) || to_pageable(transfer);
  Stream& stream = *find(0, transfer.device);
  order_with_default(stream, true);
  const Result before = finish_all(stream);
  return before == Result::Ok ? move(transfer) : before;
}

Result Streams::submit(StreamId id, const Transfer& transfer) {
  Stream* stream = find(id, transfer.device);
  if (!stream) return unknown_stream();
  const bool pageable = from_pageable(transfer) || to_pageable(transfer);
  Result allowed = pageable ? captures_.check_work(id) : Result::Ok;
  if (allowed == Result::Ok) allowed = check(transfer);
  if (allowed != Result::Ok || !transfer.size) return allowed;
  if (captures_.captured(id)) {
    captures_.record(id, transfer);
    return Result::Ok;
  }
  pageable_copies_ += pageable;
  order_with_default(*stream, is_default(id));
  if (to_pageable(transfer)) {
    // A copy to pageable memory returns when it is done (CUDA, "API synchronization behavior").
    const Result before = finish_all(*stream);
    return before == Result::Ok ? move(transfer) : before;
  }
  Operation operation{};
  operation.transfer = transfer;
  operation.holds_source = !transfer.fills && !from_pageable(transfer);
  if (!settings_.deferred) {
    operation.done = true;
    const Result moved = move(transfer);
    if (moved != Result::Ok) return moved;
  } else if (from_pageable(transfer)) {
    // Pageable memory is staged before the call returns, and may change from then on (same source).
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(transfer.source);
    operation.staged.assign(bytes, bytes + transfer.size);
  }
  enqueue(*stream, std::move(operation));
  return Result::Ok;
}

Result Streams::launch(Captures::GraphId executable, StreamId stream) {
  const std::vector<Captures::Node>* nodes = captures_.nodes_of(executable);
  if (!nodes) return violations_.note(Result::InvalidValue, "unknown executable graph");
  for (const Captures::Node& node : *nodes) {
    const Transfer& transfer = node.transfer;
    const bool moved = node.target != memory_.memory_at(transfer.target) || node.source != memory_.memory_at(transfer.source);
    if (settings_.graphs_keep_memory && moved) {
      return violations_.note(Result::IllegalAddress, "a graph's copy uses the memory that was mapped when it was instantiated");
    }
    const Result result = submit(stream, transfer);
    if (result != Result::Ok) return result;
  }
  return Result::Ok;
}

Result Streams::check(const Transfer& transfer) {
  const bool to_device = transfer.fills || transfer.direction == Direction::HostToDevice ||
                         transfer.direction == Direction::DeviceToDevice;
  const bool from_device =
      !transfer.fills &&
      (transfer.direction == Direction::DeviceToHost || transfer.direction == Direction::DeviceToDevice);
  if (!transfer.size) return Result::Ok;
  const bool host_source = !transfer.fills && !from_device, host_target = !to_device;
  if ((host_source && !transfer.source) || (host_target && !transfer.target)) {
    return violations_.note(Result::InvalidValue, "null host pointer");
  }
  if ((host_source && memory_.contains(transfer.source)) || (host_target && memory_.contains(transfer.target))) {
    return violations_.note(Result::InvalidValue, "a host pointer lies in device memory");
  }
  Result result = Result::Ok;
  if (to_device) result = memory_.check(transfer.target, transfer.size, transfer.device, Access::ReadWrite);
  if (result == Result::Ok && from_device) {
    result = memory_.check(transfer.source, transfer.size, transfer.device, Access::Read);
  }
  return result;
}

Result Streams::move(const Transfer& transfer) {
  const auto* source = reinterpret_cast<const void*>(transfer.source);
  auto* target = reinterpret_cast<void*>(transfer.target);
  if (transfer.fills) return memory_.fill(transfer.target, transfer.value, transfer.size);
  switch (transfer.direction) {
    case Direction::HostToDevice:
      return memory_.write(transfer.target, source, transfer.size);
    case Direction::DeviceToHost:
      return memory_.read(transfer.source, target, transfer.size);
    case Direction::DeviceToDevice:
      return copy_on_device(transfer);
    case Direction::HostToHost:
      std::memmove(target, source, transfer.size);
      return Result::Ok;
  }
  return Result::InvalidValue;
}

Result Streams::copy_on_device(const Transfer& transfer) {
  std::vector<std::uint8_t> bounce(std::min(transfer.size, kBounceSize));
  for (std::size_t done = 0; done < transfer.size; done += bounce.size()) {
    const std::size_t part = std::min(bounce.size(), transfer.size - done);
    const Result read = memory_.read(transfer.source + done, bounce.data(), part);
    if (read != Result::Ok) return read;
    const Result written = memory_.write(transfer.target + done, bounce.data(), part);
    if (written != Result::Ok) return written;
  }
  return Result::Ok;
}

bool Streams::from_pageable(const Transfer& transfer) const {
  return !transfer.fills && transfer.direction == Direction::HostToDevice &&
         !host_.pinned(transfer.source, transfer.size);
}

bool Streams::to_pageable(const Transfer& transfer) const {
  return !transfer.fills && transfer.direction == Direction::DeviceToHost &&
         !host_.pinned(transfer.target, transfer.size);
}

void Streams::order_with_default(Stream& stream, bool is_default_stream) {
  if (!pending_) return;
  if (!is_default_stream) {
    Stream& first = *find(0, stream.device);
    if (stream.blocking) drain(first, first.submitted);
    return;
  }
  for (auto& [id, other] : streams_) {
    if (other.blocking && other.device == stream.device) drain(other, other.submitted);
  }
}

void Streams::enqueue(Stream& stream, Operation operation) {
  while (stream.queue.size() >= kQueueDepth) finish_one(stream);
  track(operation, &InFlight::add);
  stream.queue.push_back(std::move(operation));
  ++stream.submitted;
  ++pending_;
}

void Streams::finish_one(Stream& stream) {
  Operation operation = std::move(stream.queue.front());
  stream.queue.pop_front();
  ++stream.finished;
  --pending_;
  track(operation, &InFlight::remove);
  Result result = Result::Ok;
  if (operation.waits) {
    Stream* other = find(operation.mark.stream, operation.mark.device);
    if (other) drain(*other, operation.mark.position);
  } else if (!operation.staged.empty()) {
    result = memory_.write(operation.transfer.target, operation.staged.data(), operation.staged.size());
  } else if (!operation.done) {
    result = move(operation.transfer);
  }
  if (stream.failed == Result::Ok) stream.failed = result;
}

void Streams::drain(Stream& stream, std::uint64_t position) {
  while (stream.finished < position && !stream.queue.empty()) finish_one(stream);
}

Result Streams::finish_up_to(Stream& stream, std::uint64_t position) {
  drain(stream, position);
  return std::exchange(stream.failed, Result::Ok);
}

void Streams::track(const Operation& operation, void (InFlight::*change)(Address, std::size_t)) {
  if (operation.waits) return;
  const Transfer& transfer = operation.transfer;
  (in_flight_.*change)(transfer.target, transfer.size);
  if (operation.holds_source) (in_flight_.*change)(transfer.source, transfer.size);
}

EventId Streams::create_event(int device) {
  const EventId id = next_id_ += kIdStep;
  Event event{};
  event.device = device;
  events_.emplace_hint(events_.end(), id, event);
  return id;
}

Result Streams::destroy_event(EventId event) { return events_.erase(event) ? Result::Ok : unknown_event(); }

Result Streams::record(EventId event, StreamId id, int device) {
  const auto it = events_.find(event);
  if (it == events_.end()) return unknown_event();
  const Stream* stream = find(id, device);
  if (!stream) return unknown_stream();
  if (it->second.device != device || stream->device != device) {
    return violations_.note(Result::InvalidHandle, "event and stream are not of the current device");
  }
  const Result allowed = captures_.check_work(id);
  if (allowed != Result::Ok) return allowed;
  it->second.recorded = true;
  it->second.mark = {id, device, stream->submitted};
  it->second.time = std::chrono::steady_clock::now();
  return Result::Ok;
}

bool Streams::complete(const Mark& mark) {
  const Stream* stream = find(mark.stream, mark.device);
  return !stream || stream->finished >= mark.position;
}

Result Streams::reset_event(EventId event) {
  const auto it = events_.find(event);
  if (it == events_.end()) return unknown_event();
  it->second.recorded = false;
  return Result::Ok;
}

Result Streams::synchronize_event(EventId event) {
  const auto it = events_.find(event);
  if (it == events_.end()) return unknown_event();
  const Mark& mark = it->second.mark;
  // An event that was never recorded counts as complete (CUDA driver API, cuEventSynchronize).
  if (!it->second.recorded || complete(mark)) return Result::Ok;
  return finish_up_to(*find(mark.stream, mark.device), mark.position);
}

Result Streams::query_event(EventId event) {
  const auto it = events_.find(event);
  if (it == events_.end()) return unknown_event();
  if (!it->second.recorded || complete(it->second.mark)) return Result::Ok;
  if (!settings_.deferred) return synchronize_event(event);
  finish_one(*find(it->second.mark.stream, it->second.mark.device));
  return Result::NotReady;
}

Result Streams::elapsed(EventId start, EventId end, float* milliseconds) {
  const auto first = events_.find(start), last = events_.find(end);
  if (first == events_.end() || last == events_.end()) return unknown_event();
  if (!first->second.recorded || !last->second.recorded) {
    return violations_.note(Result::InvalidHandle, "event was not recorded");
  }
  if (!complete(first->second.mark) || !complete(last->second.mark)) return Result::NotReady;
  *milliseconds = std::chrono::duration<float, std::milli>(last->second.time - first->second.time).count();
  return Result::Ok;
}

void Streams::drop_device(int device) {
  finish_device(device);
  for (auto it = streams_.begin(); it != streams_.end();) {
    it = it->second.device == device ? streams_.erase(it) : std::next(it);
  }
  for (auto it = events_.begin(); it != events_.end();) {
    it = it->second.device == device ? events_.erase(it) : std::next(it);
  }
}

void Streams::reset() {
  for (Stream& stream : defaults_) stream = Stream{};
  for (auto& [id, stream] : streams_) stream.queue.clear();
  streams_.clear();
  events_.clear();
  pending_ = 0;
  pageable_copies_ = 0;
}

}  // namespace hardpoint::simulators
