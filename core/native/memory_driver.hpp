// The driver table of one device with exceptions instead of statuses. See hardpoint/driver.h for what each call does.
#pragma once
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "hardpoint/driver.h"
#include "memory_fault.hpp"

namespace hardpoint::memory {

inline uint64_t round_up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

class Driver {
 public:
  // Copies the table and opens the device. Throws MemoryFault.
  explicit Driver(const hp_driver* table);
  ~Driver();
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  const hp_geometry& geometry() const { return geometry_; }
  uint64_t quirks() const { return quirks_; }
  bool has_flag(uint32_t flag) const { return (table_.flags & flag) != 0; }
  bool has_quirk(uint64_t quirk) const { return (quirks_ & quirk) != 0; }
  bool registers_host_memory() const { return table_.host_register != nullptr && table_.host_unregister != nullptr; }

  // Gives the device up without a call: in a forked child, or when the process ends.
  void abandon() { opened_ = false; }

  struct Info {
    uint64_t free, total;
  };
  Info memory_info() const;

  uint64_t reserve(size_t size, uint64_t hint = 0) const;
  void release_address(uint64_t address, size_t size) const;
  // Gives a range up and takes the same one again; returns false when something else has taken it in between. Throws when it cannot be given up.
  bool renew_address(uint64_t address, size_t size) const;
  uint64_t create(size_t size) const;
  void release(uint64_t handle, size_t size) const;
  void map(uint64_t address, size_t size, uint64_t handle) const;
  void unmap(uint64_t address, size_t size) const;
  void copy_to_host(void* host, uint64_t address, size_t size, uint64_t stream) const;
  void copy_to_device(uint64_t address, const void* host, size_t size, uint64_t stream) const;
  void fill(uint64_t address, uint8_t value, size_t size, uint64_t stream) const;
  void stream_synchronize(uint64_t stream) const;
  void device_synchronize() const;
  // Returns false where the device uses host memory as it is.
  bool host_register(void* host, size_t size) const;
  void host_unregister(void* host, size_t size) const;

  // Ends streams that no operation uses. One that the driver does not end stays, and is tried again.
  void drop_idle_streams() noexcept;

  // A stream for the time of an operation; the next one uses it again.
  class Stream {
   public:
    explicit Stream(const Driver& driver);
    ~Stream();
    Stream(const Stream&) = delete;
    Stream& operator=(const Stream&) = delete;
    operator uint64_t() const { return stream_; }
    void synchronize() const { driver_.stream_synchronize(stream_); }
    // As `synchronize`, for a failure under way, which a second one must not hide; returns whether it succeeded.
    bool drain() const noexcept;

   private:
    const Driver& driver_;
    uint64_t stream_ = 0;
  };

 private:
  hp_driver table_{};
  hp_geometry geometry_{};
  uint64_t quirks_ = 0;
  bool opened_ = false;
  mutable std::mutex streams_mutex_;  // guards idle_streams_
  mutable std::vector<uint64_t> idle_streams_;
};

}  // namespace hardpoint::memory
