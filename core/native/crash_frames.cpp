#include "crash_frames.hpp"

#include <csignal>
#include <iterator>

#if __has_include(<execinfo.h>)
#include <execinfo.h>

namespace hardpoint {
namespace {

constexpr int kFatal[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
constexpr int kMostFrames = 64;
constexpr int kOwnFrames = 2;  // the handler, and the kernel's return from it

// What a signal handler uses has to lie ready; it is written by `write_crash_frames` alone.
int frames_file = -1;
struct sigaction handled_before[std::size(kFatal)];

void write_frames(int signal) {
  for (size_t index = 0; index < std::size(kFatal); ++index) sigaction(kFatal[index], &handled_before[index], nullptr);
  void* frames[kMostFrames];
  const int count = backtrace(frames, kMostFrames);
  if (count > kOwnFrames) backtrace_symbols_fd(frames + kOwnFrames, count - kOwnFrames, frames_file);
  raise(signal);  // it is blocked until this returns, and then the earlier handler's
}

}  // namespace

bool write_crash_frames(int file) noexcept {
  const bool is_first = frames_file < 0;
  frames_file = file;
  if (!is_first) return true;
  void* frame = nullptr;
  backtrace(&frame, 1);  // its first call loads a library, which a handler must not
  struct sigaction action {};
  action.sa_handler = write_frames;
  action.sa_flags = SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  for (size_t index = 0; index < std::size(kFatal); ++index) sigaction(kFatal[index], &action, &handled_before[index]);
  return true;
}

}  // namespace hardpoint
#else
namespace hardpoint {
bool write_crash_frames(int) noexcept { return false; }
}  // namespace hardpoint
#endif
