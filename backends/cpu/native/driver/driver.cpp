// The CPU as a device: the table of hardpoint/driver.h over anonymous memory of this process.
#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <set>

#include "faults.hpp"
#include "hardpoint/driver_support.hpp"
#include "host.hpp"
#include "settings.hpp"
#include "streaming.hpp"
#include "virtual_memory.hpp"

namespace hp::driver {
namespace {

using hardpoint::driver::Entry;
using hardpoint::driver::Failure;
using hardpoint::driver::refuse;
using hardpoint::driver::write_text;

constexpr int32_t kDlpackCpu = 1;
constexpr int32_t kMostCopyThreads = 8;             // more do not add to the bandwidth of one socket's memory
constexpr size_t kStreamingFrom = size_t{1} << 20;  // smaller copies are likely to be read again from the cache

const Streaming &choose_streaming(const std::string &name) {
  if (name.empty()) return best_streaming();
  const Streaming *found = find_streaming(name);
  if (!found) refuse("hp_driver_open", "option streaming: this build or processor has no '" + name + "'");
  return *found;
}

unsigned char *bytes_at(uint64_t address) { return reinterpret_cast<unsigned char *>(static_cast<uintptr_t>(address)); }

// Copies are done when they return, so a stream is a number that was given out.
class Streams {
 public:
  uint64_t create() {
    const std::lock_guard<std::mutex> guard(mutex_);
    alive_.insert(next_);
    return next_++;
  }
  void destroy(uint64_t stream) {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (alive_.erase(stream) == 0) refuse_unknown("stream_destroy", stream);
  }
  void check(const char *entry, uint64_t stream) const {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (alive_.count(stream) == 0) refuse_unknown(entry, stream);
  }

 private:
  [[noreturn]] static void refuse_unknown(const char *entry, uint64_t stream) {
    refuse(entry, "stream " + std::to_string(stream) + " is unknown");
  }
  mutable std::mutex mutex_;  // guards all below: alive_ holds what was given out and not destroyed
  std::set<uint64_t> alive_;
  uint64_t next_ = 1;
};

// The methods are the entries of hp_driver.
class CpuDevice {
 public:
  explicit CpuDevice(const Settings &settings)
      : memory_(settings.budget, settings.keep_address), streaming_(choose_streaming(settings.streaming)) {
    for (const Settings::Fault &fault : settings.faults)
      if (!faults_.set(fault.entry, fault.nth, fault.times))
        refuse("hp_driver_open", "option fail names '" + fault.entry + "', which is no entry of this driver");
    fill_table();
  }

  const hp_driver &table() const { return table_; }
  Faults &faults() { return faults_; }
  VirtualMemory &memory() { return memory_; }

  void open() {
    faults_.enter("open");
    users_.open([] {});
  }
  void close() {
    faults_.enter("close");
    users_.close([] {});
  }

  void geometry(hp_geometry *geometry) {
    faults_.enter("geometry");
    *geometry = hp_geometry{};
    geometry->granularity = VirtualMemory::kGranularity;
    geometry->recommended = VirtualMemory::kGranularity;
    geometry->max_chunk = VirtualMemory::kMaxChunk;
    geometry->copy_threads = std::min<int32_t>(usable_cores(), kMostCopyThreads);
    geometry->dlpack_device = kDlpackCpu;
  }
  void memory_info(uint64_t *free_bytes, uint64_t *total_bytes) {
    faults_.enter("memory_info");
    *free_bytes = memory_.free_bytes();
    *total_bytes = memory_.total_bytes();
  }
  void device_count(int32_t *count) {
    faults_.enter("device_count");
    *count = 1;
  }
  void device_name(char *name, size_t size) {
    faults_.enter("device_name");
    write_text(name, size, processor_name());
  }
  void driver_version(char *version, size_t size) {
    faults_.enter("driver_version");
    write_text(version, size, kernel_version());
  }

  void reserve(size_t size, uint64_t hint, uint64_t *address) {
    faults_.enter("reserve");
    users_.require("reserve");
    *address = memory_.reserve(size, hint);
  }
  void release_address(uint64_t address, size_t size) {
    faults_.enter("release_address");
    memory_.release_address(address, size);
  }
  void create(size_t size, uint64_t *handle) {
    faults_.enter("create");
    users_.require("create");
    *handle = memory_.create(size);
  }
  void release(uint64_t handle, size_t size) {
    faults_.enter("release");
    memory_.release(handle, size);
  }
  void map(uint64_t address, size_t size, uint64_t handle) {
    faults_.enter("map");
    memory_.map(address, size, handle);
  }
  void unmap(uint64_t address, size_t size) {
    faults_.enter("unmap");
    memory_.unmap(address, size);
  }

  void stream_create(uint64_t *stream) {
    faults_.enter("stream_create");
    users_.require("stream_create");
    *stream = streams_.create();
  }
  void stream_destroy(uint64_t stream) {
    faults_.enter("stream_destroy");
    streams_.destroy(stream);
  }
  void copy_to_host(void *host, uint64_t address, size_t size, uint64_t stream) {
    enter_transfer("copy_to_host", address, size, stream);
    copy(static_cast<unsigned char *>(host), bytes_at(address), size);
  }
  void copy_to_device(uint64_t address, const void *host, size_t size, uint64_t stream) {
    enter_transfer("copy_to_device", address, size, stream);
    copy(bytes_at(address), static_cast<const unsigned char *>(host), size);
  }
  void fill(uint64_t address, uint8_t value, size_t size, uint64_t stream) {
    enter_transfer("fill", address, size, stream);
    if (size < kStreamingFrom)
      std::memset(bytes_at(address), value, size);
    else
      streaming_.fill(bytes_at(address), value, size);
  }
  void stream_synchronize(uint64_t stream) {
    faults_.enter("stream_synchronize");
    streams_.check("stream_synchronize", stream);
  }
  void device_synchronize() { faults_.enter("device_synchronize"); }

