// The extension module hardpoint_cpu._native.
#include "bind.hpp"

PYBIND11_MODULE(_native, m) {
  m.doc() = "Native code of the CPU backend: thread pool, instruction set dispatch, paged attention, decoder kernels, experts, adapters, signals between ranks.";
  hp::bind_adapters(m);
  hp::bind_attention(m);
  hp::bind_experts(m);
  hp::bind_kernels(m);
  hp::bind_signals(m);
}
