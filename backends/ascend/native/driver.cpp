// Ascend devices: the memory driver (hardpoint/driver.h) over the virtual memory of the CANN runtime.
//
// Rules of the calls, from the AscendCL reference: the alignment of a reservation is 0, its page flag matches the memory's attribute; a mapping has exactly the size of
// its physical memory; the owner device has access by mapping; copies to and from reserved addresses go by aclrtMemcpyAsync only. aclrtSetDevice makes the
// device's default context; any other context would be one that frameworks do not know.
#include <sys/utsname.h>

#include <cstdio>
#include <utility>

#include "api.hpp"
#include "hardpoint/torch_allocator.h"

// Calls the vendor's function; a status other than success ends the entry.
#define CALL(function, ...) (driver::may_fail(#function), check(api_.function(__VA_ARGS__), #function))

namespace {

using namespace hardpoint::ascend;
using hardpoint::driver::Failure;
using hardpoint::driver::pointer;
using hardpoint::driver::Undo;
namespace driver = hardpoint::driver;

constexpr int32_t kDlpackDevice = 12;                       // kDLExtDev
constexpr int32_t kCopyThreads = 2;                         // one for each direction
constexpr size_t kGranularity = size_t{2} << 20;            // of known devices; older runtimes cannot be asked
constexpr size_t kLargestReservation = size_t{128} << 30;  // of devices of the 910B class
constexpr size_t kLargestChunk = size_t{1} << 30;          // one huge piece may be refused where several are not

hp_status status_of(Result result) {
  switch (result) {
    case memory_allocation:
    case device_out_of_memory:
      return HP_OUT_OF_MEMORY;
    case invalid_param:
    case runtime_param_invalid:
    case address_unaligned:
    case invalid_handle:
      return HP_INVALID;
    case api_not_supported:
    case feature_not_supported:
      return HP_UNSUPPORTED;
    case no_device:
    case invalid_device:
      return HP_NO_DEVICE;
    default:  // errors of earlier work (507xxx), and bad_alloc, which speaks of the host's memory
      return HP_FAILED;
  }
}

// The runtime has texts for what went wrong and no names for its codes.
const char *name_of(Result result) {
  switch (result) {
#define NAME_OF_CODE(name, value, vendor_name) \
  case name:                                   \
    return #vendor_name;
    HARDPOINT_ASCEND_CODES(NAME_OF_CODE)
    default:
      return "error of the runtime";
  }
}

// "If the OS kernel version is 5.10 or earlier, using non-page-locked memory will cause exceptions": only what aclrtMallocHost returned may be
// registered there, and the core's memory is used as it is (AscendCL reference of CANN 9.1, aclrtHostRegisterV2). Copies of it are complete when
// aclrtMemcpyAsync returns (the same, aclrtMemcpyAsync), and slower.
bool kernel_registers_host() {
  utsname names;
  int major = 0, minor = 0;
  if (::uname(&names) != 0 || std::sscanf(names.release, "%d.%d", &major, &minor) != 2) return false;
  return std::make_pair(major, minor) > std::make_pair(5, 10);
}

// One line of a text that may have several.
std::string in_one_line(const char *text) {
  std::string line;
  for (; *text != '\0'; ++text) {
    const bool space = *text == ' ' || (*text >= '\t' && *text <= '\r');
    if (!space)
      line += *text;
    else if (!line.empty() && line.back() != ' ')
      line += ' ';
  }
  return line;
}

class Device {
 public:
  using Api = hardpoint::ascend::Api;
  static constexpr const char *library_variable = "HARDPOINT_ASCEND_DRIVER";
  static constexpr uint32_t flags = 0;
  static std::vector<const char *> sonames() { return {"libascendcl.so"}; }

  struct Settings {
    static Settings from(driver::Options &) { return {}; }
    bool operator==(const Settings &) const { return true; }
  };

  Device(const Api &api, const std::string &library, int32_t index, const Settings &) : api_(api), index_(index) {
    // Once in a process, by whoever comes first.
    if (const Result result = api_.aclInit(nullptr); result != repeat_initialize) check(result, "aclInit");
    uint32_t count = 0;
    CALL(aclrtGetDeviceCount, &count);
    driver::check_device_index(index, count, library);
    properties_.handle_type = handle_none;
    properties_.allocation_type = allocation_pinned;
    properties_.mem_attr = hbm_memory_huge;
    properties_.location = {static_cast<uint32_t>(index), location_device};
  }

