// The CPU as a device: the table of hardpoint/driver.h over anonymous memory of this process.
#include <hardpoint/driver.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <set>

#include "failure.hpp"
#include "faults.hpp"
#include "host.hpp"
#include "options.hpp"
#include "streaming.hpp"
#include "virtual_memory.hpp"

namespace hp::driver {
namespace {

constexpr int32_t kDlpackCpu = 1;
constexpr int32_t kMostCopyThreads = 8;                // more do not add to the bandwidth of one socket's memory
constexpr size_t kStreamingFrom = size_t{1} << 20;     // smaller copies are likely to be read again from the cache

const Streaming& choose_streaming(const std::string& name) {
  if (name.empty()) return best_streaming();
  const Streaming* found = find_streaming(name);
  if (!found) refuse("hp_driver_open", "option streaming: this build or processor has no '" + name + "'");
  return *found;
}

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
  void check(const char* call, uint64_t stream) const {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (alive_.count(stream) == 0) refuse_unknown(call, stream);
  }

 private:
  [[noreturn]] static void refuse_unknown(const char* call, uint64_t stream) {
    refuse(call, "stream " + std::to_string(stream) + " is unknown");
  }
  mutable std::mutex mutex_;  // all below
  std::set<uint64_t> alive_;
  uint64_t next_ = 1;
};

struct Driver {
  explicit Driver(const Options& options)
      : memory(options.budget, options.keep_address), streaming(choose_streaming(options.streaming)) {
    for (const Options::Fault& fault : options.faults)
      if (!faults.set(fault.entry, fault.nth, fault.times))
        refuse("hp_driver_open", "option fail: there is no call " + std::to_string(fault.nth) + " of '" + fault.entry + "'");
  }

