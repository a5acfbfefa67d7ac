// The extension module hardpoint._native.
#include "bind.hpp"

#include "crash_frames.hpp"

PYBIND11_MODULE(_native, m) {
  m.doc() = "Native parts of the core: scheduler, steps' messages, memory, and blocks of GGUF files.";
  hardpoint::bind_scheduler(m);
  hardpoint::bind_step(m);
  hardpoint::bind_memory(m);
  hardpoint::bind_disk(m);
  hardpoint::bind_gguf(m);
  m.def("write_crash_frames", &hardpoint::write_crash_frames, pybind11::arg("file"));
}
