#include "memory_disk.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <system_error>

#include "checksum.hpp"

namespace hardpoint::memory {
namespace {

constexpr char kPrefix[] = "hardpoint-";
constexpr char kLock[] = "lock";
constexpr char kPartial[] = ".partial";
constexpr char kBackup[] = ".backup";
constexpr char kMagic[8] = {'H', 'P', 'B', 'A', 'C', 'K', 'U', 'P'};
constexpr uint64_t kVersion = 1;
constexpr mode_t kOwnerOnly = 0600;

// A file lives as long as the process that wrote it, so the header is in this machine's byte order.
struct Header {
  char magic[8];
  uint64_t version;
  uint64_t num_pieces;  // DiskPieces that follow this struct
  uint64_t payload_bytes;
  uint64_t id[2];
  uint64_t checksum;  // xxh64 of the whole header, to its last byte of padding, with this field 0
};

uint64_t aligned_down(uint64_t size) { return size / DiskStore::kAlignment * DiskStore::kAlignment; }

uint64_t header_bytes(size_t max_pieces) {
  return aligned_down(sizeof(Header) + uint64_t{max_pieces} * sizeof(DiskPiece) + DiskStore::kAlignment - 1);
}

std::string message_of(int error) { return std::system_category().message(error); }

[[noreturn]] void fail(const char* operation, const std::string& path, int error) {
  // EFBIG is what a limit on the size of files (RLIMIT_FSIZE) answers.
  if (error == ENOSPC || error == EDQUOT || error == EFBIG) throw DiskFull(operation, path, error);
  throw DiskError(operation, path, error);
}

template <typename Call>
auto retry_interrupted(Call call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

// Growing a file beyond RLIMIT_FSIZE sends the thread SIGXFSZ, which ends a process that does not ignore it. While this lives the signal is held
// back, and then taken away, so that EFBIG is all that comes of it.
class FileLimitIsAnError {
 public:
  FileLimitIsAnError() {
    sigemptyset(&signal_);
    sigaddset(&signal_, SIGXFSZ);
    pthread_sigmask(SIG_BLOCK, &signal_, &before_);
  }
  FileLimitIsAnError(const FileLimitIsAnError&) = delete;
  FileLimitIsAnError& operator=(const FileLimitIsAnError&) = delete;
  ~FileLimitIsAnError() {
    if (sigismember(&before_, SIGXFSZ) == 1) return;
    const int error = errno;
    const timespec none{};
    while (sigtimedwait(&signal_, nullptr, &none) < 0 && errno == EINTR) {
    }
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
    errno = error;
  }

 private:
  sigset_t signal_, before_;
};

uint64_t random_bits() {
  std::random_device random;
  return (uint64_t{random()} << 32) | random();
}

std::string hexadecimal(uint64_t value) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value));
  return text;
}

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

class FileDescriptor {
 public:
  explicit FileDescriptor(int file) : file_(file) {}
  FileDescriptor(FileDescriptor&& other) noexcept : file_(other.release()) {}
  FileDescriptor& operator=(FileDescriptor&&) = delete;
  ~FileDescriptor() {
    if (file_ >= 0) ::close(file_);
  }
  int get() const { return file_; }
  bool valid() const { return file_ >= 0; }
  int release() {
    const int file = file_;
    file_ = -1;
    return file;
  }

 private:
  int file_;
};

class DirectoryStream {
 public:
  explicit DirectoryStream(const std::string& path) : stream_(::opendir(path.c_str())) {}
  DirectoryStream(const DirectoryStream&) = delete;
  DirectoryStream& operator=(const DirectoryStream&) = delete;
  ~DirectoryStream() {
    if (stream_) ::closedir(stream_);
  }
  std::vector<std::string> names() const {
    std::vector<std::string> found;
    if (!stream_) return found;
    while (const dirent* entry = ::readdir(stream_)) found.emplace_back(entry->d_name);
    return found;
  }

 private:
  DIR* stream_;
};

bool is_hexadecimal(const std::string& text) {
  return !text.empty() && text.find_first_not_of("0123456789abcdef") == std::string::npos;
}

