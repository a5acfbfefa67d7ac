/* Control of a simulated driver, the same in every library. All calls are thread-safe. In a forked child they return -1. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Counts of what exists now, and of what happened since the last reset. */
typedef struct hp_sim_statistics {
  uint64_t struct_size;       /* set by the caller: sizeof(struct hp_sim_statistics) */
  uint64_t reservations;      /* address ranges reserved */
  uint64_t address_space;     /* bytes of address space reserved, allocations included */
  uint64_t handles;           /* physical memory handles that hold memory */
  uint64_t mappings;
  uint64_t mapped_bytes;      /* allocations included */
  uint64_t allocations;       /* of the vendor's plain allocation call */
  uint64_t streams;
  uint64_t events;
  uint64_t pending;           /* asynchronous operations not synchronised */
  uint64_t host_ranges;       /* pinned host ranges, allocated or registered */
  uint64_t host_bytes;
  uint64_t context_references;
  uint64_t used;              /* bytes of device memory in use, all devices */
  uint64_t calls;             /* vendor calls since the last reset */
  uint64_t violations;        /* broken rules since the last reset */
  uint64_t pageable_copies;   /* copies since the last reset of host memory that is not pinned */
  uint64_t unmaps_waited;     /* unmaps since the last reset that had to wait for other work of the device */
} hp_sim_statistics;

/* Name of the vendor library; its presence marks a library as a simulation. */
const char* hardpoint_simulated_driver(void);

/* 0, or -1 if struct_size is not the library's. */
int hp_sim_stats(hp_sim_statistics* out);

/* Bytes in use on one device; -1 for a device that cannot exist. */
int64_t hp_sim_used(int device);

/* A setting by its name (settings.hpp): 0, or -1 for an unknown name or a value that makes no sense. */
int hp_sim_set(const char* name, uint64_t value);
int hp_sim_get(const char* name, uint64_t* value);

/* Let the nth call from now on (1 is the next) of a vendor function fail with a vendor code, and the times - 1 calls after it
 * (negative: all). "*" counts the calls of all functions. 0, or -1 for an unknown function, nth 0 or times 0. */
int hp_sim_fail(const char* call, uint64_t nth, int code, int64_t times);
int hp_sim_clear_faults(void);

/* Let every call of a function take that much longer: 0, or -1 for an unknown function. */
int hp_sim_delay(const char* call, uint32_t microseconds);

/* Calls of a function since the last reset; -1 for an unknown function. */
int64_t hp_sim_call_count(const char* call);

/* Texts, one item per line. Each call writes as much as fits, ends it with 0, and returns the length of the whole text. */
int64_t hp_sim_calls(char* buffer, size_t size);        /* "name count" of every function that was called */
int64_t hp_sim_violations(char* buffer, size_t size);   /* broken rules, oldest first; at most 1000 are kept */
int64_t hp_sim_leaks(char* buffer, size_t size);        /* what is left */

/* Free everything and start anew, initialised as before. */
int hp_sim_reset(void);

#ifdef __cplusplus
}
#endif
