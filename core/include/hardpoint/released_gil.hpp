// Python goes on while native code works.
#pragma once
#include <pybind11/pybind11.h>

namespace hardpoint {

// As pybind11's gil_scoped_release, whose destructor may not be left by an exception: a daemon thread that returns while the interpreter ends is
// ended by the interpreter, which unwinds its stack from here, and would end the process there.
class ReleasedGil {
 public:
  ReleasedGil() : state_(PyEval_SaveThread()) {}
  ~ReleasedGil() noexcept(false) { PyEval_RestoreThread(state_); }
  ReleasedGil(const ReleasedGil&) = delete;
  ReleasedGil& operator=(const ReleasedGil&) = delete;

 private:
  PyThreadState* const state_;
};

}  // namespace hardpoint