// `hardpoint-<pid>-<16 hexadecimal digits>`
bool is_store_name(const std::string& name) {
  if (name.compare(0, sizeof kPrefix - 1, kPrefix) != 0) return false;
  const size_t dash = name.find('-', sizeof kPrefix - 1);
  if (dash == std::string::npos) return false;
  const std::string pid = name.substr(sizeof kPrefix - 1, dash - (sizeof kPrefix - 1));
  const std::string random = name.substr(dash + 1);
  return !pid.empty() && pid.find_first_not_of("0123456789") == std::string::npos && random.size() == 16 &&
         is_hexadecimal(random);
}

// `<16 hexadecimal digits>.partial` or `.backup`
bool is_backup_name(const std::string& name) {
  return name.size() > 16 && is_hexadecimal(name.substr(0, 16)) &&
         (name.substr(16) == kPartial || name.substr(16) == kBackup);
}

bool try_lock(int file) {
  return retry_interrupted([&] { return ::flock(file, LOCK_EX | LOCK_NB); }) == 0;
}

// Removes our files, the lock last, and the directory if nothing else is in it.
void remove_store(const std::string& path) {
  for (const std::string& name : DirectoryStream(path).names())
    if (is_backup_name(name)) ::unlink((path + "/" + name).c_str());
  ::unlink((path + "/" + kLock).c_str());
  ::rmdir(path.c_str());
}

void remove_if_abandoned(const std::string& path) {
  struct stat facts;
  if (::lstat(path.c_str(), &facts) != 0 || !S_ISDIR(facts.st_mode) || facts.st_uid != ::geteuid()) return;
  const FileDescriptor lock(::open((path + "/" + kLock).c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
  if (!lock.valid()) {
    // Its owner died, or is, between making the directory and making the lock; an owner that lives makes another one.
    if (errno == ENOENT) ::rmdir(path.c_str());
    return;
  }
  if (try_lock(lock.get())) remove_store(path);
}

void remove_abandoned(const std::string& directory) {
  for (const std::string& name : DirectoryStream(directory).names())
    if (is_store_name(name)) remove_if_abandoned(directory + "/" + name);
}

bool same_file(const struct stat& a, const struct stat& b) { return a.st_dev == b.st_dev && a.st_ino == b.st_ino; }

// Makes the lock of a new subdirectory. Not valid when another process's cleaning got in between: the caller tries another name.
FileDescriptor take_lock(const std::string& path) {
  FileDescriptor lock(::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, kOwnerOnly));
  if (!lock.valid()) {
    if (errno == ENOENT) return FileDescriptor(-1);
    fail("open", path, errno);
  }
  if (!try_lock(lock.get())) {
    if (errno == EWOULDBLOCK) return FileDescriptor(-1);
    fail("flock", path, errno);
  }
  struct stat mine, there;
  if (::fstat(lock.get(), &mine) != 0) fail("fstat", path, errno);
  if (::stat(path.c_str(), &there) != 0 || !same_file(mine, there)) return FileDescriptor(-1);
  return lock;
}

FileDescriptor make_locked(const std::string& path) {
  if (::mkdir(path.c_str(), 0700) != 0) fail("mkdir", path, errno);
  try {
    return take_lock(path + "/" + kLock);
  } catch (...) {
    remove_store(path);
    throw;
  }
}

// The process may change its working directory before the files are removed.
std::string absolute(const std::string& path) {
  const std::unique_ptr<char, Free> resolved(::realpath(path.c_str(), nullptr));
  if (!resolved) fail("realpath", path, errno);
  return resolved.get();
}

bool same_piece(const DiskPiece& a, const DiskPiece& b) {
  return a.offset == b.offset && a.size == b.size && a.checksum == b.checksum;
}

bool keeps_files_in_memory(int file) {
  struct statfs facts;
  if (::fstatfs(file, &facts) != 0) return false;
  return facts.f_type == TMPFS_MAGIC || facts.f_type == RAMFS_MAGIC;
}

using AlignedBytes = std::unique_ptr<unsigned char, Free>;

AlignedBytes aligned_zeros(uint64_t size) {
  AlignedBytes bytes(static_cast<unsigned char*>(std::aligned_alloc(DiskStore::kAlignment, size)));
  if (!bytes) throw std::bad_alloc();
  std::memset(bytes.get(), 0, size);
  return bytes;
}

// `size` bytes from `header` on, which is put back as it was.
uint64_t header_checksum(Header& header, uint64_t size) {
  const uint64_t kept = header.checksum;
  header.checksum = 0;
  const uint64_t checksum = xxh64(&header, size);
  header.checksum = kept;
  return checksum;
}

}  // namespace

