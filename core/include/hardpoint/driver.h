/* The memory driver of a device: the one page that a vendor implements so that Hardpoint can allocate, sleep and wake on it.
 *
 * A driver is a shared library with plain C symbols; C, C++ and Rust do equally well, and no SDK is needed to build one, because the vendor's own
 * library is opened at run time. It exports one function, `hp_driver_open`, which returns a table of functions for one device. Everything
 * else (books, tags, policies, backups, transactions, statistics) is the core's, the same on every device.
 *
 * Rules for every entry
 *   - It may be called from any thread, from several at once, and from a thread that has never used the device; it leaves the calling
 *     thread's current device and context as they were, as far as the vendor's library allows.
 *   - It returns HP_OK and sets all its results, or returns an error, changes nothing, sets no result and fills `*error`.
 *   - It never throws, exits, aborts, prints, or keeps an error for a later call.
 *   - Sizes and offsets are bytes. `error` is never null.
 *   - Entries marked (optional) may be null; what the core does then is said there.
 *
 * What the core promises
 *   - Sizes and addresses are multiples of `granularity`, and at most `max_chunk` where that is not zero.
 *   - The handles mapped into one reservation are of one size.
 *   - A handle is mapped at one address at a time, whole, from its first byte; it may be unmapped and mapped again (at the same address) with its
 *     bytes, and is released once, after it was unmapped.
 *   - A range is unmapped only after every stream of the core that used it was synchronised, and `device_synchronize` was called in the same operation.
 *   - Other entries than device_count, device_name and driver_version are called only between `open` and `close`; nothing in a forked child.
 *   - Streams passed to an entry come from `stream_create`; there is no default stream 0.
 *
 * Versions: the struct grows at its end only. The core reads entries beyond `struct_size` as null; a driver built for a later `abi` is refused.
 */
#ifndef HARDPOINT_DRIVER_H
#define HARDPOINT_DRIVER_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define HP_DRIVER_ABI 1
#define HP_DRIVER_CAPSULE "hardpoint.driver" /* name of the PyCapsule in which Python passes a `const hp_driver *` */

#if defined(__GNUC__)
#define HP_EXPORT __attribute__((visibility("default")))
#else
#define HP_EXPORT
#endif

typedef int32_t hp_status;
enum {
  HP_OK = 0,
  HP_OUT_OF_MEMORY = 1, /* the device (or, for host_register, the host) has not enough memory */
  HP_INVALID = 2,       /* the vendor's library refused an argument */
  HP_UNSUPPORTED = 3,   /* the device or its library cannot do this at all */
  HP_NO_LIBRARY = 4,    /* the vendor's library is not installed, cannot be loaded, or lacks a required symbol */
  HP_NO_DEVICE = 5,     /* the library is there and has no such device */
  HP_FAILED = 6         /* anything else; the vendor's code and text tell more */
};

/* What went wrong in one call. Strings are zero-terminated UTF-8. */
typedef struct hp_error {
  int64_t code;   /* the vendor's status */
  char call[64];  /* name of the vendor's function */
  char text[320]; /* the vendor's name and message for the code, or the driver's own explanation */
} hp_error;

/* How memory is cut. */
typedef struct hp_geometry {
  size_t granularity;     /* sizes and addresses are multiples of it; asked with the same properties that `create` uses */
  size_t recommended;     /* granularity that the vendor recommends for speed, a multiple of `granularity`: allocations that large are multiples */
  size_t max_chunk;       /* largest size for one `create`; 0 = no limit */
  size_t max_reservation; /* largest size for one `reserve`; 0 = no limit */
  int32_t copy_threads;   /* host threads that should copy at a time: 2 for copy engines, the usable cores where the host itself copies */
  int32_t dlpack_device;  /* DLDeviceType (dlpack.h) of tensors in this memory */
} hp_geometry;

/* hp_driver.flags */
#define HP_HOST_ACCESSIBLE 1u /* mapped device addresses are ordinary memory of this process: the core may use them for file I/O */
#define HP_FRESH_ZERO 2u      /* newly created memory reads as zero */
#define HP_SIMULATED 4u       /* the vendor's library is a simulation */
#define HP_COPIES_BLOCK 8u    /* copy_to_host, copy_to_device and fill are complete when they return */
#define HP_UNMAP_WAITS 16u    /* unmap waits for all work on the device: the core unmaps when its copies are done, not between them */

/* Bits of `quirks`, found by probing the running system, never from a table of versions. */
#define HP_QUIRK_ADDRESS_HOLDS_MEMORY 1u /* released memory returns only when its address range is released too */
#define HP_QUIRK_STALE_PAGES 2u          /* newly created memory may hold old content of others; the core fills what must be zero */
#define HP_QUIRK_UNIFIED_MEMORY 4u       /* host and device share one memory: backups on the host compete with the device */
#define HP_QUIRK_FREE_LAGS 8u            /* memory_info may lag behind what was released; the core waits for it within a limit */

