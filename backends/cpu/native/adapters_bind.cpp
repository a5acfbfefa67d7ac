// Python face of the adapters. Tensors come as addresses: hardpoint_cpu.adapters checks shapes, dtypes and lifetimes before it calls.
#include "adapters.hpp"

#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

#include "bind.hpp"
#include "hardpoint/released_gil.hpp"

namespace py = pybind11;

namespace hp {

void bind_adapters(py::module_& m) {
  py::class_<AdapterMatrices>(m, "AdapterMatrices", "The adapters of one linear layer, in slots. Keeps addresses only: the tensors must outlive it.")
      .def(py::init([](int dtype, int64_t columns, int64_t rows, int64_t max_rank, int64_t slots, Address down, int64_t down_stride, Address up,
                       int64_t up_stride, Address ranks, Address scales, int64_t parts_stride, Address spans, int64_t parts) {
             return AdapterMatrices{static_cast<DType>(dtype), columns,       rows,          max_rank,         slots,
                                    at<void>(down),            down_stride,   at<void>(up),  up_stride,        at<int32_t>(ranks),
                                    at<float>(scales),         parts_stride,  at<int32_t>(spans), parts};
           }),
           py::kw_only(), py::arg("dtype"), py::arg("columns"), py::arg("rows"), py::arg("max_rank"), py::arg("slots"), py::arg("down"),
           py::arg("down_stride"), py::arg("up"), py::arg("up_stride"), py::arg("ranks"), py::arg("scales"), py::arg("parts_stride"),
           py::arg("spans"), py::arg("parts"));
  m.def(
      "add_adapters",
      [](const AdapterMatrices& matrices, Address x, int64_t x_stride, Address out, int64_t out_stride, Address tokens, Address slots,
         Address starts, int64_t groups) {
        AdapterCall call;
        call.matrices = matrices;
        call.x = at<void>(x);
        call.x_stride = x_stride;
        call.out = at<void>(out);
        call.out_stride = out_stride;
        std::vector<AdapterItem> items;
        const int32_t *slot = at<int32_t>(slots), *start = at<int32_t>(starts);
        for (int64_t i = 0; i < groups; ++i) append_items(slot[i], at<int64_t>(tokens) + start[i], start[i + 1] - start[i], items);
        add_adapters(call, items);
      },
      py::call_guard<hardpoint::ReleasedGil>());
}

}  // namespace hp