DiskError::DiskError(std::string operation_, std::string path_, int error_)
    : std::runtime_error(operation_ + " of " + path_ + ": " + message_of(error_)),
      operation(std::move(operation_)),
      path(std::move(path_)),
      error(error_),
      text(message_of(error_)) {}

BudgetExceeded::BudgetExceeded(uint64_t asked_, uint64_t used_, uint64_t budget_)
    : std::runtime_error(std::to_string(asked_) + " bytes asked of a disk budget of " + std::to_string(budget_) + ", of which " +
                         std::to_string(used_) + " are used"),
      asked(asked_),
      used(used_),
      budget(budget_) {}

CorruptFile::CorruptFile(std::string path_, std::string reason_)
    : std::runtime_error("backup " + path_ + " is not what was written: " + reason_),
      path(std::move(path_)),
      reason(std::move(reason_)) {}

OwnedByParent::OwnedByParent(const std::string& path)
    : std::runtime_error("the disk store " + path + " belongs to the process that this one was forked from") {}

DiskCalls DiskCalls::system() {
  DiskCalls calls;
  calls.open = [](void*, const char* path, int flags, mode_t mode) { return ::open(path, flags, mode); };
  calls.pwrite = [](void*, int file, const void* data, size_t size, off_t offset) {
    return ::pwrite(file, data, size, offset);
  };
  calls.pread = [](void*, int file, void* data, size_t size, off_t offset) { return ::pread(file, data, size, offset); };
  calls.fallocate = [](void*, int file, off_t size) { return ::fallocate(file, 0, 0, size); };
  calls.fdatasync = [](void*, int file) { return ::fdatasync(file); };
  calls.rename = [](void*, const char* from, const char* to) { return ::rename(from, to); };
  return calls;
}

// The subdirectory, its lock and its budget: shared by the store and its files, gone with the last of them.
class DiskDirectory {
 public:
  DiskDirectory(const std::string& parent, uint64_t budget_bytes, const DiskCalls& calls_)
      : calls(calls_), budget(budget_bytes) {
    if (::mkdir(parent.c_str(), 0700) != 0 && errno != EEXIST) fail("mkdir", parent, errno);
    const std::string place = absolute(parent);
    remove_abandoned(place);
    while (lock_ < 0) {
      path = place + "/" + kPrefix + std::to_string(owner) + "-" + hexadecimal(random_bits());
      lock_ = make_locked(path).release();
    }
  }
  DiskDirectory(const DiskDirectory&) = delete;
  DiskDirectory& operator=(const DiskDirectory&) = delete;
  ~DiskDirectory() {
    remove();
    ::close(lock_);
  }

  bool is_owner() const { return ::getpid() == owner; }
  void check_owner() const {
    if (!is_owner()) throw OwnedByParent(path);
  }

  void remove() const {
    if (is_owner()) remove_store(path);
  }
  void remove_others_left() const { remove_abandoned(path.substr(0, path.rfind('/'))); }

  void take(uint64_t bytes) {
    uint64_t used = used_.load();
    const uint64_t limit = budget;
    do {
      if (used > limit || bytes > limit - used) throw BudgetExceeded(bytes, used, limit);
    } while (!used_.compare_exchange_weak(used, used + bytes));
  }
  void give_back(uint64_t bytes) { used_ -= bytes; }
  uint64_t used() const { return used_.load(); }

