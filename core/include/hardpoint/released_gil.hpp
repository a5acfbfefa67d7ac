// Python goes on while native code works.
#pragma once
#include <cxxabi.h>
#include <pybind11/pybind11.h>
#include <unistd.h>

#include <exception>

namespace hardpoint {

// As pybind11's gil_scoped_release, whose destructor may not be left by an exception: a daemon thread that returns while the interpreter ends is
// ended by the interpreter, which unwinds its stack from here, and would end the process there.
class ReleasedGil {
 public:
  ReleasedGil() : state_(PyEval_SaveThread()) {}
  ~ReleasedGil() noexcept(false) {
    if (std::uncaught_exceptions() == 0) {
      PyEval_RestoreThread(state_);
      return;
    }
    // No second unwinding may leave a destructor that an exception has called: the thread waits here for the end of the process.
    try {
      PyEval_RestoreThread(state_);
    } catch (const abi::__forced_unwind&) {
      for (;;) pause();
    }
  }
  ReleasedGil(const ReleasedGil&) = delete;
  ReleasedGil& operator=(const ReleasedGil&) = delete;

 private:
  PyThreadState* const state_;
};

}  // namespace hardpoint
