// The memory driver of the pretend device. Its memory is a file without a name: ranges of it are mapped at reserved addresses.
//
// hardpoint/driver.h has the rules, and what the core promises, such as sizes that are multiples of the granularity; hardpoint/driver_support.hpp
// makes the table of C functions of this class. On a real device most methods are one or two calls of the vendor's library, which
// `Library` there opens at run time.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "hardpoint/driver_support.hpp"

using namespace hardpoint::driver;

namespace {

constexpr int32_t dlpack_cpu = 1;
constexpr size_t granularity = size_t{64} << 10, max_chunk = size_t{8} << 20;
constexpr uint64_t total = uint64_t{1} << 30;  // bytes of the device's memory

void check(bool is_done, const char *call, hp_status status = HP_FAILED) {
  if (!is_done) throw Failure{status, errno, call, std::strerror(errno)};
}

class Device {
 public:
  Device() : file_(memfd_create("acme", MFD_CLOEXEC)) { check(file_ >= 0 && ftruncate(file_, off_t{1} << 60) == 0, "memfd_create"); }

  // Nothing to start, and nothing to wait for: copies are done when they return (HP_COPIES_BLOCK).
  void open() {}
  void close() {}
  void stream_create(uint64_t *stream) { *stream = ++streams_; }
  void stream_destroy(uint64_t) {}
  void stream_synchronize(uint64_t) {}
  void device_synchronize() {}

  void geometry(hp_geometry *geometry) { *geometry = {granularity, granularity, max_chunk, 0, 2, dlpack_cpu}; }
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
  void release_address(uint64_t address, size_t size) { check(munmap(pointer(address), size) == 0, "munmap"); }

  void create(size_t size, uint64_t *handle) {
    const std::lock_guard lock(mutex_);
    if (size > total - used_) throw Failure{HP_OUT_OF_MEMORY, 0, "create", "the device's memory is used up"};
    used_ += size;
    *handle = end_ += size;
  }
  void release(uint64_t handle, size_t size) {
    const std::lock_guard lock(mutex_);
    const int mode = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
    check(fallocate(file_, mode, static_cast<off_t>(handle - size), static_cast<off_t>(size)) == 0, "fallocate");
    used_ -= size;
  }

  void map(uint64_t address, size_t size, uint64_t handle) {
    const off_t offset = static_cast<off_t>(handle - size);
    check(mmap(pointer(address), size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file_, offset) != MAP_FAILED, "mmap");
  }
  void unmap(uint64_t address, size_t size) { take(address, size, MAP_FIXED, HP_FAILED); }

  void copy_to_host(void *host, uint64_t address, size_t size, uint64_t) { std::memcpy(host, pointer(address), size); }
  void copy_to_device(uint64_t address, const void *host, size_t size, uint64_t) { std::memcpy(pointer(address), host, size); }
  void fill(uint64_t address, uint8_t value, size_t size, uint64_t) { std::memset(pointer(address), value, size); }

  // Host memory need not be pinned for these copies.
  static bool can_register_host() { return false; }
  void host_register(void *, size_t) {}
  void host_unregister(void *, size_t) {}

 private:
  // Takes addresses without access to them.
  static char *take(uint64_t address, size_t size, int flags, hp_status status) {
    void *taken = mmap(pointer(address), size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | flags, -1, 0);
    check(taken != MAP_FAILED, "mmap", status);
    return static_cast<char *>(taken);
  }

  int file_;                       // the device's memory, without an end
  std::mutex mutex_;               // guards used_ and end_
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
    static const hp_driver table = make_table(*device, HP_HOST_ACCESSIBLE | HP_FRESH_ZERO | HP_COPIES_BLOCK | HP_SIMULATED);
    *driver = &table;
  });
}
