// What sleeping and waking are held against: the same bytes moved with as little as possible around them. Compiled by sleep.py for this machine.
//
// Every function returns seconds, or a negative number when a system call failed.
#include <dlfcn.h>
#include <fcntl.h>
#include <immintrin.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kBlock = size_t{8} << 20;  // of direct I/O

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Both at a page's boundary.
void copy_non_temporal(char *to, const char *from, size_t size) {
#if defined(__AVX512F__)
  for (size_t at = 0; at < size; at += 64) {
    _mm512_stream_si512(reinterpret_cast<__m512i *>(to + at), _mm512_load_si512(reinterpret_cast<const __m512i *>(from + at)));
  }
#elif defined(__AVX2__)
  for (size_t at = 0; at < size; at += 32) {
    _mm256_stream_si256(reinterpret_cast<__m256i *>(to + at), _mm256_load_si256(reinterpret_cast<const __m256i *>(from + at)));
  }
#else
  std::memcpy(to, from, size);
#endif
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

template <class Work>
void in_threads(int threads, size_t size, Work &&work) {
  std::vector<std::thread> helpers;
  const size_t share = size / threads / kHugePage * kHugePage;
  for (int index = 0; index < threads; ++index) {
    const size_t start = index * share, end = index + 1 == threads ? size : start + share;
    helpers.emplace_back([=, &work] { work(start, end - start); });
  }
  for (std::thread &helper : helpers) helper.join();
}

}  // namespace

extern "C" {

// Memory in huge pages at a huge page's boundary.
void *limits_memory(size_t size) {
  void *raw = mmap(nullptr, size + kHugePage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  auto *data = reinterpret_cast<char *>((reinterpret_cast<uintptr_t>(raw) + kHugePage - 1) / kHugePage * kHugePage);
  if (mmap(data, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED) return nullptr;
  madvise(data, size, MADV_HUGEPAGE);
  return data;
}

void limits_free(void *data, size_t size) { munmap(data, size); }

// Copies `size` bytes out and unmaps them.
double limits_copy_out(char *data, char *backup, size_t size, int threads) {
  const double start = now();
  in_threads(threads, size, [=](size_t at, size_t length) { copy_non_temporal(backup + at, data + at, length); });
  if (mmap(data, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED) return -1;
  return now() - start;
}

// Maps fresh memory and copies `size` bytes in.
double limits_copy_in(char *data, const char *backup, size_t size, int threads) {
  const double start = now();
  if (mmap(data, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED) return -1;
  madvise(data, size, MADV_HUGEPAGE);
  in_threads(threads, size, [=](size_t at, size_t length) { copy_non_temporal(data + at, backup + at, length); });
  return now() - start;
}

// Writes a new file past the page cache, made durable at the end; the room is taken before the clock starts, as a backup's is.
double limits_write(const char *path, const char *data, size_t size, int threads) {
  const int file = open(path, O_CREAT | O_TRUNC | O_RDWR | O_DIRECT | O_CLOEXEC, 0600);
  if (file < 0 || posix_fallocate(file, 0, static_cast<off_t>(size)) != 0) return -1;
  bool failed = false;
  const double start = now();
  in_threads(threads, size, [&](size_t at, size_t length) {
    for (const size_t end = at + length; at < end;) {
      const ssize_t done = pwrite(file, data + at, std::min(kBlock, end - at), static_cast<off_t>(at));
      if (done <= 0) {
        failed = true;
        return;
      }
      at += static_cast<size_t>(done);
    }
  });
  if (fdatasync(file) != 0) failed = true;
  const double seconds = now() - start;
  close(file);
  return failed ? -1 : seconds;
}

double limits_read(const char *path, char *data, size_t size, int threads) {
  const int file = open(path, O_RDONLY | O_DIRECT | O_CLOEXEC);
  if (file < 0) return -1;
  bool failed = false;
  const double start = now();
  if (mmap(data, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED) return -1;
  madvise(data, size, MADV_HUGEPAGE);
  in_threads(threads, size, [&](size_t at, size_t length) {
    for (const size_t end = at + length; at < end;) {
      const ssize_t done = pread(file, data + at, std::min(kBlock, end - at), static_cast<off_t>(at));
      if (done <= 0) {
        failed = true;
        return;
      }
      at += static_cast<size_t>(done);
    }
  });
  const double seconds = now() - start;
  close(file);
  return failed ? -1 : seconds;
}

// `count` times: the vendor's own calls for one block and back, on the (simulated) CUDA library at `path`. The primary context is current.
double limits_bare_calls(const char *path, size_t size, int count) {
  void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return -1;
#define FUNCTION(name, ...) const auto name = reinterpret_cast<int (*)(__VA_ARGS__)>(dlsym(library, #name))
  FUNCTION(cuInit, unsigned);
  FUNCTION(cuDevicePrimaryCtxRetain, void **, int);
  FUNCTION(cuCtxSetCurrent, void *);
  FUNCTION(cuMemAddressReserve, uint64_t *, size_t, size_t, uint64_t, unsigned long long);
  FUNCTION(cuMemCreate, uint64_t *, size_t, const void *, unsigned long long);
  FUNCTION(cuMemMap, uint64_t, size_t, size_t, uint64_t, unsigned long long);
  FUNCTION(cuMemSetAccess, uint64_t, size_t, const void *, size_t);
  FUNCTION(cuCtxSynchronize, void);
  FUNCTION(cuMemUnmap, uint64_t, size_t);
  FUNCTION(cuMemRelease, uint64_t);
  FUNCTION(cuMemAddressFree, uint64_t, size_t);
#undef FUNCTION
  struct {
    int type = 1, handle_types = 0, location_type = 1, location_id = 0;
    uint64_t rest[2] = {};
  } properties;
  struct {
    int location_type = 1, location_id = 0, flags = 3;
  } access;
  void *context = nullptr;
  if (cuInit(0) != 0 || cuDevicePrimaryCtxRetain(&context, 0) != 0 || cuCtxSetCurrent(context) != 0) return -1;
  int failed = 0;
  const double start = now();
  for (int index = 0; index < count; ++index) {
    uint64_t address = 0, handle = 0;
    failed |= cuMemAddressReserve(&address, size, size, 0, 0);
    failed |= cuMemCreate(&handle, size, &properties, 0);
    failed |= cuMemMap(address, size, 0, handle, 0);
    failed |= cuMemSetAccess(address, size, &access, 1);
    failed |= cuCtxSynchronize();
    failed |= cuMemUnmap(address, size);
    failed |= cuMemRelease(handle);
    failed |= cuMemAddressFree(address, size);
  }
  const double seconds = now() - start;
  return failed ? -1 : seconds;
}

// `count` times: one block and back through the functions that torch's pluggable allocator calls, at these addresses.
double limits_allocator_calls(void *(*allocate)(ssize_t, int, void *), void (*release)(void *, ssize_t, int, void *), size_t size, int count) {
  const double start = now();
  for (int index = 0; index < count; ++index) {
    void *address = allocate(static_cast<ssize_t>(size), 0, nullptr);
    if (address == nullptr) return -1;
    release(address, static_cast<ssize_t>(size), 0, nullptr);
  }
  return now() - start;
}
}
