#include "memory_backup.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "checksum.hpp"

namespace hardpoint::memory {
namespace {

constexpr uint64_t kSector = DiskStore::kAlignment;

// The part of `piece` that lies in `range`.
Range overlap(const Range& piece, const Range& range) {
  const uint64_t start = std::max(piece.start, range.start), end = std::min(piece.end(), range.end());
  return {start, end > start ? end - start : 0};
}

}  // namespace

// Not blocking: a pipe would be waited for until somebody writes to it. It has no bytes, so no source fits.
SourceFile::SourceFile(const std::string& path) : path_(path), file_(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
  struct stat status {};
  if (file_ < 0 || fstat(file_, &status) != 0) {
    const std::string reason = std::strerror(errno);
    if (file_ >= 0) close(file_);
    throw MemoryFault(Fault::kForeign, "the source file " + path + " cannot be opened", reason);
  }
  size_ = static_cast<uint64_t>(status.st_size);
  device_ = status.st_dev;
  inode_ = status.st_ino;
  seconds_ = status.st_mtim.tv_sec;
  nanoseconds_ = status.st_mtim.tv_nsec;
}

SourceFile::~SourceFile() { close(file_); }

void SourceFile::check() const {
  struct stat status {};
  if (fstat(file_, &status) == 0 && static_cast<uint64_t>(status.st_size) == size_ && status.st_mtim.tv_sec == seconds_ &&
      status.st_mtim.tv_nsec == nanoseconds_) {
    return;
  }
  throw MemoryFault(Fault::kCorrupt, "the source file " + path_ + " does not hold what was loaded from it",
                    "it was written since", "Drop the backup with discard_backup (of an engine: sleep(level=2)), wake, and load the weights again");
}

bool SourceFile::is_current() const {
  struct stat there {};
  return stat(path_.c_str(), &there) == 0 && there.st_dev == device_ && there.st_ino == inode_ &&
         static_cast<uint64_t>(there.st_size) == size_ && there.st_mtim.tv_sec == seconds_ && there.st_mtim.tv_nsec == nanoseconds_;
}

void SourceFile::read(uint64_t offset, void* data, size_t size) const {
  auto* target = static_cast<std::byte*>(data);
  while (size > 0) {
    const ssize_t got = pread(file_, target, size, static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw MemoryFault::driver_call("pread", errno, path_ + ": " + std::strerror(errno));
    if (got == 0) throw MemoryFault(Fault::kCorrupt, "the source file " + path_ + " is shorter than it was");
    target += got;
    offset += static_cast<uint64_t>(got);
    size -= static_cast<size_t>(got);
  }
}

Backup::~Backup() {
  for (const BackupPiece& piece : pieces) {
    if (piece.span.size > 0) arena_.give(piece.span);  // none before the sleep has found room
  }
}

bool Backup::copied() const {
  return std::any_of(pieces.begin(), pieces.end(),
                     [](const BackupPiece& piece) { return piece.kind == BackupPiece::Kind::kHost || piece.kind == BackupPiece::Kind::kDisk; });
}

uint64_t Backup::held() const {
  uint64_t sum = 0;
  for (const BackupPiece& piece : pieces) {
    if (piece.kind == BackupPiece::Kind::kHost || piece.kind == BackupPiece::Kind::kDisk) sum += piece.range.size;
  }
  return sum - rounding;
}

void Backup::read(Range range, std::byte* target) const {
  uint64_t found = 0;
  if (!complete) throw MemoryFault(Fault::kAsleep, "these bytes cannot be read", "the sleep that was to save them failed; wake them");
  for (const BackupPiece& piece : pieces) {
    const Range part = overlap(piece.range, range);
    if (part.size == 0) continue;
    std::byte* to = target + (part.start - range.start);
    const uint64_t within = part.start - piece.range.start;
    switch (piece.kind) {
      case BackupPiece::Kind::kHost:
        std::memcpy(to, piece.span.data + within, part.size);
        break;
      case BackupPiece::Kind::kFile:
        piece.file->check();
        piece.file->read(piece.offset + within, to, part.size);
        break;
      case BackupPiece::Kind::kDisk: {
        // Whole pieces, since that is what the checksum is of.
        void* buffer = nullptr;
        const uint64_t size = (piece.range.size + kSector - 1) / kSector * kSector;
        if (posix_memalign(&buffer, kSector, size) != 0) throw std::bad_alloc();
        const std::unique_ptr<void, decltype(&std::free)> owner(buffer, &std::free);
        with_disk_faults([&] {
          disk->read(piece.offset, buffer, size);
          if (xxh64(buffer, size) != piece.checksum) throw CorruptFile(disk->path(), "a checksum differs");
        });
        std::memcpy(to, static_cast<std::byte*>(buffer) + within, part.size);
        break;
      }
      case BackupPiece::Kind::kRebuild:
        throw MemoryFault(Fault::kAsleep, "these bytes cannot be read while they are asleep",
                          "a callback writes them again on wake");
    }
    found += part.size;
  }
  if (found != range.size) {
    throw MemoryFault(Fault::kAsleep, "these bytes cannot be read", "they were not preserved by the sleep");
  }
}

StagingBuffer::StagingBuffer(const Driver& driver, HostArena& arena, size_t size) : arena_(arena), size_(size) {
  void* raw = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (raw == MAP_FAILED) throw MemoryFault(Fault::kBudgetExceeded, "the host has no memory for staging", std::strerror(errno));
  data_ = static_cast<std::byte*>(raw);
  if (!driver.registers_host_memory()) return;
  try {
    registered_ = driver.host_register(data_, size_);
  } catch (...) {
    munmap(data_, size_);
    throw;
  }
}

StagingBuffer::~StagingBuffer() { arena_.release(data_, size_, registered_); }

}  // namespace hardpoint::memory