  // aclrtSetDevice and aclrtResetDevice count references (AscendCL reference, CANN 8.0 and later); the last one takes the default context away.
  void open() {
    opened_.open([&] {
      const Context previous = current_context();
      CALL(aclrtSetDevice, index_);
      const Undo restore([&] { restore_context(previous); });
      Undo reset([&] { api_.aclrtResetDevice(index_); });
      Context context = nullptr;
      CALL(aclrtGetCurrentContext, &context);
      geometry_ = ask_geometry();
      context_ = context;
      reset.dismiss();
    });
  }

  void close() {
    opened_.close([&] { CALL(aclrtResetDevice, index_); });
  }

  void geometry(hp_geometry *geometry) {
    opened_.require("geometry");
    *geometry = geometry_;
  }

  void memory_info(uint64_t *free_bytes, uint64_t *total_bytes) {
    const Current current = use("memory_info");
    size_t free = 0, total = 0;
    CALL(aclrtGetMemInfo, hbm_memory, &free, &total);
    *free_bytes = free;
    *total_bytes = total;
  }

  void device_count(int32_t *count) {
    uint32_t found = 0;
    CALL(aclrtGetDeviceCount, &found);
    *count = static_cast<int32_t>(found);
  }

  void device_name(char *name, size_t size) {
    const char *chip = api_.aclrtGetSocName();
    driver::write_text(name, size, chip != nullptr ? chip : "unknown chip");
  }

  void driver_version(char *version, size_t size) {
    int32_t major = 0, minor = 0, patch = 0;
    CALL(aclrtGetVersion, &major, &minor, &patch);
    driver::write_text(version, size, std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(patch));
  }

  void quirks(uint64_t *bits) { *bits = 0; }

  // The hint is not passed on: reserving at a given address is experimental and works on some devices only.
  void reserve(size_t size, uint64_t, uint64_t *address) {
    const Current current = use("reserve");
    driver::check_size("reserve", size, geometry_.granularity, geometry_.max_reservation);
    void *reserved = nullptr;
    CALL(aclrtReserveMemAddress, &reserved, size, 0, nullptr, huge_pages);
    *address = reinterpret_cast<uintptr_t>(reserved);
  }

  void release_address(uint64_t address, size_t) {
    const Current current = use("release_address");
    CALL(aclrtReleaseMemAddress, pointer(address));
  }

  void create(size_t size, uint64_t *handle) {
    const Current current = use("create");
    driver::check_size("create", size, geometry_.granularity, geometry_.max_chunk);
    Allocation created = nullptr;
    CALL(aclrtMallocPhysical, &created, size, &properties_, 0);
    *handle = reinterpret_cast<uintptr_t>(created);
  }

  void release(uint64_t handle, size_t) {
    const Current current = use("release");
    undo_half_mapping(handle);
    CALL(aclrtFreePhysical, pointer(handle));
  }

  void map(uint64_t address, size_t size, uint64_t handle) {
    const Current current = use("map");
    driver::check_range("map", address, size, geometry_);
    undo_half_mapping(handle);
    CALL(aclrtMapMem, pointer(address), size, 0, pointer(handle), 0);
    Undo unmap([&] {
      if (api_.aclrtUnmapMem(pointer(address)) != success) half_mapped_.add(handle, address, size);
    });
    grant_access(address, size);
    unmap.dismiss();
  }

  void unmap(uint64_t address, size_t size) {
    const Current current = use("unmap");
    driver::check_range("unmap", address, size, geometry_);
    CALL(aclrtUnmapMem, pointer(address));
  }

  void stream_create(uint64_t *stream) {
    const Current current = use("stream_create");
    Stream created = nullptr;
    CALL(aclrtCreateStream, &created);
    *stream = reinterpret_cast<uintptr_t>(created);
  }

  void stream_destroy(uint64_t stream) {
    const Current current = use("stream_destroy");
    CALL(aclrtDestroyStream, pointer(stream));
  }

  void copy_to_host(void *host, uint64_t address, size_t size, uint64_t stream) {
    const Current current = use("copy_to_host");
    CALL(aclrtMemcpyAsync, host, size, pointer(address), size, copy_device_to_host, pointer(stream));
  }

  void copy_to_device(uint64_t address, const void *host, size_t size, uint64_t stream) {
    const Current current = use("copy_to_device");
    CALL(aclrtMemcpyAsync, pointer(address), size, host, size, copy_host_to_device, pointer(stream));
  }

