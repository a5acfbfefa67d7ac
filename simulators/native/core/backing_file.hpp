// The bytes of the simulated device memory: one sparse file in memory per process.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <map>

namespace hardpoint::simulators {

// Offsets are never used twice, so that a stale mapping can never show the bytes of newer memory; a hole costs nothing.
class BackingFile {
 public:
  BackingFile() = default;
  ~BackingFile();
  BackingFile(const BackingFile&) = delete;
  BackingFile& operator=(const BackingFile&) = delete;

  // Take a range of fresh zeros; returns false if the host refuses.
  bool allocate(std::size_t size, off_t* offset);

  // Give the bytes of a range back to the host.
  void discard(off_t offset, std::size_t size);

  // Copies that need no address: they work whatever host code may do with the mapping. Zeros are left out where the file has a hole, which
  // reads as zeros. False: the host has no memory left, or none at an address.
  bool write(off_t offset, const void* source, std::size_t size);
  bool read(off_t offset, void* target, std::size_t size);
  bool fill(off_t offset, std::uint8_t value, std::size_t size);

  // Let the host see a range at a reserved address, with PROT_* rights; returns false if the host refuses.
  bool show(std::uintptr_t address, std::size_t size, off_t offset, int protection);

  // Where this process's address space shows the file, by the kernel's account: end by start of each range.
  std::map<std::uintptr_t, std::uintptr_t> shown() const;

 private:
  bool open();

  // The first place from an offset on where the file has bytes of its own; a large offset where there is none.
  off_t next_data(off_t offset) const;

  int descriptor_ = -1;
  off_t next_ = 0;
};

}  // namespace hardpoint::simulators
