// NVIDIA devices: the memory driver (hardpoint/driver.h) over the virtual memory of the CUDA driver API.
//
// Rules of the calls, from the comments of cuda.h: a new mapping has no access until cuMemSetAccess; cuMemUnmap takes whole mappings and waits for nothing;
// memory returns when neither a handle nor a mapping holds it; granularity depends on the properties of the allocation.
#include "api.hpp"
#include "hardpoint/torch_allocator.h"

// Calls the vendor's function; a status other than success ends the entry.
#define CALL(function, ...) (driver::may_fail(#function), check(api_.function(__VA_ARGS__), #function))

namespace {

using namespace hardpoint::cuda;
using hardpoint::driver::Failure;
using hardpoint::driver::Undo;
namespace driver = hardpoint::driver;

constexpr int32_t kDlpackDevice = 2;  // kDLCUDA
constexpr int32_t kCopyThreads = 2;   // one for each direction's copy engine

hp_status status_of(Result result) {
  switch (result) {
    case out_of_memory:
      return HP_OUT_OF_MEMORY;
    case invalid_value:
    case invalid_handle:
      return HP_INVALID;
    case not_permitted:
    case not_supported:
      return HP_UNSUPPORTED;
    case stub_library:
      return HP_NO_LIBRARY;
    case no_device:
    case invalid_device:
      return HP_NO_DEVICE;
    default:  // sticky errors of earlier work (illegal address, launch failure, ...) among them
      return HP_FAILED;
  }
}

class Device {
 public:
  using Api = hardpoint::cuda::Api;
  static constexpr const char *library_variable = "HARDPOINT_CUDA_DRIVER";
  static constexpr uint32_t flags = 0;
  static std::vector<const char *> sonames() { return {"libcuda.so.1"}; }

  struct Settings {
    int handle_type = handle_none;

    // shareable=none|posix|fabric: the kind of handle by which other processes can be given the memory.
    static Settings from(driver::Options &options) {
      Settings settings;
      std::string value;
      if (!options.take("shareable", &value) || value == "none") return settings;
      if (value != "posix" && value != "fabric") driver::refuse("hp_driver_open", "option shareable is '" + value + "', not none, posix or fabric");
      settings.handle_type = value == "posix" ? handle_posix : handle_fabric;
      return settings;
    }
    bool operator==(const Settings &other) const { return handle_type == other.handle_type; }
  };

  Device(const Api &api, const std::string &library, int32_t index, const Settings &settings) : api_(api) {
    CALL(cuInit, 0);
    int count = 0;
    CALL(cuDeviceGetCount, &count);
    driver::check_device_index(index, count, library);
    CALL(cuDeviceGet, &device_, index);
    if (!has(attribute_virtual_memory)) unsupported("the device has no virtual memory management");
    if (settings.handle_type == handle_posix && !has(attribute_posix_handles)) unsupported("the device has no POSIX handles");
    if (settings.handle_type == handle_fabric && !has(attribute_fabric_handles)) unsupported("the device has no fabric handles");
    properties_.type = allocation_pinned;
    properties_.requested_handle_types = settings.handle_type;
    properties_.location = {location_device, device_};
    properties_.alloc_flags.gpu_direct_rdma_capable = has(attribute_rdma);
  }

  void open() {
    opened_.open([&] {
      Context context = nullptr;
      CALL(cuDevicePrimaryCtxRetain, &context, device_);
      Undo release([&] { api_.cuDevicePrimaryCtxRelease(device_); });
      const Current current(*this, context);
      const hp_geometry geometry = ask_geometry();
      if (properties_.requested_handle_types != handle_none) probe_shareable(geometry.granularity);
      context_ = context;
      geometry_ = geometry;
      release.dismiss();
    });
  }

  void close() {
    opened_.close([&] {
      const Result result = api_.cuDevicePrimaryCtxRelease(device_);
      // While the process exits, the library may already have given everything back.
      if (result != deinitialized) check(result, "cuDevicePrimaryCtxRelease");
    });
  }