  void fill(uint64_t address, uint8_t value, size_t size, uint64_t stream) {
    const Current current = use("fill");
    CALL(aclrtMemsetAsync, pointer(address), size, value, size, pointer(stream));
  }

  void stream_synchronize(uint64_t stream) {
    const Current current = use("stream_synchronize");
    CALL(aclrtSynchronizeStream, pointer(stream));
  }

  void device_synchronize() {
    const Current current = use("device_synchronize");
    CALL(aclrtSynchronizeDevice);
  }

  // CANN 8.5 and later have the call. aclrtHostRegister, which older ones have, maps memory for the device and does not lock its pages.
  bool can_register_host() const {
    return api_.aclrtHostRegisterV2 != nullptr && api_.aclrtHostUnregister != nullptr && kernel_registers_host();
  }

  void host_register(void *host, size_t size) {
    const Current current = use("host_register");
    CALL(aclrtHostRegisterV2, host, size, host_pinned);
  }

  void host_unregister(void *host, size_t) {
    const Current current = use("host_unregister");
    CALL(aclrtHostUnregister, host);
  }

 private:
  // Makes the device's default context current for the time of an entry, where it is not already.
  class Current {
   public:
    explicit Current(const Device &device) : device_(device), previous_(device.current_context()) {
      if (previous_ == device.context_) return;
      device.check(device.api_.aclrtSetCurrentContext(device.context_), "aclrtSetCurrentContext");
      changed_ = true;
    }
    Current(const Current &) = delete;
    Current &operator=(const Current &) = delete;
    ~Current() {
      if (changed_) device_.restore_context(previous_);
    }

   private:
    const Device &device_;
    const Context previous_;
    bool changed_ = false;
  };

  void undo_half_mapping(uint64_t handle) {
    half_mapped_.undo(handle, [&](uint64_t address, size_t) { CALL(aclrtUnmapMem, pointer(address)); });
  }

  Current use(const char *entry) const {
    opened_.require(entry);
    return Current(*this);
  }

  // The calling thread's context; null where it has none.
  Context current_context() const {
    Context context = nullptr;
    const Result result = api_.aclrtGetCurrentContext(&context);
    if (result == context_null) return nullptr;
    check(result, "aclrtGetCurrentContext");
    return context;
  }

  // The runtime has no call that takes a thread's context away, so a thread that had none keeps the device's default one. Fails only when the
  // caller's own context was destroyed meanwhile; the entry's work is done and stands.
  void restore_context(Context previous) const {
    if (previous != nullptr) api_.aclrtSetCurrentContext(previous);
  }

  void check(Result result, const char *call) const {
    if (result == success) return;
    const char *message = api_.aclGetRecentErrMsg != nullptr ? api_.aclGetRecentErrMsg() : nullptr;
    const std::string line = in_one_line(message != nullptr ? message : "");
    throw Failure{status_of(result), result, call, driver::error_text(name_of(result), line.empty() ? nullptr : line.c_str())};
  }

  hp_geometry ask_geometry() const {
    const size_t minimum = ask_granularity(granularity_minimum), recommended = ask_granularity(granularity_recommended);
    hp_geometry geometry = driver::geometry_of("aclrtMemGetAllocationGranularity", minimum, recommended);
    geometry.max_reservation = kLargestReservation;
    geometry.max_chunk = kLargestChunk / geometry.granularity * geometry.granularity;
    geometry.copy_threads = kCopyThreads;
    geometry.dlpack_device = kDlpackDevice;
    return geometry;
  }

  size_t ask_granularity(int option) const {
    if (api_.aclrtMemGetAllocationGranularity == nullptr) return kGranularity;
    size_t granularity = 0;
    PhysicalMemProp properties = properties_;
    CALL(aclrtMemGetAllocationGranularity, &properties, option, &granularity);
    return granularity;
  }

  // Optional for the owner device: some devices refuse it, older runtimes lack it, and the mapping is accessible without.
  void grant_access(uint64_t address, size_t size) const {
    if (api_.aclrtMemSetAccess == nullptr) return;
    MemAccessDesc access{};
    access.flags = access_read_write;
    access.location = properties_.location;
    const Result result = api_.aclrtMemSetAccess(pointer(address), size, &access, 1);
    if (result != feature_not_supported && result != api_not_supported) check(result, "aclrtMemSetAccess");
  }

  const Api &api_;
  const int32_t index_;
  PhysicalMemProp properties_{};
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

HP_TORCH_ALLOCATOR(ascend)
}
