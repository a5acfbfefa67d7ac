// What each part of the CPU backend adds to the extension module.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>

namespace hp {

// Of a tensor's memory: the callers in hardpoint_cpu check shapes, dtypes and lifetimes.
using Address = uintptr_t;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

void bind_adapters(pybind11::module_& m);
void bind_attention(pybind11::module_& m);
void bind_experts(pybind11::module_& m);
void bind_kernels(pybind11::module_& m);
void bind_signals(pybind11::module_& m);

}  // namespace hp
