#include "signals.hpp"

#include <chrono>
#include <thread>

#include "pause.hpp"

namespace hp {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kPauses = 2000;
constexpr int kYields = 200;
constexpr auto kNap = std::chrono::microseconds(50);

bool have_reached(const char* counters, int64_t count, int64_t stride, uint64_t value) {
  for (int64_t i = 0; i < count; ++i) {
    const auto* counter = reinterpret_cast<const uint64_t*>(counters + i * stride);
    if (__atomic_load_n(counter, __ATOMIC_ACQUIRE) < value) return false;
  }
  return true;
}

}  // namespace

void publish(uint64_t* counter, uint64_t value) { __atomic_store_n(counter, value, __ATOMIC_RELEASE); }

bool wait_for_all(const void* counters, int64_t count, int64_t stride, uint64_t value, double seconds) {
  const auto* first = static_cast<const char*>(counters);
  for (int i = 0; i < kPauses; ++i) {
    if (have_reached(first, count, stride, value)) return true;
    pause_cpu();
  }
  for (int i = 0; i < kYields; ++i) {
    if (have_reached(first, count, stride, value)) return true;
    std::this_thread::yield();
  }
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  while (!have_reached(first, count, stride, value)) {
    if (Clock::now() >= end) return false;
    std::this_thread::sleep_for(kNap);
  }
  return true;
}

}  // namespace hp
