// A memory driver that does nothing: what is left of a sleep over it is the engine's own work. Compiled by sleep.py.
#include <atomic>

#include "hardpoint/driver.h"

namespace {

constexpr size_t kGranularity = size_t{2} << 20;
std::atomic<uint64_t> next{uint64_t{1} << 40};

hp_status nothing(void *, hp_error *) { return HP_OK; }

}  // namespace

extern "C" hp_status hp_driver_open(const hp_open_request *, const hp_driver **driver, hp_error *) {
  static const hp_driver table = [] {
    hp_driver null{};
    null.struct_size = sizeof null;
    null.abi = HP_DRIVER_ABI;
    null.flags = HP_COPIES_BLOCK | HP_FRESH_ZERO;
    null.open = nothing;
    null.close = nothing;
    null.geometry = [](void *, hp_geometry *geometry, hp_error *) -> hp_status {
      *geometry = {kGranularity, kGranularity, 0, 0, 2, 1};
      return HP_OK;
    };
    null.memory_info = [](void *, uint64_t *free, uint64_t *total, hp_error *) -> hp_status {
      *free = *total = uint64_t{1} << 40;
      return HP_OK;
    };
    null.reserve = [](void *, size_t size, uint64_t, uint64_t *address, hp_error *) -> hp_status {
      *address = next.fetch_add(size);
      return HP_OK;
    };
    null.release_address = [](void *, uint64_t, size_t, hp_error *) -> hp_status { return HP_OK; };
    null.create = [](void *, size_t, uint64_t *handle, hp_error *) -> hp_status {
      *handle = 1;
      return HP_OK;
    };
    null.release = [](void *, uint64_t, size_t, hp_error *) -> hp_status { return HP_OK; };
    null.map = [](void *, uint64_t, size_t, uint64_t, hp_error *) -> hp_status { return HP_OK; };
    null.unmap = [](void *, uint64_t, size_t, hp_error *) -> hp_status { return HP_OK; };
    null.stream_create = [](void *, uint64_t *stream, hp_error *) -> hp_status {
      *stream = 1;
      return HP_OK;
    };
    null.stream_destroy = [](void *, uint64_t, hp_error *) -> hp_status { return HP_OK; };
    null.copy_to_host = [](void *, void *, uint64_t, size_t, uint64_t, hp_error *) -> hp_status { return HP_OK; };
    null.copy_to_device = [](void *, uint64_t, const void *, size_t, uint64_t, hp_error *) -> hp_status { return HP_OK; };
    null.fill = [](void *, uint64_t, uint8_t, size_t, uint64_t, hp_error *) -> hp_status { return HP_OK; };
    null.stream_synchronize = [](void *, uint64_t, hp_error *) -> hp_status { return HP_OK; };
    null.device_synchronize = nothing;
    return null;
  }();
  *driver = &table;
  return HP_OK;
}
