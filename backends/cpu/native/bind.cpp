#include <pybind11/pybind11.h>

namespace hp {
void bind_attention(pybind11::module_& m);
void bind_kernels(pybind11::module_& m);
}  // namespace hp

PYBIND11_MODULE(_native, m) {
  m.doc() = "Native kernels of the CPU backend: thread pool, instruction set dispatch, paged attention, decoder kernels.";
  hp::bind_attention(m);
  hp::bind_kernels(m);
}