  void synchronise() const {
    const FileDescriptor file(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (!file.valid()) fail("open", path, errno);
    if (retry_interrupted([&] { return ::fsync(file.get()); }) != 0) fail("fsync", path, errno);
  }

  const DiskCalls calls;
  std::atomic<uint64_t> budget;
  const pid_t owner = ::getpid();
  std::string path;

 private:
  // Bytes of the files that exist, at most `budget`. No mutex: a forked child that destroys its copy could find it locked for ever.
  std::atomic<uint64_t> used_{0};
  int lock_ = -1;
};

DiskFile::DiskFile(std::shared_ptr<DiskDirectory> directory, uint64_t payload_bytes, size_t max_pieces)
    : directory_(std::move(directory)),
      payload_bytes_(payload_bytes),
      max_pieces_(max_pieces),
      header_bytes_(header_bytes(max_pieces)),
      file_bytes_(DiskStore::file_bytes(payload_bytes, max_pieces)),
      id_{random_bits(), random_bits()},
      path_(directory_->path + "/" + hexadecimal(id_[0]) + kPartial) {
  directory_->take(file_bytes_);
  try {
    open_file();
    allocate();
    probe_direct();
  } catch (...) {
    remove();
    throw;
  }
}

DiskFile::~DiskFile() { remove(); }

void DiskFile::remove() noexcept {
  if (file_ >= 0) {
    ::close(file_);
    if (directory_->is_owner()) ::unlink(path_.c_str());
  }
  directory_->give_back(file_bytes_);
}

void DiskFile::open_file() {
  const DiskCalls& calls = directory_->calls;
  const int flags = O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW;
  const auto open = [&](int extra) {
    return retry_interrupted([&] { return calls.open(calls.context, path_.c_str(), flags | extra, kOwnerOnly); });
  };
  file_ = open(O_DIRECT);
  if (file_ < 0 && errno == EINVAL) {
    direct_ = false;
    // Some file systems make the file before they refuse the flag.
    ::unlink(path_.c_str());
    file_ = open(0);
  }
  if (file_ < 0) fail("open", path_, errno);
  if (keeps_files_in_memory(file_)) direct_ = false;
}

void DiskFile::allocate() {
  const DiskCalls& calls = directory_->calls;
  const FileLimitIsAnError held;
  if (file_bytes_ > static_cast<uint64_t>(std::numeric_limits<off_t>::max())) fail("fallocate", path_, EFBIG);
  const auto size = static_cast<off_t>(file_bytes_);
  if (retry_interrupted([&] { return calls.fallocate(calls.context, file_, size); }) == 0) return;
  if (errno != EOPNOTSUPP) fail("fallocate", path_, errno);
  // Without allocation, free space is the best that can be known before writing.
  struct statvfs facts;
  if (::fstatvfs(file_, &facts) != 0) fail("fstatvfs", path_, errno);
  if (uint64_t{facts.f_bavail} * facts.f_frsize < file_bytes_) fail("fstatvfs", path_, ENOSPC);
  if (::ftruncate(file_, size) != 0) fail("ftruncate", path_, errno);
}

// Some file systems accept the flag and refuse the transfers, or want larger blocks.
void DiskFile::probe_direct() {
  if (!direct_) return;
  const DiskCalls& calls = directory_->calls;
  const AlignedBytes block = aligned_zeros(DiskStore::kAlignment);
  if (retry_interrupted([&] { return calls.pread(calls.context, file_, block.get(), DiskStore::kAlignment, 0); }) >= 0) return;
  if (errno != EINVAL) fail("pread", path_, errno);
  direct_ = false;
  if (::fcntl(file_, F_SETFL, ::fcntl(file_, F_GETFL) & ~O_DIRECT) != 0) fail("fcntl", path_, errno);
}

void DiskFile::check_transfer(uint64_t offset, const void* data, uint64_t size) const {
  directory_->check_owner();
  if ((offset | size | reinterpret_cast<uintptr_t>(data)) % DiskStore::kAlignment != 0)
    throw std::invalid_argument("offset, size and memory of a transfer to disk must be multiples of " +
                                std::to_string(DiskStore::kAlignment) + " bytes");
  if (offset > payload_bytes_ || size > payload_bytes_ - offset)
    throw std::invalid_argument("bytes " + std::to_string(offset) + " to " + std::to_string(offset + size) +
                                " are beyond a backup of " + std::to_string(payload_bytes_));
}

void DiskFile::write(uint64_t offset, const void* data, uint64_t size) {
  check_transfer(offset, data, size);
  if (committed_) throw std::logic_error("the backup " + path_ + " is committed and cannot be written");
  write_at(header_bytes_ + offset, data, size);
}

void DiskFile::read(uint64_t offset, void* data, uint64_t size) const {
  check_transfer(offset, data, size);
  if (!read_at(file_, header_bytes_ + offset, data, size)) throw CorruptFile(path_, "it is shorter than what was written");
  drop_cached(header_bytes_ + offset, size);
}

void DiskFile::write_at(uint64_t position, const void* data, uint64_t size) {
  const FileLimitIsAnError held;
  const DiskCalls& calls = directory_->calls;
  auto bytes = static_cast<const unsigned char*>(data);
  while (size > 0) {
    const size_t block = std::min(size, DiskStore::kBlock);
    const ssize_t written = retry_interrupted(
        [&] { return calls.pwrite(calls.context, file_, bytes, block, static_cast<off_t>(position)); });
    if (written < 0) fail("pwrite", path_, errno);
    const uint64_t done = aligned_down(static_cast<uint64_t>(written));
    if (done == 0) fail("pwrite", path_, EIO);
    position += done, bytes += done, size -= done;
  }
}

bool DiskFile::read_at(int file, uint64_t position, void* data, uint64_t size) const {
  const DiskCalls& calls = directory_->calls;
  auto bytes = static_cast<unsigned char*>(data);
  while (size > 0) {
    const size_t block = std::min(size, DiskStore::kBlock);
    const ssize_t got =
        retry_interrupted([&] { return calls.pread(calls.context, file, bytes, block, static_cast<off_t>(position)); });
    if (got < 0) fail("pread", path_, errno);
    const uint64_t done = aligned_down(static_cast<uint64_t>(got));
    if (done == 0) return false;
    position += done, bytes += done, size -= done;
  }
  return true;
}

void DiskFile::drop_cached(uint64_t position, uint64_t size) const {
  if (!direct_) ::posix_fadvise(file_, static_cast<off_t>(position), static_cast<off_t>(size), POSIX_FADV_DONTNEED);
}

void DiskFile::write_header(const std::vector<DiskPiece>& pieces) {
  const AlignedBytes bytes = aligned_zeros(header_bytes_);
  auto& header = *new (bytes.get()) Header{};
  std::memcpy(header.magic, kMagic, sizeof kMagic);
  header.version = kVersion;
  header.num_pieces = pieces.size();
  header.payload_bytes = payload_bytes_;
  std::copy(std::begin(id_), std::end(id_), header.id);
  std::uninitialized_copy(pieces.begin(), pieces.end(), reinterpret_cast<DiskPiece*>(bytes.get() + sizeof header));
  header.checksum = header_checksum(header, header_bytes_);
  write_at(0, bytes.get(), header_bytes_);
}

void DiskFile::commit(std::vector<DiskPiece> pieces) {
  directory_->check_owner();
  if (committed_) throw std::logic_error("the backup " + path_ + " is committed already");
  if (pieces.size() > max_pieces_)
    throw std::invalid_argument(std::to_string(pieces.size()) + " pieces in a backup made for " + std::to_string(max_pieces_));

  write_header(pieces);
  const DiskCalls& calls = directory_->calls;
  if (retry_interrupted([&] { return calls.fdatasync(calls.context, file_); }) != 0) fail("fdatasync", path_, errno);
  drop_cached(0, file_bytes_);
  const std::string final_path = directory_->path + "/" + hexadecimal(id_[0]) + kBackup;
  if (calls.rename(calls.context, path_.c_str(), final_path.c_str()) != 0) fail("rename", path_, errno);
  path_ = final_path;
  directory_->synchronise();
  pieces_ = std::move(pieces);
  committed_ = true;
}

void DiskFile::verify_header() const {
  directory_->check_owner();
  if (!committed_) throw std::logic_error("the backup " + path_ + " is not committed");
  const DiskCalls& calls = directory_->calls;
  // Where a pipe has the backup's name, opening it would wait for somebody who writes.
  const int flags = O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;
  const FileDescriptor file(
      retry_interrupted([&] { return calls.open(calls.context, path_.c_str(), flags, mode_t{0}); }));
  // A name that is gone, or its folder, took no bytes along: the file is open here.
  const bool is_gone = !file.valid() && (errno == ENOENT || errno == ENOTDIR);
  if (!file.valid() && !is_gone) fail("open", path_, errno);
  if (const char* difference = difference_of(is_gone ? file_ : file.get())) throw CorruptFile(path_, difference);
}

const char* DiskFile::difference_of(int file) const {
  struct stat mine, there;
  if (::fstat(file_, &mine) != 0 || ::fstat(file, &there) != 0) fail("fstat", path_, errno);
  if (!same_file(mine, there)) return "another file has its name";
  if (static_cast<uint64_t>(there.st_size) != file_bytes_) return "its size has changed";

  const AlignedBytes bytes = aligned_zeros(header_bytes_);
  if (!read_at(file, 0, bytes.get(), header_bytes_)) return "it is shorter than its header";
  auto& header = *reinterpret_cast<Header*>(bytes.get());
  if (std::memcmp(header.magic, kMagic, sizeof kMagic) != 0) return "it does not begin as a backup";
  if (header.version != kVersion) return "its version is unknown";
  if (header.checksum != header_checksum(header, header_bytes_)) return "the checksum of its header is wrong";
  if (!std::equal(std::begin(id_), std::end(id_), header.id)) return "it is another backup";
  const auto pieces = reinterpret_cast<const DiskPiece*>(bytes.get() + sizeof header);
  const bool same_pieces = header.num_pieces == pieces_.size() && header.payload_bytes == payload_bytes_ &&
                           std::equal(pieces_.begin(), pieces_.end(), pieces, same_piece);
  return same_pieces ? nullptr : "its list of pieces is another one";
}

DiskStore::DiskStore(std::string directory, uint64_t budget_bytes, DiskCalls calls)
    : directory_(std::make_shared<DiskDirectory>(directory, budget_bytes, calls)) {}

DiskStore::~DiskStore() = default;

void DiskStore::remove_abandoned(const std::string& directory) { memory::remove_abandoned(directory); }

std::unique_ptr<DiskFile> DiskStore::create(uint64_t payload_bytes, size_t max_pieces) {
  directory_->check_owner();
  if (payload_bytes % kAlignment != 0)
    throw std::invalid_argument("a backup of " + std::to_string(payload_bytes) + " bytes is not a multiple of " +
                                std::to_string(kAlignment));
  directory_->remove_others_left();
  return std::unique_ptr<DiskFile>(new DiskFile(directory_, payload_bytes, max_pieces));
}

uint64_t DiskStore::file_bytes(uint64_t payload_bytes, size_t max_pieces) {
  const uint64_t header = header_bytes(max_pieces);
  const uint64_t most = std::numeric_limits<uint64_t>::max();
  return payload_bytes > most - header ? most : header + payload_bytes;
}

void DiskStore::set_budget(uint64_t bytes) { directory_->budget = bytes; }

bool DiskStore::exists() const {
  struct stat facts;
  return ::stat(directory_->path.c_str(), &facts) == 0;
}

void DiskStore::remove_files() { directory_->remove(); }

uint64_t DiskStore::bytes_used() const { return directory_->used(); }
uint64_t DiskStore::budget() const { return directory_->budget; }
const std::string& DiskStore::path() const { return directory_->path; }

}  // namespace hardpoint::memory
