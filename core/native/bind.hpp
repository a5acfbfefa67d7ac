// What each part of the core adds to the extension module.
#pragma once
#include <pybind11/pybind11.h>

namespace hardpoint {

void bind_scheduler(pybind11::module_& m);
void bind_step(pybind11::module_& m);
void bind_memory(pybind11::module_& m);
void bind_disk(pybind11::module_& m);
void bind_gguf(pybind11::module_& m);

}  // namespace hardpoint
