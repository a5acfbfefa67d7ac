#include <pybind11/pybind11.h>

namespace hp {
void bind_attention(pybind11::module_& m);
}
void bind_experts(pybind11::module_& m);
void bind_kernels(pybind11::module_& m);
void bind_signals(pybind11::module_& m);

PYBIND11_MODULE(_native, m) {
  m.doc() = "Native code of the CPU backend: thread pool, instruction set dispatch, paged attention, decoder kernels, experts, signals between ranks.";
  hp::bind_attention(m);
  bind_experts(m);
  bind_kernels(m);
  bind_signals(m);
}
