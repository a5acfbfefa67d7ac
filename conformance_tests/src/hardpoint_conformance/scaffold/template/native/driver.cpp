// The memory driver of the pretend device. Its memory is a file without a name: ranges of it are mapped at reserved addresses. Copies are
// queued, and done when somebody waits for them.
//
// hardpoint/driver.h has the rules, and what the core promises, such as sizes that are multiples of the granularity; hardpoint/driver_support.hpp
// makes the table of C functions of this class. On a real device most methods are one or two calls of the vendor's library, which
// `Library` there opens at run time.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <functional>

#include "hardpoint/driver_support.hpp"

using namespace hardpoint::driver;

namespace {

constexpr size_t granularity = size_t{64} << 10, max_chunk = size_t{8} << 20, total = size_t{1} << 30;  // bytes; total of the device's memory

// What a system's call returned; may_fail before the call lets a test ask for its failure.
void check(bool is_done, const char *call, hp_status status = HP_FAILED) {
  if (!is_done) throw Failure{status, errno, call, std::strerror(errno)};
}

class Device {
 public:
  Device() : file_(memfd_create("acme", MFD_CLOEXEC)) { check(file_ >= 0 && ftruncate(file_, off_t{1} << 60) == 0, "memfd_create"); }

  // Nothing to start or to end.
  void open() {}
  void close() {}

  // One queue for all streams keeps the order of each.
  void stream_create(uint64_t *stream) { *stream = ++streams_; }
  void stream_destroy(uint64_t) {}
  void stream_synchronize(uint64_t) { device_synchronize(); }
  void device_synchronize() {
    const std::lock_guard lock(mutex_);
    for (const auto &work : queue_) work();
    queue_.clear();
  }

  void geometry(hp_geometry *geometry) { *geometry = {granularity, granularity, max_chunk, 0, 2, 1 /* kDLCPU of dlpack.h */}; }
  void device_count(int32_t *count) { *count = 1; }
  void device_name(char *name, size_t size) { write_text(name, size, "Acme pretend device"); }
  void driver_version(char *version, size_t size) { write_text(version, size, "0.1.0"); }
  void quirks(uint64_t *bits) { *bits = 0; }

  void memory_info(uint64_t *free_bytes, uint64_t *total_bytes) {
    const std::lock_guard lock(mutex_);
    *free_bytes = total - used_;
    *total_bytes = total;
  }

  void reserve(size_t size, uint64_t hint, uint64_t *address) {
    char *wide = take(hint, size + granularity, 0, HP_OUT_OF_MEMORY);  // more than asked, to cut an aligned range out of it
    const size_t before = -reinterpret_cast<uintptr_t>(wide) % granularity;
    if (before != 0) munmap(wide, before);
    munmap(wide + before + size, granularity - before);
    *address = reinterpret_cast<uintptr_t>(wide + before);
  }
  void release_address(uint64_t address, size_t size) { check((may_fail("munmap"), munmap(pointer(address), size)) == 0, "munmap"); }

  void create(size_t size, uint64_t *handle) {
    const std::lock_guard lock(mutex_);
    if (size > total - used_) throw Failure{HP_OUT_OF_MEMORY, 0, "create", "the device's memory is used up"};
    used_ += size;
    *handle = end_ += size;
  }
  void release(uint64_t handle, size_t size) {
    const std::lock_guard lock(mutex_);
    check((may_fail("fallocate"), fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, off_t(handle - size), off_t(size))) == 0, "fallocate");
    used_ -= size;
  }

  void map(uint64_t address, size_t size, uint64_t handle) {
    check((may_fail("mmap"), mmap(pointer(address), size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file_, off_t(handle - size))) != MAP_FAILED, "mmap");
  }
  void unmap(uint64_t address, size_t size) { take(address, size, MAP_FIXED, HP_FAILED); }

  // Host memory need not be pinned for these copies, hence no host_register.
  void copy_to_host(void *host, uint64_t from, size_t size, uint64_t) { queue([=] { std::memcpy(host, pointer(from), size); }); }
  void copy_to_device(uint64_t to, const void *host, size_t size, uint64_t) { queue([=] { std::memcpy(pointer(to), host, size); }); }
  void fill(uint64_t to, uint8_t value, size_t size, uint64_t) { queue([=] { std::memset(pointer(to), value, size); }); }

 private:
  void queue(std::function<void()> work) {
    const std::lock_guard lock(mutex_);
    queue_.push_back(std::move(work));
  }

  // Takes addresses without access to them.
  static char *take(uint64_t address, size_t size, int flags, hp_status status) {
    void *taken = (may_fail("mmap"), mmap(pointer(address), size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | flags, -1, 0));
    check(taken != MAP_FAILED, "mmap", status);
    return static_cast<char *>(taken);
  }

  int file_;                       // the device's memory, without an end
  std::mutex mutex_;               // guards used_, end_ and queue_
  std::vector<std::function<void()>> queue_;
  uint64_t used_ = 0, end_ = 0;    // bytes created and not released; end of the last range of the file, none of which is used twice
  std::atomic<uint64_t> streams_{0};
};

}  // namespace

hp_status hp_driver_open(const hp_open_request *request, const hp_driver **driver, hp_error *error) {
  return guarded("hp_driver_open", error, [&] {
    check_device_index(request->device, 1, "the pretend driver");
    Options(request->options).finish();
    static auto *const device = new Device;  // to the end of the process, as driver.h promises
    // HP_SIMULATED goes when the device is real.
    static const hp_driver table = make_table(*device, HP_HOST_ACCESSIBLE | HP_FRESH_ZERO | HP_SIMULATED);
    *driver = &table;
  });
}

void hp_driver_fail_call(int64_t nth) { calls_to_failure = nth; }
