// AMD devices: the memory driver (hardpoint/driver.h) over the virtual memory of the HIP runtime.
//
// Rules and known deviations, from ROCm's sources and field reports: large single allocations fail on ROCm 6, so memory is created in chunks
// (`max_chunk`); each handle is unmapped on its own and before it is released (ROCR-Runtime issues 257, 285); reserving with an explicit alignment may fail
// where 0 works (vLLM pull request 43022); hipMemMap checks almost nothing; hipMemSetAccess of ROCm 7.0 to 7.2 adds up the reservation's first mappings
// (rocm-systems 2516), which the core's chunks of one size satisfy; hipMemUnmap waits for all streams; memory may stay until its address is released
// (`unmap` and `quirks`), and pages may come back with old content (`quirks`).
#include <sys/mman.h>

#include <mutex>
#include <optional>

#include "api.hpp"
#include "hardpoint/driver_quirks.hpp"
#include "hardpoint/torch_allocator.h"

// Calls the vendor's function; a status other than success ends the entry.
#define CALL(function, ...) (driver::may_fail(#function), check(api_.function(__VA_ARGS__), #function))

namespace {

using namespace hardpoint::rocm;
using hardpoint::driver::Failure;
using hardpoint::driver::pointer;
using hardpoint::driver::Undo;
namespace driver = hardpoint::driver;

constexpr int32_t kDlpackDevice = 10;  // kDLROCM
constexpr int32_t kCopyThreads = 2;    // one for each direction's copy engine
constexpr size_t kSmallPage = 4096, kLargePage = size_t{2} << 20;
constexpr uint64_t kDefaultChunkMb = 256, kLargestChunkMb = 1 << 20;

hp_status status_of(Result result) {
  switch (result) {
    case out_of_memory:
      return HP_OUT_OF_MEMORY;
    case invalid_value:
    case invalid_handle:
      return HP_INVALID;
    case not_supported:
      return HP_UNSUPPORTED;
    case no_device:
    case invalid_device:
      return HP_NO_DEVICE;
    default:  // sticky errors of earlier work (illegal address, launch failure, ...) among them
      return HP_FAILED;
  }
}

class Device {
 public:
  using Api = hardpoint::rocm::Api;
  static constexpr const char *library_variable = "HARDPOINT_ROCM_DRIVER";
  static constexpr uint32_t flags = HP_UNMAP_WAITS;
  static std::vector<const char *> sonames() { return {"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"}; }

  struct Settings {
    uint64_t chunk_mb = kDefaultChunkMb;

    // chunk_mb=N: largest single allocation in MiB; else the environment says it, in our variable or in vLLM's.
    static Settings from(driver::Options &options) {
      std::string value;
      if (options.take("chunk_mb", &value)) return {driver::parse_number("option chunk_mb", value, 1, kLargestChunkMb)};
      for (const char *variable : {"HARDPOINT_ROCM_CHUNK_MB", "VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE"})
        if (const char *text = std::getenv(variable); text != nullptr && *text != '\0')
          return {driver::parse_number(variable, text, 1, kLargestChunkMb)};
      return {kDefaultChunkMb};
    }
    bool operator==(const Settings &other) const { return chunk_mb == other.chunk_mb; }
  };

  Device(const Api &api, const std::string &library, int32_t index, const Settings &settings) : api_(api), settings_(settings), index_(index) {
    int count = 0;
    CALL(hipGetDeviceCount, &count);
    driver::check_device_index(index, count, library);
    CALL(hipDeviceGet, &device_, index);
    if (!has(attribute_virtual_memory))
      throw Failure{HP_UNSUPPORTED, 0, "hipDeviceGetAttribute",
                    "the device has no virtual memory management (ROCm 7.0 says so of some MI300X: use 7.1 or later)"};
    properties_.type = allocation_pinned;
    properties_.location = {location_device, index};
  }

  void open() {
    opened_.open([&] {
      const Current current(*this);
      geometry_ = ask_geometry();
    });
  }

  void close() {
    opened_.close([&] {
      const std::lock_guard<std::mutex> lock(quirks_mutex_);
      quirks_.reset();
    });
  }

  void geometry(hp_geometry *geometry) {
    opened_.require("geometry");
    *geometry = geometry_;
  }

  void memory_info(uint64_t *free_bytes, uint64_t *total_bytes) {
    const Current current = use("memory_info");
    size_t free = 0, total = 0;
    CALL(hipMemGetInfo, &free, &total);
    *free_bytes = free;
    *total_bytes = total;
  }

  void device_count(int32_t *count) {
    int found = 0;
    CALL(hipGetDeviceCount, &found);
    *count = found;
  }

