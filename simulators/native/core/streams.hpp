// Streams and events: asynchronous copies and fills, run at once or (deferred mode) only when they are waited for.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <vector>

#include "core/captures.hpp"
#include "core/device_memory.hpp"
#include "core/host_memory.hpp"
#include "core/in_flight.hpp"
#include "core/result.hpp"
#include "core/settings.hpp"
#include "core/transfer.hpp"
#include "core/violations.hpp"

namespace hardpoint::simulators {

// A stream or event as the vendor's opaque pointer carries it.
using StreamId = std::uintptr_t;
using EventId = std::uintptr_t;

class Streams {
 public:
  Streams(const Settings& settings, Violations& violations, DeviceMemory& memory, HostMemory& host, InFlight& in_flight, Captures& captures)
      : settings_(settings), violations_(violations), memory_(memory), host_(host), in_flight_(in_flight), captures_(captures) {}
  ~Streams() = default;
  Streams(const Streams&) = delete;
  Streams& operator=(const Streams&) = delete;

  // A blocking stream is ordered with the default stream of its device.
  StreamId create(int device, bool blocking);
  Result destroy(StreamId stream, int device);
  Result synchronize(StreamId stream, int device);
  Result query(StreamId stream, int device);
  Result wait_event(StreamId stream, int device, EventId event);

  // Wait for all work of a device.
  Result synchronize_device(int device);

  // The same within a call that waits by itself, whatever is being captured.
  Result finish_device(int device);

  // Do a transfer that the caller waits for; it runs on the default stream.
  Result run(const Transfer& transfer);

  // Put a transfer on a stream, or into the graph that it is captured into.
  Result submit(StreamId stream, const Transfer& transfer);

  // Put what an executable graph holds on a stream.
  Result launch(Captures::GraphId executable, StreamId stream);

  EventId create_event(int device);
  Result destroy_event(EventId event);
  Result record(EventId event, StreamId stream, int device);
  Result reset_event(EventId event);
  Result synchronize_event(EventId event);
  Result query_event(EventId event);
  Result elapsed(EventId start, EventId end, float* milliseconds);

  // Forget the streams and events of a device, whose work is done first.
  void drop_device(int device);

  bool known_stream(StreamId stream) const { return is_default(stream) || streams_.count(stream); }
  std::uint64_t streams() const { return streams_.size(); }
  std::uint64_t events() const { return events_.size(); }
  std::uint64_t pending() const { return pending_; }
  std::uint64_t pageable_copies() const { return pageable_copies_; }

  void reset();

 private:
  struct Mark {
    StreamId stream;
    int device;
    std::uint64_t position;  // everything that was submitted up to here
  };
  struct Operation {
    Transfer transfer;
    bool done = false;                 // bytes were moved at submission, only the wait is missing
    bool holds_source = false;         // the source must not go away before it is done
    bool waits = false;                // not a transfer: waits for `mark`
    Mark mark{};
    std::vector<std::uint8_t> staged;  // copy of pageable host memory, taken at submission
  };
  struct Stream {
    int device;
    bool blocking;
    std::uint64_t submitted = 0;
    std::uint64_t finished = 0;
    std::deque<Operation> queue;       // those between `finished` and `submitted`
    Result failed = Result::Ok;        // of work that ran late; told at the next wait
  };
  struct Event {
    int device;
    bool recorded = false;
    Mark mark{};
    std::chrono::steady_clock::time_point time;
  };

  // Ids 0 to 2 stand for the default streams of the vendors' headers (null, legacy, per thread).
  static bool is_default(StreamId stream) { return stream <= 2; }

  Stream* find(StreamId stream, int device);
  Result unknown_stream() { return violations_.note(Result::InvalidHandle, "unknown stream"); }
  Result unknown_event() { return violations_.note(Result::InvalidHandle, "unknown event"); }

  Result check(const Transfer& transfer);
  Result move(const Transfer& transfer);
  Result copy_on_device(const Transfer& transfer);
  bool from_pageable(const Transfer& transfer) const;
  bool to_pageable(const Transfer& transfer) const;

  void order_with_default(Stream& stream, bool is_default_stream);
  void enqueue(Stream& stream, Operation operation);
  void finish_one(Stream& stream);
  void drain(Stream& stream, std::uint64_t position);
  Result finish_up_to(Stream& stream, std::uint64_t position);  // as drain, and tells of work that failed
  Result finish_all(Stream& stream) { return finish_up_to(stream, stream.submitted); }
  bool complete(const Mark& mark);
  void track(const Operation& operation, void (InFlight::*change)(Address, std::size_t));

  const Settings& settings_;
  Violations& violations_;
  DeviceMemory& memory_;
  HostMemory& host_;
  InFlight& in_flight_;
  Captures& captures_;
  std::array<Stream, kMaxDevices> defaults_ = {};
  std::map<StreamId, Stream> streams_;
  std::map<EventId, Event> events_;
  std::uintptr_t next_id_ = 0x57000000;
  std::uint64_t pageable_copies_ = 0;
  std::uint64_t pending_ = 0;
};

}  // namespace hardpoint::simulators