  void geometry(hp_geometry *geometry) {
    opened_.require("geometry");
    *geometry = geometry_;
  }

  void memory_info(uint64_t *free_bytes, uint64_t *total_bytes) {
    const Current current = use("memory_info");
    size_t free = 0, total = 0;
    CALL(cuMemGetInfo, &free, &total);
    *free_bytes = free;
    *total_bytes = total;
  }

  void device_count(int32_t *count) {
    int found = 0;
    CALL(cuDeviceGetCount, &found);
    *count = found;
  }

  void device_name(char *name, size_t size) {
    char found[256] = "";
    CALL(cuDeviceGetName, found, sizeof found, device_);
    driver::write_text(name, size, found);
  }

  void driver_version(char *version, size_t size) {
    int number = 0;
    CALL(cuDriverGetVersion, &number);
    driver::write_text(version, size, std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10));
  }

  void quirks(uint64_t *bits) { *bits = has(attribute_integrated) ? HP_QUIRK_UNIFIED_MEMORY : 0; }

  void reserve(size_t size, uint64_t hint, uint64_t *address) {
    const Current current = use("reserve");
    driver::check_size("reserve", size, geometry_.granularity, geometry_.max_reservation);
    Address reserved = 0;
    CALL(cuMemAddressReserve, &reserved, size, geometry_.granularity, hint, 0);
    *address = reserved;
  }

  void release_address(uint64_t address, size_t size) {
    const Current current = use("release_address");
    CALL(cuMemAddressFree, address, size);
  }

  void create(size_t size, uint64_t *handle) {
    const Current current = use("create");
    driver::check_size("create", size, geometry_.granularity, geometry_.max_chunk);
    Allocation created = 0;
    CALL(cuMemCreate, &created, size, &properties_, 0);
    *handle = created;
  }

  void release(uint64_t handle, size_t) {
    const Current current = use("release");
    undo_half_mapping(handle);
    CALL(cuMemRelease, handle);
  }

  void map(uint64_t address, size_t size, uint64_t handle) {
    const Current current = use("map");
    driver::check_range("map", address, size, geometry_);
    undo_half_mapping(handle);
    CALL(cuMemMap, address, size, 0, handle, 0);
    Undo unmap([&] {
      if (api_.cuMemUnmap(address, size) != success) half_mapped_.add(handle, address, size);
    });
    const MemAccessDesc access{properties_.location, access_read_write};
    CALL(cuMemSetAccess, address, size, &access, 1);
    unmap.dismiss();
  }

  void unmap(uint64_t address, size_t size) {
    const Current current = use("unmap");
    driver::check_range("unmap", address, size, geometry_);
    CALL(cuMemUnmap, address, size);
  }

  void stream_create(uint64_t *stream) {
    const Current current = use("stream_create");
    Stream created = nullptr;
    CALL(cuStreamCreate, &created, stream_non_blocking);
    *stream = reinterpret_cast<uintptr_t>(created);
  }

  void stream_destroy(uint64_t stream) {
    const Current current = use("stream_destroy");
    CALL(cuStreamDestroy, stream_of(stream));
  }

  void copy_to_host(void *host, uint64_t address, size_t size, uint64_t stream) {
    const Current current = use("copy_to_host");
    CALL(cuMemcpyDtoHAsync, host, address, size, stream_of(stream));
  }

  void copy_to_device(uint64_t address, const void *host, size_t size, uint64_t stream) {
    const Current current = use("copy_to_device");
    CALL(cuMemcpyHtoDAsync, address, host, size, stream_of(stream));
  }

  void fill(uint64_t address, uint8_t value, size_t size, uint64_t stream) {
    const Current current = use("fill");
    CALL(cuMemsetD8Async, address, value, size, stream_of(stream));
  }

  void stream_synchronize(uint64_t stream) {
    const Current current = use("stream_synchronize");
    CALL(cuStreamSynchronize, stream_of(stream));
  }

  void device_synchronize() {
    const Current current = use("device_synchronize");
    CALL(cuCtxSynchronize);
  }

