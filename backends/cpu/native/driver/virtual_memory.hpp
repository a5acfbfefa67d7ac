// Device memory of the CPU: anonymous huge pages that are moved between the addresses where tensors see them and a place of their own.
//
// A reservation is a range without access. Memory is created at a parking address that nobody else knows; mapping moves its pages to
// the reserved address, unmapping moves them back (mremap moves page tables and copies nothing: 0.2 ms per GiB). While memory is unmapped, every
// access to the reserved address faults, and no other part of the process can be given the address.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <unordered_map>

namespace hp::driver {

class VirtualMemory {
 public:
  static constexpr size_t kGranularity = size_t{2} << 20;  // a huge page; smaller ones make every step of a sleep 5 to 100 times slower
  static constexpr size_t kMaxChunk = size_t{64} << 20;

  // `budget`: bytes of the device's memory; 0 = the host's. `keep_address`: whether to use MREMAP_DONTUNMAP where the kernel has it.
  VirtualMemory(uint64_t budget, bool keep_address);
  VirtualMemory(const VirtualMemory&) = delete;
  VirtualMemory& operator=(const VirtualMemory&) = delete;

  // As the entries of hp_driver; all throw hardpoint::driver::Failure.
  uint64_t reserve(size_t size, uint64_t hint);
  void release_address(uint64_t address, size_t size);
  uint64_t create(size_t size);
  void release(uint64_t handle, size_t size);
  void map(uint64_t address, size_t size, uint64_t handle);
  void unmap(uint64_t address, size_t size);

  // Memory of the range takes pages of the processor's smallest size, now and whenever it is mapped there again, until the address is
  // released: for what is touched here and there. A huge page would take 2 MiB, and be zeroed, for each place that has a few KiB.
  void use_small_pages(uint64_t address, size_t size);

  // Throws unless every byte of the range is mapped.
  void check_mapped(const char* call, uint64_t address, size_t size) const;

  uint64_t total_bytes() const { return total_; }
  uint64_t free_bytes() const;

 private:
  struct Memory {
    size_t size;
    uint64_t address;  // where its pages are: parked, or mapped
    bool mapped;
  };
  struct Mapping {
    size_t size;
    uint64_t handle;
  };

  void take_budget(size_t size);
  void check_available(size_t size);
  bool is_reserved(uint64_t address, size_t size) const;
  bool overlaps_mapping(uint64_t address, size_t size) const;
  bool has_small_pages(uint64_t address) const;
  void move_to_parking(uint64_t address, uint64_t parking, size_t size) const;

  const uint64_t budget_;
  const uint64_t total_;
  const bool keep_address_;

  // Guards all below. Every Memory that is mapped has one Mapping, which lies within one reservation and overlaps no other; so does every
  // range with small pages; used_ is the sum of the sizes of all Memory, and of those being made or released.
  mutable std::mutex mutex_;
  std::map<uint64_t, size_t> reservations_;
  std::map<uint64_t, size_t> small_pages_;
  std::map<uint64_t, Mapping> mappings_;
  std::unordered_map<uint64_t, Memory> memory_;
  uint64_t used_ = 0;
  uint64_t next_handle_ = 1;
  uint64_t allowance_ = 0;  // bytes that may be created before the host is asked anew what is available
};

}  // namespace hp::driver