typedef struct hp_driver hp_driver;
struct hp_driver {
  size_t struct_size;  /* sizeof(hp_driver) of the driver's build */
  uint32_t abi;        /* HP_DRIVER_ABI of the driver's build */
  uint32_t flags;
  void *context;       /* first argument of every entry */

  /* Life. The table is valid from hp_driver_open to the end of the process. `open` and `close` are called in pairs, one pair for each pool
   * that uses the device; between them the driver holds what it needs (the device's primary context, a reference count). */
  hp_status (*open)(void *context, hp_error *error);
  hp_status (*close)(void *context, hp_error *error);

  /* Geometry and facts. */
  hp_status (*geometry)(void *context, hp_geometry *geometry, hp_error *error);
  hp_status (*memory_info)(void *context, uint64_t *free_bytes, uint64_t *total_bytes, hp_error *error);
  hp_status (*device_count)(void *context, int32_t *count, hp_error *error);
  hp_status (*device_name)(void *context, char *name, size_t size, hp_error *error);
  hp_status (*driver_version)(void *context, char *version, size_t size, hp_error *error);
  /* (optional: no quirks) Return HP_QUIRK_* bits, found by probing at the first call and remembered until the last `close`; may
   * allocate for the time of that call. */
  hp_status (*quirks)(void *context, uint64_t *bits, hp_error *error);

  /* Address space. `reserve` returns a range of `size` bytes at a multiple of `granularity`, without memory. `hint` is 0, or the address wanted:
   * the driver asks for it, and returns whatever range it got; the core looks at the result. */
  hp_status (*reserve)(void *context, size_t size, uint64_t hint, uint64_t *address, hp_error *error);
  hp_status (*release_address)(void *context, uint64_t address, size_t size, hp_error *error);

  /* Physical memory. `create` takes `size` bytes of the device's memory and returns a handle; HP_OUT_OF_MEMORY when there is not enough. `release`
   * gives them back. */
  hp_status (*create)(void *context, size_t size, uint64_t *handle, hp_error *error);
  hp_status (*release)(void *context, uint64_t handle, size_t size, hp_error *error);

  /* Mapping. `map` maps a whole handle at an address within a reservation and grants the device read and write access; when granting fails, the
   * mapping is undone before it returns. `unmap` removes one mapping made by `map`; the handle keeps its bytes. */
  hp_status (*map)(void *context, uint64_t address, size_t size, uint64_t handle, hp_error *error);
  hp_status (*unmap)(void *context, uint64_t address, size_t size, hp_error *error);

  /* Transfer. Work of one stream runs in order; host memory of a copy stays valid until its stream is synchronised. `fill` sets bytes to `value`.
   * `device_synchronize` waits for all work of all streams on the device, those of other libraries included. */
  hp_status (*stream_create)(void *context, uint64_t *stream, hp_error *error);
  hp_status (*stream_destroy)(void *context, uint64_t stream, hp_error *error);
  hp_status (*copy_to_host)(void *context, void *host, uint64_t address, size_t size, uint64_t stream, hp_error *error);
  hp_status (*copy_to_device)(void *context, uint64_t address, const void *host, size_t size, uint64_t stream, hp_error *error);
  hp_status (*fill)(void *context, uint64_t address, uint8_t value, size_t size, uint64_t stream, hp_error *error);
  hp_status (*stream_synchronize)(void *context, uint64_t stream, hp_error *error);
  hp_status (*device_synchronize)(void *context, hp_error *error);

  /* (optional: host memory is used as it is, as it is when `host_register` returns HP_UNSUPPORTED) Pin and unpin page-aligned host memory that
   * the core has allocated, so that copies run at full speed. */
  hp_status (*host_register)(void *context, void *host, size_t size, hp_error *error);
  hp_status (*host_unregister)(void *context, void *host, size_t size, hp_error *error);
};

/* What `hp_driver_open` is asked for. */
typedef struct hp_open_request {
  size_t struct_size;
  uint32_t abi;        /* HP_DRIVER_ABI of the core's build */
  int32_t device;      /* index of the device */
  const char *library; /* path of the vendor's library, or null for the usual one */
  const char *options; /* "key=value;key=value", the driver's own; null for none. An unknown key is HP_INVALID. */
} hp_open_request;

/* The one symbol that a driver has to export. Returns the table for one device, or an error that says what is missing. */
#define HP_DRIVER_OPEN_SYMBOL "hp_driver_open"
typedef hp_status (*hp_driver_open_fn)(const hp_open_request *request, const hp_driver **driver, hp_error *error);
HP_EXPORT hp_status hp_driver_open(const hp_open_request *request, const hp_driver **driver, hp_error *error);

/* (optional, for tests) A second symbol that a driver may export: in the calling thread, the `nth` call of the vendor's library or of the operating
 * system from now on (1 = the next) fails instead of being made, in whichever entry it is; 0: none fails. By it the conformance suite sees what an
 * entry does when it fails half-way; what the suite makes fail otherwise never enters the driver. */
HP_EXPORT void hp_driver_fail_call(int64_t nth);

#ifdef __cplusplus
}
#endif
#endif
