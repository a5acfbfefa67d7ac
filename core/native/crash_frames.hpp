// Where native code was when it ended the process.
#pragma once

namespace hardpoint {

// From now on a fatal signal (SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT) writes the C frames of its thread to a file before whoever handled it before
// has its turn. Returns false where the system has no backtraces.
bool write_crash_frames(int file) noexcept;

}  // namespace hardpoint