 private:
  void enter_transfer(const char *entry, uint64_t address, size_t size, uint64_t stream) {
    faults_.enter(entry);
    streams_.check(entry, stream);
    memory_.check_mapped(entry, address, size);
  }

  void copy(unsigned char *to, const unsigned char *from, size_t size) const {
    if (size < kStreamingFrom)
      std::memcpy(to, from, size);
    else
      streaming_.copy(to, from, size);
  }

  // Without quirks and without host_register: host memory is used as it is.
  void fill_table() {
    table_.struct_size = sizeof table_;
    table_.abi = HP_DRIVER_ABI;
    table_.flags = HP_HOST_ACCESSIBLE | HP_FRESH_ZERO | HP_COPIES_BLOCK;
    table_.context = this;
    table_.open = Entry<&CpuDevice::open>::call;
    table_.close = Entry<&CpuDevice::close>::call;
    table_.geometry = Entry<&CpuDevice::geometry>::call;
    table_.memory_info = Entry<&CpuDevice::memory_info>::call;
    table_.device_count = Entry<&CpuDevice::device_count>::call;
    table_.device_name = Entry<&CpuDevice::device_name>::call;
    table_.driver_version = Entry<&CpuDevice::driver_version>::call;
    table_.reserve = Entry<&CpuDevice::reserve>::call;
    table_.release_address = Entry<&CpuDevice::release_address>::call;
    table_.create = Entry<&CpuDevice::create>::call;
    table_.release = Entry<&CpuDevice::release>::call;
    table_.map = Entry<&CpuDevice::map>::call;
    table_.unmap = Entry<&CpuDevice::unmap>::call;
    table_.stream_create = Entry<&CpuDevice::stream_create>::call;
    table_.stream_destroy = Entry<&CpuDevice::stream_destroy>::call;
    table_.copy_to_host = Entry<&CpuDevice::copy_to_host>::call;
    table_.copy_to_device = Entry<&CpuDevice::copy_to_device>::call;
    table_.fill = Entry<&CpuDevice::fill>::call;
    table_.stream_synchronize = Entry<&CpuDevice::stream_synchronize>::call;
    table_.device_synchronize = Entry<&CpuDevice::device_synchronize>::call;
  }

  VirtualMemory memory_;
  const Streaming &streaming_;
  Streams streams_;
  Faults faults_;
  hardpoint::driver::OpenCount users_;
  hp_driver table_{};
};

const hp_driver *open_device(const hp_open_request &request) {
  const char *entry = HP_DRIVER_OPEN_SYMBOL;
  if (request.struct_size < sizeof request) refuse(entry, "the request is of an older contract than this driver");
  if (request.device != 0)
    throw Failure{HP_NO_DEVICE, 0, entry, "there is one CPU device, 0, and no device " + std::to_string(request.device)};
  if (request.library && *request.library) refuse(entry, "the CPU has no vendor's library to open");
  hardpoint::driver::Options options(request.options);
  const Settings settings = Settings::from(options);
  options.finish();
  // Tables are valid to the end of the process by contract, and each has a budget and faults of its own: nobody frees or finds them.
  return &std::make_unique<CpuDevice>(settings).release()->table();
}

CpuDevice &device_of(const hp_driver *driver) { return *static_cast<CpuDevice *>(driver->context); }

}  // namespace
}  // namespace hp::driver

hp_status hp_driver_open(const hp_open_request *request, const hp_driver **driver, hp_error *error) {
  return hardpoint::driver::guarded(HP_DRIVER_OPEN_SYMBOL, error, [&] { *driver = hp::driver::open_device(*request); });
}

void hp_driver_fail_call(int64_t nth) { hardpoint::driver::calls_to_failure = nth; }

// See VirtualMemory::use_small_pages.
extern "C" HP_EXPORT hp_status hp_cpu_driver_use_small_pages(const hp_driver *driver, uint64_t address, size_t size) {
  hp_error error{};
  return hardpoint::driver::guarded("hp_cpu_driver_use_small_pages", &error,
                                    [&] { hp::driver::device_of(driver).memory().use_small_pages(address, size); });
}

// For tests. Makes the nth call of an entry from here on (1 = the next), and the `times` - 1 calls after it, fail; a negative `times` means all
// after it, 0 none. Calls of `create` end with HP_OUT_OF_MEMORY, others with HP_FAILED; nothing was done. Returns HP_OK or HP_INVALID.
extern "C" HP_EXPORT hp_status hp_cpu_driver_fail(const hp_driver *driver, const char *entry, int64_t nth, int64_t times) {
  hp_error error{};
  return hardpoint::driver::guarded("hp_cpu_driver_fail", &error, [&] {
    if (!hp::driver::device_of(driver).faults().set(entry, nth, times)) hardpoint::driver::refuse("hp_cpu_driver_fail", entry);
  });
}

// For tests. Returns how often an entry of this table was called, failed calls included; -1 when there is no such entry.
extern "C" HP_EXPORT int64_t hp_cpu_driver_calls(const hp_driver *driver, const char *entry) {
  int64_t calls = -1;
  hp_error error{};
  hardpoint::driver::guarded("hp_cpu_driver_calls", &error, [&] { calls = hp::driver::device_of(driver).faults().calls(entry); });
  return calls;
}
