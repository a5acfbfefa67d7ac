/* Torch's pluggable allocators call two plain C symbols of a library; a driver library that exports them under its own names, as
 * HP_TORCH_ALLOCATOR(vendor) does, lets torch allocate from Hardpoint's pools. The calls go straight to the core: no Python, no GIL.
 *
 *   void *hp_<vendor>_malloc(ssize_t size, int device, void *stream)            null when the device has no memory left; torch raises its own error
 *   void hp_<vendor>_free(void *address, ssize_t size, int device, void *stream)
 *
 * `hp_torch_install`, called once by the core with its own functions, connects them.
 */
#ifndef HARDPOINT_TORCH_ALLOCATOR_H
#define HARDPOINT_TORCH_ALLOCATOR_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "hardpoint/driver.h"

typedef struct hp_torch_functions {
  size_t struct_size;
  uint64_t (*allocate)(int32_t device, size_t size); /* 0 when there is no memory, or no pool was entered for the device */
  void (*free)(uint64_t address);
} hp_torch_functions;

#define HP_TORCH_INSTALL_SYMBOL "hp_torch_install"
typedef void (*hp_torch_install_fn)(const hp_torch_functions *functions);

/* Torch gives its allocator functions no user data, hence one pointer for the whole library, set once before torch sees them. */
#define HP_TORCH_ALLOCATOR(vendor)                                                                                       \
  static const hp_torch_functions *hp_torch_functions_of_core = NULL;                                                    \
  HP_EXPORT void hp_torch_install(const hp_torch_functions *functions) { hp_torch_functions_of_core = functions; }       \
  HP_EXPORT void *hp_##vendor##_malloc(ssize_t size, int device, void *stream) {                                         \
    (void)stream;                                                                                                        \
    if (hp_torch_functions_of_core == NULL || size <= 0) return NULL;                                                    \
    return (void *)(uintptr_t)hp_torch_functions_of_core->allocate(device, (size_t)size);                                \
  }                                                                                                                      \
  HP_EXPORT void hp_##vendor##_free(void *address, ssize_t size, int device, void *stream) {                             \
    (void)size, (void)device, (void)stream;                                                                              \
    if (hp_torch_functions_of_core != NULL && address != NULL) hp_torch_functions_of_core->free((uint64_t)(uintptr_t)address); \
  }

#endif
