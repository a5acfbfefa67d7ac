#include "core/backing_file.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22  // Linux 5.14
#endif

namespace hardpoint::simulators {

namespace {

constexpr off_t kFileSize = off_t{1} << 50;
// Bytes of which it is asked at a time whether they are zeros.
constexpr std::size_t kZerosAtATime = std::size_t{64} << 10;

template <class Step>
bool in_steps(std::size_t size, Step step) {
  for (std::size_t done = 0; done < size;) {
    const ssize_t moved = step(done, size - done);
    if (moved < 0 && errno == EINTR) continue;
    if (moved <= 0) return false;
    done += static_cast<std::size_t>(moved);
  }
  return true;
}

// Whether this process may read memory; the kernel is asked, since to try would end the process. Before Linux 5.14: no.
bool can_read(const void* source, std::size_t size) {
  const auto start = reinterpret_cast<std::uintptr_t>(source), page = start & ~std::uintptr_t{4095};
  return madvise(reinterpret_cast<void*>(page), start + size - page, MADV_POPULATE_READ) == 0;
}

bool is_zero(const char* bytes, std::size_t size) { return bytes[0] == 0 && std::memcmp(bytes, bytes + 1, size - 1) == 0; }

}  // namespace

BackingFile::~BackingFile() {
  if (descriptor_ >= 0) close(descriptor_);
}

bool BackingFile::open() {
  if (descriptor_ >= 0) return true;
  descriptor_ = memfd_create("hardpoint-simulated-device", MFD_CLOEXEC);
  if (descriptor_ < 0) return false;
  if (ftruncate(descriptor_, kFileSize) == 0) return true;
  close(descriptor_);
  descriptor_ = -1;
  return false;
}

bool BackingFile::allocate(std::size_t size, off_t* offset) {
  if (!open() || static_cast<std::uint64_t>(kFileSize - next_) < size) return false;
  *offset = next_;
  next_ += static_cast<off_t>(size);
  return true;
}

void BackingFile::discard(off_t offset, std::size_t size) {
  fallocate(descriptor_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, static_cast<off_t>(size));
}

bool BackingFile::write(off_t offset, const void* source, std::size_t size) {
  const char* bytes = static_cast<const char*>(source);
  const auto put = [&](std::size_t start, std::size_t end) {
    return in_steps(end - start, [&](std::size_t done, std::size_t left) {
      return pwrite(descriptor_, bytes + start + done, left, offset + static_cast<off_t>(start + done));
    });
  };
  if (size < kZerosAtATime || !can_read(source, size)) return put(0, size);
  // Most of what tests move was never written.
  off_t data = 0;
  for (std::size_t done = 0; done < size; done += kZerosAtATime) {
    const std::size_t end = std::min(done + kZerosAtATime, size);
    const off_t at = offset + static_cast<off_t>(done);
    if (is_zero(bytes + done, end - done)) {
      if (data <= at) data = next_data(at);
      if (data >= offset + static_cast<off_t>(end)) continue;
    }
    if (!put(done, end)) return false;
  }
  return true;
}

off_t BackingFile::next_data(off_t offset) const {
  const off_t found = lseek(descriptor_, offset, SEEK_DATA);
  return found >= 0 ? found : errno == ENXIO ? kFileSize : offset;
}

bool BackingFile::read(off_t offset, void* target, std::size_t size) {
  return in_steps(size, [&](std::size_t done, std::size_t left) {
    return pread(descriptor_, static_cast<char*>(target) + done, left, offset + static_cast<off_t>(done));
  });
}

bool BackingFile::fill(off_t offset, std::uint8_t value, std::size_t size) {
  if (value == 0 && next_data(offset) >= offset + static_cast<off_t>(size)) return true;
  std::array<std::uint8_t, 65536> block;
  block.fill(value);
  return in_steps(size, [&](std::size_t done, std::size_t left) {
    return pwrite(descriptor_, block.data(), std::min(left, block.size()), offset + static_cast<off_t>(done));
  });
}

bool BackingFile::show(std::uintptr_t address, std::size_t size, off_t offset, int protection) {
  void* target = reinterpret_cast<void*>(address);
  return mmap(target, size, protection, MAP_SHARED | MAP_FIXED, descriptor_, offset) != MAP_FAILED;
}

std::map<std::uintptr_t, std::uintptr_t> BackingFile::shown() const {
  std::map<std::uintptr_t, std::uintptr_t> ranges;
  struct stat file {};
  std::FILE* maps = descriptor_ >= 0 && fstat(descriptor_, &file) == 0 ? std::fopen("/proc/self/maps", "re") : nullptr;
  if (maps == nullptr) return ranges;
  char* line = nullptr;
  std::size_t room = 0;
  while (getline(&line, &room, maps) > 0) {
    std::uintptr_t start = 0, end = 0, inode = 0;
    const int found = std::sscanf(line, "%" SCNxPTR "-%" SCNxPTR " %*s %*s %*s %" SCNuPTR, &start, &end, &inode);
    if (found == 3 && inode == file.st_ino) ranges[start] = end;
  }
  std::free(line);
  std::fclose(maps);
  return ranges;
}

}  // namespace hardpoint::simulators
