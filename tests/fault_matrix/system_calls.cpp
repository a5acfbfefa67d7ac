// Preloaded into a process, it makes chosen system calls of the memory engine and of the CPU's driver fail before they have any effect.
//
// All calls below take integers and pointers only, six at most, which the ABIs of x86-64 and AArch64 pass alike whatever a header declares:
// one form serves for all, with the name that the linker sees.
#include <dlfcn.h>
#include <errno.h>
#include <string.h>

#include <map>
#include <mutex>
#include <set>
#include <string>

namespace {

std::mutex mutex;  // guards all below
std::map<std::string, long> counts;
long total = 0;
std::string chosen;         // empty: calls of all names, counted together
std::set<long> to_fail;     // values of the count

// Python and torch make system calls too.
bool is_ours(const void* caller) {
  Dl_info found;
  if (!dladdr(caller, &found) || !found.dli_fname) return false;
  const char* slash = strrchr(found.dli_fname, '/');
  const std::string name = slash ? slash + 1 : found.dli_fname;
  return name.rfind("_native.", 0) == 0 || name.rfind("_driver.", 0) == 0;
}

bool fails(const char* name, const void* caller) {
  if (!is_ours(caller)) return false;
  const std::lock_guard<std::mutex> guard(mutex);
  const long of_name = ++counts[name];
  ++total;
  return chosen.empty() ? to_fail.erase(total) > 0 : chosen == name && to_fail.erase(of_name) > 0;
}

}  // namespace

#define CALL(name, error)                                                        \
  long failing_##name(long a, long b, long c, long d, long e, long f) asm(#name); \
  long failing_##name(long a, long b, long c, long d, long e, long f) {          \
    using Function = long (*)(long, long, long, long, long, long);               \
    static const auto real = reinterpret_cast<Function>(dlsym(RTLD_NEXT, #name)); \
    if (!fails(#name, __builtin_return_address(0))) return real(a, b, c, d, e, f); \
    errno = error;                                                               \
    return -1;                                                                   \
  }

CALL(mmap, ENOMEM)
CALL(munmap, ENOMEM)
CALL(mremap, ENOMEM)
CALL(mprotect, ENOMEM)
CALL(madvise, ENOMEM)
CALL(open, EIO)
CALL(pread, EIO)
CALL(pwrite, EIO)
CALL(fallocate, EIO)
CALL(fdatasync, EIO)
CALL(fsync, EIO)
CALL(fstat, EIO)
CALL(fstatfs, EIO)
CALL(flock, EIO)
CALL(rename, EIO)
CALL(mkdir, EIO)
CALL(unlink, EIO)
CALL(rmdir, EIO)

// In place of what was armed before. `name` empty: the calls of all names, counted together.
extern "C" void hp_calls_fail(const char* name, const long* numbers, long count) {
  const std::lock_guard<std::mutex> guard(mutex);
  chosen = name;
  to_fail.clear();
  const long base = chosen.empty() ? total : counts[chosen];
  for (long index = 0; index < count; ++index) to_fail.insert(base + numbers[index]);
}

// Returns how many of the armed calls have not been made; none is armed any more.
extern "C" long hp_calls_disarm() {
  const std::lock_guard<std::mutex> guard(mutex);
  const long left = static_cast<long>(to_fail.size());
  to_fail.clear();
  return left;
}

// Fills `text` with "name count" of every call, one per line.
extern "C" void hp_calls_made(char* text, unsigned long size) {
  const std::lock_guard<std::mutex> guard(mutex);
  std::string lines;
  for (const auto& [name, count] : counts) lines += name + " " + std::to_string(count) + "\n";
  strncpy(text, lines.c_str(), size - 1);
  text[size - 1] = 0;
}