  hp_driver table{};
  VirtualMemory memory;
  const Streaming& streaming;
  Streams streams;
  Faults faults;
  std::atomic<int64_t> users{0};
};

void set_text(char* buffer, size_t size, const std::string& text) {
  const size_t length = std::min(size - 1, text.size());
  std::memcpy(buffer, text.data(), length);
  buffer[length] = '\0';
}

hp_status report(hp_error* error, const Failure& failure) {
  error->code = failure.code;
  set_text(error->call, sizeof error->call, failure.call);
  set_text(error->text, sizeof error->text, failure.text);
  return failure.status;
}

// No exception leaves the library.
template <typename Work>
hp_status guarded(const char* call, hp_error* error, Work work) noexcept {
  try {
    work();
    return HP_OK;
  } catch (const Failure& failure) {
    return report(error, failure);
  } catch (const std::bad_alloc&) {
    return report(error, {HP_OUT_OF_MEMORY, 0, call, "no memory for the driver's own books"});
  } catch (const std::exception& exception) {
    return report(error, {HP_FAILED, 0, call, exception.what()});
  }
}

template <typename Work>
hp_status enter(void* context, const char* entry, hp_error* error, Work work) noexcept {
  auto& driver = *static_cast<Driver*>(context);
  return guarded(entry, error, [&] {
    driver.faults.enter(entry);
    work(driver);
  });
}

hp_status open(void* context, hp_error* error) {
  return enter(context, "open", error, [](Driver& driver) { ++driver.users; });
}

hp_status close(void* context, hp_error* error) {
  return enter(context, "close", error, [](Driver& driver) {
    int64_t users = driver.users.load();
    do {
      if (users == 0) refuse("close", "it was called more often than open");
    } while (!driver.users.compare_exchange_weak(users, users - 1));
  });
}

void check_open(const Driver& driver, const char* call) {
  if (driver.users.load() == 0) refuse(call, "the driver is not open");
}

hp_status geometry(void* context, hp_geometry* geometry, hp_error* error) {
  return enter(context, "geometry", error, [&](Driver&) {
    *geometry = hp_geometry{};
    geometry->granularity = VirtualMemory::kGranularity;
    geometry->recommended = VirtualMemory::kGranularity;
    geometry->max_chunk = VirtualMemory::kMaxChunk;
    geometry->copy_threads = std::min<int32_t>(usable_cores(), kMostCopyThreads);
    geometry->dlpack_device = kDlpackCpu;
  });
}

hp_status memory_info(void* context, uint64_t* free_bytes, uint64_t* total_bytes, hp_error* error) {
  return enter(context, "memory_info", error, [&](Driver& driver) {
    *free_bytes = driver.memory.free_bytes();
    *total_bytes = driver.memory.total_bytes();
  });
}

hp_status device_count(void* context, int32_t* count, hp_error* error) {
  return enter(context, "device_count", error, [&](Driver&) { *count = 1; });
}

hp_status device_name(void* context, char* name, size_t size, hp_error* error) {
  return enter(context, "device_name", error, [&](Driver&) {
    if (size == 0) refuse("device_name", "the buffer has no room");
    set_text(name, size, processor_name());
  });
}

hp_status driver_version(void* context, char* version, size_t size, hp_error* error) {
  return enter(context, "driver_version", error, [&](Driver&) {
    if (size == 0) refuse("driver_version", "the buffer has no room");
    set_text(version, size, kernel_version());
  });
}

hp_status reserve(void* context, size_t size, uint64_t hint, uint64_t* address, hp_error* error) {
  return enter(context, "reserve", error, [&](Driver& driver) {
    check_open(driver, "reserve");
    *address = driver.memory.reserve(size, hint);
  });
}

hp_status release_address(void* context, uint64_t address, size_t size, hp_error* error) {
  return enter(context, "release_address", error, [&](Driver& driver) { driver.memory.release_address(address, size); });
}

hp_status create(void* context, size_t size, uint64_t* handle, hp_error* error) {
  return enter(context, "create", error, [&](Driver& driver) {
    check_open(driver, "create");
    *handle = driver.memory.create(size);
  });
}

hp_status release(void* context, uint64_t handle, size_t size, hp_error* error) {
  return enter(context, "release", error, [&](Driver& driver) { driver.memory.release(handle, size); });
}

hp_status map(void* context, uint64_t address, size_t size, uint64_t handle, hp_error* error) {
  return enter(context, "map", error, [&](Driver& driver) { driver.memory.map(address, size, handle); });
}

hp_status unmap(void* context, uint64_t address, size_t size, hp_error* error) {
  return enter(context, "unmap", error, [&](Driver& driver) { driver.memory.unmap(address, size); });
}

hp_status stream_create(void* context, uint64_t* stream, hp_error* error) {
  return enter(context, "stream_create", error, [&](Driver& driver) {
    check_open(driver, "stream_create");
    *stream = driver.streams.create();
  });
}

hp_status stream_destroy(void* context, uint64_t stream, hp_error* error) {
  return enter(context, "stream_destroy", error, [&](Driver& driver) { driver.streams.destroy(stream); });
}

unsigned char* bytes_at(uint64_t address) { return reinterpret_cast<unsigned char*>(static_cast<uintptr_t>(address)); }

void copy(const Driver& driver, unsigned char* to, const unsigned char* from, size_t size) {
  if (size < kStreamingFrom)
    std::memcpy(to, from, size);
  else
    driver.streaming.copy(to, from, size);
}

hp_status copy_to_host(void* context, void* host, uint64_t address, size_t size, uint64_t stream, hp_error* error) {
  return enter(context, "copy_to_host", error, [&](Driver& driver) {
    driver.streams.check("copy_to_host", stream);
    driver.memory.check_mapped("copy_to_host", address, size);
    copy(driver, static_cast<unsigned char*>(host), bytes_at(address), size);
  });
}

hp_status copy_to_device(void* context, uint64_t address, const void* host, size_t size, uint64_t stream, hp_error* error) {
  return enter(context, "copy_to_device", error, [&](Driver& driver) {
    driver.streams.check("copy_to_device", stream);
    driver.memory.check_mapped("copy_to_device", address, size);
    copy(driver, bytes_at(address), static_cast<const unsigned char*>(host), size);
  });
}

hp_status fill(void* context, uint64_t address, uint8_t value, size_t size, uint64_t stream, hp_error* error) {
  return enter(context, "fill", error, [&](Driver& driver) {
    driver.streams.check("fill", stream);
    driver.memory.check_mapped("fill", address, size);
    if (size < kStreamingFrom)
      std::memset(bytes_at(address), value, size);
    else
      driver.streaming.fill(bytes_at(address), value, size);
  });
}

hp_status stream_synchronize(void* context, uint64_t stream, hp_error* error) {
  return enter(context, "stream_synchronize", error, [&](Driver& driver) { driver.streams.check("stream_synchronize", stream); });
}

hp_status device_synchronize(void* context, hp_error* error) {
  return enter(context, "device_synchronize", error, [](Driver&) {});
}

void fill_table(Driver& driver) {
  hp_driver& table = driver.table;
  table.struct_size = sizeof table;
  table.abi = HP_DRIVER_ABI;
  table.flags = HP_HOST_ACCESSIBLE | HP_FRESH_ZERO | HP_COPIES_BLOCK;
  table.context = &driver;
  table.open = open;
  table.close = close;
  table.geometry = geometry;
  table.memory_info = memory_info;
  table.device_count = device_count;
  table.device_name = device_name;
  table.driver_version = driver_version;
  table.reserve = reserve;
  table.release_address = release_address;
  table.create = create;
  table.release = release;
  table.map = map;
  table.unmap = unmap;
  table.stream_create = stream_create;
  table.stream_destroy = stream_destroy;
  table.copy_to_host = copy_to_host;
  table.copy_to_device = copy_to_device;
  table.fill = fill;
  table.stream_synchronize = stream_synchronize;
  table.device_synchronize = device_synchronize;
}

const hp_driver* open_driver(const hp_open_request& request) {
  const char* call = HP_DRIVER_OPEN_SYMBOL;
  if (request.struct_size < sizeof(hp_open_request) || request.abi != HP_DRIVER_ABI)
    refuse(call, "the core is built for driver ABI " + std::to_string(request.abi) + ", this driver for " +
                     std::to_string(HP_DRIVER_ABI));
  if (request.device != 0)
    throw Failure{HP_NO_DEVICE, 0, call, "there is one CPU device, 0, and no device " + std::to_string(request.device)};
  if (request.library && *request.library) refuse(call, "the CPU has no vendor's library to open");
  auto driver = std::make_unique<Driver>(parse_options(request.options));
  fill_table(*driver);
  // The contract keeps tables valid to the end of the process, hence nobody frees them.
  return &driver.release()->table;
}

Driver& driver_of(const hp_driver* table) { return *static_cast<Driver*>(table->context); }

}  // namespace
}  // namespace hp::driver