  void device_name(char *name, size_t size) {
    char found[256] = "";
    CALL(hipDeviceGetName, found, sizeof found, device_);
    driver::write_text(name, size, found);
  }

  void driver_version(char *version, size_t size) {
    int number = 0;
    CALL(hipDriverGetVersion, &number);
    driver::write_text(version, size, std::to_string(number / 10000000) + "." + std::to_string(number % 10000000 / 100000));
  }

  void quirks(uint64_t *bits) {
    opened_.require("quirks");
    const std::lock_guard<std::mutex> lock(quirks_mutex_);
    if (!quirks_) {
      const uint64_t unified = has(attribute_integrated) ? HP_QUIRK_UNIFIED_MEMORY : 0;
      quirks_ = unified | driver::QuirkProbe<Device>(*this).run();
    }
    *bits = *quirks_;
  }

  void reserve(size_t size, uint64_t hint, uint64_t *address) {
    const Current current = use("reserve");
    driver::check_size("reserve", size, geometry_.granularity, geometry_.max_reservation);
    void *reserved = nullptr;
    const size_t alignment = size < geometry_.recommended ? geometry_.granularity : geometry_.recommended;
    if (api_.hipMemAddressReserve(&reserved, size, alignment, pointer(hint), 0) != success) {
      forget_last_error();
      CALL(hipMemAddressReserve, &reserved, size, 0, pointer(hint), 0);
    }
    const uint64_t found = reinterpret_cast<uintptr_t>(reserved);
    if (found % geometry_.granularity != 0) {
      CALL(hipMemAddressFree, reserved, size);
      throw Failure{HP_FAILED, 0, "hipMemAddressReserve", "the range reserved, at " + std::to_string(found) + ", is not aligned to the granularity"};
    }
    *address = found;
  }

  void release_address(uint64_t address, size_t size) {
    const Current current = use("release_address");
    CALL(hipMemAddressFree, pointer(address), size);
  }

  void create(size_t size, uint64_t *handle) {
    const Current current = use("create");
    driver::check_size("create", size, geometry_.granularity, geometry_.max_chunk);
    Allocation created = nullptr;
    CALL(hipMemCreate, &created, size, &properties_, 0);
    *handle = reinterpret_cast<uintptr_t>(created);
  }

  void release(uint64_t handle, size_t) {
    const Current current = use("release");
    undo_half_mapping(handle);
    CALL(hipMemRelease, allocation(handle));
  }

  void map(uint64_t address, size_t size, uint64_t handle) {
    const Current current = use("map");
    driver::check_range("map", address, size, geometry_);
    if (handle == 0) driver::refuse("map", "handle 0 is none that create returned");
    undo_half_mapping(handle);
    CALL(hipMemMap, pointer(address), size, 0, allocation(handle), 0);
    Undo unmap([&] {
      if (unmap_and_let_go(address, size) == success) return;
      forget_last_error();
      half_mapped_.add(handle, address, size);
    });
    const MemAccessDesc access{properties_.location, access_read_write};
    CALL(hipMemSetAccess, pointer(address), size, &access, 1);
    unmap.dismiss();
  }

  void unmap(uint64_t address, size_t size) {
    const Current current = use("unmap");
    driver::check_range("unmap", address, size, geometry_);
    check(unmap_and_let_go(address, size), "hipMemUnmap");
  }

  void stream_create(uint64_t *stream) {
    const Current current = use("stream_create");
    Stream created = nullptr;
    CALL(hipStreamCreateWithFlags, &created, stream_non_blocking);
    *stream = reinterpret_cast<uintptr_t>(created);
  }

  void stream_destroy(uint64_t stream) {
    const Current current = use("stream_destroy");
    CALL(hipStreamDestroy, stream_of(stream));
  }

  void copy_to_host(void *host, uint64_t address, size_t size, uint64_t stream) {
    const Current current = use("copy_to_host");
    CALL(hipMemcpyAsync, host, pointer(address), size, copy_device_to_host, stream_of(stream));
  }

  void copy_to_device(uint64_t address, const void *host, size_t size, uint64_t stream) {
    const Current current = use("copy_to_device");
    CALL(hipMemcpyAsync, pointer(address), host, size, copy_host_to_device, stream_of(stream));
  }

  void fill(uint64_t address, uint8_t value, size_t size, uint64_t stream) {
    const Current current = use("fill");
    CALL(hipMemsetAsync, pointer(address), value, size, stream_of(stream));
  }

  void stream_synchronize(uint64_t stream) {
    const Current current = use("stream_synchronize");
    CALL(hipStreamSynchronize, stream_of(stream));
  }

  void device_synchronize() {
    const Current current = use("device_synchronize");
    CALL(hipDeviceSynchronize);
  }

