#include "memory_driver.hpp"

#include <algorithm>
#include <cstring>
#include <shared_mutex>
#include <string>

namespace hardpoint::memory {
namespace {

constexpr int kAddressAttempts = 8;

// Addresses are the process's, whatever pool they belong to: while one range is given up and taken again, no pool reserves another.
std::shared_mutex renewals;

std::string text_of(const char* characters, size_t size) { return {characters, strnlen(characters, size)}; }

[[noreturn]] void fail(hp_status status, const hp_error& error) {
  std::string call = text_of(error.call, sizeof error.call);
  std::string text = text_of(error.text, sizeof error.text);
  if (status == HP_OUT_OF_MEMORY) {
    throw MemoryFault(Fault::kOutOfMemory, "the device has not enough free memory",
                      call + " returned " + std::to_string(error.code) + " (" + text + ")",
                      "Free memory on the device, lower the memory utilisation, or put something else to sleep");
  }
  throw MemoryFault::driver_call(std::move(call), error.code, std::move(text));
}

template <class Entry, class... Arguments>
void call(const hp_driver& table, Entry entry, Arguments... arguments) {
  hp_error error{};
  const hp_status status = entry(table.context, arguments..., &error);
  if (status != HP_OK) fail(status, error);
}

}  // namespace

Driver::Driver(const hp_driver* table) {
  // A table of an older build is shorter: what it lacks reads as null.
  std::memcpy(&table_, table, std::min(table->struct_size, sizeof table_));
  if (table_.abi != HP_DRIVER_ABI) {
    throw MemoryFault(Fault::kRefused, "the memory driver is built for another contract",
                      "its ABI is " + std::to_string(table_.abi) + ", the core's is " + std::to_string(HP_DRIVER_ABI));
  }
  call(table_, table_.open);
  opened_ = true;
  try {
    call(table_, table_.geometry, &geometry_);
    if (table_.quirks != nullptr) call(table_, table_.quirks, &quirks_);
  } catch (...) {
    hp_error ignored{};
    table_.close(table_.context, &ignored);
    throw;
  }
}

Driver::~Driver() {
  if (opened_) drop_idle_streams();
  hp_error ignored{};  // nobody is left who could be told
  if (opened_) table_.close(table_.context, &ignored);
}

Driver::Info Driver::memory_info() const {
  Info info{};
  call(table_, table_.memory_info, &info.free, &info.total);
  return info;
}

uint64_t Driver::reserve(size_t size, uint64_t hint) const {
  std::shared_lock<std::shared_mutex> lock(renewals, std::defer_lock);
  if (has_quirk(HP_QUIRK_ADDRESS_HOLDS_MEMORY)) lock.lock();
  uint64_t address = 0;
  call(table_, table_.reserve, size, hint, &address);
  return address;
}

bool Driver::renew_address(uint64_t address, size_t size) const {
  const std::lock_guard lock(renewals);
  call(table_, table_.release_address, address, size);
  std::vector<uint64_t> elsewhere;
  bool same = false;
  for (int attempt = 0; attempt < kAddressAttempts && !same; ++attempt) {
    hp_error ignored{};
    uint64_t found = 0;
    if (table_.reserve(table_.context, size, address, &found, &ignored) != HP_OK) continue;
    same = found == address;
    if (!same) elsewhere.push_back(found);
  }
  for (const uint64_t range : elsewhere) {
    hp_error ignored{};  // a range without memory costs addresses only
    table_.release_address(table_.context, range, size, &ignored);
  }
  return same;
}

void Driver::release_address(uint64_t address, size_t size) const { call(table_, table_.release_address, address, size); }

uint64_t Driver::create(size_t size) const {
  uint64_t handle = 0;
  call(table_, table_.create, size, &handle);
  return handle;
}

void Driver::release(uint64_t handle, size_t size) const { call(table_, table_.release, handle, size); }
void Driver::map(uint64_t address, size_t size, uint64_t handle) const { call(table_, table_.map, address, size, handle); }
void Driver::unmap(uint64_t address, size_t size) const { call(table_, table_.unmap, address, size); }

void Driver::copy_to_host(void* host, uint64_t address, size_t size, uint64_t stream) const {
  call(table_, table_.copy_to_host, host, address, size, stream);
}

void Driver::copy_to_device(uint64_t address, const void* host, size_t size, uint64_t stream) const {
  call(table_, table_.copy_to_device, address, host, size, stream);
}

void Driver::fill(uint64_t address, uint8_t value, size_t size, uint64_t stream) const {
  call(table_, table_.fill, address, value, size, stream);
}

void Driver::stream_synchronize(uint64_t stream) const { call(table_, table_.stream_synchronize, stream); }
void Driver::device_synchronize() const { call(table_, table_.device_synchronize); }

bool Driver::host_register(void* host, size_t size) const {
  hp_error error{};
  const hp_status status = table_.host_register(table_.context, host, size, &error);
  if (status == HP_UNSUPPORTED) return false;
  if (status == HP_OUT_OF_MEMORY) {
    throw MemoryFault(Fault::kBudgetExceeded, "the host has no memory that can be pinned",
                      text_of(error.text, sizeof error.text), "Lower the host budget, or use the disk or source tier");
  }
  if (status != HP_OK) fail(status, error);
  return true;
}

void Driver::host_unregister(void* host, size_t size) const { call(table_, table_.host_unregister, host, size); }

Driver::Stream::Stream(const Driver& driver) : driver_(driver) {
  {
    std::lock_guard lock(driver_.streams_mutex_);
    if (!driver_.idle_streams_.empty()) {
      stream_ = driver_.idle_streams_.back();
      driver_.idle_streams_.pop_back();
      return;
    }
  }
  call(driver_.table_, driver_.table_.stream_create, &stream_);
}

Driver::Stream::~Stream() {
  std::lock_guard lock(driver_.streams_mutex_);
  driver_.idle_streams_.push_back(stream_);
}

bool Driver::Stream::drain() const noexcept {
  hp_error ignored{};
  return driver_.table_.stream_synchronize(driver_.table_.context, stream_, &ignored) == HP_OK;
}

void Driver::drop_idle_streams() noexcept {
  std::vector<uint64_t> idle;
  {
    std::lock_guard lock(streams_mutex_);
    idle.swap(idle_streams_);
  }
  for (const uint64_t stream : idle) {
    hp_error ignored{};
    if (table_.stream_destroy(table_.context, stream, &ignored) == HP_OK) continue;
    std::lock_guard lock(streams_mutex_);
    idle_streams_.push_back(stream);
  }
}

}  // namespace hardpoint::memory
