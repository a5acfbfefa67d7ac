// Python face of the experts. Tensors come as addresses: hardpoint_cpu.kernels checks shapes, dtypes and lifetimes before it calls.
#include <pybind11/pybind11.h>

#include <cstdint>

#include "bind.hpp"
#include "experts.hpp"
#include "hardpoint/released_gil.hpp"

namespace py = pybind11;

namespace hp {

void bind_experts(py::module_& m) {
  const py::call_guard<hardpoint::ReleasedGil> unlocked;
  m.def("gated_columns", &gated_columns);
  m.def("experts_workspace_bytes", &experts_workspace_bytes, py::kw_only(), py::arg("tokens"), py::arg("top_k"),
        py::arg("num_experts"), py::arg("hidden"), py::arg("intermediate"));
  m.def(
      "experts",
      [](int dtype, int64_t num_experts, int64_t hidden, int64_t intermediate, int activation, Address gate_up, Address down,
         Address gate_up_bias, Address down_bias, Address x, int64_t x_stride, int64_t tokens, int64_t top_k, Address experts,
         Address weights, Address out, int64_t out_stride, Address workspace, int64_t workspace_bytes) {
        ExpertsCall call;
        call.dtype = static_cast<DType>(dtype);
        call.num_experts = num_experts;
        call.hidden = hidden;
        call.intermediate = intermediate;
        call.activation = static_cast<Epilogue>(activation);
        call.gate_up = at<void>(gate_up);
        call.down = at<void>(down);
        call.gate_up_bias = at<void>(gate_up_bias);
        call.down_bias = at<void>(down_bias);
        call.x = at<void>(x);
        call.x_stride = x_stride;
        call.tokens = tokens;
        call.top_k = top_k;
        call.experts = at<int32_t>(experts);
        call.weights = at<float>(weights);
        call.out = at<void>(out);
        call.out_stride = out_stride;
        call.workspace = {at<void>(workspace), workspace_bytes};
        run_experts(call);
      },
      unlocked, py::kw_only(), py::arg("dtype"), py::arg("num_experts"), py::arg("hidden"), py::arg("intermediate"),
      py::arg("activation"), py::arg("gate_up"), py::arg("down"), py::arg("gate_up_bias"), py::arg("down_bias"), py::arg("x"),
      py::arg("x_stride"), py::arg("tokens"), py::arg("top_k"), py::arg("experts"), py::arg("weights"), py::arg("out"),
      py::arg("out_stride"), py::arg("workspace"), py::arg("workspace_bytes"));
  m.def(
      "route",
      [](Address logits, int64_t stride, int64_t rows, int64_t n, int dtype, int64_t k, bool renormalise, Address experts,
         Address weights) {
        route(at<void>(logits), stride, rows, n, static_cast<DType>(dtype), k, renormalise, at<int32_t>(experts), at<float>(weights));
      },
      unlocked);
}

}  // namespace hp
