#pragma once

#include <cstdint>

namespace hp {

// Counters in memory that processes share, each written by one of them. What a process wrote before it published a value is seen by
// whoever waited for that value.

void publish(uint64_t* counter, uint64_t value);

// Waits until `count` counters, `stride` bytes apart, all have reached `value`; returns false when they have not after `seconds`.
// Spins shortly, then yields, then sleeps: a process that the operating system has not scheduled must get the processor.
bool wait_for_all(const void* counters, int64_t count, int64_t stride, uint64_t value, double seconds);

}  // namespace hp