hp_status hp_driver_open(const hp_open_request* request, const hp_driver** driver, hp_error* error) {
  return hp::driver::guarded(HP_DRIVER_OPEN_SYMBOL, error, [&] { *driver = hp::driver::open_driver(*request); });
}

// For tests. Makes the nth call of an entry from here on (1 = the next), and the `times` - 1 calls after it, fail; a negative `times` means all
// after it, 0 none. Calls of `create` end with HP_OUT_OF_MEMORY, others with HP_FAILED; nothing was done. Returns HP_OK or HP_INVALID.
extern "C" HP_EXPORT hp_status hp_cpu_driver_fail(const hp_driver* driver, const char* entry, int64_t nth, int64_t times) {
  hp_error error{};
  return hp::driver::guarded("hp_cpu_driver_fail", &error, [&] {
    if (!hp::driver::driver_of(driver).faults.set(entry, nth, times)) hp::driver::refuse("hp_cpu_driver_fail", entry);
  });
}

// For tests. Returns how often an entry of this table was called, failed calls included; -1 when there is no such entry.
extern "C" HP_EXPORT int64_t hp_cpu_driver_calls(const hp_driver* driver, const char* entry) {
  int64_t calls = -1;
  hp_error error{};
  hp::driver::guarded("hp_cpu_driver_calls", &error, [&] { calls = hp::driver::driver_of(driver).faults.calls(entry); });
  return calls;
}
