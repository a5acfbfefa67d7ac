// The extension module hardpoint._native.
#include <pybind11/pybind11.h>

#include "kv_token_input.hpp"

PYBIND11_MODULE(_native, m) {
  m.doc() = "Native parts of the core: block manager and scheduler.";
  hardpoint::bind_kv(m);
  hardpoint::bind_scheduler(m);
}
