// Backups on disk: a budgeted directory of files that live as long as the process that wrote them.
//
// Each store works in a subdirectory of its own, `hardpoint-<pid>-<random>`, and holds a lock (flock) on a file in it. A subdirectory whose
// lock nobody holds was left by a process that died, and is removed by the next store that opens the directory or makes a file there, and by
// `remove_abandoned`. Nothing else there is touched.
//
// A backup is one file: a header (what is where, with checksums) and the payload. It is allocated whole before the first byte is written, it is
// called `.partial` until it is committed, and it is removed with its DiskFile. Reads and writes bypass the page cache where the file system
// allows it, because a cached copy would take the memory that a sleep is meant to free.
//
// A forked child must not use the parent's store (OwnedByParent); its copies of these objects remove nothing.
#pragma once
#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace hardpoint::memory {

// A call of the operating system failed; `error` is its errno.
struct DiskError : std::runtime_error {
  DiskError(std::string operation, std::string path, int error);
  std::string operation;
  std::string path;
  int error;
  std::string text;
};

// The file system, a quota or a file-size limit has no room for the bytes.
struct DiskFull : DiskError {
  using DiskError::DiskError;
};

// Bytes that the store may not take, because they and those in use are more than its budget.
struct BudgetExceeded : std::runtime_error {
  BudgetExceeded(uint64_t asked, uint64_t used, uint64_t budget);
  uint64_t asked;
  uint64_t used;
  uint64_t budget;
};

// A backup is not what was written.
struct CorruptFile : std::runtime_error {
  CorruptFile(std::string path, std::string reason);
  std::string path;
  std::string reason;
};

// The store belongs to the process that this one was forked from.
struct OwnedByParent : std::runtime_error {
  explicit OwnedByParent(const std::string& path);
};

// The calls that touch files, so that a test can make them fail. `context` is the first argument of each.
struct DiskCalls {
  void* context = nullptr;
  int (*open)(void* context, const char* path, int flags, mode_t mode);
  ssize_t (*pwrite)(void* context, int file, const void* data, size_t size, off_t offset);
  ssize_t (*pread)(void* context, int file, void* data, size_t size, off_t offset);
  int (*fallocate)(void* context, int file, off_t size);
  int (*fdatasync)(void* context, int file);
  int (*rename)(void* context, const char* from, const char* to);

  static DiskCalls system();
};

// A stretch of the payload and the xxh64 of its bytes.
struct DiskPiece {
  uint64_t offset;  // bytes from the start of the payload
  uint64_t size;    // bytes
  uint64_t checksum;
};

class DiskDirectory;

// One backup. `write` and `read` may be called from several threads at once; the rest by one thread, with none of those running.
class DiskFile {
 public:
  DiskFile(const DiskFile&) = delete;
  DiskFile& operator=(const DiskFile&) = delete;
  // Removes the file, committed or not.
  ~DiskFile();

  // Offset (in the payload), size and pointer are multiples of DiskStore::kAlignment, else std::invalid_argument. Throws DiskError, DiskFull.
  void write(uint64_t offset, const void* data, uint64_t size);

  // Writes the header, makes the file durable and gives it its final name. Afterwards `write` is refused (std::logic_error). At most as many
  // pieces as `create` was told (std::invalid_argument). After an error the file is as uncommitted as before.
  void commit(std::vector<DiskPiece> pieces);

  // Reads the header anew from the path, or from the open file where that has no name any more, and compares it with what was committed. Throws
  // CorruptFile when the file is exchanged, shorter or longer, or its header differs. The payload is checked by its reader, against `pieces`.
  void verify_header() const;

  // As `write`. Throws CorruptFile when the file ends before `size` bytes.
  void read(uint64_t offset, void* data, uint64_t size) const;

  const std::vector<DiskPiece>& pieces() const { return pieces_; }
  uint64_t payload_bytes() const { return payload_bytes_; }
  // Bytes on disk: payload and header. This is what the budget counts.
  uint64_t file_bytes() const { return file_bytes_; }
  const std::string& path() const { return path_; }
  bool committed() const { return committed_; }
  // Whether the bytes are outside of memory as soon as they are written. False: the file system refuses direct I/O (they passed through
  // the page cache, which was asked to drop them), or it keeps its files in memory.
  bool direct() const { return direct_; }

 private:
  friend class DiskStore;
  DiskFile(std::shared_ptr<DiskDirectory> directory, uint64_t payload_bytes, size_t max_pieces);
  void open_file();
  void allocate();
  void probe_direct();
  void write_header(const std::vector<DiskPiece>& pieces);
  void remove() noexcept;
  void check_transfer(uint64_t offset, const void* data, uint64_t size) const;
  void write_at(uint64_t position, const void* data, uint64_t size);
  bool read_at(int file, uint64_t position, void* data, uint64_t size) const;
  void drop_cached(uint64_t position, uint64_t size) const;
  const char* difference_of(int file) const;

  std::shared_ptr<DiskDirectory> directory_;
  uint64_t payload_bytes_;
  size_t max_pieces_;
  uint64_t header_bytes_;
  uint64_t file_bytes_;
  uint64_t id_[2];  // random; tells this file from every other
  std::string path_;
  std::vector<DiskPiece> pieces_;
  int file_ = -1;
  bool direct_ = true;
  bool committed_ = false;
};

// Thread-safe.
class DiskStore {
 public:
  static constexpr uint64_t kAlignment = 4096;            // of offsets, sizes and pointers: the largest logical block in common use
  static constexpr uint64_t kBlock = uint64_t{8} << 20;  // bytes per system call; larger transfers are cut

  // Makes the directory where it is missing (not its parents), removes what dead processes left there, and enters a new subdirectory.
  // `budget_bytes` limits the bytes of all files of this store. Throws DiskError.
  DiskStore(std::string directory, uint64_t budget_bytes, DiskCalls calls = DiskCalls::system());
  // Removes what dead processes left in a directory; does nothing where there is none, and passes over what it may not remove.
  static void remove_abandoned(const std::string& directory);
  // The subdirectory is removed once the store and all its files are gone.
  ~DiskStore();

  // Takes the bytes of a backup, header included, from the budget and from the disk; first removes what processes that have died since left
  // there. `payload_bytes` is a multiple of kAlignment. Throws BudgetExceeded (before any call), DiskFull (before anything is written), DiskError.
  std::unique_ptr<DiskFile> create(uint64_t payload_bytes, size_t max_pieces);

  // Bytes that a file of this size takes.
  static uint64_t file_bytes(uint64_t payload_bytes, size_t max_pieces);

  // Changes the limit for files made from here on; bytes in use stay.
  void set_budget(uint64_t bytes);
  // Whether its subdirectory is still there.
  bool exists() const;
  // Removes the files of all backups, living ones too: for the end of the process. Does nothing in a forked child.
  void remove_files();

  uint64_t bytes_used() const;
  uint64_t budget() const;
  // The store's own subdirectory.
  const std::string& path() const;

 private:
  std::shared_ptr<DiskDirectory> directory_;
};

}  // namespace hardpoint::memory