  bool can_register_host() const { return true; }

  // Portable: pinned for all devices, because the core shares one host arena between them. Mapped:
  // kernels reach KV blocks on the host.
  void host_register(void *host, size_t size) {
    const Current current = use("host_register");
    CALL(hipHostRegister, host, size, host_register_portable | host_register_mapped);
  }

  void host_unregister(void *host, size_t) {
    const Current current = use("host_unregister");
    CALL(hipHostUnregister, host);
  }

 private:
  // Makes the device current for the time of an entry, where it is not already.
  class Current {
   public:
    explicit Current(const Device &device) : device_(device) {
      device.check(device.api_.hipGetDevice(&previous_), "hipGetDevice");
      if (previous_ == device.index_) return;
      device.check(device.api_.hipSetDevice(device.index_), "hipSetDevice");
      changed_ = true;
    }
    Current(const Current &) = delete;
    Current &operator=(const Current &) = delete;
    // Fails only when the runtime itself is going away; the entry's work is done and stands.
    ~Current() {
      if (changed_ && device_.api_.hipSetDevice(previous_) != success) device_.forget_last_error();
    }

   private:
    const Device &device_;
    int previous_ = 0;
    bool changed_ = false;
  };

  void undo_half_mapping(uint64_t handle) {
    half_mapped_.undo(handle, [&](uint64_t address, size_t size) { check(unmap_and_let_go(address, size), "hipMemUnmap"); });
  }

  // The process's address space still shows the memory's dma-buf where it was mapped, without access, and that holds the memory. Pages of nothing
  // take its place: the range stays reserved, so that no other thread can get it. Where the kernel refuses, or it does not help, the memory is
  // held until the address is released, which `quirks` finds.
  Result unmap_and_let_go(uint64_t address, size_t size) const {
    const Result result = api_.hipMemUnmap(pointer(address), size);
    if (result == success) mmap(pointer(address), size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    return result;
  }

  Current use(const char *entry) const {
    opened_.require(entry);
    return Current(*this);
  }

  void check(Result result, const char *call) const {
    if (result == success) return;
    forget_last_error();
    const char *name = api_.hipGetErrorName(result), *message = api_.hipGetErrorString(result);
    throw Failure{status_of(result), result, call, driver::error_text(name, message)};
  }

  // The runtime keeps each thread's last error, and frameworks take it for that of their own next call.
  void forget_last_error() const {
    if (api_.hipGetLastError != nullptr) api_.hipGetLastError();
  }

  static Allocation allocation(uint64_t handle) { return reinterpret_cast<Allocation>(static_cast<uintptr_t>(handle)); }
  static Stream stream_of(uint64_t stream) { return reinterpret_cast<Stream>(static_cast<uintptr_t>(stream)); }

  bool has(int attribute) const {
    int value = 0;
    CALL(hipDeviceGetAttribute, &value, attribute, index_);
    return value != 0;
  }

  hp_geometry ask_geometry() const {
    size_t minimum = 0, recommended = 0;
    CALL(hipMemGetAllocationGranularity, &minimum, &properties_, granularity_minimum);
    CALL(hipMemGetAllocationGranularity, &recommended, &properties_, granularity_recommended);
    // Of pages of 4 KiB, the minimum on an MI300X, the device's tables hold too many.
    if (minimum == kSmallPage) recommended = std::max(recommended, kLargePage);
    hp_geometry geometry = driver::geometry_of("hipMemGetAllocationGranularity", minimum, recommended);
    geometry.max_chunk = (settings_.chunk_mb << 20) / geometry.recommended * geometry.recommended;
    if (geometry.max_chunk == 0)
      driver::refuse("open", "a chunk of " + std::to_string(settings_.chunk_mb) + " MiB is smaller than the recommended granularity, " +
                                 std::to_string(geometry.recommended) + " bytes");
    geometry.copy_threads = kCopyThreads;
    geometry.dlpack_device = kDlpackDevice;
    return geometry;
  }

  const Api &api_;
  const Settings settings_;
  const int index_;
  DeviceHandle device_ = 0;
  MemAllocationProp properties_{};
  driver::OpenCount opened_;
  driver::HalfMapped half_mapped_;
  hp_geometry geometry_{};  // set by the first open, before any entry may use it
  std::mutex quirks_mutex_;  // guards quirks_
  std::optional<uint64_t> quirks_;
};

}  // namespace

extern "C" {

hp_status hp_driver_open(const hp_open_request *request, const hp_driver **driver, hp_error *error) {
  return driver::open_driver<Device>(request, driver, error);
}

void hp_driver_fail_call(int64_t nth) { driver::calls_to_failure = nth; }

HP_TORCH_ALLOCATOR(rocm)
}
