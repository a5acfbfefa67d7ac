// Finds HP_QUIRK_* by trying: allocates a little, gives it back step by step, and looks at the device's own counter and at what fresh memory holds.
// For drivers of devices whose libraries are known to deviate; costs a few milliseconds on a sound system.
//
// Other processes move the counter too, so a step counts as seen at half the size of the trial, and what looks like a quirk must be seen twice. A wrong
// answer costs speed, never bytes.
#pragma once
#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

#include "hardpoint/driver_support.hpp"

namespace hardpoint::driver {

template <class Device>
class QuirkProbe {
 public:
  explicit QuirkProbe(Device &device) : device_(device) {
    hp_geometry geometry{};
    device.geometry(&geometry);
    const size_t affordable = std::min<uint64_t>(kTrialBytes, free_bytes() / 4);
    size_ = std::max(affordable / geometry.recommended * geometry.recommended, geometry.recommended);
    if (geometry.max_chunk != 0) size_ = std::min(size_, geometry.max_chunk);
  }

  uint64_t run() {
    Stream stream(device_);
    uint64_t bits = give_back_step_by_step(stream.id());
    if (bits != 0) bits &= give_back_step_by_step(stream.id());
    bits |= look_at_fresh_memory(stream.id());
    stream.destroy();
    return bits;
  }

 private:
  static constexpr size_t kTrialBytes = size_t{16} << 20;
  static constexpr uint8_t kPattern = 0xA5;
  static constexpr auto kPatience = std::chrono::milliseconds(400);
  static constexpr auto kPause = std::chrono::milliseconds(2);

  // Own what they take of the device for the time of the probe. Their methods give it back and may fail; their destructors do what is left after a
  // failure.
  class Stream {
   public:
    explicit Stream(Device &device) : device_(device) { device.stream_create(&stream_); }
    Stream(const Stream &) = delete;
    Stream &operator=(const Stream &) = delete;
    ~Stream() { quietly([&] { destroy(); }); }

    uint64_t id() const { return stream_; }

    void destroy() {
      if (destroyed_) return;
      device_.stream_destroy(stream_);
      destroyed_ = true;
    }

   private:
    Device &device_;
    uint64_t stream_ = 0;
    bool destroyed_ = false;
  };

  class Trial {
   public:
    Trial(Device &device, size_t size) : device_(device), size_(size) {
      device.reserve(size, 0, &address_);
      Undo release_address([&] { quietly([&] { device.release_address(address_, size); }); });
      device.create(size, &handle_);
      Undo release([&] { quietly([&] { device.release(handle_, size); }); });
      device.map(address_, size, handle_);
      release.dismiss();
      release_address.dismiss();
      stage_ = Stage::mapped;
    }
    Trial(const Trial &) = delete;
    Trial &operator=(const Trial &) = delete;
    ~Trial() {
      if (stage_ == Stage::mapped) quietly([&] { device_.device_synchronize(); });
      quietly([&] { unmap(); });
      quietly([&] { release(); });
      quietly([&] { release_address(); });
    }

    uint64_t address() const { return address_; }

    void unmap() { step(Stage::mapped, Stage::unmapped, [&] { device_.unmap(address_, size_); }); }
    void release() { step(Stage::unmapped, Stage::released, [&] { device_.release(handle_, size_); }); }
    void release_address() { step(Stage::released, Stage::gone, [&] { device_.release_address(address_, size_); }); }

   private:
    enum class Stage { mapped, unmapped, released, gone };

    template <class Work>
    void step(Stage from, Stage to, Work &&work) {
      if (stage_ != from) return;
      work();
      stage_ = to;
    }

    Device &device_;
    size_t size_;
    uint64_t address_ = 0, handle_ = 0;
    Stage stage_ = Stage::gone;
  };

  template <class Work>
  static void quietly(Work &&work) noexcept {
    try {
      work();
    } catch (...) {  // an earlier failure is being reported
    }
  }

  uint64_t free_bytes() const {
    uint64_t free = 0, total = 0;
    device_.memory_info(&free, &total);
    return free;
  }

  enum class Return { at_once, late, never };

  Return memory_returned(uint64_t free_while_mapped) const {
    const uint64_t expected = free_while_mapped + size_ / 2;
    if (free_bytes() >= expected) return Return::at_once;
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    while (std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(kPause);
      if (free_bytes() >= expected) return Return::late;
    }
    return Return::never;
  }

  // The counter while the trial is mapped; it may lag behind the allocation too.
  uint64_t free_while_mapped(uint64_t free_before) const {
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    uint64_t free = free_bytes();
    while (free + size_ / 2 > free_before && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(kPause);
      free = free_bytes();
    }
    return free;
  }

  uint64_t give_back_step_by_step(uint64_t stream) {
    const uint64_t before = free_bytes();
    Trial trial(device_, size_);
    const uint64_t mapped = free_while_mapped(before);
    device_.fill(trial.address(), kPattern, size_, stream);
    device_.stream_synchronize(stream);
    device_.device_synchronize();
    trial.unmap();
    trial.release();
    const Return after_release = memory_returned(mapped);
    trial.release_address();
    if (after_release == Return::at_once) return 0;
    if (after_release == Return::late) return HP_QUIRK_FREE_LAGS;
    switch (memory_returned(mapped)) {
      case Return::at_once:
        return HP_QUIRK_ADDRESS_HOLDS_MEMORY;
      case Return::late:
        return HP_QUIRK_ADDRESS_HOLDS_MEMORY | HP_QUIRK_FREE_LAGS;
      default:  // the counter says nothing about this process within the patience
        return HP_QUIRK_FREE_LAGS;
    }
  }

  // The memory that the first trial filled is the likeliest to come back: whether it comes back clean is seen here.
  uint64_t look_at_fresh_memory(uint64_t stream) {
    Trial trial(device_, size_);
    std::vector<uint8_t> bytes(size_);
    device_.copy_to_host(bytes.data(), trial.address(), size_, stream);
    device_.stream_synchronize(stream);
    device_.device_synchronize();
    trial.unmap();
    trial.release();
    trial.release_address();
    const bool zero = std::all_of(bytes.begin(), bytes.end(), [](uint8_t byte) { return byte == 0; });
    return zero ? 0 : HP_QUIRK_STALE_PAGES;
  }

  Device &device_;
  size_t size_ = 0;
};

}  // namespace hardpoint::driver
