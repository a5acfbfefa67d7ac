/* The memory driver of the pretend device. Its memory is a file without a name: ranges of it are mapped at reserved addresses.
 *
 * hardpoint/driver.h has the rules, and what the core promises, such as sizes that are multiples of the granularity. On a real device
 * most entries are one or two calls of the vendor's library, which is opened at run time.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "hardpoint/driver.h"

enum { DLPACK_CPU = 1 };
static const size_t granularity = (size_t)2 << 20, max_chunk = (size_t)64 << 20;
static const uint64_t total = (uint64_t)1 << 30; /* bytes of the device's memory */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards all below */
static int file = -1;      /* the device's memory, without an end; open from the first hp_driver_open on */
static uint64_t used, end; /* bytes created and not released; end of the last range of the file, none of which is used twice */
static _Atomic uint64_t streams;

static hp_status fail(hp_error *error, hp_status status, int64_t code, const char *call, const char *text) {
  error->code = code;
  snprintf(error->call, sizeof error->call, "%s", call);
  snprintf(error->text, sizeof error->text, "%s", text);
  return status;
}

static hp_status unlock(hp_status status) {
  pthread_mutex_unlock(&lock);
  return status;
}

static void *pointer(uint64_t address) { return (void *)(uintptr_t)address; }

/* Takes addresses without access to them. */
static char *take(uint64_t address, size_t size, int flags) {
  return mmap(pointer(address), size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | flags, -1, 0);
}

/* Nothing to start, and nothing to wait for: copies are done when they return (HP_COPIES_BLOCK). */
static hp_status nothing(void *context, hp_error *error) { return HP_OK; }

static hp_status geometry(void *context, hp_geometry *geometry, hp_error *error) {
  *geometry = (hp_geometry){granularity, granularity, max_chunk, 0, 2, DLPACK_CPU};
  return HP_OK;
}

static hp_status memory_info(void *context, uint64_t *free_bytes, uint64_t *total_bytes, hp_error *error) {
  pthread_mutex_lock(&lock);
  *free_bytes = total - used;
  *total_bytes = total;
  return unlock(HP_OK);
}

static hp_status device_count(void *context, int32_t *count, hp_error *error) {
  *count = 1;
  return HP_OK;
}

static hp_status device_name(void *context, char *name, size_t size, hp_error *error) {
  snprintf(name, size, "Acme pretend device");
  return HP_OK;
}

static hp_status driver_version(void *context, char *version, size_t size, hp_error *error) {
  snprintf(version, size, "0.1.0");
  return HP_OK;
}

static hp_status reserve(void *context, size_t size, uint64_t hint, uint64_t *address, hp_error *error) {
  char *wide = take(hint, size + granularity, 0); /* more than asked, to cut an aligned range out of it */
  if (wide == MAP_FAILED) return fail(error, HP_OUT_OF_MEMORY, errno, "mmap", strerror(errno));
  size_t before = -(uintptr_t)wide % granularity;
  if (before) munmap(wide, before);
  munmap(wide + before + size, granularity - before);
  *address = (uintptr_t)(wide + before);
  return HP_OK;
}

static hp_status release_address(void *context, uint64_t address, size_t size, hp_error *error) {
  return munmap(pointer(address), size) ? fail(error, HP_FAILED, errno, "munmap", strerror(errno)) : HP_OK;
}

static hp_status create(void *context, size_t size, uint64_t *handle, hp_error *error) {
  pthread_mutex_lock(&lock);
  if (size > total - used) return unlock(fail(error, HP_OUT_OF_MEMORY, 0, "create", "the device's memory is used up"));
  used += size;
  *handle = end += size;
  return unlock(HP_OK);
}

static hp_status release(void *context, uint64_t handle, size_t size, hp_error *error) {
  pthread_mutex_lock(&lock);
  if (fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)(handle - size), (off_t)size))
    return unlock(fail(error, HP_FAILED, errno, "fallocate", strerror(errno)));
  used -= size;
  return unlock(HP_OK);
}

static hp_status map(void *context, uint64_t address, size_t size, uint64_t handle, hp_error *error) {
  off_t offset = (off_t)(handle - size);
  void *mapped = mmap(pointer(address), size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, offset);
  return mapped == MAP_FAILED ? fail(error, HP_FAILED, errno, "mmap", strerror(errno)) : HP_OK;
}

static hp_status unmap(void *context, uint64_t address, size_t size, hp_error *error) {
  return take(address, size, MAP_FIXED) == MAP_FAILED ? fail(error, HP_FAILED, errno, "mmap", strerror(errno)) : HP_OK;
}

static hp_status stream_create(void *context, uint64_t *stream, hp_error *error) {
  *stream = ++streams;
  return HP_OK;
}

static hp_status stream_nothing(void *context, uint64_t stream, hp_error *error) { return HP_OK; }

static hp_status copy_to_host(void *context, void *host, uint64_t address, size_t size, uint64_t stream, hp_error *error) {
  memcpy(host, pointer(address), size);
  return HP_OK;
}

static hp_status copy_to_device(void *context, uint64_t address, const void *host, size_t size, uint64_t stream, hp_error *error) {
  memcpy(pointer(address), host, size);
  return HP_OK;
}

static hp_status fill(void *context, uint64_t address, uint8_t value, size_t size, uint64_t stream, hp_error *error) {
  memset(pointer(address), value, size);
  return HP_OK;
}

/* Without `quirks` and `host_register`, which are optional. HP_SIMULATED goes when the device is real. */
static const hp_driver table = {
    .struct_size = sizeof(hp_driver), .abi = HP_DRIVER_ABI,
    .flags = HP_HOST_ACCESSIBLE | HP_FRESH_ZERO | HP_COPIES_BLOCK | HP_SIMULATED,
    .open = nothing, .close = nothing, .geometry = geometry, .memory_info = memory_info,
    .device_count = device_count, .device_name = device_name, .driver_version = driver_version,
    .reserve = reserve, .release_address = release_address,
    .create = create, .release = release, .map = map, .unmap = unmap,
    .stream_create = stream_create, .stream_destroy = stream_nothing, .stream_synchronize = stream_nothing,
    .copy_to_host = copy_to_host, .copy_to_device = copy_to_device, .fill = fill, .device_synchronize = nothing,
};

hp_status hp_driver_open(const hp_open_request *request, const hp_driver **driver, hp_error *error) {
  if (request->device != 0) return fail(error, HP_NO_DEVICE, 0, "hp_driver_open", "there is one device, 0");
  if (request->options && *request->options) return fail(error, HP_INVALID, 0, "hp_driver_open", "there are no options");
  pthread_mutex_lock(&lock);
  if (file < 0) file = memfd_create("acme", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, (off_t)1 << 60)) return unlock(fail(error, HP_FAILED, errno, "memfd", strerror(errno)));
  *driver = &table;
  return unlock(HP_OK);
}
