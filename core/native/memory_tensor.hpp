// Tensors over a pool's memory, handed to torch as DLPack capsules, and torch's own allocations through the pluggable allocator's symbols.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "hardpoint/torch_allocator.h"
#include "memory_pool.hpp"

namespace hardpoint::memory {

// One pool's tensors: a capsule of bytes for each, whose memory returns to the pool when torch drops the last view.
class Tensors {
 public:
  Tensors(std::shared_ptr<Pool> pool, int32_t device) : pool_(std::move(pool)), device_(device) {}

  // A DLPack capsule over `size` fresh bytes. `capacity` (at least `size`): elastic.
  pybind11::capsule make(size_t size, const std::string& tag, Policy policy, size_t capacity);
  // Grows or shrinks the elastic tensor at `address`; returns a capsule over its new extent, which shares the memory with the old ones.
  pybind11::capsule resize(uint64_t address, size_t size);
  // A capsule over pinned memory of the host (Pool::pinned_host); None where the driver pins none.
  pybind11::object make_host(size_t size);

 private:
  // One allocation's life: shared by every capsule over it.
  struct Block {
    Block(std::shared_ptr<Pool> pool, uint64_t address) : pool(std::move(pool)), address(address) {}
    ~Block();
    Block(const Block&) = delete;
    Block& operator=(const Block&) = delete;
    const std::shared_ptr<Pool> pool;
    const uint64_t address;
  };
  pybind11::capsule wrap(const std::shared_ptr<Block>& block, size_t size) const;

  const std::shared_ptr<Pool> pool_;
  const int32_t device_;
  std::mutex mutex_;  // guards elastic_
  std::unordered_map<uint64_t, std::weak_ptr<Block>> elastic_;
};

// The functions that a driver library's exported allocator symbols call; see hardpoint/torch_allocator.h.
const hp_torch_functions* torch_functions();
// From now on torch's allocations of this thread on `device`, and those of threads that have entered no pool, come from `pool`.
void enter_torch_pool(std::shared_ptr<Pool> pool, int32_t device, std::string tag, Policy policy);
void leave_torch_pool(int32_t device);

}  // namespace hardpoint::memory
