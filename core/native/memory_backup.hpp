// Where the bytes of a sleeping allocation are: a recipe of pieces, each on the host, on disk, in the file that it came from, or written
// again by a callback.
#pragma once
#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "memory_arena.hpp"
#include "memory_disk.hpp"

namespace hardpoint::memory {

enum class Tier { kHost, kDisk, kSource };

// Bytes of an allocation, from its first.
struct Range {
  uint64_t start = 0, size = 0;
  uint64_t end() const { return start + size; }
};

// A file that tensors were loaded from, as it was then. It is kept open, so that a replaced file is still readable.
class SourceFile {
 public:
  explicit SourceFile(const std::string& path);  // throws kForeign when it cannot be opened
  ~SourceFile();
  SourceFile(const SourceFile&) = delete;
  SourceFile& operator=(const SourceFile&) = delete;

  uint64_t size() const { return size_; }
  // Throws kCorrupt when the file was written since it was opened.
  void check() const;
  // Whether its path still leads to this file, unchanged.
  bool is_current() const;
  // Throws kCorrupt when the file ends before, kDriverCall("pread") when reading fails.
  void read(uint64_t offset, void* data, size_t size) const;

 private:
  std::string path_;
  int file_;
  uint64_t size_;
  uint64_t device_, inode_;
  int64_t seconds_, nanoseconds_;  // of the last modification
};

// What a declared source says of some bytes: they are in a file, or `rebuild` (not 0) names the callback that writes them.
struct Source {
  Range range;
  std::shared_ptr<const SourceFile> file;
  uint64_t offset = 0;
  uint64_t rebuild = 0;
};

struct BackupPiece {
  enum class Kind { kHost, kDisk, kFile, kRebuild };
  Kind kind;
  Range range;
  HostArena::Span span{};                  // kHost
  uint64_t offset = 0;                     // kDisk: in the payload; kFile: in the file
  uint64_t checksum = 0;                   // kDisk
  std::shared_ptr<const SourceFile> file;  // kFile
  uint64_t rebuild = 0;                    // kRebuild

  static BackupPiece at(Kind kind, Range range) {
    BackupPiece piece{};
    piece.kind = kind;
    piece.range = range;
    return piece;
  }
};

// Thread-safe only in that different pieces may be read and written at once.
class Backup {
 public:
  Backup(HostArena& arena, Tier tier, uint64_t generation) : tier(tier), generation(generation), arena_(arena) {}
  ~Backup();
  Backup(const Backup&) = delete;
  Backup& operator=(const Backup&) = delete;

  // Copies bytes of the allocation to host memory; kAsleep where a piece is a callback's, kCorrupt.
  void read(Range range, std::byte* target) const;
  uint64_t held() const;      // that the copies in host memory or on disk stand for
  bool copied() const;      // some pieces, if only of the gaps between blocks, are on the host or on disk

  const Tier tier;
  const uint64_t generation;  // of the allocation's content
  std::vector<BackupPiece> pieces;  // by range, without overlap
  uint64_t rounding = 0;      // bytes of the copies that nobody asked to keep: gaps between small blocks, and a disk's blocks are whole
  std::shared_ptr<DiskFile> disk;
  bool complete = false;  // every piece has been written; set once, when the sleep has done its work

 private:
  HostArena& arena_;
};

// Host memory at a page's boundary, for direct I/O; pinned for the device where it is not the device's own.
class StagingBuffer {
 public:
  StagingBuffer(const Driver& driver, HostArena& arena, size_t size);
  ~StagingBuffer();
  StagingBuffer(const StagingBuffer&) = delete;
  StagingBuffer& operator=(const StagingBuffer&) = delete;
  std::byte* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  HostArena& arena_;
  std::byte* data_;
  size_t size_;
  bool registered_ = false;
};

// What to do where a backup cannot be written.
inline constexpr char kOtherDirectory[] =
    "Name a directory that can be written (sleep_disk_directory of an engine, or HARDPOINT_SLEEP_DIR), or use another tier";

// Turns the disk store's exceptions into MemoryFault around a call; `hint` says what to do where a call of the system's failed.
template <class Call>
auto with_disk_faults(Call&& call, const char* hint = "") -> decltype(call()) {
  try {
    return call();
  } catch (const BudgetExceeded& error) {
    throw MemoryFault(Fault::kBudgetExceeded, "backups need " + std::to_string(error.asked) + " bytes on disk",
                      std::to_string(error.used) + " bytes are in use, and the budget is " + std::to_string(error.budget),
                      "Raise the disk budget, use another tier, or discard (level 2)");
  } catch (const CorruptFile& error) {
    throw MemoryFault(Fault::kCorrupt, "the backup " + error.path + " does not hold what was saved", error.reason,
                      "Drop it with discard_backup (of an engine: sleep(level=2)), wake, and load the weights again");
  } catch (const DiskFull& error) {
    throw MemoryFault(Fault::kBudgetExceeded, "the disk has no room for the backup", error.what(),
                      "Make room, choose another directory or tier, or discard (level 2)");
  } catch (const DiskError& error) {
    throw MemoryFault::driver_call(error.operation, error.error, error.path + ": " + error.text, hint);
  } catch (const OwnedByParent& error) {
    throw MemoryFault(Fault::kForked, error.what());
  }
}

}  // namespace hardpoint::memory
