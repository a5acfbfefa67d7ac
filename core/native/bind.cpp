// The extension module hardpoint._native.
#include "bind.hpp"

#include <dlfcn.h>
#if defined(__GLIBC__)
#include <malloc.h>
#endif

#include <string>

#include "crash_frames.hpp"
#include "hardpoint/released_gil.hpp"

PYBIND11_MODULE(_native, m) {
  m.doc() = "Native parts of the core: scheduler, steps' messages, memory, and blocks of GGUF files.";
  hardpoint::bind_memory(m);
  hardpoint::bind_disk(m);
#ifndef HARDPOINT_MEMORY_ONLY
  hardpoint::bind_scheduler(m);
  hardpoint::bind_step(m);
  hardpoint::bind_gguf(m);
#endif
  m.def(
      "return_free_memory",
      [] {
#if defined(__GLIBC__)
        malloc_trim(0);
#endif
      },
      pybind11::call_guard<hardpoint::ReleasedGil>());
  m.def(
      "load_library", [](const std::string& path) { return dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL) != nullptr; }, pybind11::arg("path"),
      pybind11::call_guard<hardpoint::ReleasedGil>());
  m.def("write_crash_frames", &hardpoint::write_crash_frames, pybind11::arg("file"));
}
