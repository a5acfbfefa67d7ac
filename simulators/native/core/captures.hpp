// Streams that are captured into graphs. What is put on such a stream is recorded, and done at every launch: copies and fills, since nothing here
// computes.
//
// Rules: CUDA C++ programming guide, CUDA graphs, "Prohibited and unhandled operations"; CUDA driver API, cuThreadExchangeStreamCaptureMode.
#pragma once

#include <cstdint>
#include <map>
#include <thread>
#include <vector>

#include "core/device_memory.hpp"
#include "core/result.hpp"
#include "core/transfer.hpp"
#include "core/violations.hpp"

namespace hardpoint::simulators {

enum class CaptureMode : int { Global = 0, ThreadLocal = 1, Relaxed = 2 };
enum class CaptureStatus : int { None = 0, Active = 1, Invalidated = 2 };

// From one id of a stream, an event or a graph to the next: they look like pointers.
constexpr std::uintptr_t kIdStep = 16;

class Captures {
 public:
  using StreamId = std::uintptr_t;
  using GraphId = std::uintptr_t;

  explicit Captures(Violations& violations) : violations_(violations) {}
  Captures(const Captures&) = delete;
  Captures& operator=(const Captures&) = delete;

  Result begin(StreamId stream, int device, CaptureMode mode);
  // Makes a graph, unless the capture was invalidated.
  Result end(StreamId stream, GraphId* graph);
  CaptureStatus status(StreamId stream, std::uint64_t* id) const;
  // Sets the mode of the calling thread's own calls, and returns the one before.
  static CaptureMode exchange(CaptureMode mode);

  // Each is Ok unless a capture does not bear the call; then the capture is invalidated.
  Result check_wait(StreamId stream);         // waiting for a stream, or asking for its state
  Result check_wait_for_device(int device);   // the same for everything of a device
  Result check_unsafe();                      // a call that the modes are about: allocations, and copies that wait
  // Work on a stream of another kind than copies and fills: what would be recorded cannot be, here.
  Result check_work(StreamId stream) const;

  // A copy or fill in a graph, and what was mapped at its addresses when the graph was instantiated.
  struct Node {
    Transfer transfer;
    HandleId target = 0, source = 0;
  };

  bool captured(StreamId stream) const { return captures_.count(stream) != 0; }
  void record(StreamId stream, const Transfer& transfer) { captures_.at(stream).nodes.push_back({transfer}); }

  Result instantiate(GraphId graph, const DeviceMemory& memory, GraphId* executable);
  // The nodes of an executable graph; null if there is none.
  const std::vector<Node>* nodes_of(GraphId executable);
  Result destroy(GraphId graph);
  Result destroy_executable(GraphId executable);
  bool has_graph(GraphId graph) const { return graphs_.count(graph) != 0; }
  std::size_t size(GraphId graph) const { return graphs_.at(graph).size(); }

  void reset();

 private:
  struct Capture {
    std::uint64_t id;
    int device;
    CaptureMode mode;
    std::thread::id thread;
    bool valid = true;
    std::vector<Node> nodes{};
  };

  Result invalidate(Capture& capture, const char* rule);

  Violations& violations_;
  std::map<StreamId, Capture> captures_;
  std::map<GraphId, std::vector<Node>> graphs_, executables_;
  std::uint64_t next_capture_ = 0;
  GraphId next_graph_ = 0x67000000;
};

}  // namespace hardpoint::simulators