  bool can_register_host() const { return true; }

  // Portable: pinned for all contexts, because the core shares one host arena between devices. Mapped:
  // kernels reach KV blocks on the host.
  void host_register(void *host, size_t size) {
    const Current current = use("host_register");
    CALL(cuMemHostRegister, host, size, host_register_portable | host_register_mapped);
  }

  void host_unregister(void *host, size_t) {
    const Current current = use("host_unregister");
    CALL(cuMemHostUnregister, host);
  }

 private:
  // Makes a context current for the time of an entry, where it is not already.
  class Current {
   public:
    Current(const Device &device, Context wanted) : api_(device.api_) {
      device.check(api_.cuCtxGetCurrent(&previous_), "cuCtxGetCurrent");
      if (previous_ == wanted) return;
      device.check(api_.cuCtxSetCurrent(wanted), "cuCtxSetCurrent");
      changed_ = true;
    }
    Current(const Current &) = delete;
    Current &operator=(const Current &) = delete;
    // Fails only when the caller's own context was destroyed meanwhile; the entry's work is done and stands.
    ~Current() {
      if (changed_) api_.cuCtxSetCurrent(previous_);
    }

   private:
    const Api &api_;
    Context previous_ = nullptr;
    bool changed_ = false;
  };

  void undo_half_mapping(uint64_t handle) {
    half_mapped_.undo(handle, [&](uint64_t address, size_t size) { CALL(cuMemUnmap, address, size); });
  }

  Current use(const char *entry) const {
    opened_.require(entry);
    return Current(*this, context_);
  }

  void check(Result result, const char *call) const {
    if (result == success) return;
    const char *name = nullptr, *message = nullptr;
    api_.cuGetErrorName(result, &name);
    api_.cuGetErrorString(result, &message);
    throw Failure{status_of(result), result, call, driver::error_text(name, message)};
  }

  [[noreturn]] static void unsupported(const char *text) { throw Failure{HP_UNSUPPORTED, 0, "cuDeviceGetAttribute", text}; }

  static Stream stream_of(uint64_t stream) { return reinterpret_cast<Stream>(static_cast<uintptr_t>(stream)); }

  bool has(int attribute) const {
    int value = 0;
    CALL(cuDeviceGetAttribute, &value, attribute, device_);
    return value != 0;
  }

  hp_geometry ask_geometry() const {
    size_t minimum = 0, recommended = 0;
    CALL(cuMemGetAllocationGranularity, &minimum, &properties_, granularity_minimum);
    CALL(cuMemGetAllocationGranularity, &recommended, &properties_, granularity_recommended);
    hp_geometry geometry = driver::geometry_of("cuMemGetAllocationGranularity", minimum, recommended);
    geometry.copy_threads = kCopyThreads;
    geometry.dlpack_device = kDlpackDevice;
    return geometry;
  }

  // The device's attribute says what its kind can do; only a real allocation says what this system permits (fabric needs IMEX channels).
  void probe_shareable(size_t granularity) const {
    Allocation created = 0;
    try {
      CALL(cuMemCreate, &created, granularity, &properties_, 0);
    } catch (Failure &failure) {
      if (failure.status != HP_OUT_OF_MEMORY) failure.status = HP_UNSUPPORTED;
      failure.text = "no shareable memory on this system: " + failure.text;
      throw;
    }
    CALL(cuMemRelease, created);
  }

  const Api &api_;
  DeviceHandle device_ = 0;
  MemAllocationProp properties_{};
  driver::OpenCount opened_;
  driver::HalfMapped half_mapped_;
  Context context_ = nullptr;  // set by the first open, before any entry may use them
  hp_geometry geometry_{};
};

}  // namespace

extern "C" {

hp_status hp_driver_open(const hp_open_request *request, const hp_driver **driver, hp_error *error) {
  return driver::open_driver<Device>(request, driver, error);
}

void hp_driver_fail_call(int64_t nth) { driver::calls_to_failure = nth; }

HP_TORCH_ALLOCATOR(cuda)
}
